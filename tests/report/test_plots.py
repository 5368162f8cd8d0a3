from __future__ import annotations

import dataclasses
import itertools
import re
from importlib.resources import files

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from lipaudit.report.blocks import Curve, Density, Heatmap, Histogram, Scatter, Series, Shares
from lipaudit.report.draw import axes as axis
from lipaudit.report.draw import colours, marks, plots
from lipaudit.report.draw.colours import contrast, viridis
from lipaudit.results import Column

X = Column(label="||x||", meaning="", format=".3g")
COUNT = Column(label="n", meaning="", format="d")
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
    Scatter("plane", X, X, (Series("a", (-1.0, 2.0), (3.0, 0.0)),), log=False, diagonal=False),
    Curve(
        "line", X, X, (Series(HOSTILE, (8.0, 16.0), (1.0, 2.0), (None, 0.0), (1.0, 3.0)),), True
    ),
    Curve("share", X, X, (Series("a", (0.0, 1.0), (0.5, 0.2)),), ticks={"0": 0.0, "1/1": 1.0}),
    Density("map", COUNT, COUNT, ((0.0, 0.0),), (0.0, 1.0), (0.0, 1.0), X, down=True),
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.title)
def test_picture_is_an_element_of_its_page(block):
    element = plots.svg(block)
    assert element.startswith('<svg role="img" aria-label="')
    assert element.endswith("</svg>")
    assert element == plots.svg(block)
    assert "http" not in element
    assert "<b>" not in element
    assert plots.INK not in element
    assert "currentColor" in element


def test_labels_are_text_and_taken_literally():
    element = plots.svg(BLOCKS[5])
    assert "&lt;b&gt;$x$ &amp; 'y'&lt;/b&gt;</text>" in element


def test_settings_of_the_caller_come_back():
    with mpl.rc_context({"font.size": 31.0, "axes.facecolor": "red"}):
        before = dict(mpl.rcParams)
        element = plots.svg(BLOCKS[3])
        assert dict(mpl.rcParams) == before
    assert element == plots.svg(BLOCKS[3])


def _colour_at(axes, x: float, y: float) -> float:
    """Return the value drawn at a point, from the corners of the mesh."""
    (mesh,) = axes.collections
    corners = mesh.get_coordinates()
    low, high = np.sort(corners[[0, -1], 0, 1])
    rows, columns = mesh.get_array().shape
    row = (y - corners[0, 0, 1]) / (corners[-1, 0, 1] - corners[0, 0, 1]) * rows
    column = (x - corners[0, 0, 0]) / (corners[0, -1, 0] - corners[0, 0, 0]) * columns
    assert low <= y <= high
    return float(mesh.get_array()[int(row), int(column)])


def test_heatmap_draws_every_number_on_its_own_colour():
    axes = Figure().add_subplot()
    block = heatmap(2, 3)
    plots.DRAW[Heatmap](axes, block)
    for label in axes.texts:
        x, y = label.get_position()
        assert _colour_at(axes, x, y) == float(label.get_text())
    assert axes.yaxis_inverted()
    assert len(axes.texts) == 6


@pytest.mark.parametrize("down", [True, False])
def test_density_draws_the_first_row_where_it_should(down):
    block = Density("d", X, X, ((1.0, 2.0), (3.0, 4.0)), (0.0, 2.0), (0.0, 2.0), X, down=down)
    axes = Figure().add_subplot()
    plots.DRAW[Density](axes, block)
    assert _colour_at(axes, 1.5, 0.5) == 2.0
    assert axes.yaxis_inverted() == down


def test_many_marks_become_one_image():
    few, many = plots.svg(heatmap(10, 10)), plots.svg(heatmap(30, 30))
    assert few.count("<path") > 100
    assert many.count("<path") < 100
    assert len(re.findall("data:image/png", many)) == len(re.findall("data:image/png", few)) + 1


@pytest.mark.parametrize("centre", [None, 0.0, 1.0])
def test_numbers_and_colours_of_a_map_agree(centre):
    """The colour of a number in the terminal is that of its cell in the picture."""
    block = dataclasses.replace(heatmap(2, 3), centre=centre)
    scale = colours.scale(block)
    axes = Figure().add_subplot()
    plots.DRAW[Heatmap](axes, block)
    for value in (v for row in block.values for v in row):
        (mesh,) = axes.collections
        drawn = [255 * channel for channel in mesh.to_rgba(value)[:3]]
        assert scale.colour(scale.share(value)) == pytest.approx(drawn, abs=3)


def scale_of(*values: float | None, centre: float | None = None, spec: str = ".3g"):
    column = dataclasses.replace(X, format=spec)
    return colours.scale(Heatmap("m", (values,), ("0",), ("0",) * len(values), column, centre))


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
    ratio = scale_of(0.5, 4.0, centre=1.0)
    assert ratio.share(1.0) == pytest.approx(0.5)
    assert ratio.share(2.0) - 0.5 == pytest.approx(0.5 - ratio.share(0.5))
    assert ratio.share(4.0) == pytest.approx(1.0)
    for none in (scale_of(0.0, centre=0.0).share(0.0), scale_of(1.0, centre=1.0).share(1.0)):
        assert none == pytest.approx(0.5)
    assert len(set(change.colour(0.5))) == 1  # grey


def test_diverging_colours_are_those_of_matplotlib():
    table = mpl.colormaps["RdBu_r"].resampled(11)
    for step, colour in enumerate(colours.DIVERGING):
        assert colour == pytest.approx([255 * part for part in table(step)[:3]], abs=0.5)


def seen(colour: str | tuple[int, ...]) -> list[np.ndarray]:
    """Return how eyes without red, and without green cones see a colour, from 0 to 255.

    Machado, Oliveira and Fernandes (2009), severity 1.
    """
    hexadecimal = isinstance(colour, str)
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)] if hexadecimal else colour
    protan = [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    deutan = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    linear = [np.clip(np.array(eye) @ light(parts), 0, 1) for eye in (protan, deutan)]
    return [
        255 * np.where(c <= 0.0031308, 12.92 * c, 1.055 * c ** (1 / 2.4) - 0.055) for c in linear
    ]


def light(parts) -> np.ndarray:
    """Undo the sRGB transfer curve."""
    shares = np.array(parts) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def apart(one, other) -> float:
    """Return how far two colours lie apart for the eyes that tell them apart least."""
    pairs = zip(seen(one), seen(other), strict=True)
    return min(float(np.linalg.norm(a - b)) for a, b in pairs)


def test_sides_of_a_diverging_scale_differ_for_colour_blind_eyes():
    for index in range(4):
        assert apart(colours.DIVERGING[index], colours.DIVERGING[-1 - index]) > 60
    assert apart("#ff0000", "#806000") < 60  # a red and a brown that they confuse


def test_lines_and_marks_differ_for_colour_blind_eyes_and_from_the_dark():
    """Also in the colours that a dark page gives them, where WCAG 2 asks for a contrast of 3."""
    style = (files("lipaudit.report") / "templates" / "style.css").read_text(encoding="utf-8")
    dark = re.findall(r"--c\d: (#[0-9a-f]{6});", style)
    ground = re.findall(r"--page: (#[0-9a-f]{6});", style)[1]
    assert len(dark) == len(colours.CATEGORIES)
    for palette in (colours.CATEGORIES, dark):
        assert min(apart(a, b) for a, b in itertools.combinations(palette, 2)) > 40
    weights = np.array([0.2126, 0.7152, 0.0722])
    for colour in dark:
        fore, back = (
            weights @ light([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in (colour, ground)
        )
        assert (fore + 0.05) / (back + 0.05) >= 3


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("low", [1e-9, 3.3e-4, 0.97, 1.0, 7.3, 1234.5, 6.02e23])
@pytest.mark.parametrize("factor", [1, 1.0001, 1.001, 1.01, 1.1, 1.5, 2, 4, 9, 40, 101, 1e4, 1e12])
def test_every_axis_has_two_ticks_that_say_where_they_are(low, factor, log):
    axes = Figure().add_subplot()
    axis.scaled(axes, "y", [low, low * factor], X, log=log)
    start, end = axes.get_ylim()
    assert start < low <= low * factor < end
    places = axes.get_yticks()
    inside = [place for place in places if start <= place <= end]
    assert 2 <= len(inside) <= 14
    texts = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(texts)) == len(texts) == len(places)
    step = np.diff(places).min()
    for place, text in zip(places, texts, strict=True):
        power = text.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
        said = float("1e" + power.removeprefix("10")) if power != text else float(text)
        assert said == pytest.approx(place, abs=0.02 * step)


def test_axes_say_their_unit_and_shares_as_tables_do():
    axes = Figure().add_subplot()
    share = Column(label="robust", meaning="", format=".1%")
    axis.scaled(axes, "x", [0.1, 0.9], share, log=False)
    axis.scaled(axes, "y", [1.0, 2.0], Column(label="time", meaning="", unit="s"), log=False)
    assert axes.get_ylabel() == "time (s)"
    assert {label.get_text() for label in axes.get_xticklabels()} >= {"20%", "80%"}


def test_equal_axes_have_equal_ends():
    points = Series("a", (1.0, 2.0), (3.0, 40.0))
    for log in (True, False):
        axes = Figure().add_subplot()
        plots.DRAW[Scatter](axes, Scatter("s", X, X, (points,), log=log, equal=True))
        assert axes.get_xlim() == axes.get_ylim()
        assert axes.get_xscale() == ("log" if log else "linear")


def test_colours_are_those_of_matplotlib():
    """Exact at the stored colours, within 2 % of the scale between them."""
    table = mpl.colormaps["viridis"]
    for step in range(16 * 4 + 1):
        expected = [255 * part for part in table(step / 64)[:3]]
        assert viridis(step / 64) == pytest.approx(expected, abs=5.1 if step % 4 else 0.5)


def test_numbers_are_legible_on_every_colour():
    """WCAG 2 asks for a contrast of 4.5."""

    def luminance(rgb: tuple[int, int, int]) -> float:
        return float(light(rgb) @ [0.2126, 0.7152, 0.0722])

    for share in np.linspace(0, 1, 101):
        back = luminance(viridis(float(share))) + 0.05
        front = (1.0 if contrast(viridis(float(share))) == "#ffffff" else 0.0) + 0.05
        assert max(back, front) / min(back, front) >= 4.5


def places(element: str) -> list[tuple[str, dict[str, float]]]:
    """Return what the marks of a picture say, and where they are."""
    (group,) = re.findall(r'<g class="marks">(.*?)</g>', element, re.DOTALL)
    marks = re.findall(r"<(?:circle|rect) (.*?)><title>(.*?)</title>", group, re.DOTALL)
    return [
        (said, {k: float(v) for k, v in re.findall(r'(\w+)="(.*?)"', at)}) for at, said in marks
    ]


@pytest.mark.parametrize("log", [True, False])
def test_marks_lie_on_the_points_that_are_drawn(log):
    points = Series("a", (1.0, 2.0, 7.0), (30.0, 4.0, 5.0), names=("p", "q", "r"))
    element = plots.svg(Scatter("s", X, COUNT, (points,), log=log))
    drawn = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', element)[:3]
    found = places(element)
    assert [said for said, _ in found] == [
        "p: ‖x‖ 1.00, n 30",
        "q: ‖x‖ 2.00, n 4",
        "r: ‖x‖ 7.00, n 5",
    ]
    for (x, y), (_, at) in zip(drawn, found, strict=True):
        assert (at["cx"], at["cy"]) == pytest.approx((float(x), float(y)), abs=0.1)


def test_marks_lie_on_the_cells_that_are_drawn():
    block = heatmap(2, 3)
    element = plots.svg(block)
    cells = re.findall(r'<path d="M ([\d. L]+)" style="fill: #[0-9a-f]{6}"', element)[:6]
    assert len(cells) == 6
    for index, (cell, (said, at)) in enumerate(zip(cells, places(element), strict=True)):
        numbers = np.array(cell.replace("L", "").split(), dtype=float).reshape(-1, 2)
        corner, size = numbers.min(0), np.ptp(numbers, axis=0)
        assert (at["x"], at["y"]) == pytest.approx(tuple(corner), abs=0.1)
        assert (at["width"], at["height"]) == pytest.approx(tuple(size), abs=0.1)
        row, column = divmod(index, 3)
        value = f"{10 * row + column:#.3g}".rstrip(".")
        assert said == f"head {row}.{column}: {value}"


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            Histogram("h", X, (1.0, 2.0, 4.0), {"a": (1.0, 2.0), "b": (0.0, 5.0)}),
            "2 to 4: a 2, b 5",
        ),
        (Histogram("h", X, (1.0, 2.0, 4.0), {"": (1.0, 2.0)}), "2 to 4: 2"),
        (Shares("s", X, ("x", "y"), {"p": (0.5, 0.25), "q": (0.5, 0.75)}), "y, q: 0.750"),
        (
            Density("d", COUNT, COUNT, ((0.5, 2.0),), (-0.5, 1.5), (-0.5, 0.5), X, down=True),
            "n 1, n 0: 2.00",
        ),
        (Density("d", X, COUNT, ((0.5, 2.0),), (0, 3), (0, 1), X), "‖x‖ 1.5 to 3, n 0: 2.00"),
        (
            Curve("c", X, X, (Series("a", (0.1,), (0.5,), (0.4,), (0.6,)),), ticks={"1/10": 0.1}),
            "a: ‖x‖ 1/10, ‖x‖ 0.500 (0.400 to 0.600)",
        ),
    ],
)
def test_marks_say_the_figures(block, said):
    assert [text for text, _ in places(plots.svg(block))][-1] == said


def test_marks_of_many_points_are_the_outermost(monkeypatch):
    monkeypatch.setattr(marks, "MOST", 4)
    x = tuple(float(i) for i in range(1, 8))
    points = Series("a", x, (4.0, 4.1, 9.0, 4.3, 4.2, 4.4, 4.5), names=tuple("abcdefg"))
    kept = [text[0] for text, _ in places(plots.svg(Scatter("s", X, X, (points,))))]
    assert kept == ["a", "b", "c", "g"]


def test_points_on_each_other_speak_together():
    one, two = (Series(name, (1.0, x), (2.0, 3.0)) for name, x in (("a", 2.0), ("b", 4.0)))
    said = [text for text, _ in places(plots.svg(Curve("c", X, X, (one, two))))]
    assert said[0] == "a: ‖x‖ 1.00, ‖x‖ 2.00\nb: ‖x‖ 1.00, ‖x‖ 2.00"
    assert len(said) == 3


def test_names_of_marks_are_text():
    points = Series("a", (1.0,), (2.0,), names=(HOSTILE,))
    element = plots.svg(Scatter("s", X, X, (points,)))
    assert "<b>" not in element
    assert "&lt;b&gt;$x$ &amp; 'y'&lt;/b&gt;: " in element
