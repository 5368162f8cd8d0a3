"""Charts through their doors: the SVG element of a page, the words, the colours."""

import dataclasses
import itertools
import math
import re
from importlib.resources import files

import matplotlib as mpl
import numpy as np
import pytest

from lipaudit.report import charts
from lipaudit.report.charts import draw_svg
from lipaudit.report.pictures import (
    CATEGORIES,
    Curve,
    Density,
    Heatmap,
    Histogram,
    Scatter,
    Series,
    choose_ink,
    compute_scale,
    describe,
)
from lipaudit.tables import Column

X = Column(label="||x||", meaning="", format=".3g")
COUNT = Column(label="n", meaning="", format="d")
SHARE = Column(label="robust", meaning="", format=".1%")
HOSTILE = "<b>$x$ & 'y'</b>"


def heatmap(rows: int, columns: int) -> Heatmap:
    values = tuple(tuple(float(10 * i + j) for j in range(columns)) for i in range(rows))
    names = [tuple(map(str, range(n))) for n in (rows, columns)]
    return Heatmap("a map", values, *names, X)


BLOCKS = [
    heatmap(2, 3),
    Heatmap("empty map", ((None, float("nan")),), ("0",), ("0", "1"), X),
    Heatmap("infinite map", ((float("-inf"), 1.0),), ("0",), ("0", "1"), X),
    Histogram("one", X, (0.0, 1.0, 2.0), {"": (1.0, 2.0)}),
    Histogram("two", X, (1.0, 10.0, 100.0), {HOSTILE: (1.0, 2.0), "b": (0.0, 0.0)}),
    Scatter("points", X, X, (Series(HOSTILE, (1.0, 2.0), (3.0, 4e5)),)),
    Scatter("one point", X, X, (Series("a", (1.0,), (1.0,)),)),
    Histogram("damaged", X, (1.0, 2.0, 3.0, 4.0), {"": (float("nan"), float("inf"), 3.0)}),
    dataclasses.replace(heatmap(1, 2), title="huge map", values=((1e308, -1e308),), centre=0.0),
    Density("huge matrix", COUNT, COUNT, ((1e308, -1e308),), (0.0, 2.0), (0.0, 1.0), X),
    Scatter("huge", X, X, (Series("a", (1.0, 1e300), (1e-300, 2.0)),)),
    Curve("plane", X, X, (Series("a", (-1.0, 2.0), (3.0, 0.0)),)),
    Curve(
        "line", X, X, (Series(HOSTILE, (8.0, 16.0), (1.0, 2.0), (None, 0.0), (1.0, 3.0)),), True
    ),
    Curve("share", X, X, (Series("a", (0.0, 1.0), (0.5, 0.2)),), ticks={"0": 0.0, "1/1": 1.0}),
    Density("map", COUNT, COUNT, ((0.0, 0.0),), (0.0, 1.0), (0.0, 1.0), X, down=True),
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.title)
def test_picture_is_an_element_of_its_page(block):
    element = draw_svg(block)
    assert element.startswith('<svg role="img" aria-label="')
    assert element.endswith("</svg>")
    assert element == draw_svg(block)
    assert "http" not in element
    assert "<b>" not in element
    assert charts.INK not in element
    assert "currentColor" in element
    assert describe(block).startswith(f"{block.title}: ")


def test_labels_are_text_and_taken_literally():
    element = draw_svg(BLOCKS[5])
    assert "&lt;b&gt;$x$ &amp; 'y'&lt;/b&gt;</text>" in element


def test_settings_of_the_caller_come_back():
    with mpl.rc_context({"font.size": 31.0, "axes.facecolor": "red"}):
        before = dict(mpl.rcParams)
        element = draw_svg(BLOCKS[3])
        assert dict(mpl.rcParams) == before
    assert element == draw_svg(BLOCKS[3])


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


@pytest.mark.parametrize("centre", [None, 0.0, 1.0])
def test_a_map_has_its_figure_on_its_colour_and_a_title_in_every_cell(centre):
    """The colour is that of the same head in a terminal."""
    block = dataclasses.replace(heatmap(2, 3), centre=centre)
    scale, element = compute_scale(block), draw_svg(block)
    labels = re.findall(r'x="([\d.]+)" y="([\d.]+)">([\d.]+)</text>', element)
    drawn = cells(element)[:6]
    for (row, column), (corner, size, colour), (said, at) in zip(
        np.ndindex(2, 3), drawn, tips(element), strict=True
    ):
        value = block.values[row][column]
        shown = f"{value:#.3g}".rstrip(".")
        assert said == f"head {row}.{column}: {shown}"
        assert (at["x"], at["y"]) == pytest.approx(tuple(corner), abs=0.1)
        assert (at["width"], at["height"]) == pytest.approx(tuple(size), abs=0.1)
        wanted = scale.colour(scale.share(value))
        assert bytes.fromhex(colour[1:]) == pytest.approx(wanted, abs=3)
        middle = corner + size / 2
        assert [t for x, y, t in labels if np.allclose((float(x), float(y)), middle, atol=4)] == [
            shown
        ]
    assert drawn[0][0][1] < drawn[3][0][1]  # the first layer is on top


@pytest.mark.parametrize("down", [True, False])
def test_density_draws_the_first_row_where_it_should(down):
    block = Density("d", X, X, ((1.0, 2.0), (3.0, 4.0)), (0.0, 2.0), (0.0, 2.0), X, down=down)
    places = {said.rpartition(" ")[2]: at["y"] for said, at in tips(draw_svg(block))}
    assert (places["1.00"] < places["3.00"]) == down


def test_many_marks_become_one_image():
    few, many = draw_svg(heatmap(10, 10)), draw_svg(heatmap(30, 30))
    assert few.count("<path") > 100
    assert many.count("<path") < 100
    assert len(re.findall("data:image/png", many)) == len(re.findall("data:image/png", few)) + 1


def test_titles_lie_on_the_points_that_are_drawn():
    points = Series("a", (1.0, 2.0, 7.0), (30.0, 4.0, 5.0), names=("p", "q", "r"))
    element = draw_svg(Scatter("s", X, COUNT, (points,)))
    drawn = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', element)[:3]
    found = tips(element)
    assert [said for said, _ in found] == [
        "p: ‖x‖ 1.00, n 30",
        "q: ‖x‖ 2.00, n 4",
        "r: ‖x‖ 7.00, n 5",
    ]
    for (x, y), (_, at) in zip(drawn, found, strict=True):
        assert (at["cx"], at["cy"]) == pytest.approx((float(x), float(y)), abs=0.1)


def point(**changes: object) -> Series:
    return dataclasses.replace(Series("a", (1.0,), (2.0,)), **changes)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            Density("d", COUNT, COUNT, ((0.5, 2.0),), (-0.5, 1.5), (-0.5, 0.5), X, down=True),
            "n 1, n 0: 2.00",
        ),
        (Density("d", X, COUNT, ((0.5, 2.0),), (0, 3), (0, 1), X), "‖x‖ 1.5 to 3, n 0: 2.00"),
        (
            Curve("c", X, X, (Series("a", (0.1,), (0.5,), (0.4,), (0.6,)),), ticks={"1/10": 0.1}),
            "a: ‖x‖ 1/10, ‖x‖ 0.500 (0.400 to 0.600)",
        ),
        (  # points on each other speak together
            Curve("c", X, X, (point(), point(label="b"))),
            "a: ‖x‖ 1.00, ‖x‖ 2.00\nb: ‖x‖ 1.00, ‖x‖ 2.00",
        ),
        (
            Scatter("s", X, X, (point(names=(HOSTILE,)),)),
            "&lt;b&gt;$x$ &amp; 'y'&lt;/b&gt;: ‖x‖ 1.00, ‖x‖ 2.00",
        ),
    ],
)
def test_titles_say_the_figures(block, said):
    assert [text for text, _ in tips(draw_svg(block))][-1] == said


def test_titles_of_many_points_are_the_highest(monkeypatch):
    monkeypatch.setattr(charts, "MOST_TIPS", 2)
    points = Series("a", (1.0, 2.0, 3.0), (9.0, 4.0, 5.0), names=tuple("abc"))
    assert [said[0] for said, _ in tips(draw_svg(Scatter("s", X, X, (points,))))] == ["a", "c"]


def read_ticks(element: str) -> list[tuple[float, float]]:
    """Return the figure and the height of every tick of the vertical axis."""
    ends = r'<text style="[^"]*text-anchor: end[^"]*" x="[\d.]+" y="([\d.]+)">([\d.e-]+)</text>'
    below = 3.42  # the baseline of a number lies below its tick
    return [(float(said), float(y) - below) for y, said in re.findall(ends, element)]


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("low", [1e-9, 0.97, 1234.5, 6.02e23])
@pytest.mark.parametrize("factor", [1, 1.0001, 1.5, 9, 101, 1e12])
def test_every_axis_has_two_ticks_that_say_where_they_are(low, factor, log):
    """The heights of two points, which are known, say where a figure belongs."""
    points = Series("a", (1.0, 2.0), (low, low * factor))
    element = draw_svg(Curve("s", X, X, (points,), log=log))
    ticks = read_ticks(element)
    assert 2 <= len(ticks) <= 14
    assert len(set(ticks)) == len(ticks)
    first, last = (at["cy"] for _, at in tips(element))
    scale = math.log if log else float
    span = scale(low * factor) - scale(low)
    for value, height in ticks if span else ():
        share = (scale(value) - scale(low)) / span
        assert height == pytest.approx(first + share * (last - first), abs=1.5)


def test_axes_say_their_unit_and_shares_as_tables_do():
    time = Column(label="time", meaning="", unit="s")
    element = draw_svg(Curve("s", SHARE, time, (Series("a", (0.1, 0.9), (1.0, 2.0)),)))
    for said in ("time (s)", "robust", "20%", "80%"):
        assert f">{said}</text>" in element


def scale_of(*values: float | None, centre: float | None = None, spec: str = ".3g"):
    column = dataclasses.replace(X, format=spec)
    return compute_scale(Heatmap("m", (values,), ("0",), ("0",) * len(values), column, centre))


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
    assert len(set(change.colour(0.5))) == 1  # grey


def test_colours_are_those_of_matplotlib():
    """Exact at the stored colours, within 2 % of the scale between them."""
    viridis, centred = scale_of(0.0, 1.0), scale_of(-1.0, 1.0, centre=0.0)
    for step in range(16 * 4 + 1):
        expected = [255 * part for part in mpl.colormaps["viridis"](step / 64)[:3]]
        assert viridis.colour(step / 64) == pytest.approx(expected, abs=5.1 if step % 4 else 0.5)
    for step in range(11):
        expected = [255 * part for part in mpl.colormaps["RdBu_r"].resampled(11)(step)[:3]]
        assert centred.colour(step / 10) == pytest.approx(expected, abs=0.5)


def light(parts) -> np.ndarray:
    """Undo the sRGB transfer curve."""
    shares = np.array(parts) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def luminance(colour) -> float:
    return float(light(colour) @ [0.2126, 0.7152, 0.0722])


def test_numbers_are_legible_on_every_colour():
    """WCAG 2 asks for a contrast of 4.5."""
    for share in np.linspace(0, 1, 101):
        colour = scale_of(0.0, 1.0).colour(float(share))
        back = luminance(colour) + 0.05
        front = (1.0 if choose_ink(colour) == "#ffffff" else 0.0) + 0.05
        assert max(back, front) / min(back, front) >= 4.5


def apart(one: str, other: str) -> float:
    """Return how far two colours lie apart for eyes without red, or without green cones.

    Machado, Oliveira and Fernandes (2009), severity 1.
    """
    protan = [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    deutan = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]

    def seen(colour: str) -> np.ndarray:
        linear = np.array([protan, deutan]) @ light(list(bytes.fromhex(colour.strip("#"))))
        linear = np.clip(linear, 0, 1)
        return 255 * np.where(
            linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055
        )

    return float(np.linalg.norm(seen(one) - seen(other), axis=-1).min())


def test_lines_and_marks_differ_for_colour_blind_eyes_and_from_the_dark():
    """Also in the colours that a dark page gives them, where WCAG 2 asks for a contrast of 3."""
    style = (files("lipaudit.report") / "templates" / "style.css").read_text(encoding="utf-8")
    dark = re.findall(r"--c\d: (#[0-9a-f]{6});", style)
    ground = re.findall(r"--page: (#[0-9a-f]{6});", style)[1]
    assert len(dark) == len(CATEGORIES)
    assert apart("#ff0000", "#806000") < 60  # a red and a brown that they confuse
    for palette in (CATEGORIES, dark):
        assert min(apart(a, b) for a, b in itertools.combinations(palette, 2)) > 40
    for colour in dark:
        fore, back = (luminance(list(bytes.fromhex(c[1:]))) for c in (colour, ground))
        assert (fore + 0.05) / (back + 0.05) >= 3
