"""The conditions of a comparison: which settings may differ, and what may be a baseline.

A baseline is an ordinary report, reduced so that it fits into git.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lipaudit import schema
from lipaudit.errors import BaselineError, InputError, LipauditError, UsageError
from lipaudit.gate import pairing
from lipaudit.gate.rules import Rule, choose_rules
from lipaudit.tables import Report, Section
from lipaudit.tables.report import SCORES
from lipaudit.tables.trials import WHOLE, is_repeat, parse_budget

FREE = frozenset(
    {"seed", "batch_size", "device", "samples", "map", "concat", "layer_within", "splitting"}
    # The direction of shares is the output of their rows, which is compared.
    | {"shares", "direction"}
    # Of a denoiser the hash counts, not the place.
    | {"denoiser"}
)
"""Settings that may differ between reports: they never change a value, only whether it exists."""
BINDING = frozenset({"dtype", "preprocess", "score"})
"""Conditions of a run that change its values: the gate wants them equal."""
SPOILING = frozenset({"dtype", "preprocess", "starts"})
"""Conditions that a comparison shows as a warning."""
FALLBACKS = frozenset({"attack-skipped", "attack-replaced", "fewer-targets"})
"""Codes of notes on attacks that did less than requested."""
ABSENT = "not given"
SAVE = "Save a baseline with lipaudit baseline save REPORT."


def load_baseline(path: Path) -> Report:
    """Read a baseline.

    Raises:
        BaselineError: the file is missing, damaged or of a newer schema.
    """
    try:
        return schema.load(path)
    except InputError as error:
        advice = error.advice if path.exists() else SAVE
        raise BaselineError(f"baseline: {error.message}", advice) from None


def require_samples(baseline: Report, ids: Mapping[str, Sequence[str]]) -> None:
    """Refuse a measurement on other samples than the baseline's.

    Args:
        baseline: the baseline.
        ids: ids of the samples to measure, by measure.

    Raises:
        BaselineError: too few samples are in the baseline.
    """
    known = {section.measure: section.ids for section in baseline.sections if section.ids}
    try:
        for measure in (name for name in known if name in ids):
            pairing.find_shared(measure, ids[measure], known[measure], pairing.ALL_BUT_FEW)
    except BaselineError as error:
        advice = f"Give the baseline's samples ({baseline.run.data.spec}) with --data."
        raise BaselineError(error.message, advice) from None


def promote(report: Report, reason: str) -> Report:
    """Turn a report into a baseline: the figures that the gate reads, without wall times.

    Arrays that no rule reads (maps) are left out.

    Args:
        report: a finished report.
        reason: why the report is accepted; stored in the run.

    Raises:
        UsageError: the reason is missing.
        BaselineError: the report cannot be a baseline.
    """
    if not reason.strip():
        raise UsageError("a baseline needs a reason", "Add a reason: --reason 'first release'.")
    if reasons := find_problems(report):
        text = f"this report cannot be a baseline: {reasons[0]}"
        raise BaselineError(text, "Measure again.")
    sections = []
    for section in report.sections:
        # Arrays behind rows stay, so that rows can be computed again for shared samples.
        columns = section.columns
        behind = [column.reduction for column in columns.values() if column.reduction]
        kept = {
            SCORES,
            *columns,
            *(name for how in behind for name in (how.values, how.per, how.weights)),
        }
        timed = {"seconds": None} if "seconds" in columns else {}
        update = {
            "rows": tuple(row.replace(**timed) for row in section.rows),
            "arrays": {name: array for name, array in section.arrays.items() if name in kept},
        }
        sections.append(section.model_copy(update=update))
    run = report.run.model_copy(update={"reason": reason.strip()})
    return report.model_copy(update={"run": run, "sections": tuple(sections)})


def find_problems(report: Report) -> list[str]:
    """Return the reasons why a report cannot be a baseline.

    It must be complete and converged, with finite figures for the default rules.
    """
    reasons = [why for s in report.sections if (why := pairing.find_fault(report, s))]
    rules = list[Rule]()
    with suppress(UsageError):  # no default rule exists for its sections
        rules += choose_rules(report)
    for rule in rules:
        section = report.section(rule.measure)
        assert section is not None
        try:
            pairing.read_trusted(rule, report, section)
        except LipauditError as error:
            reasons.append(error.message)
    return list(dict.fromkeys(reasons)) or ([] if report.sections else ["it has no sections"])


# Settings that exclude a comparison


def find_obstacle(current: Report, baseline: Report, measure: str, *, lenient: bool) -> str:
    """Return why sections cannot be compared (other settings, weaker attacks), or nothing.

    Args:
        current: the report to judge.
        baseline: the report to compare it with.
        measure: the measure of the sections.
        lenient: whether precision and preprocessing may differ.
    """
    both = [s for r in (current, baseline) for s in r.sections if s.measure == measure]
    section, before = both
    if changes := _list_changed_settings(section, before):
        return f"{measure}: settings differ: {changes}"
    # Against weaker attacks than the baseline's, robustness would look better.
    new, old = ({str(row.key): row.key for row in s.rows if "attack" in row} for s in both)
    less, known = ({n.text for n in s.notes if n.code in FALLBACKS} for s in both)
    lacks = sorted(name for name, key in old.items() if key not in new.values())
    if weaker := lacks + sorted(less - known):
        return f"{measure}: weaker than the baseline: {'; '.join(weaker)}"
    # Norms of different outputs, such as an encoder's and a classifier's.
    now, then = ({f"{r.from_} to {r.to}" for r in s.rows if "from" in r} for s in both)
    if lost := ", ".join(sorted(then - now)):
        return f"{measure}: the norms of {lost} are now norms of {', '.join(sorted(now))}"
    other_suite = current.run.data.suite_id != baseline.run.data.suite_id
    # Figures of the weights alone depend on no sample.
    judged = ((s, n, c.domain) for s in both for n, c in s.columns.items() if c.better)
    cells = (row.get(n) for s, n, domain in judged if domain != "the weights" for row in s.rows)
    of_data = any(cell is not None for cell in cells)
    if other_suite and of_data and not all(s.samples.get("ids") for s in both):
        return f"{measure}: the samples differ from the baseline's"
    differing = [] if lenient else list_differences(current, baseline)
    return "; ".join(text for kind, text in differing if kind in BINDING)


def has_same_weights(current: Report, baseline: Report) -> bool:
    """Say whether two reports have the same weights, and predictions of the same arithmetic."""
    new, old = current.run, baseline.run
    if new.options.get("autocast") != old.options.get("autocast"):
        return False
    digest = new.model.weights_sha256
    return bool(digest) and digest == old.model.weights_sha256


def has_other_starts(current: Section | None, baseline: Section | None) -> bool:
    """Say whether the attacks of two sections have other random starts: by seed or by samples.

    The random start of a sample depends on its position. So with more, fewer or reordered samples,
    an attack may break other samples of the same model.
    """
    if current is None or baseline is None or current.measure != "attack":
        return False
    new, old = ((s.settings.get("seed"), s.samples.get("ids")) for s in (current, baseline))
    return new != old


def list_examples(report: Report) -> dict[str, str]:
    """Return the examples that a run saved and other models can be given: paths and SHA-256.

    Embeddings of texts do not transfer, and neither words nor patches have a ball to move into.
    """
    section = report.section("attack")
    balls = section and any(row.norm not in WHOLE for row in section.rows)
    return section.files if section and balls and "mean" in report.run.preprocess else {}


def list_differences(current: Report, baseline: Report) -> list[tuple[str, str]]:
    """Return the differences between the conditions of two runs: the kind of each, and a text."""
    new, old = _list_conditions(current), _list_conditions(baseline)
    # Another version may record more packages, and a resizing that was not recorded: ids of
    # samples come from resized pixels, so another resizing gives other samples.
    whole = {"preprocess mean", "preprocess std", *current.run.options, *baseline.run.options}
    names = [name for name in old | new if name in whole or (name in old and name in new)]
    pairs = ((name, old.get(name, ABSENT), new.get(name, ABSENT)) for name in names)
    found = [(n.split()[0], f"{n}: {was} became {now}") for n, was, now in pairs if was != now]
    now, then = current.section("attack"), baseline.section("attack")
    restarted = has_other_starts(now, then)
    if restarted and has_same_weights(current, baseline):
        text = (
            "attack: the weights are equal, but the random starts differ (other seed, number or "
            "order of samples). Differences under attack are chance"
        )
        found.append(("starts", text))
    tried, before = (
        any(row.get("attack") == "transfer" for row in each.rows) if each else None
        for each in (now, then)
    )
    if tried and before is False:
        text = "attack: worst includes transfer, examples of another model that the baseline"
        found.append(("transfer", f"{text} did not try"))
    elif tried is False and (saved := ", ".join(list_examples(baseline))):
        text = f"attack: the examples that the baseline saved ({saved}) were not tried again"
        found.append(("transfer", f"{text}; --transfer does"))
    if repeats := max((sum(map(is_repeat, s.ids)) for s in current.sections), default=0):
        found.append(("repeats", f"duplicate samples count once: {repeats} were left out"))
    return found


def _list_conditions(report: Report) -> dict[str, object]:
    """Return the conditions of a run by their names in messages."""
    run = report.run
    names = {n: name for section in report.sections for n, name in section.classes.items()}
    return {
        **{"seed": run.seed, "device": run.device.split(":")[0], "dtype": run.dtype},
        "data": run.data.spec,
        **{f"preprocess {k}": v for k, v in sorted(schema.to_json_values(run.preprocess).items())},
        **dict(sorted(run.options.items())),
        **dict(sorted(run.versions.items())),
        **{f"class {number}": repr(names[number]) for number in sorted(names)},
    }


def _list_changed_settings(current: Section, baseline: Section) -> str:
    """List changed settings; a list (radii, attacks, layers) may gain entries but lose none."""
    new, old = schema.to_json_values(current.settings), schema.to_json_values(baseline.settings)
    changes = []
    for key in sorted((new.keys() | old.keys()) - FREE):
        before, after = (each.get(key, "unset") for each in (old, new))
        if isinstance(before, list) and isinstance(after, list):
            read = _read_radius if key == "eps" else str
            known = [read(each) for each in after]
            lost = ", ".join(str(each) for each in before if read(each) not in known)
            changes += [f"{key} lacks {lost}"] if lost else []
        elif before != after:
            ends = (ABSENT if each is None else str(each) for each in (before, after))
            changes.append(f"{key} {' became '.join(ends)}")
    return "; ".join(changes)


def _read_radius(text: object) -> object:
    """Return a radius that is equal in any notation: 1/20 and 0.05; foreign texts as they are."""
    with suppress(UsageError):
        return parse_budget(str(text))
    return str(text)
