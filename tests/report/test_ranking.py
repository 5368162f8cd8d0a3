"""How several models are shown: who is best, a row for each, the scorecards side by side."""

from __future__ import annotations

import pytest

from lipaudit.cli.explain import known
from lipaudit.gate import rank
from lipaudit.gate.contests import Difference
from lipaudit.report import of_reports, render
from lipaudit.report.blocks import Paragraph, Table
from lipaudit.report.page.ranking import chapter, said_of, table
from lipaudit.report.page.scorecard import scorecard
from lipaudit.report.topics import explained

BEHIND = Difference(
    estimate=-0.25, low=-0.4, high=-0.125, unit="pp", p=1e-3, p_adjusted=2e-3, samples=24
)


@pytest.fixture(scope="module")
def ranking(report, other):
    first, second = rank([report, other]).models
    third = second.model_copy(
        update={"model": "third", "outcome": "behind the best", "difference": BEHIND, "rank": 3}
    )
    return rank([report, other]).model_copy(update={"models": (first, second, third), "pairs": 3})


def cell(block: Table, row: int, label: str):
    (at,) = (i for i, column in enumerate(block.columns) if column.label == label)
    return block.rows[row][at]


def test_the_outcome_is_said_in_words(ranking, report):
    first, second, _ = (model.model for model in ranking.models)
    assert said_of(ranking) == [
        f"Best: {first}.",
        f"Not distinguishable from the best: {second}.",
        "Behind the best: third.",
    ]
    apart = report.model_copy(update={"sections": (report.section("attack"),)})
    ids = {"ids": tuple(f"{i:03x}" for i in range(24))}
    section = apart.sections[0].model_copy(update={"samples": apart.sections[0].samples | ids})
    elsewhere = apart.model_copy(update={"sections": (section,)})
    (said,) = said_of(rank([apart, elsewhere]))
    assert said.startswith("Not comparable: A: ")
    assert said.endswith("(attack: other samples were measured).")


def test_figures_and_limits_are_columns_or_stand_together(ranking):
    long, short = table(ranking), table(ranking, short=True)
    model = ranking.models[2]
    attacked = next(each for each in model.accuracy if each.kind == "attacked")
    label = f"under attack, {attacked.ball}"
    assert cell(long, 2, label) == attacked.share
    assert cell(long, 2, "difference") == "-25pp"
    assert cell(long, 2, "95 % together") == "-40 to -12.5pp"
    assert cell(short, 2, "difference") == "-25pp (-40 to -12.5pp)"
    limits = f"({100 * attacked.low:.1f} to {100 * attacked.high:.1f}%)"
    assert cell(short, 2, label) == f"{attacked.share:.1%} {limits}"
    assert "95 % together" not in {column.label for column in short.columns}
    # What is proven is said of a figure whether its limits stand beside or behind it.
    proven = [{c.label: (c.status, c.format) for c in t.columns} for t in (long, short)]
    assert proven[1].items() <= proven[0].items()


def test_every_heading_can_be_explained(ranking):
    for column in table(ranking).columns:
        assert explained(column.label.partition(",")[0], known()), column.label


@pytest.mark.parametrize("name", ["table", "markdown", "html"])
def test_the_ranking_stands_first_then_the_scorecards(report, other, name):
    page = render(of_reports(report, other), name).decode()
    assert 0 < page.index("Ranking") < page.index("Scorecards") < page.index("What was audited")
    assert page.count("What was audited") == 1


def test_scorecards_stand_beside_each_other(report, other):
    document = of_reports(report, other)["page"]()
    (block,) = next(c for c in document.chapters if c.name == "scorecards").blocks
    labels = [line.label for line in scorecard(report).lines]
    assert [row[0] for row in block.rows] == labels
    assert len(block.columns) == 3
    clean = next(row for row in block.rows if row[0] == "clean accuracy")
    assert clean[1] == clean[2] != ""
    head = next(row for row in block.rows if row[0].startswith("steepest"))
    assert head[1] != head[2]


def test_without_a_common_figure_models_stand_as_they_were_given(report, other):
    kept = [r.model_copy(update={"sections": (r.section("bounds"),)}) for r in (report, other)]
    part = chapter(rank(kept))
    (block,) = part.blocks
    assert [row[0] for row in block.rows] == [r.run.model.spec for r in kept]
    assert not any(isinstance(each, Paragraph) for each in part.blocks)


def test_a_brief_fits_a_pull_request(report, other):
    lines = render(of_reports(report, other), "brief").decode().splitlines()
    assert len(lines) <= 15
    assert lines[0] == "### lipaudit: 2 models"
    assert "Best: " in lines[2]
