"""Measures that nobody here has heard of: pages, rules and comparisons need only their columns."""

import re

import numpy as np
import pytest

from lipaudit.errors import UsageError
from lipaudit.gate import compare, judge
from lipaudit.gate.rules import parse_rule
from lipaudit.measures import OWN
from lipaudit.measures.base import Measure, MeasureOptions
from lipaudit.report import of_comparison, of_reports, render
from lipaudit.report.blocks import Heatmap, Histogram, Table
from lipaudit.report.sections import show_section, show_sections
from lipaudit.tables import Column, Layout, Note
from lipaudit.tables.columns import HEAD
from tests.commands import installed
from tests.gate.cases import report, rules, sample_ids

PAGES = ("table", "markdown", "html")
SPREAD = Layout(
    name="spread",
    fixed={
        "stage": Column.text("stage", "Part of the model.", needed=True),
        "depth": Column.count("depth", "Blocks before it."),
        "spread": Column(
            "||S|| <= 1", "How far features spread.", better="lower", unit="nat", format=".2f",
            status="estimate", domain="ball",
        ),
        "share": Column("moved", "Share of features that moved.", format=".1%"),
    },
    sample_columns={
        "tension": Column("tension", "Of the sample.", better="lower"),
        "ok": Column("ok", "Whether it is.", format=""),
    },
)  # fmt: skip
HEAT = Layout(
    name="heat",
    title="How hot heads are",
    fixed={
        **HEAD,
        "heat": Column("T", "Temperature.", better="lower"),
        "other": Column("U", "Of no better direction."),
    },
)
TENSION = np.random.default_rng(5).lognormal(0, 0.3, 64)


@pytest.fixture(scope="module", autouse=True)
def _registered(blank_charts):
    """Add a measure of each table, as a plug-in would."""
    given = {"compute": lambda *_: iter(()), "summarise": lambda *_: [], "batch": 8}
    with installed() as patch:
        for table in (SPREAD, HEAT):
            measure = Measure(name=table.name, tables=(table,), options=MeasureOptions, **given)
            patch.setitem(OWN, table.name, measure)
        yield


def build(stem=1.234, trunk=2.0, times=1.0, hot=1.0, weights="a"):
    """A report of both measures."""
    rows = [
        SPREAD.row(stage="stem", depth=0, spread=stem, share=0.5),
        SPREAD.row(stage="trunk", depth=3, spread=trunk, share=0.25),
    ]
    tension = tuple((times * TENSION).tolist())
    samples = {"ids": sample_ids(64), "tension": tension, "ok": (1, 0) * 32}
    note = Note(level="warning", code="odd", text="One stage was left out.")
    spread = SPREAD.section(settings={"k": 3}, rows=rows, samples=samples, notes=(note,))
    heads = [HEAT.row(layer=i, head=j, heat=1 + i * hot + j / 10) for i in (0, 1) for j in (0, 1)]
    return report(spread, HEAT.section(rows=heads), weights=weights)


def verdicts(current, *texts):
    judgement = judge(current, build(), rules(*texts))
    return {(v.metric, v.name): v.status for v in judgement.verdicts}


@pytest.mark.parametrize("name", PAGES)
def test_its_columns_say_how_they_are_written(name):
    text = render(build(trunk=None), name).decode().replace("\\", "")
    shown = ["spread", "Settings: k 3.", "‖S‖", "1.23 nat", "–", "50.0%", "trunk", "One stage"]
    assert [words for words in shown if words not in text] == []
    assert re.search(r"[ᵃᵇᶜ] estimate, in the ball", text)
    assert re.search(r"[ᵃᵇᶜ] computed, at the measured samples", text)
    assert "How hot heads are" in text
    assert re.search(r"^(## |<h2>)?spread( <a .*</h2>)?$", text, re.MULTILINE)
    beside = render(of_reports(build(), build()), name).decode()
    assert beside.count("trunk") == 2
    assert "tension of each sample" in beside


def test_figures_of_heads_are_mapped_and_those_of_samples_counted():
    spread, heat = map(show_section, build().sections)
    (bars,) = (block for block in spread if isinstance(block, Histogram))
    assert (bars.title, len(bars.values["samples"])) == ("tension of each sample", 64)
    (mapped,) = (block for block in heat if isinstance(block, Heatmap))
    assert mapped.column.label == "T"
    assert mapped.values == [[1.0, 1.1], [2.0, 2.1]]


def test_rows_of_one_name_stand_together():
    beside = show_sections(dict.fromkeys("AB", build().section("heat")))
    table = next(block for block in beside if isinstance(block, Table))
    first = [[f"0.{head}", model, 1 + head / 10] for head in (0, 1) for model in "AB"]
    assert [row[:3] for row in table.rows[:4]] == first


def test_rules_judge_rows_by_the_names_that_their_columns_give_and_samples_in_pairs():
    with pytest.raises(UsageError, match="varies by chance is unknown"):
        verdicts(build(trunk=2.5, weights="b"), "spread.spread <= +5%")
    assert verdicts(build(trunk=2.5, weights="b"), "spread.spread <= 2.1") == {
        ("spread.spread:each", "stem depth 0"): "pass",
        ("spread.spread:each", "trunk depth 3"): "regressed",
    }
    for selector in ("stem", "depth=0"):
        found = verdicts(build(trunk=9.0, weights="b"), f"spread.spread@{selector} <= 2.1")
        assert list(found.values()) == ["pass"]
    current = build(times=1.1, weights="b")
    (verdict,) = judge(current, build(), rules("spread.tension <= +5%")).verdicts
    assert (verdict.status, verdict.samples) == ("regressed", 64)
    assert (verdict.low, verdict.change, verdict.high) == pytest.approx((0.1, 0.1, 0.1))
    assert list(verdicts(current, "spread.tension <= +20%").values()) == ["pass (proven)"]


def test_what_it_does_not_have_is_refused():
    for text in ("spread.width <= +5%", "spread.stage <= +5%", "sprawl.spread <= +5%"):
        with pytest.raises(UsageError, match="unknown metric"):
            parse_rule(text)
    with pytest.raises(UsageError, match="matches nothing"):
        verdicts(build(), "spread.spread@branch <= +5%")


def test_a_comparison_has_its_figures_and_a_map_of_its_heads():
    reports = [build(), build(trunk=4.0, hot=2.0, weights="b")]
    comparison = compare(reports)
    (pair,) = comparison.pairs
    found = {v.metric: v.status for v in pair.verdicts}
    assert found["heat.heat:median"] == "regressed"
    assert found["spread.tension:median"] == "unchanged"
    assert {head.metric for head in pair.heads} == {"heat.heat:each"}
    assert [head.change for head in pair.heads] == pytest.approx([0, 0, 1 / 2, 1 / 2.1])
    assert [head.name for head in pair.heads] == [
        f"layer {i} head {j}" for i, j in np.ndindex(2, 2)
    ]
    for name in PAGES:
        text = render(of_comparison(comparison, reports), name).decode()
        shown = ["How T changed in every head", "heat.heat:median", "spread.tension:median"]
        assert [words for words in shown if words not in text] == []
