"""Ascent from many starts at once: L-BFGS in every row, each step a rise."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Heights = Callable[[Float[Tensor, "rows size"]], Float[Tensor, " rows"]]

_MEMORY = 12
_FIRST = 0.1  # length of a step without a memory
_RISE = 1e-4  # least share of the rise that the gradient promises
_SHRINK, _TRIES = 0.2, 10
_PATIENCE = 5


class Place(NamedTuple):
    """Where the rows are, how high, and the gradient there."""

    x: Float[Tensor, "rows size"]
    height: Float[Tensor, " rows"]
    slope: Float[Tensor, "rows size"]


def climb(
    heights: Heights, x: Float[Tensor, "rows size"], *, steps: int, gain: float = 1e-6
) -> Place:
    """Return where each row gets to from its start; rows do not know of each other.

    Args:
        heights: what is maximised; differentiable, one number a row.
        x: the starts.
        steps: most steps.
        gain: a row rests when it gains less than this, relatively, in `_PATIENCE` steps on end.

    >>> peak = climb(lambda x: 5 - (x - 3).square().sum(1), torch.zeros(1, 2), steps=50)
    >>> peak.x
    tensor([[3., 3.]])
    """
    place = standing(heights, x)
    memory = _Memory()
    idle = torch.zeros_like(place.height)
    for _ in range(steps):
        last, place = place, _step(heights, place, memory.direction(place.slope), idle < _PATIENCE)
        memory.keep(last, place)
        gained = place.height - last.height > gain * place.height.abs()
        idle = torch.where(gained, 0.0, idle + 1)
        if bool((idle >= _PATIENCE).all()):
            break
    return place


def standing(heights: Heights, x: Float[Tensor, "rows size"]) -> Place:
    """Return the heights at x with their gradients."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        height = heights(x)
        (slope,) = torch.autograd.grad(height.sum(), x)
    return Place(x.detach(), height.detach(), slope)


def _step(heights: Heights, place: Place, move: Tensor, active: Tensor) -> Place:
    """Go along the move in active rows, less far until they rise; stay where they do not."""
    size = torch.ones_like(place.height)
    promised = _dot(move, place.slope)[:, 0]
    arrived = promised <= torch.finfo(move.dtype).eps ** 0.5 * place.height.abs()
    left = (active & ~arrived).nonzero()[:, 0]
    for _ in range(_TRIES):
        if not len(left):
            break
        tried = standing(heights, place.x[left] + size[left, None] * move[left])
        rises = tried.height >= place.height[left] + _RISE * size[left] * promised[left]
        to = left[rises]
        place = Place(*(a.index_copy(0, to, b[rises]) for a, b in zip(place, tried, strict=True)))
        left = left[~rises]
        size = size * _SHRINK  # of rows that have risen it is of no use any more
    return place


class _Memory:
    """The last steps and how the slope fell along each: the inverse Hessian of L-BFGS."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(self, last: Place, place: Place) -> None:
        """Add a step; rows in which the slope did not fall count for nothing."""
        step, fall = place.x - last.x, last.slope - place.slope
        bend = _dot(step, fall)
        firm = bend > 1e-12 * step.norm(dim=1, keepdim=True) * fall.norm(dim=1, keepdim=True)
        weight = torch.where(firm, 1 / bend, 0.0)
        self.pairs = [*self.pairs[1 - _MEMORY :], (step, fall, weight)]

    def direction(self, slope: Tensor) -> Tensor:
        """Return where to go: no further than 1 in any row."""
        move, shares = slope, []
        for step, fall, weight in reversed(self.pairs):
            shares.append(weight * _dot(step, move))
            move = move - shares[-1] * fall
        move = self._size(slope) * move
        for (step, fall, weight), share in zip(self.pairs, reversed(shares), strict=True):
            move = move + (share - weight * _dot(fall, move)) * step
        move = torch.where(_dot(move, slope) > 0, move, _FIRST * _unit(slope))
        return move / move.norm(dim=1, keepdim=True).clamp_min(1.0)

    def _size(self, slope: Tensor) -> Tensor:
        """The length scale of the last step; of a first one by convention."""
        first = _FIRST / slope.norm(dim=1, keepdim=True).clamp_min(_tiny(slope))
        if not self.pairs:
            return first
        _, fall, weight = self.pairs[-1]
        return torch.where(
            weight > 0, 1 / (weight * _dot(fall, fall)).clamp_min(_tiny(fall)), first
        )


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True).clamp_min(_tiny(x))


def _tiny(x: Tensor) -> float:
    return float(torch.finfo(x.dtype).tiny)
