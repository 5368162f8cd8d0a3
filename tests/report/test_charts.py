"""Charts through their doors: the SVG element of a page, the words, the colours."""

import dataclasses
import math
import re
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest

from lipaudit.report import charts
from lipaudit.report.blocks import (
    Chapter,
    Curve,
    Heatmap,
    Histogram,
    Series,
    Stack,
    compute_scale,
    describe,
)
from lipaudit.report.charts import draw_svg
from lipaudit.report.pictures import compare_steepness
from lipaudit.report.scales import harmonise
from lipaudit.tables import Column

X = Column(label="||x||", meaning="", format=".3g")
COUNT = Column(label="n", meaning="", format="d")
HOSTILE = "<b>$x$ & 'y'</b>"


def heatmap(height: int, width: int, **how: object) -> Heatmap:
    values = tuple(tuple(float(10 * i + j) for j in range(width)) for i in range(height))
    names = [tuple(map(str, range(n))) for n in (height, width)]
    return dataclasses.replace(Heatmap("a map", values, *names, X), **how)


def scatter(title: str, x: Column, y: Column, series: Series) -> Curve:
    return Curve(title, x, y, (series,), log=True, joined=False)


BLOCKS = [
    heatmap(2, 3),
    Heatmap("empty map", ((None, float("nan")),), ("0",), ("0", "1"), X),
    Heatmap("infinite map", ((float("-inf"), 1.0),), ("0",), ("0", "1"), X),
    Histogram("one", X, {"": (1.0, 2.0, 2.0)}),
    Histogram("two", X, {HOSTILE: (1.0, 20.0, 100.0), "b": ()}),
    scatter("points", X, X, Series(HOSTILE, (1.0, 2.0), (3.0, 4e5))),
    scatter("one point", X, X, Series("a", (1.0,), (1.0,))),
    heatmap(1, 2, title="huge map", values=((1e308, -1e308),), centre=0.0),
    scatter("huge", X, X, Series("a", (1.0, 1e300), (1e-300, 2.0))),
    scatter("far apart", X, X, Series("a", (1e-289, 1e289), (1e289, 1e-289))),
    Curve("plane", X, X, (Series("a", (-1.0, 2.0), (3.0, 0.0)),)),
    Curve("line", X, X, (Series(HOSTILE, (8.0, 9.0), (1.0, 2.0), (None, 0.0), (1.0, 3.0)),), True),
    Curve("share", X, X, (Series("a", (0.0, 1.0), (0.5, 0.2)),), ticks={"0": 0.0, "1/1": 1.0}),
    heatmap(1, 2, title="map", values=((0.0, 0.0),), is_attention=True),
    Stack("stack", ("0 attention", HOSTILE), X, {"a": (0.7, -0.2), HOSTILE: (0.3, 1.2)}),
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.title)
def test_picture_is_an_element_of_its_page(block):
    element = draw_svg(block)
    assert element.startswith('<svg role="img" aria-label="')
    assert element.endswith("</svg>")
    assert "http" not in element
    assert "<b>" not in element
    assert charts.INK not in element
    assert "currentColor" in element
    assert describe(block).startswith(f"{block.title}: ")
    if block is BLOCKS[3]:  # settings of the caller come back, and change nothing
        with mpl.rc_context({"font.size": 31.0, "axes.facecolor": "red"}):
            before = dict(mpl.rcParams)
            assert element == draw_svg(block)
            assert dict(mpl.rcParams) == before


def tips(element: str) -> list[tuple[str, dict[str, float]]]:
    """Return what the titles of a picture say, and where they are."""
    (group,) = re.findall(r'<g class="marks">(.*?)</g>', element, re.DOTALL)
    marks = re.findall(r"<(?:circle|rect) (.*?)><title>(.*?)</title>", group, re.DOTALL)
    return [
        (said, {k: float(v) for k, v in re.findall(r'(\w+)="(.*?)"', at)}) for at, said in marks
    ]


def cells(element: str) -> list[tuple[np.ndarray, np.ndarray, str]]:
    """Return the corner, the size and the colour of the cells that are drawn."""
    found = re.findall(r'<path d="M ([\d. L-]+)" style="fill: (#[0-9a-f]{6})"', element)
    numbers = [np.array(p.replace("L", "").split(), float).reshape(-1, 2) for p, _ in found]
    return [(n.min(0), np.ptp(n, axis=0), c) for n, (_, c) in zip(numbers, found, strict=True)]


@pytest.mark.parametrize("centre", [None, 0.0])
def test_a_map_has_its_figure_on_its_colour_and_a_title_in_every_cell(centre):
    block = heatmap(2, 3, centre=centre)
    scale, element = compute_scale(block), draw_svg(block)
    labels = re.findall(r'x="([\d.]+)" y="([\d.]+)">([\d.]+)</text>', element)
    colours = mpl.colormaps["viridis" if centre is None else "RdBu_r"]
    drawn = cells(element)[:6]
    for (row, column), (corner, size, colour), (said, at) in zip(
        np.ndindex(2, 3), drawn, tips(element), strict=True
    ):
        value = block.values[row][column]
        shown = f"{value:#.3g}".rstrip(".")
        assert said == f"layer {row}, head {column}: {shown}"
        assert (at["x"], at["y"]) == pytest.approx(tuple(corner), abs=0.1)
        assert (at["width"], at["height"]) == pytest.approx(tuple(size), abs=0.1)
        wanted = [255 * part for part in colours(scale.share(value))[:3]]
        assert bytes.fromhex(colour[1:]) == pytest.approx(wanted, abs=3)
        middle = corner + size / 2
        near = [t for x, y, t in labels if np.allclose((float(x), float(y)), middle, atol=4)]
        assert near == [shown]
    assert drawn[0][0][1] < drawn[3][0][1]  # the first layer is on top


def test_many_marks_become_one_image():
    few, many = draw_svg(heatmap(10, 10)), draw_svg(heatmap(30, 30))
    assert few.count("<path") > 100
    assert many.count("<path") < 100
    assert len(re.findall("data:image/png", many)) == len(re.findall("data:image/png", few)) + 1


def test_titles_lie_on_the_points_that_are_drawn():
    points = Series("a", (1.0, 2.0, 7.0), (30.0, 4.0, 5.0), names=("p", "q", "r"))
    element = draw_svg(scatter("s", X, COUNT, points))
    drawn = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', element)
    found = tips(element)
    assert [said for said, _ in found] == [
        "p, a: ‖x‖ 1.00, n 30",
        "r, a: ‖x‖ 7.00, n 5",
        "q, a: ‖x‖ 2.00, n 4",
    ]
    for _, at in found:
        assert any(np.hypot(float(x) - at["cx"], float(y) - at["cy"]) < 0.2 for x, y in drawn)


def read_ticks(element: str) -> list[tuple[float, float]]:
    """Return the figure and the height of every tick of the vertical axis."""
    ends = r'<text style="[^"]*text-anchor: end[^"]*" x="[\d.]+" y="([\d.]+)">([^<]+)</text>'
    below = 3.42  # the baseline of a number lies below its tick
    figures = [
        (re.sub(r"(?:(.+)×)?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda m: f"{m[1] or 1}e{m[2]}", said), y)
        for y, said in re.findall(ends, element)
    ]
    lowered = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    return [(float(said.translate(lowered)), float(y) - below) for said, y in figures]


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(
    ("low", "factor"), [(1e-9, 1), (1e-9, 1e12), (1234.5, 1), (1234.5, 1.0001), (1234.5, 9)]
)
def test_every_axis_has_two_ticks_that_say_where_they_are(low, factor, log):
    """The heights of two points, which are known, say where a figure belongs."""
    points = Series("a", (1.0, 2.0), (low, low * factor))
    element = draw_svg(Curve("s", X, X, (points,), log=log))
    ticks = read_ticks(element)
    assert 2 <= len(ticks) <= 14
    assert len(set(ticks)) == len(ticks)
    last, first = sorted(at["cy"] for _, at in tips(element))[:: 1 if factor > 1 else -1]
    scale = math.log if log else float
    span = scale(low * factor) - scale(low)
    for value, height in ticks if span else ():
        share = (scale(value) - scale(low)) / span
        assert height == pytest.approx(first + share * (last - first), abs=1.5)


def scale_of(*values: float | None, centre: float | None = None, spec: str = ".3g"):
    column = dataclasses.replace(X, format=spec)
    return compute_scale(
        Heatmap("m", (values,), ("0",), ("0",) * len(values), column, centre=centre)
    )


def test_wide_values_are_placed_by_their_logarithm():
    assert scale_of(1.0, 10.0, 100.0).share(10.0) == pytest.approx(0.5)
    assert scale_of(1.0, 5.0, 9.0).share(5.0) == pytest.approx(0.5)
    assert scale_of(0.001, 0.15, 0.2, 0.3).share(0.1505) == pytest.approx(0.5)  # one is small
    assert scale_of(0.01, 0.505, 1.0, spec=".1%").share(0.505) == pytest.approx(0.5)
    assert not scale_of(0.0, 1.0, 100.0).log


def test_a_centre_has_no_colour_and_both_sides_reach_equally_far():
    change = scale_of(-0.1, 0.4, None, float("inf"), centre=0.0)
    assert change.share(0.0) == 0.5
    assert change.share(0.4) == 1.0
    assert change.share(-0.1) == pytest.approx(0.375)
    assert scale_of(0.0, centre=0.0).share(0.0) == pytest.approx(0.5)


def light(parts) -> np.ndarray:
    """Undo the sRGB transfer curve."""
    shares = np.array(parts) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def luminance(colour) -> float:
    return float(light(colour) @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("centre", [None, 0.0])
def test_numbers_are_legible_on_every_colour(centre):
    """WCAG 2 asks for a contrast of 4.5, of large text for 3."""
    values = tuple(float(v) for v in np.linspace(-1 if centre == 0 else 0, 1, 20))
    element = draw_svg(heatmap(1, 20, values=(values,), centre=centre))
    inks = re.findall(r"font-size: 8px; text-anchor: middle(?:; fill: (#[0-9a-f]{6}))?", element)
    grounds = [colour for *_, colour in cells(element)[:20]]
    assert len(grounds) == 20 == len(inks)
    for ink, ground in zip(inks, grounds, strict=True):
        pair = (ink or "#000000", ground)
        fore, back = (luminance(list(bytes.fromhex(c[1:]))) + 0.05 for c in pair)
        assert max(back, fore) / min(back, fore) >= 3.5


def test_shares_without_the_norm_of_any_shared_head_are_mapped():
    """Head 0.0 has a share but no norm; head 0.1 has a norm but no share."""
    row = SimpleNamespace
    norms = [row(layer=0, head=0, exact=None), row(layer=0, head=1, exact=2.0)]
    bounds = SimpleNamespace(columns=["exact"], rows=norms)
    shares = SimpleNamespace(rows=[row(layer=0, head=0, share=0.5)])
    steep, carried = compare_steepness(bounds, shares)
    assert steep.values[0][0] is None
    assert carried.values[0][0] == 1.0
    assert (carried.scale.low, carried.scale.high) == (0.0, 1.0)


def test_a_model_whose_name_begins_with_that_of_another_has_its_own_colour():
    models = ["demo", "demo int4:32", "demo int4:32 bfloat16"]
    labels = [*models, *(f"{name} encoder mean" for name in models), "demon", "y = x"]
    lines = [Series(label, (0.0, 1.0), (0.0, 1.0)) for label in labels]
    (chapter,) = harmonise([Chapter("depth", "", [Curve("c", X, X, lines)])], models)
    assert [line.colour for line in chapter.blocks[0].series] == [0, 1, 2] * 2 + [None] * 2
