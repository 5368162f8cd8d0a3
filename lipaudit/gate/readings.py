"""The values that a rule reads from a section, by the name of their row or column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lipaudit.errors import UsageError
from lipaudit.gate.rules import Rule
from lipaudit.gate.statistics import Values
from lipaudit.results import Row, Section

STATISTICS: dict[str, Callable[..., Any]] = {
    "median": np.median,
    "mean": np.mean,
    "p95": lambda values, axis=None: np.quantile(values, 0.95, axis=axis),
    "max": np.max,
}
_NAMES = ("layer", "head", "attack", "norm", "eps_text", "from", "to", "mode", "n", "module")


@dataclass(frozen=True)
class Reading:
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


def read(rule: Rule, section: Section) -> Reading:
    """Read the values of a rule; rows whose cell is null (not measured) are left out.

    Raises:
        UsageError: when the rule matches nothing.
    """
    ids = tuple(map(str, section.samples.get("ids", ())))
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
    return Reading(names, points, pairs, ids)


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
    found = {
        name.partition("@")[2]: name
        for name in section.samples
        if name.partition("@")[0] == rule.column
    }
    wanted = {word.partition("=")[2] or word for word in rule.selector}
    kept = {name: wanted <= set(name.split(",")) for name in found}
    picked = _worst([name for name in found if kept[name]], wanted)
    return {name: _numbers(section.samples[found[name]]) for name in picked}


def _cells(rule: Rule, section: Section) -> dict[str, float]:
    """Read the column of the rows that the selector matches."""
    rows = dict(zip(row_names(section.rows), section.rows, strict=True))
    kept = [name for name, row in rows.items() if all(_matches(row, w) for w in rule.selector)]
    if section.measure == "attack":
        kept = _worst(kept, {word.partition("=")[2] or word for word in rule.selector})
    cells = {name: rows[name].cells()[rule.column] for name in kept}
    return {name: float(cell) for name, cell in cells.items() if cell is not None}


def _behind(rule: Rule, section: Section, points: Mapping[str, float]) -> dict[str, Values]:
    """Read the per-sample values behind rows: an array of the column's name, rows x samples."""
    stored = section.arrays.get(rule.column)
    shape = (len(section.rows), len(section.samples.get("ids", ())))
    if rule.stat != "each" or stored is None or stored.shape != shape:
        return {}
    lines = zip(row_names(section.rows), stored.numpy(), strict=True)
    return {name: line for name, line in lines if name in points}


def _worst(names: list[str], wanted: set[str]) -> list[str]:
    """Keep the worst case over the attacks, unless the selector names an attack."""
    if any(name.split(",")[0] in wanted for name in names):
        return names
    return [name for name in names if name.split(",")[0] == "worst"] or names


def _matches(row: Row, word: str) -> bool:
    key, equals, value = word.partition("=")
    cells = row.cells()
    if not equals:
        return any(isinstance(cell, str) and cell == word for cell in cells.values())
    if key not in cells:
        raise UsageError(
            f"rows of {row.section} have no column {key!r}", f"Columns: {', '.join(cells)}."
        )
    return value in (str(cells[key]), str(cells.get(f"{key}_text")))


def _numbers(cells: tuple[Any, ...]) -> Values:
    return np.array([np.nan if cell is None else float(cell) for cell in cells])


def _name(row: Row) -> str:
    cells = row.cells()
    named = {key: cells[key] for key in _NAMES if cells.get(key) not in (None, "")}
    if "layer" in cells:
        layer = [f"{key} {named[key]}" for key in ("layer", "head") if key in named]
        rest = [f"{key} {named[key]}" for key in ("mode", "n") if key in named]
        return " ".join(layer + rest)
    return ",".join(str(value) for value in named.values())


def _nothing(rule: Rule, section: Section) -> UsageError:
    rows = row_names(section.rows)
    some = "; ".join(rows[:8]) + ("; ..." if len(rows) > 8 else "")
    columns = [name for name in section.samples if name.partition("@")[0] == rule.column]
    advice = f"Rows: {some}." if rows else ""
    if columns:
        advice = f"Columns: {', '.join(columns)}."
    return UsageError(f"{rule.text!r} matches nothing in section {section.measure}", advice)
