"""Numbers out of rows, where some are missing or no numbers at all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Any, Protocol, TypeVar

from lipaudit.results.columns import Row

R = TypeVar("R", bound=Row)

Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


class Rows(Protocol):
    """What has rows: a section."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows."""


def typed(section: Rows | None, kind: type[R]) -> list[R]:
    """Return the rows of a section as rows of its type; none where there is no section."""
    return [] if section is None else [row for row in section.rows if isinstance(row, kind)]


def finite(values: Iterable[Any]) -> list[float]:
    """Keep the finite numbers."""
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def middle(values: Iterable[Any]) -> float | None:
    """Return the median of the finite numbers, None where there are none."""
    numbers = finite(values)
    return median(numbers) if numbers else None


def order(value: Any) -> float:
    """Sort key that puts missing values and NaN last when sorting from the largest down."""
    return float(value) if isinstance(value, int | float) and value == value else -math.inf


def largest(rows: Iterable[R], name: str, count: int) -> list[R]:
    """Return the rows with the largest values of a column, largest first."""
    return sorted(rows, key=lambda row: -order(getattr(row, name)))[:count]


def log10(value: float | None) -> float | None:
    """Return the decimal logarithm: of 0 it is minus infinity, missing values stay missing."""
    if value is None or math.isnan(value):
        return value
    return math.log10(value) if value > 0 else -math.inf


def median_limits(values: Iterable[Any]) -> tuple[float, float] | None:
    """Return limits of a median that hold it with at least 95 %, whatever the distribution.

    They are two of the values, as far from the ends as that allows (the sign test); None where
    so few values have none.

    >>> median_limits(range(5)), median_limits(range(6)), median_limits(range(20))
    (None, (0.0, 5.0), (5.0, 14.0))
    """
    numbers = sorted(finite(values))
    count, cut, ways = len(numbers), 0, 1
    below, most = (
        1,
        2**count // 40,
    )  # of all throws of as many coins: those with cut heads or fewer
    while below <= most:
        cut += 1
        ways = ways * (count - cut + 1) // cut
        below += ways
    return (numbers[cut - 1], numbers[-cut]) if cut else None


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return the 95 % limits of a proportion (Wilson, 1927).

    >>> tuple(round(limit, 4) for limit in wilson(5, 10))
    (0.2366, 0.7634)
    """
    share, z2 = successes / n, Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
