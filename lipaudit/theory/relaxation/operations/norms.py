"""Normalisations of the last axis: LayerNorm and RMSNorm.

With y = x - mean(x) (or y = x), itself a form c + dy, the mean square is mean(c^2) +
2 mean(c dy) + mean(dy^2). n mean(dy^2) lies in [0, sum r^2] and in [0, (l + m)^2] for lengths l
and m of its linear part L and of the rest R (`lengths`). Order 2 can put L^2 into the quadratic
part: 2 L R + R^2 is left, in [-2 l m, 2 l m + m^2]. Every row takes what leaves least. Then comes
1 / sqrt, of a number that is at least eps, and the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipaudit.theory.relaxation.form import Form, Quotient
from lipaudit.theory.relaxation.operations.affine import add, linear_map, scaled
from lipaudit.theory.relaxation.operations.lengths import lengths
from lipaudit.theory.relaxation.operations.smooth import RSQRT, relax, square_rest, worth_squaring
from lipaudit.theory.relaxation.refusals import NoRuleError
from lipaudit.theory.relaxation.rounding import DOUBLE, gamma, tiny, up


def layer_norm(
    input: Form,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Form:
    """(x - mean) / sqrt(var + eps) weight + bias."""
    _check(input, normalized_shape)
    return _affine(_unit(_centred(input), eps), weight, bias)


def rms_norm(
    input: Form, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Form:
    """Return x / sqrt(mean x^2 + eps) weight."""
    _check(input, normalized_shape)
    eps = torch.finfo(input.dtype if weight is None else weight.dtype).eps if eps is None else eps
    return _affine(_unit(input.settle(), eps), weight, None)


def _check(x: Form, normalized_shape: Any) -> None:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if shape != [x.shape[-1]]:
        raise NoRuleError(f"a normalisation of the axes {tuple(shape)}")


def _centred(x: Form) -> Form:
    def op(t: Tensor) -> Tensor:
        return t - t.mean(-1, keepdim=True)

    def bound(t: Tensor) -> Tensor:
        return t + t.mean(-1, keepdim=True)

    return linear_map(x.settle(), op, roundings=x.shape[-1] + 2, bound=bound, within="rows")


def _unit(y: Form, eps: float) -> Form:
    square = add(_mean_square(y), eps)
    inverse = relax(square, RSQRT, floor=eps).settle()
    nothing = torch.zeros_like(y.centre)
    constant = Form(nothing, y.dense[:0], nothing, y.symbols)
    return Form.waiting(Quotient(y.copy(), inverse, square, constant))


def _mean_square(y: Form) -> Form:
    symbols, dtype, n = y.symbols, y.symbols.dtype, y.shape[-1]
    centre = _mean(y.centre.square())
    weights = (y.centre * (2 / n)).to(dtype)
    dense, blocks = y.by_row().mapped(lambda t: (t * weights).sum(-1, keepdim=True))
    moves, size = up(y.mass + y.slack), y.centre.abs()
    middle, radius, kept = _square(y, moves)
    if symbols.order == 2:
        e = y.dense[: symbols.n] * kept
        squares = symbols.pack(torch.einsum("a...k,c...k->ac...", e / n, e))
        dense[symbols.n : symbols.first_error] += squares[..., None]
    # Two sums of n products, their weights rounded, and the sum of both.
    moving = gamma(2 * n + 16, dtype) * _mean(2 * size * moves + moves.square())
    still = gamma(n + 8, DOUBLE) * (centre + middle)
    under = 8 * n * y.count * tiny(dtype) * (1 + size.amax())
    slack = up(_mean(2 * size * y.slack) + radius + moving + still + under, n + 16)
    return Form(centre + middle, dense, slack, symbols, blocks=blocks)


def _square(y: Form, moves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return middle and radius of mean(dy^2) without squares that are kept, and which are."""
    n = y.shape[-1]
    long, rest = lengths(y, -1)
    none = torch.zeros_like(moves, dtype=torch.bool)
    wholes = (_mean(moves.square()), up((long + rest).square() / n))
    choices = [(whole / 2, whole / 2, none) for whole in wholes]
    if y.symbols.order == 2:
        kept = worth_squaring(y)
        first, second = square_rest(y.sizes.linear, y.rest)
        middle = torch.where(kept, second, moves.square()) / 2
        radius = torch.where(kept, first + second / 2, moves.square() / 2)
        choices.append((_mean(middle), _mean(radius), kept))
        first, second = square_rest(long, rest)
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
    x = x if weight is None else scaled(x, weight)
    return x if bias is None else add(x, bias)


RULES: dict[str, Callable[..., Any]] = {"rms_norm": rms_norm}
"""What normalisations do to forms."""
