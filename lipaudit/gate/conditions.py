"""The conditions of a comparison: which settings may differ, and what may be a baseline.

A baseline is an ordinary report, reduced so that it fits into git.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lipaudit import schema
from lipaudit.errors import BaselineError, InputError, LipauditError, UsageError
from lipaudit.gate import pairing, readings
from lipaudit.gate.rules import Rule, choose_rules
from lipaudit.measures import load_measures
from lipaudit.settings import MODEL, RunOptions
from lipaudit.tables import Report, Section
from lipaudit.tables.report import SCORES
from lipaudit.tables.trials import WHOLE, is_repeat, parse_budget

FREE = frozenset(
    {"seed", "batch_size", "device", "samples", "map", "concat", "layer_within", "splitting"}
    # The direction of shares is the output of their rows, which is compared.
    | {"shares", "direction"}
)
"""Settings that may differ between reports: they never change a value, only whether it exists."""
BINDING = frozenset({"dtype", "preprocess", "score"})
"""Conditions of a run that change its values: the gate wants them equal."""
SPOILING = frozenset({"dtype", "preprocess", "starts"})
"""Conditions that a comparison shows as a warning."""
TYPED = frozenset({"class_names", "mean", "std", "input_size", "preprocess"})
"""Options of the model that are not compared as typed: their effect is,
or they change no prediction."""
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
    try:
        for section in baseline.sections:
            measure = section.measure
            if section.ids and measure in ids:  # called for its error: too few shared samples
                pairing.find_shared(
                    measure, ids[measure], known=section.ids, least=pairing.ALL_BUT_FEW
                )
    except BaselineError as error:
        advice = f"Give the baseline's samples ({baseline.run.data.spec}) with --data."
        raise BaselineError(error.message, advice) from None


def promote(report: Report, reason: str) -> Report:
    """Turn a report into a baseline: keep the figures that the gate reads.

    Wall times and arrays that no rule reads (maps) are left out.

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
    sections = [_reduce_section(section) for section in report.sections]
    run = report.run.model_copy(update={"reason": reason.strip()})
    return report.model_copy(update={"run": run, "sections": tuple(sections)})


def _reduce_section(section: Section) -> Section:
    """Return a section without wall times, and without arrays that no rule reads."""
    # Arrays from which rows are computed are kept: a gate computes rows again from the samples
    # that both reports have.
    kept = {SCORES, *section.columns}
    for column in section.columns.values():
        reduction = column.reduction
        if reduction is not None:
            kept |= {reduction.values, reduction.per, reduction.weights}
    arrays = {name: array for name, array in section.arrays.items() if name in kept}
    rows = section.rows
    if "seconds" in section.columns:
        rows = tuple(row.replace(seconds=None) for row in rows)
    return section.model_copy(update={"rows": rows, "arrays": arrays})


def find_problems(report: Report) -> list[str]:
    """Return the reasons why a report cannot be a baseline.

    It must be complete and converged, with finite figures for the default rules.
    """
    reasons = []
    for section in report.sections:
        fault = readings.find_fault(report, section)
        if fault:
            reasons.append(fault)
    rules: tuple[Rule, ...] = ()
    with suppress(UsageError):  # no default rule exists for its sections
        rules = choose_rules(report)
    for rule in rules:
        judged = report.section(rule.measure)
        assert judged is not None
        try:
            readings.read_trusted(rule, report, judged)
        except LipauditError as error:
            reasons.append(error.message)
    if not report.sections:
        reasons.append("it has no sections")
    return list(dict.fromkeys(reasons))


# Settings that exclude a comparison


def find_obstacle(current: Report, baseline: Report, measure: str, *, lenient: bool) -> str:
    """Return why sections cannot be compared (other settings, weaker attacks), else "".

    Args:
        current: the report to judge.
        baseline: the report to compare it with.
        measure: the measure of the sections.
        lenient: whether precision and preprocessing may differ.
    """
    section = current.section(measure)
    before = baseline.section(measure)
    assert section is not None
    assert before is not None
    changes = _list_changed_settings(section, before)
    if changes:
        return f"{measure}: settings differ: {changes}"
    # Against weaker attacks than the baseline's, robustness would look better.
    weaker = _list_lost_attacks(section, before)
    if weaker:
        return f"{measure}: weaker than the baseline: {'; '.join(weaker)}"
    # Norms of different outputs, such as `pixels to features` (an encoder) and `pixels to logits`
    # (a classifier), cannot be compared.
    paths = _list_paths(section)
    lost = ", ".join(sorted(_list_paths(before) - paths))
    if lost:
        return f"{measure}: the norms of {lost} are now norms of {', '.join(sorted(paths))}"
    other_suite = current.run.data.suite_id != baseline.run.data.suite_id
    # Sections with different samples can be compared on the shared samples, if samples have ids.
    have_ids = section.ids and before.ids
    if other_suite and not have_ids and any(map(_depends_on_samples, (section, before))):
        return f"{measure}: the samples differ from the baseline's"
    if lenient:
        return ""
    # A gate also needs the same dtype, preprocessing and score (BINDING).
    binding = [text for kind, text in list_differences(current, baseline) if kind in BINDING]
    return "; ".join(binding)


def _list_lost_attacks(section: Section, before: Section) -> list[str]:
    """Return the reasons why the attacks of a section are weaker than before; empty if none.

    A reason is an attack that is missing now, or a new note that an attack was skipped, was
    replaced or tried fewer targets.

    Args:
        section: the section of the current report.
        before: the section of the baseline.
    """
    # `key`: the attack and ball of a row.
    attacks = {row.key for row in section.rows if "attack" in row}
    lost = {str(row.key) for row in before.rows if "attack" in row and row.key not in attacks}
    fallbacks = {note.text for note in section.notes if note.code in FALLBACKS}
    old_fallbacks = {note.text for note in before.notes if note.code in FALLBACKS}
    return sorted(lost) + sorted(fallbacks - old_fallbacks)


def _list_paths(section: Section) -> set[str]:
    """Return the pairs of input and output of the norms in a section: `pixels to logits`."""
    return {f"{row.from_} to {row.to}" for row in section.rows if "from" in row}


def _depends_on_samples(section: Section) -> bool:
    """Return whether a section has a figure to judge that depends on samples, not only weights."""
    for name, column in section.columns.items():
        of_samples = column.better and column.domain != "the weights"
        if of_samples and any(row.get(name) is not None for row in section.rows):
            return True
    return False


def has_same_weights(current: Report, baseline: Report) -> bool:
    """Return whether two reports are of the same weights in the same model.

    The same weights may predict other classes: in another architecture (`arch`, `model_kwargs`),
    with rounded activations (`autocast`), or behind another preprocessing. They score otherwise
    with another `score`.
    """
    digest = current.run.model.weights_sha256
    if not digest or digest != baseline.run.model.weights_sha256:
        return False
    of_model = {name for name, each in RunOptions.options().items() if each.panel == MODEL}
    # What the run did to its inputs has names such as `preprocess mean`, of the kind `preprocess`.
    # The option `preprocess` has the same kind, and its effect is among them.
    kinds = {
        kind
        for kind, text in _compare_conditions(current, baseline)
        if not text.startswith("preprocess:")
    }
    return kinds.isdisjoint((of_model - TYPED) | {"preprocess", "score"})


def has_other_starts(current: Report, baseline: Report) -> bool:
    """Return whether both reports have attacks, which began at different random starts.

    The start depends on the seed and on the position of a sample in the data. So with another
    seed, or with more, fewer or reordered samples, an attack may break other samples of the same
    model.
    """
    new = current.section("attack")
    old = baseline.section("attack")
    if new is None or old is None:
        return False
    return new.settings.get("seed") != old.settings.get("seed") or new.ids != old.ids


def list_examples(report: Report) -> dict[str, str]:
    """Return the saved adversarial examples that other models can try: SHA-256 by path.

    Only examples of images in a ball are returned. Embeddings belong to one model, and examples
    with changed words or patches have no ball around the sample.
    """
    section = report.section("attack")
    # Only images are normalised by a mean.
    if section is None or "mean" not in report.run.preprocess:
        return {}
    # The "norms" in WHOLE count changes (of words, of patches): they have no ball.
    has_balls = any(row.norm not in WHOLE for row in section.rows)
    return section.files if has_balls else {}


def list_differences(current: Report, baseline: Report) -> list[tuple[str, str]]:
    """Return the differences between two runs: the kind of each (`dtype`, `seed`), and a text."""
    found = [*_compare_conditions(current, baseline)]
    if has_other_starts(current, baseline) and has_same_weights(current, baseline):
        text = (
            "attack: the weights are equal, but the random starts differ (other seed, number or "
            "order of samples). Differences under attack are chance"
        )
        found.append(("starts", text))
    text = _compare_transfer(current.section("attack"), baseline.section("attack"), baseline)
    if text:
        found.append(("transfer", text))
    # The number of duplicates in the section that has most samples.
    repeats = max((sum(map(is_repeat, each.ids)) for each in current.sections), default=0)
    if repeats:
        found.append(("repeats", f"duplicate samples count once: {repeats} were left out"))
    return found


def _compare_conditions(current: Report, baseline: Report) -> Iterator[tuple[str, str]]:
    """Yield the conditions that differ (seed, device, versions, ...): the kind of each, a text."""
    new = _read_conditions(current)
    old = _read_conditions(baseline)
    # A condition that only one report has is a difference if it is in `always`. Other conditions
    # may be missing in an older report: later versions of lipaudit record more packages, and how
    # images are resized. (Another way to resize is found anyway: ids of samples are hashes of
    # resized pixels, so the ids change.)
    always = {"preprocess mean", "preprocess std", *current.run.options, *baseline.run.options}
    for name in old | new:
        was = old.get(name, ABSENT)
        now = new.get(name, ABSENT)
        compared = name in always or (name in old and name in new)
        if compared and was != now:
            kind, *_ = name.split()  # `preprocess` of `preprocess mean`
            yield kind, f"{name}: {was} became {now}"


def _compare_transfer(current: Section | None, before: Section | None, baseline: Report) -> str:
    """Return a text if one report tried adversarial examples that the other did not, else "".

    Transfer is an attack that tries adversarial examples which were found on another model. There
    are two cases: the current report has this attack and the baseline has not; or the baseline's
    run saved its own examples, and the current report did not try them.

    Args:
        current: the attack section of the current report.
        before: the attack section of the baseline.
        baseline: the baseline, which may have saved adversarial examples.
    """
    if current is None:
        return ""
    tried = tries_transfer(current)
    if tried and before is not None and not tries_transfer(before):
        return (
            "attack: worst includes transfer, examples of another model that the baseline did not "
            "try"
        )
    saved = ", ".join(list_examples(baseline))
    if saved and not tried:
        return (
            f"attack: the examples that the baseline saved ({saved}) were not tried again; "
            "--transfer does"
        )
    return ""


def tries_transfer(section: Section) -> bool:
    """Return whether a section of attacks tried adversarial examples of another model."""
    return any(row.get("attack") == "transfer" for row in section.rows)


def _read_conditions(report: Report) -> dict[str, object]:
    """Return the conditions that may change the figures of a run, by name: seed, device, ..."""
    run = report.run
    device, *_ = run.device.split(":")
    found: dict[str, object] = {
        "seed": run.seed,
        "device": device,
        "dtype": run.dtype,
        "data": run.data.spec,
    }
    for name, value in sorted(schema.to_json_values(run.preprocess).items()):
        found[f"preprocess {name}"] = value
    found |= sorted(run.options.items())
    found |= sorted(run.versions.items())
    classes: dict[int, str] = {}
    for section in report.sections:
        classes |= section.classes
    for number in sorted(classes):
        found[f"class {number}"] = repr(classes[number])
    return found


def _list_changed_settings(current: Section, baseline: Section) -> str:
    """Return a text of the settings that differ between two sections, "" if none does.

    A list (radii, attacks, layers) may have new entries but must not lose one.
    """
    new = schema.to_json_values(current.settings)
    old = schema.to_json_values(baseline.settings)
    # Settings that may differ: they change no figure (FREE), or are paths of files (`moved`).
    free = set(FREE)
    for measure in load_measures().values():
        free |= measure.moved.keys()
    changes = []
    for key in sorted((new.keys() | old.keys()) - free):
        before = old.get(key, "unset")
        after = new.get(key, "unset")
        if isinstance(before, list) and isinstance(after, list):
            lost = _list_lost_entries(key, before, after)
            if lost:
                changes.append(f"{key} lacks {lost}")
        elif before != after:
            changes.append(f"{key} {_write_setting(before)} became {_write_setting(after)}")
    return "; ".join(changes)


def _list_lost_entries(key: str, before: list[Any], after: list[Any]) -> str:
    """Return the entries of the list `before` that the list `after` does not have, as a text."""
    # Radii are compared as numbers: 1/20 and 0.05 are the same radius.
    parse: Callable[[object], object] = _read_radius if key == "eps" else str
    known = [parse(each) for each in after]
    return ", ".join(str(each) for each in before if parse(each) not in known)


def _write_setting(value: object) -> str:
    if value is None:
        return ABSENT
    return str(value)


def _read_radius(text: object) -> object:
    """Return a radius as a number, so that 1/20 equals 0.05; other texts as they are."""
    with suppress(UsageError):
        return parse_budget(str(text))
    return str(text)
