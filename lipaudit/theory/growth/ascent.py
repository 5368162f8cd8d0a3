"""Searches for bad inputs of a head by gradient ascent; what they find is a lower limit.

Every function takes one head of affine self-attention; rows of the batch are independent starts.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.exact.products import head_products
from lipaudit.theory.growth.worst_tokens import relocated
from lipaudit.theory.heads import Heads

_POWER_STEPS = 3


def steepest_tokens(
    heads: Heads,
    x: Float[Tensor, "batch n D"],
    radius: float,
    *,
    steps: int = 100,
    causal: bool | None = None,
) -> Float[Tensor, "batch n D"]:
    """Return tokens with ||x_i|| <= radius at which ||J|| is large, found by gradient ascent.

    For the leading left singular vector u of J the gradient of ||J|| is that of ||J^T u||; u is
    followed by power steps. Steps shrink linearly from 0.3 of the radius; the best point is kept.

    Args:
        heads: one head.
        x: where to start.
        radius: R.
        steps: gradient steps.
        causal: as in `relocated`.
    """
    best, best_norm = x, x.new_zeros(len(x))
    u = torch.ones_like(relocated(heads, x).v)
    for step in range(steps):
        u = _follow(relocated(heads, x, causal=causal), u)
        norm, gradient = _gradient(heads, x, u, causal)
        better = norm > best_norm
        best_norm = torch.where(better, norm, best_norm)
        best = torch.where(better[:, None, None], x, best)
        length = 0.3 * radius * (1 - step / steps) * x.shape[1] ** 0.5
        x = _into_ball(x + length * _unit(gradient), radius)
    return best


def largest_shift(
    heads: Heads,
    x: Float[Tensor, "batch n D"],
    budget: float,
    *,
    generator: torch.Generator,
    steps: int = 60,
) -> Float[Tensor, " batch"]:
    """Return the largest ||O(X + M) - O(X)||_F / ||M||_F found with ||M||_F = budget.

    M goes to the gradient of the shift each time, which is power iteration where O is linear: as
    the budget falls the result tends to ||J||.
    """
    start = _output(heads, x)
    move = budget * _unit(torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device))
    best = x.new_zeros(len(x))
    for _ in range(steps):
        with torch.enable_grad():
            move = move.detach().requires_grad_()
            shift = (_output(heads, x + move) - start).flatten(1).norm(dim=1)
            (gradient,) = torch.autograd.grad(shift.sum(), move)
        best = torch.maximum(best, shift.detach() / budget)
        move = budget * _unit(gradient)
    return best


def _output(heads: Heads, x: Tensor) -> Tensor:
    at = relocated(heads, x)
    return at.attention() @ at.v


def _follow(heads: Heads, u: Tensor) -> Tensor:
    """Bring u closer to the leading left singular vector."""
    products = head_products(heads)
    for _ in range(_POWER_STEPS):
        u = _unit(products(u.flatten(1)).view_as(u))
    return u


def _gradient(heads: Heads, x: Tensor, u: Tensor, causal: bool | None) -> tuple[Tensor, Tensor]:
    """Return ||J^T u|| and its gradient in the tokens, u held fixed."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        at = relocated(heads, x, causal=causal)
        (pulled,) = torch.autograd.grad(at.attention() @ at.v, x, u, create_graph=True)
        norm = pulled.flatten(1).norm(dim=1)
        (gradient,) = torch.autograd.grad(norm.sum(), x)
    return norm.detach(), gradient


def _unit(t: Tensor) -> Tensor:
    """Scale every batch row to norm 1."""
    size = t.flatten(1).norm(dim=1).clamp_min(torch.finfo(t.dtype).tiny)
    return t / size.view(-1, *[1] * (t.ndim - 1))


def _into_ball(x: Tensor, radius: float) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (radius / length).clamp_max(1.0)
