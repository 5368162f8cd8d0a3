"""Figures of several things on either side of 0: bars with intervals, and marks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from lipaudit.report.blocks import Forest
from lipaudit.report.cells import plain, text
from lipaudit.report.draw import axes as axis
from lipaudit.report.draw.colours import CATEGORIES
from lipaudit.report.draw.inline import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST = 34
"""Characters of a name that stands beside its bar, not above it."""
MARKERS = "sD^vPX"


def height(block: Forest) -> float:
    """Return how high the picture is, in inches."""
    return 1.6 + 0.27 * len(block.bars)


def draw(axes: Axes, block: Forest) -> None:
    """Draw the first series as bars with their intervals, the others as marks."""
    import numpy as np

    first, *others = block.series
    colour, *more = CATEGORIES
    middle, places = np.array(first.x), np.array(first.y)
    axes.barh(places, middle, height=0.72, color=colour, alpha=0.35, linewidth=0)
    axes.plot(middle, places, "|", color=colour, markersize=7, label=plain(first.label))
    low, high = np.array((first.left or first.x, first.right or first.x), dtype=np.float64)
    axes.hlines(places, low, high, color=colour, linewidth=1.2)
    for series, colour, marker in zip(others, more, MARKERS, strict=False):
        look: dict[str, Any] = {"s": 18, "linewidths": 0, "marker": marker, "color": colour}
        axes.scatter(series.x, series.y, label=plain(series.label), zorder=3, **look)
    axes.axvline(0, color=INK, linewidth=0.8)
    known = [v for s in block.series for v in (*s.x, *s.left, *s.right) if v is not None]
    axis.scaled(axes, "x", [0.0, *known], block.x, log=False)
    axes.set_yticks(range(len(block.bars)), labels=[plain(bar) for bar in block.bars])
    axes.set(ylim=(len(block.bars) - 0.4, -0.6))
    axes.tick_params("y", length=0)
    axes.figure.legend(loc="outside upper left", ncols=2)


def lines(block: Forest, width: int) -> Iterator[str]:
    """Draw the bars of the first series to the left or the right of 0, behind their figures."""
    first = block.series[0]
    names = [plain(block.bars[int(place)]) for place in first.y]
    figures = [text(value, block.x) for value in first.x]
    pad, room = (max(map(cell_len, each), default=0) for each in (names, figures))
    low, high = min(0.0, *first.x), max(0.0, *first.x)
    span = (high - low) or 1.0
    zero = round(-low / span * width)
    for name, figure, value in zip(names, figures, first.x, strict=True):
        start, end = sorted((zero, round((value - low) / span * width)))
        drawn = (" " * start + "█" * (end - start)).ljust(width)
        bar = f"{figure:>{room}}  {drawn[:zero]}│{drawn[zero:]}".rstrip()
        if pad > LONGEST:
            yield name
            yield bar
        else:
            yield f"{name}{' ' * (pad - cell_len(name))}  {bar}"
