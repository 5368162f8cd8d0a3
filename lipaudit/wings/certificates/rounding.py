"""Floating point with errors on the safe side only.

The model of an operation is fl(a o b) = (a o b)(1 + d) + t with |d| <= u, the unit roundoff, and
|t| <= the smallest normal number, so that a device may flush subnormal numbers to zero. A sum of n
products in any order is off by gamma_n = n u / (1 - n u) of the sum of their sizes (Higham,
Accuracy and Stability, 3.1 and 3.5): what conventional matrix products keep in their own
precision (without TF32, and not those of Strassen).

torch's exp, log, erf, tanh and square root in float64 are assumed to be within `LIBRARY_ULPS`
units in the last place; tests check this against mpmath.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

if TYPE_CHECKING:
    from jaxtyping import Float

    AnyShape = Float[Tensor, "*shape"]

LIBRARY_ULPS = 8
"""Assumed error of library functions in float64, in units in the last place."""

DOUBLE = torch.float64


def bound_rounding(n: int, dtype: torch.dtype) -> float:
    """Return a bound of the relative error of n roundings, gamma_n = n u / (1 - n u).

    u is the unit roundoff of the dtype: 2^-53 for float64.

    >>> bound_rounding(1, torch.float64) > 2.0**-53
    True
    """
    unit_roundoff = torch.finfo(dtype).eps / 2
    error = n * unit_roundoff
    if error >= 1:
        return float("inf")
    # The last factor covers the rounding errors of the formula itself.
    return error / (1 - error) * (1 + 2.0**-50)


def tiny(dtype: torch.dtype) -> float:
    """Return the smallest normal number: the most that one operation loses by underflow."""
    return torch.finfo(dtype).tiny


def round_up(x: AnyShape, roundings: int = 8) -> AnyShape:
    """Raise numbers >= 0, computed in float64 from numbers >= 0, above their true values.

    Sums, products, quotients and roots of numbers >= 0 keep their relative accuracy, so
    `roundings` of them in a row change the result by at most a share `bound_rounding`.

    >>> round_up(torch.tensor(0.1, dtype=torch.float64) * 3) > 0.3
    tensor(True)
    """
    # x >= (1 - share) true, so true <= x / (1 - share) <= (1 + 2 share) x for share <= 1/2. Two
    # more roundings are for this product.
    raised = 1 + 2 * bound_rounding(roundings + 2, DOUBLE)
    return x * raised + 2.0**-1000  # the sum covers underflow


def cast_up(x: AnyShape, dtype: torch.dtype) -> AnyShape:
    """Cast numbers >= 0 to `dtype`, rounded up: no result is smaller than the number.

    >>> cast_up(torch.tensor(0.1, dtype=torch.float64), torch.float32).double() >= 0.1
    tensor(True)
    """
    cast = x.to(dtype)
    above = torch.nextafter(cast, torch.full_like(cast, torch.inf))
    return torch.where(cast.to(x) < x, above, cast)


def round_up_sum(total: AnyShape, terms: int) -> AnyShape:
    """Return computed sums of `terms` numbers >= 0 in float64, raised above the true sums.

    The sums may have been computed in a lower precision, that of `total`.
    """
    dtype = total.dtype
    # A sum of n numbers has n - 1 roundings, each by at most a share u of its result: the true sum
    # is at most (1 + u)^(n - 1) times the computed one. 2 more roundings leave room.
    rounding = 1 + bound_rounding(terms + 1, dtype)
    underflow = terms * tiny(dtype)  # of each number
    # The cast is exact; `round_up` leaves room for the product and the sum of this line.
    return round_up(total.to(DOUBLE)) * rounding + underflow


def bound_norms(matrices: Float[Tensor, "b n n"], squarings: int) -> Float[Tensor, " b"]:
    """Return upper bounds of the spectral norms of symmetric matrices (b, n, n), in float64, (b,).

    ||Q|| <= ||Q^k||_F^(1/k) with k = 2^squarings. The power is computed by repeated squaring, and
    `error` bounds its rounding error: the computed power A is the true power plus some E with
    ||E|| <= error. A squaring adds the errors A E + E A + E^2, and a rounding error of the product
    A A of at most a share (`bound_rounding`) of ||A||_F^2.
    """
    n = matrices.shape[-1]
    dtype = matrices.dtype
    underflow = n * n * tiny(dtype)
    size = _bound_row_norms(matrices.flatten(1))  # ||A||_F
    # Q is divided by about its norm, so that no power overflows or underflows.
    divisor = cast_up(size, dtype).clamp_min(tiny(dtype) ** 0.5)
    power = matrices / divisor[:, None, None]
    size = round_up(size / divisor.to(DOUBLE))
    error = bound_rounding(4, dtype) * size + underflow  # of the division
    for _ in range(squarings):
        # ||A E|| and ||E A|| are at most ||A||_F error each; the last term rounds the product.
        error_factor = 2 * error + bound_rounding(n + 8, dtype) * size
        error = round_up(error_factor * size + error.square() + underflow)
        power = torch.bmm(power, power)
        size = _bound_row_norms(power.flatten(1))
    # ||Q^k||^(1/k), times the divisor. 64 roundings are more than the root and the product have.
    root = round_up(size + error, roundings=8) ** (0.5**squarings)
    return round_up(root * divisor.to(DOUBLE), roundings=64) + underflow


def _bound_row_norms(rows: Tensor) -> Tensor:
    """Return upper bounds of the 2-norms of rows (rows, terms), in float64."""
    terms = rows.shape[1]
    dtype = rows.dtype
    norms = vector_norm(rows, dim=1).to(DOUBLE)
    # Roundings: the squares, their sum and the root, fewer than terms + 8.
    norms = norms * (1 + bound_rounding(terms + 8, dtype))
    # Squares may underflow to zero.
    return round_up(norms + (terms * tiny(dtype)) ** 0.5)
