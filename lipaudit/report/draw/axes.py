"""Axes of a picture: ticks that say numbers as the tables do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from lipaudit.report.cells import number, pretty
from lipaudit.results import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Which = Literal["x", "y"]
MOST_TICKS = 16
MARGIN = 0.04
"""Room beyond the outermost values, as a share of their span."""
FARTHEST = 1e290
"""Beyond it, and so near to 0, no axis can be drawn."""
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def ticks(axis: Any, labels: Sequence[str]) -> None:
    """Label positions 0, 1, ... and leave labels out evenly where there are too many."""
    step = -(-len(labels) // MOST_TICKS) or 1
    axis.set_ticks(range(0, len(labels), step), labels=labels[::step])
    axis.set_tick_params(length=0)


def whole(axis: Any) -> None:
    """Put ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True))


def limits(values: Any) -> tuple[float, float]:
    """Return the ends of a colour scale, apart even where all values are equal or none is left."""
    if values.count() == 0:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low, low + 1.0)


def scaled(
    axes: Axes, which: Which, values: Sequence[float], column: Column, *, log: bool
) -> None:
    """Scale and label an axis over some values: its ends lie a little beyond them.

    Ticks are at decades, at 1-2-5, at the few values there are, or at round numbers where these
    lie too close together: always two or more, told apart by what they say.
    """
    low, high = ends(values, log=log)
    _set_ends(axes, which, low, high, log)
    label(axes, which, column)
    between = places(low, high, values, log=log)
    tick(axes.xaxis if which == "x" else axes.yaxis, between, column)


def drawable(values: Sequence[float], *, log: bool) -> list[float]:
    """Return the values that have a place on an axis, and room for its ends beside them."""
    near = (v for v in values if v == 0 or 1 / FARTHEST < abs(v) < FARTHEST)
    return [v for v in near if v > 0 or not log]


def ends(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    """Return the ends of an axis, a little beyond its values."""
    known = drawable(values, log=log) or [1.0]
    low, high = min(known), max(known)
    if log:
        beyond = (high / low) ** MARGIN if high > low else 1.1
        return low / beyond, high * beyond
    away = (high - low) * MARGIN or abs(high) * 0.1 or 1.0
    return low - away, high + away


def _set_ends(axes: Axes, which: Which, low: float, high: float, log: bool) -> None:
    kind = "log" if log else "linear"
    if which == "x":
        axes.set_xscale(kind)
        axes.set_xlim(low, high)
    else:
        axes.set_yscale(kind)
        axes.set_ylim(low, high)


def label(axes: Axes, which: Which, column: Column) -> None:
    """Say what an axis shows, and in which unit."""
    named = titled(column)
    axes.set_xlabel(named) if which == "x" else axes.set_ylabel(named)


def titled(column: Column) -> str:
    """Write the label of a column with its unit."""
    return pretty(column.label) + (f" ({column.unit})" if column.unit else "")


def tick(axis: Any, at: Sequence[float], column: Column) -> None:
    """Put ticks at some values, and nowhere else."""
    from matplotlib.ticker import NullFormatter, NullLocator

    axis.set_major_locator(NullLocator())
    axis.set_ticks(at, labels=written(at, column.format))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def written(values: Sequence[float], spec: str) -> list[str]:
    """Write numbers with the digits that tell them apart, powers of ten far from 1 as such."""
    if spec.endswith("%"):
        return [f"{text}%" for text in written([100 * v for v in values], "g")]
    if all(map(_is_power, values)) and (max(values) >= 1e4 or min(values) <= 1e-3):
        return ["10" + str(round(math.log10(v))).translate(SUPERSCRIPT) for v in values]
    near = min((b - a for a, b in pairwise(sorted(values))), default=0.0)
    largest = max(map(abs, values))
    whole = len(str(int(largest))) if largest < 1e5 else 0
    texts: list[str] = []
    for digits in range(max(whole, 3), 16):
        texts = [number(v, f".{digits}g") for v in values]
        if all(abs(float(t) - v) <= near / 100 for t, v in zip(texts, values, strict=True)):
            break
    return texts


def places(
    low: float, high: float, values: Sequence[float] = (), *, log: bool = False
) -> list[float]:
    """Choose ticks between the ends of an axis, two or more."""
    return _logarithmic(low, high, values) if log else _round(low, high)


def _logarithmic(low: float, high: float, values: Sequence[float]) -> list[float]:
    """Choose decades over a wide span, the few values there are, 1-2-5, or round numbers."""
    inside = [10.0**d for d in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    if len(inside) > 2:
        return inside[:: -(-len(inside) // 8)]
    own = sorted({v for v in values if v > 0})
    short = all(float(f"{v:.3g}") == v or v == int(v) < 1e4 for v in own)
    if short and 1 < len(own) <= 6 and all(b > 1.4 * a for a, b in pairwise(own)):
        return own
    below = math.floor(math.log10(low))
    fine = [m * 10.0**d for d in range(below, below + 4) for m in (1, 2, 5)]
    kept = [v for v in fine if low <= v <= high]
    return kept if len(kept) > 2 else _round(low, high)


def _round(low: float, high: float) -> list[float]:
    """Choose round numbers between the ends of an axis."""
    from matplotlib.ticker import MaxNLocator

    places = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], min_n_ticks=2).tick_values(low, high)
    return [float(v) for v in places if low <= v <= high]


def _is_power(value: float) -> bool:
    return value > 0 and math.isclose(math.log10(value), round(math.log10(value)), abs_tol=1e-9)
