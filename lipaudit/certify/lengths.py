"""Lengths of vectors of a form: bounds of their 2-norms over the whole ball.

Every entry of a vector can be at its largest, but not all at once: many errors together make a
zonotope that is about as wide in every direction. For its rows h_r, any numbers s_r > 0 and any
unit vector u, Cauchy and Schwarz give for |eps_r| <= 1

    u . sum h_r eps_r <= sqrt(sum (u . h_r)^2 / s_r) sqrt(sum s_r eps_r^2)

so that ||sum h_r eps_r||^2 <= ||sum h_r h_r^T / s_r|| sum s_r. With s_r = ||h_r|| that is exact
for one direction, and (pi / 2 at most) close for many rows that point everywhere. The input of an
L2 ball and the products of its entries have sum e_r^2 <= 1: there all s_r and their sum are 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipaudit.certify.form import Form
from lipaudit.certify.rounding import DOUBLE, cast_up, gamma, tiny, up
from lipaudit.certify.symbols import bound_norms

_ROWS = 512
"""Number of rows summed in their own precision before they are added in double precision."""

_SQUARINGS = 4
"""Number of squarings of a matrix when its norm is bounded through a power of it."""


def lengths(x: Form, axis: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bound ||w L||_2 and ||w R||_2 of x = c + L + R, L being linear in the input.

    Args:
        x: a form; its blocks are dissolved if their symbols do not act on whole vectors.
        axis: axis of the vectors; it has length 1 in the result.
        weight: w >= 0, (*shape), by default 1.
    """
    symbols, axis = x.symbols, axis % x.ndim
    if any(bool((b.group != b.group.narrow(axis, 0, 1)).any()) for b in x.blocks):
        x.whole()
    n, first, unit = symbols.n, symbols.first_error, symbols.norm == "l2"
    linear = _length([x.dense[:n]], axis, weight, unit=unit)
    quadratic = _length([x.dense[n:first]], axis, weight, unit=unit)
    errors = _length([x.dense[first:], *(b.rows for b in x.blocks)], axis, weight, unit=False)
    low, high = x.quadratic_range
    pairs = (
        (linear, x.sizes.linear),
        (quadratic, torch.maximum(-low, high)),
        (errors, x.sizes.errors),
    )
    linear, quadratic, errors = (
        torch.minimum(one, _euclid(other, axis, weight)) for one, other in pairs
    )
    return linear, up(quadratic + errors + _euclid(x.slack, axis, weight))


def _euclid(entries: Tensor, axis: int, weight: Tensor | None) -> Tensor:
    entries = entries if weight is None else entries * weight
    return up(entries.square().sum(axis, keepdim=True).sqrt(), entries.shape[axis] + 8)


def _length(stacks: list[Tensor], axis: int, weight: Tensor | None, *, unit: bool) -> Tensor:
    """Bound ||sum w h_r eps_r|| for |eps_r| <= 1, or for sum eps_r^2 <= 1."""
    rows, dtype = sum(len(stack) for stack in stacks), stacks[0].dtype
    k, shape = stacks[0].shape[axis + 1], list(stacks[0].shape[1:])
    shape[axis] = 1
    count = torch.Size(shape).numel()
    gram = torch.zeros(count, k, k, dtype=DOUBLE, device=stacks[0].device)
    share = torch.full((count,), float(unit), dtype=DOUBLE, device=gram.device)
    scale = None if weight is None else cast_up(weight.to(DOUBLE), dtype).clamp_min(tiny(dtype))
    parts = (stack.split(_ROWS) for stack in stacks)  # type: ignore[no-untyped-call]
    for part in (each for some in parts for each in some):
        vectors = (part if scale is None else part * scale).movedim(axis + 1, -1)
        vectors = vectors.reshape(len(part), count, k).transpose(0, 1)
        # s_r = ||h_r||, the choice that is exact for one direction (above).
        if not unit:
            s = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(tiny(dtype))
            share += s.to(DOUBLE).sum((1, 2))
            vectors = vectors / s.sqrt()
        gram += (vectors.mT @ vectors).to(DOUBLE)
    # What rounding and underflow did to the vectors and to the sums of their products.
    trace = up(gram.diagonal(dim1=-2, dim2=-1).sum(-1), k) * (1 + 2 * gamma(_ROWS + 16, dtype))
    under = rows * k * tiny(dtype)
    lost = gamma(_ROWS + rows // _ROWS + len(stacks) + 32, dtype) * trace + under
    size = up((bound_norms((gram + gram.mT) / 2, _SQUARINGS) + lost).sqrt()) + under
    return (up(size * up(share, rows).sqrt()) + under).view(shape)
