"""Gradient ascent in a ball for tokens at which the norm of a head is large: a lower limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipaudit.theory.attend import mean_value
from lipaudit.theory.head_bounds import require_radius, split_heads
from lipaudit.theory.heads import Heads, are_affine, projections, unit_values
from lipaudit.theory.pullback import pull_back
from lipaudit.theory.spectral import random_starts

if TYPE_CHECKING:
    from lipaudit.theory.heads import PerHead

AT_X = 20
UPHILL = 12
"""Power steps at X and ascent steps. More steps increased few norms, by about 1%."""


@torch.inference_mode(False)
def ball_norm(heads: Heads, r: float, *, seeds: Sequence[int]) -> PerHead:
    """Return the largest ||J(X')|| found with ||X' - X||_F <= r, for each head; a lower bound.

    Each step replaces the unit vector u by J J^T u (a power iteration), and moves X' along the
    gradient of ||J^T u|| to the edge of the ball. ||J^T u|| is never above ||J(X')||.

    Args:
        heads: heads of self-attention with affine (or constant) projections; all other heads give
            NaN.
        r: radius, in the Frobenius norm over all tokens of a sample (of a window).
        seeds: one per sample.

    Raises:
        UsageError: r is negative or NaN.
    """
    require_radius(r)
    if heads.x_kv is not None or not are_affine(heads):
        # The search moves q, k and v by dX W if the tokens move by dX. This is right for affine
        # projections only.
        return heads.q.new_full(heads.q.shape[:2], torch.nan, dtype=torch.float64)
    # Values divided by `size`, so that no number overflows. ||J|| is proportional to the values.
    unit, size = unit_values(heads.to(torch.float64))
    # Values less their mean: J stays the same because rows of P sum to 1, and its rounding error
    # becomes smaller.
    mean = mean_value(unit.attention(), unit.v)
    unit = unit.with_same_map(v=unit.v - mean)
    n, dv = unit.v.shape[2:]  # self-attention has as many queries as values
    starts = random_starts(seeds, n * dv).to(unit.q)
    u = starts[unit.sample].view(-1, 1, n, dv)  # (batch, 1, n, dv): one start for all heads
    norms = [_climb_in_ball(group, r, u) for group in split_heads(unit)]
    return torch.cat(norms, 1) * size.to(u)


def _climb_in_ball(heads: Heads, r: float, u: Tensor) -> Tensor:
    """Return the largest ||J^T u|| that gradient ascent finds for each head, (batch, heads).

    The ascent is over unit vectors u and over tokens within r of X, where J is the Jacobian at
    these tokens. The first `AT_X` steps stay at X and are a power iteration for u. The `UPHILL`
    steps after them also move the tokens.

    Args:
        heads: the heads at X.
        r: radius of the ball.
        u: start vectors, in the shape of the outputs.
    """
    # A move dX of the tokens changes [q k v] by dX W, W = [W_Q W_K W_V]. Take the QR decomposition
    # W = Z R: only dX Z matters, so the ascent searches over `move` with dX = move Z^T. Then
    # dX W = move R and ||dX||_F = ||move||_F.
    weights = [projection.weight for projection in projections(heads)]
    triangle = torch.linalg.qr(torch.cat(weights, -1), mode="r").R  # R, (heads, channels, 3 d)
    move = heads.q.new_zeros(*heads.q.shape[:3], triangle.shape[1])
    largest = heads.q.new_zeros(heads.q.shape[:2])
    u = u.expand(-1, heads.q.shape[1], -1, -1)
    for step in range(AT_X + UPHILL):
        norm, move_gradient, u = _differentiate_norm(heads, triangle, move, _unit_matrices(u))
        largest = torch.fmax(largest, norm)  # in a huge ball, norms may overflow to NaN
        if step >= AT_X:
            # The best move of a given length for the linearised norm, in place of the old move:
            # along the gradient. The length grows to r in the first half of the ascent.
            share = min(1.0, 2 * (step - AT_X + 1) / UPHILL)
            move = r * share * _unit_matrices(move_gradient)
    return largest


def _differentiate_norm(
    heads: Heads, triangle: Tensor, move: Tensor, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ||J^T u|| at the moved tokens, and its gradients in the move and in u.

    If the tokens X (n x D) move by dX, [q k v] of a head changes by dX W, W = [W_Q W_K W_V]. W is
    D x 3d with the QR decomposition W = Z R, so dX W = move R with move = dX Z. As Z has
    orthonormal columns, ||J^T u|| has the same length in terms of the move as in terms of X.

    The gradient in a unit vector u is J J^T u / ||J^T u||: the next u of a power iteration.

    Args:
        heads: the heads at X.
        triangle: R, (heads, r, 3 d) with r = min(D, 3 d).
        move: dX Z of every head, (batch, heads, n, r).
        u: unit vectors in the shape of the outputs, (batch, heads, n, d_v).
    """
    move = move.detach().clone().requires_grad_()
    u = u.detach().clone().requires_grad_()
    widths = [heads.q.shape[-1], heads.k.shape[-1], heads.v.shape[-1]]
    with torch.enable_grad():
        dq, dk, dv = torch.split(move @ triangle, widths, -1)
        moved = replace(heads, q=heads.q + dq, k=heads.k + dk, v=heads.v + dv)
        output = moved.attention() @ moved.v
        (pulled,) = pull_back(output, move, u, create_graph=True)
        norm = torch.linalg.vector_norm(pulled, dim=(-2, -1))
        move_gradient, u_gradient = torch.autograd.grad(norm.sum(), (move, u))
    return norm.detach(), move_gradient, u_gradient


def _unit_matrices(t: Tensor) -> Tensor:
    """Divide each matrix by its Frobenius norm; a zero matrix stays zero."""
    # By the largest entry first: squares of entries below 1e-154 would underflow to zero.
    tiny = torch.finfo(t.dtype).tiny
    largest = t.abs().amax((-2, -1), keepdim=True)
    t = t / largest.clamp_min(tiny)
    size = torch.linalg.vector_norm(t, dim=(-2, -1), keepdim=True)
    return t / size.clamp_min(tiny)
