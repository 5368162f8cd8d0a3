"""Matrices as coloured cells: maps of heads, joint histograms, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lipaudit.report.blocks import Density, Heatmap
from lipaudit.report.cells import plain, pretty, text
from lipaudit.report.draw import axes as axis
from lipaudit.report.draw import colours
from lipaudit.report.draw.inline import INK
from lipaudit.report.draw.portraits import opened

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

MOST_NAMED, LETTERS = 40, 14
"""So many places of a matrix are named beside its axes, with so many letters."""
MANY = 500
"""Above this many marks the marks are a PNG inside the SVG."""
WIDTH, HEIGHT = 4.9, 3.3
"""Inches of a picture whose size nothing else decides."""


def heatmap_size(block: Heatmap) -> tuple[float, float]:
    """Return how large the picture is, in inches."""
    wide = 1.5 + 0.44 * len(block.columns)
    return min(max(wide, WIDTH), 9.5), min(max(0.9 + 0.31 * len(block.rows), 2.2), 9.0)


def density_size(block: Density) -> tuple[float, float]:
    """Return how large the picture is, in inches: it grows with the names beside it."""
    named = 1.3 + 0.13 * len(block.names) if len(block.names) <= MOST_NAMED else 0
    side = max(HEIGHT, named)
    return side * 1.25, side


def heatmap(axes: Axes, block: Heatmap) -> None:
    """Draw the cells on their colours, with their figures where they are few."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    values, scale = np.array(block.values, dtype=np.float64), colours.scale(block)
    mapped = [[channel / 255 for channel in colour] for colour in scale.colours]
    norm = (LogNorm if scale.log else Normalize)(scale.low, scale.high)
    look: dict[str, Any] = {
        "cmap": LinearSegmentedColormap.from_list("scale", mapped),
        "norm": norm,
    }
    ends = (-0.5, len(block.columns) - 0.5), (-0.5, len(block.rows) - 0.5)
    mesh = _mesh(axes, values, *ends, **look)
    axes.invert_yaxis()
    axis.ticks(axes.xaxis, block.columns)
    axis.ticks(axes.yaxis, block.rows)
    axes.set(xlabel=block.axes[1], ylabel=block.axes[0])
    if values.size <= MANY and len(block.columns) <= 20:
        _numbers(axes, block, scale)
    bar = _bar(axes, mesh, axis.titled(block.column) + (", log scale" if scale.log else ""))
    places = axis.places(scale.low, scale.high, log=scale.log)
    axis.tick(bar.ax.yaxis, places, block.column)


def _numbers(axes: Axes, block: Heatmap, scale: colours.Scale) -> None:
    for y, row in enumerate(block.values):
        for x, value in enumerate(row):
            share = scale.share(value)
            colour = INK if share is None else colours.contrast(scale.colour(share))
            label = text(value, block.column)
            axes.text(x, y, label, ha="center", va="center", fontsize=8, color=colour)


def density(axes: Axes, block: Density) -> None:
    """Draw the entries, over the picture that they are of where there is one."""
    import numpy as np
    from matplotlib.colors import PowerNorm

    values = np.array(block.values, dtype=np.float64)
    values[values == 0] = float("nan")
    low, high = axis.limits(np.ma.masked_invalid(values))
    norm = PowerNorm(0.5, 0.0 if block.image else low, high)
    cmap: Any = _veil() if block.image else "viridis"
    mesh = _mesh(axes, values, block.x_range, block.y_range, cmap=cmap, norm=norm)
    mesh.set_rasterized(True)
    height, width = values.shape
    axes.set_box_aspect(height / width if block.image else 1)
    if block.image:
        ends = (*block.x_range, *block.y_range[::-1])
        look: dict[str, Any] = {
            "cmap": "gray",
            "vmin": 0,
            "vmax": 255,
            "extent": ends,
            "aspect": "auto",
        }
        axes.imshow(opened(block.image).convert("L"), **look)
    if 0 < len(block.names) <= MOST_NAMED:
        names = [plain(name)[:LETTERS] for name in block.names]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
    elif block.x.format == "d":
        axis.whole(axes.xaxis)
        axis.whole(axes.yaxis)
    if block.down:
        axes.invert_yaxis()
    axes.set(xlabel=pretty(block.x.label), ylabel=pretty(block.y.label))
    _bar(axes, mesh, pretty(block.value.label))


def _veil() -> Any:
    """Return colours to lay over a grey picture: the larger, the less of it shows through."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    colour = to_rgb(colours.CATEGORIES[1])
    return LinearSegmentedColormap.from_list("veil", [(*colour, 0.0), (*colour, 0.9)])


def _mesh(
    axes: Axes,
    values: np.ndarray[Any, Any],
    x: tuple[float, float],
    y: tuple[float, float],
    **look: Any,
) -> Any:
    import numpy as np

    height, width = values.shape
    mesh = axes.pcolormesh(
        np.linspace(*x, width + 1),
        np.linspace(*y, height + 1),
        np.ma.masked_invalid(values),
        rasterized=values.size > MANY,
        clip_on=False,
        **look,
    )
    axes.set(xlim=x, ylim=y)
    return mesh


def _bar(axes: Axes, mesh: Any, label: str) -> Any:
    figure = axes.get_figure()
    assert figure is not None
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30)
    bar.set_label(label)
    bar.outline.set_visible(False)
    if bar.solids is not None:
        bar.solids.set_rasterized(True)
    return bar
