"""Gradient ascent for inputs of a head with a large norm; the result is a lower limit.

Searches over tokens take one head of affine self-attention; `ball_norm` takes any heads.

The steepest tokens are at three points (ours): most tokens are followers, which share their
attention between two leaders on opposite sides of the ball, so every follower's output changes
with a leader. Without a mask, no search over all tokens was seen to end higher from n = 5 on. With
the closed form for copies, the search costs as much as one for three tokens, for every n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from lipaudit.theory.head_bounds import split_heads
from lipaudit.theory.head_norms import head_norms
from lipaudit.theory.heads import Heads, Projection, are_affine, projections, unit_values
from lipaudit.theory.products import mean_value
from lipaudit.theory.spectral import random_starts
from lipaudit.theory.worst_tokens import affine_projections, duplicated_norm, move_heads

Heights = Callable[[Float[Tensor, "rows size"]], Float[Tensor, " rows"]]

_MEMORY = 12
_FIRST = 0.1  # length of a step without a memory
_RISE = 1e-4  # least share of the rise that the gradient promises
_SHRINK, _TRIES = 0.2, 10
_PATIENCE = 5


class Summit(NamedTuple):
    """The points of the rows, with height and gradient."""

    x: Float[Tensor, "rows size"]
    height: Float[Tensor, " rows"]
    slope: Float[Tensor, "rows size"]


def climb(
    heights: Heights, x: Float[Tensor, "rows size"], *, steps: int, gain: float = 1e-6
) -> Summit:
    """Return the end point of each row's climb; rows are independent.

    Args:
        heights: the function to maximise; differentiable, one number per row.
        x: the starts.
        steps: largest number of steps.
        gain: a row stops if it gains less than this, relatively, in `_PATIENCE` steps in a row.

    >>> peak = climb(lambda x: 5 - (x - 3).square().sum(1), torch.zeros(1, 2), steps=50)
    >>> peak.x
    tensor([[3., 3.]])
    """
    place = measure_heights(heights, x)
    idle = torch.zeros_like(place.height)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(steps):
        move = _turn_uphill(place.slope, pairs)
        last, place = place, _step(heights, place, move, idle < _PATIENCE)
        # Steps, and how the slope fell along each; rows in which it did not fall are ignored.
        step, fall = place.x - last.x, last.slope - place.slope
        bend = _dot(step, fall)
        firm = bend > 1e-12 * step.norm(dim=1, keepdim=True) * fall.norm(dim=1, keepdim=True)
        pairs = [*pairs[1 - _MEMORY :], (step, fall, torch.where(firm, 1 / bend, 0.0))]
        gained = place.height - last.height > gain * place.height.abs()
        idle = torch.where(gained, 0.0, idle + 1)
        if bool((idle >= _PATIENCE).all()):
            break
    return place


def measure_heights(heights: Heights, x: Float[Tensor, "rows size"]) -> Summit:
    """Return the heights at x with their gradients."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        height = heights(x)
        (slope,) = torch.autograd.grad(height.sum(), x)
    return Summit(x.detach(), height.detach(), slope)


def _step(heights: Heights, place: Summit, move: Tensor, active: Tensor) -> Summit:
    """Move active rows, in shorter steps until they rise; rows that cannot rise stay."""
    size = torch.ones_like(place.height)
    promised = _dot(move, place.slope)[:, 0]
    arrived = promised <= torch.finfo(move.dtype).eps ** 0.5 * place.height.abs()
    left = (active & ~arrived).nonzero()[:, 0]
    for _ in range(_TRIES):
        if not len(left):
            break
        tried = measure_heights(heights, place.x[left] + size[left, None] * move[left])
        rises = tried.height >= place.height[left] + _RISE * size[left] * promised[left]
        to = left[rises]
        place = Summit(*(a.index_copy(0, to, b[rises]) for a, b in zip(place, tried, strict=True)))
        left = left[~rises]
        size = size * _SHRINK  # useless for rows that have risen
    return place


def _turn_uphill(slope: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Return the direction of L-BFGS after these steps; no row moves by more than 1."""
    move, shares = slope, []
    for step, fall, weight in reversed(pairs):
        shares.append(weight * _dot(step, move))
        move = move - shares[-1] * fall
    # The length scale is that of the last step; of a first one by convention.
    tiny = torch.finfo(slope.dtype).tiny
    steepness = slope.norm(dim=1, keepdim=True).clamp_min(tiny)
    size = _FIRST / steepness
    if pairs:
        _, fall, weight = pairs[-1]
        last = 1 / (weight * _dot(fall, fall)).clamp_min(tiny)
        size = torch.where(weight > 0, last, size)
    move = size * move
    for (step, fall, weight), share in zip(pairs, reversed(shares), strict=True):
        move = move + (share - weight * _dot(fall, move)) * step
    move = torch.where(_dot(move, slope) > 0, move, _FIRST * (slope / steepness))
    return move / move.norm(dim=1, keepdim=True).clamp_min(1.0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


SEARCHES = 4
"""Number of independent searches; their spread shows how reliable the result is."""
STARTS = 6
"""Number of starts of a search at each length, besides the end point of the previous length."""
STEPS = 150

_POWER_STEPS = 5
_ROUGH = 1e-4  # a row stops if a step gains less than this
_POLISH = 200  # largest number of steps for the highest ends, after their copies are rounded
_TILT = 0.1  # direction of the leaders towards the query that they share
_EDGE = 0.95  # starts are slightly inside the ball, where the gradient sees its boundary


@dataclass(frozen=True)
class Steepest:
    """The steepest n tokens found by each of several independent searches.

    Attributes:
        points: the distinct tokens.
        copies: how often each is repeated, in this order.
        norm: ||J|| at the n tokens.
    """

    points: Float[Tensor, "searches points D"]
    copies: Int[Tensor, "searches points"]
    norm: Float[Tensor, " searches"]


def steepest_tokens(
    heads: Heads, radius: float, lengths: Sequence[int], *, seed: int, causal: bool
) -> Iterator[Steepest]:
    """Yield, for every length, tokens with ||x_i|| <= radius at which ||J|| is large.

    Each search maximises ||J^T u|| over the three points, the number of copies of the leaders and
    the unit vector u together, from starts at random and from its end at the length before. It
    runs on the CPU in float64, so that it ends at the same tokens wherever the model is.

    Args:
        heads: one head, in float64.
        radius: R.
        lengths: numbers of tokens, ascending.
        seed: seed of the starts.
        causal: whether later keys are masked; leaders then come first, one copy each.
    """
    # The head on the CPU, in the coordinates that its projections read: `basis` are the axes.
    read = affine_projections(heads)
    weights = [projection.weight[0].cpu() for projection in read]
    left, size, _ = torch.linalg.svd(torch.cat(weights, 1), full_matrices=False)
    basis = left[:, : max(int((size > 1e-12 * size[0]).sum()), 1)].mT
    biases = [None if p.bias is None else p.bias.cpu() for p in read]
    to_q, to_k, to_v = (
        Projection((basis @ weight)[None], bias, None, "affine")
        for weight, bias in zip(weights, biases, strict=True)
    )
    scale = heads.scale[:1].cpu()
    head = replace(heads, to_q=to_q, to_k=to_k, to_v=to_v, scale=scale, out=None)
    head = move_heads(head, basis.new_zeros(1, 1, len(basis)))
    generator = torch.Generator().manual_seed(seed)
    last = torch.empty(SEARCHES, 0, 3 * len(basis) + 1, dtype=basis.dtype)
    for n in lengths:
        slope = _Slope(head, radius, n, causal)
        fresh = slope.starts(SEARCHES * STARTS, generator).view(SEARCHES, STARTS, -1)
        last = slope.climb_all(torch.cat([fresh, last], 1), generator)[:, None]
        yield slope.steepest(last[:, 0], basis, seed)


@dataclass(frozen=True)
class _Slope:
    """||J^T u|| / ||u|| as a function of rows of parameters: three points, copies, and u.

    A point z stands for R sin|z| z / |z|, any point of the ball; t for (n / 3)^(sin^2 t) copies of
    each leader. Unmasked, u is over the points, weighted by copies as in `weighted_norm`.

    Attributes:
        head: in as few coordinates as it reads.
        radius: R.
        n: tokens.
        causal: whether later keys are masked.
        whole: whether the copies are rounded, and stay.
    """

    head: Heads
    radius: float
    n: int
    causal: bool
    whole: bool = False

    def starts(self, count: int, generator: torch.Generator) -> Tensor:
        """Return points where followers attend to both leaders; half of them with copies."""
        to_q, to_k, to_v = affine_projections(self.head)
        wq, wk, wv = (projection.weight[0] for projection in (to_q, to_k, to_v))
        follower, apart = normalize(_normal(generator, 2, count, len(wq)), dim=-1)
        bias = torch.zeros_like(wq[0]) if to_q.bias is None else to_q.bias[0]
        # On this side of the ball the bias turns a follower's attention away from other followers.
        follower = torch.where((follower @ wk @ bias)[:, None] > 0, -follower, follower)
        query = normalize((self.radius * follower @ wq + bias) @ wk.mT, dim=1)
        apart = apart @ wv @ wv.mT
        apart = normalize(apart - (apart * query).sum(1, keepdim=True) * query, dim=1)
        leaders = [normalize(side * apart + _TILT * query, dim=1) for side in (1, -1)]
        points = torch.stack([*leaders, follower], 1) * (_EDGE * math.pi / 2)
        turns = torch.rand(count, 1, generator=generator, dtype=points.dtype).sqrt().asin()
        turns[::2] = 0.0
        return torch.cat([points.flatten(1), turns], 1)

    def climb_all(self, starts: Tensor, generator: torch.Generator) -> Tensor:
        """Return the highest end of each search, with whole copies."""
        rows, turn = starts.flatten(0, 1), 3 * self.head.x.shape[2]
        # u, brought closer to the leading left singular vector by power steps.
        size = (self.n if self.causal else min(self.n, 3)) * self.head.v.shape[3]
        u = normalize(_normal(generator, len(rows), size), dim=1)
        for _ in range(_POWER_STEPS):
            place = measure_heights(self._heights, torch.cat([rows, u], 1))
            # The gradient of h = ||J^T u|| / ||u|| in a unit vector u is J J^T u / h - h u.
            u = normalize(place.slope[:, -size:] + place.height[:, None] * u, dim=1)
        place = climb(self._heights, torch.cat([rows, u], 1), steps=STEPS, gain=_ROUGH)
        ends = _highest(place.x.view(*starts.shape[:2], -1), place.height)
        # From both whole numbers of copies beside the end, in a few more steps.
        leaders = self._copies(ends)[:, 0]
        near = [leaders.floor(), leaders.ceil()] if self._most > 1 else [leaders.floor()]
        turns = [
            (n.clamp(1, self._most).log() / (self._log_most or 1.0)).sqrt().asin() for n in near
        ]
        ends = torch.stack([ends.clone() for _ in near], 1)
        ends[:, :, turn] = torch.stack(turns, 1)
        whole = replace(self, whole=True)
        place = climb(whole._heights, ends.flatten(0, 1), steps=_POLISH)
        ends = _highest(place.x.view_as(ends), place.height)
        return ends[:, : starts.shape[2]]

    def steepest(self, rows: Tensor, basis: Tensor, seed: int) -> Steepest:
        """Return the tokens that the rows describe, and the norms there."""
        points, copies = self._points(rows), replace(self, whole=True)._copies(rows)
        if self.causal:
            x = points[:, self._places]
            at = move_heads(self.head, x, causal=True)
            norm = head_norms(at, seeds=[seed] * len(x)).norm[:, 0]
        else:
            at = move_heads(self.head, points, causal=False)
            pairs = enumerate(copies)
            norm = torch.cat([duplicated_norm(at.row(i), each)[0] for i, each in pairs])
        return Steepest(points @ basis, copies.long(), norm)

    @property
    def _most(self) -> int:
        """Return the largest number of copies of a leader."""
        return 1 if self.causal else max(self.n // 3, 1)

    @property
    def _places(self) -> Tensor:
        """Return the point of each token."""
        return torch.arange(self.n).clamp_max(2)

    def _points(self, rows: Tensor) -> Tensor:
        width = self.head.x.shape[2]
        z = rows[:, : 3 * width].view(len(rows), 3, width)[:, : self.n]
        length = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min(1e-12)
        return self.radius * torch.sin(length) * z / length

    def _copies(self, rows: Tensor) -> Tensor:
        turns = rows[:, 3 * self.head.x.shape[2]]
        leaders = torch.exp(self._log_most * torch.sin(turns) ** 2)
        leaders = leaders.detach().round() if self.whole else leaders
        return torch.stack([leaders, leaders, self.n - 2 * leaders], 1)[:, : self.n]

    @property
    def _log_most(self) -> float:
        return math.log(self.n / 3) if self._most > 1 else 0.0

    def _heights(self, rows: Tensor) -> Tensor:
        points, copies = self._points(rows), self._copies(rows)
        x = points[:, self._places] if self.causal else points
        u = rows[:, 3 * self.head.x.shape[2] + 1 :].view(*x.shape[:2], -1)
        at = move_heads(self.head, x, causal=self.causal)
        root = torch.ones_like(x[..., :1]) if self.causal else copies.sqrt()[..., None]
        if not self.causal:
            at = replace(at, bias=copies.log()[:, None, None])
        outputs = (at.attention() @ at.v)[:, 0]
        (pulled,) = torch.autograd.grad(outputs, x, root * u, create_graph=True)
        return (pulled / root).flatten(1).norm(dim=1) / u.flatten(1).norm(dim=1)


def _highest(rows: Tensor, height: Tensor) -> Tensor:
    which = height.view(rows.shape[:2]).argmax(1)
    return rows[torch.arange(len(rows)), which]


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


AT_X, UPHILL = 20, 12
"""Power steps at X and ascent steps. More steps increased few norms, by about 1 %."""


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
    unit = unit.with_same_map(v=unit.v - mean_value(unit.attention(), unit.v))
    n, dv = unit.q.shape[2], unit.v.shape[3]
    u = random_starts(seeds, n * dv).to(unit.q)[unit.sample].view(-1, 1, n, dv)
    norms = []
    for some in split_heads(unit):
        # In the coordinates that the projections of a head read; R preserves lengths there.
        weights = torch.cat([projection.weight for projection in projections(some)], -1)
        read = torch.linalg.qr(weights, mode="r").R
        move = some.q.new_zeros(*some.q.shape[:3], read.shape[1])
        best, along = torch.zeros_like(some.q[..., 0, 0]), u.expand(-1, some.q.shape[1], -1, -1)
        for step in range(AT_X + UPHILL):
            height, uphill, along = _slopes(some, read, move, _unit_matrices(along))
            best = torch.maximum(best, height)
            if step >= AT_X:  # out to the edge in half of the ascent, along it in the other
                move = r * min(1.0, 2 * (step - AT_X + 1) / UPHILL) * _unit_matrices(uphill)
        norms.append(best)
    return torch.cat(norms, 1) * size.to(u)


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


def _unit_matrices(t: Tensor) -> Tensor:
    # By the largest entry first: squares of entries below 1e-154 vanish, and what is divided by
    # the tiny number in place of their sum is no unit vector.
    tiny = torch.finfo(t.dtype).tiny
    t = t / t.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    size = torch.linalg.vector_norm(t, dim=(-2, -1), keepdim=True)
    return t / size.clamp_min(tiny)
