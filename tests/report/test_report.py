"""What holds for every format."""

import numpy as np
import pytest

from lipaudit.measures import layouts
from lipaudit.report import RENDERERS, REPORT, of_reports, render
from lipaudit.report.blocks import Table
from lipaudit.report.page.chapters import PLANS, find_plan
from lipaudit.report.page.document import make_page, show_section
from lipaudit.report.pictures import (
    Curve,
    Density,
    Heatmap,
    Histogram,
    Scatter,
)
from lipaudit.tables import Array, model_labels
from tests.report.conftest import keep

PICTURES = (Curve, Density, Heatmap, Histogram, Scatter)
PAGES = sorted(name for name, known in RENDERERS.items() if known.takes in REPORT)
WHOLE = ("page", "record", "frame")
SIDE_BY_SIDE = sorted(
    name
    for name, known in RENDERERS.items()
    if known.takes == "page" and name not in ("latex", "brief")
)


def _of(report, measure, kind):
    return [b for b in show_section(report.section(measure)) if isinstance(b, kind)]


@pytest.mark.parametrize("measure", layouts())
@pytest.mark.parametrize(
    "name", [n for n in PAGES if RENDERERS[n].takes in WHOLE and n != "brief"]
)
def test_every_section_in_every_format(report, name, measure):
    alone = keep(report, report.section(measure))
    text = render(alone, name).decode()
    assert measure in text if name in ("json", "csv") else find_plan(measure).question in text


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
    assert all(find_plan(measure).question in text for measure in layouts())


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_measure_without_a_view_shows_its_rows(report, name, monkeypatch):
    monkeypatch.delitem(PLANS, "attack")
    alone = keep(report, report.section("attack"))
    text = render(alone, name).decode()
    assert "backwards" in text
    assert "20.8%" in text


def test_every_section_asks_a_question_of_its_own():
    titles = [find_plan(measure).question for measure in layouts()]
    assert all(title.endswith("?") for title in titles)
    assert len(set(titles)) == len(titles)


def test_multiples_come_from_logarithms_where_bounds_overflow(report):
    top = _of(report, "bounds", Table)[0]
    names = [column.label for column in top.columns]
    row = next(r for r in report.section("bounds").rows if (r.layer, r.head) == (1, 2))
    cell = top.rows[0][names.index("mean field")]
    assert cell == f"1e{row.log10_mean_field - np.log10(row.exact):.0f}×"
    assert top.rows[0][names.index("sharp")] == pytest.approx(row.sharp / row.exact)


def test_tightness_is_the_median_over_heads(report):
    table = _of(report, "bounds", Table)[1]
    lines = {line[0]: line for line in table.rows}
    rows = [r for r in report.section("bounds").rows if r.exact is not None]
    ratios = np.array([r.theorem3 / r.exact for r in rows])
    ratios = np.log10(ratios[np.isfinite(ratios)])
    assert lines["theorem 3"][3] == ratios.size
    assert lines["theorem 3"][4] == pytest.approx(10 ** np.median(ratios))
    assert lines["castin"][1:3] == ("certified", "all inputs, every ‖x_i‖ ≤ R")


def test_a_scatter_of_heads_has_a_point_for_every_head_and_bound(report):
    """Though the section keeps `sharp` and `exact` of every sample, too."""
    assert report.section("bounds").arrays["sharp"].shape == (12, 3)
    (scatter,) = _of(report, "bounds", Scatter)
    exact = {f"head {r.layer}.{r.head}": r.exact for r in report.section("bounds").rows}
    for series in scatter.series:
        assert len(series.x) <= 12
        assert [exact[name] for name in series.names] == list(series.x)


def test_maps_of_heads_read_as_the_tables_do(report):
    """A cell of a map is what the table of all rows says of that head."""
    for measure in ("bounds", "attention"):
        everything = _of(report, measure, Table)[-1]
        names = [column.label for column in everything.columns]
        for block in _of(report, measure, Heatmap):
            at = names.index(block.column.label)
            assert everything.columns[at] == block.column
            listed = {row[:2]: row[at] for row in everything.rows}
            for layer, row in zip(block.rows, block.values, strict=True):
                for head, value in zip(block.columns, row, strict=True):
                    assert value == pytest.approx(listed[int(layer), int(head)], nan_ok=True)


@pytest.mark.parametrize("count", [3, 30])
def test_norms_by_position_are_over_the_texts_that_have_it(report, count):
    """All positions of short texts; of long ones those with the largest norms."""
    norms = np.random.default_rng(0).random((4, count))
    norms[1:, -1] = np.nan
    kept = {"arrays": {"positions": Array.of(norms)}}
    section = report.section("jacobian").model_copy(update=kept)
    (table,) = (b for b in show_section(section) if getattr(b, "title", "") == "Norms by position")
    order = np.argsort(-np.nanmax(norms, 0))[:10] if count > 20 else range(count)
    for position, row in zip(order, table.rows, strict=True):
        texts = 1 if position == count - 1 else 4
        values = norms[:texts, position]
        assert row[:2] == (position, texts)
        assert row[2:] == pytest.approx((np.median(values), values.max()), rel=1e-5)


def test_curve_starts_at_the_accuracy_without_attack(report):
    (curve,) = _of(report, "attack", Curve)
    for series in curve.series:
        assert series.x[0] == 0
        assert series.y[0] == report.section("attack").rows[0].clean
        assert list(series.x) == sorted(series.x)


def test_joint_histogram_keeps_p1_on_the_horizontal_axis(report):
    """p(1) is the array's first axis, and the x axis of the picture."""
    joint = next(b for b in _of(report, "attention", Density) if not b.down)
    stored = report.section("attention").arrays["p1p2_hist"].numpy()
    assert np.array_equal(np.array(joint.values), stored.T)
    assert joint.x.label == "p(1)"


def test_ratio_histogram_ends_with_its_last_row(report):
    (block,) = _of(report, "attention", Histogram)
    stored = report.section("attention").arrays["g1_ratio_hist"].numpy().sum(axis=0)
    assert sum(block.counts["rows"]) == stored.sum()
    assert block.counts["rows"][-1] == 12
    assert block.edges[-1] == pytest.approx(1.4)


def test_several_models_show_their_rows_side_by_side(report, other):
    """Figs. 1, 2 and 3 of Yudin et al., a model beside the other."""
    names = model_labels([report, other])
    part = next(p for p in make_page(report, other).chapters if p.name == "attention")
    titles = [b.title for b in part.blocks if isinstance(b, Curve | Density)]
    for name in names:
        assert [t.removeprefix(f"{name}: ")[:7] for t in titles if t.startswith(f"{name}: ")] == [
            "Largest", "Attenti", "Query 3",
        ]  # fmt: skip
    ratio = next(b for b in part.blocks if isinstance(b, Histogram) and "exact" in b.title)
    assert list(ratio.counts) == names
    stored = other.section("attention").arrays["g1_ratio_hist"].numpy()
    assert sum(ratio.counts[names[1]]) == stored.sum()


def test_row_says_its_norms_and_keeps_every_entry(report):
    (curve,) = _of(report, "attention", Curve)
    assert curve.title == "Query 3 of head 0.1, mean over samples: ‖M‖ = 0.172, g1 = 0.181"
    assert curve.series[0].y == report.section("attention").arrays["row@0.1,3"].data


def test_settings_that_are_off_or_the_run_s_own_are_not_listed(report):
    section = report.section("jacobian").model_copy(
        update={"settings": {"seed": 3, "k": 0, "per_layer": False, "layers": None, "eps": []}}
    )
    assert "Settings: k 0." in [getattr(block, "text", "") for block in show_section(section)]
