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

from lipaudit.wings.certificates import affine, curves, rearrangements
from lipaudit.wings.certificates.affine import sum_row
from lipaudit.wings.certificates.form import Form, NoRuleError, require_finite
from lipaudit.wings.certificates.rounding import DOUBLE, LIBRARY_ULPS, bound_rounding, round_up
from lipaudit.wings.certificates.symbols import Interval
from lipaudit.wings.certificates.vector_lengths import Lengths, bound_lengths

_MASKED_GAP = 1000.0
_MASKED_WEIGHT = 1e-300
"""Upper bound of a masked weight, e^-1000, and of what exp loses where it underflows to 0."""
_WIDE_RANGE = 1.0
"""Width of a logarithm's range from which differences of scores are looked at: exp bends there."""
_MOST_KEYS = 32
"""Largest number of keys whose differences are looked at: the time grows with their square."""


def softmax(
    input: Form, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None
) -> Form:
    """Bound the softmax over an axis, in place of torch.nn.functional.softmax.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. The form that is returned also stores the lowest and the highest
    value of each softmax weight (`Form.weights`, for an axis that is the last one). A later
    product with values uses these ranges to apply that the weights of a row sum to one.

    Args:
        input: the form of the scores.
        dim: the axis; None has no rule.
        _stacklevel: an argument of torch's softmax; it is ignored.
        dtype: an argument of torch's softmax; it is ignored.
    """
    return _apply_along(input, dim, _softmax_rows)


def _softmax_rows(rows: Form) -> Form:
    """Return the form of the softmax over the last axis, as exp(log softmax(rows)).

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. The attribute `weights` of the result is a second bound: the lowest
    and the highest value of each softmax weight. A product with values uses both.
    """
    log_p, is_masked = _log_softmax(rows)
    low, high = _bound_logarithms(log_p, is_masked)
    p = curves.relax(log_p, curves.EXP, known_range=(low, high))
    # Keys with a weight below e^-1000 are masked: the weight becomes the constant 0, and
    # _MASKED_WEIGHT > e^-1000 becomes slack.
    if is_masked.any():
        p = rearrangements.masked_fill(p, is_masked, 0.0)
        p.slack = p.slack + _MASKED_WEIGHT * is_masked
    # The ends of a weight are exp(low) and exp(high), less and plus rounding: exp is within
    # LIBRARY_ULPS units in the last place (2 roundings each). The product and the sum below have
    # one rounding each. Where exp underflows, it loses less than _MASKED_WEIGHT.
    error = bound_rounding(2 * LIBRARY_ULPS + 2, DOUBLE)
    low_weight = low.exp() * (1 - error) - _MASKED_WEIGHT
    low_weight = low_weight.clamp_min(0.0).masked_fill(is_masked, 0.0)
    high_weight = high.exp() * (1 + error) + _MASKED_WEIGHT
    high_weight = high_weight.clamp_max(1.0).masked_fill(is_masked, _MASKED_WEIGHT)
    p.weights = (low_weight, high_weight)
    return p


def log_softmax(
    input: Form, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None
) -> Form:
    """Return the form of the logarithm of the softmax over an axis; `dtype` changes nothing."""

    def apply_to_rows(rows: Form) -> Form:
        """Return log softmax over the last axis."""
        log_p, is_masked = _log_softmax(rows)
        if not is_masked.any():
            return log_p
        # For keys with a weight below e^-1000, `_log_softmax` returns 0 as a placeholder: a
        # softmax needs no logarithm of them. It is replaced here. The true logarithm is the score
        # minus log-sum-exp: finite unless the score is -inf. `log_p` gives log-sum-exp:
        # score - log p of any key that is not masked.
        log_of_masked = affine.sub(rows, _log_sum(rows, log_p))
        return affine.where(is_masked, log_of_masked, log_p)

    return _apply_along(input, dim, apply_to_rows)


def logsumexp(input: Form, dim: int | tuple[int, ...], keepdim: bool = False) -> Form:
    """Return the form of log sum_j e^(s_j) over one axis of the scores s."""
    if isinstance(dim, tuple) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int):
        raise NoRuleError("logsumexp over several axes")

    def sum_rows(rows: Form) -> Form:
        """Return log sum_j e^(s_j) over the last axis, as an axis of size 1."""
        log_p, _ = _log_softmax(rows)
        return _log_sum(rows, log_p)

    result = _apply_along(input, dim, sum_rows)
    return cast("Form", result if keepdim else result.squeeze(dim))


def _bound_logarithms(log_p: Form, is_masked: Tensor) -> Interval:
    """Return lower and upper bounds of the logarithm of each attention weight, (*shape) each.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack. Two
    bounds are computed, and the tighter is returned for each entry. The first is the range of
    the form log_p. The second is the range of -log sum_k e^(s_k - s_j), another formula for
    log p_j. The second may be tighter: symbols of both scores cancel in the difference s_k - s_j.

    Args:
        log_p: form of log softmax(s) over the last axis, the keys. The difference of two entries
            equals the difference of the two scores.
        is_masked: (*shape), True for keys with a weight below e^-1000. They are left out of the
            sum over k: each adds less than e^-1000 of it, far below its rounding error.
    """
    low, high = log_p.range()
    high = high.clamp_max(0.0)  # a weight is at most 1
    # The second bound takes a form per pair of keys: only for few keys and wide ranges.
    if log_p.shape[-1] > _MOST_KEYS or not (high - low > _WIDE_RANGE).any():
        return low, high
    # Bounds of 1 / p_j = sum_k e^(s_k - s_j), where s_k - s_j = log p_k - log p_j.
    low_sum = torch.zeros_like(low)
    high_sum = torch.zeros_like(high)
    for k in range(log_p.shape[-1]):
        key = cast("Form", log_p[..., k : k + 1])
        below, above = affine.sub(key, log_p).range()
        key_is_masked = is_masked[..., k : k + 1]
        low_sum = low_sum + below.exp().masked_fill(key_is_masked, 0.0)
        high_sum = high_sum + above.exp().masked_fill(key_is_masked, 0.0)
    # The lower bound of the sum may overflow, for a key whose score is far below the scores of
    # the other keys. The largest float64 is then a valid lower bound, too.
    low_sum = low_sum.clamp_max(torch.finfo(DOUBLE).max)
    # Roundings: 2 LIBRARY_ULPS of exp, one per key of the sum, and 2 of the steps below. The
    # logarithm is itself off by at most the same share of its size.
    error = bound_rounding(2 * LIBRARY_ULPS + log_p.shape[-1] + 2, DOUBLE)
    low_sum = (low_sum * (1 - error)).log()
    high_sum = (high_sum * (1 + error)).log()
    low_sum = low_sum - error * low_sum.abs()
    high_sum = high_sum + error * high_sum.abs()
    # log p_j = -log(1 / p_j): the minus makes the upper bound of the sum a lower bound of log p_j.
    return torch.maximum(low, -high_sum), torch.minimum(high, -low_sum)


def _log_sum(rows: Form, log_p: Form) -> Form:
    """Return log sum_j e^(s_j) over the last axis, as an axis of size 1.

    log sum_k e^(s_k) = s_j - log softmax(s)_j for any index j. Here j is the index of the largest
    score at the centre of the ball.

    Args:
        rows: the form of the scores s.
        log_p: the form of log softmax(s).
    """
    top = rows.centre.argmax(-1, keepdim=True)
    return affine.sub(rows.gather(-1, top), log_p.gather(-1, top))


def _apply_along(input: Form, dim: int | None, rule: Callable[[Form], Form]) -> Form:
    """Apply a rule for the last axis, such as a softmax of rows, along the axis `dim`."""
    if dim is None:
        raise NoRuleError("softmax without an axis")
    if dim % input.ndim == input.ndim - 1:
        return rule(input)
    rows: Any = input.transpose(dim, -1)
    result: Any = rule(rows).transpose(dim, -1)
    return cast("Form", result)


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
    """Return the form of log softmax(s) over the last axis, and a mask of negligible keys.

    The scores are s = c + ds, with a centre c. Let p = softmax(c), d_j = ds_j - sum_k p_k ds_k
    (the deviation from the weighted mean), and rho = log sum_j p_j e^(d_j), one number per row.
    Then log softmax(s) = log softmax(c) + d - rho. Keys with a weight below e^-1000 get the
    constant 0 and are True in the mask.
    """
    s, is_masked = _mask_negligible_keys(input.symbolize_slack())
    p = s.centre.softmax(-1)
    # The relative rounding error of softmax and log softmax in float64. exp and the logarithm have
    # 2 LIBRARY_ULPS roundings each. The sum over the keys, the shift by the largest score, and the
    # quotient have at most 2 per key.
    error = bound_rounding(4 * LIBRARY_ULPS + 2 * s.shape[-1], DOUBLE)
    deviation = _describe_deviation(s, p, error)
    d = deviation.form
    rho = _bound_log_mean(deviation)
    require_finite(rho.slack)
    # log softmax(c) + d; the slack also covers the rounding of log softmax(c). This is a share of
    # the sizes of the score, of its logarithm, and of 1: the logarithm of p near 1 is near 0.
    log_p = s.centre.log_softmax(-1).masked_fill(is_masked, 0.0)
    size = 1 + log_p.abs() + s.centre.masked_fill(is_masked, 0.0).abs()
    slack = round_up(d.slack + error * size)
    shifted = d.with_bounds(log_p, slack)
    return affine.add(shifted, affine.neg(rho)), is_masked


def _describe_deviation(s: Form, p: Tensor, error: float) -> Deviation:
    """Return the deviations of scores s from their weighted mean in each row, and their bounds.

    Args:
        s: the scores, (*rows, keys).
        p: their softmax weights.
        error: the relative rounding error of p.
    """
    keys = s.shape[-1]
    d = _subtract_mean(s, p)
    r = round_up(d.radii.linear + d.nonlinear_radius)  # |d_j| <= r_j on the ball
    # With d_j = ds_j - p . ds and the exact softmax q, sum_j q_j d_j = 0 if p is q. But p is
    # rounded: the sum is (q - p) . d + (1 - sum p) p . ds. As |q_j - p_j| <= error p_j, the first
    # term is at most error sum p r. As |1 - sum p| <= error, the second is at most error times the
    # radius of the mean p . ds.
    mean_radius = round_up(sum_row(p * s.radius), roundings=keys)
    return Deviation(
        form=d,
        p=p,
        radius=r,
        lengths=bound_lengths(d, axis=-1, weight=p.sqrt()),  # of sqrt(p) d
        mean_error=round_up(error * (sum_row(p * r) + mean_radius), roundings=keys),
    )


def _bound_log_mean(deviation: Deviation) -> Form:
    """Return the form of rho = log sum_j p_j e^(d_j), one number near 0 per row.

    p are softmax weights, and d_j is the deviation of score j from the weighted mean of its row.
    By Taylor, sum p e^d = 1 + y with y = sum p d + q / 2 + C and q = sum p d^2. The first term is
    only rounding (`mean_error`), and C is the sum of all terms from the third order on. Below,
    `second` bounds q, `third` bounds |C|, and `top` bounds y.
    """
    symbols = deviation.form.symbols
    mean_error = deviation.mean_error
    second, third = _bound_taylor_terms(deviation)
    top = round_up(mean_error + second / 2 + third)
    rho = _bound_log_mean_order1(deviation, top)
    if symbols.order == 1:
        return rho
    # At order 2 (forms with products of symbols) rho = q / 2 +- error may be tighter. With
    # t = mean_error, y is in q / 2 +- (t + third), and rho = log(1 + y) in [y - y^2 / 2 - t, y]:
    # y >= -t, as e^d >= 1 + d, and for y < 0 log(1 + y) is below y - y^2 / 2 by far less than t.
    # So rho - q / 2 is at least -(t + third) - top^2 / 2 - t, and at most t + third.
    error = third + 2 * mean_error + top.square() / 2
    quadratic = _bound_log_mean_order2(deviation, error)
    # Each row takes the form with the smaller slack. `rho` is a constant: in its rows the
    # coefficients are 0.
    is_better = rho.slack < quadratic.slack
    centre = torch.where(is_better, rho.centre, quadratic.centre)
    slack = torch.minimum(rho.slack, quadratic.slack)
    return Form(centre, quadratic.dense * ~is_better, slack, symbols)


def _bound_taylor_terms(deviation: Deviation) -> tuple[Tensor, Tensor]:
    """Return bounds of q = sum p d^2 and of |C| in each row, (*rows, 1) each.

    p are softmax weights, and d_j is the deviation of score j from the weighted mean of its row.
    C is the sum of all terms from the third order on in Taylor's formula
    sum p e^d = 1 + sum p d + q / 2 + C.
    """
    _, p, r, lengths, _ = deviation
    keys = p.shape[-1]
    squared_length = round_up((lengths.linear + lengths.rest).square())  # of sqrt(p) d
    squares = p * r.square()
    second = torch.minimum(sum_row(squares), squared_length)
    # Roundings: one per key, and 2 LIBRARY_ULPS for each function of the library: exp of a key and
    # of all keys, in the softmax p.
    second = round_up(second, roundings=4 * LIBRARY_ULPS + keys)
    # Two bounds of C: by the largest deviation r_j of each key, or by the largest deviation of all
    # keys and the length of the vector sqrt(p) d. The smaller bound is taken. `_bound_excess`
    # bounds the share of d^2 / 2 by which e^d leaves 1 + d + d^2 / 2.
    third_by_key = sum_row(_bound_excess(r) * squares)
    third_by_length = _bound_excess(r.amax(-1, keepdim=True)) * squared_length
    third = torch.minimum(third_by_key, third_by_length)
    # Roundings: as above, and one more function, expm1 in `_bound_excess`; 2 LIBRARY_ULPS more
    # leave room.
    third = round_up(third / 2, roundings=8 * LIBRARY_ULPS + keys)
    return second, third


def _mask_negligible_keys(s: Form) -> tuple[Form, Tensor]:
    """Return scores in which keys with a weight below e^-1000 are -inf, and a mask of these keys.

    The scores s are a form: centre + coefficients . symbols +- slack, for all inputs of a ball. A
    weight below e^-1000 is 0 in float64. A key with the constant score -inf has no coefficients
    and no slack, so errors of its score do not widen the other bounds.
    """
    # A mask of the model makes scores of -inf. Their radius may be NaN or inf and is set to 0.
    radius = s.radius.nan_to_num(nan=0.0, posinf=torch.inf)
    radius = radius.masked_fill(s.centre == -torch.inf, 0.0)
    # A lower bound of the largest score of each row.
    largest = (s.centre - radius).amax(-1, keepdim=True)
    is_masked = s.centre + radius < largest - _MASKED_GAP
    if is_masked.any():
        s = rearrangements.masked_fill(s, is_masked, -torch.inf)
    return s, is_masked


def _subtract_mean(s: Form, p: Tensor) -> Form:
    """Return the form of the deviations d = ds - sum_k p_k ds_k over the last axis.

    The scores are s = c + ds with centre c, so the form of d has centre zero. p are the softmax
    weights.
    """
    return affine.linear_map(
        s.with_bounds(centre=torch.zeros_like(p), slack=s.slack),  # ds
        lambda t, w: t - sum_row(t * w),
        p,
        # The cast of p, a product, its sum over the keys (keys - 1), and a difference.
        roundings=p.shape[-1] + 2,
        # How slack grows. An entry 1 - p_j of the map has an absolute value of at most 1 + p_j.
        absolute_op=lambda t, w: t + sum_row(t * w),
        mixes="rows",
    )


def _bound_excess(r: Tensor) -> Tensor:
    """Return an upper bound of g(r) - 1 for r >= 0, where g(r) = 2 (e^r - 1 - r) / r^2.

    g(r) - 1 bounds the distance of e^d from 1 + d + d^2 / 2 on [-r, r], as a share of d^2 / 2.
    Its series is r / 3 + r^2 / 12 + ... Below r = 0.01 the formula cancels digits, so the larger
    r / 3 (1 + r) is returned.
    """
    wide = r.clamp_min(0.01)
    g = 2 * (torch.expm1(wide) - wide) / wide.square()
    # From r = 0.01 on, the difference is rounded by far less than 1e-9 of g.
    of_wide = g - 1 + 1e-9 * g
    of_small = r / 3 * (1 + r)
    return torch.where(r < 0.01, of_small, of_wide)


def _bound_log_mean_order1(deviation: Deviation, top: Tensor) -> Form:
    """Bound rho = log sum_j p_j e^(d_j) by a constant +- slack, one per row.

    p are softmax weights, and d_j is the deviation of score j from the weighted mean of its row.
    |d_j| <= r_j (the radius), and |sum p d| <= t (`mean_error`, rounding only). By Jensen's
    inequality rho >= sum p d >= -t. The upper end is the least of three bounds of rho: `top` by
    Taylor's formula, Hoeffding's, and one by chords of exp.

    Args:
        deviation: d, p, r and t of the rows.
        top: (*rows, 1), an upper bound of sum p e^d - 1, and so of rho.
    """
    d, p, r, _, mean_error = deviation
    # Hoeffding's lemma: for d in [-w, w] with mean 0, log of the mean of e^d is at most
    # (2 w)^2 / 8 = w^2 / 2.
    widest = r.amax(-1, keepdim=True)
    hoeffding = round_up(widest.square() / 2)
    high = torch.minimum(torch.minimum(_bound_by_chords(p, r), hoeffding), top)
    no_rows = d.dense.new_zeros(0, *high.shape)  # no coefficients
    # Chords and Hoeffding assume sum p d = 0, so t is added to `high`. (`top` contains t already.)
    # rho is in [-t, high + t], which is high / 2 +- (high / 2 + t).
    return Form(high / 2, no_rows, round_up(high / 2 + mean_error), d.symbols)


def _bound_by_chords(p: Tensor, r: Tensor) -> Tensor:
    """Return an upper bound of log sum_j p_j e^(d_j) for |d_j| <= r_j and sum_j p_j d_j = 0.

    On [-r, r] exp is below its chord: e^d <= cosh r + d sinh(r) / r. Let A = sum p cosh r and
    M_j = p_j sinh(r_j) / r_j. Then the sum is at most A + sum_j M_j d_j. The logarithm is below
    its tangent at A, so it is at most log A + sum_j (M_j / A) d_j. sum_j p_j d_j = 0 may be
    subtracted, so that the factors are small: log A + sum_j |M_j / A - p_j| r_j is the bound.

    Args:
        p: weights of the keys, (*rows, keys), which sum to one in each row.
        r: bounds of |d|, (*rows, keys).
    """
    keys = p.shape[-1]
    # For r > 710 cosh and sinh are inf, and the result is NaN: the caller refuses such a ball.
    # M. For small r, sinh(r) / r is 1 + r^2 / 6 to the last place. (The clamp keeps the ratio that
    # is not taken from being 0 / 0.)
    ratio = torch.sinh(r) / r.clamp_min(1e-9)
    m = p * torch.where(r > 1e-6, ratio, 1 + r.square() / 6)
    # A. The error of cosh is a share of A, so it is added to log A below.
    a = round_up(sum_row(p * torch.cosh(r)), roundings=keys)
    # |M / A - p|, and its rounding, a share of the larger one. 2 LIBRARY_ULPS roundings each have
    # sinh in M, cosh in A, and two exp in the softmax p (of a key and of all keys); a sum has one
    # per key.
    tilt = m / a
    rounding = bound_rounding(8 * LIBRARY_ULPS + keys, DOUBLE)
    slope = (tilt - p).abs() + rounding * torch.maximum(tilt, p)
    of_keys = round_up(sum_row(slope * r), roundings=keys)
    # The errors of cosh and of log, 2 LIBRARY_ULPS roundings each.
    of_library = 4 * LIBRARY_ULPS * bound_rounding(1, DOUBLE)
    return a.log() + of_library + of_keys


def _bound_log_mean_order2(deviation: Deviation, error: Tensor) -> Form:
    """Return the form of rho = log sum_j p_j e^(d_j) per row, as q / 2 +- error; for order 2.

    rho is how far the logarithm of the sum in a softmax moves on the ball, one number per row.
    q = sum p d^2: p are softmax weights, and d_j is the deviation of score j from the weighted
    mean of its row. With d = L + R, where L is linear in the input symbols and R is the rest,
    q = sum p L^2 + sum p (2 L R + R^2). At order 2 a form has coefficients of products of two
    input symbols: sum p L^2 is written with them. The other sum is in [-cross, cross + square],
    where `cross` bounds |sum p 2 L R| and `square` bounds sum p R^2. This interval is
    square / 2 +- (cross + square / 2). Half of q, with the error, is therefore
    rho = 1/2 sum p L^2 + square / 4 +- (cross / 2 + square / 4 + error).

    Args:
        deviation: d, p and the lengths of sqrt(p) L and sqrt(p) R.
        error: (*rows, 1), a bound of |rho - q / 2|.
    """
    d, p, _, lengths, _ = deviation
    symbols = d.symbols
    n = symbols.inputs
    dtype = symbols.dtype
    keys = p.shape[-1]
    cross, square = _bound_rest_of_squares(d, p, lengths)
    slack = cross / 2 + square / 4 + error
    # Rounding as a share of sum p d^2: sums over the keys, in the coefficients and in the softmax
    # p, and two exp in p, 2 LIBRARY_ULPS roundings each.
    radius = d.radii.linear + d.nonlinear_radius
    rounding = bound_rounding(2 * keys + 4 * LIBRARY_ULPS, dtype) * sum_row(p * radius.square())
    # 1/2 sum p L^2, (symbols, *rows, 1): products of two input symbols, and 0 for input symbols.
    linear = d.dense[:n]  # the coefficients of L, (inputs, *rows, keys)
    half = (p / 2).to(dtype)
    coefficients = d.dense.new_zeros(symbols.first_error, *square.shape)
    coefficients[n:] = symbols.sum_products(linear * half, linear)
    # `rounding` counts twice: for the coefficients of products, and for p, which is not exactly
    # the softmax. The slack itself is rounded, too: sums over the keys, and fewer than 32 single
    # steps.
    slack = round_up(slack + 2 * rounding, roundings=keys + 32)
    return Form(square / 4, coefficients, slack, symbols)


def _bound_rest_of_squares(d: Form, p: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Return bounds of |sum p 2 L R| and of sum p R^2 in each row of d = L + R, (*rows, 1) each.

    L is linear in the input symbols and R is the rest. There are two pairs of bounds: by the radii
    of L and R at each key; or by the lengths of vectors, because
    |sum p L R| <= ||sqrt(p) L|| ||sqrt(p) R|| (Cauchy-Schwarz).

    Args:
        d: the deviations of scores from their mean, (*rows, keys).
        p: the weights of the keys, (*rows, keys).
        lengths: bounds of ||sqrt(p) L|| and ||sqrt(p) R||.
    """
    cross_by_key, square_by_key = curves.bound_square_rest(d.radii.linear, d.nonlinear_radius)
    cross = sum_row(p * cross_by_key)
    square = sum_row(p * square_by_key)
    cross_by_length, square_by_length = curves.bound_square_rest(*lengths)
    # 2 L R + R^2 is in [-cross, cross + square], with the radius cross + square / 2. Each row
    # takes the pair with the smaller radius.
    is_less = cross_by_length + square_by_length / 2 < cross + square / 2
    cross = torch.where(is_less, cross_by_length, cross)
    square = torch.where(is_less, square_by_length, square)
    return cross, square


def _compute_scores(query: Any, key: Any, scale: float) -> Any:
    """Return the form of scale q k^T, where q or k is a form.

    The scale is multiplied with a form, either q or the scores. The product with a constant q
    would be rounded, and a constant has no slack for the rounding error.
    """
    if isinstance(query, Form):
        return (query * scale) @ key.mT
    return (query @ key.mT) * scale


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
    """Bound softmax(scale q k^T + mask) v, in place of torch's function of this name.

    At least one of q, k and v is a form: bounds of a tensor over all inputs of a ball. With
    `enable_gqa` several heads of q share a head of k and v, so k and v are repeated.
    """
    if dropout_p > 0:
        raise NoRuleError("scaled_dot_product_attention with dropout")
    if enable_gqa:
        heads = query.shape[-3]
        key = key.repeat_interleave(heads // key.shape[-3], -3)
        value = value.repeat_interleave(heads // value.shape[-3], -3)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if is_causal:
        attn_mask = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=value.device
        ).tril()
    # If only v depends on the input, q and k are constants, and their product is rounded. q is
    # then made a form, whose slack can hold the rounding error.
    query, key = rearrangements.lift_first_constant(value, query, key)
    scores = _compute_scores(query, key, scale)
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
