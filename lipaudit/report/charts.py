"""Charts by matplotlib: SVG elements of a page, with a tooltip at every point.

`blocks.describe` describes a chart in words, without matplotlib.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lipaudit.errors import visible
from lipaudit.report import blocks, cells
from lipaudit.report.blocks import EXTREME, Curve, Heatmap, Histogram, Picture, Stack
from lipaudit.tables import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Span = tuple[float, float]
Tip = tuple[str, Span, Span]
"""The text of a tooltip and its place in the units of the axes: a point, or the ends in x, y."""
INK = "#010203"
"""Placeholder colour that becomes the page's text colour (light in dark mode)."""
# Okabe and Ito's colours, distinguishable for colour-blind eyes; a page may redefine --c0, ...
CATEGORIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
MARKERS = "osD^vPX"
LINES = ("-", "--", "-.", ":")
MANY = 500
"""Charts with more points or cells embed a PNG in the SVG, to keep pages small."""
MOST_TIPS = 1200
"""Largest number of tooltips in a chart: they make most of a page's size."""
MOST_NAMED, LETTERS = 40, 14
"""Largest number of token labels at the axes of an attention map, and characters per label."""
WIDTH, HEIGHT = 4.9, 3.3
"""Size of a chart in inches, if it does not depend on the data."""
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "axes.unicode_minus"), False),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,
    "font.size": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "svg.fonttype": "none",  # labels stay text: they can be searched, and use the page's font
    "text.parse_math": False,  # a $ in a model's name is no mathematics
}


def draw_svg(block: Picture) -> str:
    """Draw a picture as an SVG element with an alternative text and tooltips.

    Equal blocks give equal bytes.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    size, square = (WIDTH, HEIGHT), isinstance(block, Heatmap) and block.square
    if isinstance(block, Heatmap):  # grows with the rows and the names beside them
        wide, high = 1.5 + 0.44 * len(block.columns), 0.9 + 0.31 * len(block.rows)
        size = min(max(wide, WIDTH), 9.5), min(max(high, 2.2), 9.0)
        if square:
            named = len(block.rows) if len(block.rows) <= MOST_NAMED else 0
            side = max(HEIGHT, 1.3 + 0.13 * named)
            size = side * 1.25, side
    # Constrained layout gives the labels of a square the room of its whole axes.
    layout: Any = "compressed" if square else "constrained"
    with mpl.rc_context():
        # A caller may have set another style: the page does not depend on it.
        mpl.rcdefaults()
        # matplotlib names clip paths by a hash with this salt: equal blocks give equal bytes.
        mpl.rcParams.update({**STYLE, "svg.hashsalt": f"{type(block).__name__} {block.title}"})
        figure = Figure(figsize=size, layout=layout, dpi=160, facecolor="none")
        axes = figure.add_subplot()
        draw: Any = {
            Heatmap: _draw_heatmap,
            Histogram: _draw_histogram,
            Curve: _draw_curve,
            Stack: _draw_stack,
        }
        tips, file = list(draw[type(block)](axes, block)), io.BytesIO()
        canvas: Any = FigureCanvasSVG(figure)  # it lays out as it draws: `savefig` draws twice
        canvas.print_svg(file, metadata={"Date": None})
        # After the figure is drawn: saving moves the axes.
        marks = _write_tips(axes, tips)
    # A page counts 96 pixels an inch.
    return _embed(file.getvalue().decode(), blocks.describe(block), marks, 96 * size[0])


# An SVG file as an element of a page


def _embed(file: str, alternative: str, marks: str, width: float) -> str:
    """Reduce an SVG file to an element in the page's font and colours, with tooltips."""
    element = file[file.index("<svg") :]
    element = _NEEDLESS.sub("", element)
    # Pictures of one page share ids, such as axes_1: keep only the ids in use.
    used = set(re.findall(r"#(\w+)", element))
    element = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", element)
    element = re.sub(r">\s+<", "><", element.replace("xlink:href", "href"))

    def shorten(found: re.Match[str]) -> str:  # nobody sees more than hundredths of a point
        return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")

    element = re.sub(
        r' (d|x|y|transform)="([^"]*)"',
        lambda m: f' {m[1]}="{" ".join(_NUMBER.sub(shorten, m[2]).split())}"',
        element,
    )
    for index, colour in enumerate(CATEGORIES):
        element = element.replace(colour, f"var(--c{index}, {colour})")
    element = re.sub(r' (height|width)="[\d.]+pt"', "", element, count=2)
    start = f'<svg role="img" aria-label="{html.escape(visible(alternative))}"'
    start += f' style="--width:{width:.0f}px"'
    element = start + element.strip().removeprefix("<svg").removesuffix("</svg>")
    return f"{element.replace(INK, 'currentColor')}{marks}</svg>"


_NEEDLESS = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<g/>|<defs/>|font-family: [^;\"]*; ?"
    r"| xmlns(:\w+)?=\"[^\"]*\"| version=\"[^\"]*\"| transform=\"rotate\(-0 [^\"]*\"",
    re.DOTALL,
)
"""Parts of an SVG file that are not needed inside a page."""
_NUMBER = re.compile(r"-?\d+\.\d+")


def _write_tips(axes: Axes, tips: Sequence[Tip]) -> str:
    """Write invisible shapes with a tooltip each; points at one place share a tooltip."""
    figure: Any = axes.get_figure(root=True)
    scale, height = 72 / figure.dpi, figure.get_figheight() * 72
    texts: dict[str, list[str]] = {}
    for text, x, y in tips:
        ends = axes.transData.transform(list(zip(x, y, strict=True))) * scale
        (x0, y0), (x1, y1) = ends.tolist()
        left, top, wide, high = min(x0, x1), height - max(y0, y1), abs(x1 - x0), abs(y1 - y0)
        shape = f'rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}"'
        if not wide and not high:
            shape = f'circle cx="{left:.1f}" cy="{top:.1f}" r="5"'
        texts.setdefault(shape, []).append(html.escape(visible(text), quote=False))
    tips_of = {shape: "\n".join(lines) for shape, lines in texts.items()}
    lines = [f"<{s}><title>{text}</title></{s.split()[0]}>" for s, text in tips_of.items()]
    return f'<g class="marks">{"".join(lines)}</g>' if lines else ""


# Axes


def _set_axis(
    axes: Axes, which: str, values: Sequence[float], column: Column, *, log: bool = False
) -> None:
    """Scale and label an axis, whose ends are slightly beyond the values."""
    # Bounds may be infinite or overflow; the other values still need an axis.
    known = [v for v in values if v == 0 or 1 / EXTREME < abs(v) < EXTREME]
    known = [v for v in known if v > 0 or not log] or [1.0]
    low, high = min(known), max(known)
    if log:
        beyond = (high / low) ** 0.04 if high > low else 1.1
        low, high = low / beyond, high * beyond
    else:
        away = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        low, high = low - away, high + away
    axes.set_autoscale_on(False)  # otherwise a scale overflows at values that are not drawn
    scale, ends = "log" if log else "linear", (low, high)
    axes.set(**{f"{which}scale": scale, f"{which}lim": ends, f"{which}label": _label(column)})
    _set_ticks(getattr(axes, f"{which}axis"), column, log=log)


def _label(column: Column) -> str:
    return cells.write_math(column.label) + (f" ({column.unit})" if column.unit else "")


def _set_ticks(axis: Any, column: Column, *, log: bool = False) -> None:
    """Set at least two ticks: at decades, at 1, 2 and 5 times them, or at round numbers."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    places: list[float] = []
    if log:  # matplotlib's LogLocator may find one tick or none
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        places = [10.0**power for power in range(first, last + 1, max(last - first, 0) // 8 + 1)]
        if len(places) < 3:
            places = [m * 10.0**power for power in range(first - 1, last + 1) for m in (1, 2, 5)]
    if sum(low <= v <= high for v in places) < 3:
        whole = column.format == "d"
        locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], min_n_ticks=2, integer=whole)
        places = [*locator.tick_values(low, high)]
    places = [float(v) for v in places if low <= v <= high]
    share = column.format.endswith("%")
    values = [100 * v if share else v for v in places]
    # One notation for an axis: 10⁴ beside 10⁵, not 10000.
    plain = all(value == 0 or 1e-4 <= abs(value) < 1e5 for value in values)
    labels = [_write_tick(value, plain=plain) + "%" * share for value in values]
    axis.set_ticks(places, labels=labels)
    axis.set_minor_locator(NullLocator())


def _write_tick(value: float, *, plain: bool) -> str:
    """Write 12.5, or 2×10⁷."""
    # 8 digits distinguish ticks that differ by 1e-6, and hide the rounding of 0.1 + 0.2.
    if value == 0 or plain:
        return f"{value:.8g}"
    digits, power = f"{value:.7e}".split("e")
    start = "" if float(digits) == 1 else digits.rstrip("0").rstrip(".") + "×"
    return f"{start}10{str(int(power)).translate(RAISED)}"


def _name_ticks(axis: Any, names: Sequence[str], most: int) -> None:
    """Label the places 0, 1, ...; with many names every second, third, ... one."""
    step = -(-len(names) // most) or 1
    long = any(len(name) > 3 for name in names)
    axis.set_ticks(
        range(0, len(names), step),
        labels=[visible(name)[:LETTERS] for name in names[::step]],
        rotation=90 if long and axis.axis_name == "x" else 0,
        fontsize=7 if long else 9,
    )
    axis.set_tick_params(length=0)


def _set_legend(axes: Axes) -> None:
    """Set the legend above the picture, in as many columns as fit."""
    labels = axes.get_legend_handles_labels()[1]
    # About 56 letters fit above a picture; a mark takes the room of six.
    columns = max(1, min(len(labels), 56 // (max(map(len, labels), default=0) + 6)))
    axes.figure.legend(loc="outside upper left", ncols=columns)


# Matrices: the map of heads, attention


def _draw_heatmap(axes: Axes, block: Heatmap) -> Iterator[Tip]:
    """Draw the entries as coloured cells."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize, PowerNorm

    values, scale = np.array(block.values, dtype=np.float64), blocks.compute_scale(block)
    norm: Any = (LogNorm if scale.log else Normalize)(scale.low, scale.high)
    colours: Any = colormaps["viridis" if block.centre is None else "RdBu_r"]
    if block.square:
        # Masked keys stay blank; square roots, so that small shares stay visible.
        values[values == 0] = float("nan")
        norm = PowerNorm(0.5, 0.0, scale.high)
    height, width = values.shape
    edges = np.arange(width + 1) - 0.5, np.arange(height + 1) - 0.5
    # Many cells as paths would make the page several megabytes large.
    look: dict[str, Any] = {"cmap": colours, "norm": norm, "rasterized": values.size > MANY}
    mesh = axes.pcolormesh(*edges, np.ma.masked_invalid(values), clip_on=False, **look)
    figure: Any = axes.get_figure()
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30)
    bar.set_label(_label(block.column) + (", log scale" if scale.log else ""))
    bar.outline.set_visible(False)
    bar.solids.set_rasterized(True)
    _set_ticks(bar.ax.yaxis, block.column, log=scale.log)
    ylabel, xlabel = ("query", "key") if block.square else ("layer", "head")
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xlabel=xlabel, ylabel=ylabel)
    most = MOST_NAMED if block.square and max(height, width) <= MOST_NAMED else 16
    _name_ticks(axes.xaxis, block.columns, most)
    _name_ticks(axes.yaxis, block.rows, most)
    if block.square:
        axes.set_box_aspect(height / width)
    written = not block.square and values.size <= MANY and width <= 20
    for index, (y, x) in enumerate(np.ndindex(values.shape)):
        text = cells.format_value(block.values[y][x], block.column)
        if written:
            ink = INK if scale.share(block.values[y][x]) is None else "#000000"
            # Black or white, whichever has more contrast (luma of BT.601; both are equal at 0.46).
            if ink != INK and np.dot(colours(norm(values[y, x]))[:3], (0.3, 0.59, 0.11)) < 0.46:
                ink = "#ffffff"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)
        if index < MOST_TIPS:
            place = f"{ylabel} {block.rows[y]}, {xlabel} {block.columns[x]}"
            yield f"{place}: {text}", (x - 0.5, x + 0.5), (y - 0.5, y + 0.5)


# Counts and shares


def _draw_histogram(axes: Axes, block: Histogram) -> Iterator[Tip]:
    """Count values in bins that all groups share, logarithmic ones beyond a decade."""
    import numpy as np

    pooled = [value for values in block.values.values() for value in values]
    low, high, most = min(pooled), max(pooled), 1
    log = low > 0 and high > 10 * low
    spread = np.geomspace if log else np.linspace
    edges = spread(low, high, round(2 * len(pooled) ** (1 / 3)) + 1)  # Rice's rule
    edges[0], edges[-1] = low, high  # geomspace may round its ends inwards
    for index, (label, values) in enumerate(block.values.items()):
        colour, line = CATEGORIES[index % len(CATEGORIES)], LINES[index % len(LINES)]
        counts = np.histogram(values, edges)[0]
        axes.stairs(counts, edges, fill=True, alpha=0.3, color=colour, linewidth=0)
        axes.stairs(counts, edges, label=visible(label), color=colour, linestyle=line)
        most = max(most, int(counts.max()))
    _set_axis(axes, "x", (low, high), block.x, log=log)
    axes.set(ylabel="count", ylim=(0, 1.05 * most))
    _set_ticks(axes.yaxis, Column("count", "", format="d"))
    if len(block.values) > 1:
        _set_legend(axes)
    yield from ()  # the axes name the figures


def _draw_stack(axes: Axes, block: Stack) -> Iterator[Tip]:
    """Draw the parts of every bar upwards from zero, negative ones downwards."""
    import numpy as np

    count = len(block.places)
    above, below = np.zeros(count), np.zeros(count)
    for index, (label, heights) in enumerate(block.parts.items()):
        height = np.array(heights, dtype=np.float64)
        bottom = np.where(height < 0, below, above)
        axes.bar(
            range(count),
            height,
            bottom=bottom,
            width=0.8,
            label=visible(label),
            color=CATEGORIES[index % len(CATEGORIES)],
        )
        above += np.maximum(height, 0)
        below += np.minimum(height, 0)
        for i, name in enumerate(block.places):
            text = f"{name}, {label}: {cells.format_value(heights[i], block.y)}"
            ends = bottom[i], bottom[i] + height[i]
            yield text, (i - 0.4, i + 0.4), (min(ends), max(ends))
    axes.axhline(0, color=INK, linewidth=0.7)
    _set_axis(axes, "y", [*above, *below], block.y)
    axes.set(xlim=(-0.6, count - 0.4))
    _name_ticks(axes.xaxis, block.places, MOST_NAMED)
    _set_legend(axes)


# Points and lines


def _draw_curve(axes: Axes, block: Curve) -> Iterator[Tip]:
    """Draw points and lines; with very many points, only those of the largest y have tooltips."""
    import numpy as np

    names = {place: name for name, place in block.ticks.items()}
    most = MOST_TIPS // sum(not series.guide for series in block.series)
    for index, series in enumerate(block.series):
        colour, line = CATEGORIES[index % len(CATEGORIES)], LINES[index % len(LINES)]
        look: dict[str, Any] = {"label": visible(series.label), "color": colour}
        if series.guide:
            look |= {"color": INK, "linewidth": 0.7, "linestyle": line}
        elif block.joined:
            # More marks overlap and hide the line.
            marker = MARKERS[index % len(MARKERS)] if len(series.x) <= 64 else ""
            look |= {"linestyle": line, "marker": marker}
        else:
            marker = MARKERS[(index + index // len(MARKERS)) % len(MARKERS)]
            look |= {"linestyle": "", "marker": marker, "alpha": 0.8, "markeredgewidth": 0}
            look["rasterized"] = len(series.x) > MANY
        axes.plot(series.x, series.y, **look)
        if any(end is not None for end in series.low):
            low, high = (np.array(end, dtype=np.float64) for end in (series.low, series.high))
            axes.vlines(series.x, low, high, color=colour, linewidth=0.9)
        points = enumerate(zip(series.x, series.y, strict=True))
        drawn = [i for i, p in points if math.isfinite(sum(p)) and (not block.log or min(p) > 0)]
        drawn.sort(key=lambda i: -series.y[i])
        for i in () if series.guide else drawn[:most]:
            x, y = series.x[i], series.y[i]
            across = names.get(x) or cells.format_value(x, block.x)
            ends = (series.low[i], series.high[i]) if series.low else (None, None)
            up = cells.format_with_limits(cells.format_value(y, block.y), *ends, block.y)
            figures = cells.write_math(f"{block.x.label} {across}, {block.y.label} {up}")
            owner = ", ".join(filter(None, [*series.names[i : i + 1], series.label]))
            yield f"{owner}: {figures}", (x, x), (y, y)
    x_values = [v for s in block.series for v in s.x if math.isfinite(v)]
    ends_of_y = [v for s in block.series for v in (*s.y, *s.low, *s.high) if v is not None]
    _set_axis(axes, "x", x_values, block.x, log=block.log)
    _set_axis(axes, "y", [v for v in ends_of_y if math.isfinite(v)], block.y, log=block.log)
    if block.y.format.endswith("%") and not block.log:
        axes.set_ylim(0, 1.02)
    if block.ticks:
        axes.set_xticks(list(block.ticks.values()), labels=list(block.ticks))
    _set_legend(axes)
