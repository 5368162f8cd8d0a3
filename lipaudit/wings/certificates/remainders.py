"""Bounds of the product dx dy of the deviations of two forms from their centres.

Polarisation, also of matrices at order 1: with u = dx / a and v = dy / b for any a, b > 0,

    dx dy = a b ((u + v)^2 - (u - v)^2) / 4

so that sum_j dx_j dy_j lies in [-sum a b r_-^2 / 4, sum a b r_+^2 / 4] with r the radii of u - v
and of u + v: of forms, so symbols that both share count once. For the radii a and b, each r is at
most 2, which gives a b; it is less the more symbols move both (root 2 and half of a b for many
with random signs, and [0, a b] for u = v).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.wings.certificates import affine
from lipaudit.wings.certificates.error_blocks import ErrorBlock
from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.rounding import DOUBLE, bound_rounding, round_up, tiny
from lipaudit.wings.certificates.symbols import Symbols
from lipaudit.wings.certificates.vector_lengths import bound_lengths

_SMALLEST_RADIUS = 1e-15
"""Radius below which an entry counts as one that moves by this much."""

Bilinear = Callable[[Tensor, Tensor], Tensor]


class Remainder(NamedTuple):
    """dx dy, at order 2 without the product of the linear parts: blocks + shift +- radius.

    Attributes:
        shift, radius: (*shape).
        is_product_kept: at order 2, a mask of the entries for which coefficients hold the product
            of the linear parts; for the others the radius covers it. None for all entries.
        blocks: new error symbols, which bound a part of dx dy in place of the radius.
    """

    shift: Tensor
    radius: Tensor
    is_product_kept: Tensor | None
    blocks: tuple[ErrorBlock, ...] = ()


def bound_remainder(x: Form, y: Form, f: Bilinear, worthwhile: Tensor) -> Remainder:
    """Bound f(dx, dy) of forms x = c_x + dx and y = c_y + dy, around shifted centres.

    f is torch.matmul or torch.mul. At order 2 the caller can add f(L_x, L_y), the product of the
    parts that are linear in the input, as coefficients. The first bound is the product of the
    radii; at order 2 it is without f(L_x, L_y), which the caller must add. If this bound, summed
    over all entries, is above `worthwhile`, a second bound is tried: by polarisation,
    dx dy = ((dx + dy)^2 - (dx - dy)^2) / 4. It bounds all of f(dx, dy): the caller must not add
    f(L_x, L_y). Each entry takes the tighter bound, and `is_product_kept` says which.
    """
    is_matmul = f is torch.matmul
    radius = _bound_by_radii(x, y, f)
    # Polarisation gains enough only for matmul at order 1, and for mul at order 2. (The sum may be
    # NaN if bounds overflowed: then it is not above `worthwhile` either.)
    can_gain = is_matmul == (x.symbols.order == 1)
    if not can_gain or not radius.sum() > worthwhile:
        return Remainder(shift=radius.new_zeros(()), radius=radius, is_product_kept=None)
    if is_matmul:
        below, above = _polarise_matrices(x, y)
    else:
        below, above = _polarise_entries(x, y)
    # [-below, above] as shift +- radius. `round_up` also covers the rounding of the shift, which
    # is at most a share of (above + below) / 2.
    is_better = below + above < 2 * radius
    radius = torch.where(is_better, round_up((above + below) / 2), radius)
    shift = torch.where(is_better, (above - below) / 2, 0.0)
    return Remainder(shift, radius, is_product_kept=~is_better)


def _bound_by_radii(x: Form, y: Form, f: Bilinear) -> Tensor:
    """Return bounds of |f(dx, dy)|, at order 2 without the linear parts' product, (*shape).

    f is torch.matmul or torch.mul. The forms are x = c_x + dx with dx = L_x + R_x, where L is
    linear in the input symbols and R is the rest, and likewise y. The result is the sum of the
    bounds of f(L_x, L_y) (at order 1 only), f(L_x, R_y), f(R_x, L_y) and f(R_x, R_y).
    """
    x_radii = (x.radii.linear, x.rest_radius)
    y_radii = (y.radii.linear, y.rest_radius)
    if f is torch.matmul:
        x_lengths = bound_lengths(x, axis=-1, around=x.centre_shift)
        y_lengths = bound_lengths(y, axis=-2, around=y.centre_shift)
    radius = torch.zeros((), dtype=DOUBLE, device=x.device)
    # Index 0 is L and 1 is R: (0, 1) is L_x R_y. Order 2 skips the first pair, L_x L_y.
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))[x.symbols.order - 1 :]:
        bound = f(x_radii[i], y_radii[j])
        if f is torch.matmul:
            # |u . v| <= ||u|| ||v|| of the rows and columns that are multiplied.
            bound = torch.minimum(bound, x_lengths[i] * y_lengths[j])
        radius = radius + bound
    return radius


def _polarise_entries(x: Form, y: Form) -> tuple[Tensor, Tensor]:
    """Return l, m >= 0, (*shape) each, such that dx dy is in [-l, m] in each entry; for order 2.

    The forms are x = c_x + dx and y = c_y + dy. At order 2 a form is centre + linear part +
    quadratic part + errors +- slack, and c is its shifted centre: the centre + the middle of the
    range of the quadratic part. With u = s dx and v = t dy for any s, t > 0,
    dx dy = ((u + v)^2 - (u - v)^2) / (4 s t). u + v and u - v are forms, in which symbols that
    both x and y have add up or cancel: their ranges are tighter than the product of the radii.
    """
    # Any s and t are valid. One over the radius of dx or dy makes u and v equally large. The
    # radius is that of the linear part plus that of all other parts (`rest_radius`). Where an
    # entry does not move, it is not 0 but _SMALLEST_RADIUS.
    s = (x.radii.linear + x.rest_radius).clamp_min(_SMALLEST_RADIUS).reciprocal()
    t = (y.radii.linear + y.rest_radius).clamp_min(_SMALLEST_RADIUS).reciprocal()
    u = affine.scale(_subtract_centre(x), s)
    v = affine.scale(_subtract_centre(y), t)
    size_of_sum = _bound_size(affine.add(u, v))
    size_of_difference = _bound_size(affine.sub(u, v))
    above = round_up(size_of_sum.square() / (4 * s * t))
    below = round_up(size_of_difference.square() / (4 * s * t))
    return below, above


def _subtract_centre(x: Form) -> Form:
    """Return x minus its shifted centre (centre + middle of the range of the quadratic part)."""
    slack = x.slack + bound_rounding(4, DOUBLE) * x.centre_shift.abs()
    return x.with_bounds(-x.centre_shift, slack)


def _bound_size(x: Form) -> Tensor:
    """Return the largest absolute value of every entry."""
    low, high = x.range()
    return torch.maximum(-low, high)


def _polarise_matrices(x: Form, y: Form) -> tuple[Tensor, Tensor]:
    """Return l, m >= 0, (*b, i, d), such that sum_j dx_ij dy_jd is in [-l, m]; for order 1.

    The forms are x = c_x + dx, (*b, i, j), and y = c_y + dy, (*b, j, d). With u = s dx and
    v = t dy for any s, t > 0, dx dy = ((u + v)^2 - (u - v)^2) / (4 s t). So l is the sum over j of
    max |u_ij - v_jd|^2 / (4 s_ij t_jd), and m is the same sum with u + v. Symbols of both forms
    cancel or add up in u - v and u + v, so the bounds are tighter than products of radii.
    """
    symbols = x.symbols
    rows = max(len(x.dense), len(y.dense))
    # Any scales s and t are valid. One over the radius makes u and v equally large, which gives
    # tight bounds.
    s = _invert_radius(x)  # (*b, i, j)
    t = _invert_radius(y)  # (*b, j, d)
    # For each of *b and j, u_ij - v_jd is a difference of a row i of u and a row d of v: vectors
    # of coefficients. So b and j become the batch.
    u = _scale_coefficients(x.dense, s, rows).transpose(-3, -2)  # (*b, j, i, symbols)
    u = u.flatten(0, -3)  # (b j, i, symbols)
    v = _scale_coefficients(y.dense, t, rows).flatten(0, -3)  # (b j, d, symbols)
    # From here on all have the shape (*b, j, i, d), or broadcast to it.
    s = s.to(DOUBLE).mT[..., :, None]
    t = t.to(DOUBLE)[..., None, :]
    # Slack, and the errors in the blocks of x (coefficients that are stored sparsely), cannot
    # cancel: their sizes add up in u + v and in u - v. Without dense coefficients, `x.dense[:0]`,
    # only the errors in blocks are bounded. y has no blocks: `bilinear._multiply_matrices` has
    # made all its coefficients dense.
    errors = symbols.bound_parts(x.dense[:0], x.blocks).errors + x.slack
    independent = errors.mT[..., :, None] * s + y.slack[..., None, :] * t
    # l by u - v, and m by u + v = u - (-v).
    bounds = []
    for other in (v, -v):
        size = _bound_differences(symbols, u, other).view(independent.shape)
        size = round_up(size + independent)
        squares = size.square() / (4 * s * t)
        # Roundings: a sum over j, and fewer than 32 single steps.
        bounds.append(round_up(squares.sum(-3), roundings=x.shape[-1] + 32))
    below, above = bounds
    return below, above


def _invert_radius(x: Form) -> Tensor:
    """Return 1 / r in each entry of a form (*shape), where r is its largest change on the ball.

    If an entry does not change, r is _SMALLEST_RADIUS in place of 0.
    """
    radius = x.radius.clamp_min(_SMALLEST_RADIUS)
    return radius.to(x.symbols.dtype).reciprocal()


def _scale_coefficients(dense: Tensor, scale: Tensor, rows: int) -> Tensor:
    """Return coefficients (symbols, *shape) times scale (*shape), as (*shape, rows).

    `rows` is at least the number of symbols; coefficients of the additional rows are zero.
    """
    scaled = dense.movedim(0, -1) * scale[..., None]
    return F.pad(scaled, (0, rows - len(dense)))


def _bound_differences(symbols: Symbols, u: Tensor, v: Tensor) -> Tensor:
    """Return upper bounds of |(u_i - v_d) . e| over all symbols e, (b, i, d).

    u is (b, i, symbols) and v (b, d, symbols): coefficients, scaled so that |u_i . e| and
    |v_d . e| are at most about 1. The first symbols are the input, in a ball; the others are in
    [-1, 1].
    """
    n = symbols.inputs
    dtype = u.dtype
    symbol_count = u.shape[-1]
    size = _bound_input_differences(symbols, u[..., :n], v[..., :n])
    size = size + _one_norm_distance(u[..., n:], v[..., n:])
    # Rounding of the sum over symbols, as a share of it: one per symbol, and 8 leaves room.
    size = size * (1 + bound_rounding(symbol_count + 8, dtype))
    # u and v were rounded as well. Their size is about 1, so this error is absolute, and 16
    # roundings leave room. Small numbers, and their squares in a 2-norm, may underflow.
    underflow = 4 * (symbol_count * tiny(dtype)) ** 0.5
    return size + bound_rounding(16, dtype) + underflow


def _bound_input_differences(symbols: Symbols, u: Tensor, v: Tensor) -> Tensor:
    """Return max |(u_i - v_d) . e| over the inputs e of the ball, (b, i, d).

    u is (b, i, n) and v (b, d, n), coefficients of the n input symbols: the maximum is the dual
    norm of u_i - v_d.
    """
    if symbols.norm == "linf":
        return _one_norm_distance(u, v)
    if symbols.norm == "l2":
        # Not by ||u||^2 + ||v||^2 - 2 u . v, a matmul: the difference would cancel digits.
        return torch.cdist(u, v, compute_mode="donot_use_mm_for_euclid_dist").to(DOUBLE)
    # Words: symbols are >= 0, so the sum with |u_i - v_d| is no smaller than that of either sign.
    sizes = []
    for u_matrix, v_matrix in zip(u, v, strict=True):  # one matrix at a time: they are large
        difference = u_matrix[:, None] - v_matrix  # (i, d, n)
        sizes.append(symbols.maximise_over_words(difference.abs().movedim(-1, 0)))
    return torch.stack(sizes)


def _one_norm_distance(u: Tensor, v: Tensor) -> Tensor:
    """Return ||u_i - v_d||_1 of all pairs of rows, (b, i, d)."""
    return torch.cdist(u, v, p=1.0).to(DOUBLE)
