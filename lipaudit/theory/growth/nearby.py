"""The largest norm near X that gradient ascent finds: a lower limit of what a ball certifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.bounds.centred import are_affine, projections
from lipaudit.theory.bounds.head_bounds import chunks
from lipaudit.theory.heads import Heads
from lipaudit.theory.policy import POLICY, Policy
from lipaudit.theory.scale import unit_values
from lipaudit.theory.spectral.lanczos import random_starts

AT_X, UPHILL = 20, 12
"""Power steps at X, and steps of the ascent: more raised few norms, and those by a per cent."""


@torch.inference_mode(False)
def ball_norm(
    heads: Heads, r: float, *, seeds: Sequence[int], policy: Policy = POLICY
) -> Float[Tensor, "batch heads"]:
    """Return the largest ||J(X')|| found with ||X' - X||_F <= r, each head on its own; from below.

    In turn the unit vector u goes to J J^T u and X' to the end of the gradient of ||J^T u|| in the
    ball: power steps on both, exact as r falls. ||J^T u|| is never above ||J(X')||.

    Args:
        heads: self-attention with affine (or constant) projections; others give NaN.
        r: radius, in the Frobenius norm over all tokens of a sample (of a window).
        seeds: one per sample.
        policy: how many heads are met at a time.
    """
    if heads.x_kv is not None or not are_affine(heads):
        return torch.full_like(heads.q[..., 0, 0], torch.nan, dtype=torch.float64)
    unit, size = unit_values(heads.to(torch.float64))
    n, dv = unit.q.shape[2], unit.v.shape[3]
    u = random_starts(seeds, n * dv).to(unit.q)[unit.sample].view(-1, 1, n, dv)
    norms = [_climbed(unit.pick(some), r, u) for some in chunks(unit, policy)]
    return torch.cat(norms, 1) * size.to(u)


def _climbed(heads: Heads, r: float, u: Tensor) -> Tensor:
    # In coordinates of what the projections of a head read; R keeps the lengths of moves there.
    weights = torch.cat([to.weight for to in projections(heads)], -1)
    read = torch.linalg.qr(weights, mode="r").R
    move = heads.q.new_zeros(*heads.q.shape[:3], read.shape[1])
    u = u.expand(-1, heads.q.shape[1], -1, -1)
    best = torch.zeros_like(heads.q[..., 0, 0])
    for step in range(AT_X + UPHILL):
        height, uphill, u = _slopes(heads, read, move, _unit(u))
        best = torch.maximum(best, height)
        if step >= AT_X:  # out to the edge in half of the ascent, along it in the other
            move = r * min(1.0, 2 * (step - AT_X + 1) / UPHILL) * _unit(uphill)
    return best


def _slopes(heads: Heads, read: Tensor, move: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ||J^T u|| at the moved tokens, and its gradients in the move and in u."""
    move, u = (t.detach().clone().requires_grad_() for t in (move, u))
    with torch.enable_grad():
        widths = [rows.shape[-1] for rows in (heads.q, heads.k, heads.v)]
        steps = torch.split(move @ read, widths, -1)
        q, k, v = (
            rows + step for rows, step in zip((heads.q, heads.k, heads.v), steps, strict=True)
        )
        output = replace(heads, q=q, k=k, v=v).attention() @ v
        (pulled,) = torch.autograd.grad(output, move, u, create_graph=True)
        height = torch.linalg.vector_norm(pulled, dim=(-2, -1))
        uphill, further = torch.autograd.grad(height.sum(), (move, u))
    return height.detach(), uphill, further


def _unit(t: Tensor) -> Tensor:
    # By the largest entry first: squares of entries below 1e-154 vanish, and what is divided by
    # the tiny number in place of their sum is no unit vector.
    tiny = torch.finfo(t.dtype).tiny
    t = t / t.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    size = torch.linalg.vector_norm(t, dim=(-2, -1), keepdim=True)
    return t / size.clamp_min(tiny)
