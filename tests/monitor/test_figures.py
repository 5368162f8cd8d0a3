"""The figures of a report that loggers get."""

import math

import pytest

from lipaudit.monitor.watching import collect_figures
from lipaudit.tables.summary import summary
from tests.report.conftest import make_report


@pytest.fixture(scope="module")
def report():
    return make_report()


def test_the_figures_are_those_of_the_scorecard(report):
    figures = collect_figures(report)
    summed = summary(report)
    assert figures["lipaudit/jacobian_norm/median"] == summed.norms.median
    assert figures["lipaudit/heads/steepest"] == summed.heads.steepest[0].exact
    assert figures["lipaudit/fragile_rows"] == summed.fragile.share
    attacked = {
        f"lipaudit/attacked_accuracy/{a.norm}_{a.eps.replace('/', '_')}": a.share
        for a in summed.accuracy
        if a.kind == "attacked"
    }
    assert attacked
    assert {n: v for n, v in figures.items() if "attacked" in n} == attacked


def test_what_is_not_finite_is_not_logged(report):
    section = report.section("jacobian")
    row = section.rows[0].replace(median=math.nan)
    broken = section.model_copy(update={"rows": (row, *section.rows[1:])})
    whole = report.model_copy(update={"sections": (broken,)})
    assert "lipaudit/jacobian_norm/median" not in collect_figures(whole)
    assert "lipaudit/jacobian_norm/max" in collect_figures(whole)
