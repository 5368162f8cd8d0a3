from __future__ import annotations

import re

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from lipaudit.report.blocks import Curve, Density, Heatmap, Histogram, Scatter, Series
from lipaudit.report.draw import plots
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


def test_colours_are_those_of_matplotlib():
    """Exact at the stored colours, within 2 % of the scale between them."""
    table = mpl.colormaps["viridis"]
    for step in range(16 * 4 + 1):
        expected = [255 * part for part in table(step / 64)[:3]]
        assert viridis(step / 64) == pytest.approx(expected, abs=5.1 if step % 4 else 0.5)


def test_numbers_are_legible_on_every_colour():
    """WCAG 2 asks for a contrast of 4.5."""

    def luminance(rgb: tuple[int, int, int]) -> float:
        parts = np.array(rgb) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for share in np.linspace(0, 1, 101):
        back = luminance(viridis(float(share))) + 0.05
        front = (1.0 if contrast(viridis(float(share))) == "#ffffff" else 0.0) + 0.05
        assert max(back, front) / min(back, front) >= 4.5
