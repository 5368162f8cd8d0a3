"""How several models are shown: who is best, a row for each, the scorecards side by side."""

import math

import pytest

from lipaudit.gate import rank
from lipaudit.gate.rules import Verdict
from lipaudit.report import of_reports, render
from lipaudit.report.judgements import describe_ranking, tabulate_ranking
from lipaudit.report.opening import list_figures
from tests.report.conftest import find_chapter, keep

BEHIND = Verdict(
    rule="attack.robust", metric="attack.robust:mean", status="regressed", samples=24,
    paired=-0.25, low=-0.4, high=-0.125, unit="pp", p=1e-3,
)  # fmt: skip


@pytest.fixture(scope="module")
def ranking(report, other):
    first, second = rank([report, other]).models
    second = second.model_copy(update={"outcome": "not distinguishable from the best"})
    third = second.model_copy(
        update={"model": "third", "outcome": "behind the best", "difference": BEHIND, "rank": 3}
    )
    models = first, second, third
    return rank([report, other]).model_copy(update={"models": models, "compared": 2})


def columns(ranking, reports) -> dict[str, list[object]]:
    """Return the cells of the table of models, by the heading of the column."""
    block = tabulate_ranking(ranking, reports)
    cells = zip(*block.rows, strict=True)
    return {c.label: list(each) for c, each in zip(block.columns, cells, strict=True)}


def test_the_outcome_is_said_in_words(ranking, report):
    first, second, _ = (model.model for model in ranking.models)
    assert describe_ranking(ranking) == (
        f"Best: {first}. Not distinguishable from the best: {second}. Behind the best: third."
    )
    apart = keep(report, report.section("attack"))
    ids = {"ids": tuple(f"{i:03x}" for i in range(24))}
    section = apart.sections[0].model_copy(update={"samples": apart.sections[0].samples | ids})
    said = describe_ranking(rank([apart, keep(apart, section)]))
    assert said.startswith("Not comparable: A: ")
    assert said.endswith("samples are in the current report).")


def test_a_row_for_every_model_with_its_difference_and_its_scorecard(report, other):
    ranking = rank([report, other])
    shown = columns(ranking, [report, other])
    assert shown["model"] == [model.model for model in ranking.models]
    assert (shown["rank"], shown["difference"]) == ([1, 1], [None, "+0pp"])
    lines = {line.label: line.value for line in list_figures(report)}
    assert {label: values[0] for label, values in shown.items() if label in lines} == lines
    steepest = shown["steepest attention head, ‖J‖"]
    assert steepest[0] == 2 * steepest[1]
    best, second = ranking.models
    endless = BEHIND.model_copy(update={"low": -1.0, "high": math.inf, "unit": "%"})
    texts = (BEHIND, "-25pp (-40pp to -12.5pp)"), (endless, "-25% (no finite limits)")
    for change, text in texts:
        behind = second.model_copy(update={"difference": change})
        changed = ranking.model_copy(update={"models": (best, behind)})
        assert columns(changed, [report, other])["difference"] == [None, text]


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


def test_without_a_common_figure_models_stand_as_they_were_given(report, other):
    kept = [keep(r, r.section("bounds")) for r in (report, other)]
    (block,) = find_chapter(of_reports(*kept).page(), "ranking").blocks
    assert [row[0] for row in block.rows] == [r.run.model.spec for r in kept]
