"""Softmax rows: exp(s - LSE(s)), the log-sum-exp with one error symbol a row.

Let s = c + ds, p = softmax(c), w any weights (p as computed) and d_j = ds_j - w . ds. Constants of
a row cancel: s_j - LSE(s) = c_j - LSE(c) + d_j - rho with rho = log sum_j p_j e^(d_j), exactly.
With |d_j| <= r_j and |sum_j p_j d_j| <= t, which is rounding (below):

Order 1. rho >= sum p d >= -t (Jensen). On [-r, r] the chord of exp gives e^d <= cosh r +
d sinh(r) / r; with A = sum p cosh r and the tangent of log, rho <= log A + sum_j (M_j / A) d_j,
M_j = p_j sinh(r_j) / r_j, which is <= log A + sum |M_j / A - p_j| r_j + t. By Hoeffding's lemma
also rho <= t + (max r)^2 / 2.

Order 2. K(t) = log sum p e^(t d) has K(0) = 0, K'(0) = mu = sum p d, K''(0) = sum p d^2 - mu^2,
and K''' is the third central moment under weights p_t between p and those at the other end. So
rho = 1/2 sum p d^2 + R with |R| <= t + t^2 / 2 + T / 6. Any p_t is at most
P_j = min(1, p_j e^r_j / sum p e^-r); |d - mean| <= r_j + m with m = min(sum P r, max r); the
variance is at most sum P r^2. So T = min(sum P (r + m)^3, 2 max r sum P r^2).

sum p d = sum (p - w) d + (1 - sum w) w . ds: p and w differ by the rounding of a softmax.
Keys so far below the others that e^-1000 of the weight is left (masked ones) are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipaudit.theory.relaxation.affine import add, linear_map, neg, sub
from lipaudit.theory.relaxation.form import Form, NoRuleError, UnboundedError
from lipaudit.theory.relaxation.moves import masked_fill, moved
from lipaudit.theory.relaxation.rounding import DOUBLE, LIBRARY, gamma, up
from lipaudit.theory.relaxation.smooth import EXP, relax, square_rest

_NEGLIGIBLE = 1000.0
_LEFT = 1e-300


def softmax(
    input: Form, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None
) -> Form:
    """The softmax over an axis; rows of the last one are known to sum to one."""
    rows, axis = _rows(input, dim)
    log_p, hidden = _log_softmax(rows)
    out = _finished(relax(log_p, EXP, ceiling=0.0), hidden)
    return out if axis is None else moved("transpose")(out, axis, -1)


def log_softmax(
    input: Form, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None
) -> Form:
    """The logarithm of the softmax over an axis."""
    rows, axis = _rows(input, dim)
    log_p, hidden = _log_softmax(rows)
    out = masked_fill(log_p, hidden, -torch.inf) if hidden.any() else log_p
    return out if axis is None else moved("transpose")(out, axis, -1)


def logsumexp(input: Form, dim: int, keepdim: bool = False) -> Form:
    """Return s_j - log softmax(s)_j, the same for every j: for the largest at the centre."""
    rows, axis = _rows(input, dim)
    log_p, _ = _log_softmax(rows)
    top = rows.centre.argmax(-1, keepdim=True)
    gather = moved("gather")
    out: Any = sub(gather(rows, -1, top), gather(log_p, -1, top))
    out = out if axis is None else out.transpose(axis, -1)
    return out if keepdim else out.squeeze(dim)


def _rows(input: Form, dim: int | None) -> tuple[Form, int | None]:
    """Return the form with the axis last, and where that was, if elsewhere."""
    if dim is None:
        raise NoRuleError("softmax without an axis")
    axis = dim % input.ndim
    if axis == input.ndim - 1:
        return input, None
    return moved("transpose")(input, axis, -1), axis


def _log_softmax(input: Form) -> tuple[Form, Tensor]:
    """Return s - LSE(s), and which keys have a negligible weight."""
    z, hidden = _without_negligible(input.settle())
    p = z.centre.softmax(-1)
    # p and the logarithm below: a shift, exp, a sum of n terms, a quotient or a logarithm.
    share = gamma(4 * LIBRARY + 2 * p.shape[-1], DOUBLE)
    d = _centred(z, p)
    r = up(d.sizes.linear + d.rest)
    mean_moves = up(_total(p * (z.mass + z.slack)), p.shape[-1])
    lost = up(share * (_total(p * r) + mean_moves), p.shape[-1])
    rho = _first_order(d, p, r, lost)
    rho = _better(rho, _second_order(d, p, r, lost)) if z.symbols.order == 2 else rho
    if not torch.isfinite(rho.slack).all():
        raise UnboundedError
    log_p = z.centre.log_softmax(-1).masked_fill(hidden, 0.0)
    still = share * (1 + log_p.abs() + z.centre.masked_fill(hidden, 0.0).abs())
    shifted = Form(log_p, d.dense, up(d.slack + still), z.symbols, blocks=d.blocks)
    return add(shifted, neg(rho)), hidden


def _without_negligible(z: Form) -> tuple[Form, Tensor]:
    """Take out keys with a weight of less than e^-1000, and say which."""
    move = (z.mass + z.slack).nan_to_num(nan=0.0, posinf=torch.inf)
    masked = z.centre == -torch.inf
    move = move.masked_fill(masked, 0.0)
    sure = (z.centre - move).amax(-1, keepdim=True)
    hidden = z.centre + move < sure - _NEGLIGIBLE
    if not hidden.any():
        return z, hidden
    # Generators and slack vanish with them: e^-1000 is more than the library tells from zero.
    return masked_fill(z, hidden, -torch.inf), hidden


def _centred(z: Form, p: Tensor) -> Form:
    """Return d = ds - w . ds, a form of centre zero."""

    def op(t: Tensor, w: Tensor) -> Tensor:
        return t - (t * w).sum(-1, keepdim=True)

    def bound(t: Tensor, w: Tensor) -> Tensor:
        return t + (t * w).sum(-1, keepdim=True)

    moving = Form(torch.zeros_like(p), z.dense, z.slack, z.symbols, blocks=z.blocks)
    moving.sizes = z.sizes
    w = p.to(z.symbols.dtype)
    return linear_map(moving, op, w, roundings=p.shape[-1] + 2, bound=bound, within="rows")


def _first_order(d: Form, p: Tensor, r: Tensor, lost: Tensor) -> Form:
    wide = r > 1e-6  # sinh(r) / r is 1 + r^2 / 6 there, to a last place
    slope = p * torch.where(wide, torch.sinh(r) / r.clamp_min(1e-9), 1 + r.square() / 6)
    level = up(_total(p * torch.cosh(r)), p.shape[-1])
    tilted = (slope / level - p).abs() + gamma(8 * LIBRARY + p.shape[-1], DOUBLE) * p
    chord = level.log() + 4 * LIBRARY * gamma(1, DOUBLE) + up(_total(tilted * r), p.shape[-1])
    hoeffding = up(r.amax(-1, keepdim=True).square() / 2)
    high = torch.minimum(chord, hoeffding)
    none = d.dense.new_zeros(0, *high.shape)
    return Form(high / 2, none, up(high / 2 + lost), d.symbols)


def _second_order(d: Form, p: Tensor, r: Tensor, lost: Tensor) -> Form:
    symbols, keys = d.symbols, p.shape[-1]
    top = r.amax(-1, keepdim=True)
    tilted = up(p * r.exp() / _total(p * (-r).exp()), 4 * LIBRARY + keys).clamp_max(1.0)
    mean = torch.minimum(up(_total(tilted * r), keys), top)
    third = torch.minimum(_total(tilted * (r + mean) ** 3), 2 * top * _total(tilted * r.square()))
    first, second = square_rest(d.sizes.linear, d.rest)
    middle = _total(p * second) / 4
    slack = _total(p * (first + second / 2)) / 2 + third / 6 + lost + lost.square() / 2
    # Products, sums and halves of the quadratic part, and p for the true softmax.
    rounding = gamma(2 * keys + 4 * LIBRARY, symbols.dtype) * _total(p * r.square())
    e = d.dense[: symbols.n]
    half = (p / 2).to(symbols.dtype)
    squares = symbols.pack(torch.einsum("a...j,c...j->ac...", e * half, e))[..., None]
    generators = d.dense.new_zeros(symbols.first_error, *middle.shape)
    generators[symbols.n :] = squares
    return Form(middle, generators, up(slack + 2 * rounding, keys + 32), symbols)


def _better(one: Form, other: Form) -> Form:
    """Take of each row the form with less slack."""
    first = one.slack < other.slack
    centre = torch.where(first, one.centre, other.centre)
    slack = torch.minimum(one.slack, other.slack)
    return Form(centre, other.dense * ~first, slack, one.symbols)


def _finished(out: Form, hidden: Tensor) -> Form:
    """Put the keys back that were taken out, and say that rows sum to one."""
    if hidden.any():
        out = masked_fill(out, hidden, 0.0)
        out.slack = out.slack + _LEFT * hidden
    out.simplex = True
    return out


def _total(t: Tensor) -> Tensor:
    return t.sum(-1, keepdim=True)


RULES: dict[str, Callable[..., Any]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
}
"""What softmax and its logarithm do to forms."""
