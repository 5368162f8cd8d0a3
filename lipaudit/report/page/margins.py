"""How far the changes that a gate judged lie from what its rules allow, as pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lipaudit.gate.rules import Rule, parse_rule
from lipaudit.gate.verdicts import Verdict
from lipaudit.report.blocks import Interval, Intervals, State
from lipaudit.results import Column

FEW = 8
"""So many rows of a rule are drawn, those that are nearest to breaking it."""
TITLES = {
    "%": "Changes, in % of the baseline",
    "pp": "Changes, in percentage points",
}
STATES: dict[str, State] = {
    "regressed": "broken",
    "inconclusive": "open",
    "pass (not proven)": "open",
}
"""How a verdict is drawn; any other is kept."""


def margins(groups: Sequence[Sequence[Verdict]]) -> tuple[Intervals, ...]:
    """Draw the verdicts on each rule: a picture for each unit, with a line for each row.

    Of a rule over many rows those are drawn that are nearest to breaking it; one where all keep
    it. What could not be judged, and what grew from nothing, has no place on an axis.
    """
    pictures: dict[tuple[str, Column], list[Interval]] = {}
    for verdicts in groups:
        rule = parse_rule(verdicts[0].rule)
        lines = [line for verdict in verdicts for line in _lines(rule, verdict)]
        lines.sort(key=_excess, reverse=True)
        if len(lines) > 1 and all(line.state == "kept" for line in lines):
            named = f"{lines[0].label} (nearest of {len(lines)})"
            lines = [replace(lines[0], label=named)]
        pictures.setdefault(_axis(rule), []).extend(lines[:FEW])
    return tuple(
        Intervals(title, axis, tuple(rows)) for (title, axis), rows in pictures.items() if rows
    )


def _axis(rule: Rule) -> tuple[str, Column]:
    """Return the title of the picture that a rule belongs to, and how its axis reads."""
    if rule.limit.kind == "absolute":
        axis = Column(label="current", meaning="", format=".3g", domain="")
        return f"Values: {rule.metric}", axis
    unit = rule.limit.unit
    axis = Column(label="paired change", meaning="", format="+.3g", unit=unit, domain="")
    return TITLES.get(unit, f"Changes: {rule.metric}"), axis


def _lines(rule: Rule, verdict: Verdict) -> Iterator[Interval]:
    absolute, times = rule.limit.kind == "absolute", 100 if rule.limit.unit else 1
    value = verdict.new if absolute else verdict.paired
    if value is None and not absolute:
        value = verdict.change
    if verdict.reason or value is None or not math.isfinite(value):
        return
    low, high = (None if e is None else times * e for e in (verdict.low, verdict.high))
    yield Interval(
        label=f"{verdict.metric} {verdict.name}".strip(),
        value=times * value,
        low=low,
        high=high,
        end=times * float(rule.limit.value),
        below=rule.op == "<=",
        state=STATES.get(verdict.status, "kept"),
    )


def _excess(line: Interval) -> float:
    """Return how far a line reaches beyond what is allowed; negative where it does not."""
    far = line.high if line.below else line.low
    reached = line.value if far is None else far
    broken = 1e9 if line.state == "broken" else 0.0
    return broken + (reached - line.end) * (1 if line.below else -1)
