"""Axes of charts: colours, scales, ticks and legends, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lipaudit.errors import visible
from lipaudit.report import cells
from lipaudit.report.blocks import EXTREME
from lipaudit.tables import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"
"""Placeholder colour that becomes the page's text colour (light in dark mode)."""
# Okabe and Ito's colours, distinguishable for colour-blind eyes; a page may redefine --c0, ...
CATEGORIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
MARKERS = "osD^vPX"
LINES = ("-", "--", "-.", ":")
# Largest number of token labels at the axes of an attention map, and characters per label.
MOST_NAMED = 40
LETTERS = 14
# Largest margin of a logarithmic axis, as a factor: an end at EXTREME times it does not overflow.
MOST_MARGIN = 1e10
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def choose_colour(index: int) -> str:
    """Return the colour of a category by its number; after the last colour the first follows."""
    return CATEGORIES[index % len(CATEGORIES)]


def choose_line(index: int) -> str:
    """Return the dashes of a category."""
    return LINES[index % len(LINES)]


def write_label(column: Column) -> str:
    """Return the label of an axis, with the unit."""
    label = cells.write_math(column.label)
    if column.unit:
        label += f" ({column.unit})"
    return label


def set_axis(
    axes: Axes, which: str, values: Sequence[float], column: Column, *, log: bool = False
) -> None:
    """Scale and label an axis. The axis ends slightly beyond the smallest and largest value.

    Args:
        axes: the axes of a picture.
        which: x or y.
        values: the values along the axis.
        column: the column that formats them, with its label and unit.
        log: whether the axis is logarithmic; it then shows positive values only.
    """
    # Bounds may be infinite or overflow; the other values still need an axis.
    shown = [v for v in values if v == 0 or 1 / EXTREME < abs(v) < EXTREME]
    if log:
        shown = [v for v in shown if v > 0]
    low = min(shown, default=1.0)
    high = max(shown, default=1.0)
    # Each margin is 4% of the range. Equal values have no range, but still need a margin.
    if log:
        factor = 1.1
        if high > low:
            factor = min((high / low) ** 0.04, MOST_MARGIN)
        ends = (low / factor, high * factor)
    else:
        margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        ends = (low - margin, high + margin)
    set_ends(axes, which, ends, column, log=log)


def set_ends(
    axes: Axes, which: str, ends: tuple[float, float], column: Column, *, log: bool = False
) -> None:
    """Set the ends of an axis, its label and its ticks."""
    axes.set_autoscale_on(False)  # otherwise a scale overflows at values that are not drawn
    scale = "log" if log else "linear"
    label = write_label(column)
    if which == "x":
        axes.set(xscale=scale, xlim=ends, xlabel=label)
        set_ticks(axes.xaxis, column, log=log)
    else:
        axes.set(yscale=scale, ylim=ends, ylabel=label)
        set_ticks(axes.yaxis, column, log=log)


def set_ticks(axis: Any, column: Column, *, log: bool = False) -> None:
    """Set at least two ticks on an axis.

    Ticks of a logarithmic axis are at decades, or at 1, 2 and 5 times each decade. Ticks of a
    linear axis are at round numbers.
    """
    from matplotlib.ticker import MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    places = []
    if log:
        places = _list_decades(low, high)
    # A linear axis, or a logarithmic one with fewer than three of these ticks: round numbers.
    if sum(low <= place <= high for place in places) < 3:
        whole = column.format == "d"  # counts
        locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], min_n_ticks=2, integer=whole)
        places = [*locator.tick_values(low, high)]
    places = [float(place) for place in places if low <= place <= high]
    # The numbers on the labels: of shares, in percent.
    numbers = places
    unit = ""
    if column.format.endswith("%"):
        numbers = [100 * place for place in places]
        unit = "%"
    # One notation for an axis: 10⁴ beside 10⁵, not 10000.
    plain = all(number == 0 or 1e-4 <= abs(number) < 1e5 for number in numbers)
    labels = [_write_tick(number, plain=plain) + unit for number in numbers]
    axis.set_ticks(places, labels=labels)
    axis.set_minor_locator(NullLocator())


def _list_decades(low: float, high: float) -> list[float]:
    """Return ticks for a logarithmic axis: decades, or 1, 2 and 5 times each decade.

    Some may be outside `low` to `high`: `set_ticks` drops them. matplotlib's own LogLocator may
    return a single tick, or none.
    """
    first = math.ceil(math.log10(low))
    last = math.floor(math.log10(high))
    step = max(last - first, 0) // 8 + 1  # of more than 8 decades, only every second, third, ...
    decades = [10.0**power for power in range(first, last + 1, step)]
    if len(decades) >= 3:
        return decades
    # Too few decades: 1, 2 and 5 times each, also of the decade below `low`. An axis from 1.5 to
    # 90 begins with 2, which is 2 times the decade 1.
    places = []
    for power in range(first - 1, last + 1):
        places += [times * 10.0**power for times in (1, 2, 5)]
    return places


def _write_tick(value: float, *, plain: bool) -> str:
    """Return the label of a tick: 12.5 if it is plain, else a power of ten such as 2×10⁷."""
    # 8 digits distinguish ticks that differ by 1e-6, and hide the rounding of 0.1 + 0.2.
    if value == 0 or plain:
        return f"{value:.8g}"
    mantissa, exponent = f"{value:.7e}".split("e")  # "2.0000000" and "+07"
    lead = ""
    if float(mantissa) != 1:
        lead = mantissa.rstrip("0").rstrip(".") + "×"
    return f"{lead}10{str(int(exponent)).translate(RAISED)}"  # in raised digits


def name_ticks(axis: Any, names: Sequence[str], most: int) -> None:
    """Label the ticks 0, 1, ... with names; of many names only every second, third, ... name.

    Args:
        axis: the axis.
        names: the name of each row or column of the picture.
        most: largest number of names on the axis.
    """
    step = math.ceil(len(names) / most) or 1
    rotation = 0
    size = 9
    if any(len(name) > 3 for name in names):
        size = 7
        if axis.axis_name == "x":
            rotation = 90
    labels = [visible(name)[:LETTERS] for name in names[::step]]
    axis.set_ticks(range(0, len(names), step), labels=labels, rotation=rotation, fontsize=size)
    axis.set_tick_params(length=0)


def set_legend(axes: Axes) -> None:
    """Set the legend above the picture, in as many columns as fit."""
    _, labels = axes.get_legend_handles_labels()
    # About 56 letters fit above a picture; a mark takes the room of six.
    longest = max(map(len, labels), default=0)
    columns = max(1, min(len(labels), 56 // (longest + 6)))
    axes.figure.legend(loc="outside upper left", ncols=columns)
