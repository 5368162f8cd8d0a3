"""Normalisations: LayerNorm, RMSNorm, over other axes, and by a norm.

With y = x - mean(x) (or y = x), itself a form c + dy, the mean square is mean(c^2) +
2 mean(c dy) + mean(dy^2). n mean(dy^2) lies in [0, sum r^2] and in [0, (l + m)^2] for lengths l
and m of its linear part L and of the rest R (`lengths`). Order 2 can put L^2 into the quadratic
part: 2 L R + R^2 is left, in [-2 l m, 2 l m + m^2]. Every row takes what leaves least. Then comes
1 / sqrt, of a number that is at least eps, and the product.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lipaudit.certify.form import Form, NoRuleError, Quotient, UnboundedError
from lipaudit.certify.lengths import lengths
from lipaudit.certify.rounding import DOUBLE, gamma, tiny, up
from lipaudit.certify.rules.affine import add, linear_map, reduce_axes, scale
from lipaudit.certify.rules.smooth import (
    RSQRT,
    SQRT,
    relax,
    square,
    square_remainder,
    worth_squaring,
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
    centred = linear_map(
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
    square = add(Form(centre + middle, dense, slack, symbols, blocks=blocks), eps)
    inverse = relax(square, RSQRT, floor=eps).settle()
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
        kept = worth_squaring(y)
        first, second = square_remainder(y.sizes.linear, y.nonlinear)
        middle = torch.where(kept, second, moves.square()) / 2
        radius = torch.where(kept, first + second / 2, moves.square() / 2)
        choices.append((_mean(middle), _mean(radius), kept))
        first, second = square_remainder(long, rest)
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
    x = x if weight is None else scale(x, weight)
    return x if bias is None else add(x, bias)


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
    return relax(reduce_axes(square(input), dim, keepdim), SQRT, positive=True)


def normalize(
    input: Form, p: float | int = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Form:
    """Return x / ||x|| along an axis: an RMSNorm over sqrt(n), for norms of more than eps."""
    if p != 2 or out is not None:
        raise NoRuleError(f"normalize by a norm of order {p}")
    rows: Any = input.transpose(dim, -1)
    n = rows.shape[-1]
    low, _ = reduce_axes(square(rows), -1).range()
    if not (low > eps**2).all():  # below it, torch divides by eps
        raise UnboundedError
    unit = scale(rms_norm(rows, n, None, 0.0), n**-0.5, roundings=3)
    return unit.transpose(dim, -1)  # type: ignore[return-value]
