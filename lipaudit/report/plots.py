"""The pictures of a page on matplotlib's axes; each function yields the tooltips of its marks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from lipaudit.errors import visible
from lipaudit.report.axes import (
    INK,
    MARKERS,
    MOST_NAMED,
    choose_colour,
    choose_line,
    name_ticks,
    set_axis,
    set_ends,
    set_legend,
    set_ticks,
    write_label,
)
from lipaudit.report.blocks import (
    Bar,
    Curve,
    Forest,
    Heatmap,
    Histogram,
    Picture,
    Scale,
    Series,
    Stack,
    compute_scale,
)
from lipaudit.report.cells import format_value, format_with_limits, write_math
from lipaudit.tables import Column
from lipaudit.tables.columns import finite
from lipaudit.tables.formats import join_texts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Span = tuple[float, float]
Look = dict[str, Any]
"""How matplotlib draws something: names and values of its arguments."""
Tip = tuple[str, Span, Span]
"""The text of a tooltip and its place in the units of the axes: a point, or the ends in x, y."""
MANY = 500
"""Charts with more points or cells embed a PNG in the SVG, to keep pages small.

So do all attention maps, because a page may have many.
"""
MOST_TIPS = 1200
"""Largest number of tooltips in a chart: they make most of a page's size.

A map with more cells has none. Of more points, the largest have one.
"""
DARK = 0.46
"""Luma (BT.601) at which black and white have equal contrast."""


def draw_block(axes: Axes, block: Picture) -> list[Tip]:
    """Draw a picture on axes, and return its tooltips."""
    draw = _DRAW[type(block)]
    return list(draw(axes, block))


# Matrices: the map of heads, attention


def _draw_heatmap(axes: Axes, block: Heatmap) -> Iterator[Tip]:
    """Draw the entries of a matrix as coloured cells; a small matrix also gets numbers.

    Yields a tooltip for each cell of a map that is not too large.
    """
    import numpy as np

    values = np.array(block.values, dtype=np.float64)
    if block.is_attention:
        values[values == 0] = float("nan")  # of masked keys: such cells stay blank
    scale = compute_scale(block)
    height, width = values.shape
    # Many cells drawn as paths would make the page several megabytes large: embed an image. A page
    # may have many attention maps, so these are images even if they are small.
    embedded = block.is_attention or values.size > MANY
    # Cell i lies between i - 0.5 and i + 0.5.
    mesh = axes.pcolormesh(
        np.arange(width + 1) - 0.5,
        np.arange(height + 1) - 0.5,
        np.ma.masked_invalid(values),
        clip_on=False,
        cmap="viridis" if block.centre is None else "RdBu_r",
        norm=_choose_norm(block, scale),
        rasterized=embedded,
    )
    _draw_colours(axes, mesh, block.column, log=scale.log)
    _name_cells(axes, block, height, width)
    if not embedded and width <= 20:
        _write_numbers(axes, block, mesh)
    if values.size <= MOST_TIPS:
        yield from _list_cell_tips(block)


def _name_cells(axes: Axes, block: Heatmap, height: int, width: int) -> None:
    """Set the ends of a map's axes, their labels, and the names of its rows and columns.

    Args:
        axes: the axes. Row i lies between i - 0.5 and i + 0.5; y grows downwards.
        block: the map.
        height: number of rows.
        width: number of columns.
    """
    ylabel, xlabel = block.axes
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xlabel=xlabel, ylabel=ylabel)
    most = 16  # largest number of names along an axis
    if block.is_attention:
        axes.set_box_aspect(height / width)
        if max(height, width) <= MOST_NAMED:
            most = MOST_NAMED
    name_ticks(axes.xaxis, block.columns, most)
    name_ticks(axes.yaxis, block.rows, most)


def _write_numbers(axes: Axes, block: Heatmap, mesh: Any) -> None:
    """Write the number of each cell of a map, white on dark colours and black on light ones.

    Args:
        axes: the axes; x counts the columns of the matrix, y its rows.
        block: the map.
        mesh: the cells as matplotlib drew them, which know the colour of a value.
    """
    import numpy as np

    scale = compute_scale(block)
    for y, row in enumerate(block.values):
        for x, value in enumerate(row):
            ink = INK  # the colour of text on the page, for a cell without a colour
            if value is not None and scale.share(value) is not None:
                # The brightness of the colour, from its red, green and blue.
                luma = np.dot(mesh.to_rgba(float(value))[:3], (0.3, 0.59, 0.11))
                ink = "#ffffff" if luma < DARK else "#000000"
            text = format_value(value, block.column)
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)


def _list_cell_tips(block: Heatmap) -> Iterator[Tip]:
    """Yield the tooltip of each cell of a map: the text, and the two ends along x and y."""
    ylabel, xlabel = block.axes
    for y, row in enumerate(block.values):
        for x, value in enumerate(row):
            cell = f"{ylabel} {block.rows[y]}, {xlabel} {block.columns[x]}"
            text = format_value(value, block.column)
            yield f"{cell}: {text}", (x - 0.5, x + 0.5), (y - 0.5, y + 0.5)


def _choose_norm(block: Heatmap, scale: Scale) -> Any:
    """Return matplotlib's norm: the function that maps values to [0, 1], the range of colours."""
    from matplotlib.colors import LogNorm, Normalize, PowerNorm

    if block.is_attention:
        # Square roots, so that small shares stay visible.
        return PowerNorm(gamma=0.5, vmin=0.0, vmax=scale.high)
    if scale.log:
        return LogNorm(vmin=scale.low, vmax=scale.high)
    return Normalize(vmin=scale.low, vmax=scale.high)


def _draw_colours(axes: Axes, mesh: Any, column: Column, *, log: bool) -> None:
    """Draw the scale of colours beside a map."""
    figure: Any = axes.get_figure()
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30)
    label = write_label(column)
    if log:
        label += ", log scale"
    bar.set_label(label)
    bar.outline.set_visible(False)
    bar.solids.set_rasterized(True)
    set_ticks(bar.ax.yaxis, column, log=log)


# Counts and shares


def _draw_histogram(axes: Axes, block: Histogram) -> Iterator[Tip]:
    """Draw a histogram of each group of values over the same bins.

    The bins are logarithmic if the values are positive and span more than a decade.
    """
    import numpy as np

    pooled = [*chain.from_iterable(block.values.values())]
    low = min(pooled)
    high = max(pooled)
    log = low > 0 and high > 10 * low
    spread = np.geomspace if log else np.linspace
    bins = round(2 * len(pooled) ** (1 / 3))  # Rice's rule
    edges = spread(low, high, bins + 1)
    edges[0] = low  # geomspace may round its ends inwards
    edges[-1] = high
    most = 1  # the largest count, which sets the height of the axis
    for index, (label, values) in enumerate(block.values.items()):
        category = block.colours.get(label, index)
        colour = choose_colour(category)
        line = choose_line(category)
        counts, _ = np.histogram(values, edges)
        axes.stairs(counts, edges, fill=True, alpha=0.3, color=colour, linewidth=0)
        axes.stairs(counts, edges, label=visible(label), color=colour, linestyle=line)
        most = max(most, int(counts.max()))
    set_axis(axes, "x", (low, high), block.x, log=log)
    axes.set(ylabel="count", ylim=(0, 1.05 * most))
    set_ticks(axes.yaxis, Column("count", meaning="", format="d"))
    if len(block.values) > 1:
        set_legend(axes)
    yield from ()  # a histogram has no tooltips: the axes name the figures


def _draw_stack(axes: Axes, block: Stack) -> Iterator[Tip]:
    """Draw bars of stacked parts: positive parts upwards from zero, negative parts downwards.

    Yields a tooltip for each part of a bar: its text, and the ends of the part along x and y.
    """
    import numpy as np

    count = len(block.places)
    # The ends of the parts that are drawn, above and below zero, for each bar.
    above = np.zeros(count)
    below = np.zeros(count)
    for index, (label, heights) in enumerate(block.parts.items()):
        height = np.array(heights, dtype=np.float64)
        start = np.where(height < 0, below, above)
        look: Look = {"label": visible(label), "color": choose_colour(index)}
        axes.bar(range(count), height, bottom=start, width=0.8, **look)
        above += np.maximum(height, 0)
        below += np.minimum(height, 0)
        end = start + height
        for i, name in enumerate(block.places):
            text = f"{name}, {label}: {format_value(heights[i], block.y)}"
            yield text, (i - 0.4, i + 0.4), (start[i], end[i])
    axes.axhline(0, color=INK, linewidth=0.7)
    set_axis(axes, "y", [*above, *below], block.y)
    axes.set(xlim=(-0.6, count - 0.4))
    name_ticks(axes.xaxis, block.places, MOST_NAMED)
    set_legend(axes)


# Points and lines


def _draw_curve(axes: Axes, block: Curve) -> Iterator[Tip]:
    """Draw the points and lines of each series, and yield the tooltips of points."""
    most = MOST_TIPS // sum(not series.guide for series in block.series)  # tooltips of a series
    for index, series in enumerate(block.series):
        _draw_series(axes, block, index)
        if not series.guide:  # a guide is a line such as y = x, without figures
            yield from _list_point_tips(block, series, most)
    # The axes show all points, and the ends of all intervals.
    xs: list[float] = []
    ys: list[float | None] = []
    for series in block.series:
        xs += series.x
        ys += (*series.y, *series.low, *series.high)
    set_axis(axes, "x", finite(xs), block.x, log=block.log)
    if block.y.format.endswith("%") and not block.log:  # a share: from 0 to 100%
        set_ends(axes, "y", (0.0, 1.02), block.y)
    else:
        set_axis(axes, "y", finite(ys), block.y, log=block.log)
    if block.ticks:
        axes.set_xticks(list(block.ticks.values()), labels=list(block.ticks))
    set_legend(axes)


def _list_point_tips(block: Curve, series: Series, most: int) -> Iterator[Tip]:
    """Yield the tooltips of the points of a series: (text, ends in x, ends in y).

    The two ends of a point are equal. Of more than `most` points, those with the largest y have a
    tooltip.
    """
    shown = [i for i in range(len(series.x)) if _is_drawn(series, i, log=block.log)]
    shown.sort(key=lambda i: -series.y[i])
    for i in shown[:most]:
        x = series.x[i]
        y = series.y[i]
        yield _describe_point(block, series, i), (x, x), (y, y)


def _draw_series(axes: Axes, block: Curve, index: int) -> None:
    """Draw the points of a series, the lines between them and their intervals.

    Args:
        axes: the axes.
        block: the chart.
        index: number of the series in the chart; it decides colour and marker.
    """
    import numpy as np

    series = block.series[index]
    colour = choose_colour(index if series.colour is None else series.colour)
    look: Look = {"label": visible(series.label), "color": colour}
    if series.guide:  # a thin line for comparing slopes, such as y = x
        look |= {"color": INK, "linewidth": 0.7, "linestyle": choose_line(index)}
    elif block.joined:  # lines join the points
        look["linestyle"] = choose_line(index)
        look["marker"] = ""
        if len(series.x) <= 64:  # more marks overlap and hide the line
            look["marker"] = MARKERS[index % len(MARKERS)]
    else:
        look |= {"linestyle": "", "alpha": 0.8, "markeredgewidth": 0}
        # Colours repeat after seven series; the same colour then gets another marker.
        look["marker"] = MARKERS[(index + index // len(MARKERS)) % len(MARKERS)]
        look["rasterized"] = len(series.x) > MANY  # an image keeps the page small
    axes.plot(series.x, series.y, **look)
    if any(end is not None for end in series.low):  # some points have intervals
        low = np.array(series.low, dtype=np.float64)
        high = np.array(series.high, dtype=np.float64)
        axes.vlines(series.x, low, high, color=colour, linewidth=0.9)


def _is_drawn(series: Series, i: int, *, log: bool) -> bool:
    """Return whether point i can be drawn: it is finite, and positive on logarithmic axes."""
    x = series.x[i]
    y = series.y[i]
    if not math.isfinite(x + y):  # the sum is finite only if both are
        return False
    return not log or min(x, y) > 0


def _describe_point(block: Curve, series: Series, i: int) -> str:
    """Return the tooltip of point i: its name, its series and its figures.

    For example: "pgd: eps 2/255, accuracy 62.5% (43.5 to 79.5%)".
    """
    x = series.x[i]
    x_text = format_value(x, block.x)
    for name, tick in block.ticks.items():  # a tick may have a name, such as 2/255
        if tick == x:
            x_text = name
    y_text = format_value(series.y[i], block.y)
    if series.low:
        y_text = format_with_limits(y_text, series.low[i], series.high[i], block.y)
    lead = series.label
    if series.names:
        lead = join_texts([series.names[i], series.label])
    figures = write_math(f"{block.x.label} {x_text}, {block.y.label} {y_text}")
    return f"{lead}: {figures}"


# Intervals


ROW = 0.4
"""Height of a row of a forest plot in inches."""
MARK: Look = {"marker": "o", "linewidth": 2.2}
LIMIT: Look = {"color": INK, "linestyle": ":", "linewidth": 1.2}
"""How values and limits of rules look."""


def _draw_forest(axes: Axes, block: Forest) -> Iterator[Tip]:
    """Draw a row for each figure: an interval, and above it the name and text of the figure.

    A vertical line marks the centre, such as "no change". Row i is at y = i, and y grows
    downwards. Yields a tooltip for each row: its text, and the ends of its area along x and y.
    """
    ends: list[float | None] = [block.centre]
    for bar in block.bars:
        ends += (bar.low, bar.value, bar.high, bar.limit)
    set_axis(axes, "x", _clip_ends(ends, block), block.x, log=block.log)
    low, high = axes.get_xlim()
    for row, bar in enumerate(block.bars):
        axes.vlines(block.centre, row - 0.22, row + 0.3, INK, linewidth=0.7)
        _draw_bar(axes, row, bar)
        yield f"{bar.label}: {bar.text}", (low, high), (row - 0.9, row + 0.3)
    axes.set_ylim(len(block.bars) - 0.5, -1.0)  # downwards, with room for the first row's texts
    # Lines without points, which only appear in the legend.
    for index, word in block.legend.items():
        axes.plot([], [], color=choose_colour(index), label=word, **MARK)
    if any(bar.limit is not None for bar in block.bars):
        axes.plot([], [], label="limit of the rule", **LIMIT)
    set_legend(axes)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _draw_bar(axes: Axes, row: int, bar: Bar) -> None:
    """Draw a row of a forest plot: an interval with the value, the limit of a rule, and two texts.

    Values and ends beyond the axis are drawn at the end of the axis.

    Args:
        axes: the axes; x has the values, y the number of the row. y grows downwards, so the texts
            at row - 0.3 are above the interval.
        row: the number of the row.
        bar: the figure.
    """
    low, high = axes.get_xlim()
    colour = choose_colour(bar.colour)
    if bar.low is not None and bar.high is not None:
        ends = (max(bar.low, low), min(bar.high, high))
        axes.plot(ends, (row, row), color=colour, linewidth=2.2, solid_capstyle="butt")
    value = min(max(bar.value, low), high)
    axes.plot([value], [row], color=colour, markersize=6, clip_on=False, **MARK)
    if bar.limit is not None:
        axes.vlines(bar.limit, row - 0.22, row + 0.22, **LIMIT)
    beside: Look = {"transform": axes.get_yaxis_transform(), "fontsize": 9, "va": "bottom"}
    axes.text(0.0, row - 0.3, visible(bar.label), ha="left", **beside)
    axes.text(1.0, row - 0.3, visible(bar.text), ha="right", **beside)


def _clip_ends(ends: Sequence[float | None], block: Forest) -> list[float]:
    """Return what the axis of a forest plot has to show, with far ends of intervals clipped.

    Beside an interval of 100 times the largest value, the values could not be told apart. So each
    end is clipped at ten times the largest distance of a value, or of the limit of a rule, from
    the centre; on a logarithmic axis, at ten times the largest and a tenth of the smallest of
    them. If all values are at the centre, nothing is clipped.

    Args:
        ends: the values, the ends of their intervals and the limits of rules; None if unknown.
        block: the plot.
    """
    bars = block.bars
    values = finite([block.centre, *(bar.value for bar in bars), *(bar.limit for bar in bars)])
    if block.log:
        positive = [value for value in values if value > 0]
        low = min(positive) / 10
        high = max(positive) * 10
    else:
        far = 10 * max(abs(value - block.centre) for value in values) or math.inf
        low = block.centre - far
        high = block.centre + far
    return [min(max(end, low), high) for end in finite(ends)]


_DRAW: dict[type[Any], Callable[..., Iterator[Tip]]] = {
    Heatmap: _draw_heatmap,
    Histogram: _draw_histogram,
    Curve: _draw_curve,
    Stack: _draw_stack,
    Forest: _draw_forest,
}
