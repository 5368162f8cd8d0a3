"""Floating point with errors on the safe side only.

The model of an operation is fl(a o b) = (a o b)(1 + d) + t with |d| <= u, the unit roundoff, and
|t| <= the smallest normal number, so that a device may flush subnormal numbers to zero. A sum of n
products in any order is off by gamma_n = n u / (1 - n u) of the sum of their sizes (Higham,
Accuracy and Stability, 3.1 and 3.5): what conventional matrix products keep in their own
precision (without TF32, and not those of Strassen).

torch's exp, log, erf, tanh and square root in float64 are assumed to be within `LIBRARY` units in
the last place; tests check this against mpmath.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

LIBRARY = 8
"""Assumed error of library functions in float64, in units in the last place."""

DOUBLE = torch.float64


def gamma(n: int, dtype: torch.dtype) -> float:
    """Return n u / (1 - n u), raised by its own rounding.

    >>> gamma(1, torch.float64) > 2.0**-53
    True
    """
    share = n * torch.finfo(dtype).eps / 2
    return share / (1 - share) * (1 + 2.0**-50) if share < 1 else float("inf")


def tiny(dtype: torch.dtype) -> float:
    """Return the largest loss of one operation by underflow: the smallest normal number."""
    return torch.finfo(dtype).tiny


def up(x: Float[Tensor, "*shape"], roundings: int = 8) -> Float[Tensor, "*shape"]:
    """Raise numbers >= 0, computed in float64 from numbers >= 0, above their true values.

    Sums, products, quotients and roots of numbers >= 0 keep their relative accuracy, so
    `roundings` of them in a row change the result by at most a share gamma.

    >>> up(torch.tensor(0.1, dtype=torch.float64) * 3) > 0.3
    tensor(True)
    """
    return x * (1 + 2 * gamma(roundings + 2, DOUBLE)) + 2.0**-1000


def cast_up(x: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Cast numbers >= 0 to `dtype` without making any smaller.

    >>> cast_up(torch.tensor(0.1, dtype=torch.float64), torch.float32).double() >= 0.1
    tensor(True)
    """
    cast = x.to(dtype)
    return torch.where(
        cast.to(x) < x, torch.nextafter(cast, torch.full_like(cast, torch.inf)), cast
    )


def summed_up(total: Float[Tensor, "*shape"], terms: int) -> Float[Tensor, "*shape"]:
    """Raise float64 sums of `terms` numbers >= 0 above their true values."""
    dtype = total.dtype
    return up(total.to(DOUBLE)) * (1 + gamma(terms + 1, dtype)) + terms * tiny(dtype)
