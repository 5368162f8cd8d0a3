"""Checks before a comparison: a report is complete, and both reports used the same settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lipaudit.errors import BaselineError
from lipaudit.tables import Note, Report, Run, Section
from lipaudit.tables.trials import is_repeat, parse_budget

FREE = frozenset(
    {"seed", "batch_size", "device", "samples", "map", "concat", "layer_within", "splitting"}
)
"""Settings that may differ between reports: they never change a value, only whether it exists."""
FALLBACKS = frozenset({"attack-skipped", "attack-replaced", "fewer-targets"})
"""Codes of notes on attacks that did less than requested."""
REPEAT = "Measure with the baseline's settings: lipaudit gate MODEL --baseline FILE."


def find_fault(report: Report, section: Section) -> str:
    """Return why figures are not reliable (incomplete, empty, not converged), or nothing.

    A shard is incomplete: it has some of the samples.
    """
    if report.shard is not None:
        return f"the report is {report.shard.name}: join all shards with lipaudit merge"
    if section.failure is not None:
        return f"{section.measure} failed: {section.failure.reason}"
    if report.failures:
        return f"the report is partial: {', '.join(report.failures)} failed"
    if report.unmeasured:
        return "the report is partial: the time limit ended its run"
    if report.status != "complete":
        return "the report is partial: its run was cut short"
    if section.samples.get("ids") == () or not (section.rows or section.samples):
        return f"section {section.measure} has no samples"
    flags = section.samples.get("converged", ())
    rows = [row.get("converged") for row in section.rows]
    failed = sum(not flag for flag in flags) or sum(flag is False for flag in rows)
    what = "samples" if flags else "rows"
    return f"{section.measure}: {failed} {what} did not converge" if failed else ""


def require_same_conditions(current: Run, baseline: Run) -> None:
    """Refuse to compare runs of different precision, preprocessing or score.

    Raises:
        BaselineError: with what differs.
    """
    if current.dtype != baseline.dtype:
        raise BaselineError(f"the dtype changed from {baseline.dtype} to {current.dtype}", REPEAT)
    if changed := _list_changes(*_read_preprocessing(current, baseline)):
        raise BaselineError(f"preprocessing differs: {changed}", REPEAT)
    new, old = (run.options.get("score", "none") for run in (current, baseline))
    if new != old:
        raise BaselineError(f"--score changed from {old} to {new}", REPEAT)


def find_obstacle(current: Report, baseline: Report, section: Section, before: Section) -> str:
    """Return why two sections cannot be compared (other settings, weaker attacks), or nothing.

    Args:
        current: the report to judge.
        baseline: the report to compare it with.
        section: the section of the current report.
        before: the section of the baseline.
    """
    measure, both = section.measure, (section, before)
    if changes := _list_changed_settings(section, before):
        return f"{measure}: settings differ: {changes}"
    # Against weaker attacks than the baseline's, robustness would look better.
    if measure in ("attack", "certify"):
        new, old = ({row.key for row in s.rows if "attack" in row} for s in both)
        if missing := sorted(map(str, old - new)):
            return f"attack: weaker than the baseline, which also ran {'; '.join(missing)}"
        less, known = ({n.text for n in s.notes if n.code in FALLBACKS} for s in both)
        if fresh := sorted(less - known):
            return f"{measure}: weaker than the baseline: {'; '.join(fresh)}"
    # Norms of different outputs, such as an encoder's and a classifier's.
    now, then = ({f"{r.from_} to {r.to}" for r in s.rows if "from" in r} for s in both)
    if lost := ", ".join(sorted(then - now)):
        return f"{measure}: the norms of {lost} are now norms of {', '.join(sorted(now))}"
    other_suite = current.run.data.suite_id != baseline.run.data.suite_id
    if other_suite and not all(s.samples.get("ids") for s in both):
        return f"{measure}: the samples differ from the baseline's"
    return ""


def has_same_weights(current: Report, baseline: Report) -> bool:
    """Say whether two reports have the same weights."""
    new, old = current.run.model.weights_sha256, baseline.run.model.weights_sha256
    return bool(new) and new == old


def has_other_starts(current: Section, baseline: Section) -> bool:
    """Say whether the attacks of two sections have other random starts: by seed or by samples.

    The random start of a sample depends on its position. So with more, fewer or reordered samples,
    an attack may break other samples of the same model.
    """
    new, old = ((s.settings.get("seed"), s.samples.get("ids")) for s in (current, baseline))
    return current.measure == "attack" and new != old


def list_differences(current: Report, baseline: Report) -> dict[str, str]:
    """Return the differences between the conditions of two runs, by name."""
    new, old = current.run, baseline.run
    pairs: dict[str, tuple[object, object]] = {
        "seed": (new.seed, old.seed),
        "device": (new.device.split(":")[0], old.device.split(":")[0]),
        "dtype": (new.dtype, old.dtype),
        "data": (new.data.spec, old.data.spec),
        "preprocess": _read_preprocessing(new, old),
    }
    for name in sorted(old.options.keys() | new.options.keys()):
        pairs[name] = new.options.get(name, "not given"), old.options.get(name, "not given")
    for name in sorted(old.versions.keys() & new.versions.keys()):
        pairs[name] = new.versions[name], old.versions[name]
    texts = {n: f"{n}: {b} became {a}" for n, (a, b) in pairs.items() if a != b}
    attack, before = current.section("attack"), baseline.section("attack")
    restarted = attack and before and has_other_starts(attack, before)
    if restarted and has_same_weights(current, baseline):
        texts["starts"] = (
            "attack: the weights are equal, but the random starts differ (other seed, number or "
            "order of samples). Differences under attack are chance"
        )
    if repeats := max((sum(map(is_repeat, s.ids)) for s in current.sections), default=0):
        texts["repeats"] = f"duplicate samples count once: {repeats} were left out"
    if classes := _compare_classes(current, baseline):
        texts["classes"] = classes
    return texts


def list_warnings(current: Report, baseline: Report) -> tuple[str, ...]:
    """Return the warnings of the current report, and whether the baseline has them, too.

    Each names the sections that it affects.
    """
    affected: dict[Note, list[str]] = {}
    for section in current.sections:
        for note in section.notes:
            if note.level == "warning":
                affected.setdefault(note, []).append(section.measure)
    known = {n.code for s in baseline.sections for n in s.notes if n.level == "warning"}
    return tuple(
        f"{', '.join(where)}: {note.text}"
        + ("" if note.code in known else " (not in the baseline)")
        for note, where in affected.items()
    )


def _compare_classes(current: Report, baseline: Report) -> str:
    """Say which classes have other names than in the baseline, or that one report lacks names."""
    pairs = ((each, baseline.section(each.measure)) for each in current.sections)
    both = [(section.classes, other.classes) for section, other in pairs if other is not None]
    renamed = {
        number: f"class {number}: {old[number]!r} became {name!r}"
        for new, old in both
        for number, name in new.items()
        if old.get(number, name) != name
    }
    alone = next((pair for pair in both if bool(pair[0]) != bool(pair[1])), None)
    if renamed or alone is None:
        return ", ".join(renamed.values())
    which = "only the new report" if alone[0] else "only the baseline"
    known = sorted((alone[0] or alone[1]).items())
    names = ", ".join(f"{number} is {name!r}" for number, name in known)
    return f"{which} names its classes ({names}), so their order cannot be checked"


def _list_changed_settings(current: Section, baseline: Section) -> str:
    """List changed settings; a list (radii, attacks, layers) may gain entries but lose none."""
    new, old = _to_json_values(current.settings), _to_json_values(baseline.settings)
    lists = {k for k in new if isinstance(new[k], list) and isinstance(old.get(k), list)}
    single = [{k: v for k, v in s.items() if k not in lists | FREE} for s in (new, old)]
    changes = [_list_changes(*single)]
    for key in sorted(lists - FREE):
        # Radii are equal in any notation: 1/20 and 0.05.
        read: Callable[[Any], Any] = parse_budget if key == "eps" else lambda item: item
        known = [read(item) for item in new[key]]
        lost = [str(item) for item in old[key] if read(item) not in known]
        changes.append(f"{key} lacks {', '.join(lost)}" if lost else "")
    return "; ".join(filter(None, changes))


def _read_preprocessing(new: Run, old: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the preprocessing of two runs, without a resizing that only one of them records.

    Ids of samples come from pixels before mean and std, so another resizing gives other samples.
    """
    both = {"mean", "std"} | (new.preprocess.keys() & old.preprocess.keys())
    one, two = ({k: v for k, v in run.preprocess.items() if k in both} for run in (new, old))
    return _to_json_values(one), _to_json_values(two)


def _list_changes(new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    """List the entries that differ: `tol 0.0001 became 0.01`."""
    ends = {key: [each.get(key, "unset") for each in (old, new)] for key in sorted({**new, **old})}
    # None is a setting that the user did not type.
    return ", ".join(
        f"{key} {' became '.join('not given' if v is None else str(v) for v in both)}"
        for key, both in ends.items()
        if both[0] != both[1]
    )


def _to_json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON reads them, so that a fresh report equals a stored one."""
    return json.loads(json.dumps(dict(values), default=str))
