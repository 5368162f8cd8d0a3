"""Floating point that only errs to the safe side.

The model of an operation is fl(a o b) = (a o b)(1 + d) + t with |d| <= u, the unit roundoff, and
|t| <= the smallest normal number, so that a device may flush subnormal numbers to zero. A sum of n
products in any order is off by gamma_n = n u / (1 - n u) of the sum of their sizes (Higham,
Accuracy and Stability, 3.1 and 3.5): what conventional matrix products keep in their own
precision (without TF32, and not those of Strassen).

exp, log, erf, tanh and the square root of torch in float64 are taken to be within `LIBRARY` units
of the last place; the tests hold them to that against mpmath.
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
    """Return what underflow may cost a single operation: the smallest normal number."""
    return torch.finfo(dtype).tiny


def up(x: Float[Tensor, "*shape"], roundings: int = 8) -> Float[Tensor, "*shape"]:
    """Raise numbers >= 0, computed in float64 from such numbers, above their true values.

    Sums, products, quotients and roots of numbers >= 0 keep their relative accuracy, so that so
    many `roundings` in a row cost a share gamma of the result.

    >>> up(torch.tensor(0.1, dtype=torch.float64) * 3) > 0.3
    tensor(True)
    """
    return x * (1 + 2 * gamma(roundings + 2, DOUBLE)) + 2.0**-1000


def outward(
    low: Float[Tensor, "*shape"], high: Float[Tensor, "*shape"], size: Float[Tensor, "*shape"]
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Move the ends of a range out by what a few sums in float64 of terms <= `size` may lose."""
    loss = up(gamma(16, DOUBLE) * size)
    return low - loss, high + loss


def cast_up(x: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return numbers >= 0 in `dtype`, none of them less than before.

    >>> cast_up(torch.tensor(0.1, dtype=torch.float64), torch.float32).double() >= 0.1
    tensor(True)
    """
    cast = x.to(dtype)
    return torch.where(
        cast.to(x) < x, torch.nextafter(cast, torch.full_like(cast, torch.inf)), cast
    )


def summed_up(total: Float[Tensor, "*shape"], terms: int) -> Float[Tensor, "*shape"]:
    """Raise sums of `terms` numbers >= 0 above their true values, in float64."""
    dtype = total.dtype
    return up(total.to(DOUBLE)) * (1 + gamma(terms + 1, dtype)) + terms * tiny(dtype)
