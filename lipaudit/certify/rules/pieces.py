"""Piecewise linear functions, built from the ReLU h = a z + m (1 + eps): branching covers all.

On l < 0 < u, with a = u / (u - l), a z <= relu(z) <= a z + 2 m for m = -a l / 2: below, z >= 0
gives (a - 1) z <= 0 and z <= 0 gives a z <= 0; the line above through both ends is the chord of a
convex function. For a rounded a in [0, 1] the largest relu(z) - a z is at an end:
2 m = max(-a l, (1 - a) u). The symbol eps is defined by the equation: on z >= 0 and z <= 0 apart,
h is z and 0, and what the equation then says of eps is used (`branch`). So eps takes no slack in.

max(x, y) = y + r(x - y); a leaky ReLU is s x + (1 - s) r(x), and |x| that with s = -1; x held to
[lo, hi] is lo + r(x - lo) - r(x - hi).

The largest of many: for any entry i, max_j x_j - x_i = max_j r(x_j - x_i) lies in [0, h] with h
the largest end of a difference x_j - x_i. i is the largest at the centre. Where it is the largest
on the whole ball, h = 0 and nothing is lost.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.certify.form import Form, NoRuleError, UnboundedError
from lipaudit.certify.rounding import DOUBLE, cast_up, gamma, tiny, up
from lipaudit.certify.rules.affine import add, as_pair, neg, scale, sub
from lipaudit.certify.rules.bilinear import div, mul
from lipaudit.certify.rules.moves import make_move
from lipaudit.certify.symbols import Unit


def relu(input: Form, inplace: bool = False) -> Form:
    """max(x, 0), with one symbol for every entry that may have both signs."""
    symbols, dtype = input.symbols, input.symbols.dtype
    low, high = input.range()
    if not (torch.isfinite(low) & torch.isfinite(high)).all():
        raise UnboundedError
    mixed = (low < 0) & (high > 0)
    share = (high / (high - low)).to(dtype).to(DOUBLE).clamp(0, 1)
    a = torch.where(mixed, share, (low >= 0).to(DOUBLE))
    m = cast_up(up(torch.maximum(-a * low, (1 - a) * high) / 2) * mixed, dtype)
    mixed, share = m > 0, a.to(dtype)
    dense, blocks = input.map_rows(lambda t: t * share)
    if mixed.any():  # an empty block of errors would share its key with the next one
        errors = symbols.birth(m)
        blocks = [*blocks, errors]
        symbols.units.append(
            Unit(
                input.centre[mixed],
                input.columns(mixed),
                input.slack[mixed],
                a[mixed],
                m[mixed].to(DOUBLE),
                errors.key,
            )
        )
    centre = a * input.centre + m
    lost = gamma(2, DOUBLE) * (centre.abs() + m) + gamma(1, dtype) * a * input.mass * mixed
    slack = up(a * input.slack + lost + symbols.count * tiny(dtype) * mixed)
    return Form(centre, dense, slack, symbols, blocks=blocks)


def leaky_relu(input: Form, negative_slope: Any = 0.01, inplace: bool = False) -> Form:
    """Return x where x > 0, else s x; the slope s may be a tensor of constants."""
    # In float64, so that 1 - s has the smallest possible rounding error.
    s = torch.as_tensor(negative_slope, dtype=DOUBLE, device=input.device)
    return add(scale(input, s), scale(relu(input), 1 - s, roundings=2))


def prelu(input: Form, weight: Tensor) -> Form:
    """Return a leaky ReLU with a slope per channel (axis 1)."""
    shape = [1] * (input.ndim - 2) if input.ndim > 1 and weight.numel() > 1 else []
    return leaky_relu(input, weight.view(-1, *shape))


def maximum(input: Any, other: Any) -> Form:
    """Return the larger of two, entry by entry."""
    return add(other, relu(sub(input, other)))


def minimum(input: Any, other: Any) -> Form:
    """Return the smaller of two, entry by entry."""
    return sub(input, relu(sub(input, other)))


def clamp(input: Form, min: Any = None, max: Any = None) -> Form:  # noqa: A002
    """Return x clamped to [min, max]; as in torch, max if max < min."""
    held = input if min is None else maximum(input, min)
    return held if max is None else minimum(held, max)


def hardsigmoid(input: Form, inplace: bool = False) -> Form:
    """(x + 3) / 6 held to [0, 1]."""
    return div(clamp(add(input, 3.0), 0.0, 6.0), 6.0)


def hardswish(input: Form, inplace: bool = False) -> Form:
    """Return x hardsigmoid(x)."""
    return mul(input, hardsigmoid(input))


def amax(input: Form, dim: Any = None, keepdim: bool = False) -> Form:
    """Return the largest value over axes."""
    axes = [dim] if isinstance(dim, int) else dim or range(input.ndim)  # no axes means all
    axes = [axis % input.ndim for axis in axes]
    others = [axis for axis in range(input.ndim) if axis not in axes]
    flat = input.permute(*others, *axes).flatten(len(others)) if axes else input[..., None]
    result = largest(flat)  # type: ignore[arg-type]
    kept = [1 if axis in axes else size for axis, size in enumerate(input.shape)]
    return result.reshape(kept) if keepdim else result  # type: ignore[return-value]


def amin(input: Form, dim: Any = None, keepdim: bool = False) -> Form:
    """Return the smallest value over axes."""
    return neg(amax(neg(input), dim, keepdim))


Extreme = namedtuple("Extreme", ("values", "indices"))
"""What torch.max returns of an axis; the indices depend on the input, and are None."""


def make_extreme(pair: Callable[..., Form], over: Callable[..., Form]) -> Callable[..., Any]:
    """Return the rule of torch.max or min: of all entries, of an axis, or of two tensors."""

    def rule(input: Form, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, Tensor):
            return pair(input, dim)
        return over(input) if dim is None else Extreme(over(input, dim, keepdim), None)

    return rule


def largest(x: Form) -> Form:
    """Return the largest value over the last axis."""
    # x_i + [0, h], i the largest at the centre: exact where i stays the largest on the ball.
    top = x.centre.argmax(-1, keepdim=True)
    chosen = make_move("gather")(x, -1, top)
    _, high = sub(x, chosen).range()
    never = (x.centre == -torch.inf).scatter(-1, top, True)
    above = up(high.masked_fill(never, 0.0).amax(-1).clamp_min(0.0) / 2)
    chosen = make_move("select")(chosen, -1, 0)
    # x_i + [0, 2 above].
    slack = up(chosen.slack + above)
    centred = Form(chosen.centre, chosen.dense, slack, x.symbols, blocks=chosen.blocks)
    return add(centred, above)


def max_pool2d(
    input: Form,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Form:
    """Return the largest value of every window; padding is never the largest."""
    if input.ndim != 4 or ceil_mode or return_indices:
        raise NoRuleError("max_pool2d in ceil mode, with indices or without a batch axis")
    # The places of every window, counted from 1: padding is 0, and becomes another place.
    places = torch.arange(1.0, input[0, 0].numel() + 1, dtype=torch.float64, device=input.device)
    places = places.view(1, 1, *input.shape[-2:])
    steps = kernel_size if stride in (None, []) else stride
    size, pad, gap, step = (as_pair(v) for v in (kernel_size, padding, dilation, steps))
    windows = F.unfold(places, size, gap, pad, step)[0].mT.long()
    windows = torch.where(windows > 0, windows, windows.amax(-1, keepdim=True)) - 1
    pooled: Any = largest(make_move("__getitem__")(input.flatten(2), (..., windows)))
    return pooled.unflatten(-1, F.max_pool2d(places, size, step, pad, gap).shape[-2:])
