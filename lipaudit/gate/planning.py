"""What the gate will be able to see with the samples of a baseline.

Estimates from normal approximations, under a common size of noise; docs/theory/gate.md has
simulated rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist

from lipaudit.gate.rules import Rule, choose_rules, find_words
from lipaudit.gate.statistics import ALPHA, FEWEST, LEVEL
from lipaudit.tables import Report
from lipaudit.tables.columns import group_values
from lipaudit.tables.trials import FLAGS, count_distinct

SEEN = 0.9
"""Share of runs in which a change is seen."""
Z_POWER = NormalDist().inv_cdf(SEEN)
"""The normal quantile of this share."""
CHURN = 0.025
"""Share of samples that change sides by chance, each way, from one checkpoint to the next."""
SPREAD = 0.15
"""Standard deviation over samples of the log-ratio of a norm or a radius, likewise."""
_STEPS = 60
"""Bisections: they halve an interval of 1 to less than 1e-15."""


def describe_power(baseline: Report) -> Iterator[str]:
    """Yield texts: which changes the default rules detect in 9 of 10 runs with these samples.

    For example `with 256 samples in 9 of 10 runs a drop of 8 points is seen: robust accuracy`.

    Args:
        baseline: the baseline.

    Raises:
        UsageError: no default rule exists for its sections.
    """
    rules = choose_rules(baseline)
    level = min(LEVEL, ALPHA / len(rules))  # of one rule among all (Bonferroni)
    # Even if all n samples get worse, the p-value of a sign test is 2^-n: with fewer samples than
    # `least` no test reaches the level.
    least = max(FEWEST, math.ceil(-math.log2(level)))
    # Pairs (text, metric), such as ("with 256 samples in 9 of 10 runs a drop of 8 points is seen",
    # "robust accuracy"), and ("with fewer than 137 samples, --strict fails even an equally good
    # checkpoint", "robust accuracy"). Metrics with the same text are joined below.
    seen = []
    unproven = []
    for rule in rules:
        section = baseline.section(rule.measure)
        assert section is not None
        words = find_words(rule.metric)
        n = count_distinct(section.ids)
        change = f"no change is proven, {least} are needed"
        if n >= least:
            change = f"{_describe_change(rule, n, len(section.rows), level)} is seen"
        seen.append((f"with {n} samples {change}", words))
        needed = _count_for_strict(rule)
        if n < needed:
            text = f"with fewer than {needed} samples, --strict fails"
            unproven.append((f"{text} even an equally good checkpoint", words))
    for text, names in group_values(seen + unproven).items():
        yield f"{text}: {', '.join(names)}"


def _describe_change(rule: Rule, n: int, rows: int, level: float) -> str:
    """Return in words the smallest change that a rule proves in 9 of 10 runs.

    Such as `in 9 of 10 runs a drop of 8 points`. There are three kinds of rules: shares of samples
    (accuracies) are judged by McNemar's test, each head by a sign test that is corrected for the
    number of heads, and medians over samples (of norms and radii) by a sign test.

    Args:
        rule: a default rule. A change below its limit is allowed, even if it is proven.
        n: number of samples.
        rows: number of rows, such as heads, that a rule with `each` judges.
        level: the p-value at which the rule is proven to be broken.
    """
    z_level = -NormalDist().inv_cdf(level)  # the normal quantile of the level
    limit = abs(float(rule.limit.value))

    # A share: its limit is a difference, in percentage points.
    if rule.limit.kind == "difference":
        drop = find_smallest(lambda drop: _detects_drop(drop, n, z_level))
        points = 100 * max(drop, limit)
        return f"in 9 of 10 runs a drop of {points:.0f} points"

    # Each head (row). If the norm of a head grows in all n samples, its p-value is 2^-n. The
    # correction for the number of heads multiplies it by `rows` if all heads move at random, and
    # by 1 if all others keep still. So the growth is proven in any case if rows 2^-n <= level,
    # which holds from n = `always` on.
    if rule.stat == "each":
        always = math.ceil(math.log2(rows / level))
        if n >= always:
            return "growth in all of them"
        return f"growth in all of them while the others keep still (always with {always})"

    # A median. `share` is the share of worse samples that the sign test needs. If the log-ratios
    # of the samples are normal with standard deviation SPREAD, this share of them is above 0 once
    # their median is `shift`.
    share = find_smallest(lambda share: _detects_share(share, n, z_level))
    shift = SPREAD * NormalDist().inv_cdf(min(share, 1 - 1e-12))  # 1 has an infinite quantile
    percent = 100 * max(math.expm1(shift), limit)
    way = "growth" if rule.worse > 0 else "a fall"
    return f"in 9 of 10 runs {way} of {percent:.0f}%"


def _detects_drop(drop: float, n: int, z_level: float) -> bool:
    """Return whether McNemar's test detects a drop of a share in 9 of 10 runs.

    The condition is D sqrt(n) >= z_level sqrt(s) + Z_POWER sqrt(s - D^2). Here s = 2 CHURN + D is
    the share of samples that change sides (right to wrong or back), CHURN each way by chance.
    Source: Connor, Biometrics 43 (1987) 207.

    Args:
        drop: D, the drop of the share of right samples.
        n: number of samples.
        z_level: normal quantile of the level of the test.
    """
    discordant = 2 * CHURN + drop  # s
    spread = math.sqrt(max(0.0, discordant - drop**2))
    needed = z_level * math.sqrt(discordant) + Z_POWER * spread
    return drop * math.sqrt(n) >= needed


def _detects_share(share: float, n: int, z_level: float) -> bool:
    """Return whether the sign test detects in 9 of 10 runs that a share of samples got worse.

    By the normal approximation it does if
    (q - 1/2) sqrt(n) >= z_level / 2 + Z_POWER sqrt(q (1 - q)).

    Args:
        share: q, the share of samples that got worse; 1/2 without a change.
        n: number of samples.
        z_level: normal quantile of the level of the test.
    """
    spread = math.sqrt(max(0.0, share * (1 - share)))
    needed = z_level / 2 + Z_POWER * spread
    return (share - 0.5) * math.sqrt(n) >= needed


def find_smallest(is_seen: Callable[[float], bool]) -> float:
    """Return the smallest number between 0 and 1 at which a condition holds, by bisection.

    The condition must hold for all larger numbers, too.
    """
    low = 0.0
    high = 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if is_seen(middle):
            high = middle
        else:
            low = middle
    return high


def _count_for_strict(rule: Rule) -> int:
    """Return how many samples --strict needs at least to prove the limit of a rule on a share.

    --strict fails unless the upper confidence limit of the change is within the limit of the rule.
    If none of n samples changes, both shares of Bonett and Price are 1 / (n + 2): their difference
    is 0, with the standard error sqrt(2) / (n + 2). So the upper limit is z sqrt(2) / (n + 2).
    Here z is the normal quantile of the level. Return 0 for rules on other figures: they have no
    such formula. The limit is not 0: no default rule on a share allows no change at all.
    """
    if rule.column not in FLAGS:
        return 0
    z_level = -NormalDist().inv_cdf(LEVEL)
    limit = abs(float(rule.limit.value))
    # The smallest n with z_level * sqrt(2) / (n + 2) <= limit.
    return math.ceil(z_level * math.sqrt(2) / limit - 2)
