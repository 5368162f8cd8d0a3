"""Products of two forms: x y = c_x c_y + c_x dy + c_y dx + dx dy.

What is off beside the first three terms is dx dy and slack. With dx = L_x + R_x, L linear in the
input, order 2 puts L_x L_y into the quadratic part; what is left are L_x R_y, R_x L_y and R_x R_y.
Each is bounded by the product of the radii, summed over what is contracted, or by that of the
lengths of the contracted vectors (Cauchy-Schwarz, `lengths`), whichever is less: where many
errors add up, entries of a vector are not at their largest all at once. At order 2, c_x and c_y
are the `middle` of the forms, about which the R reach least. Where the rest is a share of what
moves, sums of L times errors count every pair of symbols once, with its sign (`_cancel`), and
products of entries (of a normalisation's numerator, often mostly errors, and its inverse) are
polarised.

Polarisation, also of matrices at order 1: with u = dx / a and v = dy / b for any a, b > 0,

    dx dy = a b ((u + v)^2 - (u - v)^2) / 4

so that sum_j dx_j dy_j lies in [-sum a b r_-^2 / 4, sum a b r_+^2 / 4] with r the radii of u - v
and of u + v: of forms, so symbols that both share count once. For the radii a and b, each r is at
most 2, which gives a b; it is less the more symbols move both (root 2 and half of a b for many
with random signs, and [0, a b] for u = v).

Rows of an attention map sum to one, so that P V = P (V - k) + k for any constant k of each row and
channel. For their mean k = sum_j p_j v_j what scales a whole row of P, such as the error of its
logarithm, acts on nothing at all; what an entry is off by acts on v_j - k. (The median of the v_j,
weighted by the errors of the entries, knows nothing of the row.)

What a weight is off by moves all channels of a value alike (`_share`). A symbol for each channel
forgets that, and weights behind attention mix many channels: their sizes add up. The largest
products get a symbol, as many as there is room for, the others are slack.

Lengths of vectors of a form: bounds of their 2-norms over the whole ball.

Every entry of a vector can be at its largest, but not all at once: many errors together make a
zonotope that is about as wide in every direction. For its rows h_r, any numbers s_r > 0 and any
unit vector u, Cauchy and Schwarz give for |eps_r| <= 1

    u . sum h_r eps_r <= sqrt(sum (u . h_r)^2 / s_r) sqrt(sum s_r eps_r^2)

so that ||sum h_r eps_r||^2 <= ||sum h_r h_r^T / s_r|| sum s_r. With s_r = ||h_r|| that is exact
for one direction, and (pi / 2 at most) close for many rows that point everywhere. The input of an
L2 ball and the products of its entries have sum e_r^2 <= 1: there all s_r and their sum are 1.
Words move a vector by at most the sum of the k longest moves, one of each word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.certify import affine
from lipaudit.certify.curves import RECIPROCAL, relax
from lipaudit.certify.form import Form, NoRuleError
from lipaudit.certify.symbols import (
    DOUBLE,
    ErrorBlock,
    Symbols,
    bound_norms,
    cast_up,
    gamma,
    join_blocks,
    tiny,
    up,
)

_ROWS = 512
"""Number of rows summed in their own precision before they are added in double precision."""

_SQUARINGS = 4
"""Number of squarings of a matrix when its norm is bounded through a power of it."""

_WORTH = 0.02
"""Share of a product that its remainder must have to be bounded by polarisation, which takes as
long as the product itself."""

_ROOM = 2**24
"""Largest number of coefficients of new symbols in a tensor of the values of an attention."""

_STILL = 1e-15
"""Radius below which an entry counts as one that moves by this much."""


def lengths(
    x: Form, axis: int, weight: Tensor | None = None, around: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Bound ||w L||_2 and ||w R||_2 of x = c + around + L + R, L being linear in the input.

    Args:
        x: a form; its blocks are dissolved if their symbols do not act on whole vectors.
        axis: axis of the vectors; it has length 1 in the result.
        weight: w >= 0, (*shape), by default 1.
        around: by default 0.
    """
    symbols, axis = x.symbols, axis % x.ndim
    if any(bool((b.group != b.group.narrow(axis, 0, 1)).any()) for b in x.blocks):
        x.whole()
    n, first, unit = symbols.n, symbols.first_error, symbols.norm == "l2"
    linear = _length([x.dense[:n]], axis, weight, unit=unit)
    quadratic = _length([x.dense[n:first]], axis, weight, unit=unit)
    errors = _length([x.dense[first:], *(b.rows for b in x.blocks)], axis, weight, unit=False)
    if symbols.norm == "words":
        norms = _euclid(x.dense[:n].to(DOUBLE), axis + 1, weight)
        linear = torch.minimum(linear, symbols.sum_groups(norms))
    low, high = x.quadratic_range
    around = torch.zeros_like(low) if around is None else around
    pairs = (
        (linear, x.sizes.linear),
        (quadratic + _euclid(around, axis, weight), torch.maximum(high - around, around - low)),
        (errors, x.sizes.errors),
    )
    linear, quadratic, errors = (
        torch.minimum(one, _euclid(other, axis, weight)) for one, other in pairs
    )
    return linear, up(quadratic + errors + _euclid(x.slack, axis, weight))


def _euclid(entries: Tensor, axis: int, weight: Tensor | None) -> Tensor:
    entries, k = entries if weight is None else entries * weight, entries.shape[axis]
    # Squares may underflow to zero.
    return up(entries.square().sum(axis, keepdim=True).sqrt(), k + 8) + (k * tiny(DOUBLE)) ** 0.5


def _length(stacks: list[Tensor], axis: int, weight: Tensor | None, *, unit: bool) -> Tensor:
    """Bound ||sum w h_r eps_r|| for |eps_r| <= 1, or for sum eps_r^2 <= 1."""
    rows, dtype = sum(len(stack) for stack in stacks), stacks[0].dtype
    k, shape = stacks[0].shape[axis + 1], list(stacks[0].shape[1:])
    shape[axis] = 1
    count = torch.Size(shape).numel()
    gram = torch.zeros(count, k, k, dtype=DOUBLE, device=stacks[0].device)
    share = torch.full((count,), float(unit), dtype=DOUBLE, device=gram.device)
    scale = None if weight is None else cast_up(weight.to(DOUBLE), dtype).clamp_min(tiny(dtype))
    parts = (stack.split(_ROWS) for stack in stacks)  # type: ignore[no-untyped-call]
    for part in (each for some in parts for each in some):
        vectors = (part if scale is None else part * scale).movedim(axis + 1, -1)
        vectors = vectors.reshape(len(part), count, k).transpose(0, 1)
        # s_r = ||h_r||, the choice that is exact for one direction (above).
        if not unit:
            s = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(tiny(dtype))
            share += s.to(DOUBLE).sum((1, 2))
            vectors = vectors / s.sqrt()
        gram += (vectors.mT @ vectors).to(DOUBLE)
    # What rounding and underflow did to the vectors and to the sums of their products.
    trace = up(gram.diagonal(dim1=-2, dim2=-1).sum(-1), k) * (1 + 2 * gamma(_ROWS + 16, dtype))
    under = rows * k * tiny(dtype)
    lost = gamma(_ROWS + rows // _ROWS + len(stacks) + 32, dtype) * trace + under
    size = up((bound_norms((gram + gram.mT) / 2, _SQUARINGS) + lost).sqrt()) + under
    return (up(size * up(share, rows).sqrt()) + under).view(shape)


Bilinear = Callable[[Tensor, Tensor], Tensor]


def matmul(x: Any, y: Any) -> Form:
    """Return x @ y."""
    if x.ndim == 1 or y.ndim == 1:
        one, other = x[None] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y
        product: Any = matmul(one, other)
        return product.squeeze([axis for axis, t in ((-2, x), (-1, y)) if t.ndim == 1])
    lead = affine.shape_of(x.shape[:-2], y.shape[:-2])
    x, y = (t.expand(*lead, *t.shape[-2:]) for t in (x, y))
    if not (isinstance(x, Form) and isinstance(y, Form)):
        if isinstance(x, Form):
            return affine.linear_map(x.settle(), torch.matmul, y, roundings=y.shape[-2] + 1)
        return affine.linear_map(y.settle(), lambda t, w: w @ t, x, roundings=x.shape[-1] + 1)
    x = x.settle()
    if x.symbols.order == 2:  # at order 1 what y is off by costs more as symbols than it gains
        y = y.settle()
    averaged = _average(x, y) if x.weights and x.symbols.order == 1 else None
    result = _product(x, y, torch.matmul) if averaged is None else averaged
    # Not result.centre, which the remainder of the product may have shifted.
    return _shift_values(result, x, x.centre @ y.centre) if x.weights else result


def mul(x: Any, y: Any) -> Form:
    """Return x y entry by entry."""
    if not (isinstance(x, Form) and isinstance(y, Form)):
        return affine.scale(x, y) if isinstance(x, Form) else affine.scale(y, x)
    x, y = affine.broadcast(x, y.shape), affine.broadcast(y, x.shape)
    return _product(x, y, torch.mul)


def div(x: Any, y: Any) -> Form:
    """Return x / y, by the reciprocal of a y that stays positive."""
    if isinstance(y, Form):
        return mul(x, relax(y, RECIPROCAL, positive=True))
    # 1 / y is rounded once more than y itself.
    return affine.scale(x, affine.as_constant(y, x).to(DOUBLE).reciprocal(), roundings=2)


def _product(x: Form, y: Form, f: Bilinear) -> Form:
    """Return f(x, y) of two forms, f being torch.matmul or torch.mul."""
    symbols, dtype, matrices = x.symbols, x.symbols.dtype, f is torch.matmul
    x_centre, y_centre = x.middle.to(dtype), y.middle.to(dtype)
    # c_y dx + c_x dy.
    if matrices:
        y.whole()
        affine.align(x, y)
        x_rows, blocks = x.by_row().map_rows(lambda t: _rows_times(t, y_centre))
        y_rows = _times_rows(x_centre, y.dense)
        dense, less = sorted((x_rows, y_rows), key=len, reverse=True)
        dense[: len(less)] += less
    else:
        affine.align(x, y)
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
    x_size, y_size = x.middle.abs(), y.middle.abs()
    moving = f(x_moves, y_size + y_moves) + f(x_size, y_moves)
    worth, shared = _WORTH * moving.sum(), None
    if matrices and symbols.order == 2 and x.weights:
        whole = up(x.sizes.linear + x.rest)  # R_x L_y + (L_x + R_x) R_y
        factors = (x.rest, y.dense[: symbols.n]), (whole, y.dense[symbols.first_error :])
        most = up(x.rest @ y.sizes.linear + whole @ y.rest, x.shape[-1])
        shared = _share(symbols, factors, most, worth)
    if shared:
        shift, remainder, kept = torch.zeros_like(shared[1]), shared[1], None
        blocks = [*blocks, shared[0]]
    else:
        shift, remainder, kept = _remainder(x, y, f, worth)
    if symbols.order == 2 and len(x.dense) and len(y.dense):  # constants may have no rows
        left = x.dense[: symbols.n] if kept is None else x.dense[: symbols.n] * kept
        rows = _rows_matmul if matrices else f
        symbols.add_products(dense, left, y.dense[: symbols.n], rows)
    # What rounding and underflow take from sums of so many products.
    terms = x.shape[-1] if matrices else 1
    lost = gamma((2 * terms + 8) * symbols.order, dtype) * moving
    lost = lost + gamma(terms + 4, DOUBLE) * f(x_size, y_size)
    # Underflow: every product of every generator may lose the smallest normal number.
    count = max(x.count, y.count, symbols.first_error)
    under = 8 * count * terms * tiny(dtype) * (1 + x_size.sum() + y_size.sum())
    slack = f(x.slack, y_size) + f(x_size, y.slack) + remainder
    slack = up(slack + lost + under + gamma(4, DOUBLE) * shift.abs(), terms + 16)
    centre = f(x.centre, y.centre) - f(x.aside, y.aside)
    return Form(centre + shift, dense, slack, symbols, blocks=blocks)


def _remainder(
    x: Form, y: Form, f: Bilinear, worth: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bound dx dy around the middles, at order 2 without the product of the linear parts.

    Returns the middle and the radius of its range, and a mask of the entries whose product of the
    linear parts was left out (None for all). Radii below `worth` in sum get no further work.
    """
    order, matrices, ends = x.symbols.order, f is torch.matmul, zip((x, y), (-1, -2), strict=True)
    parts = (x.sizes.linear, x.rest), (y.sizes.linear, y.rest)
    longest = [lengths(z, axis, around=z.aside) for z, axis in ends] if matrices else None
    radius = none = torch.zeros((), dtype=DOUBLE, device=x.device)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))[order - 1 :]:
        part = f(parts[0][i], parts[1][j])
        part = torch.minimum(part, longest[0][i] * longest[1][j]) if longest else part
        radius = radius + part
    if not (radius.sum() > worth and (matrices or order == 2)):
        return none, radius, None
    if matrices and order == 2:
        return none, torch.minimum(radius, _cancel(x, y)), None
    least, most = _polarise(x, y) if matrices else _polarise_entries(x, y)
    better = least + most < 2 * radius
    radius = torch.where(better, up((most + least) / 2), radius)
    return torch.where(better, (most - least) / 2, 0.0), radius, ~better


def _polarise_entries(x: Form, y: Form) -> tuple[Tensor, Tensor]:
    """Return l, m >= 0: dx dy around the middles lies in [-l, m], entry by entry; order 2."""
    s, t = ((z.sizes.linear + z.rest).clamp_min(_STILL).reciprocal() for z in (x, y))
    moves = (z.slack + gamma(4, DOUBLE) * z.aside.abs() for z in (x, y))
    u, v = (
        affine.scale(Form(-z.aside, z.dense, move, z.symbols, blocks=z.blocks), gain)
        for z, move, gain in zip((x, y), moves, (s, t), strict=True)
    )
    ends = affine.add(u, v).range(), affine.sub(u, v).range()
    most, least = (up(torch.maximum(-low, high).square() / (4 * s * t)) for low, high in ends)
    return least, most


def _cancel(x: Form, y: Form) -> Tensor:
    """Bound what order 2 leaves of x @ y, with the signs of errors times linear parts.

    With h_k the coefficients of errors in x and g_l those of the input in y,
    sum_j E_j L_j = sum_kl (sum_j h_kj g_lj) eps_k e_l: what several j add may cancel.
    """
    symbols, dtype, terms = x.symbols, x.symbols.dtype, x.shape[-1]
    n, first, power = symbols.n, symbols.first_error, 2.0 if symbols.norm == "l2" else 1.0

    def bound(errors: list[Tensor], moves: Tensor, linear: Tensor, reach: Tensor) -> Tensor:
        rows, whole = sum(map(len, errors)), moves @ reach
        total, columns = torch.zeros_like(whole), linear.movedim(0, -2).flatten(-2)
        for part in (part for stack in errors for part in stack.split(_ROWS)):  # type: ignore[no-untyped-call]
            products = _rows_times(part, columns)
            products = torch.unflatten(products, -1, (len(linear), whole.shape[-1]))
            total += torch.linalg.vector_norm(products, power, -2).sum(0, dtype=DOUBLE)
        under = rows * (n * terms * tiny(dtype) + (n * tiny(dtype)) ** 0.5)
        total = up(total * (1 + gamma(n + 8, dtype)) + under, rows + 8)
        return torch.minimum(whole, total + gamma(terms + 4, dtype) * whole)

    errors = [x.dense[first:], *(block.rows for block in x.blocks)]
    others = [y.dense[first:].mT]
    left = bound(errors, x.sizes.errors, y.dense[:n], y.sizes.linear)
    right = bound(others, y.sizes.errors.mT, x.dense[:n].mT, x.sizes.linear.mT).mT
    fixed = (x.rest - x.sizes.errors) @ y.sizes.linear
    fixed = fixed + x.sizes.linear @ (y.rest - y.sizes.errors)
    return left + right + fixed + x.rest @ y.rest


def _average(x: Form, y: Form) -> Form | None:
    """Return x @ y for weights x in [0, 1] at order 1; None, for `_product`, as `_share` says.

    With m -+ r the range of x and c the centre of y, x y = m y + (x - m) c + (x - m) (y - c). With
    y_j - c_j = sum_s g_sj e_s and x_ij - m_ij = r_ij eta, the last term is the sum of r_ij g_sj
    times eta e_s: new symbols in [-1, 1], which act on all channels.
    """
    symbols, keys = x.symbols, x.shape[-1]
    low, high = x.range()
    middle = (low + high) / 2
    radius = up(torch.maximum(high - middle, middle - low))
    moving = up(radius @ (y.mass + y.slack), keys)
    worth, pairs = _WORTH * (middle @ y.centre.abs()).sum(), [(radius, y.whole().dense)]
    shared = _share(symbols, pairs, moving, worth)
    if shared is None:
        return None
    block, slack = shared
    roundings, move = keys + 1, affine.sub(x, middle)
    move = affine.linear_map(move, torch.matmul, y.centre, roundings=roundings, within="rows")
    total = affine.add(affine.linear_map(y, lambda t, w: w @ t, middle, roundings=roundings), move)
    slack, blocks = up(total.slack + slack), (*total.blocks, block)
    return Form(total.centre, total.dense, slack, symbols, blocks=blocks)


def _share(
    symbols: Symbols, pairs: Sequence[tuple[Tensor, Tensor]], moving: Tensor, worth: Tensor
) -> tuple[ErrorBlock, Tensor] | None:
    """Return symbols for the largest products r_ij g_sj, which act on all channels, and slack.

    None where they are few, less than `worth` in sum, or the pass is to spare symbols. The
    coordinates of balls other than boxes are not all at their largest at once, which such symbols
    forget: they make passes over these balls looser.

    Args:
        symbols: of the pass.
        pairs: radii r, (*b, i, j), and coefficients g, (rows, *b, j, d).
        moving: (*b, i, d), no less than the sum of all sizes, and of what else becomes slack.
        worth: of the sum of `moving`.
    """
    dtype, width = symbols.dtype, moving.shape[-1]
    r = [cast_up(radius, dtype).reshape(-1, *radius.shape[-2:]) for radius, _ in pairs]
    heads, queries, keys = r[0].shape
    g = [rows.movedim(0, -3).reshape(heads, len(rows), keys, width) for _, rows in pairs]
    # Every row of every head gets so many symbols: few where there are many rows to mix later.
    room = _ROOM // (heads * queries * heads * keys * width)
    each = min(room, keys * sum(len(rows) for _, rows in pairs))
    if symbols.norm != "linf" or each <= width or not worth < moving.sum() < math.inf:
        return None
    if symbols.order == 1 and not symbols.rich:  # at order 2 there are many without these
        symbols.spared = True
        return None
    sizes = [torch.einsum("bsj,bij->bisj", h.abs().sum(-1), f) for f, h in zip(r, g, strict=True)]
    at = torch.cat(sizes, 2).flatten(2).topk(each, sorted=False).indices
    rows = torch.cat(g, 1).flatten(1, 2).gather(1, at.flatten(1)[..., None].expand(-1, -1, width))
    second = at >= keys * g[0].shape[1]  # products of the second pair
    radii = torch.cat(r, -1).gather(-1, at % keys + keys * second)
    rows = rows.view(*at.shape, width) * radii[..., None]
    block = symbols.birth_shared(rows.movedim(-2, 0).reshape(each, *moving.shape))
    # The radii, and their products with the rows, were rounded: by a share of all that moves.
    slack = (moving - block.rows.to(DOUBLE).abs().sum(0)).clamp_min(0.0)
    slack = slack + (gamma(8, dtype) + gamma(each + 8, DOUBLE)) * moving + 4 * each * tiny(dtype)
    return block, slack


def _polarise(x: Form, y: Form) -> tuple[Tensor, Tensor]:
    """Return l, m >= 0, (*b, i, d): sum_j dx_ij dy_jd lies in [-l, m] on the ball; order 1."""
    symbols, dtype, n = x.symbols, x.symbols.dtype, x.symbols.n
    rows = max(len(x.dense), len(y.dense))
    # Any scales are valid: those that are the radii, of what moves at all, leave least.
    s, t = ((z.mass + z.slack).clamp_min(_STILL).to(dtype).reciprocal() for z in (x, y))
    # (*b, j, i, rows) and (*b, j, d, rows).
    u, v = (
        F.pad(z.dense.movedim(0, -1) * scale[..., None], (0, rows - len(z.dense)))
        for z, scale in ((x, s), (y, t))
    )
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2], y.shape[-1])
    u, v = u.transpose(-3, -2).flatten(0, -3), v.flatten(0, -3)
    s, t = s.to(DOUBLE).mT[..., :, None], t.to(DOUBLE)[..., None, :]
    # Slack, and errors that only x has: they act on both in the same way.
    alone = (symbols.sizes(x.dense[:0], x.blocks).errors + x.slack).mT[..., :, None] * s
    alone = alone + y.slack[..., None, :] * t
    power, exact = 2.0 if symbols.norm == "l2" else 1.0, "donot_use_mm_for_euclid_dist"

    def square(v: Tensor) -> Tensor:
        if symbols.norm == "words":  # one matrix at a time: they are as large as all forms
            gaps = (a[:, None] - b for a, b in zip(u[..., :n], v[..., :n], strict=True))
            both = torch.stack([symbols.sum_groups(gap.abs().movedim(-1, 0)) for gap in gaps])
        else:
            both = torch.cdist(u[..., :n], v[..., :n], power, exact).to(DOUBLE)
        both = both + torch.cdist(u[..., n:], v[..., n:], 1.0).to(DOUBLE)
        # The roundings of a sum, and of u and v, each of which is about 1 in all.
        both = (
            both * (1 + gamma(rows + 8, dtype))
            + gamma(16, dtype)
            + 4 * (rows * tiny(dtype)) ** 0.5
        )
        return up((up(both.view(shape) + alone).square() / (4 * s * t)).sum(-3), shape[-3] + 32)

    return square(v), square(-v)


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


def einsum(equation: str, *operands: Any) -> Any:
    """Return sums of products of two operands by names of axes, as one matmul."""
    operands = tuple(operands[0]) if isinstance(operands[0], list | tuple) else operands
    terms, arrow, wanted = equation.replace(" ", "").partition("->")
    a, comma, b = terms.partition(",")
    once = all(len(set(term)) == len(term) for term in (a, b, wanted))
    if len(operands) != 2 or not (arrow and comma and once) or set(wanted) - set(a + b):
        raise NoRuleError(f"einsum of {equation}")

    def sum_out(t: Any, axes: str, others: str) -> tuple[Any, str]:
        gone = [i for i, c in enumerate(axes) if c not in others]
        return (t.sum(gone) if gone else t), "".join(c for c in axes if c in others)

    # Axes that nothing else has are summed first: what is left is a batch of matrices.
    (x, a), (y, b) = sum_out(operands[0], a, b + wanted), sum_out(operands[1], b, a + wanted)
    sizes = dict(zip(a, x.shape, strict=True)) | dict(zip(b, y.shape, strict=True))
    inner = [c for c in a if c in b and c not in wanted]
    batch = [c for c in a if c in b and c in wanted]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]

    def fold(t: Any, axes: str, *groups: list[str]) -> Any:
        t = t.permute([axes.index(c) for group in (batch, *groups) for c in group])
        return t.reshape(
            [sizes[c] for c in batch] + [math.prod(sizes[c] for c in group) for group in groups]
        )

    product = fold(x, a, rows, inner) @ fold(y, b, inner, columns)
    order = batch + rows + columns
    return product.reshape([sizes[c] for c in order]).permute([order.index(c) for c in wanted])


def addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float | int = 1, alpha: float | int = 1
) -> Form:
    """Return beta input + alpha mat1 @ mat2."""
    mat1, mat2 = affine.make_moving(input, mat1, mat2)
    product: Any = mat1 @ mat2
    product = product if alpha == 1 else product * alpha
    return affine.add(product, input if beta == 1 else input * beta)
