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
    level = min(LEVEL, alpha / len(rules))
    least = max(FEWEST, math.ceil(-math.log2(level)))
    seen = list[tuple[str, str]]()
    unproven = list[tuple[str, str]]()
    for rule in rules:
        section = baseline.section(rule.measure)
        assert section is not None
        words = find_words(rule.measure, rule.column)
        n = sum(not is_repeat(name) for name in section.ids)
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
    """Return the smallest change that a rule sees, in words."""
    quantile = -NormalDist().inv_cdf(level)
    limit = abs(float(rule.limit.value))
    if rule.limit.kind == "difference":
        drop = find_smallest(lambda drop: _see_drop(drop, n, quantile))
        points = 100 * max(drop, limit)
        return f"in 9 of 10 runs a drop of {points:.0f} points"
    if rule.stat == "each":
        always = math.ceil(math.log2(rows / level))
        if n >= always:
            return "growth in all of them"
        return f"growth in all of them while the others keep still (always with {always})"
    share = find_smallest(lambda share: _see_share(share, n, quantile))
    # A share of samples that got worse lies at a quantile of their log-ratios.
    shift = SPREAD * NormalDist().inv_cdf(min(share, 1 - 1e-12))
    percent = 100 * max(math.expm1(shift), limit)
    way = "growth" if rule.worse > 0 else "a fall"
    return f"in 9 of 10 runs {way} of {percent:.0f}%"


def _see_drop(drop: float, n: int, quantile: float) -> bool:
    """Say whether McNemar's test sees a drop of a share in 9 of 10 runs.

    D sqrt(n) >= z_level sqrt(s) + z_power sqrt(s - D^2), with the discordant share s = 2 churn +
    D.
    Source: Connor, Biometrics 43 (1987) 207.
    """
    discordant = 2 * CHURN + drop
    power = NormalDist().inv_cdf(SEEN)
    spread = math.sqrt(max(0.0, discordant - drop**2))
    needed = quantile * math.sqrt(discordant) + power * spread
    return drop * math.sqrt(n) >= needed


def _see_share(share: float, n: int, quantile: float) -> bool:
    """Say whether the sign test sees in 9 of 10 runs that a share of samples got worse.

    (q - 1/2) sqrt(n) >= z_level / 2 + z_power sqrt(q (1 - q)).
    """
    power = NormalDist().inv_cdf(SEEN)
    spread = math.sqrt(max(0.0, share * (1 - share)))
    needed = quantile / 2 + power * spread
    return (share - 0.5) * math.sqrt(n) >= needed


def find_smallest(is_seen: Callable[[float], bool]) -> float:
    """Return the smallest number between 0 and 1 from which a condition holds, by bisection."""
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
    """Return how many samples --strict needs at least, if not one sample changes sides.

    Without any change the upper limit of a share is z sqrt(2) / (n + 2).
    """
    if rule.column not in FLAGS:
        return 0
    quantile = -NormalDist().inv_cdf(LEVEL)
    limit = abs(float(rule.limit.value))
    # quantile * sqrt(2) / (n + 2) <= limit
    return math.ceil(quantile * math.sqrt(2) / limit - 2)
