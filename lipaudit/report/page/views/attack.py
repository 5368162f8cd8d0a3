"""Whole model: what attacks achieve, by radius."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from lipaudit.report.blocks import Block, Curve, Series, Table
from lipaudit.report.page.views.common import MODEL, interval
from lipaudit.results import AttackRow, Column, Section
from lipaudit.results.figures import typed
from lipaudit.results.trials import COSTS, WORST

NAMES = ("attack", "norm", "eps_text", "samples", "clean", "robust")


def view(section: Section) -> Iterator[Block]:
    """Tabulate accuracies with their intervals and draw them over eps."""
    rows = typed(section, AttackRow)
    columns = section.columns()
    yield Table(
        title="Accuracy under attack",
        columns=(*(columns[n] for n in NAMES), _interval(columns), *(columns[n] for n in COSTS)),
        rows=tuple((*_start(row), *(getattr(row, name) for name in COSTS)) for row in rows),
        keys=3,
        strong=frozenset(i for i, row in enumerate(rows) if row.attack == WORST),
    )
    attacks = dict.fromkeys(row.attack for row in rows)
    groups = {name: [row for row in rows if row.attack == name] for name in attacks}
    yield from _curves(columns, groups)


def side_by_side(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Compare the worst case over all attacks, where it was computed, at every radius."""
    groups = {label: _worst(typed(s, AttackRow)) for label, s in sections.items()}
    columns = next(iter(sections.values())).columns()
    lines = [(*_start(row), label) for label, rows in groups.items() for row in rows]
    lines.sort(key=lambda line: (line[1], line[2], line[0]))
    yield Table(
        title="Accuracy under attack",
        columns=(
            *(columns[n] for n in NAMES[:3]),
            MODEL,
            *(columns[n] for n in NAMES[3:]),
            _interval(columns),
        ),
        rows=tuple((*line[:3], line[-1], *line[3:-1]) for line in lines),
        keys=4,
    )
    yield from _curves(columns, groups)


def _start(row: AttackRow) -> tuple[object, ...]:
    ball = row.norm, row.key.radius.text
    limits = interval(row.robust_low, row.robust_high) or None
    return row.attack, *ball, row.samples, row.clean, row.robust, limits


def _interval(columns: Mapping[str, Column]) -> Column:
    return replace(columns["robust_low"], label="95 % Wilson")


def _worst(rows: list[AttackRow]) -> list[AttackRow]:
    return [row for row in rows if row.attack == WORST] or rows


def _curves(
    columns: Mapping[str, Column], groups: Mapping[str, list[AttackRow]]
) -> Iterable[Block]:
    accuracy = replace(columns["robust"], label="accuracy")
    everything = [row for rows in groups.values() for row in rows]
    for norm in dict.fromkeys(row.norm for row in everything):
        series = [
            _series(label, [r for r in rows if r.norm == norm and r.robust is not None])
            for label, rows in groups.items()
        ]
        kept = tuple(s for s in series if len(s.x) > 1)
        ticks = {row.key.radius.text: row.eps for row in everything if row.norm == norm}
        if kept:
            title = f"Accuracy under attack, {norm}"
            yield Curve(title, columns["eps"], accuracy, kept, ticks={"0": 0.0} | ticks)


def _series(label: str, rows: list[AttackRow]) -> Series:
    """Start a curve at eps = 0 with the accuracy without attack."""
    points = [(r.eps, r.robust, r.robust_low, r.robust_high) for r in rows]
    if rows and rows[0].clean is not None and all(r.eps > 0 for r in rows):
        points.append((0.0, rows[0].clean, None, None))
    columns = zip(*sorted(points, key=lambda p: p[0]), strict=True)
    return Series(label, *columns) if points else Series(label, (), ())
