"""Products of two forms: x y = c_x c_y + c_x dy + c_y dx + dx dy.

What is off beside the first three terms is dx dy and slack. Order 1: |dx dy| <= r_x r_y, summed
over what is contracted. Order 2: the product of the parts linear in the input goes into the
quadratic part, and lin_x rest_y + rest_x (lin_y + rest_y) bounds the others.

Rows of an attention map sum to one, so that P V = P (V - k) + k for any constant k of each row and
channel. As P is off by an error of its own in every entry, sum_j err_j |v_j - k| is least for the
median of the v_j weighted by these errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipaudit.theory.relaxation.affine import as_constant, broadcast, scaled, weighted
from lipaudit.theory.relaxation.form import Form, NoRuleError, Pending
from lipaudit.theory.relaxation.rounding import DOUBLE, gamma, tiny, up
from lipaudit.theory.relaxation.smooth import RECIPROCAL, relax

Bilinear = Callable[[Tensor, Tensor], Tensor]


def matmul(x: Any, y: Any) -> Form:
    """Return x @ y."""
    if not (isinstance(x, Form) and isinstance(y, Form)):
        return weighted(x, y)
    if x.ndim < 2 or x.ndim != y.ndim or x.shape[:-2] != y.shape[:-2]:
        raise NoRuleError("matmul of forms with other leading axes")
    own = x.slack if x.simplex else None
    x, y = x.settle(), y.settle()
    result = _product(x, y, torch.matmul, terms=x.shape[-1])
    return result if own is None else _shifted(result, x, _weighted_median(y.centre, own))


def mul(x: Any, y: Any) -> Form:
    """Return x y entry by entry."""
    if not (isinstance(x, Form) and isinstance(y, Form)):
        return scaled(x, y) if isinstance(x, Form) else scaled(y, x)
    x, y = broadcast(x, y.shape), broadcast(y, x.shape)
    return _product(x, y, torch.mul, terms=1)


def div(x: Any, y: Any) -> Form:
    """Return x / y, by the reciprocal of a y that stays positive."""
    if isinstance(y, Form):
        return mul(x, relax(y, RECIPROCAL, positive=True))
    # 1 / y is rounded once more than y itself.
    return scaled(x, as_constant(y, x).to(DOUBLE).reciprocal(), roundings=2)


def rows_over(x: Form, root: Form, inverse: Form) -> Form:
    """Return x / root, one positive number a row (its last axis is 1), with dx dinverse pending.

    What stays of that at order 2 is L_x R + R_x (L + R) of the parts of the inverse, 1 / root.
    """
    wide = broadcast(inverse.settle(), x.shape)
    none = torch.zeros(1, *x.shape, dtype=x.symbols.dtype, device=x.device)
    nothing = torch.zeros_like(x.centre)
    constant = Form(nothing, none, nothing, x.symbols)
    rest = up(wide.sizes.linear + wide.rest)
    linear = wide.rest if x.symbols.order == 2 else rest
    result = _product(x, wide, torch.mul, terms=1, pending=True)
    result.pending = Pending(x.copy(), broadcast(root, x.shape), constant, linear, rest)
    return result


def _product(x: Form, y: Form, f: Bilinear, *, terms: int, pending: bool = False) -> Form:
    symbols, dtype = x.symbols, x.symbols.dtype
    centre = f(x.centre, y.centre)
    generators = _linear_part(x, y, f)
    x_moves, y_moves = up(x.mass + x.slack), up(y.mass + y.slack)
    x_size, y_size = x.centre.abs(), y.centre.abs()
    slack = f(x.slack, y_size) + f(x_size, y.slack)
    if symbols.order == 2:
        x_rest, y_rest = x.rest, y.rest
        if not pending:
            slack = slack + f(x.sizes.linear, y_rest) + f(x_rest, y.sizes.linear + y_rest)
        squares = symbols.pack(_outer(x.generators[: symbols.n], y.generators[: symbols.n], f))
        generators[symbols.n : symbols.first_error] += squares
    elif not pending:
        slack = slack + f(x_moves, y_moves)
    moving = f(x_moves, y_size + y_moves) + f(x_size, y_moves)
    lost = gamma(2 * terms + 8, dtype) * moving + gamma(terms + 4, DOUBLE) * f(x_size, y_size)
    small = 4 * (len(generators) + symbols.first_error) * terms * tiny(dtype)
    under = small * (1 + x_size.amax() + y_size.amax())
    return Form(centre, generators, up(slack + lost + under, terms + 16), symbols)


def _linear_part(x: Form, y: Form, f: Bilinear) -> Tensor:
    """c_y dx + c_x dy."""
    dtype = x.symbols.dtype
    x_centre, y_centre = x.centre.to(dtype), y.centre.to(dtype)
    if f is torch.mul:
        parts = [x.generators * y_centre, y.generators * x_centre]
    else:
        parts = [_rows_times(x.generators, y_centre), _times_rows(x_centre, y.generators)]
    long, short = sorted(parts, key=len, reverse=True)
    long[: len(short)] += short
    return long


def _rows_times(rows: Tensor, y: Tensor) -> Tensor:
    """Return rows (r, *b, i, k) @ y (*b, k, j), as products of tall matrices."""
    tall = rows.movedim(0, -3)
    return torch.unflatten(tall.flatten(-3, -2) @ y, -2, tall.shape[-3:-1]).movedim(-3, 0)


def _times_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x (*b, i, k) @ rows (r, *b, k, j), as products with wide matrices."""
    wide = rows.movedim(0, -2)
    return torch.unflatten(x @ wide.flatten(-2), -1, wide.shape[-2:]).movedim(-2, 0)


def _outer(x: Tensor, y: Tensor, f: Bilinear) -> Tensor:
    """The coefficients (n, n, *shape) of the products of two linear parts."""
    if f is torch.mul:
        return x[:, None] * y[None]
    return torch.einsum("a...ik,c...kj->ac...ij", x, y)


def _shifted(product: Form, x: Form, kappa: Tensor) -> Form:
    """Add (1 - sum_k x_k) kappa, which is zero: the errors are then those of V - kappa."""
    dtype, keys = product.symbols.dtype, x.shape[-1]
    rounded = kappa.to(dtype)  # any constant will do
    kappa = rounded.to(DOUBLE)
    row_sums = x.generators.sum(-1, keepdim=True)
    product.generators[: len(row_sums)] -= row_sums * rounded
    centre = product.centre + (1 - x.centre.sum(-1, keepdim=True)) * kappa
    kappa = kappa.abs()
    moving = x.mass.sum(-1, keepdim=True) * kappa
    still = (1 + x.centre.abs().sum(-1, keepdim=True)) * kappa + product.centre.abs()
    slack = product.slack + x.slack.sum(-1, keepdim=True) * kappa
    slack = slack + gamma(keys + 4, dtype) * moving + gamma(keys + 8, DOUBLE) * still
    slack = slack + 2 * len(row_sums) * keys * tiny(dtype) * (1 + kappa)
    return Form(centre, product.generators, up(slack, keys + 8), product.symbols)


def _weighted_median(v: Tensor, weight: Tensor) -> Tensor:
    """The median over keys of v (*b, keys, d), weighted by rows: (*b, rows, keys) -> rows, d."""
    v, order = v.sort(-2)
    shape = (*weight.shape[:-1], v.shape[-1], weight.shape[-1])
    by_channel = weight[..., None, :].expand(shape)
    summed = by_channel.gather(-1, order.mT[..., None, :, :].expand(shape)).cumsum(-1)
    place = (summed < summed[..., -1:] / 2).sum(-1, keepdim=True).clamp_max(shape[-1] - 1)
    return v.mT[..., None, :, :].expand(shape).gather(-1, place)[..., 0]


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("matmul", "bmm"), matmul),
    "rmatmul": lambda x, other: matmul(other, x),
    **dict.fromkeys(("mul", "multiply", "rmul"), mul),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), div),
    "rdiv": lambda x, other: div(other, x),
}
"""What products do to forms."""
