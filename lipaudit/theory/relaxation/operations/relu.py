"""The ReLU: h = a z + m (1 + eps), and what branching needs of it.

On l < 0 < u, with a = u / (u - l), a z <= relu(z) <= a z + 2 m for m = -a l / 2: below, z >= 0
gives (a - 1) z <= 0 and z <= 0 gives a z <= 0; the line above through both ends is the chord of a
convex function. For a rounded a in [0, 1] the largest relu(z) - a z is at an end:
2 m = max(-a l, (1 - a) u). The symbol eps is defined by the equation: on z >= 0 and z <= 0 apart,
h is z and 0, and what the equation then says of eps is used (`duals`). So eps takes no slack in.
"""

from __future__ import annotations

import torch

from lipaudit.theory.relaxation.form import Form
from lipaudit.theory.relaxation.refusals import UnboundedError
from lipaudit.theory.relaxation.rounding import DOUBLE, cast_up, gamma, tiny, up
from lipaudit.theory.relaxation.symbols import Unit


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
    mixed = m > 0
    errors = symbols.birth(m)
    if mixed.any():
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
    share = a.to(dtype)
    dense, blocks = input.mapped(lambda t: t * share)
    centre = a * input.centre + m
    lost = gamma(2, DOUBLE) * (centre.abs() + m) + gamma(1, dtype) * a * input.mass * mixed
    slack = up(a * input.slack + lost + symbols.count * tiny(dtype) * mixed)
    return Form(centre, dense, slack, symbols, blocks=[*blocks, errors])
