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

from lipaudit.wings.certificates import affine, curves
from lipaudit.wings.certificates.form import Form, NoRuleError, Quotient, UnboundedError
from lipaudit.wings.certificates.lengths import lengths
from lipaudit.wings.certificates.symbols import DOUBLE, LIBRARY, gamma, tiny, up

_NEGLIGIBLE = 1000.0
_UNDERFLOW = 1e-300
"""A weight that is masked may still be as much as this, and exp below it may become 0."""
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
            out.slack = out.slack + _UNDERFLOW * hidden
        # exp is within LIBRARY units in the last place, so 2 LIBRARY u; product and sum add 2 u.
        error = gamma(2 * LIBRARY + 2, DOUBLE)
        least = low.exp() * (1 - error) - _UNDERFLOW
        least = least.clamp_min(0.0).masked_fill(hidden, 0.0)
        most = high.exp() * (1 + error) + _UNDERFLOW
        most = most.clamp_max(1.0).masked_fill(hidden, _UNDERFLOW)
        out.weights = (least, most)
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
        of_hidden = affine.sub(rows, _log_sum(rows, log_p))
        return affine.where(hidden, of_hidden, log_p)

    return _apply_along(input, dim, rule)


def logsumexp(input: Form, dim: int | tuple[int, ...], keepdim: bool = False) -> Form:
    """Return log sum_j e^(s_j) over an axis."""
    if isinstance(dim, tuple) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int):
        raise NoRuleError("logsumexp over several axes")

    def rule(rows: Form) -> Form:
        log_p, _ = _log_softmax(rows)
        return _log_sum(rows, log_p)

    result: Any = _apply_along(input, dim, rule)
    return cast("Form", result if keepdim else result.squeeze(dim))


def _bound_logarithms(log_p: Form, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of log softmax(s)_j: those of its form, or where each s_k - s_j ends."""
    low, high = log_p.range()
    high = high.clamp_max(0.0)
    if log_p.shape[-1] > _MOST_KEYS or not (high - low > _WIDE).any():
        return low, high
    # The ends of 1 / p_j = sum_k e^(s_k - s_j).
    least = torch.zeros_like(low)
    most = torch.zeros_like(high)
    for k in range(log_p.shape[-1]):
        key = cast("Form", log_p[..., k : k + 1])
        below, above = affine.sub(key, log_p).range()
        key_hidden = hidden[..., k : k + 1]
        least = least + below.exp().masked_fill(key_hidden, 0.0)
        most = most + above.exp().masked_fill(key_hidden, 0.0)
    # A sum that overflows is no less than the largest number: that of a key far below the others.
    least = least.clamp_max(torch.finfo(DOUBLE).max)
    # exp, a sum of so many, a logarithm.
    share = gamma(2 * LIBRARY + log_p.shape[-1] + 2, DOUBLE)
    least = (least * (1 - share)).log()
    most = (most * (1 + share)).log()
    least = least - share * least.abs()
    most = most + share * most.abs()
    return torch.maximum(low, -most), torch.minimum(high, -least)


def _log_sum(rows: Form, log_p: Form) -> Form:
    """Return s_j - log softmax(s)_j, the same for every j: for the largest at the centre."""
    top = rows.centre.argmax(-1, keepdim=True)
    gather = affine.make_move("gather")
    score = gather(rows, -1, top)
    return affine.sub(score, gather(log_p, -1, top))


def _apply_along(input: Form, dim: int | None, rule: Callable[[Form], Form]) -> Form:
    if dim is None:
        raise NoRuleError("softmax without an axis")
    if dim % input.ndim == input.ndim - 1:
        return rule(input)
    turn = affine.make_move("transpose")
    result = rule(turn(input, dim, -1))
    return turn(result, dim, -1)


def _log_softmax(input: Form) -> tuple[Form, Tensor]:
    """Return s - LSE(s), and which keys have a negligible weight."""
    s, hidden = _hide_keys(input.settle())
    symbols = s.symbols
    keys = s.shape[-1]
    p = s.centre.softmax(-1)
    # p and the logarithm below: a shift, exp, a sum of n terms, a quotient or a logarithm.
    share = gamma(4 * LIBRARY + 2 * keys, DOUBLE)
    d = _subtract_mean(s, p)
    r = up(d.sizes.linear + d.nonlinear)
    # t, which is rounding: |sum p d| <= t.
    mean_moves = up(_total(p * (s.mass + s.slack)), keys)
    lost = up(share * (_total(p * r) + mean_moves), keys)
    # Q, T and Y: of sum p d^2, of C and of y.
    linear, rest = lengths(d, -1, p.sqrt())
    squared_length = up((linear + rest).square())
    squares = p * r.square()
    by_key = _total(_excess(r) * squares)
    by_length = _excess(r.amax(-1, keepdim=True)) * squared_length
    third = torch.minimum(by_key, by_length)
    third = up(third / 2, 8 * LIBRARY + keys)
    second = torch.minimum(_total(squares), squared_length)
    second = up(second, 4 * LIBRARY + keys)
    top = up(lost + second / 2 + third)
    rho = _first_order(d, p, r, lost, top)
    if symbols.order == 2:
        off = third + 2 * lost + top.square() / 2
        other = _second_order(d, p, (linear, rest), off)
        first_is_less = rho.slack < other.slack
        centre = torch.where(first_is_less, rho.centre, other.centre)
        slack = torch.minimum(rho.slack, other.slack)
        rho = Form(centre, other.dense * ~first_is_less, slack, symbols)
    if not torch.isfinite(rho.slack).all():
        raise UnboundedError
    # c - LSE(c) + d - rho.
    log_p = s.centre.log_softmax(-1).masked_fill(hidden, 0.0)
    size = 1 + log_p.abs() + s.centre.masked_fill(hidden, 0.0).abs()
    slack = up(d.slack + share * size)
    shifted = Form(log_p, d.dense, slack, symbols, blocks=d.blocks)
    return affine.add(shifted, affine.neg(rho)), hidden


def _hide_keys(s: Form) -> tuple[Form, Tensor]:
    """Return scores without keys whose weight is less than e^-1000, and which keys these are.

    They are removed with their generators and slack: e^-1000 is more than the library tells from
    zero.
    """
    move = (s.mass + s.slack).nan_to_num(nan=0.0, posinf=torch.inf)
    move = move.masked_fill(s.centre == -torch.inf, 0.0)
    largest = (s.centre - move).amax(-1, keepdim=True)
    hidden = s.centre + move < largest - _NEGLIGIBLE
    if hidden.any():
        s = affine.masked_fill(s, hidden, -torch.inf)
    return s, hidden


def _subtract_mean(s: Form, p: Tensor) -> Form:
    """Return d = ds - w . ds, a form of centre zero; w are the weights p, rounded."""
    moving = Form(torch.zeros_like(p), s.dense, s.slack, s.symbols, blocks=s.blocks)
    moving.sizes = s.sizes
    return affine.linear_map(
        moving,
        lambda t, w: t - _total(t * w),
        p.to(s.symbols.dtype),
        roundings=p.shape[-1] + 2,
        bound=lambda t, w: t + _total(t * w),
        within="rows",
    )


def _excess(r: Tensor) -> Tensor:
    """Return no less than g(r) - 1 = r / 3 + r^2 / 12 + ..., for small r below r / 3 (1 + r)."""
    wide = r.clamp_min(0.01)
    g = 2 * (torch.expm1(wide) - wide) / wide.square()
    of_wide = g - 1 + 1e-9 * g
    of_small = r / 3 * (1 + r)
    return torch.where(r < 0.01, of_small, of_wide)


def _first_order(d: Form, p: Tensor, r: Tensor, lost: Tensor, top: Tensor) -> Form:
    """Return rho in [-t, high], the least of Y, Hoeffding's bound and that by the chord."""
    keys = p.shape[-1]
    # M_j = p_j sinh(r_j) / r_j, and sinh(r) / r is 1 + r^2 / 6 for small r, to a last place.
    ratio = torch.sinh(r) / r.clamp_min(1e-9)
    slope = p * torch.where(r > 1e-6, ratio, 1 + r.square() / 6)
    # A = sum p cosh r, and log A + sum |M_j / A - p_j| r_j.
    level = up(_total(p * torch.cosh(r)), keys)
    tilted = (slope / level - p).abs() + gamma(8 * LIBRARY + keys, DOUBLE) * p
    of_keys = up(_total(tilted * r), keys)
    chord = level.log() + 4 * LIBRARY * gamma(1, DOUBLE) + of_keys
    widest = r.amax(-1, keepdim=True)
    hoeffding = up(widest.square() / 2)
    high = torch.minimum(torch.minimum(chord, hoeffding), top)
    no_rows = d.dense.new_zeros(0, *high.shape)
    return Form(high / 2, no_rows, up(high / 2 + lost), d.symbols)


def _second_order(d: Form, p: Tensor, longest: tuple[Tensor, Tensor], off: Tensor) -> Form:
    """Return rho = q / 2 +- off, with the squares of linear parts as its quadratic part."""
    symbols = d.symbols
    n = symbols.n
    dtype = symbols.dtype
    keys = p.shape[-1]
    # What q has beside the squares, in [-first, first + second]: by entries, or by lengths.
    first, second = curves.square_remainder(d.sizes.linear, d.nonlinear)
    first = _total(p * first)
    second = _total(p * second)
    of_lengths, squared_length = curves.square_remainder(*longest)
    less = of_lengths + squared_length / 2 < first + second / 2
    first = torch.where(less, of_lengths, first)
    second = torch.where(less, squared_length, second)
    slack = first / 2 + second / 4 + off
    # Products, sums and halves of the quadratic part, and p for the true softmax.
    moves = d.sizes.linear + d.nonlinear
    rounding = gamma(2 * keys + 4 * LIBRARY, dtype) * _total(p * moves.square())
    linear = d.dense[:n]
    half = (p / 2).to(dtype)
    squares = torch.einsum("a...j,c...j->ac...", linear * half, linear)
    generators = d.dense.new_zeros(symbols.first_error, *second.shape)
    generators[n:] = symbols.pack(squares)[..., None]
    return Form(second / 4, generators, up(slack + 2 * rounding, keys + 32), symbols)


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
        heads = query.shape[-3]
        key = key.repeat_interleave(heads // key.shape[-3], -3)
        value = value.repeat_interleave(heads // value.shape[-3], -3)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if is_causal:
        size = (query.shape[-2], key.shape[-2])
        attn_mask = torch.ones(size, dtype=torch.bool, device=value.device).tril()
    # Constant q and k: their product is rounded, so one of them becomes a form with slack.
    query, key = affine.make_moving(value, query, key)
    # Multiply the constant with the form first: a product of constants would be rounded.
    query_moves = isinstance(query, Form)
    if query_moves:
        query = query * scale
    scores: Any = query @ key.mT
    if not query_moves:
        scores = scores * scale
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # True for visible keys
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
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
    shape = _read_axes(input, normalized_shape)
    if len(shape) > 1:
        flat: Any = layer_norm(
            cast("Form", input.flatten(-len(shape))),
            math.prod(shape),
            None if weight is None else weight.flatten(),
            None if bias is None else bias.flatten(),
            eps,
        )
        return cast("Form", flat.unflatten(-1, shape))
    centred = affine.linear_map(
        input.settle(),
        lambda t: t - _mean(t),
        roundings=shape[0] + 2,
        bound=lambda t: t + _mean(t),
        within="rows",
    )
    return _affine(_divide_by_root(centred, eps), weight, bias)


def rms_norm(
    input: Form, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Form:
    """Return x / sqrt(mean x^2 + eps) weight."""
    if len(_read_axes(input, normalized_shape)) > 1:
        raise NoRuleError(f"a normalisation of the axes {tuple(normalized_shape)}")
    if eps is None:
        dtype = input.dtype if weight is None else weight.dtype
        eps = torch.finfo(dtype).eps
    return _affine(_divide_by_root(input.settle(), eps), weight, None)


def _read_axes(x: Form, normalized_shape: Any) -> list[int]:
    if isinstance(normalized_shape, int):
        shape = [normalized_shape]
    else:
        shape = list(normalized_shape)
    if shape != list(x.shape[-len(shape) :]):
        raise NoRuleError(f"a normalisation of the axes {tuple(shape)}")
    return shape


def _divide_by_root(y: Form, eps: float) -> Form:
    """Return y / sqrt(mean y^2 + eps), a quotient."""
    square = affine.add(_mean_square(y), eps)
    inverse = curves.relax(square, curves.RSQRT, within=(eps, math.inf))
    inverse = inverse.settle()
    zero = torch.zeros_like(y.centre)
    constant = Form(zero, y.dense[:0], zero, y.symbols)
    return Form.from_quotient(Quotient(y.copy(), inverse, square, constant))


def _mean_square(y: Form) -> Form:
    """Return mean(y^2) = mean(c^2) + 2 mean(c dy) + mean(dy^2)."""
    symbols = y.symbols
    n = y.shape[-1]
    dtype = symbols.dtype
    gradient = (y.centre * (2 / n)).to(dtype)
    dense, blocks = y.by_row().map_rows(lambda t: _total(t * gradient))
    moves = up(y.mass + y.slack)
    size = y.centre.abs()
    middle, radius, kept = _bound_squares(y, moves)
    if symbols.order == 2:
        linear = y.dense[: symbols.n] * kept
        squares = torch.einsum("a...k,c...k->ac...", linear / n, linear)
        dense[symbols.n : symbols.first_error] += symbols.pack(squares)[..., None]
    # Two sums of n products, their weights rounded, and the sum of both.
    centre = _mean(y.centre.square())
    squared_moves = 2 * size * moves + moves.square()
    moving = gamma(2 * n + 16, dtype) * _mean(squared_moves)
    still = gamma(n + 8, DOUBLE) * (centre + middle)
    under = 8 * n * y.count * tiny(dtype) * (1 + size.amax())
    slack = _mean(2 * size * y.slack) + radius
    slack = up(slack + moving + still + under, n + 16)
    return Form(centre + middle, dense, slack, symbols, blocks=blocks)


def _bound_squares(y: Form, moves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return middle and radius of mean(dy^2) without squares that are kept, and which are."""
    n = y.shape[-1]
    linear, rest = lengths(y, -1)
    none = torch.zeros_like(moves, dtype=torch.bool)
    # [0, sum r^2] by entries, or [0, (l + m)^2] by lengths, both over n.
    middle = radius = _mean(moves.square()) / 2
    choices = []
    half = up((linear + rest).square() / n) / 2
    choices.append((half, half, none))
    if y.symbols.order == 2:
        kept = curves.worth_squaring(y)
        first, second = curves.square_remainder(y.sizes.linear, y.nonlinear)
        middles = torch.where(kept, second, moves.square()) / 2
        radii = torch.where(kept, first + second / 2, moves.square() / 2)
        choices.append((_mean(middles), _mean(radii), kept))
        first, second = curves.square_remainder(linear, rest)
        choices.append((second / n / 2, (first + second / 2) / n, ~none))
    kept = none
    for other_middle, other_radius, other_kept in choices:
        better = other_radius < radius
        middle = torch.where(better, other_middle, middle)
        radius = torch.where(better, other_radius, radius)
        kept = torch.where(better, other_kept, kept)
    return middle, up(radius), kept


def _mean(t: Tensor) -> Tensor:
    return t.mean(-1, keepdim=True)


def _affine(x: Form, weight: Tensor | None, bias: Tensor | None) -> Form:
    if weight is not None:
        x = affine.scale(x, weight)
    if bias is not None:
        x = affine.add(x, bias)
    return x


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
    if weight is not None:
        gain = gain * weight.detach().to(DOUBLE)
    shape = (-1, *[1] * (input.ndim - 2))
    centred = affine.sub(input, running_mean.view(shape))
    # The gain takes a sum, a root of the library and a product, all in float64.
    scaled = affine.scale(centred, gain.view(shape), roundings=2 * LIBRARY + 2)
    if bias is None:
        return scaled
    return affine.add(scaled, bias.view(shape))


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
    if weight is not None:
        weight = weight.view(shape)
    if bias is not None:
        bias = bias.view(shape)
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
