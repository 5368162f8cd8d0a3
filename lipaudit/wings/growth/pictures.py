"""The picture of the section `scaling`: norms over the length of the input."""

from __future__ import annotations

from collections.abc import Iterator

from lipaudit.report import blocks
from lipaudit.report.blocks import Curve
from lipaudit.report.pictures import make_series
from lipaudit.report.rows import Sections, find_columns, read_rows
from lipaudit.tables import Row
from lipaudit.tables.columns import group_values, order

LINES = 5
"""Largest number of heads or layers in one chart, spread evenly."""


def draw_lengths(sections: Sections) -> Iterator[Curve]:
    """Draw norms over the length n beside n^(1/4) and n^(1/2), by mode; over R in mode radius."""
    columns = find_columns(sections)
    rows = [row for row in read_rows(sections) if order(row.norm) > 0]
    for mode, group in group_values((row["mode"], row) for row in rows).items():
        x = "radius" if mode == "radius" else "n"
        lines = group_values((_name_line(row, mode), row) for row in group)
        names = list(lines)
        if len(names) > LINES:
            step = (len(names) - 1) / (LINES - 1)
            names = [names[round(i * step)] for i in range(LINES)]
        series = [make_series(name, lines[name], x, "norm") for name in names]
        if not series:
            continue
        if x == "n":
            start = min(each.x[0] for each in series)
            end = max(each.x[-1] for each in series)
            first = series[0].y[0]
            for text, power in (("n^1/4", 0.25), ("n^1/2", 0.5)):
                last = first * (end / start) ** power
                series.append(blocks.Series(text, (start, end), (first, last), guide=True))
        axis = "R" if x == "radius" else "the length"
        title = f"How norms grow with {axis}, mode {mode}"
        yield Curve(title, columns[x], columns["norm"], tuple(series), log=True)


def _name_line(row: Row, mode: str) -> str:
    """Name a line of norms by its model, its head and what is fixed along it."""
    name = f"{row.model} {row.head}"
    if row.masked:
        name += ", masked"
    name = name.strip()
    if mode == "radius":
        if row.n is not None:
            name += f", n = {row.n:.3g}"
    elif mode != "real" and row.radius is not None:  # real data define the radius
        name += f", R = {row.radius:.3g}"
    return name
