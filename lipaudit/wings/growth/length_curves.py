"""The picture of the section `scaling`: norms over the length of the input."""

from __future__ import annotations

from collections.abc import Iterator

from lipaudit.report.blocks import Curve, Series
from lipaudit.report.pictures import make_series
from lipaudit.report.rows import Sections, find_columns, read_rows
from lipaudit.tables import Row
from lipaudit.tables.columns import group_values, order

LINES = 5
"""Largest number of heads or layers in one chart, spread evenly."""


def draw_lengths(sections: Sections) -> Iterator[Curve]:
    """Yield one chart of norms for each mode of the measure `scaling`, for reports.

    The x axis is the number of tokens n, with the lines n^(1/4) and n^(1/2) for comparison. In
    mode radius it is R, the largest norm of a token.
    """
    columns = find_columns(sections)
    # A logarithmic axis has no place for 0. `order` returns -inf for missing norms.
    rows = [row for row in read_rows(sections) if order(row.norm) > 0]
    by_mode = group_values((row["mode"], row) for row in rows)
    for mode, group in by_mode.items():
        x = "n"  # the column of the x axis
        axis = "the length"
        if mode == "radius":
            x = "radius"
            axis = "R"
        # Rows of the same head, mask and radius are one line.
        lines = group_values((_name_line(row, mode), row) for row in group)
        names = _pick_evenly(list(lines))
        series = [make_series(name, lines[name], x, y="norm") for name in names]
        if x == "n":
            series += list(_draw_guides(series))
        title = f"How norms grow with {axis}, mode {mode}"
        yield Curve(title, x=columns[x], y=columns["norm"], series=tuple(series), log=True)


def _pick_evenly(names: list[str]) -> list[str]:
    """Return at most LINES of the names, evenly spaced, so that a chart stays readable."""
    if len(names) <= LINES:
        return names
    step = (len(names) - 1) / (LINES - 1)  # from the first name to the last
    return [names[round(i * step)] for i in range(LINES)]


def _draw_guides(series: list[Series]) -> Iterator[Series]:
    """Yield the reference lines c n^(1/4) and c n^(1/2), from the first point of the first line.

    The lines are straight in a chart with logarithmic axes.
    """
    start = min(line.x[0] for line in series)
    end = max(line.x[-1] for line in series)
    first = series[0].y[0]
    for text, power in (("n^1/4", 0.25), ("n^1/2", 0.5)):
        last = first * (end / start) ** power  # c n^power at both ends
        yield Series(text, x=(start, end), y=(first, last), guide=True)


def _name_line(row: Row, mode: str) -> str:
    """Return the legend of a line of norms: the model, the head, and the fixed n or radius R."""
    name = f"{row.model} {row.head}"
    if row.masked:
        name += ", masked"
    name = name.strip()
    if mode == "radius":
        if row.n is not None:
            name += f", n = {row.n:.3g}"
    elif mode != "real" and row.radius is not None:  # on real data R is measured, not fixed
        name += f", R = {row.radius:.3g}"
    return name
