"""Every test and limit against another library, a published example or a hand calculation."""

import math

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from scipy import special, stats

from lipaudit.gate.statistics import (
    LEAST,
    RESAMPLES,
    correct_by_holm,
    exceed_t,
    invert_t,
    judge_by_bootstrap,
    judge_mean,
    judge_median,
    judge_share,
)

LEVELS = (0.05, 0.0125, 0.001)

DRAWN_BY = "rng" if Version(scipy.__version__) >= Version("1.15") else "random_state"
"""What scipy calls a generator of random numbers."""


def p95_change(old, new):
    return np.quantile(new, 0.95, axis=1) - np.quantile(old, 0.95, axis=1)


@pytest.mark.parametrize("n", [1, 4, 5, 8, 17, 64, 255])
@pytest.mark.parametrize("level", LEVELS)
def test_median_limits_are_the_order_statistics_of_the_binomial(n, level):
    x = np.random.default_rng(n).normal(size=n)
    low, high = judge_median(x).limits(level)
    binomial = stats.binom(n, 0.5)
    ranks = [k for k in range(1, n + 1) if binomial.cdf(k - 1) <= level]
    if not ranks:
        assert (low, high) == (-math.inf, math.inf)
        return
    ordered = np.sort(x)
    assert low == pytest.approx(ordered[max(ranks) - 1], abs=1e-12)
    assert high == pytest.approx(ordered[n - max(ranks)], abs=1e-12)


@pytest.mark.parametrize("margin", [-0.3, 0.0, 0.2])
def test_median_p_is_the_sign_test(margin):
    x = np.random.default_rng(3).normal(size=31)
    above = int((x > margin).sum())
    expected = stats.binomtest(above, 31, 0.5, alternative="greater").pvalue
    assert judge_median(x).p(margin) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_mean_limits_and_p_are_students(level):
    x = np.random.default_rng(4).normal(0.3, 1.0, 8)
    evidence = judge_mean(x)
    expected = stats.ttest_1samp(x, 0.1, alternative="greater").pvalue
    assert evidence.p(0.1) == pytest.approx(expected, rel=1e-9)
    low, high = stats.t.interval(1 - 2 * level, 7, x.mean(), stats.sem(x))
    assert evidence.limits(level) == pytest.approx((low, high), rel=1e-9)
    assert evidence.limits(1e-300) == (-math.inf, math.inf)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 31, 60, 255, 256, 1000, 3333, 9999, 10000])
def test_students_t_is_scipys_far_into_the_tail(n):
    for level in (0.5, 0.49, 0.4, 0.3, 0.25, 0.2, 0.1, 0.05, 0.025, 1e-3, 1e-5, 1e-8, 1e-12):
        t = -special.stdtrit(n, level)
        assert exceed_t(t, n) == pytest.approx(special.stdtr(n, -t), rel=1e-12)
        assert exceed_t(-t, n) == pytest.approx(special.stdtr(n, t), rel=1e-12)
        assert invert_t(level, n) == pytest.approx(t, rel=1e-12, abs=1e-12)
        assert invert_t(1 - level, n) == pytest.approx(-t, rel=1e-4, abs=1e-12)
    assert exceed_t(1e300, n) < 1e-150
    assert math.isfinite(invert_t(1e-149, n))
    assert invert_t(1e-300, n) == math.inf


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ([0.4] * 8, (0.4, 0.4)),
        ([0.4], (-math.inf, math.inf)),
        ([math.inf] * 8, (math.inf, math.inf)),
        ([math.inf, 0.5, 0.6], (0.5, math.inf)),
    ],
)
def test_changes_without_a_spread_leave_no_doubt_but_one_sample_proves_nothing(changes, limits):
    evidence = judge_mean(np.array(changes))
    assert evidence.limits(0.01) == limits
    assert (evidence.p(0.2) == 0.0) == (limits[0] > 0.2)
    # a tie with the margin does not count against the model
    assert judge_median(np.full(64, 0.1)).p(0.1) == judge_mean(np.full(64, 0.1)).p(0.1) == 1.0


def test_share_limits_agree_with_a_published_example():
    # Response before and after consolidation (Cavo et al. 2012), as analysed by Fagerland,
    # Lydersen and Laake: 6 and 16 discordant pairs of 161, -0.0621 (-0.1195 to -0.0032),
    # exact McNemar p = 0.052479.
    evidence = judge_share(6, 16, 161)
    assert evidence.estimate == pytest.approx(-0.0621, abs=5e-5)
    assert evidence.limits(0.025) == pytest.approx((-0.1195, -0.0032), abs=5e-5)
    assert evidence.mcnemar == pytest.approx(0.052479, abs=5e-7)


@pytest.mark.parametrize(("worse", "better"), [(0, 0), (1, 0), (3, 9), (9, 3), (12, 12), (0, 30)])
def test_mcnemar_is_the_exact_binomial_test(worse, better):
    flips = worse + better
    expected = stats.binomtest(worse, flips).pvalue if flips else 1.0
    assert judge_share(worse, better, 100).mcnemar == pytest.approx(expected, rel=1e-9)


def test_the_bootstrap_agrees_with_scipys():
    generator = np.random.default_rng(7)
    old = generator.lognormal(0, 0.5, 200)
    new = old * np.exp(generator.normal(0.1, 0.2, 200))
    ours = judge_by_bootstrap(old, new, p95_change, least=20).limits(0.05)
    theirs = stats.bootstrap(
        (old, new),
        lambda a, b, axis: np.quantile(b, 0.95, axis=axis) - np.quantile(a, 0.95, axis=axis),
        paired=True,
        confidence_level=0.9,
        method="percentile",
        n_resamples=4000,
        **{DRAWN_BY: np.random.default_rng(8)},
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.06 * width)
    few = np.linspace(1, 2, LEAST["p95"] - 1)  # which prove nothing
    evidence = judge_by_bootstrap(few, 10 * few, p95_change, LEAST["p95"])
    assert evidence.limits(0.05) == (-math.inf, math.inf)
    assert evidence.p(0.0) == 1.0


SKEWED = math.exp(0.5)
CHANGES_AT_THE_MARGIN = {  # how they are drawn; the larger of their mean and their median
    "normal": (lambda rng, size: rng.normal(size=size), 0.0),
    "t": (lambda rng, size: rng.standard_t(3, size), 0.0),
    "skewed up": (lambda rng, size: rng.lognormal(size=size), SKEWED),
    "skewed down": (lambda rng, size: -rng.lognormal(size=size), -1.0),
    "rare falls": (
        lambda rng, size: rng.normal(0, 0.02, size) - (rng.random(size) < 0.1) * math.log(10),
        0.02 * stats.norm.ppf(1 - 0.5 / 0.9),
    ),
}


@pytest.mark.parametrize("changes", CHANGES_AT_THE_MARGIN)
@pytest.mark.parametrize("n", [4, 8, 32])
def test_a_test_keeps_twice_its_level_at_the_margin(changes, n):
    """Of 800 runs at 0.05 at most 10 % reject, and 3 standard errors more."""
    draw, centre = CHANGES_AT_THE_MARGIN[changes]
    runs = draw(np.random.default_rng(n), (800, n)) - centre
    limit = 0.1 + 3 * math.sqrt(0.1 * 0.9 / 800)
    assert np.mean([judge_mean(x).p(0.0) <= 0.05 for x in runs]) <= limit
    median = np.median(draw(np.random.default_rng(1), (200_000,))) - centre
    assert np.mean([judge_median(x).p(median) <= 0.05 for x in runs]) <= limit


EVIDENCE = {
    "median": lambda rng: judge_median(rng.normal(size=rng.integers(1, 61)).round(1)),
    "mean": lambda rng: judge_mean(rng.normal(size=rng.integers(1, 61)).round(1)),
    "share": lambda rng: judge_share(*map(int, rng.integers(0, 41, 2)), 121),
    "bootstrap": lambda rng: judge_by_bootstrap(*rng.normal(size=(2, 30)), p95_change, least=20),
}


@pytest.mark.parametrize("test", EVIDENCE)
@given(st.integers(0, 2**31), st.floats(-1, 1).map(lambda x: round(x, 2)), st.sampled_from(LEVELS))
@settings(deadline=None, max_examples=100)
def test_p_and_limits_say_the_same(test, seed, margin, level):
    evidence = EVIDENCE[test](np.random.default_rng(seed))
    p, low = evidence.p(margin), evidence.limits(level)[0]
    if abs(p - level) > 1e-9 and abs(low - margin) > 1e-9:
        assert (p <= level) == (low > margin)
    assert test != "bootstrap" or evidence.p(-99.0) == 1 / (RESAMPLES + 1)


def test_holm_by_hand():
    # Sorted: .01 x 4 = .04, .02 x 3 = .06, .03 x 2 = .06, .04 x 1 = .04 -> running .06.
    p_values = dict(enumerate([0.03, 0.01, 0.04, 0.02]))
    adjusted, levels = zip(*map(correct_by_holm(p_values, 0.05).get, p_values), strict=True)
    assert adjusted == pytest.approx([0.06, 0.04, 0.06, 0.06])
    # The first falls at .05/4, the second stands at .05/3 and with it all later ones.
    assert levels == pytest.approx([0.05 / 3, 0.05 / 4, 0.05 / 3, 0.05 / 3])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(deadline=None, max_examples=200)
def test_holm_decides_alike_by_adjusted_p_and_by_level(p_values):
    found = correct_by_holm(dict(enumerate(p_values)), 0.05)
    adjusted, levels = zip(*(found[i] for i in range(len(p_values))), strict=True)
    ranked = sorted(range(len(p_values)), key=p_values.__getitem__)
    running = 0.0
    for rank, i in enumerate(ranked):
        running = max(running, min(1.0, p_values[i] * (len(p_values) - rank)))
        assert adjusted[i] == pytest.approx(running)
    for p, corrected, level in zip(p_values, adjusted, levels, strict=True):
        if abs(corrected - 0.05) > 1e-12:
            assert (corrected <= 0.05) == (p <= level)
