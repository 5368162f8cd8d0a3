"""Lengths of vectors of a form: bounds of their 2-norms over the whole ball.

Every entry of a vector can be at its largest, but not all at once: many errors together make a
zonotope that is about as wide in every direction. For its rows h_r, any numbers s_r > 0 and any
unit vector u, Cauchy and Schwarz give for |eps_r| <= 1

    u . sum h_r eps_r <= sqrt(sum (u . h_r)^2 / s_r) sqrt(sum s_r eps_r^2)

so that ||sum h_r eps_r||^2 <= ||sum h_r h_r^T / s_r|| sum s_r. With s_r = ||h_r|| that is exact
for one direction, and (pi / 2 at most) close for many rows that point everywhere. The input of an
L2 ball and the products of its entries have sum e_r^2 <= 1: there all s_r and their sum are 1.
Words move a vector by at most the sum of the k longest moves, one of each word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.symbols import DOUBLE, bound_norms, cast_up, gamma, tiny, up

_ROWS = 512
"""Number of rows summed in their own precision before they are added in double precision."""

_SQUARINGS = 4
"""Number of squarings of a matrix when its norm is bounded through a power of it."""


def lengths(
    x: Form, axis: int, weight: Tensor | None = None, around: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Bound ||w L||_2 and ||w R||_2 of x = c + around + L + R, L being linear in the input.

    Args:
        x: a form; its blocks are dissolved if their symbols do not act on whole vectors.
        axis: axis of the vectors; it has length 1 in the result.
        weight: w >= 0, (*shape), by default 1.
        around: by default 0.
    """
    symbols = x.symbols
    n = symbols.n
    first_error = symbols.first_error
    axis = axis % x.ndim
    for block in x.blocks:
        first = block.group.narrow(axis, 0, 1)
        if bool((block.group != first).any()):
            x.whole()
            break
    unit = symbols.norm == "l2"
    linear = _bound_sum([x.dense[:n]], axis, weight, unit=unit)
    quadratic = _bound_sum([x.dense[n:first_error]], axis, weight, unit=unit)
    error_rows = [x.dense[first_error:], *(block.rows for block in x.blocks)]
    errors = _bound_sum(error_rows, axis, weight, unit=False)
    if symbols.norm == "words":
        moves = _norm(x.dense[:n].to(DOUBLE), axis + 1, weight)
        linear = torch.minimum(linear, symbols.sum_groups(moves))

    # No part is longer than the vector of what its entries reach.
    linear = torch.minimum(linear, _norm(x.sizes.linear, axis, weight))
    errors = torch.minimum(errors, _norm(x.sizes.errors, axis, weight))
    low, high = x.quadratic_range
    if around is None:
        around = torch.zeros_like(low)
    quadratic = quadratic + _norm(around, axis, weight)
    reach = torch.maximum(high - around, around - low)
    quadratic = torch.minimum(quadratic, _norm(reach, axis, weight))
    slack = _norm(x.slack, axis, weight)
    return linear, up(quadratic + errors + slack)


def _norm(entries: Tensor, axis: int, weight: Tensor | None) -> Tensor:
    if weight is not None:
        entries = entries * weight
    terms = entries.shape[axis]
    size = entries.square().sum(axis, keepdim=True).sqrt()
    # Squares may underflow to zero.
    return up(size, terms + 8) + (terms * tiny(DOUBLE)) ** 0.5


def _bound_sum(stacks: list[Tensor], axis: int, weight: Tensor | None, *, unit: bool) -> Tensor:
    """Bound ||sum w h_r eps_r|| for |eps_r| <= 1, or with `unit` for sum eps_r^2 <= 1."""
    dtype = stacks[0].dtype
    rows = sum(len(stack) for stack in stacks)
    shape = list(stacks[0].shape[1:])
    k = shape[axis]
    shape[axis] = 1
    count = torch.Size(shape).numel()
    gain = None
    if weight is not None:
        gain = cast_up(weight.to(DOUBLE), dtype).clamp_min(tiny(dtype))

    # gram = sum h_r h_r^T / s_r, and the sum of all s_r.
    gram = torch.zeros(count, k, k, dtype=DOUBLE, device=stacks[0].device)
    shares = torch.full((count,), float(unit), dtype=DOUBLE, device=gram.device)
    for stack in stacks:
        for part in stack.split(_ROWS):  # type: ignore[no-untyped-call]
            weighted = part
            if gain is not None:
                weighted = part * gain
            vectors = weighted.movedim(axis + 1, -1)
            vectors = vectors.reshape(len(part), count, k)
            vectors = vectors.transpose(0, 1)
            if not unit:
                # s_r = ||h_r||, the choice that is exact for one direction.
                share = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
                share = share.clamp_min(tiny(dtype))
                shares += share.to(DOUBLE).sum((1, 2))
                vectors = vectors / share.sqrt()
            gram += (vectors.mT @ vectors).to(DOUBLE)

    # What rounding and underflow did to the vectors and to the sums of their products.
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    trace = up(diagonal.sum(-1), k) * (1 + 2 * gamma(_ROWS + 16, dtype))
    under = rows * k * tiny(dtype)
    roundings = _ROWS + rows // _ROWS + len(stacks) + 32
    lost = gamma(roundings, dtype) * trace + under
    symmetric = (gram + gram.mT) / 2
    norms = bound_norms(symmetric, _SQUARINGS)
    size = up((norms + lost).sqrt()) + under
    length = up(size * up(shares, rows).sqrt()) + under
    return length.view(shape)
