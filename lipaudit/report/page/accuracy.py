"""Chapters of accuracy: under attack, and certified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lipaudit.report.blocks import Block, Table, make_table
from lipaudit.report.page.common import MODEL, format_limits, pair_points, tabulate_all
from lipaudit.report.pictures import Curve, Scatter, Series, Shares
from lipaudit.results import Column, Row, Section
from lipaudit.results.report import rows_of
from lipaudit.results.trials import COSTS, WORST

# Attacks


def view_attack(section: Section) -> Iterator[Block]:
    """Tabulate accuracies with their intervals and draw them over eps."""
    rows = rows_of(section)
    columns = section.columns
    yield _tabulate_attacks(columns, [("", row) for row in rows], several=False)
    attacks = dict.fromkeys(row.attack for row in rows)
    groups = {name: [row for row in rows if row.attack == name] for name in attacks}
    yield from _draw_accuracies(columns, groups)


def compare_attack(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Compare the worst case over all attacks, where it was computed, at every radius."""
    groups = {label: rows_of(s) for label, s in sections.items()}
    for label, rows in groups.items():
        groups[label] = [row for row in rows if row.attack == WORST] or rows
    columns = next(iter(sections.values())).columns
    lines = [(label, row) for label, rows in groups.items() for row in rows]
    lines.sort(key=lambda line: (line[1].norm, line[1].trial.radius.text, line[1].attack))
    yield _tabulate_attacks(columns, lines, several=True)
    yield from _draw_accuracies(columns, groups)


def _tabulate_attacks(
    columns: Mapping[str, Column], lines: Sequence[tuple[str, Row]], *, several: bool
) -> Table:
    """Tabulate accuracies; without the cost of the attacks if there are several models."""
    rows = [row for _, row in lines]
    names = ("samples", "clean", "robust")
    limits = [format_limits(row.robust_low, row.robust_high) or None for row in rows]
    shown: list[tuple[Column, list[Any]]] = [
        (columns["attack"], [row.attack for row in rows]),
        (columns["norm"], [row.norm for row in rows]),
        (columns["eps_text"], [row.trial.radius.text for row in rows]),
        *([(MODEL, [label for label, _ in lines])] if several else []),
        *((columns[name], [row[name] for row in rows]) for name in names),
        (replace(columns["robust_low"], label="95 % Wilson"), limits),
    ]
    if several:
        return make_table("Accuracy under attack", shown, keys=4)
    shown += [(columns[name], [row[name] for row in rows]) for name in COSTS]
    strong = frozenset(i for i, row in enumerate(rows) if row.attack == WORST)
    return make_table("Accuracy under attack", shown, keys=3, strong=strong)


def _draw_accuracies(
    columns: Mapping[str, Column], groups: Mapping[str, list[Row]]
) -> Iterable[Block]:
    accuracy = replace(columns["robust"], label="accuracy")
    everything = [row for rows in groups.values() for row in rows]
    for norm in dict.fromkeys(row.norm for row in everything):
        series = [
            _draw_accuracy(label, [r for r in rows if r.norm == norm and r.robust is not None])
            for label, rows in groups.items()
        ]
        kept = tuple(s for s in series if len(s.x) > 1)
        ticks = {row.trial.radius.text: row.eps for row in everything if row.norm == norm}
        if kept:
            title = f"Accuracy under attack, {norm}"
            yield Curve(title, columns["eps"], accuracy, kept, ticks={"0": 0.0} | ticks)


def _draw_accuracy(label: str, rows: list[Row]) -> Series:
    """Start a curve at eps = 0 with the accuracy without attack."""
    points = [(r.eps, r.robust, r.robust_low, r.robust_high) for r in rows]
    if rows and rows[0].clean is not None and all(r.eps > 0 for r in rows):
        points.append((0.0, rows[0].clean, None, None))
    columns = zip(*sorted(points, key=lambda p: p[0]), strict=True)
    return Series(label, *columns) if points else Series(label, (), ())


# Certificates


CERTIFIED = ("norm", "eps_text", "samples", "clean", "robust", "certified")
BRACKETED = "Robust accuracy: certified from below, attacked from above"
AXES = ("radius_adversarial", "radius")
VERDICTS = ("certified", "undecided", "broken", "wrong")
SHARE = Column(
    label="share of samples",
    meaning="How many samples have a verdict.",
    format=".1%",
    domain="",
)


def view_certify(section: Section) -> Iterator[Block]:
    """Tabulate the brackets and draw them; set radii beside each other, sample by sample."""
    rows, columns = rows_of(section), section.columns
    if rows:
        names = [n for n in CERTIFIED if any(row[n] is not None for row in rows)]
        cells = [(columns[n], [row[n] for row in rows]) for n in names]
        undecided = columns["undecided"], [row.undecided for row in rows]
        yield make_table(BRACKETED, [*cells, _list_brackets(columns, rows), undecided], keys=2)
        yield from _draw_verdicts({"": section})
    yield from _draw_radii({"samples": section})
    if rows:
        yield tabulate_all(section)


def compare_certify(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Compare the brackets at every radius, and the radii of the samples."""
    columns = next(iter(sections.values())).columns
    lines = [(row, label) for label, s in sections.items() for row in rows_of(s)]
    lines.sort(key=lambda line: (line[0].norm, line[0].eps))
    if lines:
        rows, labels = zip(*lines, strict=True)
        cells = [(columns[n], [row[n] for row in rows]) for n in CERTIFIED]
        shown = [*cells[:2], (MODEL, labels), *cells[2:], _list_brackets(columns, rows)]
        yield make_table(BRACKETED, shown, keys=3)
        yield from _draw_verdicts(sections)
    yield from _draw_radii(sections)


def view_radii(section: Section) -> Iterator[Block]:
    """Tabulate the medians."""
    yield tabulate_all(section, folded=False)


def _list_brackets(
    columns: Mapping[str, Column], rows: Sequence[Row]
) -> tuple[Column, list[str | None]]:
    """Return between which accuracies the truth is, with 95 % confidence."""
    column = replace(columns["certified_low"], label="95 % bracket", format="s")
    return column, [format_limits(row.certified_low, row.robust_high) or None for row in rows]


def _draw_verdicts(sections: Mapping[str, Section]) -> Iterator[Shares]:
    """Cut a bar for every ball by the verdicts of its samples."""
    counts: dict[str, Counter[str]] = {}
    for label, section in sections.items():
        for row in rows_of(section):
            name = f"{row.norm} {row.trial.radius.text} {label}".strip()
            verdicts = section.samples.get(row.trial.column("verdict"), ())
            if verdicts:
                counts[name] = Counter(map(str, verdicts))
    if counts:
        parts = {
            verdict: tuple(each[verdict] / each.total() for each in counts.values())
            for verdict in VERDICTS
        }
        yield Shares("What is certified, and what is left open", SHARE, tuple(counts), parts)


def _draw_radii(sections: Mapping[str, Section]) -> Iterator[Scatter]:
    """Set the certified radius of each sample over its adversarial one."""
    series: list[Series] = []
    for label, section in sections.items():
        if section.samples.keys() >= {*AXES}:
            x, y = (section.samples[name] for name in AXES)
            series += pair_points(label, x, y, section.ids)
    if series:
        section = next(iter(sections.values()))
        title = "Certified over adversarial radius, sample by sample"
        x_axis, y_axis = map(section.sample_column, AXES)
        yield Scatter(title, x_axis, y_axis, tuple(series))
