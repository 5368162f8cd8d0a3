"""Products of two forms: x y = c_x c_y + c_x dy + c_y dx + dx dy.

What is off beside the first three terms is dx dy and slack. With dx = L_x + R_x, L linear in the
input, order 2 puts L_x L_y into the quadratic part; what is left are L_x R_y, R_x L_y and R_x R_y.
Each is bounded by the product of the radii, summed over what is contracted, or by that of the
lengths of the contracted vectors (Cauchy-Schwarz, `lengths`), whichever is less: where many
errors add up, entries of a vector are not at their largest all at once. At order 2, c_x and c_y
are the `middle` of the forms, about which the R reach least. Where the rest is a share of what
moves, products of entries (of a normalisation's numerator, often mostly errors, and its inverse)
are polarised.

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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.wings.certificates import affine
from lipaudit.wings.certificates.curves import RECIPROCAL, relax
from lipaudit.wings.certificates.form import Form, NoRuleError
from lipaudit.wings.certificates.lengths import lengths
from lipaudit.wings.certificates.symbols import (
    DOUBLE,
    ErrorBlock,
    Symbols,
    cast_up,
    gamma,
    join_blocks,
    tiny,
    up,
)

_WORTH = 0.02
"""Share of a product that its remainder must have to be bounded by polarisation, which takes as
long as the product itself."""

_ROOM = 2**24
"""Largest number of coefficients of new symbols in a tensor of the values of an attention."""

_STILL = 1e-15
"""Radius below which an entry counts as one that moves by this much."""

Bilinear = Callable[[Tensor, Tensor], Tensor]


def matmul(x: Any, y: Any) -> Form:
    """Return x @ y."""
    if x.ndim == 1:
        row: Any = matmul(x[None], y)
        return row.squeeze(-1 if y.ndim == 1 else -2)
    if y.ndim == 1:
        column: Any = matmul(x, y[:, None])
        return column.squeeze(-1)
    lead = affine.shape_of(x.shape[:-2], y.shape[:-2])
    x = x.expand(*lead, *x.shape[-2:])
    y = y.expand(*lead, *y.shape[-2:])
    roundings = x.shape[-1] + 1
    if not isinstance(y, Form):
        return affine.linear_map(x.settle(), torch.matmul, y, roundings=roundings)
    if not isinstance(x, Form):
        return affine.linear_map(y.settle(), lambda t, w: w @ t, x, roundings=roundings)
    x = x.settle()
    if x.symbols.order == 2:  # at order 1 what y is off by costs more as symbols than it gains
        y = y.settle()
    if not x.weights:
        return _product(x, y, torch.matmul)
    product = None
    if x.symbols.order == 1:
        product = _average(x, y)
    if product is None:
        product = _product(x, y, torch.matmul)
    # Not product.centre, which the remainder may have shifted.
    return _shift_values(product, x, x.centre @ y.centre)


def mul(x: Any, y: Any) -> Form:
    """Return x y entry by entry."""
    if not isinstance(x, Form):
        return affine.scale(y, x)
    if not isinstance(y, Form):
        return affine.scale(x, y)
    x = affine.broadcast(x, y.shape)
    y = affine.broadcast(y, x.shape)
    return _product(x, y, torch.mul)


def div(x: Any, y: Any) -> Form:
    """Return x / y, by the reciprocal of a y that stays positive."""
    if isinstance(y, Form):
        return mul(x, relax(y, RECIPROCAL, positive=True))
    constant = affine.as_constant(y, x).to(DOUBLE)
    # 1 / y is rounded once more than y itself.
    return affine.scale(x, constant.reciprocal(), roundings=2)


def _product(x: Form, y: Form, f: Bilinear) -> Form:
    """Return f(x, y) of two forms, f being torch.matmul or torch.mul."""
    symbols = x.symbols
    n = symbols.n
    dtype = symbols.dtype
    matrices = f is torch.matmul
    if matrices:
        dense, blocks = _multiply_matrices(x, y)
    else:
        dense, blocks = _multiply_entries(x, y)
    x_moves = up(x.mass + x.slack)
    y_moves = up(y.mass + y.slack)
    x_size = x.middle.abs()
    y_size = y.middle.abs()
    moving = f(x_moves, y_size + y_moves) + f(x_size, y_moves)

    # dx dy, without the product of the linear parts at order 2, is shift + shared +- remainder.
    worth = _WORTH * moving.sum()
    kept = shared = None
    if matrices and symbols.order == 2 and x.weights:
        shared = _share_rest(x, y, worth)
    if shared is None:
        shift, remainder, kept = _remainder(x, y, f, worth)
    else:
        block, remainder = shared
        shift = torch.zeros_like(remainder)
        blocks = [*blocks, block]
    if symbols.order == 2 and len(x.dense) and len(y.dense):  # constants may have no rows
        x_linear = x.dense[:n]
        if kept is not None:
            x_linear = x_linear * kept
        symbols.add_products(dense, x_linear, y.dense[:n], _rows_matmul if matrices else f)

    # What rounding and underflow take from sums of so many products.
    terms = 1
    if matrices:
        terms = x.shape[-1]
    lost = gamma((2 * terms + 8) * symbols.order, dtype) * moving
    lost = lost + gamma(terms + 4, DOUBLE) * f(x_size, y_size)
    # Underflow: every product of every generator may lose the smallest normal number.
    count = max(x.count, y.count, symbols.first_error)
    sizes = 1 + x_size.sum() + y_size.sum()
    under = 8 * count * terms * tiny(dtype) * sizes
    slack = f(x.slack, y_size) + f(x_size, y.slack) + remainder
    slack = slack + lost + under + gamma(4, DOUBLE) * shift.abs()
    slack = up(slack, terms + 16)
    centre = f(x.centre, y.centre) - f(x.aside, y.aside)
    return Form(centre + shift, dense, slack, symbols, blocks=blocks)


def _multiply_matrices(x: Form, y: Form) -> tuple[Tensor, list[ErrorBlock]]:
    """Return the coefficients of dx c_y + c_x dy, a product of matrices."""
    x_centre = x.middle.to(x.symbols.dtype)
    y_centre = y.middle.to(x.symbols.dtype)
    y.whole()
    affine.align(x, y)
    x_rows, blocks = x.by_row().map_rows(lambda t: _rows_times(t, y_centre))
    y_rows = _times_rows(x_centre, y.dense)
    if len(x_rows) < len(y_rows):
        x_rows, y_rows = y_rows, x_rows
    x_rows[: len(y_rows)] += y_rows
    return x_rows, blocks


def _multiply_entries(x: Form, y: Form) -> tuple[Tensor, list[ErrorBlock]]:
    """Return the coefficients of dx c_y + c_x dy, entry by entry."""
    x_centre = x.middle.to(x.symbols.dtype)
    y_centre = y.middle.to(x.symbols.dtype)
    affine.align(x, y)
    x_blocks = [block.map_rows(lambda t: t * y_centre) for block in x.blocks]
    y_blocks = [block.map_rows(lambda t: t * x_centre) for block in y.blocks]
    if len(x.dense) >= len(y.dense):
        dense = x.dense * y_centre
        dense[: len(y.dense)].addcmul_(y.dense, x_centre)
    else:
        dense = y.dense * x_centre
        dense[: len(x.dense)].addcmul_(x.dense, y_centre)
    return dense, join_blocks(x_blocks, y_blocks, torch.add)


def _remainder(
    x: Form, y: Form, f: Bilinear, worth: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bound dx dy around the middles, at order 2 without the product of the linear parts.

    Returns the middle and the radius of its range, and a mask of the entries whose product of the
    linear parts was left out (None for all). Radii below `worth` in sum get no further work.
    """
    order = x.symbols.order
    matrices = f is torch.matmul
    x_sizes = (x.sizes.linear, x.rest)
    y_sizes = (y.sizes.linear, y.rest)
    if matrices:
        x_lengths = lengths(x, -1, around=x.aside)
        y_lengths = lengths(y, -2, around=y.aside)
    # L_x L_y (at order 1), L_x R_y, R_x L_y and R_x R_y.
    none = torch.zeros((), dtype=DOUBLE, device=x.device)
    radius = none
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))[order - 1 :]:
        part = f(x_sizes[i], y_sizes[j])
        if matrices:
            part = torch.minimum(part, x_lengths[i] * y_lengths[j])
        radius = radius + part
    # Products of matrices at order 2 gain too little from more work.
    if not radius.sum() > worth or matrices == (order == 2):
        return none, radius, None
    if matrices:
        least, most = _polarise_matrices(x, y)
    else:
        least, most = _polarise_entries(x, y)
    better = least + most < 2 * radius
    radius = torch.where(better, up((most + least) / 2), radius)
    middle = torch.where(better, (most - least) / 2, 0.0)
    return middle, radius, ~better


def _polarise_entries(x: Form, y: Form) -> tuple[Tensor, Tensor]:
    """Return l, m >= 0: dx dy around the middles lies in [-l, m], entry by entry; order 2."""
    s = (x.sizes.linear + x.rest).clamp_min(_STILL).reciprocal()
    t = (y.sizes.linear + y.rest).clamp_min(_STILL).reciprocal()
    u = affine.scale(_subtract_middle(x), s)
    v = affine.scale(_subtract_middle(y), t)
    # 4 s t dx dy = (u + v)^2 - (u - v)^2
    total = _reach(affine.add(u, v))
    difference = _reach(affine.sub(u, v))
    most = up(total.square() / (4 * s * t))
    least = up(difference.square() / (4 * s * t))
    return least, most


def _subtract_middle(x: Form) -> Form:
    slack = x.slack + gamma(4, DOUBLE) * x.aside.abs()
    return Form(-x.aside, x.dense, slack, x.symbols, blocks=x.blocks)


def _reach(x: Form) -> Tensor:
    low, high = x.range()
    return torch.maximum(-low, high)


def _polarise_matrices(x: Form, y: Form) -> tuple[Tensor, Tensor]:
    """Return l, m >= 0, (*b, i, d): sum_j dx_ij dy_jd lies in [-l, m] on the ball; order 1."""
    symbols = x.symbols
    n = symbols.n
    dtype = symbols.dtype
    rows = max(len(x.dense), len(y.dense))
    # Any scales are valid: those that are the radii, of what moves at all, leave least.
    s = (x.mass + x.slack).clamp_min(_STILL)
    s = s.to(dtype).reciprocal()
    t = (y.mass + y.slack).clamp_min(_STILL)
    t = t.to(dtype).reciprocal()
    u = _scale_rows(x.dense, s, rows).transpose(-3, -2)
    u = u.flatten(0, -3)  # (b j, i, rows)
    v = _scale_rows(y.dense, t, rows).flatten(0, -3)  # (b j, d, rows)
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2], y.shape[-1])  # (*b, j, i, d)
    s = s.to(DOUBLE).mT[..., :, None]
    t = t.to(DOUBLE)[..., None, :]
    # Slack, and errors that only x has: they act on both in the same way.
    errors = symbols.sizes(x.dense[:0], x.blocks).errors + x.slack
    alone = errors.mT[..., :, None] * s
    alone = alone + y.slack[..., None, :] * t

    def bound_square(v: Tensor) -> Tensor:
        """Bound the sum over j of a b (u - v)^2 / 4."""
        reach = _distance(symbols, u[..., :n], v[..., :n])
        reach = reach + _one_norm_distance(u[..., n:], v[..., n:])
        # The roundings of a sum, and of u and v, each of which is about 1 in all.
        under = 4 * (rows * tiny(dtype)) ** 0.5
        reach = reach * (1 + gamma(rows + 8, dtype)) + gamma(16, dtype) + under
        reach = up(reach.view(shape) + alone)
        squares = reach.square() / (4 * s * t)
        return up(squares.sum(-3), shape[-3] + 32)

    return bound_square(v), bound_square(-v)


def _scale_rows(dense: Tensor, scale: Tensor, rows: int) -> Tensor:
    """Return scaled coefficients with the rows last, and as many as `rows`."""
    scaled = dense.movedim(0, -1) * scale[..., None]
    return F.pad(scaled, (0, rows - len(dense)))


def _distance(symbols: Symbols, u: Tensor, v: Tensor) -> Tensor:
    """Return how far the linear parts u - v of all pairs of rows can move."""
    if symbols.norm == "linf":
        return _one_norm_distance(u, v)
    if symbols.norm == "l2":
        return torch.cdist(u, v, 2.0, "donot_use_mm_for_euclid_dist").to(DOUBLE)
    distances = []
    for some, others in zip(u, v, strict=True):  # one matrix at a time: they are large
        gap = some[:, None] - others
        distances.append(symbols.sum_groups(gap.abs().movedim(-1, 0)))
    return torch.stack(distances)


def _one_norm_distance(u: Tensor, v: Tensor) -> Tensor:
    return torch.cdist(u, v, 1.0).to(DOUBLE)


def _average(x: Form, y: Form) -> Form | None:
    """Return x @ y for weights x in [0, 1] at order 1; None, for `_product`, as `_share` says.

    With m -+ r the range of x and c the centre of y, x y = m y + (x - m) c + (x - m) (y - c). With
    y_j - c_j = sum_s g_sj e_s and x_ij - m_ij = r_ij eta, the last term is the sum of r_ij g_sj
    times eta e_s: new symbols in [-1, 1], which act on all channels.
    """
    keys = x.shape[-1]
    low, high = x.range()
    middle = (low + high) / 2
    radius = up(torch.maximum(high - middle, middle - low))
    moving = up(radius @ (y.mass + y.slack), keys)
    worth = _WORTH * (middle @ y.centre.abs()).sum()
    shared = _share(x.symbols, [(radius, y.whole().dense)], moving, worth)
    if shared is None:
        return None
    block, slack = shared
    # m y + (x - m) c.
    of_values = affine.linear_map(y, lambda t, w: w @ t, middle, roundings=keys + 1)
    of_weights = affine.linear_map(
        affine.sub(x, middle), torch.matmul, y.centre, roundings=keys + 1, within="rows"
    )
    total = affine.add(of_values, of_weights)
    blocks = (*total.blocks, block)
    return Form(total.centre, total.dense, up(total.slack + slack), x.symbols, blocks=blocks)


def _share_rest(x: Form, y: Form, worth: Tensor) -> tuple[ErrorBlock, Tensor] | None:
    """Return symbols and slack of R_x L_y + (L_x + R_x) R_y for weights x; None as in `_share`."""
    symbols = x.symbols
    whole = up(x.sizes.linear + x.rest)
    pairs = [(x.rest, y.dense[: symbols.n]), (whole, y.dense[symbols.first_error :])]
    moving = up(x.rest @ y.sizes.linear + whole @ y.rest, x.shape[-1])
    return _share(symbols, pairs, moving, worth)


def _share(
    symbols: Symbols, pairs: Sequence[tuple[Tensor, Tensor]], moving: Tensor, worth: Tensor
) -> tuple[ErrorBlock, Tensor] | None:
    """Return symbols for the largest products r_ij g_sj, which act on all channels, and slack.

    None where they are few, less than `worth` in sum, or the pass is to spare symbols. The
    coordinates of balls other than boxes are not all at their largest at once, which such symbols
    forget: they make passes over these balls looser.

    Args:
        symbols: of the pass.
        pairs: one or two of radii r, (*b, i, j), and coefficients g, (rows, *b, j, d).
        moving: (*b, i, d), no less than the sum of all sizes, and of what else becomes slack.
        worth: of the sum of `moving`.
    """
    dtype = symbols.dtype
    queries, keys = pairs[0][0].shape[-2:]
    width = moving.shape[-1]
    heads = moving.shape[:-2].numel()
    # Every row of every head gets so many symbols: few where there are many rows to mix later.
    room = _ROOM // (heads * queries * heads * keys * width)
    layers = min(room, keys * sum(len(coefficients) for _, coefficients in pairs))
    if symbols.norm != "linf" or layers <= width or not worth < moving.sum() < math.inf:
        return None
    if symbols.order == 1 and not symbols.rich:  # at order 2 there are many without these
        symbols.spared = True
        return None

    radii = []
    stacks = []
    sizes = []
    for radius, coefficients in pairs:
        r = cast_up(radius, dtype).reshape(heads, queries, keys)
        g = coefficients.movedim(0, -3).reshape(heads, len(coefficients), keys, width)
        # |r_ij| sum_d |g_sjd|, (heads, queries, rows, keys).
        size = torch.einsum("bsj,bij->bisj", g.abs().sum(-1), r)
        radii.append(r)
        stacks.append(g)
        sizes.append(size)
    by_query = torch.cat(sizes, 2).flatten(2)
    largest = by_query.topk(layers, sorted=False).indices
    # The rows g_sj of the largest products, and their radii: those of the second pair come last.
    places = largest.flatten(1)[..., None].expand(-1, -1, width)
    rows = torch.cat(stacks, 1).flatten(1, 2).gather(1, places)
    rows = rows.view(*largest.shape, width)
    of_second_pair = largest >= keys * stacks[0].shape[1]
    columns = largest % keys + keys * of_second_pair
    radius_of_row = torch.cat(radii, -1).gather(-1, columns)
    products = rows * radius_of_row[..., None]
    products = products.movedim(-2, 0)
    block = symbols.birth_shared(products.reshape(layers, *moving.shape))

    moved = block.rows.to(DOUBLE).abs().sum(0)
    slack = (moving - moved).clamp_min(0.0)
    # The radii, and their products with the rows, were rounded: by a share of all that moves.
    rounding = gamma(8, dtype) + gamma(layers + 8, DOUBLE)
    return block, slack + rounding * moving + 4 * layers * tiny(dtype)


def _rows_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply two stacks, one of which has one row."""
    if len(y) == 1:
        return _rows_times(x, y[0])
    return _times_rows(x[0], y)


def _rows_times(rows: Tensor, y: Tensor) -> Tensor:
    """Return rows (r, *b, i, k) @ y (*b, k, j), as products of tall matrices."""
    tall = rows.movedim(0, -3)
    product = tall.flatten(-3, -2) @ y
    return torch.unflatten(product, -2, tall.shape[-3:-1]).movedim(-3, 0)


def _times_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x (*b, i, k) @ rows (r, *b, k, j), as products with wide matrices."""
    wide = rows.movedim(0, -2)
    product = x @ wide.flatten(-2)
    return torch.unflatten(product, -1, wide.shape[-2:]).movedim(-2, 0)


def _shift_values(product: Form, x: Form, kappa: Tensor) -> Form:
    """Add (1 - sum_k x_k) kappa, which is zero: the errors are then those of V - kappa."""
    dtype = product.symbols.dtype
    keys = x.shape[-1]
    rounded = kappa.to(dtype)  # any constant is valid
    kappa = rounded.to(DOUBLE)
    row_sums, of_blocks = x.map_rows(lambda t: t.sum(-1, keepdim=True))
    product.dense[: len(row_sums)] -= row_sums * rounded
    removed = [block.map_rows(lambda t: -t * rounded) for block in of_blocks]
    blocks = join_blocks(product.blocks, removed, torch.add)
    total = x.centre.sum(-1, keepdim=True)
    centre = product.centre + (1 - total) * kappa
    kappa = kappa.abs()
    moving = x.mass.sum(-1, keepdim=True) * kappa
    size = 1 + x.centre.abs().sum(-1, keepdim=True)
    still = size * kappa + product.centre.abs()
    slack = product.slack + x.slack.sum(-1, keepdim=True) * kappa
    slack = slack + gamma(keys + 4, dtype) * moving + gamma(keys + 8, DOUBLE) * still
    slack = slack + 2 * x.count * keys * tiny(dtype) * (1 + kappa)
    return Form(centre, product.dense, up(slack, keys + 8), product.symbols, blocks=blocks)


def einsum(equation: str, *operands: Any) -> Any:
    """Return sums of products of two operands by names of axes, as one matmul."""
    if isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    inputs, arrow, wanted = equation.replace(" ", "").partition("->")
    a, comma, b = inputs.partition(",")
    once = all(len(set(axes)) == len(axes) for axes in (a, b, wanted))
    complete = arrow and comma and once
    if len(operands) != 2 or not complete or set(wanted) - set(a + b):
        raise NoRuleError(f"einsum of {equation}")
    # Axes that nothing else has are summed first: what is left is a batch of matrices.
    x, a = _sum_out(operands[0], a, b + wanted)
    y, b = _sum_out(operands[1], b, a + wanted)
    batch = [axis for axis in a if axis in b and axis in wanted]
    inner = [axis for axis in a if axis in b and axis not in wanted]
    rows = [axis for axis in a if axis not in b]
    columns = [axis for axis in b if axis not in a]
    left = _fold(x, a, batch, rows, inner)
    right = _fold(y, b, batch, inner, columns)
    product = left @ right

    sizes = dict(zip(a, x.shape, strict=True))
    sizes |= zip(b, y.shape, strict=True)
    order = batch + rows + columns
    product = product.reshape([sizes[axis] for axis in order])
    return product.permute([order.index(axis) for axis in wanted])


def _sum_out(t: Any, axes: str, others: str) -> tuple[Any, str]:
    """Sum over the axes that `others` does not have; return the axes that are left."""
    summed = [place for place, axis in enumerate(axes) if axis not in others]
    if not summed:
        return t, axes
    return t.sum(summed), "".join(axis for axis in axes if axis in others)


def _fold(t: Any, axes: str, batch: list[str], *groups: list[str]) -> Any:
    """Move the axes of the batch to the front, and make one axis of each of the groups."""
    t = t.permute([axes.index(axis) for axis in (*batch, *groups[0], *groups[1])])
    shape = list(t.shape[: len(batch)])
    place = len(batch)
    for group in groups:
        shape.append(t.shape[place : place + len(group)].numel())
        place += len(group)
    return t.reshape(shape)


def addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float | int = 1, alpha: float | int = 1
) -> Form:
    """Return beta input + alpha mat1 @ mat2."""
    mat1, mat2 = affine.make_moving(input, mat1, mat2)
    product: Any = mat1 @ mat2
    if alpha != 1:
        product = product * alpha
    if beta != 1:
        input = input * beta
    return affine.add(product, input)
