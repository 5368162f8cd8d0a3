"""Gradient ascent in a ball for tokens at which the norm of a head is large: a lower limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipaudit.theory.attend import mean_value
from lipaudit.theory.head_bounds import split_heads
from lipaudit.theory.heads import Heads, are_affine, projections, unit_values
from lipaudit.theory.pullback import pull_back
from lipaudit.theory.spectral import random_starts

if TYPE_CHECKING:
    from jaxtyping import Float

AT_X = 20
UPHILL = 12
"""Power steps at X and ascent steps. More steps increased few norms, by about 1%."""


@torch.inference_mode(False)
def ball_norm(heads: Heads, r: float, *, seeds: Sequence[int]) -> Float[Tensor, "batch heads"]:
    """Return the largest ||J(X')|| found with ||X' - X||_F <= r, for each head; a lower bound.

    In turn the unit vector u goes to J J^T u and X' to the end of the gradient of ||J^T u|| in the
    ball: power steps on both, exact as r falls. ||J^T u|| is never above ||J(X')||.

    Args:
        heads: heads of self-attention with affine (or constant) projections; others give NaN.
        r: radius, in the Frobenius norm over all tokens of a sample (of a window).
        seeds: one per sample.
    """
    if heads.x_kv is not None or not are_affine(heads):
        return torch.full_like(heads.q[..., 0, 0], torch.nan, dtype=torch.float64)
    unit, size = unit_values(heads.to(torch.float64))
    # No derivative depends on a constant in the values; its rounding error does: see `mean_value`.
    mean = mean_value(unit.attention(), unit.v)
    unit = unit.with_same_map(v=unit.v - mean)
    n = unit.q.shape[2]
    dv = unit.v.shape[3]
    starts = random_starts(seeds, n * dv).to(unit.q)
    u = starts[unit.sample].view(-1, 1, n, dv)
    norms = [_climb_in_ball(some, r, u) for some in split_heads(unit)]
    return torch.cat(norms, 1) * size.to(u)


def _climb_in_ball(heads: Heads, r: float, u: Tensor) -> Tensor:
    """Return the largest ||J^T u|| on the way of each head, from the starts u of the samples."""
    # In the coordinates that the projections of a head read; R preserves lengths there.
    weights = [projection.weight for projection in projections(heads)]
    read = torch.linalg.qr(torch.cat(weights, -1), mode="r").R
    move = heads.q.new_zeros(*heads.q.shape[:3], read.shape[1])
    largest = torch.zeros_like(heads.q[..., 0, 0])
    u = u.expand(-1, heads.q.shape[1], -1, -1)
    for step in range(AT_X + UPHILL):
        height, uphill, along = _slopes(heads, read, move, _unit_matrices(u))
        largest = torch.maximum(largest, height)
        u = along
        if step >= AT_X:  # out to the edge in half of the ascent, along it in the other
            share = min(1.0, 2 * (step - AT_X + 1) / UPHILL)
            move = r * share * _unit_matrices(uphill)
    return largest


def _slopes(heads: Heads, read: Tensor, move: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ||J^T u|| at the moved tokens, and its gradients in the move and in u."""
    move = move.detach().clone().requires_grad_()
    u = u.detach().clone().requires_grad_()
    widths = [heads.q.shape[-1], heads.k.shape[-1], heads.v.shape[-1]]
    with torch.enable_grad():
        dq, dk, dv = torch.split(move @ read, widths, -1)
        moved = replace(heads, q=heads.q + dq, k=heads.k + dk, v=heads.v + dv)
        output = moved.attention() @ moved.v
        (pulled,) = pull_back(output, move, u, create_graph=True)
        height = torch.linalg.vector_norm(pulled, dim=(-2, -1))
        uphill, along = torch.autograd.grad(height.sum(), (move, u))
    return height.detach(), uphill, along


def _unit_matrices(t: Tensor) -> Tensor:
    # By the largest entry first: squares of entries below 1e-154 vanish, and what is divided by
    # the tiny number in place of their sum is no unit vector.
    tiny = torch.finfo(t.dtype).tiny
    largest = t.abs().amax((-2, -1), keepdim=True)
    t = t / largest.clamp_min(tiny)
    size = torch.linalg.vector_norm(t, dim=(-2, -1), keepdim=True)
    return t / size.clamp_min(tiny)
