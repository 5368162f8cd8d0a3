"""Tests and confidence limits for changes of paired samples; tests and limits agree.

Every function measures a change for the worse (positive is worse). So `p(margin)` tests "the
change is at most the margin". `limits(level)` are one-sided: the change is above the first and
below the second, each with confidence 1 - level. `limits(level)[0] > margin` and
`p(margin) <= level` are the same statement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

from lipaudit.tables.columns import sign_test_place, sum_binomial

Values = np.ndarray[Any, np.dtype[np.float64]]
Limits = tuple[float, float]
Name = TypeVar("Name")

ALPHA = 0.05
"""Default error probability over all tests together."""
LEVEL = ALPHA / 2
"""One-sided level of each limit; both limits form a 95 % interval."""
RESAMPLES = 1999
"""Draws of a bootstrap: with them (1999 + 1) times a level of 0.025 is a whole rank."""
LEAST = {"mean": 256, "p95": 512}
"""Samples from which the bootstrap of a statistic keeps twice its level, simulated at the margin
(docs/theory/gate.md). With fewer, one in ten samples falling to a tenth raises up to 53 % of
alarms: the few samples that carry the statistic need not show a fall that the population has."""
DIGITS = 12
"""Decimals of changes: a change at the limit is not above it by a rounding error."""
_CHUNK = 2**21
"""Resampled values at a time: 16 MB an array."""
_FAR = 1e150
"""Largest t, whose square is a float; with one degree of freedom P(T > t) is 3e-151 there."""
_TERMS = 40
"""Terms of a continued fraction: 30 leave an error of 1.5e-12 for 10,000 samples, 15 of 7e-9."""
_UNKNOWN: Limits = (-math.inf, math.inf)


@dataclass(frozen=True)
class Evidence:
    """The statistics of one change.

    Attributes:
        estimate: the observed change (positive is worse).
        samples: number of pairs.
        p: margin -> p-value of "the change is at most the margin".
        limits: level -> lower and upper one-sided limit.
        mcnemar: exact two-sided p-value of "no change" for shares, for information only.
    """

    estimate: float
    samples: int
    p: Callable[[float], float]
    limits: Callable[[float], Limits]
    mcnemar: float | None = None


def judge_median(changes: Values) -> Evidence:
    """Judge the median of paired changes by the sign test.

    The limits are order statistics: x_(k) with the largest k such that P(B <= k - 1) <= level
    for B ~ Binomial(n, 1/2). Exact for every continuous distribution, conservative with ties.
    Source: Conover, Practical Nonparametric Statistics, 3rd ed., sections 3.2 and 3.4.
    """
    x, n = np.sort(changes.round(DIGITS)), changes.size

    def p(margin: float) -> float:
        above = int((x > margin).sum())
        # P(B >= above) = P(B <= n - above), since B is symmetric.
        return sum_binomial(n - above, n)

    def limits(level: float) -> Limits:
        k = sign_test_place(n, level)
        return (float(x[k - 1]), float(x[n - k])) if k else _UNKNOWN

    return Evidence(float(np.median(x)), n, p, limits)


def judge_mean(changes: Values) -> Evidence:
    """Judge the centre of paired changes, their mean or their median, by Student's t.

    Few samples suffice if the changes agree, like the changes of one head's norm; identical
    changes are certain. Exact for normal changes. For skewed changes no test of few samples can
    judge the mean alone: falls that no sample shows may lower it by any amount. If the lower limit
    is then above the mean, it is still below the median, so the claim is about the larger of the
    two (simulated in docs/theory/gate.md).
    """
    x, n = changes.round(DIGITS), changes.size
    if n < 2 or not np.isfinite(x).all() or np.ptp(x) == 0:
        # Without a spread: all equal, or infinite because a norm is zero.
        lowest, highest = float(x.min()), float(x.max())
        return Evidence(
            estimate=float(np.median(x)),
            samples=n,
            p=lambda margin: 0.0 if n > 1 and lowest > margin else 1.0,
            limits=lambda _: (lowest, highest) if n > 1 else _UNKNOWN,
        )
    mean, error = float(x.mean()), float(x.std(ddof=1) / math.sqrt(n))

    def p(margin: float) -> float:
        return exceed_t((mean - margin) / error, n - 1)

    def limits(level: float) -> Limits:
        half = error * invert_t(level, n - 1)
        return mean - half, mean + half

    return Evidence(mean, n, p, limits)


def exceed_t(t: float, n: int) -> float:
    """Return P(T > t) for Student's t with n degrees of freedom, to 12 digits, also in the tail.

    It is half the regularised incomplete beta function at x = n / (n + t^2), with the parameters
    n/2 and 1/2, by its continued fraction.
    Source: NIST Digital Library of Mathematical Functions, 8.17.22.
    """
    # Not by scipy, whose import takes 0.2 s: as long as all else that `gate` does.
    if t < 0:
        return 1 - exceed_t(-t, n)
    square = min(t, _FAR) ** 2 / n
    a, b, x = n / 2, 0.5, 1 / (1 + square)
    # Beyond this point the other end is nearer: I_x(a, b) = 1 - I_(1-x)(b, a).
    if near := x > (a + 1) / (a + b + 2):
        a, b, x = b, a, square * x
    fraction = 1.0
    for m in range(_TERMS, -1, -1):
        even = (m + 1) * (b - m - 1) * x / ((a + 2 * m + 1) * (a + 2 * m + 2))
        odd = (a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 - odd / (1 + even / fraction)
    power = math.sqrt(square) * math.exp(-(n + 1) / 2 * math.log1p(square))
    share = power / (a * fraction * _compute_beta(n))
    return (1 - share if near else share) / 2


@cache
def invert_t(level: float, n: int) -> float:
    """Return the t with P(T > t) = level, for Student's t with n degrees of freedom."""
    if level < 1 / _FAR:
        return math.inf
    if level > 0.5:
        return -invert_t(1 - level, n)
    # Newton's steps from 0 never pass the solution, because P(T > t) is convex for t > 0.
    t, further = -1.0, 0.0
    while further > t:
        t = further
        density = math.exp(-(n + 1) / 2 * math.log1p(t * t / n)) / _compute_beta(n) / math.sqrt(n)
        further = t + (exceed_t(t, n) - level) / density
    return t


@cache
def _compute_beta(n: int) -> float:
    """Return B(n/2, 1/2), by B(a + 1, b) = B(a, b) a / (a + b) from B(1/2, 1/2) or B(1, 1/2)."""
    first = math.pi if n % 2 else 2.0
    return first * math.prod(k / (k + 1) for k in range(2 - n % 2, n, 2))


def judge_by_bootstrap(
    old: Values, new: Values, change: Callable[[Values, Values], Values], least: int
) -> Evidence:
    """Judge the change of a statistic by the paired percentile bootstrap.

    Samples are drawn with replacement, both models together. Do not use it for a maximum: the
    bootstrap of an extreme is inconsistent.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.

    Args:
        old: values of the baseline, (samples,).
        new: values of the current model on the same samples.
        change: maps (draws, samples) of both to the draws' changes, (draws,).
        least: smallest number of samples; fewer prove nothing.
    """
    n, pieces = old.size, list[Values]()
    estimate = float(change(old[None], new[None])[0])
    if n > 1 and np.array_equal(old, new):
        # Equal values on all samples are certain, even with few samples.
        pieces = [np.zeros(RESAMPLES)]
    elif n >= least:
        # A fixed seed, so that the same reports give the same verdict.
        generator, rows = np.random.default_rng(0), max(1, _CHUNK // n)
        for start in range(0, RESAMPLES, rows):
            index = generator.integers(n, size=(min(rows, RESAMPLES - start), n), dtype=np.int32)
            pieces.append(change(old[index], new[index]))
    draws = np.sort(np.concatenate(pieces).round(DIGITS)) if pieces else None

    def p(margin: float) -> float:
        return 1.0 if draws is None else (1 + int((draws <= margin).sum())) / (RESAMPLES + 1)

    def limits(level: float) -> Limits:
        k = 0 if draws is None else int(level * (RESAMPLES + 1) + 1e-9)
        return _UNKNOWN if draws is None or not k else (float(draws[k - 1]), float(draws[-k]))

    return Evidence(estimate, n, p, limits)


def judge_share(worse: int, better: int, samples: int) -> Evidence:
    """Judge the change of a share from its paired table by Bonett and Price's limits.

    D = (worse - better) / (n + 2) with the Laplace estimates (worse + 1) / (n + 2) and
    (better + 1) / (n + 2); it also works without discordant pairs.
    Source: Bonett and Price, J. Educ. Behav. Stat. 37 (2012) 479.

    Args:
        worse: pairs that got worse.
        better: pairs that got better.
        samples: number of pairs.
    """
    up, down = (worse + 1) / (samples + 2), (better + 1) / (samples + 2)
    centre, error = up - down, math.sqrt((up + down - (up - down) ** 2) / (samples + 2))

    def limits(level: float) -> Limits:
        half = -NormalDist().inv_cdf(level) * error  # 1 - level would be 1 for tiny levels
        # Two shares differ by at most 1.
        return max(-1.0, centre - half), min(1.0, centre + half)

    flips = worse + better
    return Evidence(
        estimate=(worse - better) / samples,
        samples=samples,
        # erfc keeps its accuracy in the tail, where 1 - erf would be 0.
        p=lambda margin: math.erfc((centre - margin) / error / math.sqrt(2)) / 2,
        limits=limits,
        mcnemar=min(1.0, 2 * sum_binomial(min(worse, better), flips)) if flips else 1.0,
    )


def correct_by_holm(
    p_values: Mapping[Name, float], alpha: float
) -> dict[Name, tuple[float, float]]:
    """Adjust p-values by Holm's step-down procedure.

    Returns:
        The adjusted p-value of each hypothesis, and the level at which it was tested: its raw
        p-value is at most that level exactly when its adjusted one is at most alpha.
        Source: Holm, Scand. J. Statist. 6 (1979) 65.
    """
    found, running, level = {}, 0.0, 0.0
    for step, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        open_ones = len(p_values) - step
        if running <= alpha:  # no earlier hypothesis was kept
            level = alpha / open_ones
        running = max(running, min(1.0, p_values[name] * open_ones))
        found[name] = running, level
    return found
