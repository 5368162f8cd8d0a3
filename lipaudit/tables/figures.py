"""Numbers from rows and arrays with missing or infinite entries."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from lipaudit.tables.columns import Array, Row

SHAPES: Mapping[str, tuple[int | None, ...]] = {
    "map": (None, None),
    "map_tokens": (2,),
    "positions": (None, None),
}
"""Shape of arrays by kind (the name before @); None is any length."""
BESIDE = {"map": "map_tokens"}
"""Arrays that need a second array of the same head."""


def require_drawable(arrays: dict[str, Array]) -> dict[str, Array]:
    """Check that the arrays of a section can be drawn.

    Raises:
        ValueError: an array has another shape, lacks its second array, or is not finite.
    """
    for name, array in arrays.items():
        kind, _, head = name.partition("@")
        shape, known = array.shape, SHAPES.get(kind, array.shape)
        fits = [n in (None, size) for size, n in zip(shape, known, strict=False)]
        if array.data and not (len(shape) == len(known) and all(fits)):
            raise ValueError(f"{name} has the shape {shape}")
        if kind in BESIDE and f"{BESIDE[kind]}@{head}" not in arrays:
            raise ValueError(f"{name} without {BESIDE[kind]}@{head}")
        # The number of queries and keys of the map, which its axes are labelled with.
        if kind == "map_tokens" and len(finite(array.data)) < len(array.data):
            raise ValueError(f"{name} has values that are no numbers")
    return arrays


Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


def finite(values: Iterable[Any]) -> list[float]:
    """Keep the finite numbers."""
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def middle(values: Iterable[Any]) -> float | None:
    """Return the median of the finite numbers, None without any."""
    numbers = finite(values)
    return median(numbers) if numbers else None


def order(value: Any) -> float:
    """Sort key that puts missing values and NaN last in descending order."""
    return float(value) if isinstance(value, int | float) and value == value else -math.inf


def largest(rows: Iterable[Row], name: str, count: int) -> list[Row]:
    """Return the rows with the largest values of a column, largest first."""
    return sorted(rows, key=lambda row: -order(row[name]))[:count]


def log10(value: float | None) -> float | None:
    """Return the decimal logarithm; minus infinity for 0, and missing values stay missing."""
    if value is None or math.isnan(value):
        return value
    return math.log10(value) if value > 0 else -math.inf


def log10_ratio(row: Row, bound: str) -> float | None:
    """Return log10(bound / exact) of a head, from the stored logarithm if the bound overflows."""
    value, exact = row.get(bound), log10(row.exact)
    if exact is None or not math.isfinite(exact):
        return None
    if value is None or math.isinf(value):
        stored = row.get(f"log10_{bound}")
        return None if stored is None else float(stored) - exact
    ratio = log10(value)
    return None if ratio is None else ratio - exact


def median_limits(values: Iterable[Any]) -> tuple[float, float] | None:
    """Return limits of the median with at least 95 % confidence, for every distribution.

    They are order statistics (sign test); None if there are too few values.

    >>> median_limits(range(5)), median_limits(range(6)), median_limits(range(20))
    (None, (0.0, 5.0), (5.0, 14.0))
    """
    numbers = sorted(finite(values))
    place = sign_test_place(len(numbers), 0.025)
    return (numbers[place - 1], numbers[-place]) if place else None


def sign_test_place(count: int, level: float) -> int:
    """Return the largest k with P(B <= k - 1) <= level, for B ~ Binomial(count, 1/2).

    The k-th smallest and the k-th largest value are limits of the median, each with confidence 1 -
    level. 0 means too few values.

    >>> [sign_test_place(count, 0.025) for count in (5, 6, 20, 255)]
    [0, 1, 6, 112]
    """
    places = range(count // 2 + 1)
    return bisect_right(places, level, key=lambda k: sum_binomial(k - 1, count)) - 1


def sum_binomial(most: int, count: int) -> float:
    """Return P(B <= most) for B ~ Binomial(count, 1/2)."""
    # Not by scipy, whose import takes half as long as a whole `report` or `gate`.
    if most < 0:
        return 0.0
    if 2 * most >= count:  # by symmetry; the first term below could underflow
        return 1.0 - sum_binomial(count - most - 1, count)
    total, term = 0.0, math.comb(count, most) / 2**count
    for k in range(most, -1, -1):
        total += term
        term *= k / (count - k + 1)  # C(n, k - 1) = C(n, k) k / (n - k + 1)
    return total


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return the 95 % limits of a proportion (Wilson, 1927).

    >>> tuple(round(limit, 4) for limit in wilson(5, 10))
    (0.2366, 0.7634)
    """
    share, z2 = successes / n, Z95**2
    # The interval solves |p - share| = z sqrt(p (1 - p) / n) for p, so a share of 0 has a width.
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
