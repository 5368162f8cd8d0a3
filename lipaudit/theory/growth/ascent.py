"""Searches for bad inputs of a head by gradient ascent; what they find is a lower limit.

Every function takes one head of affine self-attention.

The steepest tokens stand at three points (ours): most of them follow, they share their attention
among two leaders on opposite sides of the ball, and every follower's output moves when a leader
does. Unmasked, no search over all tokens was seen to end higher from n = 5 on, and the closed form
of copies makes the search as dear as one for three tokens, whatever n is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from lipaudit.theory.exact.head_norms import head_norms
from lipaudit.theory.growth.climb import climb, standing
from lipaudit.theory.growth.worst_tokens import affine_projections, duplicated_norm, relocated
from lipaudit.theory.heads import Heads, Projection

SEARCHES = 4
"""Independent searches: how far apart they end says how far to trust them."""
STARTS = 6
"""Starts of a search at every length, beside where it ended at the one before."""
STEPS = 150

_POWER_STEPS = 5
_ROUGH = 1e-4  # gain of a step at which starts rest
_POLISH = 200  # most steps of the highest ends, once their copies are whole
_TILT = 0.1  # of the leaders towards the query that they share
_EDGE = 0.95  # starts stand a little inside the ball, where the gradient sees its edge


@dataclass(frozen=True)
class Steepest:
    """The steepest tokens of n that each of several independent searches ended at.

    Attributes:
        points: the distinct tokens.
        copies: how often each is repeated, in this order.
        norm: ||J|| at the n tokens.
    """

    points: Float[Tensor, "searches points D"]
    copies: Int[Tensor, "searches points"]
    norm: Float[Tensor, " searches"]


def steepest_tokens(
    heads: Heads,
    radius: float,
    lengths: Sequence[int],
    *,
    seed: int,
    causal: bool,
) -> Iterator[Steepest]:
    """Yield for every length tokens with ||x_i|| <= radius at which ||J|| is large.

    Each search maximises ||J^T u|| over the three points, the number of copies of the leaders and
    the unit vector u together, from starts at random and from its end at the length before. It
    runs on the CPU in float64, so that it ends at the same tokens wherever the model is.

    Args:
        heads: one head, in float64.
        radius: R.
        lengths: numbers of tokens, ascending.
        seed: of the starts.
        causal: whether later keys are masked; leaders then stand first, one copy each.
    """
    head, basis = _in_span(heads)
    generator = torch.Generator().manual_seed(seed)
    last = torch.empty(SEARCHES, 0, 3 * len(basis) + 1, dtype=basis.dtype)
    for n in lengths:
        slope = _Slope(head, radius, n, causal)
        fresh = slope.starts(SEARCHES * STARTS, generator).view(SEARCHES, STARTS, -1)
        last = slope.climbed(torch.cat([fresh, last], 1), generator)[:, None]
        yield slope.steepest(last[:, 0], basis, seed)


@dataclass(frozen=True)
class _Slope:
    """||J^T u|| / ||u|| over rows of parameters: three points, copies of the leaders, and u.

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
        """Return points where followers attend to both leaders; every second with copies."""
        to_q, to_k, to_v = affine_projections(self.head)
        wq, wk, wv = (projection.weight[0] for projection in (to_q, to_k, to_v))
        follower, apart = normalize(_normal(generator, 2, count, len(wq)), dim=-1)
        bias = torch.zeros_like(wq[0]) if to_q.bias is None else to_q.bias[0]
        # On this side of the ball the bias turns a follower's attention away from followers.
        follower = torch.where((follower @ wk @ bias)[:, None] > 0, -follower, follower)
        query = normalize((self.radius * follower @ wq + bias) @ wk.mT, dim=1)
        apart = apart @ wv @ wv.mT
        apart = normalize(apart - (apart * query).sum(1, keepdim=True) * query, dim=1)
        leaders = [normalize(side * apart + _TILT * query, dim=1) for side in (1, -1)]
        points = torch.stack([*leaders, follower], 1) * (_EDGE * math.pi / 2)
        turns = torch.rand(count, 1, generator=generator, dtype=points.dtype).sqrt().asin()
        turns[::2] = 0.0
        return torch.cat([points.flatten(1), turns], 1)

    def climbed(self, starts: Tensor, generator: torch.Generator) -> Tensor:
        """Return the highest end of each search, with whole copies."""
        rows = self._with_vector(starts.flatten(0, 1), generator)
        place = climb(self._heights, rows, steps=STEPS, gain=_ROUGH)
        ends = _highest(place.x.view(*starts.shape[:2], -1), place.height)
        ways = (torch.floor, torch.ceil) if self._most > 1 else (torch.floor,)
        ends = torch.stack([self._rounded(ends, way) for way in ways], 1)
        whole = replace(self, whole=True)
        place = climb(whole._heights, ends.flatten(0, 1), steps=_POLISH)
        ends = _highest(place.x.view_as(ends), place.height)
        return ends[:, : starts.shape[2]]

    def steepest(self, rows: Tensor, basis: Tensor, seed: int) -> Steepest:
        """Return the tokens that the rows stand for, and the norms there."""
        points, copies = self._points(rows), replace(self, whole=True)._copies(rows)
        if self.causal:
            x = points[:, self._places]
            at = relocated(self.head, x, causal=True)
            norm = head_norms(at, seeds=[seed] * len(x)).norm[:, 0]
        else:
            at = relocated(self.head, points, causal=False)
            pairs = enumerate(copies)
            norm = torch.cat([duplicated_norm(at.row(i), each)[0] for i, each in pairs])
        return Steepest(points @ basis, copies.long(), norm)

    @property
    def _most(self) -> int:
        """Most copies of a leader."""
        return 1 if self.causal else max(self.n // 3, 1)

    @property
    def _places(self) -> Tensor:
        """At which point each token stands."""
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

    def _rounded(self, rows: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Bring the copies of the leaders to a whole number."""
        turn = 3 * self.head.x.shape[2]
        leaders = whole(self._copies(rows)[:, 0]).clamp(1, self._most)
        rows = rows.clone()
        rows[:, turn] = (leaders.log() / (self._log_most or 1.0)).sqrt().asin()
        return rows

    def _with_vector(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Add u, brought closer to the leading left singular vector by power steps."""
        size = (self.n if self.causal else min(self.n, 3)) * self.head.v.shape[3]
        u = normalize(_normal(generator, len(rows), size), dim=1)
        for _ in range(_POWER_STEPS):
            place = standing(self._heights, torch.cat([rows, u], 1))
            # The gradient of h = ||J^T u|| / ||u|| in a unit vector u is J J^T u / h - h u.
            u = normalize(place.slope[:, -size:] + place.height[:, None] * u, dim=1)
        return torch.cat([rows, u], 1)

    def _heights(self, rows: Tensor) -> Tensor:
        points, copies = self._points(rows), self._copies(rows)
        x = points[:, self._places] if self.causal else points
        u = rows[:, 3 * self.head.x.shape[2] + 1 :].view(*x.shape[:2], -1)
        at = relocated(self.head, x, causal=self.causal)
        root = torch.ones_like(x[..., :1]) if self.causal else copies.sqrt()[..., None]
        if not self.causal:
            at = replace(at, bias=copies.log()[:, None, None])
        outputs = (at.attention() @ at.v)[:, 0]
        (pulled,) = torch.autograd.grad(outputs, x, root * u, create_graph=True)
        return (pulled / root).flatten(1).norm(dim=1) / u.flatten(1).norm(dim=1)


def _in_span(heads: Heads) -> tuple[Heads, Tensor]:
    """Return a head in coordinates of what its projections read, on the CPU, and their axes."""
    projections = affine_projections(heads)
    weights = torch.cat([projection.weight[0].cpu() for projection in projections], 1)
    left, size, _ = torch.linalg.svd(weights, full_matrices=False)
    basis = left[:, : max(int((size > 1e-12 * size[0]).sum()), 1)].mT
    to_q, to_k, to_v = (_in_basis(projection, basis) for projection in projections)
    scale = heads.scale[:1].cpu()
    head = replace(heads, to_q=to_q, to_k=to_k, to_v=to_v, scale=scale, out=None)
    return relocated(head, basis.new_zeros(1, 1, len(basis))), basis


def _in_basis(projection: Projection, basis: Tensor) -> Projection:
    bias = None if projection.bias is None else projection.bias.cpu()
    return Projection((basis @ projection.weight[0].cpu())[None], bias, None, "affine")


def _highest(rows: Tensor, height: Tensor) -> Tensor:
    """Return the highest row of each search."""
    which = height.view(rows.shape[:2]).argmax(1)
    return rows[torch.arange(len(rows)), which]


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


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


def _unit(t: Tensor) -> Tensor:
    """Scale every batch row to norm 1."""
    size = t.flatten(1).norm(dim=1).clamp_min(torch.finfo(t.dtype).tiny)
    return t / size.view(-1, *[1] * (t.ndim - 1))
