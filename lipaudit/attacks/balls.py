"""Balls: the points that an attack may reach, and the steps for each norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lipaudit.errors import EvaluationError
from lipaudit.tables.trials import Norm

# Share of the radius by which an attack may leave its ball.
SLACK = 1e-3
# Further tolerance, in units of float32 rounding.
ROUNDINGS = 16


@dataclass(frozen=True)
class Ball:
    """The points within eps of a sample, inside the box, equal to it where the mask is False.

    Attributes:
        norm: linf, l2, l1, or token-l2: the l2 norm along the last axis, the largest over the
            others; or patch: the number of patches that differ.
        eps: the radius, in units of the attacked space.
        box: the smallest and the largest value of the space; None for an embedding space.
        mask: True where a sample may change (real tokens), over the first axes of x; None: all.
        patch: height and width of a patch of the norm patch.
    """

    norm: Norm
    eps: float
    box: tuple[float, float] | None = (0.0, 1.0)
    mask: Bool[Tensor, " batch *positions"] | None = None
    patch: tuple[int, int] | None = None

    def __getitem__(self, rows: Shaped[Tensor, " rows"]) -> Ball:
        """Return the balls of a selection of samples."""
        return self if self.mask is None else replace(self, mask=self.mask[rows])

    def free(self, delta: Float[Tensor, " batch *sample"]) -> Float[Tensor, " batch *sample"]:
        """Set a perturbation to zero at masked positions."""
        if self.mask is None:
            return delta
        return delta * self.mask.reshape(*self.mask.shape, *[1] * (delta.ndim - self.mask.ndim))


def project(
    z: Float[Tensor, " batch *sample"], x: Float[Tensor, " batch *sample"], ball: Ball
) -> Float[Tensor, " batch *sample"]:
    """Project z onto the ball around x: onto the norm ball, then into the box.

    For a sample x inside its box the result satisfies both constraints (clipping to the box
    brings every coordinate closer to x). It is the nearest such point for linf, and wherever the
    box does not bind. Exact up to the rounding of x + delta.
    """
    if ball.patch is not None:  # the patches that differ most; nothing is added to their values
        moved = sum_patches((z - x).abs(), ball.patch).topk(int(ball.eps))[1]
        z = torch.where(select_places(moved, x, ball.patch), z, x)
        return z if ball.box is None else z.clamp(*ball.box)
    delta = ball.free(z - x)
    if ball.norm == "linf":
        delta = delta.clamp(-ball.eps, ball.eps)
    elif ball.norm == "l1":
        # Each entry shrinks by t, the largest (sum of the k largest entries - eps) / k over k
        # (Duchi et al., 2008); inside the ball t is 0.
        size = delta.abs().flatten(1)
        excess = size.sort(1, descending=True)[0].cumsum(1, dtype=torch.float64) - ball.eps
        counts = torch.arange(1, size.shape[1] + 1, device=x.device)
        t = (excess / counts).amax(1).clamp_min(0).to(x).reshape(-1, *[1] * (x.ndim - 1))
        delta = delta.sign() * (delta.abs() - t).clamp_min(0)
    else:
        # A point inside the ball is scaled by eps / eps = 1; at eps = 0 nothing is divided by 0.
        smallest = max(ball.eps, torch.finfo(x.dtype).tiny)
        delta = delta * (ball.eps / _lengths(delta, ball.norm).clamp_min(smallest))
    return x + delta if ball.box is None else (x + delta).clamp(*ball.box)


def check_inside(
    z: Any, x: Float[Tensor, " batch *sample"], ball: Ball, attack: str
) -> Float[Tensor, " batch *sample"]:
    """Check that the result of an attack is inside the ball, and remove its rounding error.

    An attack may compute in float32, on samples mapped to another box. Every entry then has an
    error of about 2^-24 times the largest value, and an l2 norm adds up the errors. ROUNDINGS (the
    package needs 1.3) and SLACK tolerate these errors.

    Raises:
        EvaluationError: z is no tensor of x's shape, not finite, or outside of the ball or box.
    """
    if not isinstance(z, Tensor) or z.shape != x.shape:
        given = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        raise blame_attack(attack, f"returned {given}, not samples of shape {tuple(x.shape)}")
    z = z.detach().to(x)
    if bad := int((~z.isfinite().flatten(1).all(1)).sum()):
        raise blame_attack(attack, f"returned values that are not finite on {bad} samples")
    near = project(z, x, ball)
    excess = distance(z, near, ball.norm, ball.patch)
    allowed = torch.full_like(excess, _rounding(x, ball, torch.float32))
    if ball.norm == "l1":  # entries that did not move have no error
        allowed *= (z != x).flatten(1).to(allowed).mean(1)
    if bad := int((excess > SLACK * ball.eps + allowed).sum()):
        far = float(excess.max())
        text = f"left the ball or the box on {bad} samples, by up to {far:.3g}"
        raise blame_attack(attack, text)
    return near


def _rounding(x: Tensor, ball: Ball, dtype: torch.dtype) -> float:
    # The rounding errors of the entries add up in the norm: in l2 as sqrt(entries).
    size = max(float(x.abs().amax()) + ball.eps, *map(abs, ball.box or (0.0,)))
    return ROUNDINGS * torch.finfo(dtype).eps / 2 * measure_ones(ball.norm, x.shape[1:]) * size


def measure_ones(norm: Norm, shape: Sequence[int]) -> float:
    """Return the norm of a sample whose entries are all 1; for patches it is that of one."""
    size = math.prod(shape)
    return math.sqrt({"l2": size, "l1": size**2, "token-l2": shape[-1]}.get(norm, 1))


def is_resolved(x: Float[Tensor, " batch *sample"], ball: Ball) -> bool:
    """Say whether the radius is larger than the rounding of points in the ball around x."""
    return ball.eps == 0 or ball.eps >= _rounding(x, ball, x.dtype)


def blame_attack(attack: str, what: str) -> EvaluationError:
    """Return the error for an attack whose result is invalid."""
    return EvaluationError(
        f"the attack {attack} {what}", "This is a bug in the attack. Leave it out of --attack."
    )


def distance(
    z: Float[Tensor, " batch *sample"],
    x: Float[Tensor, " batch *sample"],
    norm: Norm,
    patch: tuple[int, int] | None = None,
) -> Float[Tensor, " batch"]:
    """Return ||z - x|| of each sample, in the norm of the ball; patches: how many differ."""
    if patch is not None:
        return (sum_patches((z - x).abs(), patch) > 0).sum(1).to(x)
    return _lengths(z - x, norm).flatten(1).amax(1)


def sum_patches(
    values: Float[Tensor, "batch channels height width"], patch: tuple[int, int]
) -> Float[Tensor, "batch places"]:
    """Return the sum of the values in each patch of the grid, row by row."""
    return F.avg_pool2d(values.sum(1, keepdim=True), patch, divisor_override=1).flatten(1)


def select_places(
    places: Int[Tensor, "batch k"],
    x: Float[Tensor, "batch channels height width"],
    patch: tuple[int, int],
) -> Bool[Tensor, "batch 1 height width"]:
    """Return a mask of the pixels in some places of the grid, numbered as in `sum_patches`."""
    height, width = x.shape[2] // patch[0], x.shape[3] // patch[1]
    grid = torch.zeros(len(x), height * width, dtype=torch.bool, device=x.device)
    grid = grid.scatter(1, places, True).view(-1, 1, height, width)
    return grid.repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3)


def steepest(
    gradient: Float[Tensor, " batch *sample"], ball: Ball
) -> Float[Tensor, " batch *sample"]:
    """Return the direction of unit norm along which the loss rises fastest.

    sign(g) for linf, g / ||g||_2 for l2 (per token for token-l2), 0 where g is 0. For l1 only the
    largest entry of g moves. Gradients are scaled by their largest entry first: their squares
    underflow on a confident classifier.
    """
    gradient = ball.free(gradient)
    if ball.norm == "linf":
        return gradient.sign()
    tiny = torch.finfo(gradient.dtype).tiny
    largest = gradient.abs().amax(_axes(gradient, ball.norm), keepdim=True)
    gradient = gradient / largest.clamp_min(tiny)
    if ball.norm == "l1":  # equal entries share the step
        gradient = gradient * (gradient.abs() == 1)
    return gradient / _lengths(gradient, ball.norm).clamp_min(tiny)


def random_start(
    x: Float[Tensor, " batch *sample"], ball: Ball, generator: torch.Generator
) -> Float[Tensor, " batch *sample"]:
    """Draw a point of each ball: uniform in the cube (linf), in a uniform direction at eps (l2).

    For l1, a normal point is projected onto the ball, so that several entries change.
    For patches, draw values of the whole box: the attack chooses the places.

    The draw is on the CPU in float32, so that all devices and precisions have equal starts.
    """
    if ball.patch is not None:
        low, high = ball.box or (0.0, 1.0)
        return low + (high - low) * torch.rand(x.shape, generator=generator).to(x)
    if ball.norm == "linf":
        noise = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float32) - 1
        return project(x + ball.eps * noise.to(x), x, ball)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x)
    far = noise if ball.norm == "l1" else steepest(noise, ball)
    return project(x + ball.eps * far, x, ball)


def _axes(delta: Tensor, norm: Norm) -> tuple[int, ...]:
    return (-1,) if norm == "token-l2" else tuple(range(1, delta.ndim))


def _lengths(delta: Tensor, norm: Norm) -> Tensor:
    """Return the norm of each sample's (token-l2: each token's) perturbation, for broadcasting.

    Squares are summed in float64: those of 1e20 overflow in float32.
    """
    axes = _axes(delta, norm)
    if norm == "linf":
        return delta.abs().amax(axes, keepdim=True)
    power = 1 if norm == "l1" else 2
    lengths = torch.linalg.vector_norm(delta, power, axes, keepdim=True, dtype=torch.float64)
    return lengths.to(delta)
