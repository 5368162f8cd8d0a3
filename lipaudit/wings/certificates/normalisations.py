"""Normalisations: LayerNorm, RMSNorm, over other axes, and by a norm.

With y = x - mean(x) (or y = x), itself a form c + dy, the mean square is mean(c^2) +
2 mean(c dy) + mean(dy^2). n mean(dy^2) lies in [0, sum r^2] and in [0, (l + m)^2] for lengths l
and m of its linear part L and of the rest R (`bound_lengths`). Order 2 can put L^2 into the
quadratic part: 2 L R + R^2 is left, in [-2 l m, 2 l m + m^2]. Every row takes what leaves least.
Then comes 1 / sqrt, of a number that is at least eps, and the product.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipaudit.wings.certificates import affine, curves
from lipaudit.wings.certificates.form import Form, NoRuleError, Quotient, UnboundedError
from lipaudit.wings.certificates.rounding import (
    DOUBLE,
    LIBRARY_ULPS,
    bound_rounding,
    round_up,
    tiny,
)
from lipaudit.wings.certificates.vector_lengths import Lengths, bound_lengths


def layer_norm(
    input: Form,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Form:
    """Return LayerNorm of a form: (x - mean) / sqrt(var + eps) weight + bias.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1].
    """
    shape = _read_shape(input, normalized_shape)
    rows: Any = input
    if len(shape) > 1:  # several last axes become one
        rows = input.flatten(-len(shape))
    # x - mean(x) is a linear map that mixes the entries of a row. Slack would add up in absolute
    # value: so it is turned into error symbols first, whose coefficients can cancel.
    centred = affine.linear_map(
        rows.symbolize_slack(),
        lambda t: t - _average_row(t),
        # An entry of the result is a sum over the row, divided, and one difference.
        roundings=math.prod(shape) + 2,
        # The same map with the absolute values of its entries: it bounds how slack grows.
        absolute_op=lambda t: t + _average_row(t),
        mixes="rows",
    )
    result: Any = _divide_by_root(centred, eps)
    if len(shape) > 1:
        result = result.unflatten(-1, shape)
    return _apply_affine(result, weight, bias)


def rms_norm(
    input: Form, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Form:
    """Return RMSNorm of a form: x / sqrt(mean x^2 + eps) weight.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1].
    """
    if len(_read_shape(input, normalized_shape)) > 1:
        raise NoRuleError(f"a normalisation of the axes {tuple(normalized_shape)}")
    if eps is None:  # as in torch
        dtype = input.dtype if weight is None else weight.dtype
        eps = torch.finfo(dtype).eps
    return _apply_affine(_divide_by_root(input.symbolize_slack(), eps), weight, bias=None)


def _read_shape(x: Form, normalized_shape: Any) -> list[int]:
    """Return `normalized_shape` as a list; refuse it if it is not the shape of the last axes."""
    if isinstance(normalized_shape, int):
        shape = [normalized_shape]
    else:
        shape = list(normalized_shape)
    if shape != list(x.shape[-len(shape) :]):
        raise NoRuleError(f"a normalisation of the axes {tuple(shape)}")
    return shape


def _divide_by_root(y: Form, eps: float) -> Form:
    """Return y / sqrt(mean y^2 + eps) over the last axis, as a pending quotient.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. A pending quotient stores its factors, and computes the product
    when its numbers are needed. Until then, weights that follow act on the numerator alone, and
    the bounds are tighter. The factors are:

    * the numerator y and the inverse 1 / root.
    * root^2, a form. A margin of logits is numerator / root + constant, and positive if numerator
      + root constant is: `prove.margins` can so leave out the division, with a root from root^2.
    * a constant, at first 0. Biases that follow are added to it.
    """
    square = affine.add(_mean_square(y), eps)
    # A mean of squares is >= 0, even if the range of its form begins below 0.
    inverse = curves.relax(square, curves.RSQRT, known_range=(eps, math.inf))
    # All entries of a row share the error of their root: a symbol keeps this fact.
    inverse = inverse.symbolize_slack()
    zero = torch.zeros_like(y.centre)
    # `y.dense[:0]` has no rows: a constant depends on no symbol.
    constant = Form(zero, y.dense[:0], zero, y.symbols)
    return Form.from_quotient(
        Quotient(numerator=y.copy(), inverse=inverse, square=square, constant=constant)
    )


def _mean_square(y: Form) -> Form:
    """Return the form of mean(y^2) over the last axis, as an axis of size 1.

    With y = c + dy and centre c, the mean is mean(c^2) + 2 mean(c dy) + mean(dy^2). The first term
    is a constant, and the second is linear in the symbols. The third is bounded by slack; at
    order 2 squares of the linear part may be kept as coefficients.
    """
    symbols = y.symbols
    n = y.shape[-1]
    # mean(c^2)
    centre = _average_row(y.centre.square())
    # 2 mean(c dy) is linear in dy: its coefficients. The mean mixes entries of a row, which blocks
    # allow after `split_by_row`. `_add_square_rounding` counts the cast of the gradient, too.
    gradient = (y.centre * (2 / n)).to(symbols.dtype)
    dense, blocks = y.split_by_row().map_coefficients(
        lambda t: (t * gradient).sum(-1, keepdim=True)
    )
    # mean(dy^2): coefficients of products for the squares that are kept, and shift +- radius.
    y_radius = round_up(y.radius)
    shift, radius, keeps_squares = _bound_squares(y, y_radius)
    if symbols.order == 2:
        linear = y.dense[: symbols.inputs] * keeps_squares
        products = symbols.sum_products(linear / n, linear)
        dense[symbols.inputs : symbols.first_error] += products
    centre = centre + shift
    # The slack of 2 mean(c dy), and the radius of mean(dy^2).
    slack = _average_row(2 * y.centre.abs() * y.slack) + radius
    slack = _add_square_rounding(slack, y, y_radius, centre)
    return Form(centre, dense, slack, symbols, blocks=blocks)


def _add_square_rounding(slack: Tensor, y: Form, y_radius: Tensor, centre: Tensor) -> Tensor:
    """Return the slack of mean(y^2) plus bounds of all rounding errors of its computation.

    Args:
        slack: (*rows, 1), without rounding.
        y: the form whose squares are averaged, (*rows, n).
        y_radius: how far y is from its centre, (*rows, n).
        centre: centre of the result, (*rows, 1).
    """
    n = y.shape[-1]
    dtype = y.symbols.dtype
    y_size = y.centre.abs()
    # Coefficients, in their dtype: of 2 mean(c dy) and, at order 2, of kept squares, mean(L^2).
    # Each is a sum of n products with rounded factors, and both are added; 16 leaves room.
    radius_of_square = 2 * y_size * y_radius + y_radius.square()
    of_symbols = bound_rounding(2 * n + 16, dtype) * _average_row(radius_of_square)
    # The centre, in float64: a sum of n squares, and the shift; 8 leaves room.
    of_centre = bound_rounding(n + 8, DOUBLE) * centre
    # Underflow: a coefficient has fewer than 8 n products, some with an entry of c as a factor.
    underflow = 8 * n * y.symbol_count * tiny(dtype) * (1 + y_size.amax())
    # The slack itself is rounded, too: a mean of n terms, and fewer than 16 single steps.
    return round_up(slack + of_symbols + of_centre + underflow, roundings=n + 16)


class SquareBound(NamedTuple):
    """A bound of mean(dy^2) in each row: squares kept as coefficients, plus shift +- radius.

    Attributes:
        shift, radius: (*rows, 1).
        keeps_squares: (*shape), True for entries whose squared linear part has coefficients.
    """

    shift: Tensor
    radius: Tensor
    keeps_squares: Tensor


def _bound_squares(y: Form, reach: Tensor) -> SquareBound:
    """Bound mean(dy^2) over the last axis, in each row by the tightest of two or four bounds.

    y is a form: centre c + coefficients . symbols (unknowns in [-1, 1]) +- slack. A row of it is
    c + dy with dy = L + R, where L is linear in the input symbols and R is the rest.
    The bounds are |dy| <= reach in each entry, and ||L|| <= l and ||R|| <= m for the row. So the
    sum of dy^2 is in [0, sum reach^2] and in [0, (l + m)^2]. Order 2 has two more bounds, which
    keep L^2 as coefficients (`_bound_with_squares`).
    """
    lengths = bound_lengths(y, axis=-1)  # l and m
    keeps_none = torch.zeros_like(reach, dtype=torch.bool)
    # Two bounds without squares: by entries, [0, sum reach^2], and by lengths, [0, (l + m)^2].
    # [0, 2 h] is h +- h, so half of the upper end is both shift and radius.
    by_entries = _average_row(reach.square()) / 2
    by_lengths = round_up((lengths.linear + lengths.rest).square() / y.shape[-1]) / 2
    choices = [
        SquareBound(shift=by_entries, radius=by_entries, keeps_squares=keeps_none),
        SquareBound(shift=by_lengths, radius=by_lengths, keeps_squares=keeps_none),
    ]
    if y.symbols.order == 2:
        choices += _bound_with_squares(y, reach, lengths)
    # Each row takes the bound with the smallest radius.
    shift, radius, keeps_squares = choices[0]
    for choice in choices[1:]:
        is_better = choice.radius < radius
        shift = torch.where(is_better, choice.shift, shift)
        radius = torch.where(is_better, choice.radius, radius)
        keeps_squares = torch.where(is_better, choice.keeps_squares, keeps_squares)
    return SquareBound(shift, round_up(radius), keeps_squares)


def _bound_with_squares(y: Form, reach: Tensor, lengths: Lengths) -> list[SquareBound]:
    """Return two bounds of mean(dy^2) in each row that keep squares as coefficients; for order 2.

    A row of the form y is c + dy with dy = L + R, where L is linear in the input symbols and R is
    the rest. Coefficients hold L^2. What is left, (L + R)^2 - L^2 = 2 L R + R^2, is in
    [-cross, cross + square], that is, square / 2 +- (cross + square / 2).

    Args:
        y: the form.
        reach: (*shape), |dy| <= reach.
        lengths: bounds of ||L|| and ||R|| of each row.
    """
    n = y.shape[-1]
    # By entries: L^2 is kept where that pays off. In other entries dy^2 is in [0, reach^2].
    keeps = curves.is_worth_squaring(y)
    cross, square = curves.bound_square_rest(y.radii.linear, y.nonlinear_radius)
    shift = torch.where(keeps, square, reach.square()) / 2
    radius = torch.where(keeps, cross + square / 2, reach.square() / 2)
    by_entries = SquareBound(_average_row(shift), _average_row(radius), keeps)
    # By lengths: L^2 is kept in all entries.
    cross, square = curves.bound_square_rest(*lengths)
    by_lengths = SquareBound(
        shift=square / n / 2,
        radius=(cross + square / 2) / n,
        keeps_squares=torch.ones_like(keeps),
    )
    return [by_entries, by_lengths]


def _average_row(t: Tensor) -> Tensor:
    """Return the mean over the last axis, as an axis of size 1."""
    return t.mean(-1, keepdim=True)


def _apply_affine(x: Form, weight: Tensor | None, bias: Tensor | None) -> Form:
    """Return x weight + bias, the last step of a normalisation; both are optional."""
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
    """Return BatchNorm of a form in eval mode, with running statistics per channel (axis 1).

    The result (x - mean) / sqrt(var + eps) weight + bias is an affine map of x.
    """
    if training or running_mean is None or running_var is None:
        raise NoRuleError("batch_norm with statistics of the batch (call eval() first)")
    gain = (running_var.to(DOUBLE) + eps).rsqrt()
    if weight is not None:
        gain = gain * weight.detach().to(DOUBLE)
    shape = (-1, *[1] * (input.ndim - 2))  # (channels, 1, 1, ...), to broadcast against the input
    centred = affine.sub(input, running_mean.view(shape))
    # Roundings of the gain, all in float64: a sum, the library's root and a product.
    scaled = affine.scale(centred, gain.view(shape), roundings=2 * LIBRARY_ULPS + 2)
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
    """Return GroupNorm of a form: LayerNorm over each group of channels and all pixels.

    Channels are axis 1; weight and bias have an entry per channel.
    """
    groups: Any = input.reshape(input.shape[0], num_groups, -1)
    result: Any = layer_norm(groups, groups.shape[-1], eps=eps).reshape(input.shape)
    shape = (-1, *[1] * (input.ndim - 2))  # (channels, 1, 1, ...), to broadcast against the input
    if weight is not None:
        weight = weight.view(shape)
    if bias is not None:
        bias = bias.view(shape)
    return _apply_affine(result, weight, bias)


def vector_norm(
    input: Form, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Form:
    """Return the 2-norm of a form over axes; the sum of squares must be > 0 on the ball."""
    if ord not in (2, "fro", None):
        raise NoRuleError(f"a norm of order {ord}")
    total = affine.reduce_axes(curves.square(input), dim, keepdim)
    return curves.relax(total, curves.SQRT, positive=True)


def normalize(
    input: Form, p: float | int = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Form:
    """Return F.normalize of a form: x / ||x|| along an axis, computed as RMSNorm(x) / sqrt(n).

    Where ||x|| < eps, torch divides by eps. So the form is refused if ||x|| may be eps or less.
    """
    if p != 2 or out is not None:
        raise NoRuleError(f"normalize by a norm of order {p}")
    rows: Any = input.transpose(dim, -1)
    n = rows.shape[-1]
    smallest_square, _ = affine.reduce_axes(curves.square(rows), dim=-1).range()
    if not (smallest_square > eps**2).all():
        raise UnboundedError
    # Roundings of 1 / sqrt(n): two for the power in float64, and one for its cast.
    unit = affine.scale(rms_norm(rows, n, eps=0.0), n**-0.5, roundings=3)
    return unit.transpose(dim, -1)  # type: ignore[return-value]
