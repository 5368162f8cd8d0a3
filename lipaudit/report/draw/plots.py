"""Pictures as SVG to be set into a page: they take its font and its colour of text."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
from lipaudit.report.cells import plain
from lipaudit.report.draw import axes as axis
from lipaudit.report.draw import colours, forest, intervals
from lipaudit.report.draw.alt import alternative
from lipaudit.report.draw.inline import INK, element
from lipaudit.report.draw.marks import elements
from lipaudit.report.draw.matrices import (
    HEIGHT,
    MANY,
    WIDTH,
    density,
    density_size,
    heatmap,
    heatmap_size,
)

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

MOST_MARKED = 64
"""A line of more points is drawn without marks."""
WIDE = 7.5
GRADES = (2, 4, 1, 6)
"""Those of parts of a whole, from good to bad."""
MARKERS = "osD^vPX"
LINES = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": False,
    "font.size": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}


def svg(block: Picture) -> str:
    """Draw a picture as an SVG element with an alternative text; equal blocks give equal bytes."""
    look = {"format": "svg", "transparent": True, "dpi": 160, "metadata": {"Date": None}}
    file, marks = _drawn(block, look)
    return element(file.decode(), alternative(block), marks)


def png(block: Picture) -> bytes:
    """Draw a picture with its title as a PNG file, dark on white."""
    return _drawn(block, {"format": "png", "dpi": 200}, titled=True)[0]


def _drawn(block: Picture, look: dict[str, Any], *, titled: bool = False) -> tuple[bytes, str]:
    """Return the file, and the elements that say what its places show."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        mpl.rcParams["svg.hashsalt"] = f"{type(block).__name__} {block.title}"
        # constrained layout places the labels of a square as if it filled its room
        square = _square(block)
        figure = Figure(figsize=_size(block), layout="compressed" if square else "constrained")
        axes = figure.add_subplot()
        DRAW[type(block)](axes, block)
        if titled:
            axes.set_title(textwrap.fill(plain(block.title), 44), fontsize=10)
        file = io.BytesIO()
        figure.savefig(file, **look)
        return file.getvalue(), elements(axes, block)


def _square(block: Picture) -> bool:
    return isinstance(block, Density) or (isinstance(block, Scatter) and block.equal)


def _size(block: Picture) -> tuple[float, float]:
    if isinstance(block, Forest):
        return WIDE, forest.height(block)
    if isinstance(block, Intervals):
        return WIDE, intervals.height(block)
    if isinstance(block, Shares):
        return WIDTH, 1.1 + 0.33 * len(block.bars)
    if isinstance(block, Scatter) and block.equal:
        return HEIGHT * 1.25, HEIGHT * 1.25
    if isinstance(block, Density):
        return density_size(block)
    return heatmap_size(block) if isinstance(block, Heatmap) else (WIDTH, HEIGHT)


def _histogram(axes: Axes, block: Histogram) -> None:
    for index, (label, counts) in enumerate(block.counts.items()):
        look: dict[str, Any] = {
            "color": colours.CATEGORIES[index % len(colours.CATEGORIES)],
            "linestyle": LINES[index % len(LINES)],
        }
        axes.stairs(counts, block.edges, fill=True, alpha=0.3, color=look["color"], linewidth=0)
        axes.stairs(counts, block.edges, label=plain(label), **look)
    log = block.edges[0] > 0 and block.edges[-1] > 10 * block.edges[0]
    axis.scaled(axes, "x", block.edges, block.x, log=log)
    axes.set_ylabel("count")
    axis.whole(axes.yaxis)
    if len(block.counts) > 1:
        _legend(axes)


def _shares(axes: Axes, block: Shares) -> None:
    places, left = range(len(block.bars)), [0.0] * len(block.bars)
    for index, (label, shares) in enumerate(block.parts.items()):
        colour = colours.CATEGORIES[GRADES[index % len(GRADES)]]
        axes.barh(places, shares, left=left, height=0.72, color=colour, label=plain(label))
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.ticks(axes.yaxis, [plain(bar) for bar in block.bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axis.label(axes, "x", block.x)
    axis.tick(axes.xaxis, axis.places(0, 1), block.x)
    _legend(axes)


def _scatter(axes: Axes, block: Scatter) -> None:
    for index, series in enumerate(block.series):
        colour = colours.CATEGORIES[index % len(colours.CATEGORIES)]
        _crosses(axes, series, colour)
        axes.scatter(
            series.x,
            series.y,
            s=18,
            alpha=0.8,
            linewidths=0,
            color=colour,
            marker=MARKERS[(index + index // len(MARKERS)) % len(MARKERS)],
            label=plain(series.label),
            rasterized=len(series.x) > MANY,
        )
    x, y = _values(block.series)
    if block.diagonal:
        ends = axis.ends(x + y if block.equal else x, log=block.log)
        axes.plot(ends, ends, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), label="y = x")
        y += ends
    axis.scaled(axes, "x", x + y if block.equal else x, block.x, log=block.log)
    axis.scaled(axes, "y", y + x if block.equal else y, block.y, log=block.log)
    if block.equal:
        axes.set_box_aspect(1)
    _legend(axes)


def _curve(axes: Axes, block: Curve) -> None:
    for index, series in enumerate(block.series):
        _line(axes, series, index)
    x, y = _values(block.series)
    across, up = block.logs
    axis.scaled(axes, "x", x, block.x, log=across)
    axis.scaled(axes, "y", y, block.y, log=up)
    if block.y.format.endswith("%") and not block.log:
        axes.set_ylim(0, 1.02)
        axis.tick(axes.yaxis, axis.places(0, 1), block.y)
    if block.ticks:
        axes.set_xticks(list(block.ticks.values()), labels=list(block.ticks))
    _legend(axes)


def _crosses(axes: Axes, series: Series, colour: str) -> None:
    """Draw the intervals around points, of both axes."""
    if series.low and series.high:
        axes.vlines(series.x, *_array((series.low, series.high)), color=colour, linewidth=0.9)
    if series.left and series.right:
        axes.hlines(series.y, *_array((series.left, series.right)), color=colour, linewidth=0.9)


def _values(series: Sequence[Series]) -> tuple[list[float], list[float]]:
    """Return all that is drawn along each axis."""
    x = [v for s in series for v in (*s.x, *s.left, *s.right) if v is not None]
    y = [v for s in series for v in (*s.y, *s.low, *s.high, *s.fit) if v is not None]
    return x, y


def _line(axes: Axes, series: Series, index: int) -> None:
    colour = INK if series.guide else colours.CATEGORIES[index % len(colours.CATEGORIES)]
    look: dict[str, Any] = {"color": colour, "linestyle": LINES[index % len(LINES)]}
    if series.guide:
        axes.plot(series.x, series.y, label=plain(series.label), linewidth=0.7, **look)
        return
    marker = MARKERS[index % len(MARKERS)] if len(series.x) <= MOST_MARKED else ""
    if series.fit:
        axes.plot(series.x, _array(series.fit), linewidth=1.0, **look)
        look["linestyle"] = ""
    axes.plot(series.x, series.y, marker=marker, label=plain(series.label), **look)
    if series.low and series.high:
        low, high = _array((series.low, series.high))
        axes.vlines(series.x, low, high, color=colour, linewidth=0.9)
        axes.plot(series.x * 2, [*low, *high], "_", color=colour, markersize=7)


def _legend(axes: Axes) -> None:
    """Set the legend above the picture, where it covers nothing, in as many columns as fit."""
    labels = axes.get_legend_handles_labels()[1]
    columns = max(1, min(len(labels), 56 // (max(map(len, labels)) + 6)))
    axes.figure.legend(loc="outside upper left", ncols=columns)


def _array(values: Any) -> np.ndarray[Any, Any]:
    """Make an array of numbers and None, which becomes NaN."""
    import numpy as np

    return np.array(values, dtype=np.float64)


DRAW: dict[type[Any], Callable[[Axes, Any], None]] = {
    Heatmap: heatmap,
    Histogram: _histogram,
    Scatter: _scatter,
    Curve: _curve,
    Density: density,
    Shares: _shares,
    Intervals: intervals.draw,
    Forest: forest.draw,
}
