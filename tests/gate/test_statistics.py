"""Every test and limit against another library, a published example or a hand calculation."""

import math

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from scipy import stats

from lipaudit.gate.statistics import (
    FEWEST,
    FINEST,
    LEAST,
    RESAMPLES,
    correct_by_holm,
    correct_jointly,
    judge_by_bootstrap,
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


@pytest.mark.parametrize(
    ("changes", "middle", "proven"),
    [
        ([0.4] * 8, 0.4, True),
        ([math.inf] * 8, math.inf, True),
        ([math.inf] * 4 + [-math.inf] * 4, 0.0, False),
        ([math.inf] * 6 + [-math.inf, 0.0], math.inf, False),
        ([1e308] * 8, 1e308, True),
        ([0.0] * 32 + [1.0] * 32, 0.5, False),
        ([0.4] * (FEWEST - 1), 0.4, False),
    ],
)
def test_changes_without_a_spread_or_an_end_are_judged_by_their_signs(changes, middle, proven):
    """A norm that leaves 0 changes without limit; few equal changes prove nothing."""
    evidence = judge_median(np.array(changes))
    assert evidence.estimate == middle
    assert (evidence.p(0.0) <= 0.025) == (evidence.limits(0.025)[0] > 0) == proven
    # a tie with the margin does not count against the model
    assert judge_median(np.zeros(64)).p(0.0) == 1.0


def test_share_limits_agree_with_a_published_example():
    # Response before and after consolidation (Cavo et al. 2012), as analysed by Fagerland,
    # Lydersen and Laake: 6 and 16 discordant pairs of 161, -0.0621 (-0.1195 to -0.0032),
    # exact McNemar p = 0.052479.
    evidence = judge_share(6, 16, 161)
    assert evidence.estimate == pytest.approx(-0.0621, abs=5e-5)
    # Their end is -0.0032, but half of the exact p-value is above 0.025: it does not reject 0.
    assert evidence.limits(0.025) == pytest.approx((-0.1195, 0.0), abs=5e-5)
    assert evidence.limits(0.0263)[1] == pytest.approx(-0.0038, abs=5e-5)
    assert evidence.mcnemar == pytest.approx(0.052479, abs=5e-7)


@pytest.mark.parametrize(("worse", "better"), [(0, 0), (1, 0), (3, 9), (9, 3), (12, 12), (0, 30)])
def test_mcnemar_is_the_exact_binomial_test(worse, better):
    """It decides, together with the limits, whether a share fell."""
    flips = worse + better
    expected = stats.binomtest(worse, flips).pvalue if flips else 1.0
    evidence = judge_share(worse, better, 100)
    assert evidence.mcnemar == pytest.approx(expected, rel=1e-9)
    side = stats.binomtest(worse, flips, alternative="greater").pvalue if flips else 1.0
    assert evidence.p(0.0) >= side * (1 - 1e-9)
    if worse > better:  # the exact test is the more careful of the two
        assert evidence.p(0.0) == pytest.approx(side)


def test_the_bootstrap_agrees_with_scipys():
    generator = np.random.default_rng(7)
    old = generator.lognormal(0, 0.5, 200)
    new = old * np.exp(generator.normal(0.1, 0.2, 200))
    evidence = judge_by_bootstrap(old, new, p95_change, least=20)
    ours = evidence.limits(0.05)
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
    # Exchanging old and new within the samples is scipy's permutation test of pairs.
    exact = stats.permutation_test(
        (old, new),
        lambda a, b, axis: np.quantile(b, 0.95, axis=axis) - np.quantile(a, 0.95, axis=axis),
        permutation_type="samples",
        alternative="greater",
        n_resamples=4000,
        **{DRAWN_BY: np.random.default_rng(9)},
    )
    assert evidence.p(0.0) == pytest.approx(exact.pvalue, abs=0.01)
    few = np.linspace(1, 2, LEAST["p95"] - 1)  # which prove nothing
    evidence = judge_by_bootstrap(few, 10 * few, p95_change, LEAST["p95"])
    assert evidence.limits(0.05) == (-math.inf, math.inf)
    assert evidence.p(0.0) == 1.0


def test_the_bootstrap_proves_a_change_at_levels_below_one_in_its_usual_draws():
    """By as many draws as the level needs, 200,000 at most: smaller levels are not reached."""
    generator = np.random.default_rng(3)
    old = generator.lognormal(0, 0.3, 64)
    proven = judge_by_bootstrap(old, 2 * old, p95_change, least=20)
    assert proven.p(0.0) == 1 / (RESAMPLES + 1)
    for level in (1 / (RESAMPLES + 1), 2e-4):
        assert 0 < proven.p(0.0, level) <= level
        low, high = proven.limits(level)
        assert 0 < low < proven.limits(0.025)[0] < proven.limits(0.025)[1] < high < math.inf
        assert proven.p(0.0, level) == proven.p(0.0, level)
    assert proven.p(0.0, 1e-7) == proven.p(0.0, FINEST) == 1 / 200_001
    assert proven.limits(1e-7) == (-math.inf, math.inf)
    # More draws would not prove a change that 2000 show to be chance: there is no need of them.
    chance = judge_by_bootstrap(old, generator.permutation(old), p95_change, least=20)
    assert chance.p(0.0, 1e-7) == chance.p(0.0) > 0.05


@pytest.mark.parametrize("shift", [0.14, 0.17, 0.2])
def test_the_p_value_of_a_mean_agrees_with_the_normal_tail_below_one_in_2000(shift):
    """Of 500 normal changes of known mean: sums over exchanges are nearly normal, too."""
    old = np.zeros(500)
    z = np.random.default_rng(4).normal(size=500)
    new = (z - z.mean()) / z.std() + shift

    def mean_change(first, second):
        return second.mean(1) - first.mean(1)

    evidence = judge_by_bootstrap(old, new, mean_change, least=32)
    expected = stats.norm.sf(shift * math.sqrt(500) / math.sqrt(1 + shift**2))
    p = evidence.p(0.0, 1e-4)
    assert expected / 3 < p < 3 * expected + 2 / 20_000


NOISES = {  # of no change: the larger half of the changes is as likely as the smaller one
    "normal": lambda rng, size: rng.normal(size=size),
    "lognormal, up": lambda rng, size: rng.lognormal(size=size) - 1,
    "lognormal, down": lambda rng, size: 1 - rng.lognormal(size=size),
    "exponential, up": lambda rng, size: rng.exponential(size=size) - math.log(2),
    "exponential, down": lambda rng, size: math.log(2) - rng.exponential(size=size),
    "two clusters, up": lambda rng, size: np.where(rng.random(size) < 0.5, 5.0, -1.0),
    "two clusters, down": lambda rng, size: np.where(rng.random(size) < 0.5, 1.0, -5.0),
    "half of them zero": lambda rng, size: rng.normal(size=size) * (rng.random(size) < 0.5),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("shared", [False, True])
def test_no_change_of_many_rows_is_seldom_called_a_change(noise, shared):
    """Whether the rows are independent or have half of their noise in common, at any count."""
    generator = np.random.default_rng(0)
    for n in (4, 5, 8, 16):
        flagged = 0
        for _ in range(200):
            rows = NOISES[noise](generator, (24, n))
            if shared:
                rows[::2] = rows[0]
            flagged += correct_jointly(rows, 0.0).min() <= 0.05
        assert flagged <= 200 * 0.05 + 3 * math.sqrt(200 * 0.05 * 0.95), n


def test_the_joint_correction_is_a_sign_test_of_one_row_and_holm_of_independent_ones():
    generator = np.random.default_rng(1)
    x = generator.normal(0.5, 1.0, 10)
    assert correct_jointly(x[None], 0.0)[0] == pytest.approx(judge_median(x).p(0.0))
    assert correct_jointly(np.tile(x, (40, 1)), 0.0) == pytest.approx(judge_median(x).p(0.0))
    # One row rises in all of 16 samples, 143 by chance: at most Bonferroni's 144 / 2^16.
    rows = generator.normal(size=(144, 16))
    rows[7] = 0.4
    adjusted = correct_jointly(rows, 0.0)
    assert adjusted[7] <= 144 / 2**16 + 3 * math.sqrt(144 / 2**16 / RESAMPLES) + 1 / RESAMPLES
    assert adjusted[np.arange(144) != 7].min() > 0.05
    assert correct_jointly(-rows, 0.0)[7] == 1.0
    assert correct_jointly(-rows, 0.0, both_sides=True)[7] <= 0.01
    # Rows that hardly move are no part of it: 8 samples suffice.
    quiet = 0.01 * rows[:, :8]
    quiet[7] = 0.4
    assert correct_jointly(quiet, 0.05)[7] == 1 / 256
    assert correct_jointly(quiet, 0.0)[7] > 0.2


EVIDENCE = {
    "median": lambda rng: judge_median(rng.normal(size=rng.integers(1, 61)).round(1)),
    "share": lambda rng: judge_share(*map(int, rng.integers(0, 41, 2)), 121),
    "bootstrap": lambda rng: judge_by_bootstrap(*rng.normal(size=(2, 30)), p95_change, least=20),
}


@pytest.mark.parametrize("test", EVIDENCE)
@given(st.integers(0, 2**31), st.sampled_from(LEVELS))
@settings(deadline=None, max_examples=100)
def test_p_and_limits_say_the_same(test, seed, level):
    evidence = EVIDENCE[test](np.random.default_rng(seed))
    p, low = evidence.p(0.0, level), evidence.limits(level)[0]
    if abs(p - level) > 1e-9:
        assert (p <= level) == (low > 0)
    assert test != "bootstrap" or evidence.p(-99.0) == 1 / (RESAMPLES + 1)


def test_holm_by_hand():
    # Sorted: .01 x 4 = .04, .02 x 3 = .06, .03 x 2 = .06, .04 x 1 = .04 -> running .06.
    p_values = dict(enumerate([0.03, 0.01, 0.04, 0.02]))
    adjusted, times = zip(*map(correct_by_holm(p_values).get, p_values), strict=True)
    assert adjusted == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert times == (2, 4, 1, 3)
