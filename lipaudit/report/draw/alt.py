"""What a picture shows, in words: for eyes that cannot see it, formats that cannot draw it."""

from __future__ import annotations

from lipaudit.report.blocks import (
    Curve,
    Density,
    Forest,
    Heatmap,
    Histogram,
    Intervals,
    Picture,
    Scatter,
    Shares,
)
from lipaudit.report.cells import number, plain, pretty, text


def alternative(block: Picture) -> str:
    """Describe a picture by its title, its extent and where its mass or extremes lie."""
    match block:
        case Heatmap():
            sizes = zip((len(block.rows), len(block.columns)), block.axes, strict=True)
            size = " x ".join(f"{n} {name}s" for n, name in sizes)
            return f"{block.title}: {size}{_peak(block)}."
        case Histogram():
            ends = f"{number(block.edges[0], '.3g')} to {number(block.edges[-1], '.3g')}"
            return f"{block.title}: histogram of {pretty(block.x.label)} from {ends}."
        case Density():
            return f"{block.title}: {extent(block)}"
        case Shares():
            bars = [
                f"{bar}: "
                + ", ".join(
                    f"{text(each[i], block.x)} {name}" for name, each in block.parts.items()
                )
                for i, bar in enumerate(block.bars)
            ]
            return f"{block.title}: {'; '.join(bars)}."
        case Forest():
            first = block.series[0]
            figures = (
                f"{block.bars[int(place)]} {text(value, block.x)}"
                for place, value in zip(first.y, first.x, strict=True)
            )
            return f"{block.title}: {pretty(block.x.label)} of {', '.join(figures)}."
        case Intervals():
            rows = (f"{row.label} {row.state}" for row in block.rows)
            return f"{block.title}: {pretty(block.x.label)}; {', '.join(rows)}."
        case Scatter() | Curve():
            names = ", ".join(series.label for series in block.series)
            return (
                f"{block.title}: {pretty(block.y.label)} over {pretty(block.x.label)} for {names}."
            )


def extent(block: Density) -> str:
    """Describe a density without its title."""
    height, width = len(block.values), len(block.values[0])
    value, y, x = max(
        (v or 0.0, y, x) for y, row in enumerate(block.values) for x, v in enumerate(row)
    )
    at_x = _centre(block.x_range, x, width) + _name(block, x)
    at_y = _centre(block.y_range, y, height) + _name(block, y)
    return (
        f"{height} x {width} entries, largest {text(value, block.value)} at "
        f"{pretty(block.x.label)} {at_x}, {pretty(block.y.label)} {at_y}."
    )


def _peak(block: Heatmap) -> str:
    cells = [
        (value, row, column)
        for row, line in zip(block.rows, block.values, strict=True)
        for column, value in zip(block.columns, line, strict=True)
        if value is not None and value == value
    ]
    if not cells:
        return ""
    value, row, column = max(cells)
    return f", largest {text(value, block.column)} at {block.place(row, column)}"


def _name(block: Density, index: int) -> str:
    return f" ({plain(block.names[index])})" if index < len(block.names) else ""


def _centre(ends: tuple[float, float], index: int, bins: int) -> str:
    return number(ends[0] + (ends[1] - ends[0]) * (index + 0.5) / bins, ".3g")
