"""Axes of a picture: ticks that say numbers as the tables do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TICKS = 16
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


def percent(axis: Any) -> None:
    """Write the numbers of an axis as percentages."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))


def logarithmic(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Make an axis logarithmic, with ticks at decades, at 1-2-5, or at the few values it has."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    axes.set_xscale("log") if which == "x" else axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    places = _places([v for v in values if v > 0])
    powers = places[-1] >= 1e4 or places[0] <= 1e-3
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FuncFormatter(lambda v, _: _power(v) if powers else f"{v:.3g}"))
    axis.set_minor_formatter(NullFormatter())
    if powers:
        axis.set_minor_locator(NullLocator())


def _places(values: Sequence[float]) -> list[float]:
    """Choose ticks: decades over a wide span, the few values there are, or 1-2-5."""
    low, high = math.log10(min(values)), math.log10(max(values))
    decades = range(math.floor(low), math.ceil(high) + 1)
    own = sorted(set(values))
    if high - low > 2:
        return [10.0**d for d in decades[:: -(-len(decades) // 8)]]
    if len(own) <= 6 and all(b > 1.4 * a for a, b in zip(own, own[1:], strict=False)):
        return own
    return [m * 10.0**d for d in decades for m in (1, 2, 5)]


def _power(value: float) -> str:
    return "10" + str(round(math.log10(value))).translate(SUPERSCRIPT)
