"""What holds for every format, and what the chapters of sections show."""

import json
from typing import get_args

import numpy as np
import pytest

from lipaudit.errors import UsageError
from lipaudit.gate import compare, judge
from lipaudit.measures import layouts
from lipaudit.report import RENDERERS, of_comparison, of_judgement, of_reports, render
from lipaudit.report.blocks import Curve, Heatmap, Histogram, Table
from lipaudit.report.sections import DRAWINGS, show_section
from lipaudit.tables import model_labels
from lipaudit.tables.report import Drawing
from tests.report.conftest import find_chapter, keep, show


@pytest.fixture(scope="module")
def results(report, other, blank_report):
    """A result of every kind, with the words that its formats for people show."""
    empty = tuple(s.model_copy(update={"rows": (), "arrays": {}}) for s in report.sections)
    fewer = keep(other, *other.sections[2:4])
    titles, pair = [layout.title for layout in layouts().values()], [report, other]
    return {
        "measured": (of_reports(report), [*titles, "Scorecard"]),
        "without values": (of_reports(blank_report), titles),
        "without rows": (of_reports(keep(report, *empty)), titles),
        "side by side": (of_reports(report, fewer, blank_report), titles),
        "ranked": (of_reports(*pair), ["Which model is", "Ranked by", "What was audited"]),
        "compared": (of_comparison(compare(pair), pair), ["What changed", "heads changed"]),
        "judged": (of_judgement(judge(other, report)), ["verdict on each rule", "bounds.exact"]),
    }


KINDS = ["measured", "without values", "without rows", "side by side"]
KINDS += ["ranked", "compared", "judged"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RENDERERS)
def test_every_result_in_every_format(results, kind, name, monkeypatch):
    if kind not in ("measured", "without values"):  # only the charts of these are drawn
        monkeypatch.setattr("lipaudit.report.html.draw_svg", lambda _block: "")
    result, words = results[kind]
    format = RENDERERS[name]
    if format.takes not in result.forms:
        with pytest.raises(UsageError, match="not possible here"):
            render(result, name)
        return
    text = render(result, name).decode()
    assert text
    if name in ("json", "csv"):
        words = layouts() if kind == "measured" else ()
    elif format.takes != "page" or (name == "latex" and kind != "measured"):
        words = ()  # LaTeX has the chapters with a table alone
    for word in words:
        assert word in text
    assert ("<svg" in text) == ((kind, name) == ("measured", "html"))
    if name == "json":
        json.loads(text, parse_constant=pytest.fail)


def _of(report, measure, kind):
    return [b for b in show_section(report.section(measure)) if isinstance(b, kind)]


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
        own = [t.removeprefix(f"{name}: ")[:7] for t in titles if t.startswith(f"{name}: ")]
        assert own == ["interme", "Attenti"]
    blocks = find_chapter(show(report, other), "jacobian").blocks
    (counted,) = (block for block in blocks if isinstance(block, Histogram))
    assert list(counted.values) == names


def test_every_drawing_that_a_display_may_name_has_its_function():
    assert tuple(DRAWINGS) == get_args(Drawing)


def test_settings_that_are_off_or_the_run_s_own_are_not_listed(report):
    section = report.section("jacobian").model_copy(
        update={"settings": {"seed": 3, "k": 0, "per_layer": False, "layers": None, "eps": []}}
    )
    assert "Settings: k 0." in [getattr(block, "text", "") for block in show_section(section)]
