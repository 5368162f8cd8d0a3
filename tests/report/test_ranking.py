"""How several models are shown: who is best, a row for each, the scorecards side by side."""

import math
import re

import pytest

from lipaudit.gate import rank
from lipaudit.gate.verdicts import Verdict
from lipaudit.report import of_reports, render
from lipaudit.report.blocks import Paragraph, Table
from lipaudit.report.cells import format_significant, write_math
from lipaudit.report.page.ranking import (
    describe_ranking,
    make_ranking_chapter,
    tabulate_ranking,
)
from lipaudit.report.page.scorecard import make_scorecard
from tests.report.conftest import keep

BEHIND = Verdict(
    rule="attack.robust",
    metric="attack.robust:mean",
    status="regressed",
    paired=-0.25,
    low=-0.4,
    high=-0.125,
    unit="pp",
    p=1e-3,
    samples=24,
)


@pytest.fixture(scope="module")
def ranking(report, other):
    first, second = rank([report, other]).models
    second = second.model_copy(update={"outcome": "not distinguishable from the best"})
    third = second.model_copy(
        update={"model": "third", "outcome": "behind the best", "difference": BEHIND, "rank": 3}
    )
    return rank([report, other]).model_copy(
        update={"models": (first, second, third), "compared": 2}
    )


def cell(block: Table, row: int, label: str):
    (at,) = (i for i, column in enumerate(block.columns) if column.label == label)
    return block.rows[row][at]


def test_the_outcome_is_said_in_words(ranking, report):
    first, second, _ = (model.model for model in ranking.models)
    assert describe_ranking(ranking) == [
        f"Best: {first}.",
        f"Not distinguishable from the best: {second}.",
        "Behind the best: third.",
    ]
    apart = keep(report, report.section("attack"))
    ids = {"ids": tuple(f"{i:03x}" for i in range(24))}
    section = apart.sections[0].model_copy(update={"samples": apart.sections[0].samples | ids})
    elsewhere = keep(apart, section)
    (said,) = describe_ranking(rank([apart, elsewhere]))
    assert said.startswith("Not comparable: A: ")
    assert said.endswith("samples are in the current report).")


def test_limits_stand_behind_their_figures(ranking):
    block, model = tabulate_ranking(ranking), ranking.models[2]
    attacked = next(each for each in model.summary.accuracy if each.kind == "attacked")
    limits = f"({100 * attacked.low:.1f} to {100 * attacked.high:.1f}%)"
    assert cell(block, 2, f"robust accuracy, {attacked.ball}") == f"{attacked.share:.1%} {limits}"
    assert cell(block, 2, "difference") == "-25pp (-40 to -12.5pp)"
    assert cell(block, 0, "difference") is None
    norm = model.summary.norms
    shown = [format_significant(value) for value in (norm.median, norm.low, norm.high)]
    assert cell(block, 2, "median ||J||") == f"{shown[0]} ({shown[1]} to {shown[2]})"
    # What is proven is said of each figure, and a page sorts columns of numbers by them.
    kinds = {column.label: column.format for column in block.columns}
    assert {label for label, kind in kinds.items() if kind == "s"} == {"model", "outcome"}


def test_too_few_samples_for_any_limits_are_called_so(ranking):
    unknown = BEHIND.model_copy(update={"low": -1.0, "high": math.inf, "unit": "%"})
    few = ranking.models[2].model_copy(update={"difference": unknown})
    block = tabulate_ranking(ranking.model_copy(update={"models": (ranking.models[0], few)}))
    assert cell(block, 1, "difference") == "-25% (too few samples)"


@pytest.mark.parametrize("name", ["table", "markdown", "html"])
def test_the_ranking_stands_first_then_the_scorecards(report, other, name):
    named = ("bounds", "jacobian", "attack")
    parts = (keep(each, *map(each.section, named)) for each in (report, other))
    page = render(of_reports(*parts), name).decode()
    places = [
        page.index(t) for t in ("Which model is", "How do the scorecards", "What was audited")
    ]
    assert places == sorted(places)


def test_in_the_order_given_no_report_is_ranked(report, other):
    ranked = [model.model for model in rank([report, other]).models]
    back = [other, report] if ranked[0] == report.run.model.spec else [report, other]
    kept = rank(back, "order")
    assert [model.model for model in kept.models] == [each.run.model.spec for each in back]
    assert [model.model for model in kept.models] != ranked
    assert {model.rank for model in kept.models} == {None}
    page = render(of_reports(*back, by="order"), "table").decode()
    assert "The models, in order" in page
    assert "Which model is" not in page


def test_scorecards_stand_beside_each_other(report, other):
    document = of_reports(report, other)["page"]()
    (block,) = next(c for c in document.chapters if c.name == "scorecards").blocks
    labels = [write_math(line.label) for line in make_scorecard(report).lines]
    assert [row[0] for row in block.rows] == labels
    assert len(block.columns) == 3
    clean = next(row for row in block.rows if row[0] == "clean accuracy")
    assert clean[1] == clean[2] != ""
    head = next(row for row in block.rows if row[0].startswith("steepest"))
    assert head[1] != head[2]


def test_without_a_common_figure_models_stand_as_they_were_given(report, other):
    kept = [keep(r, r.section("bounds")) for r in (report, other)]
    part = make_ranking_chapter(rank(kept))
    (block,) = part.blocks
    assert [row[0] for row in block.rows] == [r.run.model.spec for r in kept]
    assert not any(isinstance(each, Paragraph) for each in part.blocks)


def test_a_brief_fits_a_pull_request(report, other):
    lines = render(of_reports(report, other), "brief").decode().splitlines()
    assert len(lines) <= 15
    assert lines[0] == "### lipaudit: 2 models side by side"
    assert "Best: " in lines[2]
    assert "| median ‖J‖" in lines[4]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[4:]}) == 1
