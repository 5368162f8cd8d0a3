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
from lipaudit.tables.trials import FLAGS, is_repeat

SEEN = 0.9
"""Share of runs in which a change is seen."""
CHURN = 0.025
"""Share of samples that change sides by chance, each way, from one checkpoint to the next."""
SPREAD = 0.15
"""Standard deviation over samples of the log-ratio of a norm or a radius, likewise."""
_STEPS = 60
"""Bisections: they halve an interval of 1 to less than 1e-15."""


def describe_power(baseline: Report, alpha: float = ALPHA) -> Iterator[str]:
    """Say which changes the default rules will see in 9 of 10 runs, with so many samples.

    Args:
        baseline: the baseline.
        alpha: error probability of the gate.

    Raises:
        UsageError: no default rule exists for its sections.
    """
    rules = choose_rules(baseline)
    # The level of one rule among all (Bonferroni). If all n samples get worse, the p-value of a
    # sign test is 2^-n: with fewer samples than `least` no test reaches the level.
    level = min(LEVEL, alpha / len(rules))
    least = max(FEWEST, math.ceil(-math.log2(level)))
    seen = list[tuple[str, str]]()
    unproven = list[tuple[str, str]]()
    for rule in rules:
        section = baseline.section(rule.measure)
        assert section is not None
        words = find_words(rule.measure, rule.column)
        n = sum(not is_repeat(name) for name in section.ids)  # distinct samples
        change = f"no change is proven, {least} are needed"
        if n >= least:
            change = f"{_describe_change(rule, n, len(section.rows), level)} is seen"
        seen.append((f"with {n} samples {change}", words))
        needed = _count_for_strict(rule)
        if n < needed:
            unproven.append((f"with fewer than {needed} samples, --strict fails", words))
    for text, names in group_values(seen).items():
        yield f"{text}: {', '.join(names)}"
    for text, names in group_values(unproven).items():
        yield f"{text} even an equally good checkpoint: {', '.join(names)}"


def _describe_change(rule: Rule, n: int, rows: int, level: float) -> str:
    """Return in words the smallest change that a rule proves in 9 of 10 runs.

    Shares of samples (accuracies) are judged by McNemar's test, medians over samples (of norms and
    radii) by the sign test. Heads have a sign test each, corrected for the number of heads.

    Args:
        rule: a default rule. A change below its limit is allowed, even if it is proven.
        n: number of samples.
        rows: number of rows, such as heads, that a rule with `each` judges.
        level: the p-value at which the rule is proven to be broken.
    """
    z_level = -NormalDist().inv_cdf(level)  # its normal quantile
    limit = abs(float(rule.limit.value))
    if rule.limit.kind == "difference":  # of a share, in percentage points
        drop = find_smallest(lambda drop: _see_drop(drop, n, z_level))
        points = 100 * max(drop, limit)
        return f"in 9 of 10 runs a drop of {points:.0f} points"
    if rule.stat == "each":
        # A head that grows in all n samples has the p-value 2^-n, times the number of heads if
        # they move independently. Heads that keep still are left out of the correction.
        always = math.ceil(math.log2(rows / level))
        if n >= always:
            return "growth in all of them"
        return f"growth in all of them while the others keep still (always with {always})"
    # The sign test needs this share of samples that got worse. If log-ratios are normal with the
    # standard deviation SPREAD, so many are above 0 where the median is at `shift`.
    share = find_smallest(lambda share: _see_share(share, n, z_level))
    shift = SPREAD * NormalDist().inv_cdf(min(share, 1 - 1e-12))
    percent = 100 * max(math.expm1(shift), limit)
    way = "growth" if rule.worse > 0 else "a fall"
    return f"in 9 of 10 runs {way} of {percent:.0f}%"


def _see_drop(drop: float, n: int, z_level: float) -> bool:
    """Say whether McNemar's test sees a drop of a share in 9 of 10 runs.

    The condition is D sqrt(n) >= z_level sqrt(s) + z_power sqrt(s - D^2). Here s = 2 CHURN + D is
    the share of samples that change sides (right to wrong or back), CHURN each way by chance.
    Source: Connor, Biometrics 43 (1987) 207.

    Args:
        drop: D, the drop of the share of right samples.
        n: number of samples.
        z_level: normal quantile of the level of the test.
    """
    discordant = 2 * CHURN + drop  # s
    z_power = NormalDist().inv_cdf(SEEN)
    spread = math.sqrt(max(0.0, discordant - drop**2))
    needed = z_level * math.sqrt(discordant) + z_power * spread
    return drop * math.sqrt(n) >= needed


def _see_share(share: float, n: int, z_level: float) -> bool:
    """Say whether the sign test sees in 9 of 10 runs that a share of samples got worse.

    The normal approximation: (q - 1/2) sqrt(n) >= z_level / 2 + z_power sqrt(q (1 - q)).

    Args:
        share: q, the share of samples that got worse; 1/2 without a change.
        n: number of samples.
        z_level: normal quantile of the level of the test.
    """
    z_power = NormalDist().inv_cdf(SEEN)
    spread = math.sqrt(max(0.0, share * (1 - share)))
    needed = z_level / 2 + z_power * spread
    return (share - 0.5) * math.sqrt(n) >= needed


def find_smallest(is_seen: Callable[[float], bool]) -> float:
    """Return the smallest number between 0 and 1 at which a condition holds, by bisection.

    From there on it has to hold for every larger number.
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
    If not one of n samples changes, the former is z sqrt(2) / (n + 2), with z the normal quantile
    of the level. 0 for rules on other figures, for which there is no such formula.
    """
    if rule.column not in FLAGS:
        return 0
    z_level = -NormalDist().inv_cdf(LEVEL)
    limit = abs(float(rule.limit.value))
    # The smallest n with z_level * sqrt(2) / (n + 2) <= limit.
    return math.ceil(z_level * math.sqrt(2) / limit - 2)
