"""Figures of known models: what is stored is what is measured, shown and written."""

import re
from pathlib import Path

import pytest

import lipaudit
from lipaudit.report import cells, reference
from lipaudit.report.blocks import Table
from tests.report.conftest import find_chapter, rename, show

PAGE = Path(__file__).parents[2] / "docs/reference.md"


def test_stored_figures_are_those_that_an_audit_measures():
    found = reference.read_figures(lipaudit.measure("demo", "bounds", samples=8))
    (stored,) = [model for model in reference.list_known() if model["name"] == "demo"]
    assert {"steepest attention head, ||J||", "median attention head, ||J||"} < {*found}
    for label, figure in found.items():
        assert figure["value"] == pytest.approx(stored["figures"][label]["value"], rel=1e-3)


def test_a_page_has_the_figures_of_other_models_with_equal_ends_and_balls(report):
    reports = (report, rename(report, spec="demo"))
    for each in reports:
        (table,) = [
            b for b in find_chapter(show(each), "reference").blocks if isinstance(b, Table)
        ]
        shown = {row[0]: row[1:] for row in table.rows}
        steep = max(r.exact for r in report.section("bounds").rows if r.exact and r.exact > 0)
        value, others = shown["steepest attention head, ‖J‖"]
        assert value == cells.format_significant(steep)
        assert "MiniLM 12.3" in others
        assert ("demo 4.41" in others) == (each is report)
        _, others = shown["model sensitivity, median ‖J‖, pixels to logits"]
        assert "demo:robust 8.02" in others
        assert "MiniLM" not in others
        assert not any("robust accuracy" in name for name in shown)  # of another ball


def test_the_page_of_the_docs_has_every_stored_figure():
    text = PAGE.read_text("utf-8")
    rows = dict(re.findall(r"^\| \*\*(.+?)\*\*: (.*)$", text, re.MULTILINE))
    yardsticks = {yardstick.label: yardstick for yardstick in reference.YARDSTICKS}
    assert len(rows) == len(reference.list_known()) >= 7
    assert "| 78.1% (linf 0.1) |" in rows["demo:robust"]
    for model in reference.list_known():
        line = rows[model["name"]]
        assert model["data"] in line
        for label, figure in model["figures"].items():
            assert f"| {cells.format_value(figure['value'], yardsticks[label].column)}" in line
