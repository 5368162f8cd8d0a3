"""The values that a rule reads from a section, by the name of their row or column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lipaudit.errors import EvaluationError, UsageError, suggestion
from lipaudit.gate.rules import Rule
from lipaudit.gate.statistics import STATISTICS, Values
from lipaudit.results import Row, Section
from lipaudit.results.columns import naming
from lipaudit.results.samples import REDUCTIONS
from lipaudit.results.trials import WORST, TrialKey, parse_column, parse_radius, worst_cases

_NAMES = ("layer", "head", "from", "to", "mode", "n", "r", "module")


@dataclass(frozen=True)
class RuleValues:
    """What one report holds for one rule.

    Attributes:
        names: the rows or columns that were read.
        points: the value to judge, by row or column; one value, named "", for a statistic over
            rows.
        pairs: the values behind each point, (samples,), where the report keeps them.
        ids: the samples, in the order of `pairs`.
    """

    names: tuple[str, ...]
    points: Mapping[str, float]
    pairs: Mapping[str, Values]
    ids: tuple[str, ...]


def read(rule: Rule, section: Section) -> RuleValues:
    """Read the values of a rule; rows whose cell is null (not measured) are left out.

    Raises:
        UsageError: when the rule matches nothing.
    """
    if rule.per_sample:
        pairs = _columns(rule, section)
        statistic = STATISTICS[rule.stat]
        points = {name: float(statistic(v)) if v.size else np.nan for name, v in pairs.items()}
    else:
        points = _cells(rule, section)
        pairs = _behind(rule, section, points)
    if not points:
        raise _nothing(rule, section)
    names = tuple(points)
    if not rule.per_sample and rule.stat != "each":
        points = {"": float(STATISTICS[rule.stat](list(points.values())))}
    return RuleValues(names, points, pairs, section.ids)


def row_names(rows: Iterable[Row]) -> list[str]:
    """Name rows by what identifies them: `layer 3 head 1`, `apgd-ce,linf,2/255`."""
    names: list[str] = []
    for row in rows:
        name = _name(row)
        repeats = sum(known.partition(" #")[0] == name for known in names)
        names.append(f"{name} #{repeats + 1}" if repeats else name)
    return names


def _columns(rule: Rule, section: Section) -> dict[str, Values]:
    """Read the per-sample columns `column` and `column@A,B,...` that the selector matches."""
    read = ((*parse_column(name), cells) for name, cells in section.samples.items())
    values = {trial: _numbers(cells) for kind, trial, cells in read if kind == rule.column}
    if rule.column == "robust":
        values = _worst_values(values) | values
    trials = {
        str(trial or ""): trial
        for trial in values
        if all(trial and trial.matches(word) for word in rule.selector)
    }
    return {name: values[trials[name]] for name in _worst(trials, rule.selector)}


def _worst_values(values: Mapping[TrialKey | None, Values]) -> dict[TrialKey | None, Values]:
    """Compute the worst case of every ball, which a report need not hold."""
    attacks = [trial for trial in values if trial and trial.attack]
    return {
        ball: np.min([values[trial] for trial in inside], axis=0)
        for ball, inside in worst_cases(attacks).items()
    }


def _cells(rule: Rule, section: Section) -> dict[str, float]:
    """Read the column of the rows that the selector matches."""
    rows = dict(zip(row_names(section.rows), section.rows, strict=True))
    kept = [name for name, row in rows.items() if all(_matches(row, w) for w in rule.selector)]
    trials = {name: rows[name].key for name in kept}
    kept = _worst(trials, rule.selector)
    cells = {name: rows[name].cells().get(rule.column) for name in kept}
    return {name: float(cell) for name, cell in cells.items() if cell is not None}


def _behind(rule: Rule, section: Section, points: Mapping[str, float]) -> dict[str, Values]:
    """Read the per-sample values behind rows: an array of the column's name, rows x samples.

    Means over all tokens of all samples are no statistic of the samples: they have none.
    """
    how = REDUCTIONS.get(section.measure, {}).get(rule.column)
    stored = None if how and how.stat == "mean" else section.arrays.get(rule.column)
    shape = (len(section.rows), len(section.ids))
    if rule.stat != "each" or stored is None or stored.shape != shape:
        return {}
    lines = zip(row_names(section.rows), stored.numpy(), strict=True)
    return {name: line for name, line in lines if name in points}


def _worst(trials: Mapping[str, TrialKey | None], selector: tuple[str, ...]) -> list[str]:
    """Keep the worst case over the attacks, unless the selector names an attack."""
    attacks = {name: trial.attack if trial else "" for name, trial in trials.items()}
    if {word.removeprefix("attack=") for word in selector} & set(attacks.values()):
        return list(trials)
    return [name for name in trials if attacks[name] == WORST] or list(trials)


def _matches(row: Row, word: str) -> bool:
    key, equals, value = word.partition("=")
    cells, trial = row.cells(), row.key
    if trial and trial.matches(word):
        return True
    if not equals:
        return any(isinstance(cell, str) and cell == word for cell in cells.values())
    if key not in cells:
        raise UsageError(f"rows of {row.section} have no column {key!r}", suggestion(key, cells))
    cell = cells[key]
    return float(parse_radius(value)) == cell if isinstance(cell, float) else value == str(cell)


def _numbers(cells: tuple[Any, ...]) -> Values:
    if any(isinstance(cell, str) for cell in cells):
        raise EvaluationError("a column of numbers holds text", "Write the report again.")
    return np.array([np.nan if cell is None else float(cell) for cell in cells])


def _name(row: Row) -> str:
    if row.key:
        return str(row.key)
    cells = row.cells()
    named = {key: cells[key] for key in _NAMES if cells.get(key) not in (None, "")}
    if "layer" in cells:
        layer = [f"{key} {named[key]}" for key in ("layer", "head") if key in named]
        rest = [f"{key} {named[key]}" for key in ("mode", "n", "r") if key in named]
        return " ".join(layer + rest)
    if named:
        return ",".join(str(value) for value in named.values())
    return " ".join(
        str(cells[name]) if isinstance(cells[name], str) else f"{name} {cells[name]}"
        for name in naming(type(row).columns())
        if cells[name] not in (None, "")
    )


def _nothing(rule: Rule, section: Section) -> UsageError:
    rows = row_names(section.rows)
    some = "; ".join(rows[:8]) + ("; ..." if len(rows) > 8 else "")
    columns = [name for name in section.samples if parse_column(name)[0] == rule.column]
    advice = f"Rows: {some}." if rows else ""
    if columns:
        advice = f"Columns: {', '.join(columns)}."
    if left := [note.text for note in section.notes if note.code == "left-out"]:
        advice = f"Left out: {'; '.join(left)}. {advice}".strip()
    return UsageError(f"{rule.text!r} matches nothing in section {section.measure}", advice)
