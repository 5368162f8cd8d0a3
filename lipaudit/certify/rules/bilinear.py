"""Products of two forms: x y = c_x c_y + c_x dy + c_y dx + dx dy.

What is off beside the first three terms is dx dy and slack. With dx = L_x + R_x, L linear in the
input, order 2 puts L_x L_y into the quadratic part; what is left are L_x R_y, R_x L_y and R_x R_y.
Each is bounded by the product of the radii, summed over what is contracted, or by that of the
lengths of the contracted vectors (Cauchy-Schwarz, `lengths`), whichever is less: where many
errors add up, entries of a vector are not at their largest all at once.

Rows of an attention map sum to one, so that P V = P (V - k) + k for any constant k of each row and
channel. As P is off by an error of its own in every entry, sum_j err_j |v_j - k| is least for the
median of the v_j weighted by these errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipaudit.certify.error_blocks import join_blocks
from lipaudit.certify.form import Form
from lipaudit.certify.lengths import lengths
from lipaudit.certify.rounding import DOUBLE, gamma, tiny, up
from lipaudit.certify.rules.affine import (
    align,
    as_constant,
    broadcast,
    linear_map,
    scale,
    shape_of,
)
from lipaudit.certify.rules.smooth import RECIPROCAL, relax

Bilinear = Callable[[Tensor, Tensor], Tensor]


def matmul(x: Any, y: Any) -> Form:
    """Return x @ y."""
    if x.ndim == 1 or y.ndim == 1:
        one, other = x[None] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y
        product: Any = matmul(one, other)
        return product.squeeze([axis for axis, t in ((-2, x), (-1, y)) if t.ndim == 1])
    lead = shape_of(x.shape[:-2], y.shape[:-2])
    x, y = (t.expand(*lead, *t.shape[-2:]) for t in (x, y))
    if not (isinstance(x, Form) and isinstance(y, Form)):
        if isinstance(x, Form):
            return linear_map(x.settle(), torch.matmul, y, roundings=y.shape[-2] + 1)
        return linear_map(y.settle(), lambda t, w: w @ t, x, roundings=x.shape[-1] + 1)
    # P V: what the rows of P are off by, before that becomes symbols, weighs the median.
    errors = x.slack if x.simplex else None
    x = x.settle()
    if x.symbols.order == 2:  # at order 1 what y is off by costs more as symbols than it gains
        y = y.settle()
    result = _product(x, y, torch.matmul)
    if errors is None:
        return result
    return _shift_values(result, x, _weighted_median(y.centre, errors))


def mul(x: Any, y: Any) -> Form:
    """Return x y entry by entry."""
    if not (isinstance(x, Form) and isinstance(y, Form)):
        return scale(x, y) if isinstance(x, Form) else scale(y, x)
    x, y = broadcast(x, y.shape), broadcast(y, x.shape)
    return _product(x, y, torch.mul)


def div(x: Any, y: Any) -> Form:
    """Return x / y, by the reciprocal of a y that stays positive."""
    if isinstance(y, Form):
        return mul(x, relax(y, RECIPROCAL, positive=True))
    # 1 / y is rounded once more than y itself.
    return scale(x, as_constant(y, x).to(DOUBLE).reciprocal(), roundings=2)


def _product(x: Form, y: Form, f: Bilinear) -> Form:
    """Return f(x, y) of two forms, f being torch.matmul or torch.mul."""
    symbols, dtype, matrices = x.symbols, x.symbols.dtype, f is torch.matmul
    x_centre, y_centre = x.centre.to(dtype), y.centre.to(dtype)
    # c_y dx + c_x dy.
    if matrices:
        y.whole()
        align(x, y)
        x_rows, blocks = x.by_row().map_rows(lambda t: _rows_times(t, y_centre))
        y_rows = _times_rows(x_centre, y.dense)
        dense, less = sorted((x_rows, y_rows), key=len, reverse=True)
        dense[: len(less)] += less
    else:
        align(x, y)
        blocks = join_blocks(
            [block.map_rows(lambda t: t * y_centre) for block in x.blocks],
            [block.map_rows(lambda t: t * x_centre) for block in y.blocks],
            torch.add,
        )
        pairs = (x.dense, y_centre), (y.dense, x_centre)
        long, short = sorted(pairs, key=lambda pair: len(pair[0]), reverse=True)
        dense = long[0] * long[1]
        dense[: len(short[0])].addcmul_(*short)
    x_moves, y_moves = up(x.mass + x.slack), up(y.mass + y.slack)
    x_size, y_size = x.centre.abs(), y.centre.abs()
    # dx dy, at order 2 without the product of the linear parts.
    parts = (x.sizes.linear, x.nonlinear), (y.sizes.linear, y.nonlinear)
    longest = (lengths(x, -1), lengths(y, -2)) if matrices else None
    remainder = torch.zeros((), dtype=DOUBLE, device=x.device)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))[symbols.order - 1 :]:
        radius = f(parts[0][i], parts[1][j])
        if longest:
            radius = torch.minimum(radius, longest[0][i] * longest[1][j])
        remainder = remainder + radius
    if symbols.order == 2:
        rows = _rows_matmul if matrices else f
        symbols.add_products(dense, x.dense[: symbols.n], y.dense[: symbols.n], rows)
    # What rounding and underflow take from sums of so many products.
    terms = x.shape[-1] if matrices else 1
    moving = f(x_moves, y_size + y_moves) + f(x_size, y_moves)
    lost = gamma(2 * terms + 8, dtype) * moving + gamma(terms + 4, DOUBLE) * f(x_size, y_size)
    # Underflow: every product of every generator may lose the smallest normal number.
    count = max(x.count, y.count, symbols.first_error)
    under = 8 * count * terms * tiny(dtype) * (1 + x_size.sum() + y_size.sum())
    slack = f(x.slack, y_size) + f(x_size, y.slack) + remainder
    slack = up(slack + lost + under, terms + 16)
    return Form(f(x.centre, y.centre), dense, slack, symbols, blocks=blocks)


def _rows_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply two stacks, one of which has one row."""
    return _rows_times(x, y[0]) if len(y) == 1 else _times_rows(x[0], y)


def _rows_times(rows: Tensor, y: Tensor) -> Tensor:
    """Return rows (r, *b, i, k) @ y (*b, k, j), as products of tall matrices."""
    tall = rows.movedim(0, -3)
    return torch.unflatten(tall.flatten(-3, -2) @ y, -2, tall.shape[-3:-1]).movedim(-3, 0)


def _times_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x (*b, i, k) @ rows (r, *b, k, j), as products with wide matrices."""
    wide = rows.movedim(0, -2)
    return torch.unflatten(x @ wide.flatten(-2), -1, wide.shape[-2:]).movedim(-2, 0)


def _shift_values(product: Form, x: Form, kappa: Tensor) -> Form:
    """Add (1 - sum_k x_k) kappa, which is zero: the errors are then those of V - kappa."""
    dtype, keys = product.symbols.dtype, x.shape[-1]
    rounded = kappa.to(dtype)  # any constant is valid
    kappa = rounded.to(DOUBLE)
    row_sums, of_blocks = x.map_rows(lambda t: t.sum(-1, keepdim=True))
    product.dense[: len(row_sums)] -= row_sums * rounded
    blocks = join_blocks(
        product.blocks, [b.map_rows(lambda t: -t * rounded) for b in of_blocks], torch.add
    )
    centre = product.centre + (1 - x.centre.sum(-1, keepdim=True)) * kappa
    kappa = kappa.abs()
    moving = x.mass.sum(-1, keepdim=True) * kappa
    still = (1 + x.centre.abs().sum(-1, keepdim=True)) * kappa + product.centre.abs()
    slack = product.slack + x.slack.sum(-1, keepdim=True) * kappa
    slack = slack + gamma(keys + 4, dtype) * moving + gamma(keys + 8, DOUBLE) * still
    slack = slack + 2 * x.count * keys * tiny(dtype) * (1 + kappa)
    return Form(centre, product.dense, up(slack, keys + 8), product.symbols, blocks=blocks)


def _weighted_median(v: Tensor, weight: Tensor) -> Tensor:
    """The median over keys of v (*b, keys, d), weighted by rows: (*b, rows, keys) -> rows, d."""
    v, order = v.sort(-2)
    shape = (*weight.shape[:-1], v.shape[-1], weight.shape[-1])
    by_channel = weight[..., None, :].expand(shape)
    summed = by_channel.gather(-1, order.mT[..., None, :, :].expand(shape)).cumsum(-1)
    place = (summed < summed[..., -1:] / 2).sum(-1, keepdim=True).clamp_max(shape[-1] - 1)
    return v.mT[..., None, :, :].expand(shape).gather(-1, place)[..., 0]
