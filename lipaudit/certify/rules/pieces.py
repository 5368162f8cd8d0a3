"""Piecewise linear functions, built from the ReLU h = a z + m (1 + eps): branching covers all.

On l < 0 < u, with a = u / (u - l), a z <= relu(z) <= a z + 2 m for m = -a l / 2: below, z >= 0
gives (a - 1) z <= 0 and z <= 0 gives a z <= 0; the line above through both ends is the chord of a
convex function. For a rounded a in [0, 1] the largest relu(z) - a z is at an end:
2 m = max(-a l, (1 - a) u). The symbol eps is defined by the equation: on z >= 0 and z <= 0 apart,
h is z and 0, and what the equation then says of eps is used (`branch`). So eps takes no slack in.

The largest of many: for any entry i, max_j x_j - x_i = max_j r(x_j - x_i) lies in [0, h] with h
the largest end of a difference x_j - x_i. i is the largest at the centre. Where it is the largest
on the whole ball, h = 0 and nothing is lost.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lipaudit.certify.form import Form, NoRuleError, UnboundedError
from lipaudit.certify.rounding import DOUBLE, cast_up, gamma, tiny, up
from lipaudit.certify.rules.affine import add, as_pair, sub
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
