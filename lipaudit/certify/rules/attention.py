"""Softmax rows, exp(s - LSE(s)) with one error symbol a row for the log-sum-exp; and attention.

Let s = c + ds, p = softmax(c), w any weights (p as computed) and d_j = ds_j - w . ds. Constants of
a row cancel: s_j - LSE(s) = c_j - LSE(c) + d_j - rho with rho = log sum_j p_j e^(d_j), exactly.
With |d_j| <= r_j and |sum_j p_j d_j| <= t, which is rounding (below):

Let q = sum p d^2, which is at most Q = min(sum p r^2, (l + m)^2) for the lengths l and m of the
linear part and the rest of sqrt(p) d (`lengths`). (e^x - 1 - x) / x^2 rises with x: with
g(r) = 2 (e^r - 1 - r) / r^2 it is off from 1/2 by at most (g(r) - 1) / 2 on [-r, r]. So
y = sum p e^d - 1 = sum p d + q / 2 + C with |C| <= T = min(sum (g(r) - 1) p r^2,
(g(max r) - 1) (l + m)^2) / 2, and y <= Y = t + Q / 2 + T.

Order 1. rho >= sum p d >= -t (Jensen), and rho <= y <= Y. On [-r, r] the chord of exp gives
e^d <= cosh r + d sinh(r) / r; with A = sum p cosh r and the tangent of log,
rho <= log A + sum_j (M_j / A) d_j, M_j = p_j sinh(r_j) / r_j, which is
<= log A + sum |M_j / A - p_j| r_j + t. By Hoeffding's lemma also rho <= t + (max r)^2 / 2.

Order 2. rho = log(1 + y) >= y - y^2 / 2 - t: for y < 0 because rho >= -t. So rho = q / 2 + R,
-2 t - T - Y^2 / 2 <= R <= t + T. With d = L + R', L^2 goes into the quadratic part; that of
sum p (2 L R' + R'^2) is at most 2 l m + m^2, or the sum of p (2 lin rest + rest^2).

sum p d = sum (p - w) d + (1 - sum w) w . ds: p and w differ by the rounding of a softmax.
Keys with a weight below e^-1000 (masked ones) are constants.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.certify.form import Form, NoRuleError, UnboundedError
from lipaudit.certify.lengths import lengths
from lipaudit.certify.rounding import DOUBLE, LIBRARY, gamma, up
from lipaudit.certify.rules.affine import add, linear_map, neg, sub
from lipaudit.certify.rules.moves import lift, make_move, make_moving, masked_fill
from lipaudit.certify.rules.smooth import EXP, relax, square_rest

_NEGLIGIBLE = 1000.0
_LEFT = 1e-300


def softmax(
    input: Form, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None
) -> Form:
    """Return the softmax over an axis; rows of the last axis are marked to sum to one."""
    rows, axis = _rows(input, dim)
    log_p, hidden = _log_softmax(rows)
    out = relax(log_p, EXP, ceiling=0.0)
    if hidden.any():
        out = masked_fill(out, hidden, 0.0)
        out.slack = out.slack + _LEFT * hidden
    out.simplex = True
    return out if axis is None else make_move("transpose")(out, axis, -1)


def log_softmax(
    input: Form, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None
) -> Form:
    """The logarithm of the softmax over an axis."""
    rows, axis = _rows(input, dim)
    log_p, hidden = _log_softmax(rows)
    out = masked_fill(log_p, hidden, -torch.inf) if hidden.any() else log_p
    return out if axis is None else make_move("transpose")(out, axis, -1)


def logsumexp(input: Form, dim: int, keepdim: bool = False) -> Form:
    """Return s_j - log softmax(s)_j, the same for every j: for the largest at the centre."""
    rows, axis = _rows(input, dim)
    log_p, _ = _log_softmax(rows)
    top = rows.centre.argmax(-1, keepdim=True)
    gather = make_move("gather")
    out: Any = sub(gather(rows, -1, top), gather(log_p, -1, top))
    out = out if axis is None else out.transpose(axis, -1)
    return out if keepdim else out.squeeze(dim)


def _rows(input: Form, dim: int | None) -> tuple[Form, int | None]:
    """Return the form with the axis last, and the axis' old place, if it was another."""
    if dim is None:
        raise NoRuleError("softmax without an axis")
    axis = dim % input.ndim
    if axis == input.ndim - 1:
        return input, None
    return make_move("transpose")(input, axis, -1), axis


def _log_softmax(input: Form) -> tuple[Form, Tensor]:
    """Return s - LSE(s), and which keys have a negligible weight."""
    z = input.settle()
    # Keys with a weight of less than e^-1000 are removed with their generators and slack: e^-1000
    # is more than the library tells from zero.
    move = (z.mass + z.slack).nan_to_num(nan=0.0, posinf=torch.inf)
    move = move.masked_fill(z.centre == -torch.inf, 0.0)
    hidden = z.centre + move < (z.centre - move).amax(-1, keepdim=True) - _NEGLIGIBLE
    z = masked_fill(z, hidden, -torch.inf) if hidden.any() else z
    p, keys = z.centre.softmax(-1), z.shape[-1]
    # p and the logarithm below: a shift, exp, a sum of n terms, a quotient or a logarithm.
    share = gamma(4 * LIBRARY + 2 * keys, DOUBLE)
    # d = ds - w . ds, a form of centre zero.
    moving = Form(torch.zeros_like(p), z.dense, z.slack, z.symbols, blocks=z.blocks)
    moving.sizes = z.sizes
    d = linear_map(
        moving,
        lambda t, w: t - (t * w).sum(-1, keepdim=True),
        p.to(z.symbols.dtype),
        roundings=keys + 2,
        bound=lambda t, w: t + (t * w).sum(-1, keepdim=True),
        within="rows",
    )
    r = up(d.sizes.linear + d.rest)
    mean_moves = up(_total(p * (z.mass + z.slack)), keys)
    lost = up(share * (_total(p * r) + mean_moves), keys)  # t
    # T and Y, the bounds of C and of y.
    longest = lengths(d, -1, p.sqrt())
    moves, long = p * r.square(), up((longest[0] + longest[1]).square())
    by_key, of_top = _total(_excess(r) * moves), _excess(r.amax(-1, keepdim=True)) * long
    third = up(torch.minimum(by_key, of_top) / 2, 8 * LIBRARY + keys)
    second = up(torch.minimum(_total(moves), long), 4 * LIBRARY + keys)
    top = up(lost + second / 2 + third)
    rho = _first_order(d, p, r, lost, top)
    if z.symbols.order == 2:
        other = _second_order(d, p, longest, third + 2 * lost + top.square() / 2)
        less = rho.slack < other.slack
        centre = torch.where(less, rho.centre, other.centre)
        slack = torch.minimum(rho.slack, other.slack)
        rho = Form(centre, other.dense * ~less, slack, z.symbols)
    if not torch.isfinite(rho.slack).all():
        raise UnboundedError
    log_p = z.centre.log_softmax(-1).masked_fill(hidden, 0.0)
    still = share * (1 + log_p.abs() + z.centre.masked_fill(hidden, 0.0).abs())
    shifted = Form(log_p, d.dense, up(d.slack + still), z.symbols, blocks=d.blocks)
    return add(shifted, neg(rho)), hidden


def _excess(r: Tensor) -> Tensor:
    """Return no less than g(r) - 1 = r / 3 + r^2 / 12 + ..., for small r below r / 3 (1 + r)."""
    small = r < 0.01
    wide = r.clamp_min(0.01)
    g = 2 * (torch.expm1(wide) - wide) / wide.square()
    return torch.where(small, r / 3 * (1 + r), g - 1 + 1e-9 * g)


def _first_order(d: Form, p: Tensor, r: Tensor, lost: Tensor, top: Tensor) -> Form:
    wide = r > 1e-6  # sinh(r) / r is 1 + r^2 / 6 there, to a last place
    slope = p * torch.where(wide, torch.sinh(r) / r.clamp_min(1e-9), 1 + r.square() / 6)
    level = up(_total(p * torch.cosh(r)), p.shape[-1])
    tilted = (slope / level - p).abs() + gamma(8 * LIBRARY + p.shape[-1], DOUBLE) * p
    chord = level.log() + 4 * LIBRARY * gamma(1, DOUBLE) + up(_total(tilted * r), p.shape[-1])
    hoeffding = up(r.amax(-1, keepdim=True).square() / 2)
    high = torch.minimum(torch.minimum(chord, hoeffding), top)
    none = d.dense.new_zeros(0, *high.shape)
    return Form(high / 2, none, up(high / 2 + lost), d.symbols)


def _second_order(d: Form, p: Tensor, longest: tuple[Tensor, Tensor], off: Tensor) -> Form:
    symbols, keys = d.symbols, p.shape[-1]
    first, second = (_total(p * each) for each in square_rest(d.sizes.linear, d.rest))
    others = square_rest(*longest)
    less = others[0] + others[1] / 2 < first + second / 2
    first = torch.where(less, others[0], first)
    second = torch.where(less, others[1], second)
    middle, slack = second / 4, first / 2 + second / 4 + off
    moves = d.sizes.linear + d.rest
    # Products, sums and halves of the quadratic part, and p for the true softmax.
    rounding = gamma(2 * keys + 4 * LIBRARY, symbols.dtype) * _total(p * moves.square())
    e = d.dense[: symbols.n]
    half = (p / 2).to(symbols.dtype)
    squares = symbols.pack(torch.einsum("a...j,c...j->ac...", e * half, e))[..., None]
    generators = d.dense.new_zeros(symbols.first_error, *middle.shape)
    generators[symbols.n :] = squares
    return Form(middle, generators, up(slack + 2 * rounding, keys + 32), symbols)


def _total(t: Tensor) -> Tensor:
    return t.sum(-1, keepdim=True)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float | int = 0.0,
    is_causal: bool = False,
    scale: float | int | None = None,
    enable_gqa: bool = False,
) -> Form:
    """Return softmax(scale q k^T + mask) v; for grouped queries, heads of k and v are repeated."""
    if dropout_p > 0:
        raise NoRuleError("scaled_dot_product_attention with dropout")
    if enable_gqa:
        key, value = (
            t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value)
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        size = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(size, dtype=torch.bool, device=value.device).tril()
    query, key = make_moving(value, query, key)
    # Multiply the constant with the form first: a product of constants would be rounded.
    scores: Any = (query * scale) @ key.mT if isinstance(query, Form) else query @ key.mT * scale
    result: Form = mask_scores(scores, attn_mask).softmax(-1) @ value
    return result


def mask_scores(logits: Any, mask: Tensor | None) -> Any:
    """Apply a mask to scores: a boolean mask selects visible keys, numbers are added."""
    if mask is None:
        return logits
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """nn.MultiheadAttention: projections around attention; (L, batch, E) or (L, E)."""
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    of = SimpleNamespace(**bound.arguments)
    odd = any(each is not None for each in (of.bias_k, of.bias_v, of.static_k, of.static_v))
    if (of.training and of.dropout_p > 0) or of.add_zero_attn or odd:
        raise NoRuleError("multi_head_attention_forward with dropout or further keys")
    batched = of.query.ndim == 3
    weights: Any = (of.q_proj_weight, of.k_proj_weight, of.v_proj_weight)
    weights = weights if of.use_separate_proj_weight else of.in_proj_weight.chunk(3)
    biases: Any = (None,) * 3 if of.in_proj_bias is None else of.in_proj_bias.chunk(3)
    inputs = (of.query, of.key, of.value)
    like = next(t for t in inputs if isinstance(t, Form))
    q, k, v = (
        _split(F.linear(t if isinstance(t, Form) else lift(t, like), w, b), of.num_heads, batched)
        for t, w, b in zip(inputs, weights, biases, strict=True)
    )
    logits = (q @ k.mT) * q.shape[-1] ** -0.5
    mask, padding = of.attn_mask, of.key_padding_mask
    if mask is not None and mask.ndim == 3:  # (batch heads, L, S)
        mask = mask.unflatten(0, (-1, of.num_heads))
    if padding is not None:  # (batch, S) or (S)
        padding = padding.view(-1, 1, 1, padding.shape[-1])
    for each in (mask, padding):  # boolean masks hide where True
        hides = each is not None and each.dtype is torch.bool
        logits = mask_scores(logits, ~each if hides else each)
    p: Any = logits.softmax(-1)
    mixed: Any = (p @ v).permute(2, 0, 1, 3).flatten(2)
    out = F.linear(mixed if batched else mixed[:, 0], of.out_proj_weight, of.out_proj_bias)
    shown: Any = p.mean(1) if of.average_attn_weights else p
    return out, (shown if batched else shown[0]) if of.need_weights else None


def _split(t: Any, heads: int, batched: bool) -> Any:
    """(L, batch, E) to (batch, heads, L, E / heads)."""
    t = t if batched else t[:, None]
    return t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
