"""Tests and confidence limits for changes of paired samples; tests and limits agree.

Every function measures a change for the worse (positive is worse). `p(margin)` tests "the change
is at most the margin", where the margin is 0 (no worse) or below. `limits(level)` are one-sided:
the change is above the first and below the second, each with confidence 1 - level.
`limits(level)[0] > 0` and `p(0) <= level` are the same statement.

The null hypothesis is "no worse": old and new values of a sample are exchangeable, or the new ones
are better. Sign tests hold for every distribution whose median change is at most 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

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
        mcnemar: exact two-sided p-value of "no change" for shares.
    """

    estimate: float
    samples: int
    p: Callable[[float], float]
    limits: Callable[[float], Limits]
    least: int = FEWEST
    of_signs: bool = False
    mcnemar: float | None = None


def judge_median(changes: Values) -> Evidence:
    """Judge the median of paired changes by the sign test.

    The limits are order statistics: x_(k) with the largest k such that P(B <= k - 1) <= level
    for B ~ Binomial(n, 1/2). Exact for every continuous distribution, conservative with ties.
    Infinite changes (a norm became 0, or left 0) count like any other.
    Source: Conover, Practical Nonparametric Statistics, 3rd ed., sections 3.2 and 3.4.
    """
    x = np.sort(round_changes(changes))
    n = changes.size

    def p(margin: float) -> float:
        if n < FEWEST:
            return 1.0
        above = int((x > margin).sum())
        # P(B >= above) = P(B <= n - above), since B is symmetric.
        return sum_binomial(n - above, n)

    def limits(level: float) -> Limits:
        k = sign_test_place(n, level)
        if not k:
            return _UNKNOWN
        return float(x[k - 1]), float(x[n - k])

    return Evidence(find_middle(x), n, p, limits, of_signs=True)


def round_changes(changes: Values) -> Values:
    """Round to 12 decimals; what is too large for that stays as it is."""
    with np.errstate(over="ignore"):
        return np.where(np.abs(changes) < 1e12, changes.round(DIGITS), changes)


def find_middle(ordered: Values) -> float:
    """Return the median of ordered values; 0 halfway between the two infinities."""
    lower = float(ordered[(ordered.size - 1) // 2])
    upper = float(ordered[ordered.size // 2])
    if lower == -math.inf and upper == math.inf:
        return 0.0
    # Halved before the sum, which may not be a float.
    if lower != upper:
        return lower / 2 + upper / 2
    return lower


def flip_signs(n: int) -> Values:
    """Return the signs that a test gives to n samples, (draws, n): the observed ones first.

    All 2^n if they are few, else random ones with a fixed seed: the same reports get the same
    verdict.
    """
    if 2**n <= RESAMPLES + 1:
        bits = np.arange(2**n)[:, None] >> np.arange(n) & 1
    else:
        bits = np.random.default_rng(0).integers(2, size=(RESAMPLES + 1, n))
        bits[0] = 0
    return np.where(bits, -1.0, 1.0)


def _count_tail(draws: Values, observed: float) -> float:
    """Return the share of draws that are at least the observed value, which is one of them."""
    if not math.isfinite(observed):
        return 1.0
    close = 1e-9 * abs(observed)  # the same sum in another order
    return float((draws >= observed - close).mean())


def _widen(limits: Limits, tails: Sequence[float], level: float) -> Limits:
    """Let limits contain 0 unless the exact test of its side rejects 0, too."""
    low, high = limits
    if tails[0] > level:
        low = min(low, 0.0)
    if tails[1] > level:
        high = max(high, 0.0)
    return low, high


def judge_by_bootstrap(
    old: Values, new: Values, change: Callable[[Values, Values], Values], least: int
) -> Evidence:
    """Judge the change of a statistic by the paired bootstrap, and by exchanging old and new.

    Limits are those of the percentile bootstrap: samples are drawn with replacement, both models
    together. "No worse" is rejected only if the exact test rejects it, too, which exchanges the
    old and the new value of each sample at random. Do not use it for a maximum: the bootstrap of
    an extreme is inconsistent.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapters 13 and 15.

    Args:
        old: values of the baseline, (samples,).
        new: values of the current model on the same samples.
        change: maps (draws, samples) of both to the draws' changes, (draws,).
        least: smallest number of samples; fewer prove nothing.
    """
    n = old.size
    estimate = float(change(old[None], new[None])[0])
    if np.array_equal(old, new):
        return Evidence(
            estimate, n, lambda margin: float(margin >= 0), lambda _: (0.0, 0.0), least
        )
    if n < least:
        return Evidence(estimate, n, lambda _: 1.0, lambda _: _UNKNOWN, least)
    generator = np.random.default_rng(0)
    rows = max(1, _CHUNK // n)
    pieces = list[Values]()
    exchanged = [np.array([estimate])]
    for start in range(0, RESAMPLES, rows):
        size = min(rows, RESAMPLES - start), n
        index = generator.integers(n, size=size, dtype=np.int32)
        pieces.append(change(old[index], new[index]))
        swap = generator.integers(2, size=size) > 0
        exchanged.append(change(np.where(swap, new, old), np.where(swap, old, new)))
    draws = np.sort(round_changes(np.concatenate(pieces)))
    nulls = np.concatenate(exchanged)
    if np.isnan(draws).any():  # infinite in some draws, before and after
        return Evidence(estimate, n, lambda _: 1.0, lambda _: _UNKNOWN, least)
    tails = [_count_tail(way * nulls, way * estimate) for way in (1, -1)]

    def p(margin: float) -> float:
        by_draws = (1 + int((draws <= margin).sum())) / (RESAMPLES + 1)
        if margin == 0:
            return max(by_draws, tails[0])
        return by_draws

    def limits(level: float) -> Limits:
        k = int(level * (RESAMPLES + 1) + 1e-9)
        if not k:
            return _UNKNOWN
        return _widen((float(draws[k - 1]), float(draws[-k])), tails, level)

    return Evidence(estimate, n, p, limits, least)


def judge_share(worse: int, better: int, samples: int) -> Evidence:
    """Judge the change of a share from its paired table: exact McNemar test, Bonett-Price limits.

    McNemar's one-sided p-value is P(B >= worse) for B ~ Binomial(worse + better, 1/2). The limits
    are those of D = (worse - better) / (n + 2) with the Laplace estimates (worse + 1) / (n + 2)
    and (better + 1) / (n + 2), which work without discordant pairs, too; they contain 0 unless
    McNemar's test rejects it.
    Sources: McNemar, Psychometrika 12 (1947) 153; Bonett and Price, J. Educ. Behav. Stat. 37
    (2012) 479.

    Args:
        worse: pairs that got worse.
        better: pairs that got better.
        samples: number of pairs.
    """
    up = (worse + 1) / (samples + 2)
    down = (better + 1) / (samples + 2)
    centre = up - down
    error = math.sqrt((up + down - centre**2) / (samples + 2))
    flips = worse + better
    tails = [sum_binomial(better, flips), sum_binomial(worse, flips)]

    def p(margin: float) -> float:
        if samples < FEWEST:
            return 1.0
        # erfc keeps its accuracy in the tail, where 1 - erf would be 0.
        by_limits = math.erfc((centre - margin) / error / math.sqrt(2)) / 2
        if margin == 0:
            return max(by_limits, tails[0])
        return by_limits

    def limits(level: float) -> Limits:
        half = -NormalDist().inv_cdf(level) * error  # 1 - level would be 1 for tiny levels
        # Two shares differ by at most 1.
        ends = max(-1.0, centre - half), min(1.0, centre + half)
        return _widen(ends, tails, level)

    both_sides = min(1.0, 2 * min(tails))
    return Evidence((worse - better) / samples, samples, p, limits, mcnemar=both_sides)


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

    Returns:
        The adjusted p-value of each hypothesis, and by how many hypotheses its own was multiplied.
        Source: Holm, Scand. J. Statist. 6 (1979) 65.
    """
    found = dict[Name, tuple[float, int]]()
    running = 0.0
    for step, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        left = len(p_values) - step
        running = max(running, min(1.0, p_values[name] * left))
        found[name] = running, left
    return found


def correct_jointly(changes: Values, quiet: float, *, both_sides: bool = False) -> Values:
    """Adjust the sign tests of many rows on the same samples, by flipping all signs of a sample.

    The statistic of a row is its number of changes for the worse. Its adjusted p-value is the
    share of draws in which a row that is not yet rejected reaches that number (step-down). Rows
    that move together count as one; independent rows are corrected as by Holm. Rows that hardly
    move, by the median size of their changes, are left out: sizes do not depend on the signs.
    Exact if old and new values of a sample, over all rows, are exchangeable.
    Source: Westfall and Young, Resampling-Based Multiple Testing (1993), section 2.6.

    Args:
        changes: changes for the worse, (rows, samples).
        quiet: largest median size of the changes of a row that hardly moves; its p-value is 1.
        both_sides: whether a change for the better counts, too.
    """
    rows, n = changes.shape
    adjusted = np.ones(rows)
    if n < FEWEST:
        return adjusted
    rounded = round_changes(changes)
    signs = np.sign(rounded)
    # Flipped signs sum to (positive - negative), so (sum + nonzero) / 2 are positive.
    sums = flip_signs(n) @ signs.T
    if both_sides:
        sums = np.abs(sums)
    counts = (sums + np.abs(signs).sum(1)) / 2
    sizes = [find_middle(line) for line in np.sort(np.abs(rounded))]
    moving = np.flatnonzero(np.array(sizes) > quiet)
    ranked = moving[np.argsort(-counts[0, moving], kind="stable")]
    counts = counts[:, ranked]
    # The largest count over each row and all after it, in every draw.
    largest = np.maximum.accumulate(counts[:, ::-1], axis=1)[:, ::-1]
    shares = (largest >= counts[0]).mean(0)
    adjusted[ranked] = np.maximum.accumulate(shares)
    return adjusted
