"""Intervals below each other: where they lie against what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lipaudit.report.blocks import Interval, Intervals
from lipaudit.report.cells import number, plain, pretty
from lipaudit.report.draw.colours import CATEGORIES
from lipaudit.report.draw.inline import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = {
    "kept": (CATEGORIES[0], "o", "✓", "kept"),
    "open": (CATEGORIES[4], "D", "~", "not proven"),
    "broken": (CATEGORIES[1], "X", "✗", "broken"),
}
"""Of each state: its colour, its mark in a picture and in text, and its name."""
ALLOWED = CATEGORIES[2]
FAR = 1.5
"""A limit is cut off so many times the spread of all values and ends beyond them."""


def reach(block: Intervals) -> tuple[float, float]:
    """Return the ends of the axis: all values and ends, 0, and limits as far as they are near."""
    core = [0.0, *(v for row in block.rows for v in (row.value, row.end))]
    low, high = min(core), max(core)
    span = (high - low) or 1.0
    limits = [v for row in block.rows for v in (row.low, row.high) if v is not None]
    first, last = low - FAR * span, high + FAR * span
    near = [min(max(v, first), last) for v in limits]
    low, high = min(low, *near, low), max(high, *near, high)
    room = 0.04 * ((high - low) or 1.0)
    return low - room, high + room


def height(block: Intervals) -> float:
    """Return how high the picture is, in inches."""
    return 1.15 + 0.4 * len(block.rows)


def draw(axes: Axes, block: Intervals) -> None:
    """Draw each interval over a band of what is allowed; limits that are far end in an arrow."""
    low, high = reach(block)
    for y, row in enumerate(block.rows):
        start, end = (low, row.end) if row.below else (row.end, high)
        axes.barh(y, end - start, left=start, height=0.8, color=ALLOWED, alpha=0.14)
        axes.vlines(row.end, y - 0.4, y + 0.4, color=ALLOWED, linewidth=1.6)
        _interval(axes, y, row, (low, high))
    axes.axvline(0, color=INK, linewidth=0.7, linestyle=(0, (4, 2)))
    axes.set_yticks(range(len(block.rows)), labels=[plain(row.label) for row in block.rows])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(low, high), ylim=(len(block.rows) - 0.5, -0.5), xlabel=pretty(block.x.label))
    axes.xaxis.set_major_formatter(lambda value, _: _written(block, value))
    _legend(axes, block)


def _interval(axes: Axes, y: int, row: Interval, ends: tuple[float, float]) -> None:
    colour, mark, _, _ = LOOKS[row.state]
    if row.low is not None and row.high is not None:
        first, last = max(row.low, ends[0]), min(row.high, ends[1])
        axes.plot([first, last], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
        cut = "|" if first == row.low else "<", "|" if last == row.high else ">"
        for place, cap in zip((first, last), cut, strict=True):
            axes.plot([place], [y], cap, color=colour, markersize=8, clip_on=False)
    axes.plot([row.value], [y], mark, color=colour, markersize=7, markeredgewidth=0)


def _legend(axes: Axes, block: Intervals) -> None:
    """Name the marks that there are."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    states = {row.state for row in block.rows}
    handles: list[Any] = [
        Line2D([], [], color=colour, marker=mark, markersize=7, linestyle="", label=name)
        for state, (colour, mark, _, name) in LOOKS.items()
        if state in states
    ]
    handles.append(Patch(color=ALLOWED, alpha=0.3, label="allowed"))
    axes.figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))


def lines(block: Intervals, width: int) -> Iterator[str]:
    """Draw the intervals out of characters, each below its name, with the ends of the axis."""
    low, high = reach(block)
    for row in block.rows:
        yield said(block, row)
        yield "".join(_track(row, low, high, width))
    first, last = (_written(block, value) for value in (low, high))
    yield "─" * width
    yield first + last.rjust(width - len(first))


def legend(block: Intervals) -> str:
    """Say what the axis and the glyphs are."""
    states = {row.state for row in block.rows}
    marks = [f"{glyph} {name}" for s, (_, _, glyph, name) in LOOKS.items() if s in states]
    return f"{pretty(block.x.label)}: {'   '.join([*marks, '│ end of what is allowed (░)'])}"


def _track(row: Interval, low: float, high: float, width: int) -> list[str]:
    def place(value: float) -> int:
        share = (min(max(value, low), high) - low) / (high - low)
        return round(share * (width - 1))

    end = place(row.end)
    track = ["░" if (i < end) == row.below else " " for i in range(width)]
    if row.low is not None and row.high is not None:
        first, last = place(row.low), place(row.high)
        track[first : last + 1] = "─" * (last - first + 1)
    track[end] = "│"
    track[place(row.value)] = LOOKS[row.state][2]
    return track


def said(block: Intervals, row: Interval) -> str:
    """Write an interval in words."""
    limits = ""
    if row.low is not None and row.high is not None:
        limits = f" ({_written(block, row.low)} to {_written(block, row.high)})"
    value, end = _written(block, row.value), _written(block, row.end)
    return f"{plain(row.label)}: {value}{limits}, allowed {end}"


def _written(block: Intervals, value: float) -> str:
    if math.isinf(value):
        return f"{value:+g}"
    return (number(value, block.x.format) if value else "0") + block.x.unit
