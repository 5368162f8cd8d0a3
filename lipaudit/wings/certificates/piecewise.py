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
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.wings.certificates.affine import add, as_pair, neg, read_axes, scale, sub
from lipaudit.wings.certificates.curves import round_to
from lipaudit.wings.certificates.form import Form, NoRuleError, require_finite
from lipaudit.wings.certificates.rounding import DOUBLE, bound_rounding, cast_up, round_up, tiny
from lipaudit.wings.certificates.symbols import ReluCall


def relu(input: Form, inplace: bool = False) -> Form:
    """Return max(z, 0) as the form h = a z + m (1 + eps) with z = input.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. On the ball, z is in [l, u]. If l < 0 < u, max(z, 0) lies between
    a z and a z + 2 m with a = u / (u - l) and 2 m = max(-a l, (1 - a) u), and eps in [-1, 1] is a
    new symbol. Otherwise the sign of z is known: a is 0 or 1, and m = 0.
    """
    symbols = input.symbols
    dtype = symbols.dtype
    a, m = _choose_lines(*input.range(), dtype)
    is_mixed = m > 0  # the sign of z is unknown
    slope = a.to(dtype)
    dense, blocks = input.map_coefficients(lambda t: t * slope)
    # The key of a block is the number of its first symbol. So no empty block is made: it would
    # have the key of the next block.
    if is_mixed.any():
        blocks = [*blocks, symbols.add_errors(m)]
        _record_relus(input, a, m)
    centre = a * input.centre + m
    # The centre is rounded twice: the product and the sum. A coefficient is rounded once, and only
    # where the sign of z is unknown: elsewhere a is 0 or 1.
    rounding = bound_rounding(2, DOUBLE) * (centre.abs() + m)
    rounding = rounding + bound_rounding(1, dtype) * a * input.symbol_radius * is_mixed
    slack = round_up(a * input.slack + rounding + symbols.count * tiny(dtype) * is_mixed)
    return Form(centre, dense, slack, symbols, blocks=blocks)


def _choose_lines(low: Tensor, high: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a and m such that max(z, 0) is between the lines a z and a z + 2 m on [low, high].

    If low < 0 < high, a is the slope of the chord, high / (high - low). Otherwise max(z, 0) is z
    or 0: a is 1 or 0, and m = 0. Both are numbers of `dtype`; a is stored in float64.
    """
    require_finite(low, high)
    is_mixed = (low < 0) & (high > 0)
    chord = round_to(high / (high - low), dtype).clamp(0, 1)
    a = torch.where(is_mixed, chord, (low >= 0).to(DOUBLE))
    # The distance of max(z, 0) from a z is largest at the ends, -a low and (1 - a) high.
    m = round_up(torch.maximum(-a * low, (1 - a) * high) / 2)
    return a, cast_up(m * is_mixed, dtype)


def _record_relus(z: Form, a: Tensor, m: Tensor) -> None:
    """Record the ReLUs a z + m (1 + eps) with m > 0 for branch and bound, which splits their sign.

    The caller has just created their symbols eps (unknowns in [-1, 1]), one for each m > 0: they
    have the largest numbers. z is a form, that is, centre + coefficients . symbols +- slack: so
    branch and bound knows z as a function of the symbols.
    """
    symbols = z.symbols
    is_mixed = m > 0  # the sign of z is unknown
    first = symbols.count - int(is_mixed.sum())
    call = ReluCall(
        centre=z.centre[is_mixed],
        generators=z.select_entries(is_mixed),
        slack=z.slack[is_mixed],
        slope=a[is_mixed],
        offset=m[is_mixed].to(DOUBLE),  # a has this dtype already
        numbers=torch.arange(first, symbols.count, device=z.device),
    )
    symbols.relu_calls.append(call)


def leaky_relu(input: Form, negative_slope: Any = 0.01, inplace: bool = False) -> Form:
    """Return x where x > 0, else s x: s x + (1 - s) relu(x); s may be a tensor of constants."""
    # In float64, so that 1 - s has the smallest possible rounding error.
    s = torch.as_tensor(negative_slope, dtype=DOUBLE, device=input.device)
    return add(scale(input, s), scale(relu(input), 1 - s, roundings=2))


def prelu(input: Form, weight: Tensor) -> Form:
    """Return a leaky ReLU with one slope, or with one per channel (axis 1)."""
    # The slopes are broadcast over the axes behind the channels.
    trailing_axes = 0
    if weight.numel() > 1:
        trailing_axes = input.ndim - 2
    return leaky_relu(input, weight.view(-1, *[1] * trailing_axes))


def maximum(input: Any, other: Any) -> Form:
    """Return the form of the larger of x and y, entry by entry: y + relu(x - y)."""
    return add(other, relu(sub(input, other)))


def minimum(input: Any, other: Any) -> Form:
    """Return the form of the smaller of x and y, entry by entry: x - relu(x - y)."""
    return sub(input, relu(sub(input, other)))


def clamp(input: Form, min: Any = None, max: Any = None) -> Form:  # noqa: A002
    """Return x clamped to [min, max]; as in torch, max if max < min."""
    if min is not None:
        input = maximum(input, min)
    if max is not None:
        input = minimum(input, max)
    return input


def hardsigmoid(input: Form, inplace: bool = False) -> Form:
    """Return (x + 3) / 6 clamped to [0, 1]."""
    return scale(clamp(add(input, 3.0), 0.0, 6.0), 1 / 6, roundings=2)


def hardswish(input: Form, inplace: bool = False) -> Form:
    """Return x hardsigmoid(x)."""
    return cast("Form", input * hardsigmoid(input))


def amax(input: Form, dim: Any = None, keepdim: bool = False) -> Form:
    """Return the form of the largest value over axes, by default over all axes."""
    axes = read_axes(dim, input.ndim)
    others = [axis for axis in range(input.ndim) if axis not in axes]
    # `find_largest` works on the last axis: the axes are moved to the end and joined.
    if axes:
        rows: Any = input.permute(*others, *axes).flatten(len(others))
    else:
        rows = input[..., None]
    result: Any = find_largest(rows)
    if not keepdim:
        return cast("Form", result)
    shape = list(input.shape)
    for axis in axes:
        shape[axis] = 1
    return cast("Form", result.reshape(shape))


def amin(input: Form, dim: Any = None, keepdim: bool = False) -> Form:
    """Return the form of the smallest value over axes, by default over all axes."""
    return neg(amax(neg(input), dim, keepdim))


# What torch.max returns for an axis.
Extreme = namedtuple("Extreme", ("values", "indices"))


class Indices(Tensor):
    """Stands for the indices of extremes. They depend on the input, so every use is refused."""

    @classmethod
    def __torch_function__(cls, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse every function of torch that gets the indices."""
        raise NoRuleError("indices of max or min, which depend on the input")


def make_extreme(
    of_two: Callable[..., Form], over_axes: Callable[..., Form]
) -> Callable[..., Any]:
    """Return the rule of torch.max or torch.min, whose meaning depends on the second argument.

    Args:
        of_two: the rule for two tensors, entry by entry.
        over_axes: the rule for all entries, or for an axis.
    """

    def find_extreme(input: Form, dim: Any = None, keepdim: bool = False) -> Any:
        """Return torch.max(input, dim), or min; dim may be a second tensor, an axis, or None.

        `of_two` and `over_axes` are the rules for two tensors, and for one tensor over axes.
        """
        if isinstance(dim, Tensor):
            return of_two(input, dim)
        if dim is None:
            return over_axes(input)
        # The indices may differ between inputs of the ball: a model that uses them is refused.
        indices = torch.empty(0).as_subclass(Indices)
        return Extreme(over_axes(input, dim, keepdim), indices)

    return find_extreme


def find_largest(x: Form) -> Form:
    """Return the form of the largest value over the last axis, as x_i + [0, h].

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. Here i is the index of the largest entry of the centre. h is an
    upper bound of all x_j - x_i on the ball: 0 if entry i is proven to be the largest everywhere.
    """
    top = x.centre.argmax(-1, keepdim=True)
    chosen: Any = x.gather(-1, top)
    _, high = sub(x, chosen).range()
    # Entry i itself, and masked entries (-inf), are left out of the comparison.
    is_out = (x.centre == -torch.inf).scatter(-1, top, True)
    # [0, h] is h / 2 +- h / 2: half of h is added to the slack here, and to the centre by `add`,
    # which also adds the rounding of the new centre to the slack.
    half = round_up(high.masked_fill(is_out, 0.0).amax(-1).clamp_min(0.0) / 2)
    chosen = chosen.select(-1, 0)
    slack = round_up(chosen.slack + half)
    return add(chosen.with_bounds(chosen.centre, slack), half)


def max_pool2d(
    input: Form,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Form:
    """Return the largest value of every window of a form, like F.max_pool2d.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. Padding counts as -inf, so it is never the largest.
    """
    if input.ndim != 4 or ceil_mode or return_indices:
        raise NoRuleError("max_pool2d in ceil mode, with indices or without a batch axis")
    size = as_pair(kernel_size)
    if stride in (None, []):
        step = size
    else:
        step = as_pair(stride)
    options: Any = {"stride": step, "padding": as_pair(padding), "dilation": as_pair(dilation)}
    # To find the pixels of every window, an image of the numbers 1, 2, ... of its pixels is
    # unfolded. Padding has the number 0. It is replaced by another pixel of the same window, which
    # does not change the maximum.
    height, width = input.shape[-2:]
    numbers = torch.arange(1.0, height * width + 1, dtype=DOUBLE, device=input.device)
    numbers = numbers.view(1, 1, height, width)
    # (windows, pixels of a window)
    windows = F.unfold(numbers, size, **options)[0].mT.long()
    another = windows.amax(-1, keepdim=True)
    if not another.all():  # possible with dilation
        raise NoRuleError("max_pool2d with a window of padding only")
    pixels = torch.where(windows > 0, windows, another) - 1
    flat: Any = input.flatten(2)
    pooled: Any = find_largest(flat[..., pixels])
    # The rows and columns of the result are those of torch's function.
    return pooled.unflatten(-1, F.max_pool2d(numbers, size, **options).shape[-2:])
