"""What the places of a picture say when they are pointed at."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import isfinite
from typing import TYPE_CHECKING

from lipaudit.report.blocks import (
    Curve,
    Density,
    Forest,
    Heatmap,
    Histogram,
    Intervals,
    Picture,
    Scatter,
    Series,
    Shares,
)
from lipaudit.report.cells import number, plain, pretty, text
from lipaudit.report.draw.intervals import said
from lipaudit.results import Column
from lipaudit.results.figures import order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 1200
"""So many places speak; of more, those that lie farthest out."""
RADIUS = 5
"""Of a point's place, in points of print."""
HALF_BAR = 0.36
"""Half the height of a bar of shares, where bars stand 1 apart."""


@dataclass(frozen=True)
class Mark:
    """A place of a picture in the units of its axes, a point where its ends are equal."""

    text: str
    x: tuple[float, float]
    y: tuple[float, float]

    @property
    def point(self) -> bool:
        """Whether it has no extent."""
        return self.x[0] == self.x[1] and self.y[0] == self.y[1]


def marks(block: Picture) -> list[Mark]:
    """Return what the places of a picture say: its cells, bars or points."""
    match block:
        case Heatmap():
            return list(_cells(block))
        case Histogram():
            return list(_bins(block))
        case Shares():
            return list(_parts(block))
        case Intervals():
            return [
                Mark(said(block, row), (row.value, row.value), (y, y))
                for y, row in enumerate(block.rows)
            ]
        case Forest():
            return list(_bars(block))
        case Density():
            few = len(block.values) * len(block.values[0]) <= MOST
            return list(_entries(block) if few else _named_columns(block))
        case Scatter() | Curve():
            drawn = [s for s in block.series if not s.guide]
            most = MOST // max(len(drawn), 1)
            return [mark for series in drawn for mark in _points(block, series, most)]


def elements(axes: Axes, block: Picture) -> str:
    """Write the places as elements of the SVG file of a drawn picture: nothing that is seen.

    Points that lie on each other speak together.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    scale, height = 72 / figure.dpi, figure.get_figheight() * 72
    texts: dict[str, list[str]] = {}
    for mark in marks(block):
        ends = list(zip(mark.x, mark.y, strict=True))
        (x0, y0), (x1, y1) = (axes.transData.transform(ends) * scale).tolist()
        shape = _shape(sorted((x0, x1)), sorted((height - y0, height - y1)), mark.point)
        texts.setdefault(shape, []).append(html.escape(plain(mark.text), quote=False))
    lines = [
        f"<{shape}><title>{chr(10).join(said)}</title></{shape.split()[0]}>"
        for shape, said in texts.items()
    ]
    return f'<g class="marks">{"".join(lines)}</g>' if lines else ""


def _shape(x: list[float], y: list[float], point: bool) -> str:
    if point:
        return f'circle cx="{x[0]:.1f}" cy="{y[0]:.1f}" r="{RADIUS}"'
    size = f'width="{x[1] - x[0]:.1f}" height="{y[1] - y[0]:.1f}"'
    return f'rect x="{x[0]:.1f}" y="{y[0]:.1f}" {size}'


def _cells(block: Heatmap) -> Iterator[Mark]:
    values = [v for row in block.values for v in row]
    names = product(enumerate(block.rows), enumerate(block.columns))
    cells = list(zip(names, values, strict=True))
    for index in _outermost([values], MOST):
        ((y, row), (x, column)), value = cells[index]
        said = f"head {block.place(row, column)}: {text(value, block.column)}"
        yield Mark(said, (x - 0.5, x + 0.5), (y - 0.5, y + 0.5))


def _bins(block: Histogram) -> Iterator[Mark]:
    top = max((max(counts, default=0) for counts in block.counts.values()), default=0)
    for index, (low, high) in enumerate(pairwise(block.edges)):
        counts = {label: number(count[index], ".6g") for label, count in block.counts.items()}
        several = len(counts) > 1
        said = ", ".join(f"{label} {n}" if several else n for label, n in counts.items())
        span = f"{number(low, '.3g')} to {number(high, '.3g')}"
        yield Mark(f"{span}: {said}", (low, high), (0, top))


def _parts(block: Shares) -> Iterator[Mark]:
    left = [0.0] * len(block.bars)
    for part, shares in block.parts.items():
        for y, (bar, share) in enumerate(zip(block.bars, shares, strict=True)):
            if share:
                said = f"{bar}, {part}: {text(share, block.x)}"
                yield Mark(said, (left[y], left[y] + share), (y - HALF_BAR, y + HALF_BAR))
            left[y] += share


def _bars(block: Forest) -> Iterator[Mark]:
    for index, series in enumerate(block.series):
        for i, (value, place) in enumerate(zip(series.x, series.y, strict=True)):
            ends = [each[i] for each in (series.left, series.right) if each]
            span = [text(end, block.x) for end in ends if end is not None]
            limits = f" ({' to '.join(span)})" if len(span) == 2 else ""
            said = f"{block.bars[int(place)]}, {series.label}: {text(value, block.x)}{limits}"
            if index:
                yield Mark(said, (value, value), (place, place))
            elif value:
                yield Mark(said, (0.0, value), (place - HALF_BAR, place + HALF_BAR))


def _entries(block: Density) -> Iterator[Mark]:
    across = _places(block.x, block.x_range, len(block.values[0]), block.names)
    up = _places(block.y, block.y_range, len(block.values), block.names)
    for (y_name, y), row in zip(up, block.values, strict=True):
        for (x_name, x), value in zip(across, row, strict=True):
            yield Mark(f"{x_name}, {y_name}: {text(value, block.value)}", x, y)


def _named_columns(block: Density) -> Iterator[Mark]:
    """Name the columns of a matrix of too many entries, with the largest entry of each."""
    if block.names:
        across = _places(block.x, block.x_range, len(block.values[0]), block.names)
        for (name, x), values in zip(across, zip(*block.values, strict=True), strict=True):
            yield Mark(f"{name}: at most {text(max(values), block.value)}", x, block.y_range)


def _places(
    column: Column, ends: tuple[float, float], count: int, names: Sequence[str]
) -> list[tuple[str, tuple[float, float]]]:
    """Name the places along an axis: by their middle where counted, else by their ends."""
    step = (ends[1] - ends[0]) / count
    places = [(ends[0] + i * step, ends[0] + (i + 1) * step) for i in range(count)]
    label = pretty(column.label)
    if column.format == "d" and step == 1:
        called = [f" {name}" for name in names] or [""] * count
        return [
            (f"{label} {low + 0.5:.0f}{name}", (low, high))
            for (low, high), name in zip(places, called, strict=True)
        ]
    return [
        (f"{label} {number(low, '.3g')} to {number(high, '.3g')}", (low, high))
        for low, high in places
    ]


def _points(block: Scatter | Curve, series: Series, most: int) -> Iterator[Mark]:
    named = {v: k for k, v in block.ticks.items()} if isinstance(block, Curve) else {}
    for index in _outermost([series.x, series.y], most):
        x, y = series.x[index], series.y[index]
        if not isfinite(x + y) or any(
            log and v <= 0 for v, log in zip((x, y), block.logs, strict=True)
        ):
            continue
        whose = [*series.names[index : index + 1]]
        if not whose or len(block.series) > 1:
            whose.append(series.label)
        across, up = (
            _within(index, *ends)
            for ends in ((series.left, series.right, block.x), (series.low, series.high, block.y))
        )
        figures = f"{pretty(block.x.label)} {named.get(x) or text(x, block.x)}{across}"
        figures += f", {pretty(block.y.label)} {text(y, block.y)}{up}"
        yield Mark(f"{', '.join(filter(None, whose))}: {figures}", (x, x), (y, y))


def _within(
    index: int, low: Sequence[float | None], high: Sequence[float | None], column: Column
) -> str:
    """Write the interval of a point; nothing where it has none."""
    if not low or not high or low[index] is None:
        return ""
    return f" ({text(low[index], column)} to {text(high[index], column)})"


def _outermost(columns: Sequence[Sequence[float | None]], most: int) -> list[int]:
    """Return the places of the values that rank first or last in any column, in their order."""
    count = len(columns[0])
    if count <= most:
        return list(range(count))
    out = [0.0] * count
    for values in columns:
        ranked = sorted(range(count), key=lambda i: order(values[i]))
        for rank, index in enumerate(ranked):
            out[index] = max(out[index], abs(rank - (count - 1) / 2))
    return sorted(sorted(range(count), key=lambda i: -out[i])[:most])
