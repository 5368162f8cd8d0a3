"""Checks before a comparison: a report is complete, and both reports used the same settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lipaudit.tables import Report, Section
from lipaudit.tables.trials import is_repeat, parse_budget

FREE = frozenset(
    {"seed", "batch_size", "device", "samples", "map", "concat", "layer_within", "splitting"}
)
"""Settings that may differ between reports: they never change a value, only whether it exists."""
BINDING = frozenset({"dtype", "preprocess", "score"})
"""Conditions of a run that change its values: the gate wants them equal."""
SPOILING = frozenset({"dtype", "preprocess", "starts"})
"""Conditions that a comparison shows as a warning."""
FALLBACKS = frozenset({"attack-skipped", "attack-replaced", "fewer-targets"})
"""Codes of notes on attacks that did less than requested."""
REPEAT = "Measure with the baseline's settings: lipaudit gate MODEL --baseline FILE."


def find_fault(report: Report, section: Section, *, lenient: bool = False) -> str:
    """Return why figures are not reliable (incomplete, empty, not converged), or nothing.

    A shard is incomplete: it has some of the samples.

    Args:
        report: the report.
        section: one of its sections.
        lenient: whether only this section counts: others may have failed, and what did not
            converge is left out elsewhere.
    """
    if report.shard is not None:
        return f"the report is {report.shard.name}: join all shards with lipaudit merge"
    if section.failure is not None:
        return f"{section.measure} failed: {section.failure.reason}"
    if report.failures and not lenient:
        return f"the report is partial: {', '.join(report.failures)} failed"
    if report.unmeasured:
        return "the report is partial: the time limit ended its run"
    if report.status != "complete" and not report.failures:
        return "the report is partial: its run was cut short"
    if section.samples.get("ids") == () or not (section.rows or section.samples):
        return f"section {section.measure} has no samples"
    flags = section.samples.get("converged", ())
    rows = [row.get("converged") for row in section.rows]
    failed = sum(not flag for flag in flags) or sum(flag is False for flag in rows)
    what = "samples" if flags else "rows"
    return f"{section.measure}: {failed} {what} did not converge" if failed and not lenient else ""


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
    if other_suite and not all(s.samples.get("ids") for s in both):
        return f"{measure}: the samples differ from the baseline's"
    return ""


def has_same_weights(current: Report, baseline: Report) -> bool:
    """Say whether two reports have the same weights."""
    new, old = current.run.model.weights_sha256, baseline.run.model.weights_sha256
    return bool(new) and new == old


def has_other_starts(current: Section | None, baseline: Section | None) -> bool:
    """Say whether the attacks of two sections have other random starts: by seed or by samples.

    The random start of a sample depends on its position. So with more, fewer or reordered samples,
    an attack may break other samples of the same model.
    """
    if current is None or baseline is None or current.measure != "attack":
        return False
    new, old = ((s.settings.get("seed"), s.samples.get("ids")) for s in (current, baseline))
    return new != old


def list_differences(current: Report, baseline: Report) -> dict[str, str]:
    """Return the differences between the conditions of two runs, by name."""
    new, old = current.run, baseline.run
    pairs: dict[str, tuple[object, object]] = {
        "seed": (old.seed, new.seed),
        "device": (old.device.split(":")[0], new.device.split(":")[0]),
        "dtype": (old.dtype, new.dtype),
        "data": (old.data.spec, new.data.spec),
    }
    for group, before, after in (
        ("preprocess ", _to_json_values(old.preprocess), _to_json_values(new.preprocess)),
        ("", old.options, new.options),
        ("", old.versions, new.versions),
    ):
        for key in sorted(before.keys() | after.keys()):
            # Another version may record more packages, and a resizing that was not recorded: ids
            # of samples come from resized pixels, so another resizing gives other samples.
            whole = key in ("mean", "std") or before is old.options
            if whole or key in before.keys() & after.keys():
                pairs[group + key] = before.get(key, "not given"), after.get(key, "not given")
    texts = {name: f"{name}: {a} became {b}" for name, (a, b) in pairs.items() if a != b}
    restarted = has_other_starts(current.section("attack"), baseline.section("attack"))
    if restarted and has_same_weights(current, baseline):
        texts["starts"] = (
            "attack: the weights are equal, but the random starts differ (other seed, number or "
            "order of samples). Differences under attack are chance"
        )
    if repeats := max((sum(map(is_repeat, s.ids)) for s in current.sections), default=0):
        texts["repeats"] = f"duplicate samples count once: {repeats} were left out"
    names = {n: name for s in baseline.sections for n, name in s.classes.items()}
    renamed = {
        number: f"class {number}: {names[number]!r} became {name!r}"
        for section in current.sections
        for number, name in section.classes.items()
        if names.get(number, name) != name
    }
    return texts | ({"classes": ", ".join(renamed.values())} if renamed else {})


def _list_changed_settings(current: Section, baseline: Section) -> str:
    """List changed settings; a list (radii, attacks, layers) may gain entries but lose none."""
    new, old = _to_json_values(current.settings), _to_json_values(baseline.settings)
    changes = []
    for key in sorted((new.keys() | old.keys()) - FREE):
        before, after = (each.get(key, "unset") for each in (old, new))
        if isinstance(before, list) and isinstance(after, list):
            # Radii are equal in any notation: 1/20 and 0.05.
            known = [parse_budget(each) if key == "eps" else each for each in after]
            kinds = ((parse_budget(each) if key == "eps" else each, each) for each in before)
            lost = [str(each) for kind, each in kinds if kind not in known]
            changes += [f"{key} lacks {', '.join(lost)}"] if lost else []
        elif before != after:
            ends = ("not given" if each is None else str(each) for each in (before, after))
            changes.append(f"{key} {' became '.join(ends)}")
    return "; ".join(changes)


def _to_json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON reads them, so that a fresh report equals a stored one."""
    return json.loads(json.dumps(dict(values), default=str))
