"""Balls: the points that an attack may reach, and the steps for each norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.errors import EvaluationError
from lipaudit.tables.trials import Norm

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

    Samples = Float[Tensor, " batch *sample"]
    Labels = Int[Tensor, " batch"]
    Logits = Float[Tensor, "batch classes"]
    PerSample = Float[Tensor, " batch"]

# The smallest and the largest value of the attacked space.
Box = tuple[float, float]
# Height and width of a patch, in pixels.
PatchSize = tuple[int, int]
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
    box: Box | None = (0.0, 1.0)
    mask: Bool[Tensor, " batch *positions"] | None = None
    patch: PatchSize | None = None

    def __getitem__(self, rows: Shaped[Tensor, " rows"]) -> Ball:
        """Return the balls of a selection of samples."""
        if self.mask is None:
            return self
        return replace(self, mask=self.mask[rows])

    def free(self, delta: Samples) -> Samples:
        """Set a perturbation to zero at masked positions."""
        if self.mask is None:
            return delta
        return delta * add_axes(self.mask, delta)

    def clamp(self, z: Samples) -> Samples:
        """Move every entry into the box."""
        if self.box is None:
            return z
        low, high = self.box
        return z.clamp(low, high)


def add_axes(values: Tensor, x: Tensor) -> Tensor:
    """Add axes of length 1 behind those of the values, so that they broadcast over x."""
    missing = x.ndim - values.ndim
    return values.reshape(values.shape + (1,) * missing)


def project(z: Samples, x: Samples, ball: Ball) -> Samples:
    """Project z onto the ball around x: onto the norm ball, then into the box.

    Clipping to the box brings every coordinate closer to a sample x inside the box, so the result
    satisfies both constraints. The result is the nearest point of ball and box for linf, and for
    other norms if the box clips nothing. Exact up to the rounding of x + delta.
    """
    if ball.patch is not None:
        # The radius is a number of patches: keep z in the patches that differ most from x, and
        # restore x in all other patches.
        changes = sum_patches((z - x).abs(), ball.patch)
        places = changes.topk(int(ball.eps)).indices
        inside = select_places(places, x, ball.patch)
        return ball.clamp(torch.where(inside, z, x))
    delta = ball.free(z - x)
    if ball.norm == "linf":
        delta = delta.clamp(-ball.eps, ball.eps)
    elif ball.norm == "l1":
        delta = _project_l1(delta, ball.eps)
    else:
        # l2 and token-l2: scale longer perturbations to the length eps. Shorter lengths are raised
        # to eps, so that a point inside the ball is scaled by eps / eps = 1. The tiny number
        # avoids 0 / 0 at eps = 0.
        smallest = max(ball.eps, torch.finfo(x.dtype).tiny)
        lengths = _lengths(delta, ball.norm).clamp_min(smallest)
        delta = delta * (ball.eps / lengths)
    return ball.clamp(x + delta)


def _project_l1(delta: Samples, eps: float) -> Samples:
    """Return the nearest perturbation with an l1 norm of at most eps, for each sample.

    Soft threshold (Duchi et al., 2008): the absolute value of each entry shrinks by
    t = max_k (sum of the k largest absolute values - eps) / k, but not below 0. Inside the ball
    t is 0.
    """
    sizes = delta.abs()
    descending = sizes.flatten(1).sort(1, descending=True).values
    excess = descending.cumsum(1, dtype=torch.float64) - eps
    k = torch.arange(1, excess.shape[1] + 1, device=delta.device)
    threshold = (excess / k).amax(1).clamp_min(0)
    threshold = add_axes(threshold.to(delta), delta)
    return delta.sign() * (sizes - threshold).clamp_min(0)


def check_inside(z: Any, x: Samples, ball: Ball, attack: str) -> Samples:
    """Check that the result of an attack is inside the ball, and remove its rounding error.

    An attack may compute in float32, on samples mapped to another box. Every entry then has an
    error of about 2^-24 times the largest value, and an l2 norm adds up the errors. ROUNDINGS, a
    factor on these errors (AutoAttack needs 1.3), and SLACK, a share of the radius, tolerate them.

    Args:
        z: what the attack returned.
        x: the samples.
        ball: the ball.
        attack: name of the attack, for messages.

    Returns:
        z, projected onto the ball.

    Raises:
        EvaluationError: z is no tensor of x's shape, not finite, or outside of the ball or box.
    """
    z = _require_finite(z, x, attack)
    projected = project(z, x, ball)
    excess = distance(z, projected, ball.norm, ball.patch)
    rounding = torch.full_like(excess, _bound_rounding(x, ball, torch.float32))
    if ball.norm == "l1":  # only entries that changed have an error: scale by their share
        moved = (z != x).flatten(1).to(rounding)
        rounding *= moved.mean(1)
    is_outside = excess > SLACK * ball.eps + rounding
    bad = int(is_outside.sum())
    if bad:
        largest = float(excess.max())
        text = f"left the ball or the box on {bad} samples, by up to {largest:.3g}"
        raise blame_attack(attack, text)
    return projected


def _require_finite(z: Any, x: Tensor, attack: str) -> Tensor:
    """Return the result z of an attack as a tensor like the samples x.

    Raises:
        EvaluationError: z is no tensor of x's shape, or not finite.
    """
    expected = f"not samples of shape {tuple(x.shape)}"
    if not isinstance(z, Tensor):
        raise blame_attack(attack, f"returned {type(z).__name__}, {expected}")
    if z.shape != x.shape:
        raise blame_attack(attack, f"returned {tuple(z.shape)}, {expected}")
    z = z.detach().to(x)
    is_finite = z.isfinite().flatten(1).all(1)
    bad = int((~is_finite).sum())
    if bad:
        raise blame_attack(attack, f"returned values that are not finite on {bad} samples")
    return z


def _bound_rounding(x: Tensor, ball: Ball, dtype: torch.dtype) -> float:
    """Return a generous limit of the rounding error of a point in the ball, in the ball's norm.

    Args:
        x: the samples.
        ball: the ball.
        dtype: the dtype in which the point is computed.
    """
    largest = float(x.abs().amax()) + ball.eps
    for end in ball.box or ():
        largest = max(largest, abs(end))
    # Every entry has a rounding error of about `unit` times the largest value; ROUNDINGS is a
    # generous factor. A vector with the same error in every entry has the norm of ones, times
    # this error.
    norm_of_ones = measure_ones(ball.norm, x.shape[1:])
    unit = torch.finfo(dtype).eps / 2
    return ROUNDINGS * unit * norm_of_ones * largest


def measure_ones(norm: Norm, shape: Sequence[int]) -> float:
    """Return the norm of a sample of this shape whose entries are all 1; 1 for linf and patches.

    The function serves to bound errors: an error e in every entry has the norm e times this one.
    """
    entries = math.prod(shape)
    if norm == "l1":
        return entries
    if norm == "l2":
        return math.sqrt(entries)
    if norm == "token-l2":
        return math.sqrt(shape[-1])
    return 1.0


def is_resolved(x: Samples, ball: Ball) -> bool:
    """Say whether the radius is larger than the rounding of points in the ball around x.

    A radius that is not resolved is smaller than rounding errors: an attack misses part of the
    ball.
    """
    if ball.eps == 0:  # the only point is x itself
        return True
    return ball.eps >= _bound_rounding(x, ball, x.dtype)


def blame_attack(attack: str, what: str) -> EvaluationError:
    """Return the error for an attack whose result is invalid."""
    return EvaluationError(
        f"the attack {attack} {what}", "This is a bug in the attack. Leave it out of --attack."
    )


def distance(
    z: Samples,
    x: Samples,
    norm: Norm,
    patch: PatchSize | None = None,
) -> PerSample:
    """Return ||z - x|| of each sample in a norm; for patches, how many patches differ."""
    if patch is not None:
        differs = sum_patches((z - x).abs(), patch) > 0
        return differs.sum(1).to(x)
    # One length per sample. For token-l2 one length per token: the norm is the largest length.
    lengths = _lengths(z - x, norm).flatten(1)
    return lengths.amax(1)


def sum_patches(
    values: Float[Tensor, "batch channels height width"], patch: PatchSize
) -> Float[Tensor, "batch places"]:
    """Return the sum of the values in each patch of the grid; patches are numbered row by row."""
    pixels = values.sum(1, keepdim=True)
    sums = F.avg_pool2d(pixels, patch, divisor_override=1)  # divided by 1: a sum, no mean
    return sums.flatten(1)


def select_places(
    places: Int[Tensor, "batch k"],
    x: Float[Tensor, "batch channels height width"],
    patch: PatchSize,
) -> Bool[Tensor, "batch 1 height width"]:
    """Return a mask that is True at the pixels of the given patches.

    The patches of an image form a grid; `places` are their numbers, row by row.
    """
    height, width = patch
    rows = x.shape[2] // height
    columns = x.shape[3] // width
    chosen = x.new_zeros(len(x), rows * columns, dtype=torch.bool)
    chosen = chosen.scatter(1, places, True)
    grid = chosen.view(-1, 1, rows, columns)
    # From one flag per patch to one flag per pixel.
    return grid.repeat_interleave(height, 2).repeat_interleave(width, 3)


def steepest(gradient: Samples, ball: Ball) -> Samples:
    """Return the direction of unit norm, in the norm of the ball, along which the loss rises most.

    For a gradient g the direction is sign(g) in linf, and g / ||g||_2 in l2 (per token in
    token-l2); 0 where g is 0. In l1 only the largest entry of g moves. Gradients are first divided
    by their largest entry, because the squares of the tiny gradients of a confident classifier
    would underflow.
    """
    gradient = ball.free(gradient)
    if ball.norm == "linf":
        return gradient.sign()
    tiny = torch.finfo(gradient.dtype).tiny
    axes = _axes(gradient, ball.norm)
    largest = gradient.abs().amax(axes, keepdim=True)
    gradient = gradient / largest.clamp_min(tiny)
    if ball.norm == "l1":  # equal entries share the step
        gradient = gradient * (gradient.abs() == 1)
    lengths = _lengths(gradient, ball.norm).clamp_min(tiny)
    return gradient / lengths


def random_start(x: Samples, ball: Ball, generator: torch.Generator) -> Samples:
    """Draw a random point in the ball around each sample, at which an attack starts.

    For linf the point is uniform in the ball, a cube. For l2 the point is on the sphere, in a
    uniform direction. For l1 a normally distributed perturbation is projected onto the ball, so
    that several entries change. For patches all pixels are drawn from the box, and the attack
    chooses the patches that get them.

    The draw is on the CPU in float32, so that all devices and precisions have equal starts.
    """
    if ball.patch is not None:
        low, high = ball.box or (0.0, 1.0)
        uniform = torch.rand(x.shape, generator=generator)
        return low + (high - low) * uniform.to(x)
    if ball.norm == "linf":
        uniform = torch.rand(x.shape, generator=generator, dtype=torch.float32)
        direction = (2 * uniform - 1).to(x)
    else:
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x)
        if ball.norm != "l1":
            direction = steepest(direction, ball)
    return project(x + ball.eps * direction, x, ball)


def _axes(delta: Tensor, norm: Norm) -> tuple[int, ...]:
    """Return the axes over which the norm sums: the embedding of a token, or the whole sample."""
    if norm == "token-l2":
        return (-1,)
    return tuple(range(1, delta.ndim))


def _lengths(delta: Tensor, norm: Norm) -> Tensor:
    """Return the norm of each sample's perturbation, or of each token's for token-l2.

    The summed axes stay with length 1, so that the norms broadcast over `delta`. Squares are
    summed in float64: the square of 1e20 would overflow in float32.
    """
    axes = _axes(delta, norm)
    if norm == "linf":
        return delta.abs().amax(axes, keepdim=True)
    power = 1 if norm == "l1" else 2
    lengths = torch.linalg.vector_norm(delta, power, axes, keepdim=True, dtype=torch.float64)
    return lengths.to(delta)
