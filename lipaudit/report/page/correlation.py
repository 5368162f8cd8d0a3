"""Rank correlation with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation

from lipaudit.results.figures import Z95

FEWEST = 8


@dataclass(frozen=True)
class Correlation:
    """Spearman's rho over `count` pairs, with its 95 % limits."""

    rho: float
    low: float
    high: float
    count: int


def spearman(x: Sequence[float], y: Sequence[float]) -> Correlation | None:
    """Return Spearman's rho, None where it means nothing.

    Ties share the mean of their ranks. The limits are those of Bonett and Wright (2000):
    tanh(atanh rho ± 1.96 sqrt((1 + rho²/2) / (n - 3))).

    Args:
        x: finite values.
        y: as many finite values; 0/1 is allowed.

    Returns:
        None for fewer than 8 pairs and where all values of one side are equal.
    """
    if len(x) < FEWEST or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    rho = max(-1.0, min(1.0, correlation(_ranks(x), _ranks(y))))
    if abs(rho) == 1:
        return Correlation(rho, rho, rho, len(x))
    reach = Z95 * math.sqrt((1 + rho**2 / 2) / (len(x) - 3))
    centre = math.atanh(rho)
    return Correlation(rho, math.tanh(centre - reach), math.tanh(centre + reach), len(x))


def _ranks(values: Sequence[float]) -> list[float]:
    """Rank from 1 up; ties share the mean of their ranks."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values), start=1):
        places.setdefault(value, []).append(place)
    return [sum(places[v]) / len(places[v]) for v in values]
