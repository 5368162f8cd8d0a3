"""Softmax rows, exp(s - LSE(s)) with one error symbol a row for the log-sum-exp; and attention.

Let s = c + ds, p = softmax(c), w any weights (p as computed) and d_j = ds_j - w . ds. Constants of
a row cancel: s_j - LSE(s) = c_j - LSE(c) + d_j - rho with rho = log sum_j p_j e^(d_j), exactly.
With |d_j| <= r_j and |sum_j p_j d_j| <= t, which is rounding (below):

Let q = sum p d^2, which is at most Q = min(sum p r^2, (l + m)^2) for the lengths l and m of the
linear part and the rest of sqrt(p) d (`bound_lengths`). (e^x - 1 - x) / x^2 rises with x: with
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
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.wings.certificates import affine, curves
from lipaudit.wings.certificates.form import Form, NoRuleError, UnboundedError
from lipaudit.wings.certificates.symbols import DOUBLE, LIBRARY_ULPS, gamma, round_up
from lipaudit.wings.certificates.vector_lengths import Lengths, bound_lengths

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
    return _apply_along(input, dim, _softmax_rows)


def _softmax_rows(rows: Form) -> Form:
    """Return exp(log softmax) over the last axis, with the range of each weight."""
    log_p, hidden = _log_softmax(rows)
    low, high = _bound_logarithms(log_p, hidden)
    p = curves.relax(log_p, curves.EXP, within=(low, high))
    if hidden.any():
        p = affine.masked_fill(p, hidden, 0.0)
        p.slack = p.slack + _UNDERFLOW * hidden
    # exp is within LIBRARY_ULPS units in the last place, which is twice as many roundings; the
    # product and the sum below are rounded once each.
    error = gamma(2 * LIBRARY_ULPS + 2, DOUBLE)
    low_weight = low.exp() * (1 - error) - _UNDERFLOW
    low_weight = low_weight.clamp_min(0.0).masked_fill(hidden, 0.0)
    high_weight = high.exp() * (1 + error) + _UNDERFLOW
    high_weight = high_weight.clamp_max(1.0).masked_fill(hidden, _UNDERFLOW)
    p.weights = (low_weight, high_weight)
    return p


def log_softmax(
    input: Form, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None
) -> Form:
    """Return the logarithm of the softmax over an axis."""

    def take_rows(rows: Form) -> Form:
        """Return log softmax over the last axis."""
        log_p, hidden = _log_softmax(rows)
        if not hidden.any():
            return log_p
        # Of a key with a negligible weight, too, the logarithm is finite unless a mask hides it.
        log_of_hidden = affine.sub(rows, _log_sum(rows, log_p))
        return affine.where(hidden, log_of_hidden, log_p)

    return _apply_along(input, dim, take_rows)


def logsumexp(input: Form, dim: int | tuple[int, ...], keepdim: bool = False) -> Form:
    """Return log sum_j e^(s_j) over an axis."""
    if isinstance(dim, tuple) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int):
        raise NoRuleError("logsumexp over several axes")
    result: Any = _apply_along(input, dim, lambda rows: _log_sum(rows, _log_softmax(rows)[0]))
    return cast("Form", result if keepdim else result.squeeze(dim))


def _bound_logarithms(log_p: Form, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of log softmax(s)_j: those of its form, or of differences of scores.

    1 / p_j = sum_k e^(s_k - s_j). In s_k - s_j symbols that both scores share count once, so the
    sums of the ends of its terms may be tighter.
    """
    low, high = log_p.range()
    high = high.clamp_max(0.0)
    if log_p.shape[-1] > _MOST_KEYS or not (high - low > _WIDE).any():
        return low, high
    # The ends of 1 / p_j; the logarithms of p differ like the scores.
    low_sum = torch.zeros_like(low)
    high_sum = torch.zeros_like(high)
    for k in range(log_p.shape[-1]):
        key = cast("Form", log_p[..., k : k + 1])
        below, above = affine.sub(key, log_p).range()
        key_hidden = hidden[..., k : k + 1]
        low_sum = low_sum + below.exp().masked_fill(key_hidden, 0.0)
        high_sum = high_sum + above.exp().masked_fill(key_hidden, 0.0)
    # A sum that overflows is no less than the largest number: that of a key far below the others.
    low_sum = low_sum.clamp_max(torch.finfo(DOUBLE).max)
    # The roundings of exp, of the sum, and of the logarithm.
    error = gamma(2 * LIBRARY_ULPS + log_p.shape[-1] + 2, DOUBLE)
    low_sum = (low_sum * (1 - error)).log()
    high_sum = (high_sum * (1 + error)).log()
    low_sum = low_sum - error * low_sum.abs()
    high_sum = high_sum + error * high_sum.abs()
    return torch.maximum(low, -high_sum), torch.minimum(high, -low_sum)


def _log_sum(rows: Form, log_p: Form) -> Form:
    """Return log sum_j e^(s_j) = s_j - log softmax(s)_j, which is the same for every j.

    Taken for the j that is largest at the centre.
    """
    top = rows.centre.argmax(-1, keepdim=True)
    gather = affine.make_rearrangement("gather")
    score = gather(rows, -1, top)
    return affine.sub(score, gather(log_p, -1, top))


def _apply_along(input: Form, dim: int | None, rule: Callable[[Form], Form]) -> Form:
    """Apply a rule of the last axis along another axis."""
    if dim is None:
        raise NoRuleError("softmax without an axis")
    if dim % input.ndim == input.ndim - 1:
        return rule(input)
    transpose = affine.make_rearrangement("transpose")
    result = rule(transpose(input, dim, -1))
    return transpose(result, dim, -1)


class Deviation(NamedTuple):
    """A row of scores around its mean: d_j = ds_j - sum_k p_k ds_k, p = softmax(centre).

    Attributes:
        form: d, a form of centre zero.
        p: the weights, (*shape); the last axis has the keys.
        radius: r, (*shape): |d_j| <= r_j.
        lengths: of sqrt(p) d.
        mean_error: t: |sum_j p_j d_j| <= t, which is rounding alone.
    """

    form: Form
    p: Tensor
    radius: Tensor
    lengths: Lengths
    mean_error: Tensor


def _log_softmax(input: Form) -> tuple[Form, Tensor]:
    """Return log softmax(s) = log softmax(c) + d - rho, and which keys have a negligible weight.

    s = c + ds are the scores, d is ds around its mean, and rho = log sum_j p_j e^(d_j).
    """
    s, hidden = _hide_keys(input.symbolize_slack())
    p = s.centre.softmax(-1)
    # Rounding of p, and of the logarithm: a shift, exp, a sum, a quotient or a logarithm.
    error = gamma(4 * LIBRARY_ULPS + 2 * s.shape[-1], DOUBLE)
    d = _subtract_mean(s, p)
    r = round_up(d.radii.linear + d.nonlinear_radius)
    mean_radius = round_up(_sum_row(p * (s.symbol_radius + s.slack)), s.shape[-1])
    mean_error = round_up(error * (_sum_row(p * r) + mean_radius), s.shape[-1])
    deviation = Deviation(d, p, r, bound_lengths(d, -1, p.sqrt()), mean_error)
    rho = _bound_log_mean(deviation)
    if not torch.isfinite(rho.slack).all():
        raise UnboundedError
    log_p = s.centre.log_softmax(-1).masked_fill(hidden, 0.0)
    size = 1 + log_p.abs() + s.centre.masked_fill(hidden, 0.0).abs()
    slack = round_up(d.slack + error * size)
    shifted = Form(log_p, d.dense, slack, s.symbols, blocks=d.blocks)
    return affine.add(shifted, affine.neg(rho)), hidden


def _bound_log_mean(deviation: Deviation) -> Form:
    """Return rho = log sum_j p_j e^(d_j), one form per row.

    With q = sum p d^2, sum p e^d = 1 + y for y = sum p d + q / 2 + C, where |sum p d| <= t is
    rounding. Here `second` bounds q and `third` bounds |C|; then `top` = t + second / 2 + third
    bounds y.
    """
    d, p, r, lengths, mean_error = deviation
    keys = p.shape[-1]
    squared_length = round_up((lengths.linear + lengths.rest).square())
    squares = p * r.square()
    second = torch.minimum(_sum_row(squares), squared_length)
    second = round_up(second, 4 * LIBRARY_ULPS + keys)
    # C by the largest deviation of each key, or by the largest of all and the length.
    third_by_key = _sum_row(_bound_excess(r) * squares)
    third_by_length = _bound_excess(r.amax(-1, keepdim=True)) * squared_length
    third = torch.minimum(third_by_key, third_by_length)
    third = round_up(third / 2, 8 * LIBRARY_ULPS + keys)
    top = round_up(mean_error + second / 2 + third)
    rho = _bound_log_mean_affine(deviation, top)
    if d.symbols.order == 1:
        return rho
    # At order 2 rho = q / 2 +- error may be closer: in each row the smaller slack is taken.
    error = third + 2 * mean_error + top.square() / 2
    quadratic = _bound_log_mean_quadratic(deviation, error)
    is_better = rho.slack < quadratic.slack
    centre = torch.where(is_better, rho.centre, quadratic.centre)
    slack = torch.minimum(rho.slack, quadratic.slack)
    return Form(centre, quadratic.dense * ~is_better, slack, d.symbols)


def _hide_keys(s: Form) -> tuple[Form, Tensor]:
    """Return scores without keys whose weight is less than e^-1000, and a mask of these keys.

    They are removed with their coefficients and slack: e^-1000 is more than the library tells
    from zero.
    """
    radius = (s.symbol_radius + s.slack).nan_to_num(nan=0.0, posinf=torch.inf)
    radius = radius.masked_fill(s.centre == -torch.inf, 0.0)
    # The largest score of a row is at least this.
    largest = (s.centre - radius).amax(-1, keepdim=True)
    hidden = s.centre + radius < largest - _NEGLIGIBLE
    if hidden.any():
        s = affine.masked_fill(s, hidden, -torch.inf)
    return s, hidden


def _subtract_mean(s: Form, p: Tensor) -> Form:
    """Return d = ds - w . ds, a form of centre zero; w are the weights p, rounded."""
    centred = Form(torch.zeros_like(p), s.dense, s.slack, s.symbols, blocks=s.blocks)
    centred.radii = s.radii
    return affine.linear_map(
        centred,
        lambda t, w: t - _sum_row(t * w),
        p.to(s.symbols.dtype),
        roundings=p.shape[-1] + 2,
        bound=lambda t, w: t + _sum_row(t * w),
        within="rows",
    )


def _bound_excess(r: Tensor) -> Tensor:
    """Return no less than g(r) - 1, where g(r) = 2 (e^r - 1 - r) / r^2 = 1 + r / 3 + r^2 / 12 ...

    Below 0.01, where the formula cancels, that is at most r / 3 (1 + r).
    """
    wide = r.clamp_min(0.01)
    g = 2 * (torch.expm1(wide) - wide) / wide.square()
    of_wide = g - 1 + 1e-9 * g
    of_small = r / 3 * (1 + r)
    return torch.where(r < 0.01, of_small, of_wide)


def _bound_log_mean_affine(deviation: Deviation, top: Tensor) -> Form:
    """Return rho in [-t, high], a centre and slack: high is the least of three bounds.

    They are `top`, that of Hoeffding, t + max(r)^2 / 2, and that by chords of exp, t + log A +
    sum |M_j / A - p_j| r_j with A = sum p cosh r and M_j = p_j sinh(r_j) / r_j.
    """
    d, p, r, _, mean_error = deviation
    keys = p.shape[-1]
    # sinh(r) / r is 1 + r^2 / 6 for small r, to the last place.
    ratio = torch.sinh(r) / r.clamp_min(1e-9)
    m = p * torch.where(r > 1e-6, ratio, 1 + r.square() / 6)
    a = round_up(_sum_row(p * torch.cosh(r)), keys)
    tilted = (m / a - p).abs() + gamma(8 * LIBRARY_ULPS + keys, DOUBLE) * p
    of_keys = round_up(_sum_row(tilted * r), keys)
    by_chords = a.log() + 4 * LIBRARY_ULPS * gamma(1, DOUBLE) + of_keys
    widest = r.amax(-1, keepdim=True)
    hoeffding = round_up(widest.square() / 2)
    high = torch.minimum(torch.minimum(by_chords, hoeffding), top)
    no_rows = d.dense.new_zeros(0, *high.shape)
    return Form(high / 2, no_rows, round_up(high / 2 + mean_error), d.symbols)


def _bound_log_mean_quadratic(deviation: Deviation, error: Tensor) -> Form:
    """Return rho = q / 2 +- error for q = sum p d^2, with squares of linear parts as coefficients.

    With d = L + R: q = sum p L^2 + sum p (2 L R + R^2); the latter is in [-first, first + second].
    """
    d, p, _, lengths, _ = deviation
    symbols = d.symbols
    n = symbols.n
    dtype = symbols.dtype
    keys = p.shape[-1]
    # By entries, or by lengths of the vectors.
    first, second = curves.bound_square_rest(d.radii.linear, d.nonlinear_radius)
    first = _sum_row(p * first)
    second = _sum_row(p * second)
    first_by_length, second_by_length = curves.bound_square_rest(*lengths)
    is_less = first_by_length + second_by_length / 2 < first + second / 2
    first = torch.where(is_less, first_by_length, first)
    second = torch.where(is_less, second_by_length, second)
    slack = first / 2 + second / 4 + error
    # Products, sums and halves of the quadratic part, and p for the true softmax.
    radius = d.radii.linear + d.nonlinear_radius
    rounding = gamma(2 * keys + 4 * LIBRARY_ULPS, dtype) * _sum_row(p * radius.square())
    linear = d.dense[:n]
    half = (p / 2).to(dtype)
    squares = torch.einsum("a...j,c...j->ac...", linear * half, linear)
    coefficients = d.dense.new_zeros(symbols.first_error, *second.shape)
    coefficients[n:] = symbols.pack_quadratic(squares)[..., None]
    slack = round_up(slack + 2 * rounding, keys + 32)
    return Form(second / 4, coefficients, slack, symbols)


def _sum_row(t: Tensor) -> Tensor:
    """Return the sum over the last axis, which stays with size 1."""
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
    query, key = affine.lift_first(value, query, key)
    # Multiply the constant with the form first: a product of constants would be rounded.
    is_query_form = isinstance(query, Form)
    if is_query_form:
        query = query * scale
    scores: Any = query @ key.mT
    if not is_query_form:
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
