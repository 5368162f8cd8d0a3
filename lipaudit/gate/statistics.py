"""Tests and confidence limits for changes of paired samples; tests and limits agree.

Every function measures a change for the worse (positive is worse). `p(margin)` tests "the change
is at most the margin", where the margin is 0 (no worse) or below. `limits(level)` are one-sided:
the change is above the first and below the second, each with confidence 1 - level.
`limits(level)[0] > 0` and `p(0, level) <= level` are the same statement.

The null hypothesis is "no worse": old and new values of a sample are exchangeable, or the new ones
are better. Sign tests hold for every distribution whose median change is at most 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Protocol, TypeVar

import numpy as np

from lipaudit.errors import UsageError
from lipaudit.tables.columns import Float, Frozen, sign_test_place, sum_binomial, wilson

Values = np.ndarray[Any, np.dtype[np.float64]]
Limits = tuple[float, float]
Name = TypeVar("Name")

ALPHA = 0.05
"""Default error probability over all tests together."""
LEVEL = ALPHA / 2
"""One-sided level of each limit; both limits form a 95% interval."""
RESAMPLES = 1999
"""Draws of a bootstrap or of signs: (1999 + 1) times a level of 0.025 is a whole rank."""
FINEST = 1e-5
"""Smallest level of a test by random draws: it takes 200,000 draws, half a minute for a figure
of 1000 samples."""
DOUBTFUL = 0.01
"""With a p-value above this, more draws would not prove a change at a level below 1 in 2000."""
FEWEST = 5
"""Samples that a test needs: of fewer, not even equal signs are rarer than one in 16."""
QUIET = 0.25
"""Share of a limit: rows whose changes are usually smaller are no part of the correction."""
LEAST = {"share": 32, "mean": 256, "p95": 512}
"""Samples from which the bootstrap of a statistic keeps twice its level, simulated at the margin
(docs/theory/gate.md). With fewer, one in ten samples falling to a tenth raises up to 53% of
alarms: the few samples that carry the statistic need not show a fall that the population has."""
DIGITS = 12
"""Decimals of changes: a change at the limit is not above it by a rounding error."""
_CHUNK = 2**21
"""Resampled values at a time: 16 MB an array."""
_UNKNOWN: Limits = (-math.inf, math.inf)


class ComputeP(Protocol):
    """Computes the p-value of "the change is at most the margin", for margins of at most 0."""

    def __call__(self, margin: float, level: float = LEVEL) -> float:
        """Return the p-value.

        Args:
            margin: the margin.
            level: the p-value that would prove the change. A test by random draws makes enough of
                them to reach it; other tests are exact at any level.
        """
        ...


@dataclass(frozen=True)
class Evidence:
    """The statistics of one change.

    Attributes:
        estimate: the observed change (positive is worse).
        samples: number of pairs.
        p: margin -> p-value of "the change is at most the margin", for margins of at most 0.
        limits: level -> lower and upper one-sided limit.
        least: number of samples that the test needs at a usual level.
        of_signs: whether the p-value depends on the signs of the changes alone.
        by_draws: whether p-value and limits are those of random draws, which small levels need
            many of.
        mcnemar: exact two-sided p-value of "no change" for shares.
    """

    estimate: float
    samples: int
    p: ComputeP
    limits: Callable[[float], Limits]
    least: int = FEWEST
    of_signs: bool = False
    by_draws: bool = False
    mcnemar: float | None = None

    @property
    def has_enough_samples(self) -> bool:
        """Return whether the test can prove anything at a usual level."""
        return self.samples >= self.least


def judge_median(changes: Values) -> Evidence:
    """Return the sign test and confidence limits of the median of paired changes.

    The lower limit is the k-th smallest of the n changes, the upper one the k-th largest. k is the
    largest number with P(B <= k - 1) <= level for B ~ Binomial(n, 1/2). Exact for every continuous
    distribution, conservative with ties. Infinite changes (a norm became 0, or left 0) count like
    any other.
    Source: Conover, Practical Nonparametric Statistics, 3rd ed., sections 3.2 and 3.4.

    Args:
        changes: change of each sample for the worse, (samples,).
    """
    x = np.sort(round_changes(changes))
    n = changes.size

    def compute_p(margin: float, level: float = LEVEL) -> float:
        # Sign test of "the median change is at most the margin", over the n sorted changes x:
        # P(B >= number above the margin) for B ~ Binomial(n, 1/2).
        if n < FEWEST:  # too few to prove anything
            return 1.0
        above = int((x > margin).sum())
        # sum_binomial(k, n) is P(B <= k). Since B is symmetric, P(B >= above) = P(B <= n - above).
        return sum_binomial(n - above, n)

    def compute_limits(level: float) -> Limits:
        # Limits of the median: the k-th smallest and k-th largest of the n sorted changes x, each
        # with confidence 1 - level. k is the rank that the sign test gives.
        k = sign_test_place(n, level)
        if not k:  # too few samples for this level
            return _UNKNOWN
        return float(x[k - 1]), float(x[n - k])

    # of_signs: the p-value depends on the signs of the changes alone.
    return Evidence(find_middle(x), n, p=compute_p, limits=compute_limits, of_signs=True)


def round_changes(changes: Values) -> Values:
    """Round changes to 12 decimals; numbers from 1e12 on stay as they are."""
    with np.errstate(over="ignore"):
        return np.where(np.abs(changes) < 1e12, changes.round(DIGITS), changes)


def find_middle(ordered: Values) -> float:
    """Return the median of sorted values; values may be infinite."""
    lower = float(ordered[(ordered.size - 1) // 2])
    upper = float(ordered[ordered.size // 2])
    if lower == -math.inf and upper == math.inf:  # the middle of -inf and inf
        return 0.0
    # Both are halved first: their sum may be too large for a float.
    if lower != upper:
        return lower / 2 + upper / 2
    return lower


def draw_signs(n: int) -> Values:
    """Return the signs (+1, -1) by which a sign test multiplies the changes of n samples.

    The shape is (draws, n). The first draw has only +1: the changes as observed. If 2^n is small,
    all combinations of signs are returned. Otherwise the draws are random with a fixed seed, so
    that the same reports get the same verdict.
    """
    if 2**n <= RESAMPLES + 1:
        bits = np.arange(2**n)[:, None] >> np.arange(n) & 1  # the binary digits of each draw
    else:
        bits = np.random.default_rng(0).integers(2, size=(RESAMPLES + 1, n))
        bits[0] = 0
    return np.where(bits, -1.0, 1.0)  # a bit of 1 flips the sign


def _compute_tail(draws: Values, observed: float) -> float:
    """Return the p-value of a randomisation test: the share of draws >= the observed value.

    Args:
        draws: (draws,), the statistic under the null hypothesis, including the observed value.
        observed: the observed value; an infinite value proves nothing.
    """
    if not math.isfinite(observed):
        return 1.0
    rounding = 1e-9 * abs(observed)  # rounding error of the same sum in another order
    return float((draws >= observed - rounding).mean())


@dataclass(frozen=True)
class ExactTest:
    """The p-values of an exact test, by which approximate p-values and limits are corrected.

    Attributes:
        p_no_worse: the p-value of "no worse".
        p_no_better: the p-value of "no better".
    """

    p_no_worse: float
    p_no_better: float

    def correct_p(self, p: float, margin: float) -> float:
        """Return the p-value of "the change for the worse is at most the margin".

        The exact test is only of "no worse", a margin of 0. There both tests must reject: the
        larger p-value counts. For other margins only the approximate test exists.

        Args:
            p: p-value of the approximate test, for this margin.
            margin: the margin, at most 0.
        """
        if margin == 0:
            return max(p, self.p_no_worse)
        return p

    def include_zero(self, low: float, high: float, level: float) -> Limits:
        """Widen limits to include 0 on each side where the exact test keeps "no change".

        Args:
            low: approximate lower limit of a change for the worse.
            high: approximate upper limit.
            level: one-sided error probability of each limit.
        """
        if self.p_no_worse > level:
            low = min(low, 0.0)
        if self.p_no_better > level:
            high = max(high, 0.0)
        return low, high


def judge_by_bootstrap(
    old: Values, new: Values, change: Callable[[Values, Values], Values], least: int
) -> Evidence:
    """Judge the change of a statistic by the paired bootstrap, and by exchanging old and new.

    The limits are those of the percentile bootstrap: samples are drawn with replacement, the old
    and new value of a sample together. A second, exact test exchanges the old and the new value of
    each sample at random. "No worse" is rejected only if both tests reject it. Not for a maximum:
    the bootstrap of an extreme is inconsistent.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapters 13 and 15.

    Args:
        old: values of the baseline, (samples,).
        new: values of the current model on the same samples.
        change: maps old and new values, (draws, samples) each, to the change of the statistic in
            each draw, (draws,).
        least: smallest number of samples; fewer prove nothing.
    """
    n = old.size
    estimate = float(change(old[None], new[None])[0])  # of the samples as they are: one draw
    # Surely no change: both limits are 0. "The change is at most the margin" is true for a margin
    # of 0 (p-value 1), and refuted for a margin below 0 (p-value 0).
    if np.array_equal(old, new):
        return Evidence(
            estimate,
            n,
            p=lambda margin, level=LEVEL: float(margin >= 0),
            limits=lambda _: (0.0, 0.0),
            least=least,
            by_draws=True,
        )
    # Nothing is proven: the p-value is 1, and there are no finite limits.
    unproven = Evidence(
        estimate,
        n,
        p=lambda margin, level=LEVEL: 1.0,
        limits=lambda _: _UNKNOWN,
        least=least,
        by_draws=True,
    )
    if n < least:
        return unproven

    @lru_cache(maxsize=1)  # p-value and limits of one level read the same draws
    def draw(count: int) -> tuple[Values, ExactTest]:
        # Return the resampled changes, (count,), and the exchange test.
        draws, nulls = _draw_changes(old, new, change, count)
        # The exchange test: changes under the null hypothesis "old and new are exchangeable". The
        # observed change is one of the exchanges.
        nulls = np.append(nulls, estimate)
        # Large changes count against "no worse", and small ones against "no better".
        return draws, ExactTest(
            p_no_worse=_compute_tail(nulls, estimate), p_no_better=_compute_tail(-nulls, -estimate)
        )

    usual = draw(RESAMPLES)
    if np.isnan(usual[0]).any():  # a statistic is infinite before and after: their change is NaN
        return unproven

    def compute_p(margin: float, level: float = LEVEL) -> float:
        # p-value of "the change is at most the margin", by the percentile bootstrap: the share of
        # resampled changes (`draws`) at or below the margin. The observed change counts as one.
        count = RESAMPLES
        draws, exact = usual
        while True:
            by_draws = (1 + int((~(draws > margin)).sum())) / (count + 1)
            p = exact.correct_p(by_draws, margin)
            if p > DOUBTFUL or count >= _count_draws(level):
                return p
            count = _count_draws(level)
            draws, exact = draw(count)

    def compute_limits(level: float) -> Limits:
        # Limits of the percentile bootstrap, widened to contain 0 where the exact test does not
        # reject it.
        draws, exact = usual
        if _count_draws(level) > RESAMPLES:
            draws, exact = draw(_count_draws(level))
        low, high = _find_percentiles(draws, level)
        return exact.include_zero(low, high, level)

    return Evidence(estimate, n, p=compute_p, limits=compute_limits, least=least, by_draws=True)


def _count_draws(level: float) -> int:
    """Return how many random draws can prove a change at a level.

    A p-value of R draws is at least 1 / (R + 1). If this is below the level, R is the usual number
    RESAMPLES. Else R + 1 is at least 2 / level, so that one draw may be against the change. There
    are no more draws than the level FINEST needs: smaller levels, of many rows, prove nothing.
    """
    if needs_more_draws(level):
        return math.ceil(2 / max(level, FINEST))
    return RESAMPLES


def needs_more_draws(level: float) -> bool:
    """Return whether the usual number of draws, RESAMPLES, can prove nothing at a level."""
    return level * (RESAMPLES + 1) <= 1 + 1e-9  # a rounding error above 1 counts as 1


def require_level(alpha: float) -> None:
    """Refuse an alpha at which not even a single figure can be tested by random draws.

    Raises:
        UsageError: alpha / 2, the level of a single figure, is too small.
    """
    level = alpha / 2
    if level < FINEST:
        raise UsageError(
            f"a mean or 95th percentile cannot be tested at a level of {level:.2g}, half of "
            f"alpha: random draws reach {FINEST:g}",
            "Raise alpha, or judge the median.",
        )


def _find_percentiles(draws: Values, level: float) -> Limits:
    """Return the limits beyond which a share `level` of the resampled changes is, on each side.

    They are the k-th smallest and the k-th largest change: k = 50 of 1999 draws at 0.025.

    Args:
        draws: the changes, sorted, (draws,). If they are too few for the level, k is 0: then no
            limits are known.
        level: one-sided error probability of each limit.
    """
    # 1e-9 makes up for a rounding error just below a whole number.
    k = int(level * (draws.size + 1) + 1e-9)
    if not k:
        return _UNKNOWN
    return float(draws[k - 1]), float(draws[-k])


def _draw_changes(
    old: Values, new: Values, change: Callable[[Values, Values], Values], count: int
) -> tuple[Values, Values]:
    """Return the changes of a statistic in random draws, for a bootstrap and an exchange test.

    Args:
        old: values of the baseline, (samples,).
        new: values of the current model on the same samples.
        change: maps old and new values to the change in each draw, as in `judge_by_bootstrap`.
        count: number of draws.

    Returns:
        The sorted changes over samples that were drawn with replacement, and the changes if the
        old and the new value of each sample are exchanged with probability 1/2; (draws,) each.
    """
    n = old.size
    generator = np.random.default_rng(0)  # a fixed seed: equal reports have equal verdicts
    most = max(1, _CHUNK // n)  # draws at a time, so that the arrays fit into memory
    resampled = []
    exchanged = []
    for start in range(0, count, most):
        size = min(most, count - start), n
        # Bootstrap: the same samples of old and new, drawn with replacement, (draws, samples).
        index = generator.integers(n, size=size, dtype=np.int32)
        resampled.append(change(old[index], new[index]))
        # Exchange the old and the new value of each sample with probability 1/2.
        swap = generator.integers(2, size=size) > 0
        exchanged.append(change(np.where(swap, new, old), np.where(swap, old, new)))
    # Resampled changes are compared with a margin. They are rounded, so that a change equal to the
    # margin is not above it by an error in the last digit.
    # Exchanged ones are compared with the observed change, with a tolerance (`_compute_tail`).
    draws = np.sort(round_changes(np.concatenate(resampled)))
    return draws, np.concatenate(exchanged)


def judge_share(worse: int, better: int, samples: int) -> Evidence:
    """Judge the change of a share from its paired table: exact McNemar test, Bonett-Price limits.

    McNemar's one-sided p-value is P(B >= worse) for B ~ Binomial(worse + better, 1/2). The limits
    of Bonett and Price are a normal interval around the difference of the two shares
    (worse + 1) / (n + 2) and (better + 1) / (n + 2). Because of the added pairs, the interval has
    a width even if no sample changed. The limits contain 0 unless McNemar's test rejects 0.
    Sources: McNemar, Psychometrika 12 (1947) 153; Bonett and Price, J. Educ. Behav. Stat. 37
    (2012) 479.

    Args:
        worse: pairs that got worse.
        better: pairs that got better.
        samples: number of pairs.
    """
    share_worse = (worse + 1) / (samples + 2)
    share_better = (better + 1) / (samples + 2)
    centre = share_worse - share_better
    error = math.sqrt((share_worse + share_better - centre**2) / (samples + 2))  # standard error
    discordant = worse + better
    # McNemar's test. As B ~ Binomial(discordant, 1/2) is symmetric, P(B >= worse) is
    # P(B <= better).
    exact = ExactTest(
        p_no_worse=sum_binomial(better, discordant), p_no_better=sum_binomial(worse, discordant)
    )

    def compute_p(margin: float, level: float = LEVEL) -> float:
        # p-value of "the share fell by at most the margin": the normal tail of Bonett and Price's
        # estimate `centre` with its standard error `error`, P(Z >= (centre - margin) / error).
        if samples < FEWEST:  # too few to prove anything
            return 1.0
        # P(Z >= z) = erfc(z / sqrt(2)) / 2. erfc keeps its accuracy in the tail, where 1 - erf
        # would be 0.
        by_limits = math.erfc((centre - margin) / error / math.sqrt(2)) / 2
        return exact.correct_p(by_limits, margin)  # at margin 0 McNemar's test must reject, too

    def compute_limits(level: float) -> Limits:
        # Bonett and Price's limits `centre` -+ z `error`, widened to contain 0 where McNemar's
        # exact test does not reject it.
        # z = -inv_cdf(level), not inv_cdf(1 - level): 1 - level would be 1 for tiny levels.
        half = -NormalDist().inv_cdf(level) * error
        # Two shares differ by at most 1.
        return exact.include_zero(max(-1.0, centre - half), min(1.0, centre + half), level)

    both_sides = min(1.0, 2 * min(exact.p_no_worse, exact.p_no_better))
    estimate = (worse - better) / samples
    return Evidence(estimate, samples, p=compute_p, limits=compute_limits, mcnemar=both_sides)


class Proportion(Frozen):
    """A number of samples among all, with 95% limits of the share (Wilson).

    Attributes:
        count: the number.
        share: its share of all samples.
        low: lower limit of the share.
        high: upper limit of the share.
    """

    count: int
    share: Float
    low: Float
    high: Float

    @classmethod
    def of(cls, count: int, samples: int) -> Proportion:
        """Return the share of a number of samples, at least one in all."""
        low, high = wilson(count, samples)
        return cls(count=count, share=count / samples, low=low, high=high)


class Movement(Frozen):
    """How the predictions of shared samples moved from the first report to the second.

    Shares are of the labelled samples, except `equal`: of all.

    Attributes:
        measure: the section of the predictions.
        samples: number of shared samples.
        labelled: number of those whose class is known.
        equal: samples with the same prediction.
        right_to_wrong: samples that only the first report has right.
        wrong_to_right: samples that only the second one has right.
        wrong_to_other: samples that both have wrong, as different classes.
        change: change of the accuracy; None without labels.
        low: lower 95% limit of that change (Bonett and Price).
        high: upper 95% limit of that change.
        mcnemar: exact two-sided p-value of "right to wrong and wrong to right are equally likely".
        kl: mean Kullback-Leibler divergence KL(first || second) of the outputs, in nats.
        kl_low: lower 95% limit of that mean; None for fewer than 256 samples.
        kl_high: upper 95% limit of that mean.
        reason: why there is no divergence.
    """

    measure: str
    samples: int
    labelled: int
    equal: Proportion
    right_to_wrong: Proportion | None = None
    wrong_to_right: Proportion | None = None
    wrong_to_other: Proportion | None = None
    change: Float | None = None
    low: Float | None = None
    high: Float | None = None
    mcnemar: Float | None = None
    kl: Float | None = None
    kl_low: Float | None = None
    kl_high: Float | None = None
    reason: str = ""


# Many tests together


def correct_by_holm(p_values: Mapping[Name, float]) -> dict[Name, tuple[float, int]]:
    """Adjust p-values by Holm's step-down procedure.

    The smallest of k p-values is multiplied by k, the next one by k - 1, and so on. An adjusted
    p-value is never smaller than the adjusted p-value before it. If all hypotheses with an
    adjusted p-value of at most alpha are rejected, the probability that a true hypothesis is among
    them is at most alpha.
    Source: Holm, Scand. J. Statist. 6 (1979) 65.

    Args:
        p_values: the p-value of each hypothesis, of any test.

    Returns:
        For each hypothesis, the adjusted p-value and the factor (k, k - 1, ...) of its p-value.
    """
    adjusted = {}
    largest = 0.0  # of the adjusted p-values so far
    for step, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        factor = len(p_values) - step
        largest = max(largest, min(1.0, p_values[name] * factor))
        adjusted[name] = largest, factor
    return adjusted


def _count_signs(signs: Values, both_sides: bool) -> Values:
    """Return the number of changes for the worse of each row, if signs are flipped at random.

    Args:
        signs: 1 for a change for the worse, -1 for the better, 0 for none, (rows, samples).
        both_sides: whether to count the changes of the more frequent sign instead.

    Returns:
        (draws, rows); a draw flips the signs of the same samples in all rows. The first draw flips
        none: it has the observed numbers.
    """
    # The signs of a row sum to (positive - negative), and their sizes to (positive + negative). So
    # half of both sums is the number of positive ones.
    sums = draw_signs(signs.shape[1]) @ signs.T  # (draws, rows)
    if both_sides:
        sums = np.abs(sums)
    return (sums + np.abs(signs).sum(1)) / 2


def correct_jointly(changes: Values, quiet: float, *, both_sides: bool = False) -> Values:
    """Return the p-values of the sign tests of many rows on the same samples, corrected jointly.

    A draw flips the signs of all changes of some samples, in all rows (heads) at once. The
    statistic of a row is its number of changes for the worse. The p-value of a row is the share of
    draws in which this row, or a row with fewer changes for the worse, reaches the observed number
    of this row (step-down). So rows that change together are corrected like one row, and
    independent rows about as by Holm. Rows whose median size of changes is at most `quiet` are
    left out: sizes do not depend on the signs, so the test stays valid. The test is exact if the
    old and new values of a sample, over all rows, are exchangeable.
    Source: Westfall and Young, Resampling-Based Multiple Testing (1993), section 2.6.

    Args:
        changes: changes for the worse, (rows, samples).
        quiet: largest median size of the changes of a row that hardly moves; its p-value is 1.
        both_sides: whether a change for the better counts, too.
    """
    rows, n = changes.shape
    adjusted = np.ones(rows)
    if n < FEWEST:  # too few to prove anything
        return adjusted
    rounded = round_changes(changes)
    # Changes for the worse of each row, (draws, rows). The first draw is the observed one.
    counts = _count_signs(np.sign(rounded), both_sides)
    sizes = [find_middle(line) for line in np.sort(np.abs(rounded))]
    moving = np.flatnonzero(np.array(sizes) > quiet)
    # The indices of the rows that move; rows with most changes for the worse come first.
    ranked = moving[np.argsort(-counts[0, moving], kind="stable")]
    counts = counts[:, ranked]
    # In every draw, the largest count over each row and all after it: a running maximum from the
    # last row to the first, therefore both [:, ::-1].
    largest = np.maximum.accumulate(counts[:, ::-1], axis=1)[:, ::-1]
    # The p-value of each row: the share of draws in which this count reaches the observed one.
    shares = (largest >= counts[0]).mean(0)
    # A row must not have a smaller p-value than a row with more changes for the worse.
    adjusted[ranked] = np.maximum.accumulate(shares)
    return adjusted
