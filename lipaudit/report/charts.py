"""Charts by matplotlib: SVG elements of a page, with a tooltip at every point.

`blocks.describe` describes a chart in words, without matplotlib.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lipaudit.errors import visible
from lipaudit.report import blocks, plots
from lipaudit.report.axes import CATEGORIES, INK, MOST_NAMED
from lipaudit.report.blocks import Forest, Heatmap, Picture
from lipaudit.report.plots import Span, Tip
from lipaudit.tables.columns import group_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Size of a chart in inches, if it does not depend on the data.
WIDTH = 4.9
HEIGHT = 3.3
# Pixels of a page, and points of an SVG file, in an inch.
PIXELS = 96
POINTS = 72
STYLE: dict[Any, Any] = {
    **dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK
    ),
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

    size = _choose_size(block)
    layout: Any = "constrained"
    if isinstance(block, Heatmap) and block.is_attention:
        # Unlike "constrained", this layout leaves no empty bands beside axes of fixed shape.
        layout = "compressed"
    with mpl.rc_context():
        # A caller may have set another style: the page does not depend on it.
        mpl.rcdefaults()
        # matplotlib names clip paths by a hash with this salt: equal blocks give equal bytes.
        salt = f"{type(block).__name__} {block.title}"
        mpl.rcParams.update(STYLE)
        mpl.rcParams["svg.hashsalt"] = salt
        figure = Figure(figsize=size, layout=layout, dpi=160, facecolor="none")
        axes = figure.add_subplot()
        tips = plots.draw_block(axes, block)
        file = io.BytesIO()
        canvas: Any = FigureCanvasSVG(figure)  # it lays out as it draws: `savefig` draws twice
        canvas.print_svg(file, metadata={"Date": None})
        # Saving moves the axes, so the positions of tooltips are computed afterwards.
        marks = _write_tips(axes, tips)
    element = _shorten(file.getvalue().decode())
    return _embed(element, alternative=blocks.describe(block), marks=marks, width=PIXELS * size[0])


def _choose_size(block: Picture) -> tuple[float, float]:
    """Return width and height of a picture in inches.

    A map grows with its number of rows and columns, or with the number of names beside its axes.
    The constants are the room for axes, and for each row, column or name.
    """
    if isinstance(block, Forest):
        return WIDTH, 1.1 + plots.ROW * len(block.bars)
    if not isinstance(block, Heatmap):
        return WIDTH, HEIGHT
    if block.is_attention:  # few tokens have their names beside the axes
        names = len(block.rows) if len(block.rows) <= MOST_NAMED else 0
        side = max(HEIGHT, 1.3 + 0.13 * names)
        return side * 1.25, side
    width = 1.5 + 0.44 * len(block.columns)
    height = 0.9 + 0.31 * len(block.rows)
    return min(max(width, WIDTH), 9.5), min(max(height, 2.2), 9.0)


# An SVG file as an element of a page


NEEDLESS = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<g/>|<defs/>|font-family: [^;\"]*; ?"
    r"| xmlns(:\w+)?=\"[^\"]*\"| version=\"[^\"]*\"| transform=\"rotate\(-0 [^\"]*\"",
    re.DOTALL,
)
"""Parts of an SVG file that are not needed inside a page."""
NUMBER = re.compile(r"-?\d+\.\d+")
PLACES = re.compile(r' (d|x|y|transform)="([^"]*)"')
"""Attributes with numbers, of which nobody sees more than hundredths of a point."""


def _shorten(file: str) -> str:
    """Return the <svg> element of an SVG file without unused ids and unneeded digits."""
    element = file[file.index("<svg") :]
    element = NEEDLESS.sub("", element)
    # Two pictures of a page have ids such as axes_1 in common: keep only the ids in use (#NAME).
    used = set(re.findall(r"#([\w-]+)", element))
    for name in re.findall(r' id="([^"]+)"', element):
        if name not in used:
            element = element.replace(f' id="{name}"', "")
    element = element.replace("xlink:href", "href")
    element = re.sub(r">\s+<", "><", element)
    element = PLACES.sub(_round_attribute, element)
    return re.sub(r' (height|width)="[\d.]+pt"', "", element, count=2).strip()


def _round_attribute(match: re.Match[str]) -> str:
    """Return an SVG attribute with rounded numbers and without repeated spaces.

    Args:
        match: the match of the attribute: its name and its value.
    """
    value = NUMBER.sub(_round_number, match[2])
    value = " ".join(value.split())
    return f' {match[1]}="{value}"'


def _round_number(found: re.Match[str]) -> str:
    """Round a number to hundredths, without zeros at its end."""
    number = float(found[0])
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _embed(element: str, alternative: str, marks: str, width: float) -> str:
    """Return an SVG element in the page's font and colours, with tooltips.

    Args:
        element: the element as matplotlib draws it.
        alternative: the picture in words, for screen readers.
        marks: elements with the tooltips.
        width: width of the picture in pixels.
    """
    # The style sheet of the page may redefine each colour, for example in dark mode.
    for index, colour in enumerate(CATEGORIES):
        element = element.replace(colour, f"var(--c{index}, {colour})")
    element = element.replace(INK, "currentColor")
    inside = element.removeprefix("<svg").removesuffix("</svg>")
    label = html.escape(visible(alternative))
    start = f'<svg role="img" aria-label="{label}" style="--width:{width:.0f}px"'
    return f"{start}{inside}{marks}</svg>"


def _write_tips(axes: Axes, tips: Sequence[Tip]) -> str:
    """Return invisible SVG elements with tooltips. Tooltips at the same place share an element.

    Args:
        axes: the axes, after the figure is drawn.
        tips: the text of each tooltip, and the area that shows it: two ends along x and two along
            y, in the units of the axes. An area with equal ends is a point and becomes a circle;
            any other area becomes a rectangle.
    """
    texts = group_values(
        (_write_shape(axes, x, y), html.escape(visible(text), quote=False)) for text, x, y in tips
    )
    if not texts:
        return ""
    marks = ""
    for shape, lines in texts.items():
        element, *_ = shape.split()
        title = "\n".join(lines)
        marks += f"<{shape}><title>{title}</title></{element}>"
    return f'<g class="marks">{marks}</g>'


def _write_shape(axes: Axes, x: Span, y: Span) -> str:
    """Return the SVG element of a tooltip's area without its brackets, such as `circle cx=...`.

    Args:
        axes: the axes, after the figure is drawn.
        x: the two ends of the area along x, in the units of the axes.
        y: the two ends along y. If both pairs are equal, the area is a point: a circle.
    """
    figure: Any = axes.get_figure(root=True)
    corners = list(zip(x, y, strict=True))
    # In points from the lower left corner; SVG counts from the upper left one.
    (x0, y0), (x1, y1) = (axes.transData.transform(corners) * (POINTS / figure.dpi)).tolist()
    left = min(x0, x1)
    top = figure.get_figheight() * POINTS - max(y0, y1)
    width = abs(x1 - x0)
    height = abs(y1 - y0)
    if not width and not height:
        return f'circle cx="{left:.1f}" cy="{top:.1f}" r="5"'
    return f'rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
