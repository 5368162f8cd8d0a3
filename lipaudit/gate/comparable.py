"""Checks before a comparison: a report is complete, and both reports used the same settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lipaudit.errors import BaselineError
from lipaudit.tables import Note, Report, Run, Section
from lipaudit.tables.samples import is_repeat
from lipaudit.tables.trials import parse_budget

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


def require_same_protocol(
    current: Report, baseline: Report, section: Section, before: Section
) -> None:
    """Refuse to compare sections with different settings.

    Args:
        current: the report to judge.
        baseline: the report to compare it with.
        section: the section of the current report.
        before: the section of the baseline.

    Raises:
        BaselineError: with what differs.
    """
    _require_same_settings(section, before)
    _require_same_attacks(section, before)
    _require_same_map(section, before)
    suites = {report.run.data.suite_id for report in (current, baseline)}
    if not all(s.samples.get("ids") for s in (section, before)) and len(suites) > 1:
        raise BaselineError(f"{section.measure}: the samples differ from the baseline's", REPEAT)


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
    seen, before = _read_preprocessing(new, old)
    pairs: dict[str, tuple[object, object]] = {
        "seed": (new.seed, old.seed),
        "device": (new.device.split(":")[0], old.device.split(":")[0]),
        "dtype": (new.dtype, old.dtype),
        "data": (new.data.spec, old.data.spec),
        "preprocess": (_to_json_values(seen), _to_json_values(before)),
    }
    for name in sorted(old.options.keys() | new.options.keys()):
        pairs[name] = new.options.get(name, "not given"), old.options.get(name, "not given")
    for name in sorted(old.versions.keys() & new.versions.keys()):
        pairs[name] = new.versions[name], old.versions[name]
    changed = {n: f"{n}: {b} became {a}" for n, (a, b) in pairs.items() if a != b}
    return (
        changed
        | _explain_starts(current, baseline)
        | _count_repeats(current)
        | _list_renamed_classes(current, baseline)
    )


def list_warnings(report: Report) -> dict[str, Note]:
    """Return the warnings of a report, each with the sections that it affects."""
    spoiled: dict[Note, list[str]] = {}
    for section in report.sections:
        for note in section.notes:
            if note.level == "warning":
                spoiled.setdefault(note, []).append(section.measure)
    return {f"{', '.join(where)}: {note.text}": note for note, where in spoiled.items()}


def word_warnings(current: Report, baseline: Report) -> tuple[str, ...]:
    """Return the warnings of the current report, and whether the baseline has them, too."""
    known = {note.code for note in list_warnings(baseline).values()}
    both = {True: "", False: " (not in the baseline)"}
    return tuple(f"{text}{both[n.code in known]}" for text, n in list_warnings(current).items())


def _count_repeats(report: Report) -> dict[str, str]:
    """Note how many samples repeat others: each counts once."""
    most = max((sum(map(is_repeat, s.ids)) for s in report.sections), default=0)
    text = f"duplicate samples count once: {most} were left out"
    return {"repeats": text} if most else {}


def _list_renamed_classes(current: Report, baseline: Report) -> dict[str, str]:
    """Note which classes have other names than in the baseline, or that one report lacks names."""
    pairs = [(each, baseline.section(each.measure)) for each in current.sections]
    both = [(section.classes, other.classes) for section, other in pairs if other is not None]
    renamed = {
        number: f"class {number}: {old[number]!r} became {name!r}"
        for new, old in both
        for number, name in new.items()
        if old.get(number, name) != name
    }
    if renamed:
        return {"classes": ", ".join(renamed.values())}
    alone = next((pair for pair in both if bool(pair[0]) != bool(pair[1])), None)
    if alone is None:
        return {}
    which = "only the new report" if alone[0] else "only the baseline"
    known = sorted((alone[0] or alone[1]).items())
    names = ", ".join(f"{number} is {name!r}" for number, name in known)
    text = f"{which} names its classes ({names}), so their order cannot be checked"
    return {"classes": text}


def _explain_starts(current: Report, baseline: Report) -> dict[str, str]:
    new, old = current.section("attack"), baseline.section("attack")
    if not (new and old and has_same_weights(current, baseline) and has_other_starts(new, old)):
        return {}
    text = (
        "attack: the weights are equal, but the random starts differ (other seed, number or "
        "order of samples). Differences under attack are chance"
    )
    return {"starts": text}


def _require_same_settings(current: Section, baseline: Section) -> None:
    """Compare settings; a list (radii, attacks, layers) may gain entries but lose none."""
    new, old = _to_json_values(current.settings), _to_json_values(baseline.settings)
    lists = {k for k in new if isinstance(new[k], list) and isinstance(old.get(k), list)}
    single = [{k: v for k, v in s.items() if k not in lists | FREE} for s in (new, old)]
    changes = [_list_changes(*single)]
    for key in sorted(lists - FREE):
        # Radii are equal in any notation: 1/20 and 0.05.
        new[key], old[key] = (
            [parse_budget(item) if key == "eps" else item for item in values[key]]
            for values in (new, old)
        )
        lost = [getattr(item, "text", str(item)) for item in old[key] if item not in new[key]]
        changes.append(f"{key} lacks {', '.join(lost)}" if lost else "")
    if any(changes):
        text = "; ".join(filter(None, changes))
        raise BaselineError(f"{current.measure}: settings differ: {text}", REPEAT)


def _require_same_attacks(current: Section, baseline: Section) -> None:
    """Refuse weaker attacks than the baseline's: robustness would look better."""
    if current.measure not in ("attack", "certify"):
        return
    new, old = ({row.key for row in s.rows if "attack" in row} for s in (current, baseline))
    if missing := sorted(map(str, old - new)):
        raise BaselineError(
            f"attack: weaker than the baseline, which also ran {'; '.join(missing)}", REPEAT
        )
    fallbacks, known = (
        {note.text for note in s.notes if note.code in FALLBACKS} for s in (current, baseline)
    )
    if fresh := sorted(fallbacks - known):
        raise BaselineError(
            f"{current.measure}: weaker than the baseline: {'; '.join(fresh)}", REPEAT
        )


def _require_same_map(current: Section, baseline: Section) -> None:
    """Refuse to compare norms of different outputs, such as an encoder's and a classifier's."""
    new, old = (
        {f"{row.from_} to {row.to}" for row in s.rows if "from" in row}
        for s in (current, baseline)
    )
    if old - new:
        lost, now = ", ".join(sorted(old - new)), ", ".join(sorted(new))
        raise BaselineError(
            f"{current.measure}: the norms of {lost} are now norms of {now}", REPEAT
        )


def _read_preprocessing(new: Run, old: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the preprocessing of two runs, without a resizing that only one of them records.

    Ids of samples come from pixels before mean and std, so another resizing gives other samples.
    """
    both = {"mean", "std"} | (new.preprocess.keys() & old.preprocess.keys())
    one, two = ({k: v for k, v in run.preprocess.items() if k in both} for run in (new, old))
    return one, two


def _list_changes(new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    """List the entries that differ: `tol 0.0001 became 0.01`."""
    new, old = _to_json_values(new), _to_json_values(old)
    ends = {key: [each.get(key, "unset") for each in (old, new)] for key in sorted({**new, **old})}
    return ", ".join(
        f"{key} {_format_setting(before)} became {_format_setting(now)}"
        for key, (before, now) in ends.items()
        if before != now
    )


def _format_setting(value: Any) -> Any:
    """Return a setting as the user types it; None is never typed."""
    return "not given" if value is None else value


def _to_json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON reads them, so that a fresh report equals a stored one."""
    return json.loads(json.dumps(dict(values), default=str))
