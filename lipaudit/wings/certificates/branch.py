"""Branch and bound over the signs of ReLUs, in the symbols of one pass.

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

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipaudit.theory import NODES
from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.problem import Problem, problem_of, restrict_to_face
from lipaudit.wings.certificates.symbols import DOUBLE, gamma, tiny, up

if TYPE_CHECKING:
    from jaxtyping import Float, Int


_DECAY = (0.8, 0.99)
"""Decay rates of Adam's running means of gradients and squared gradients."""


@dataclass(frozen=True)
class Nodes:
    """Parts of the ball, and the multipliers that bound a margin on each part.

    Attributes:
        which: (b,), index of the margin.
        state: (b, k), sign of every ReLU: 0 unknown, 1 for z >= 0, -1 for z <= 0.
        y: (2, b, k), the multipliers.
    """

    which: Int[Tensor, " b"]
    state: Int[Tensor, "b k"]
    y: Float[Tensor, "two b k"]

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: Tensor | slice) -> Nodes:
        return Nodes(self.which[index], self.state[index], self.y[:, index])

    def prove(self, problem: Problem, margins: Tensor) -> bool:
        """Say whether the parts, at their multipliers, prove margins on the whole ball.

        Args:
            problem: the problem in float64.
            margins: indices of the margins.
        """
        known = self[torch.isin(self.which, margins)]
        proven = [known[:0]]
        for i in range(0, len(known), BATCH):
            some = known[i : i + BATCH]
            proven.append(some[prove_bounds(problem, some) > 0])
        parts = join_nodes(proven)
        for margin in margins.tolist():
            of_margin = parts.state[parts.which == margin]
            if not _cover(of_margin):
                return False
        return True

    def floor(self) -> Tensor:
        """Return the smallest multipliers: 0 for inequalities, no limit for equations."""
        free = torch.stack([self.state == -1, self.state == 1])
        return torch.zeros_like(self.y).masked_fill_(free, -torch.inf)

    def feasible(self) -> Tensor:
        """Return the multipliers with those of inequalities >= 0."""
        return torch.maximum(self.y, self.floor())


def _cover(state: Int[Tensor, "b k"]) -> bool:
    """Say whether parts cover the ball: one is all of it, or both sides of a ReLU are covered."""
    if (state == 0).all(1).any():
        return True
    is_split = (state != 0).all(0)
    split = is_split.nonzero()[:, 0]
    if not len(state) or not len(split):
        return False
    unit = split[0]
    signs = state[:, unit]
    others = torch.arange(state.shape[1], device=state.device) != unit
    rest = state[:, others]
    return _cover(rest[signs == 1]) and _cover(rest[signs == -1])


def join_nodes(nodes: list[Nodes]) -> Nodes:
    """Return the nodes of several groups as one group."""
    return Nodes(
        torch.cat([each.which for each in nodes]),
        torch.cat([each.state for each in nodes]),
        torch.cat([each.y for each in nodes], 1),
    )


def bound(problem: Problem, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Return the lower bound of every node, up to rounding, and the coefficients (b, columns)."""
    table = _table(problem, nodes.state)
    value, t, _ = _evaluate(problem, nodes.which, nodes.feasible(), table)
    return value, t


def prove_bounds(problem: Problem, nodes: Nodes) -> Float[Tensor, " b"]:
    """Return lower bounds that rounding cannot raise above the true minimum (problem in float64).

    The sum of the sizes of all that is added up, times gamma of the longest chain of roundings, is
    taken off. w and v are rounded themselves: by few units of what is multiplied.
    """
    nodes = Nodes(nodes.which, nodes.state, nodes.y.to(DOUBLE))
    value, _ = bound(problem, nodes)
    margins, units = problem.sizes
    multipliers = nodes.feasible().abs().sum(0)
    size = margins[nodes.which] + multipliers @ units
    roundings = sum(problem.units.slopes.shape) + 64
    return value - up(gamma(roundings, DOUBLE) * size, roundings)


def start(problem: Problem, which: Int[Tensor, " b"]) -> Nodes:
    """Return whole balls: for every ReLU the closer of its lower lines, last layer first.

    A positive coefficient of eps_k means that the lower side of the ReLU is used: a multiplier of
    the line h >= 0 or h >= z that has the smaller area below cancels it.
    """
    k = len(problem.slope)
    y = problem.slope.new_zeros(2, len(which), k)
    state = torch.zeros(len(which), k, dtype=torch.long, device=y.device)
    for depth in sorted(set(problem.depth.tolist()), reverse=True):
        layer = (problem.depth == depth).nonzero()[:, 0]
        _, t = bound(problem, Nodes(which, state, y))
        coefficients = t[:, problem.columns[layer]]
        cancel = coefficients.clamp_min(0) / problem.offset[layer]
        flat = problem.slope[layer] < 0.5
        y[0, :, layer] = torch.where(flat, cancel, 0.0)
        y[1, :, layer] = torch.where(flat, 0.0, cancel)
    return Nodes(which, state, y)


def ascend(
    problem: Problem, nodes: Nodes, *, steps: int, rate: float, until: float = float("inf")
) -> tuple[Float[Tensor, " b"], Nodes]:
    """Move the multipliers up the bound, and return the best of each node.

    Adam along the supergradient, back to what is allowed after every step, with a rate that falls
    to a tenth. Ends early where all bounds are positive, or at a time of `time.monotonic`.
    """
    units = problem.units
    table = _table(problem, nodes.state)
    floor = nodes.floor()
    y = nodes.feasible()
    best = y.new_full(y.shape[1:2], -torch.inf)
    best_y = y
    first = torch.zeros_like(y)
    second = torch.zeros_like(y)
    for step in range(steps + 1):
        value, t, w = _evaluate(problem, nodes.which, y, table)
        better = value > best
        best = torch.where(better, value, best)
        best_y = torch.where(better[:, None], y, best_y)
        if step == steps or bool((best > 0).all()) or time.monotonic() > until:
            break
        # A supergradient: what the multipliers add at the symbols -e that attain the minimum.
        e = _find_maximum(problem, t)
        of_z = units.centre - w.sign() * units.spread - e @ units.slopes.mT
        of_error = 1 - e[:, problem.columns]
        slope = table[0] * of_z + table[1] * of_error
        first.lerp_(slope, 1 - _DECAY[0])
        second.lerp_(slope.square_(), 1 - _DECAY[1])
        # Both means begin at zero: Adam divides by what they lack.
        missing_first = 1 - _DECAY[0] ** (step + 1)
        missing_second = 1 - _DECAY[1] ** (step + 1)
        size = (second / missing_second).sqrt_().add_(1e-8)
        pace = rate * (1 - 0.9 * step / steps) / missing_first
        y = torch.addcdiv(y, first, size, value=pace)
        y = torch.maximum(y, floor)
    return best, replace(nodes, y=best_y)


def _find_maximum(problem: Problem, t: Tensor) -> Tensor:
    """Return e, where -e are the symbols at which rows of coefficients t are least."""
    symbols = problem.symbols
    e = t.sign()
    of_inputs = t[:, : problem.inputs]
    if symbols.norm == "l2":
        size = torch.linalg.vector_norm(of_inputs, dim=1, keepdim=True)
        e[:, : problem.inputs] = of_inputs / size.clamp_min(tiny(t.dtype))
    elif symbols.norm == "words":
        # `find_ends` maximises: the words at which -t is largest are those at which t is least.
        least = symbols.find_ends(-of_inputs.mT).mT
        e[:, : problem.inputs] = -least
    return e


def _table(problem: Problem, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the multipliers add to z and to 1 + eps (table above), (2, b, k) each."""
    a = problem.slope
    first = torch.where(state == 1, -1.0, -a)
    second = torch.where(state == -1, 1.0, 1 - a)
    unknown = torch.stack([state != 1, state != -1])
    return torch.stack([first, second]), unknown * -problem.offset


def _evaluate(
    problem: Problem, which: Tensor, y: Tensor, table: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bounds, the coefficients of the symbols, (b, columns), and w, those of every z."""
    units = problem.units
    margins = problem.margins
    n = problem.inputs
    w = (y * table[0]).sum(0)
    v = (y * table[1]).sum(0)
    t = torch.addmm(margins.slopes[which], w, units.slopes)
    t.index_add_(1, problem.columns, v)
    value = margins.centre[which] + w @ units.centre + v.sum(1)
    spread = margins.spread[which] + w.abs() @ units.spread
    value = value - spread
    # Less the dual norm of the coefficients.
    if problem.symbols.norm == "linf":
        return value - torch.linalg.vector_norm(t, 1, dim=1), t, w
    if problem.symbols.norm == "words":
        value = value - problem.symbols.sum_groups(-t[:, :n].mT).to(t)
    else:
        value = value - torch.linalg.vector_norm(t[:, :n], dim=1)
    return value - torch.linalg.vector_norm(t[:, n:], 1, dim=1), t, w


BATCH = 48
"""Number of parts of the ball that are split at a time."""
FACES = 3
"""Number of faces on which the multipliers of the whole ball are moved, one after the other."""
GROUPS = 16
"""Largest number of groups of margins that have faces of their own: each group takes its steps."""
ROOT_STEPS = 20
STEPS = 10
LAST_STEPS = 400
"""Steps of the multipliers: on each face of the ball, on a part, and on a part where every sign is
known."""
RATE = 0.2
"""Learning rate, as a share of the multipliers that the search begins with."""
SHARE = 0.02
"""Share of the symbols that are searched over beside those in doubt (`restrict_to_face`)."""
_LAST = (10.0, 3.0, 1.0, 0.3)
"""Learning-rate factors used if every ReLU sign is fixed, when only a linear program remains."""


@dataclass(frozen=True)
class Decision:
    """The outcome for the margins of a sample.

    Attributes:
        certified: every margin is positive on the whole ball, proven.
        bound: smallest margin over all parts: proven if certified; otherwise 0 or less, in single
            precision for open parts.
        nodes: number of examined parts.
        units: number of ReLUs of unknown sign.
        limit: the reason for the end of the search: none, "nodes", "seconds" or "signs" (all signs
            are fixed).
        leaves: if certified, the parts with their multipliers; `decide` takes them again.
    """

    certified: bool
    bound: float
    nodes: int
    units: int
    limit: str = ""
    leaves: Nodes | None = None


def decide(
    margins: Form,
    *,
    nodes: int = NODES,
    seconds: float = float("inf"),
    leaves: Nodes | None = None,
) -> Decision:
    """Try to prove that all margins (a form of one axis) are positive.

    The search for multipliers runs in single precision. The claimed bound is evaluated in double
    precision, minus its rounding error (`prove_bounds`).

    Args:
        margins: the form.
        nodes: largest number of parts of the ball; this limit gives equal verdicts on all
            machines.
        seconds: time limit, which depends on the machine and its load.
        leaves: parts of an earlier proof: they are evaluated, and nothing is searched.
    """
    deadline = time.monotonic() + seconds
    low, _ = margins.range()
    low = low.nan_to_num(nan=-torch.inf)
    whole = float(low.min())
    if whole > 0:
        return Decision(certified=True, bound=whole, nodes=0, units=0)
    if not margins.symbols.units or whole == -float("inf"):
        return Decision(certified=False, bound=whole, nodes=0, units=0, limit="signs")
    # Margins that the forms prove need no search: only the open ones are branched on.
    is_open = (low <= 0).nonzero()[:, 0]
    exact = problem_of(margins)
    units = len(exact.slope)
    if leaves is not None:
        covered = leaves.state.shape[1] == units and leaves.prove(exact, is_open)
        return Decision(covered, whole, len(leaves), units, "" if covered else "nodes")
    rough = exact.to(torch.float32)
    roots = start(rough, is_open)
    # Multipliers differ in size between models: the rate is relative to those of the start.
    used = (roots.y > 0).sum().clamp_min(1)
    rate = RATE * float(roots.y.sum() / used)
    roots = _climb(rough, roots, rate, deadline)
    bounds = torch.maximum(prove_bounds(exact, roots), low[is_open])
    search = _Search(exact, rough, rate, nodes, deadline)
    limit, worst = search.run(roots, bounds)
    worst = min([worst, *low[low > 0].tolist()])
    if limit:
        return Decision(False, worst, search.nodes, units, limit)
    return Decision(True, worst, search.nodes, units, leaves=join_nodes(search.proven))


def _climb(problem: Problem, roots: Nodes, rate: float, deadline: float) -> Nodes:
    """Move the multipliers of the whole ball, on one face after the other."""
    climbed = []
    # Few margins have faces of their own: in one of all few symbols would keep their signs.
    some = math.ceil(len(roots) / GROUPS)
    for i in range(0, len(roots), some):
        group = roots[i : i + some]
        for _ in range(FACES):
            _, t = bound(problem, group)
            face = restrict_to_face(problem, t, SHARE)
            _, group = ascend(face, group, steps=ROOT_STEPS, rate=rate, until=deadline)
        climbed.append(group)
    return join_nodes(climbed)


@dataclass
class _Search:
    """The open parts of a ball, worst first; `exact` proves what `rough` finds."""

    exact: Problem
    rough: Problem
    rate: float
    most: int
    deadline: float
    nodes: int = 0
    least: float = float("inf")
    proven: list[Nodes] = field(default_factory=list)

    def run(self, roots: Nodes, bounds: Tensor) -> tuple[str, float]:
        """Return the reason for the end of the search, and the smallest bound of a part."""
        self.nodes = len(roots)
        queue, worth = self._set_aside(roots, bounds)
        while len(queue):
            if self.nodes >= self.most:
                return "nodes", float(worth.min())
            if time.monotonic() > self.deadline:
                return "seconds", float(worth.min())
            # Worst first: so the least bound of all parts, which is reported, rises fastest.
            order = worth.argsort()
            margins = queue.which[order]
            alike = margins == margins[0]  # one margin: one face suffices
            of_margin = order[alike]
            later = torch.cat([of_margin[BATCH:], order[~alike]])
            batch = queue[of_margin[:BATCH]]
            known = (batch.state != 0).all(1)
            if self._leave_open(batch[known]):
                return "signs", float(worth.min())
            queue = queue[later]
            worth = worth[later]
            unknown = batch[~known]
            if len(unknown):
                parts, bounds = self._split(unknown)
                queue = join_nodes([queue, parts])
                worth = torch.cat([worth, bounds])
        return "", self.least

    def _leave_open(self, last: Nodes) -> bool:
        """Say whether parts in which every sign is known stay open, after many steps."""
        for haste in _LAST:
            if not len(last):
                return False
            _, t = bound(self.rough, last)
            last, _ = self._bound_parts(t, last, LAST_STEPS, haste)
        return len(last) > 0

    def _split(self, batch: Nodes) -> tuple[Nodes, Tensor]:
        """Split every part at the most promising ReLU; return the open halves with bounds.

        That is the slack that the coefficient of eps costs, and what the multipliers use. Trials
        of the best few with some steps cost more than they save.
        """
        _, t = bound(self.rough, batch)
        used = batch.y.clamp_min(0).sum(0) * self.rough.offset
        score = 2 * t[:, self.rough.columns].abs() + used
        score = score.masked_fill(batch.state != 0, -1.0)
        unit = score.argmax(1, keepdim=True)
        positive = replace(batch, state=batch.state.scatter(1, unit, 1))
        negative = replace(batch, state=batch.state.scatter(1, unit, -1))
        return self._bound_parts(t, join_nodes([positive, negative]), STEPS)

    def _bound_parts(
        self, t: Tensor, parts: Nodes, steps: int, haste: float = 1.0
    ) -> tuple[Nodes, Tensor]:
        """Bound parts on a face near coefficients t, and return the open ones with bounds."""
        self.nodes += len(parts)
        face = restrict_to_face(self.rough, t, SHARE)
        rate = haste * self.rate
        bounds, parts = ascend(face, parts, steps=steps, rate=rate, until=self.deadline)
        bounds = bounds.to(self.exact.slope)
        hopeful = (bounds > 0).nonzero()[:, 0]
        bounds[hopeful] = prove_bounds(self.exact, parts[hopeful])
        return self._set_aside(parts, bounds)

    def _set_aside(self, parts: Nodes, bounds: Tensor) -> tuple[Nodes, Tensor]:
        """Keep the proven parts, and return the open ones with bounds."""
        positive = bounds > 0
        self.least = min([self.least, *bounds[positive].tolist()])
        self.proven.append(parts[positive])
        return parts[~positive], bounds[~positive]
