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

Ends of a weight. p_j = 1 / sum_k e^(s_k - s_j), and each difference of two scores has a range, in
which symbols that both share count once: the sums of its ends bound p_j, the closer the fewer keys
share what is left. Its logarithm stays between theirs, where exp bends less than over all that its
form reaches, and the weights behind it keep these ends (`Form.weights`).

Normalisations: LayerNorm, RMSNorm, over other axes, and by a norm.

With y = x - mean(x) (or y = x), itself a form c + dy, the mean square is mean(c^2) +
2 mean(c dy) + mean(dy^2). n mean(dy^2) lies in [0, sum r^2] and in [0, (l + m)^2] for lengths l
and m of its linear part L and of the rest R (`lengths`). Order 2 can put L^2 into the quadratic
part: 2 L R + R^2 is left, in [-2 l m, 2 l m + m^2]. Every row takes what leaves least. Then comes
1 / sqrt, of a number that is at least eps, and the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.certify import affine, curves
from lipaudit.certify.form import Form, NoRuleError, Quotient, UnboundedError
from lipaudit.certify.lengths import lengths
from lipaudit.certify.symbols import DOUBLE, LIBRARY, gamma, tiny, up

_NEGLIGIBLE = 1000.0
_LEFT = 1e-300
_WIDE = 1.0
"""Width of a logarithm's range from which differences of scores are looked at: exp bends there."""
_MOST_KEYS = 32
"""Largest number of keys whose differences are looked at: the time grows with their square."""


def softmax(
    input: Form, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None
) -> Form:
    """Return the softmax over an axis; rows of the last axis are marked to sum to one."""

    def rule(rows: Form) -> Form:
        log_p, hidden = _log_softmax(rows)
        low, high = _bound_logarithms(log_p, hidden)
        out = curves.relax(log_p, curves.EXP, within=(low, high))
        if hidden.any():
            out = affine.masked_fill(out, hidden, 0.0)
            out.slack = out.slack + _LEFT * hidden
        # Below _LEFT exp may round up, or to zero.
        share = gamma(2 * LIBRARY + 2, DOUBLE)
        low = (low.exp() * (1 - share) - _LEFT).clamp_min(0.0)
        high = (high.exp() * (1 + share) + _LEFT).clamp_max(1.0)
        out.weights = low.masked_fill(hidden, 0.0), high.masked_fill(hidden, _LEFT)
        return out

    return _apply_along(input, dim, rule)


def log_softmax(
    input: Form, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None
) -> Form:
    """The logarithm of the softmax over an axis."""

    def rule(rows: Form) -> Form:
        log_p, hidden = _log_softmax(rows)
        # Of a key with a negligible weight, too, the logarithm is finite unless a mask hides it.
        if not hidden.any():
            return log_p
        return affine.where(hidden, affine.sub(rows, _log_sum(rows, log_p)), log_p)

    return _apply_along(input, dim, rule)


def logsumexp(input: Form, dim: int | tuple[int, ...], keepdim: bool = False) -> Form:
    """Return log sum_j e^(s_j) over an axis."""
    dim = dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim
    if not isinstance(dim, int):
        raise NoRuleError("logsumexp over several axes")
    result: Any = _apply_along(input, dim, lambda rows: _log_sum(rows, _log_softmax(rows)[0]))
    return result if keepdim else result.squeeze(dim)


def _bound_logarithms(log_p: Form, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of log softmax(s)_j: those of its form, or where each s_k - s_j ends."""
    low, high = log_p.range()
    high = high.clamp_max(0.0)
    if log_p.shape[-1] > _MOST_KEYS or not (high - low > _WIDE).any():
        return low, high
    least, most = torch.zeros_like(low), torch.zeros_like(high)
    for k in range(log_p.shape[-1]):
        ends = affine.sub(cast("Form", log_p[..., k : k + 1]), log_p).range()
        below, above = (end.exp().masked_fill(hidden[..., k : k + 1], 0.0) for end in ends)
        least, most = least + below, most + above
    # A sum that overflows is no less than the largest number: that of a key far below the others.
    least = least.clamp_max(torch.finfo(DOUBLE).max)
    # exp, a sum of so many, a logarithm.
    share = gamma(2 * LIBRARY + log_p.shape[-1] + 2, DOUBLE)
    least, most = (least * (1 - share)).log(), (most * (1 + share)).log()
    least, most = least - share * least.abs(), most + share * most.abs()
    return torch.maximum(low, -most), torch.minimum(high, -least)


def _log_sum(rows: Form, log_p: Form) -> Form:
    """Return s_j - log softmax(s)_j, the same for every j: for the largest at the centre."""
    top, gather = rows.centre.argmax(-1, keepdim=True), affine.make_move("gather")
    return affine.sub(gather(rows, -1, top), gather(log_p, -1, top))


def _apply_along(input: Form, dim: int | None, rule: Callable[[Form], Form]) -> Form:
    if dim is None:
        raise NoRuleError("softmax without an axis")
    if dim % input.ndim == input.ndim - 1:
        return rule(input)
    turn = affine.make_move("transpose")
    return turn(rule(turn(input, dim, -1)), dim, -1)


def _log_softmax(input: Form) -> tuple[Form, Tensor]:
    """Return s - LSE(s), and which keys have a negligible weight."""
    z = input.settle()
    # Keys with a weight of less than e^-1000 are removed with their generators and slack: e^-1000
    # is more than the library tells from zero.
    move = (z.mass + z.slack).nan_to_num(nan=0.0, posinf=torch.inf)
    move = move.masked_fill(z.centre == -torch.inf, 0.0)
    hidden = z.centre + move < (z.centre - move).amax(-1, keepdim=True) - _NEGLIGIBLE
    z = affine.masked_fill(z, hidden, -torch.inf) if hidden.any() else z
    p, keys = z.centre.softmax(-1), z.shape[-1]
    # p and the logarithm below: a shift, exp, a sum of n terms, a quotient or a logarithm.
    share = gamma(4 * LIBRARY + 2 * keys, DOUBLE)
    # d = ds - w . ds, a form of centre zero.
    moving = Form(torch.zeros_like(p), z.dense, z.slack, z.symbols, blocks=z.blocks)
    moving.sizes = z.sizes
    d = affine.linear_map(
        moving,
        lambda t, w: t - (t * w).sum(-1, keepdim=True),
        p.to(z.symbols.dtype),
        roundings=keys + 2,
        bound=lambda t, w: t + (t * w).sum(-1, keepdim=True),
        within="rows",
    )
    r = up(d.sizes.linear + d.nonlinear)
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
    return affine.add(shifted, affine.neg(rho)), hidden


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
    first, second = curves.square_remainder(d.sizes.linear, d.nonlinear)
    first, second = _total(p * first), _total(p * second)
    others = curves.square_remainder(*longest)
    less = others[0] + others[1] / 2 < first + second / 2
    first = torch.where(less, others[0], first)
    second = torch.where(less, others[1], second)
    middle, slack = second / 4, first / 2 + second / 4 + off
    moves = d.sizes.linear + d.nonlinear
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
    # Constant q and k: their product is rounded, so one of them becomes a form with slack.
    query, key = affine.make_moving(value, query, key)
    # Multiply the constant with the form first: a product of constants would be rounded.
    scores: Any = (query * scale) @ key.mT if isinstance(query, Form) else query @ key.mT * scale
    if attn_mask is not None:  # a boolean mask selects visible keys, numbers are added
        hides = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if hides else scores + attn_mask
    return cast("Form", scores.softmax(-1) @ value)


# Torch's own code for nn.MultiheadAttention, reached past its question whether any argument is a
# special tensor: every call in it then takes its rule.
multi_head_attention_forward = FunctionType(
    F.multi_head_attention_forward.__code__,
    vars(F) | {"has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)


def layer_norm(
    input: Form,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Form:
    """(x - mean) / sqrt(var + eps) weight + bias; several last axes count as one."""
    shape, rows = _read_axes(input, normalized_shape), input
    if len(shape) > 1:
        rows = cast("Form", input.flatten(-len(shape)))
        weight, bias = (None if t is None else t.flatten() for t in (weight, bias))
    centred = affine.linear_map(
        rows.settle(),
        lambda t: t - t.mean(-1, keepdim=True),
        roundings=rows.shape[-1] + 2,
        bound=lambda t: t + t.mean(-1, keepdim=True),
        within="rows",
    )
    result: Any = _affine(_unit(centred, eps), weight, bias)
    return cast("Form", result if len(shape) == 1 else result.unflatten(-1, shape))


def rms_norm(
    input: Form, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Form:
    """Return x / sqrt(mean x^2 + eps) weight."""
    if len(_read_axes(input, normalized_shape)) > 1:
        raise NoRuleError(f"a normalisation of the axes {tuple(normalized_shape)}")
    eps = torch.finfo(input.dtype if weight is None else weight.dtype).eps if eps is None else eps
    return _affine(_unit(input.settle(), eps), weight, None)


def _read_axes(x: Form, normalized_shape: Any) -> list[int]:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if shape != list(x.shape[-len(shape) :]):
        raise NoRuleError(f"a normalisation of the axes {tuple(shape)}")
    return shape


def _unit(y: Form, eps: float) -> Form:
    """Return y / sqrt(mean y^2 + eps), a quotient."""
    symbols, dtype, n = y.symbols, y.symbols.dtype, y.shape[-1]
    # The derivative of mean(y^2) at the centre, 2 c / n: the linear part of the square.
    weights = (y.centre * (2 / n)).to(dtype)
    dense, blocks = y.by_row().map_rows(lambda t: (t * weights).sum(-1, keepdim=True))
    moves, size = up(y.mass + y.slack), y.centre.abs()
    middle, radius, kept = _square(y, moves)
    if symbols.order == 2:
        e = y.dense[: symbols.n] * kept
        squares = symbols.pack(torch.einsum("a...k,c...k->ac...", e / n, e))
        dense[symbols.n : symbols.first_error] += squares[..., None]
    # Two sums of n products, their weights rounded, and the sum of both.
    centre = _mean(y.centre.square())
    moving = gamma(2 * n + 16, dtype) * _mean(2 * size * moves + moves.square())
    still = gamma(n + 8, DOUBLE) * (centre + middle)
    under = 8 * n * y.count * tiny(dtype) * (1 + size.amax())
    slack = up(_mean(2 * size * y.slack) + radius + moving + still + under, n + 16)
    square = affine.add(Form(centre + middle, dense, slack, symbols, blocks=blocks), eps)
    inverse = curves.relax(square, curves.RSQRT, within=(eps, math.inf)).settle()
    nothing = torch.zeros_like(y.centre)
    constant = Form(nothing, y.dense[:0], nothing, symbols)
    return Form.from_quotient(Quotient(y.copy(), inverse, square, constant))


def _square(y: Form, moves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return middle and radius of mean(dy^2) without squares that are kept, and which are."""
    n = y.shape[-1]
    long, rest = lengths(y, -1)
    none = torch.zeros_like(moves, dtype=torch.bool)
    wholes = (_mean(moves.square()), up((long + rest).square() / n))
    choices = [(whole / 2, whole / 2, none) for whole in wholes]
    if y.symbols.order == 2:
        kept = curves.worth_squaring(y)
        first, second = curves.square_remainder(y.sizes.linear, y.nonlinear)
        middle = torch.where(kept, second, moves.square()) / 2
        radius = torch.where(kept, first + second / 2, moves.square() / 2)
        choices.append((_mean(middle), _mean(radius), kept))
        first, second = curves.square_remainder(long, rest)
        choices.append((second / n / 2, (first + second / 2) / n, ~none))
    middle, radius, kept = choices[0]
    for other, less, squares in choices[1:]:
        better = less < radius
        middle, radius = torch.where(better, other, middle), torch.where(better, less, radius)
        kept = torch.where(better, squares, kept)
    return middle, up(radius), kept


def _mean(t: Tensor) -> Tensor:
    return t.mean(-1, keepdim=True)


def _affine(x: Form, weight: Tensor | None, bias: Tensor | None) -> Form:
    x = x if weight is None else affine.scale(x, weight)
    return x if bias is None else affine.add(x, bias)


def batch_norm(
    input: Form,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Form:
    """Return (x - mean) / sqrt(var + eps) weight + bias of every channel, axis 1."""
    if training or running_mean is None or running_var is None:
        raise NoRuleError("batch_norm with statistics of the batch (call eval() first)")
    gain = (running_var.to(DOUBLE) + eps).rsqrt()
    gain = gain if weight is None else gain * weight.detach().to(DOUBLE)
    shape = (-1, *[1] * (input.ndim - 2))
    centred = affine.sub(input, running_mean.view(shape))
    # The gain takes a sum, a root of the library and a product, all in float64.
    scaled = affine.scale(centred, gain.view(shape), roundings=2 * LIBRARY + 2)
    return _affine(scaled, None, None if bias is None else bias.view(shape))


def group_norm(
    input: Form,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Form:
    """Apply LayerNorm to groups of channels (axis 1) with all places; weights are per channel."""
    groups: Any = input.reshape(input.shape[0], num_groups, -1)
    result: Any = layer_norm(groups, groups.shape[-1], None, None, eps).reshape(input.shape)
    shape = (-1, *[1] * (input.ndim - 2))
    weight, bias = (None if t is None else t.view(shape) for t in (weight, bias))
    return _affine(result, weight, bias)


def vector_norm(
    input: Form, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Form:
    """Return the 2-norm over axes."""
    if ord not in (2, "fro", None):
        raise NoRuleError(f"a norm of order {ord}")
    total = affine.reduce_axes(curves.square(input), dim, keepdim)
    return curves.relax(total, curves.SQRT, positive=True)


def normalize(
    input: Form, p: float | int = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Form:
    """Return x / ||x|| along an axis: an RMSNorm over sqrt(n), for norms of more than eps."""
    if p != 2 or out is not None:
        raise NoRuleError(f"normalize by a norm of order {p}")
    rows: Any = input.transpose(dim, -1)
    n = rows.shape[-1]
    low, _ = affine.reduce_axes(curves.square(rows), -1).range()
    if not (low > eps**2).all():  # below it, torch divides by eps
        raise UnboundedError
    unit = affine.scale(rms_norm(rows, n, None, 0.0), n**-0.5, roundings=3)
    return unit.transpose(dim, -1)  # type: ignore[return-value]
