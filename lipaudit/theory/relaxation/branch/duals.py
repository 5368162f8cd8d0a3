"""Bounds of margins that know both lines of every ReLU, and its sign where it is decided.

A margin is c + g . e over the symbols e, and so is the input z of every ReLU that cuts its range,
with h = a z + m (1 + eps) for its output. Over all inputs h >= 0 and h >= z; on a part of the ball
where z >= 0 is known, h = z and z >= 0; where z <= 0 is known, h = 0. Each of these, written as
"something <= 0" (or = 0) and added to the margin with a multiplier y >= 0 (or any y), gives a
function that is no larger than the margin wherever they hold. It is affine in e, and its minimum
over all e is its constant less the dual norm of its coefficients: **a lower bound of the margin
for any y** (weak duality). y is then moved up that bound, which is concave in y.

| state | multiplier 1 | multiplier 2 | on z: w | on m (1 + eps): v / m |
|---|---|---|---|---|
| 0, both signs | -h, y1 >= 0 | z - h, y2 >= 0 | -a y1 + (1 - a) y2 | -y1 - y2 |
| 1, z >= 0 | -z, y1 >= 0 | z - h = 0 | -y1 + (1 - a) y2 | -y2 |
| -1, z <= 0 | -h = 0 | z, y2 >= 0 | -a y1 + y2 | -y1 |

One bound is a product of the multipliers with the stack of rows, in place of a pass through the
network.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.theory.relaxation.branch.problem import Problem
from lipaudit.theory.relaxation.rounding import DOUBLE, gamma, up

_DECAY = (0.8, 0.99)
"""Of the means of gradients and of their squares (Adam)."""


@dataclass(frozen=True)
class Nodes:
    """Parts of the ball, and the multipliers that bound a margin on each.

    Attributes:
        which: (b,), which margin.
        state: (b, k), what is known of every ReLU: 0, 1 for z >= 0, -1 for z <= 0.
        y: (2, b, k), the multipliers.
    """

    which: Int[Tensor, " b"]
    state: Int[Tensor, "b k"]
    y: Float[Tensor, "two b k"]

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: Tensor | slice) -> Nodes:
        return Nodes(self.which[index], self.state[index], self.y[:, index])


def joined(nodes: list[Nodes]) -> Nodes:
    """Return the nodes of several lots."""
    return Nodes(
        torch.cat([each.which for each in nodes]),
        torch.cat([each.state for each in nodes]),
        torch.cat([each.y for each in nodes], 1),
    )


def bound(problem: Problem, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Return the lower bound of every node, up to rounding, and the coefficients (b, columns)."""
    w, v = _multiplied(problem, nodes)
    t = _coefficients(problem, nodes.which, w, v)
    return _reached(problem, nodes.which, w, v, t), t


def proven(problem: Problem, nodes: Nodes) -> Float[Tensor, " b"]:
    """Return lower bounds that rounding cannot raise above the true minimum.

    The sum of the sizes of all that is added up, times gamma of the longest chain of roundings, is
    taken off. w and v are rounded themselves: by few units of what is multiplied.
    """
    problem = problem if problem.slope.dtype is DOUBLE else problem.to(DOUBLE)
    nodes = Nodes(nodes.which, nodes.state, nodes.y.to(DOUBLE))
    value, _ = bound(problem, nodes)
    units, margins, j = problem.units, problem.margins, nodes.which
    y = _feasible(nodes).abs().sum(0)
    unit_size = units.centre.abs() + units.spread + units.slopes.abs().sum(1) + 2 * problem.offset
    margin_size = margins.centre.abs() + margins.spread + margins.slopes.abs().sum(1)
    roundings = sum(units.slopes.shape) + 64
    return value - up(gamma(roundings, DOUBLE) * (margin_size[j] + y @ unit_size), roundings)


def start(problem: Problem, which: Int[Tensor, " b"]) -> Nodes:
    """Return whole balls: of every ReLU's line below the one that is closer, last layer first.

    A positive coefficient of eps_k means that the lower side of the ReLU is used: a multiplier of
    the line h >= 0 or h >= z that has the smaller area below cancels it.
    """
    k = len(problem.slope)
    y = problem.slope.new_zeros(2, len(which), k)
    state = torch.zeros(len(which), k, dtype=torch.long, device=y.device)
    for depth in sorted(set(problem.depth.tolist()), reverse=True):
        own = (problem.depth == depth).nonzero()[:, 0]
        _, t = bound(problem, Nodes(which, state, y))
        cancel = t[:, problem.columns[own]].clamp_min(0) / problem.offset[own]
        flat = problem.slope[own] < 0.5
        y[0, :, own] = torch.where(flat, cancel, 0.0)
        y[1, :, own] = torch.where(flat, 0.0, cancel)
    return Nodes(which, state, y)


def ascend(
    problem: Problem, nodes: Nodes, *, steps: int, rate: float, until: float = float("inf")
) -> tuple[Float[Tensor, " b"], Nodes]:
    """Move the multipliers up the bound, and return the best of each node.

    Adam along the supergradient, back to what is allowed after every step, with a rate that falls
    to a tenth. Ends early where all bounds are positive, or at a time of `time.monotonic`.
    """
    which, state = nodes.which, nodes.state
    y, floor, table = _feasible(nodes), _floor(nodes), _table(problem, state)
    best, arg = y.new_full(y.shape[1:2], -torch.inf), y
    first, second = torch.zeros_like(y), torch.zeros_like(y)
    for step in range(steps + 1):
        value, slope = _value_and_slope(problem, which, y, table)
        better = value > best
        best = torch.where(better, value, best)
        arg = torch.where(better[:, None], y, arg)
        if step == steps or bool((best > 0).all()) or time.monotonic() > until:
            break
        first.lerp_(slope, 1 - _DECAY[0])
        second.lerp_(slope.square_(), 1 - _DECAY[1])
        size = (second / (1 - _DECAY[1] ** (step + 1))).sqrt_().add_(1e-8)
        pace = rate * (1 - 0.9 * step / steps) / (1 - _DECAY[0] ** (step + 1))
        y = torch.maximum(torch.addcdiv(y, first, size, value=pace), floor)
    return best, Nodes(which, state, arg)


def _floor(nodes: Nodes) -> Tensor:
    """The least multipliers: 0 of inequalities, none of equations."""
    free = torch.stack([nodes.state == -1, nodes.state == 1])
    return torch.zeros_like(nodes.y).masked_fill_(free, -torch.inf)


def _feasible(nodes: Nodes) -> Tensor:
    """The multipliers, those of inequalities >= 0."""
    return torch.maximum(nodes.y, _floor(nodes))


def _table(problem: Problem, state: Tensor) -> tuple[Tensor, Tensor]:
    """What the multipliers put on z and on 1 + eps: the table above, (2, b, k) each."""
    a = problem.slope
    on_z = torch.stack(
        [
            torch.where(state == 1, -1.0, -a),
            torch.where(state == -1, 1.0, 1 - a),
        ]
    )
    return on_z, torch.stack([state != 1, state != -1]) * -problem.offset


def _multiplied(problem: Problem, nodes: Nodes) -> tuple[Tensor, Tensor]:
    y, (on_z, on_h) = _feasible(nodes), _table(problem, nodes.state)
    return (y * on_z).sum(0), (y * on_h).sum(0)


def _coefficients(problem: Problem, which: Tensor, w: Tensor, v: Tensor) -> Tensor:
    t = torch.addmm(problem.margins.slopes[which], w, problem.units.slopes)
    return t.index_add_(1, problem.columns, v)


def _reached(problem: Problem, which: Tensor, w: Tensor, v: Tensor, t: Tensor) -> Tensor:
    units, margins, n = problem.units, problem.margins, problem.inputs
    constant = margins.centre[which] + w @ units.centre + v.sum(1)
    loss = margins.spread[which] + w.abs() @ units.spread
    if problem.norm == "linf":
        return constant - loss - torch.linalg.vector_norm(t, 1, dim=1)
    moving = torch.linalg.vector_norm(t[:, :n], dim=1)
    return constant - loss - moving - torch.linalg.vector_norm(t[:, n:], 1, dim=1)


def _value_and_slope(
    problem: Problem, which: Tensor, y: Tensor, table: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The bound and a supergradient of it: minus the e that attains the minimum, put in."""
    (on_z, on_h), units, n = table, problem.units, problem.inputs
    w, v = (y * on_z).sum(0), (y * on_h).sum(0)
    t = _coefficients(problem, which, w, v)
    value = _reached(problem, which, w, v, t)
    e = t.sign()
    if problem.norm == "l2":
        moving = torch.linalg.vector_norm(t[:, :n], dim=1, keepdim=True)
        e[:, :n] = t[:, :n] / moving.clamp_min(torch.finfo(t.dtype).tiny)
    of_w = units.centre - w.sign() * units.spread - e @ units.slopes.mT
    of_v = 1 - e[:, problem.columns]
    return value, on_z * of_w + on_h * of_v
