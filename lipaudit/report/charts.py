"""Charts by matplotlib: SVG elements of a page, with a tooltip at every point.

`pictures.describe` describes a chart in words, without matplotlib.
"""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lipaudit.errors import InputError, visible
from lipaudit.report.cells import (
    format_number,
    format_value,
    format_with_limits,
    write_math,
)
from lipaudit.report.pictures import (
    CATEGORIES,
    EXTREME,
    Curve,
    Density,
    Heatmap,
    Histogram,
    Picture,
    Scatter,
    Series,
    Span,
    choose_ink,
    compute_scale,
    describe,
    name_places,
)
from lipaudit.tables import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tip = tuple[str, Span, Span]
"""The text of a tooltip and its place in the units of the axes: a point, or the ends in x, y."""
INK = "#010203"
"""Placeholder colour that becomes the page's text colour (light in dark mode)."""
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
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "axes.unicode_minus"), False),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
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
    from matplotlib.figure import Figure

    size = WIDTH, HEIGHT
    match block:  # grows with the rows and the names beside them
        case Heatmap():
            wide, high = 1.5 + 0.44 * len(block.columns), 0.9 + 0.31 * len(block.rows)
            size = min(max(wide, WIDTH), 9.5), min(max(high, 2.2), 9.0)
        case Density():
            names = len(block.names) if len(block.names) <= MOST_NAMED else 0
            side = max(HEIGHT, 1.3 + 0.13 * names)
            size = side * 1.25, side
    # Constrained layout gives the labels of a square the room of its whole axes.
    layout: Any = "compressed" if isinstance(block, Density) else "constrained"
    with mpl.rc_context():
        # A caller may have set another style: the page does not depend on it.
        mpl.rcdefaults()
        # matplotlib names clip paths by a hash with this salt: equal blocks give equal bytes.
        mpl.rcParams.update({**STYLE, "svg.hashsalt": f"{type(block).__name__} {block.title}"})
        figure = Figure(figsize=size, layout=layout)
        axes = figure.add_subplot()
        tips, file = list(DRAW[type(block)](axes, block)), io.BytesIO()
        figure.savefig(file, format="svg", transparent=True, dpi=160, metadata={"Date": None})
        # After the figure is drawn: saving moves the axes.
        marks = _write_tips(axes, tips)
    # A page counts 96 pixels an inch.
    return _embed(file.getvalue().decode(), describe(block), marks, 96 * size[0])


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
    lines = [
        f"<{shape}><title>{chr(10).join(text)}</title></{shape.split()[0]}>"
        for shape, text in texts.items()
    ]
    return f'<g class="marks">{"".join(lines)}</g>' if lines else ""


# Axes


def _set_axis(
    axes: Axes, which: str, values: Sequence[float], column: Column, *, log: bool = False
) -> tuple[float, float]:
    """Scale and label an axis; return its ends, which are slightly beyond the values."""
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
    return low, high


def _label(column: Column) -> str:
    return write_math(column.label) + (f" ({column.unit})" if column.unit else "")


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
    # 8 digits distinguish ticks that differ by 1e-6, and hide the rounding of 0.1 + 0.2.
    labels = [format_number(100 * v if share else v, ".8g") + "%" * share for v in places]
    axis.set_ticks(places, labels=labels)
    axis.set_minor_locator(NullLocator())


def _name_ticks(axis: Any, names: Sequence[str]) -> None:
    """Label the places 0, 1, ...; with many names every second, third, ... one."""
    step = -(-len(names) // 16) or 1
    axis.set_ticks(range(0, len(names), step), labels=[visible(name) for name in names[::step]])
    axis.set_tick_params(length=0)


def _set_legend(axes: Axes) -> None:
    """Set the legend above the picture, in as many columns as fit."""
    labels = axes.get_legend_handles_labels()[1]
    # About 56 letters fit above a picture; a mark takes the room of six.
    columns = max(1, min(len(labels), 56 // (max(map(len, labels), default=0) + 6)))
    axes.figure.legend(loc="outside upper left", ncols=columns)


# Matrices: the map of heads, joint histograms, attention


def _draw_heatmap(axes: Axes, block: Heatmap) -> Iterator[Tip]:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    values, scale = np.array(block.values, dtype=np.float64), compute_scale(block)
    colours = [[channel / 255 for channel in colour] for colour in scale.colours]
    look: dict[str, Any] = {
        "cmap": LinearSegmentedColormap.from_list("scale", colours),
        "norm": (LogNorm if scale.log else Normalize)(scale.low, scale.high),
    }
    ends = (-0.5, len(block.columns) - 0.5), (-0.5, len(block.rows) - 0.5)
    label = _label(block.column) + (", log scale" if scale.log else "")
    bar = _draw_mesh(axes, values, *ends, label, **look)
    _set_ticks(bar.ax.yaxis, block.column, log=scale.log)
    axes.invert_yaxis()
    _name_ticks(axes.xaxis, block.columns)
    _name_ticks(axes.yaxis, block.rows)
    axes.set(xlabel="head", ylabel="layer")
    written = values.size <= MANY and len(block.columns) <= 20
    for index, (y, x) in enumerate(np.ndindex(values.shape)):
        text = format_value(block.values[y][x], block.column)
        if written:
            share = scale.share(block.values[y][x])
            ink = INK if share is None else choose_ink(scale.colour(share))
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)
        if index < MOST_TIPS:
            head = f"head {block.rows[y]}.{block.columns[x]}"
            yield f"{head}: {text}", (x - 0.5, x + 0.5), (y - 0.5, y + 0.5)


def _draw_density(axes: Axes, block: Density) -> Iterator[Tip]:
    """Draw the entries, over their picture if there is one."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb
    from PIL import Image, UnidentifiedImageError

    values = np.array(block.values, dtype=np.float64)
    # Zeros stay blank: most cells of a joint histogram, and masked keys of a map.
    values[(values == 0) | (np.abs(values) > EXTREME)] = float("nan")
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    # Square roots, so that small entries stay visible.
    norm = PowerNorm(0.5, 0.0 if block.image else low, high if high > low else low + 1.0)
    colours: Any = "viridis"
    if block.image:  # the larger an entry, the less of the picture shows through
        colour = to_rgb(CATEGORIES[1])
        colours = LinearSegmentedColormap.from_list("veil", [(*colour, 0.0), (*colour, 0.9)])
        try:
            picture = Image.open(io.BytesIO(base64.b64decode(block.image))).convert("RGB")
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as error:
            raise InputError(
                "the report is damaged: an image in it cannot be read", "Create the report again."
            ) from error
        ends = (*block.x_range, *block.y_range[::-1])
        axes.imshow(
            picture.convert("L"), cmap="gray", vmin=0, vmax=255, extent=ends, aspect="auto"
        )
    label = write_math(block.value.label)
    _draw_mesh(axes, values, block.x_range, block.y_range, label, cmap=colours, norm=norm)
    axes.set_box_aspect(values.shape[0] / values.shape[1] if block.image else 1)
    if 0 < len(block.names) <= MOST_NAMED:
        names = [visible(name)[:LETTERS] for name in block.names]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
    else:
        _set_ticks(axes.xaxis, block.x)
        _set_ticks(axes.yaxis, block.y)
    if block.down:
        axes.invert_yaxis()
    axes.set(xlabel=write_math(block.x.label), ylabel=write_math(block.y.label))
    across, up = name_places(block)
    if values.size <= MOST_TIPS:
        for (y_name, y), row in zip(up, block.values, strict=True):
            for (x_name, x), value in zip(across, row, strict=True):
                yield f"{x_name}, {y_name}: {format_value(value, block.value)}", x, y


def _draw_mesh(axes: Axes, values: Any, x: Span, y: Span, label: str, **look: Any) -> Any:
    """Draw a matrix as coloured cells, and return its colour bar."""
    import numpy as np

    height, width = values.shape
    corners = np.linspace(*x, width + 1), np.linspace(*y, height + 1)
    # Many cells as paths would make the page several megabytes large.
    masked, many = np.ma.masked_invalid(values), values.size > MANY
    mesh = axes.pcolormesh(*corners, masked, rasterized=many, clip_on=False, **look)
    axes.set(xlim=x, ylim=y)
    figure: Any = axes.get_figure()
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30)
    bar.set_label(label)
    bar.outline.set_visible(False)
    bar.solids.set_rasterized(True)
    return bar


# Counts and shares


def _draw_histogram(axes: Axes, block: Histogram) -> Iterator[Tip]:
    for index, (label, counts) in enumerate(block.counts.items()):
        colour, line = CATEGORIES[index % len(CATEGORIES)], LINES[index % len(LINES)]
        axes.stairs(counts, block.edges, fill=True, alpha=0.3, color=colour, linewidth=0)
        axes.stairs(counts, block.edges, label=visible(label), color=colour, linestyle=line)
    log = block.edges[0] > 0 and block.edges[-1] > 10 * block.edges[0]
    _set_axis(axes, "x", block.edges, block.x, log=log)
    known = [n for counts in block.counts.values() for n in counts if 0 < n < EXTREME]
    axes.set(ylabel="count", ylim=(0, 1.05 * max(known, default=0.0) or 1.0))
    _set_ticks(axes.yaxis, Column("count", "", format="d"))
    if len(block.counts) > 1:
        _set_legend(axes)
    return iter(())  # the axes name the figures


# Points and lines


def _draw_scatter(axes: Axes, block: Scatter) -> Iterator[Tip]:
    for index, series in enumerate(block.series):
        colour = CATEGORIES[index % len(CATEGORIES)]
        marker = MARKERS[(index + index // len(MARKERS)) % len(MARKERS)]
        look: dict[str, Any] = {"marker": marker, "color": colour}
        look["rasterized"] = len(series.x) > MANY
        label = visible(series.label)
        axes.scatter(series.x, series.y, s=18, alpha=0.8, linewidths=0, label=label, **look)
    x, y = _values(block.series)
    ends = _set_axis(axes, "x", x, block.x, log=True)
    axes.plot(ends, ends, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), label="y = x")
    _set_axis(axes, "y", [*y, *ends], block.y, log=True)
    _set_legend(axes)
    yield from _point_tips(block, log=True)


def _draw_curve(axes: Axes, block: Curve) -> Iterator[Tip]:
    import numpy as np

    for index, series in enumerate(block.series):
        colour, line = CATEGORIES[index % len(CATEGORIES)], LINES[index % len(LINES)]
        label, marker = visible(series.label), MARKERS[index % len(MARKERS)]
        if series.guide:
            axes.plot(series.x, series.y, label=label, linewidth=0.7, color=INK, linestyle=line)
            continue
        # More marks overlap and hide the line.
        marker = marker if len(series.x) <= 64 else ""
        look: dict[str, Any] = {"color": colour, "linestyle": line, "marker": marker}
        axes.plot(series.x, series.y, label=label, **look)
        if any(end is not None for end in series.low):
            low, high = (np.array(end, dtype=np.float64) for end in (series.low, series.high))
            axes.vlines(series.x, low, high, color=colour, linewidth=0.9)
    x, y = _values(block.series)
    _set_axis(axes, "x", x, block.x, log=block.log)
    _set_axis(axes, "y", y, block.y, log=block.log)
    if block.y.format.endswith("%") and not block.log:
        axes.set_ylim(0, 1.02)
    if block.ticks:
        axes.set_xticks(list(block.ticks.values()), labels=list(block.ticks))
    _set_legend(axes)
    yield from _point_tips(block, log=block.log)


def _values(series: Sequence[Series]) -> tuple[list[float], list[float]]:
    """Return all drawn values of each axis."""
    x = [v for s in series for v in s.x]
    y = [v for s in series for v in (*s.y, *s.low, *s.high) if v is not None]
    return [v for v in x if math.isfinite(v)], [v for v in y if math.isfinite(v)]


def _point_tips(block: Scatter | Curve, *, log: bool) -> Iterator[Tip]:
    """Return the names and figures of points; with very many points, those of the largest y."""
    named = {v: k for k, v in block.ticks.items()} if isinstance(block, Curve) else {}
    drawn = [series for series in block.series if not series.guide]
    for series in drawn:
        points = [
            (i, x, y)
            for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
            if math.isfinite(x + y) and (not log or min(x, y) > 0)
        ]
        most = MOST_TIPS // len(drawn)
        for i, x, y in (
            points if len(points) <= most else sorted(points, key=lambda p: -p[2])[:most]
        ):
            whose = [*series.names[i : i + 1]]
            if not whose or len(block.series) > 1:
                whose.append(series.label)
            across = named.get(x) or format_value(x, block.x)
            ends = (series.low[i], series.high[i]) if series.low else (None, None)
            up = format_with_limits(format_value(y, block.y), *ends, block.y)
            figures = f"{write_math(block.x.label)} {across}, {write_math(block.y.label)} {up}"
            yield f"{', '.join(filter(None, whose))}: {figures}", (x, x), (y, y)


DRAW: dict[type[Any], Callable[[Axes, Any], Iterator[Tip]]] = {
    Heatmap: _draw_heatmap,
    Density: _draw_density,
    Histogram: _draw_histogram,
    Scatter: _draw_scatter,
    Curve: _draw_curve,
}
