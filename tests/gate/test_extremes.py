"""Every number of a report or a rule at its extremes ends in a judgement or in one clear error."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lipaudit.errors import LipauditError
from lipaudit.gate import compare, judge
from lipaudit.gate.conditions import find_problems
from lipaudit.gate.planning import describe_power
from lipaudit.gate.rules import STATS, parse_rule
from lipaudit.report import of_comparison, of_judgement, render
from lipaudit.tables import Array
from tests.gate.cases import attack, bounds, flags, jacobian, new, report, with_samples

EXTREMES = (0.0, -0.0, 1.0, 1e-300, 5e-324, 1e308, -1e308, -1.0, math.inf, -math.inf, math.nan)
METRICS = (
    "jacobian.norm",
    "jacobian.margin",
    "jacobian.radius_first_order",
    "jacobian.correct",
    "bounds.exact",
    "bounds.exact_max",
    "attack.robust",
    "attack.correct",
    "attack.clean",
)
LIMITS = ("+0%", "-99.9%", "+1e300%", "+0pp", "-2pp", "+1e300", "-1e300", "0", "1e300", "+1e-300")
N = 8


def columns(values):
    """A column of N samples out of few values, or all equal."""
    return st.lists(values, min_size=1, max_size=3).map(lambda some: (some * N)[:N])


@st.composite
def reports(draw):
    """A report whose figures are extreme, and may contradict each other."""
    numbers = columns(st.sampled_from(EXTREMES))
    heads = np.array([draw(numbers), draw(numbers)])
    with np.errstate(all="ignore"):
        rows = bounds(np.ones((2, N)))
        norms = jacobian(draw(numbers), eps=draw(st.sampled_from([0.1, 5, "2/255", None, [0.1]])))
    rows = rows.model_copy(update={"arrays": {"exact": Array.of(heads)}})
    radius = draw(columns(st.sampled_from([*EXTREMES, None])))
    correct = draw(columns(st.sampled_from([True, False])))
    figures = {"margin": draw(numbers), "radius_first_order": radius, "correct": correct}
    attacked = attack(flags(draw(st.integers(0, N)), N))
    eps = draw(st.sampled_from([["2/255"], [0.007], 0.007, None, [None], ["far"]]))
    attacked = attacked.model_copy(update={"settings": {**attacked.settings, "eps": eps}})
    return with_samples(norms, **figures), rows, attacked


@given(reports(), reports(), st.sampled_from(METRICS), st.sampled_from(STATS), st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_number_ends_a_gate_in_an_internal_error(old, current, metric, stat, data):
    """A judgement, or an error of lipaudit; what is judged can be written in every format."""
    before, now = report(*old), new(*current)
    limit = data.draw(st.sampled_from(LIMITS))
    op = data.draw(st.sampled_from(["<=", ">="]))
    for texts in ([f"{metric}:{stat} {op} {limit}"], []):
        try:
            judgement = judge(now, before, [parse_rule(text) for text in texts])
        except LipauditError:
            continue
        assert judgement.exit_code in (0, 1, 3, 5)
        for verdict in judgement.verdicts:
            if verdict.status == "regressed" and verdict.low is not None:
                assert verdict.p_adjusted <= 0.05
        for name in ("text", "markdown", "junit", "json"):
            assert render(of_judgement(judgement), name)
    try:
        found = compare([before, now])
    except LipauditError:
        return
    assert render(of_comparison(found, [before, now]), "markdown")
    if not find_problems(before):
        assert all(describe_power(before))


@pytest.mark.parametrize(
    "limit", ["1e999", "+1e400%", "-1e999pp", "1e99999999999", "+1e-99999999"]
)
def test_a_limit_that_is_no_number_is_refused(limit):
    with pytest.raises(LipauditError) as refused:
        parse_rule(f"jacobian.norm <= {limit}")
    assert refused.value.exit_code == 2


def test_norms_that_are_zero_in_half_of_the_samples_are_judged():
    """Half rise from 0, half fall to 0: no change; all rise: a regression."""
    half = np.arange(64) % 2
    mixed = judge(new(jacobian(1.0 - half)), report(jacobian(half)))
    assert mixed.verdicts[0].status == "pass"
    risen = judge(new(jacobian(np.ones(64))), report(jacobian(half)))
    assert (risen.verdicts[0].status, risen.exit_code) == ("inconclusive", 0)
    all_risen = judge(new(jacobian(np.ones(64))), report(jacobian(0 * half)))
    assert all_risen.exit_code == 1


def with_radii(radii):
    """A section with these first-order radii: infinite where the gradient is 0."""
    section = jacobian(np.ones(len(radii)))
    return with_samples(section, radius_first_order=radii, correct=[True] * len(radii))


@pytest.mark.parametrize("stat", ["median", "mean", "p95", "max"])
@pytest.mark.parametrize(
    ("limit", "status"), [(">= 0.1", "pass"), (">= 1e300", "pass"), ("<= 5", "regressed")]
)
def test_an_infinite_radius_is_beyond_every_absolute_limit(stat, limit, status):
    section = with_radii([math.inf] * 40 + [1.0] * 24)
    rule = parse_rule(f"jacobian.radius_first_order:{stat} {limit}")
    (verdict,) = judge(new(section), report(section), [rule]).verdicts
    assert (verdict.status, verdict.new) == (status, math.inf)


@pytest.mark.parametrize("limit", [">= -0.1", ">= -10%"])
@pytest.mark.filterwarnings("error")
def test_radii_that_stay_infinite_did_not_change(limit):
    section = with_radii([math.inf] * 40 + [1.0] * 24)
    rule = parse_rule(f"jacobian.radius_first_order:median {limit}")
    (verdict,) = judge(new(section), report(section), [rule]).verdicts
    assert (verdict.status, verdict.paired, verdict.low, verdict.high) == (
        "pass (proven)",
        0,
        0,
        0,
    )


def test_one_infinite_radius_does_not_make_the_others_equal():
    """Of the same weights, computed in another way: half of the radii are a third."""
    before = with_radii([math.inf] + [1.0] * 63)
    after = with_radii([math.inf] + [1 / 3] * 63)
    rule = parse_rule("jacobian.radius_first_order:median >= -10%")
    judgement = judge(report(after), report(before), [rule])
    assert judgement.verdicts[0].status == "regressed"


@pytest.mark.parametrize("eps", [0.007843137254901961, [0.5], ["2words"], None])
def test_radii_of_foreign_reports_are_settings_like_any_other(eps):
    section = attack(flags(90))
    foreign = section.model_copy(update={"settings": {**section.settings, "eps": eps}})
    assert judge(new(foreign), report(section)).exit_code == 5
    assert judge(new(section), report(foreign)).exit_code == 5
    assert judge(new(foreign), report(foreign)).exit_code == 0


def test_signed_shares_of_sensitivity_may_have_limits_beyond_one():
    assert parse_rule("jacobian.shares.mlps:max <= 1.5").limit.value == 1.5
