"""What holds for every format, what chapters show, their notes, cells and every word of them."""

import json
import math
import os
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from lipaudit import schema
from lipaudit.errors import UsageError
from lipaudit.gate import compare, judge
from lipaudit.measures import layouts
from lipaudit.report import (
    RENDERERS,
    cells,
    of_comparison,
    of_judgement,
    of_reports,
    render,
    terminal,
)
from lipaudit.report.blocks import Curve, Heatmap, Histogram, Passage
from lipaudit.report.charts import draw_svg
from lipaudit.report.opening import describe_gaps
from lipaudit.report.pictures import DRAWINGS, draw_attention
from lipaudit.report.sections import show_section
from lipaudit.tables import Array, Column, Section, model_labels
from lipaudit.tables.report import Attended, Drawing, Failure
from tests.gate import cases
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


SHOWN = ["table", "json", "html", "markdown", "latex", "csv"]
"""What a report can be shown in."""
KINDS = ["measured", "without values", "without rows", "side by side"]
KINDS += ["ranked", "compared", "judged"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RENDERERS)
def test_every_result_in_every_format(results, page, kind, name, monkeypatch):
    if kind not in ("measured", "without values"):  # only the charts of these are drawn
        monkeypatch.setattr("lipaudit.report.markup.draw_svg", lambda _block: "")
    result, words = results[kind]
    format = RENDERERS[name]
    if format.takes not in result.forms:
        with pytest.raises(UsageError, match="not possible here") as refused:
            render(result, name)
        assert kind == "judged" or refused.value.advice == f"There are: {', '.join(SHOWN)}."
        return
    text = page if (kind, name) == ("measured", "html") else render(result, name).decode()
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
    (table,) = (curve.table for curve in _of(report, "bounds", Curve))
    lines = {line[0]: line for line in table.rows}
    rows = [r for r in report.section("bounds").rows if r.exact is not None]
    ratios = np.array([r.theorem3 / r.exact for r in rows])
    ratios = np.log10(ratios[np.isfinite(ratios)])
    assert lines["theorem 3"][3] == ratios.size
    assert lines["theorem 3"][4] == pytest.approx(10 ** np.median(ratios))
    assert lines["castin"][1:3] == ["certified", "for all inputs as short"]
    # Bounds that overflow are compared by their logarithms.
    assert lines["mean field"][5] == f"1e{412.6 - np.log10(12.6):.0f}×"


def test_a_scatter_of_heads_has_a_point_for_every_head_and_bound(report):
    """Though the section keeps `sharp` and `exact` of every sample, too."""
    assert report.section("bounds").arrays["sharp"].shape == (12, 3)
    (scatter,) = _of(report, "bounds", Curve)
    exact = {f"head {r.layer}.{r.head}": r.exact for r in report.section("bounds").rows}
    for series in scatter.series[:-1]:
        assert len(series.x) <= 12
        assert [exact[name] for name in series.names] == list(series.x)


def test_a_bound_that_is_far_above_every_norm_is_named_and_not_drawn(report):
    """Beside it, the other bounds would lie on one line; the table has all of them."""
    section = report.section("bounds")
    rows = tuple(row.replace(castin=row.exact and 1e6) for row in section.rows)
    far = keep(report, section.model_copy(update={"rows": rows}))
    (before,), (after,) = (_of(each, "bounds", Curve) for each in (report, far))
    drawn = [series.label for series in before.series]
    assert "castin" in drawn
    assert [series.label for series in after.series] == [n for n in drawn if n != "castin"]
    assert before.title.endswith("Not drawn, over 1000 times the largest norm: hu")
    assert after.title.endswith("Not drawn, over 1000 times the largest norm: castin, hu")
    assert "castin" in [line[0] for line in after.table.rows]


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
        assert own == ["How man", "Attenti"]
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


@pytest.mark.parametrize(
    ("attack", "place"), [("fgsm,pgd", ""), ("suffix", "; suffix_place before")]
)
def test_settings_of_attacks_that_did_not_run_are_not_listed(report, attack, place):
    settings = {"eps": ["3" if place else "0.1"], "attack": attack}
    settings["suffix_place"] = "before" if place else "behind"
    section = report.section("attack").model_copy(update={"settings": settings})
    texts = [getattr(block, "text", "") for block in show_section(section)]
    assert f"Settings: eps {settings['eps'][0]}; attack {attack}{place}." in texts


@pytest.mark.parametrize(("rivals", "listed"), [(16, ""), (3, "; rivals 3")])
def test_defaults_of_options_that_help_does_not_show_are_not_listed(report, rivals, listed):
    settings = {"norm": "2", "rivals": rivals}
    section = report.section("jacobian").model_copy(update={"settings": settings})
    texts = [getattr(block, "text", "") for block in show_section(section)]
    assert f"Settings: norm 2{listed}." in texts


@pytest.mark.parametrize("radii", [1, 2])
def test_accuracies_are_drawn_over_several_radii_only(report, radii):
    section = report.section("attack")
    balls = sorted({row.eps for row in section.rows})[:radii]
    rows = tuple(row for row in section.rows if row.eps in balls)
    few = section.model_copy(update={"rows": rows})
    drawn = [block for block in show_section(few) if isinstance(block, Curve)]
    assert len(drawn) == radii - 1


P = np.array([[0.5, 0.25, 0.125, 0.125, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2], *np.eye(5)[2:]])
WORDS = ("[CLS]", "<b>good", "film", "##s", "[SEP]")
TEXT = Attended(sample="ab" * 8, tokens=WORDS)


def section(whose: Attended | None) -> Section:
    arrays = {"map@1.3": Array.of(P), "map_tokens@1.3": Array.of(np.array([5, 5]))}
    kept = {} if whose is None else {"map@1.3": whose}
    return layouts()["attention"].section(arrays=arrays, attended=kept)


def test_it_is_kept_in_the_file(report):
    attention = report.section("attention").model_copy(update={"attended": {"map@1.3": TEXT}})
    text = schema.dumps(keep(report, attention))
    assert schema.loads(text).section("attention").attended == {"map@1.3": TEXT}
    # Earlier versions wrote the patches of a picture, too.
    old = text.replace('"tokens": ["[CLS]"', '"grid": [2, 2], "first": 1, "tokens": ["[CLS]"')
    assert old != text
    assert schema.loads(old).section("attention").attended == {"map@1.3": TEXT}


def test_a_map_of_a_text_is_laid_over_it_and_drawn_alone_where_its_tokens_are_unknown():
    (block,) = draw_attention({"": section(None)})
    assert block.title == "Attention map of head 1.3, first sample"
    assert block.rows == block.columns == ("0", "1", "2", "3", "4")
    whole, received = draw_attention({"": section(TEXT)})
    assert (whole.title, whole.rows) == ("Attention map of head 1.3, sample abababababab", WORDS)
    assert isinstance(received, Passage)
    assert received.tokens == WORDS
    assert received.shares == pytest.approx(P.mean(0))
    assert "&lt;b&gt;good" in draw_svg(whole)


def column(**how: object) -> Column:
    return Column(label="x", meaning="", **how)


@pytest.mark.parametrize(
    ("value", "how", "text"),
    [
        (None, {}, "–"),
        (math.nan, {}, "NaN"),
        (math.inf, {"unit": "×"}, "inf×"),
        (-math.inf, {}, "-inf"),
        (1.2, {}, "1.20"),
        (130.0, {"unit": "×"}, "130×"),
        (1.2, {"format": "+.3g"}, "+1.20"),
        (-130.0, {"format": "+.3g"}, "-130"),
        (9000.0, {}, "9.00e3"),
        (1.5e-7, {}, "1.50e-7"),
        (1e300, {}, "1.00e300"),
        (0.0, {}, "0.00"),
        (True, {"format": ""}, "yes"),
        (False, {"format": "d"}, "no"),
        (3, {"format": "d"}, "3"),
        (3.0, {"format": "d"}, "3"),
        (3.5, {"format": "d"}, "3.5"),
        (0.9375, {"format": ".1%"}, "93.8%"),
        (2.0, {"format": ".1f", "unit": "s"}, "2.0 s"),
        ("1e411×", {"unit": "×"}, "1e411×"),
        ("a\x1b[1m\n", {"format": "s"}, "a\\x1b[1m\\x0a"),
    ],
)
def test_text_of_a_value(value, how, text):
    assert cells.format_value(value, column(**how)) == text


def test_columns_that_stand_alike_share_one_note_and_others_are_marked():
    alike = [column(format="s"), column(), column(unit="s", domain="")]
    assert cells.list_footnotes(alike) == (["", "", ""], ["computed, at the measured samples"])
    apart = [column(), column(status="empirical", domain="ball"), column(format="d"), column()]
    marks, notes = cells.list_footnotes(apart)
    assert marks == ["ᵃ", "ᵇ", "", "ᵃ"]
    assert notes == ["ᵃ computed, at the measured samples", "ᵇ empirical, in the ball"]


@pytest.mark.parametrize("kind", layouts().values(), ids=layouts())
def test_marks_suffice_for_every_row_type(kind):
    columns = list(kind.columns.values())
    marks, notes = cells.list_footnotes(columns)
    standings = {cells.describe_standing(c) for c in columns} - {""}
    assert len(notes) == len(standings)
    assert len(set(marks) - {""}) in (0, len(standings))


GOLDENS = Path(__file__).parent / "goldens"
"""Stored texts of a report: LIPAUDIT_WRITE_GOLDENS=1 writes them anew, except for the report."""
TEXTS = {
    "table.txt": lambda report: terminal.render(show(report), width=80),
    "page.md": lambda report: render(report, "markdown"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_word_of_a_page(report, name):
    text = TEXTS[name](report)
    if os.environ.get("LIPAUDIT_WRITE_GOLDENS"):
        (GOLDENS / name).write_bytes(text)
    assert text.decode() == (GOLDENS / name).read_text(encoding="utf-8")


def test_json_is_the_file_that_was_read(report):
    assert render(report, "json") == (GOLDENS / "report.json").read_bytes()


def test_one_screen_says_what_is_missing_even_if_nothing_was_measured():
    nothing = layouts()["jacobian"].section(settings={}, unmeasured=4)
    for unfinished in (nothing, nothing.model_copy(update={"measure": "weights"})):
        short = of_reports(cases.report(unfinished, status="partial")).page(short=True)
        text = terminal.render(short).decode()
        assert "Partial: the time limit ended the run before some samples were finished" in text


def test_no_other_measure_is_called_complete_if_the_time_limit_ended_one():
    failure = Failure(reason="out of memory", exit_code=3)
    failed = layouts()["bounds"].section(settings={}, failure=failure)
    ended = cases.jacobian().model_copy(update={"unmeasured": 3})
    gaps = {}
    for name, section in (("whole", cases.jacobian()), ("ended", ended)):
        gaps[name] = describe_gaps(cases.report(failed, section, status="partial"))
    assert gaps["whole"] == "bounds failed: out of memory. The other measures are complete."
    assert gaps["ended"] == (
        "bounds failed: out of memory; the time limit ended the run before some samples were "
        "finished: jacobian (3)."
    )
