"""What changed per head: paired over samples, corrected for how many heads there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from lipaudit.errors import LipauditError
from lipaudit.gate.comparison.records import HeadChange, HeadChanges
from lipaudit.gate.contrasts import TOLERANCE, Contrast, contrasts
from lipaudit.gate.overlap import shared
from lipaudit.gate.rules import parse_rule
from lipaudit.gate.statistics import (
    ALPHA,
    LEVEL,
    Values,
    holm,
    mean_change,
    paired_changes,
    two_sided,
)
from lipaudit.gate.values import row_names
from lipaudit.results import Column, Report, Section

MAPPED = {"bounds": ("exact", "sharp"), "attention": ("softmax_norm", "intermediate")}
"""Columns that are followed head by head; of other sections all that have a better direction."""
Sides = tuple[Values, Values]


def mapped(report: Report) -> Iterator[str]:
    """Return the columns of heads whose changes are followed."""
    for section in report.sections:
        columns = section.columns()
        if {"layer", "head"} <= columns.keys():
            better = [name for name, column in columns.items() if column.better]
            names = MAPPED.get(section.measure, better)
            yield from (f"{section.measure}.{name}" for name in names)


def head_changes(metric: str, old: Report, new: Report) -> HeadChanges | None:
    """Return the change of every head, nothing where the two models do not compare."""
    measure, _, name = metric.rpartition(".")
    before, after = old.section(measure), new.section(measure)
    if before is None or after is None:
        return None
    figures = (row.cells().get(name) for section in (before, after) for row in section.rows)
    limit = no_change(after.columns()[name], [v for v in figures if v is not None])
    rule = parse_rule(f"{metric}:each <= {limit}")
    try:
        changes = contrasts(rule, new, old, least=0.0)
    except LipauditError:
        return None
    if not changes:
        return None
    unit = rule.limit.unit
    lines = {
        row: paired_changes(*sides, relative=unit == "%")
        for row, sides in row_pairs(name, before, after).items()
    }
    chances = [two_sided(mean_change, line, TOLERANCE) for line in lines.values()]
    tested = dict(zip(lines, zip(chances, holm(chances, ALPHA)[0], strict=True), strict=True))
    cells = {n: r.cells() for n, r in zip(row_names(after.rows), after.rows, strict=True)}
    return HeadChanges(
        metric=metric,
        unit=unit,
        samples=max((line.size for line in lines.values()), default=0),
        heads=tuple(
            HeadChange(
                layer=cells[c.name]["layer"],
                head=cells[c.name]["head"],
                old=c.old,
                new=c.new,
                **(
                    _paired(lines[c.name], *tested[c.name], unit)
                    if c.name in lines
                    else {"change": _plain(c, unit)}
                ),
            )
            for c in changes
        ),
    )


def no_change(column: Column, values: list[float]) -> str:
    """Write the limit of a rule that allows no change.

    In points of shares, relative unless figures are negative.
    """
    if column.format.endswith("%"):
        return "+0pp"
    return "+0%" if all(value >= 0 for value in values) else "+0"


def row_pairs(name: str, old: Section, new: Section) -> Mapping[str, Sides]:
    """Return what both sections keep of a column for each row and shared sample, by row.

    Nothing where a section keeps none, nor of a row where a sample has no finite value.
    """
    sections = (old, new)
    ids = [section.ids for section in sections]
    kept = [section.arrays[name] for section in sections if name in section.arrays]
    shapes = [(len(s.rows), len(i)) for s, i in zip(sections, ids, strict=True)]
    if [array.shape for array in kept] != shapes or not all(ids):
        return {}
    take = shared(old.measure, ids[1], ids[0], 0.0)[::-1]
    before, after = (
        dict(zip(row_names(section.rows), array.numpy()[:, places], strict=True))
        for section, array, places in zip(sections, kept, take, strict=True)
    )
    sides = {row: (line, after[row]) for row, line in before.items() if row in after}
    return {row: both for row, both in sides.items() if np.isfinite(both).all()}


def _paired(line: Values, p: float, adjusted: float, unit: str) -> dict[str, object]:
    evidence = mean_change(line)
    ends = evidence.estimate, *evidence.limits(LEVEL)
    with np.errstate(over="ignore"):
        change, low, high = (float(np.expm1(end)) if unit == "%" else end for end in ends)
    return {
        "change": change,
        "low": low,
        "high": high,
        "p": p,
        "p_adjusted": adjusted,
        "stands": adjusted <= ALPHA,
    }


def _plain(contrast: Contrast, unit: str) -> float | None:
    old, new = contrast.old, contrast.new
    if old is None or (unit == "%" and not old):
        return None
    return new / old - 1 if unit == "%" else new - old
