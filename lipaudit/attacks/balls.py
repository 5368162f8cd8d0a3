"""Balls: where an attack may go, and the steps that each norm asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from lipaudit.attacks.plan import Norm

_ORDER = {"linf": math.inf, "l2": 2.0, "token-l2": 2.0}


@dataclass(frozen=True)
class Ball:
    """The points within eps of a sample, inside the box, equal to it where the mask is False.

    Attributes:
        norm: linf, l2, or token-l2: the l2 norm along the last axis, the largest over the others.
        eps: the radius, in units of the attacked space.
        box: the smallest and the largest value of the space; None for an embedding space.
        mask: True where a sample may change (real tokens), over the first axes of x; None: all.
    """

    norm: Norm
    eps: float
    box: tuple[float, float] | None = (0.0, 1.0)
    mask: Bool[Tensor, " batch *positions"] | None = None

    def __getitem__(self, rows: Shaped[Tensor, " rows"]) -> Ball:
        """Return the balls of some of the samples."""
        return self if self.mask is None else replace(self, mask=self.mask[rows])

    def free(self, delta: Float[Tensor, " batch *sample"]) -> Float[Tensor, " batch *sample"]:
        """Set a perturbation to zero where a sample may not change."""
        if self.mask is None:
            return delta
        return delta * self.mask.reshape(*self.mask.shape, *[1] * (delta.ndim - self.mask.ndim))


def project(
    z: Float[Tensor, " batch *sample"], x: Float[Tensor, " batch *sample"], ball: Ball
) -> Float[Tensor, " batch *sample"]:
    """Move z into the ball around x: onto the norm ball, then into the box.

    For a sample x inside its box the result satisfies both constraints (clipping to the box
    brings every coordinate closer to x). It is the nearest such point for linf, and wherever the
    box does not bind. Exact up to the rounding of x + delta.
    """
    delta = ball.free(z - x)
    if ball.norm == "linf":
        delta = delta.clamp(-ball.eps, ball.eps)
    else:
        smallest = max(ball.eps, torch.finfo(x.dtype).tiny)
        delta = delta * (ball.eps / _lengths(delta, ball.norm).clamp_min(smallest))
    return x + delta if ball.box is None else (x + delta).clamp(*ball.box)


def distance(
    z: Float[Tensor, " batch *sample"], x: Float[Tensor, " batch *sample"], norm: Norm
) -> Float[Tensor, " batch"]:
    """Return ||z - x|| of each sample, in the norm of the ball."""
    return _lengths(z - x, norm).flatten(1).amax(1)


def steepest(
    gradient: Float[Tensor, " batch *sample"], ball: Ball
) -> Float[Tensor, " batch *sample"]:
    """Return the direction of unit norm along which the loss rises fastest.

    sign(g) for linf, g / ||g||_2 for l2 (per token for token-l2), 0 where g is 0. Gradients are
    scaled by their largest entry first: their squares underflow on a confident classifier.
    """
    gradient = ball.free(gradient)
    if ball.norm == "linf":
        return gradient.sign()
    tiny = torch.finfo(gradient.dtype).tiny
    largest = gradient.abs().amax(_axes(gradient, ball.norm), keepdim=True)
    gradient = gradient / largest.clamp_min(tiny)
    return gradient / _lengths(gradient, ball.norm).clamp_min(tiny)


def random_start(
    x: Float[Tensor, " batch *sample"], ball: Ball, generator: torch.Generator
) -> Float[Tensor, " batch *sample"]:
    """Draw a point of each ball: uniform in the cube (linf), in a uniform direction at eps (l2).

    Drawn on the CPU in float32 whatever x is, so that devices and precisions start alike.
    """
    if ball.norm == "linf":
        noise = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float32) - 1
        return project(x + ball.eps * noise.to(x), x, ball)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x)
    return project(x + ball.eps * steepest(noise, ball), x, ball)


def _axes(delta: Tensor, norm: Norm) -> tuple[int, ...]:
    return (-1,) if norm == "token-l2" else tuple(range(1, delta.ndim))


def _lengths(delta: Tensor, norm: Norm) -> Tensor:
    """Norm of each sample's perturbation (of each token's for token-l2), ready to broadcast."""
    return torch.linalg.vector_norm(delta, _ORDER[norm], _axes(delta, norm), keepdim=True)
