"""Figures of known models: what is stored is what is measured, shown and written."""

import re
from pathlib import Path

import pytest

import lipaudit
from benchmarks import yardstick
from lipaudit.measures import summarise
from lipaudit.report import cells, reference
from lipaudit.report.blocks import Table
from lipaudit.tables.summary import find_figures
from tests.report.conftest import find_chapter, rename, show

PAGE = Path(__file__).parents[2] / "docs/reference.md"


def test_stored_figures_are_those_that_an_audit_measures():
    report = lipaudit.measure("demo", "bounds", samples=8)
    found = yardstick.read_figures(report)
    (stored,) = [model for model in reference.list_known_models() if model["name"] == "demo"]
    assert {"steepest attention head, ||J||", "median attention head, ||J||"} < {*found}
    for label, figure in found.items():
        assert figure["value"] == pytest.approx(stored["figures"][label]["value"], rel=1e-3)
    (steepest,) = find_figures(summarise(report), "steepest_head")  # as pages compare it
    assert steepest.value == found[reference.COMPARED["steepest_head"]]["value"]


def test_a_page_has_the_figures_of_other_models_with_equal_ends_and_balls(report):
    reports = (report, rename(report, spec="demo"))
    for each in reports:
        (table,) = [
            b for b in find_chapter(show(each), "reference").blocks if isinstance(b, Table)
        ]
        # Of another ball: the robust accuracy. Of equal value for both demos: shares, the median.
        labels = ["model", "model sensitivity, median ||J||, pixels to logits"]
        assert [column.label for column in table.columns] == [
            *labels,
            "steepest attention head, ||J||",
        ]
        (name, _, steep), *others = table.rows
        assert table.strong == {0}
        assert name == each.run.model.spec
        assert steep == max(
            r.exact for r in report.section("bounds").rows if r.exact and r.exact > 0
        )
        shown = {row[0]: row[1:] for row in others}
        assert shown["demo:robust"][0] == pytest.approx(8.02, abs=0.01)
        assert shown["ViT-Ti at initialisation"][1] == pytest.approx(0.454, abs=0.001)
        assert "MiniLM" not in shown  # it reads texts
        assert ("demo" in shown) == (each is report)


def test_only_figures_that_tell_a_robust_demo_from_another_are_compared():
    known = {model["name"]: model["figures"] for model in reference.list_known_models()}
    robust = known["demo:robust"]
    different = []
    for label, figure in known["demo"].items():
        one, other = figure["value"], robust[label]["value"]
        if abs(one - other) > 0.1 * max(one, other):
            different.append(label)
    assert different == list(reference.COMPARED.values())


def test_a_model_of_texts_is_compared_with_models_of_texts(report):
    run = report.run.model_copy(update={"preprocess": {}})
    texts = report.model_copy(update={"run": run})
    blocks = find_chapter(show(texts), "reference").blocks
    (table,) = [block for block in blocks if isinstance(block, Table)]
    assert [column.label for column in table.columns] == [
        "model",
        "steepest attention head, ||J||",
    ]
    own, *others = [row[0] for row in table.rows]
    assert own == report.run.model.spec
    assert others == ["MiniLM", "MiniLM at initialisation", "rxnmapper", "rxnfp"]


def test_the_page_of_the_docs_has_every_stored_figure():
    text = PAGE.read_text("utf-8")
    rows = dict(re.findall(r"^\| \*\*(.+?)\*\*: (.*)$", text, re.MULTILINE))
    yardsticks = {each.label: each for each in yardstick.YARDSTICKS}
    assert len(rows) == len(reference.list_known_models()) >= 7
    assert "| 78.1% (linf 0.1) |" in rows["demo:robust"]
    for model in reference.list_known_models():
        line = rows[model["name"]]
        assert model["data"] in line
        for label, figure in model["figures"].items():
            assert f"| {cells.format_value(figure['value'], yardsticks[label].column)}" in line
