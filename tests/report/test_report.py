"""What holds for every format, and what the chapters of sections show."""

import numpy as np
import pytest

from lipaudit.measures import layouts
from lipaudit.report import RENDERERS, REPORT, of_reports, render
from lipaudit.report.blocks import Curve, Heatmap, Histogram, Table
from lipaudit.report.sections import name_chapter, show_section
from lipaudit.tables import model_labels
from tests.report.conftest import find_chapter, keep, show

PAGES = sorted(name for name, known in RENDERERS.items() if known.takes in REPORT)
SIDE_BY_SIDE = sorted(
    name for name, known in RENDERERS.items() if known.takes == "page" and name != "latex"
)


def _of(report, measure, kind):
    return [b for b in show_section(report.section(measure)) if isinstance(b, kind)]


@pytest.mark.parametrize("measure", layouts())
@pytest.mark.parametrize("name", PAGES)
def test_every_section_in_every_format(report, name, measure):
    section = report.section(measure)
    text = render(keep(report, section), name).decode()
    assert (measure if name in ("json", "csv") else name_chapter(section)) in text


@pytest.mark.parametrize("name", PAGES)
def test_rows_without_values_in_every_format(blank_report, name):
    assert render(blank_report, name)


@pytest.mark.parametrize("name", PAGES)
def test_sections_without_rows_in_every_format(report, name):
    empty = tuple(s.model_copy(update={"rows": (), "arrays": {}}) for s in report.sections)
    assert render(keep(report, *empty), name)


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_reports_with_different_sections_side_by_side(report, other, blank_report, name):
    fewer = keep(other, *other.sections[2:4])
    text = render(of_reports(report, fewer, blank_report), name).decode()
    assert all(layout.title in text for layout in layouts().values())


def test_tightness_is_the_median_over_heads(report):
    table = _of(report, "bounds", Table)[1]
    lines = {line[0]: line for line in table.rows}
    rows = [r for r in report.section("bounds").rows if r.exact is not None]
    ratios = np.array([r.theorem3 / r.exact for r in rows])
    ratios = np.log10(ratios[np.isfinite(ratios)])
    assert lines["theorem 3"][3] == ratios.size
    assert lines["theorem 3"][4] == pytest.approx(10 ** np.median(ratios))
    assert lines["castin"][1:3] == ("certified", "all inputs, every ‖x_i‖ ≤ R")
    # Bounds that overflow are compared by their logarithms.
    assert lines["mean field"][5] == f"1e{412.6 - np.log10(12.6):.0f}×"


def test_a_scatter_of_heads_has_a_point_for_every_head_and_bound(report):
    """Though the section keeps `sharp` and `exact` of every sample, too."""
    assert report.section("bounds").arrays["sharp"].shape == (12, 3)
    (scatter,) = _of(report, "bounds", Curve)
    exact = {f"head {r.layer}.{r.head}": r.exact for r in report.section("bounds").rows}
    for series in scatter.series[:-1]:
        assert len(series.x) <= 12
        assert [exact[name.strip()] for name in series.names] == list(series.x)


def test_curve_starts_at_the_accuracy_without_attack(report):
    (curve,) = _of(report, "attack", Curve)
    for series in curve.series:
        assert series.x[0] == 0
        assert series.y[0] == report.section("attack").rows[0].clean
        assert list(series.x) == sorted(series.x)


def test_several_models_show_their_rows_side_by_side(report, other):
    """A model beside the other, each under its name."""
    names = model_labels([report, other])
    blocks = find_chapter(show(report, other), "attention").blocks
    titles = [b.title for b in blocks if isinstance(b, Curve | Heatmap)]
    for name in names:
        assert [t.removeprefix(f"{name}: ")[:7] for t in titles if t.startswith(f"{name}: ")] == [
            "interme", "Attenti",
        ]  # fmt: skip
    (counted,) = _of_pair(report, other, "jacobian", Histogram)
    assert list(counted.values) == names


def _of_pair(report, other, measure, kind):
    blocks = find_chapter(show(report, other), measure).blocks
    return [block for block in blocks if isinstance(block, kind)]


def test_settings_that_are_off_or_the_run_s_own_are_not_listed(report):
    section = report.section("jacobian").model_copy(
        update={"settings": {"seed": 3, "k": 0, "per_layer": False, "layers": None, "eps": []}}
    )
    assert "Settings: k 0." in [getattr(block, "text", "") for block in show_section(section)]
