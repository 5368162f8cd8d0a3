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

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.certify.form import Form
from lipaudit.certify.symbols import DOUBLE, Symbols, gamma, up
from lipaudit.theory import NODES

NUMBERS = 2**26
"""Largest number of coefficients kept for a problem (0.5 GB). Further symbols are merged into a
radius per row."""

FEW = 256
"""Smallest number of columns that a face keeps."""


class Rows(NamedTuple):
    """Affine functions of the symbols that are kept: rows of coefficients.

    Attributes:
        centre: (r,).
        slopes: (r, columns).
        spread: (r,), the radius of all else.
    """

    centre: Tensor
    slopes: Tensor
    spread: Tensor


@dataclass(frozen=True)
class Problem:
    """Margins and the ReLUs they depend on, over the symbols of the input and the ReLUs.

    Attributes:
        margins, units: rows of the margins and of the ReLUs.
        slope, offset: a and m of every ReLU.
        columns: column of every ReLU's symbol.
        depth: number of the ReLU call it belongs to.
        inputs: number of columns of the input.
        symbols: the symbols of the pass, for the norm of the ball.
    """

    margins: Rows
    units: Rows
    slope: Tensor
    offset: Tensor
    columns: Tensor
    depth: Tensor
    inputs: int
    symbols: Symbols

    @cached_property
    def reach(self) -> Tensor:
        """Return how much multipliers change each symbol's coefficient, up to a common factor."""
        sizes = torch.linalg.vector_norm(self.units.slopes, dim=0)
        return sizes.clamp_min(torch.finfo(sizes.dtype).tiny)

    @cached_property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return the sums of the sizes in each row: of the margins and of the ReLUs."""
        margins, units = (
            rows.centre.abs() + rows.spread + rows.slopes.abs().sum(1)
            for rows in (self.margins, self.units)
        )
        return margins, units + 2 * self.offset

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the problem in another precision, for the search only."""
        margins, units = (Rows(*(t.to(dtype) for t in r)) for r in (self.margins, self.units))
        slope, offset = self.slope.to(dtype), self.offset.to(dtype)
        return replace(self, margins=margins, units=units, slope=slope, offset=offset)


def problem_of(margins: Form, numbers: int = NUMBERS) -> Problem:
    """Return the problem whose margins are a form of one axis, in float64.

    ReLUs that no margin depends on, even through other ReLUs, are left out, such as those of
    tokens that the last attention does not read.

    Args:
        margins: the form.
        numbers: largest number of coefficients; further symbols become a radius per row.
    """
    symbols, device = margins.symbols, margins.device
    reached = torch.zeros(symbols.count, dtype=torch.bool, device=device)
    reached[: len(margins.generators)] = (margins.generators != 0).any(1)
    rows = [(margins.centre, margins.generators, margins.slack)]
    units: list[tuple[Tensor, ...]] = []
    for depth, unit in reversed(list(enumerate(symbols.units))):
        births = unit.first + torch.arange(len(unit.slope), device=device)
        read = reached[births]
        births, generators = births[read], unit.generators[:, read]
        reached[: len(generators)] |= (generators != 0).any(1)
        depths = torch.full_like(births, depth)
        # Backwards: a ReLU counts if what is already kept depends on its error symbol.
        units.insert(0, (births, unit.slope[read], unit.offset[read], depths))
        rows.insert(1, (unit.centre[read], generators, unit.slack[read]))
    births, slope, offset, depths = (torch.cat(each) for each in zip(*units, strict=True))
    # Columns for the input, the ReLUs, and the largest other errors, as many as fit. The products
    # of the input's symbols are bounded together.
    size = torch.zeros(symbols.count, dtype=DOUBLE, device=device)
    for _, g, _ in rows:
        size[: len(g)] += g.abs().sum(1)
    always = torch.cat([torch.arange(symbols.n, device=device), births])
    size[symbols.n : symbols.first_error] = 0
    size[always] = 0
    # A column costs one number for every row of margins and ReLUs.
    room = numbers // sum(g.shape[1] for _, g, _ in rows) - len(always)
    kept = torch.zeros(symbols.count, dtype=torch.bool, device=device)
    kept[always] = True
    kept[size.topk(min(max(room, 0), int((size > 0).sum()))).indices] = True
    parts = []
    for centre, g, slack in rows:
        present = kept[: len(g)]
        low, high = symbols.quadratic_range(g)
        errors = symbols.sizes(g * ~present[:, None]).errors
        missing = int(kept.sum()) - int(present.sum())
        slopes = F.pad(g[present].mT.to(DOUBLE), (0, missing))
        parts.append(Rows(centre, slopes, up(errors + torch.maximum(-low, high) + slack)))
    return Problem(
        margins=parts[0],
        units=Rows(*(torch.cat(each) for each in zip(*parts[1:], strict=True))),
        slope=slope,
        offset=offset,
        columns=(kept.cumsum(0) - 1)[births],
        depth=depths,
        inputs=symbols.n,
        symbols=symbols,
    )


def restrict_to_face(
    problem: Problem, t: Float[Tensor, "b columns"], share: float, few: int = FEW
) -> Problem:
    """Return the problem on a face of the box, for a search near multipliers of coefficients t.

    A symbol whose coefficient keeps its sign sits at the same end all the time: it is put there,
    and its column becomes part of the constants. Those that stay are the share with the smallest
    coefficients against the sizes of their columns, and all of ReLUs. The minimum on a face is no
    less than that on the box: what is claimed is evaluated without.
    """
    low, high = t.amin(0), t.amax(0)
    # firm > 0 where the coefficient has one sign at all given multipliers, by its distance from
    # 0. Symbols of an L2 ball and of ReLUs always stay.
    firm = torch.maximum(low, -high) / problem.reach
    inputs = 0 if problem.symbols.norm == "linf" else problem.inputs
    firm[:inputs] = -torch.inf
    firm[problem.columns] = -torch.inf
    always = inputs + len(problem.columns)
    loose = int((firm <= 0).sum())
    most = min(len(firm), max(always + few, loose + int(share * len(firm))))
    kept = torch.zeros_like(firm, dtype=torch.bool)
    kept[firm.topk(most, largest=False).indices] = True
    end = torch.where(kept, 0.0, (low + high).sign())
    margins, units = (
        Rows(rows.centre - rows.slopes @ end, rows.slopes[:, kept], rows.spread)
        for rows in (problem.margins, problem.units)
    )
    return replace(
        problem,
        margins=margins,
        units=units,
        columns=(kept.cumsum(0) - 1)[problem.columns],
        inputs=int(kept[: problem.inputs].sum()),
    )


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
        split = [known[i : i + BATCH] for i in range(0, len(known), BATCH)]
        proven = join_nodes(
            [each[prove_bounds(problem, each) > 0] for each in [*split, known[:0]]]
        )
        return all(_cover(proven.state[proven.which == i]) for i in margins.tolist())

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
    split = (state != 0).all(0).nonzero()[:, 0]
    if not len(state) or not len(split):
        return False
    others = torch.arange(state.shape[1], device=state.device) != split[0]
    return all(_cover(state[state[:, split[0]] == sign][:, others]) for sign in (1, -1))


def join_nodes(nodes: list[Nodes]) -> Nodes:
    """Return the nodes of several groups as one group."""
    return Nodes(
        torch.cat([each.which for each in nodes]),
        torch.cat([each.state for each in nodes]),
        torch.cat([each.y for each in nodes], 1),
    )


def bound(problem: Problem, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Return the lower bound of every node, up to rounding, and the coefficients (b, columns)."""
    value, t, _ = _evaluate(problem, nodes.which, nodes.feasible(), _table(problem, nodes.state))
    return value, t


def prove_bounds(problem: Problem, nodes: Nodes) -> Float[Tensor, " b"]:
    """Return lower bounds that rounding cannot raise above the true minimum (problem in float64).

    The sum of the sizes of all that is added up, times gamma of the longest chain of roundings, is
    taken off. w and v are rounded themselves: by few units of what is multiplied.
    """
    nodes = Nodes(nodes.which, nodes.state, nodes.y.to(DOUBLE))
    value, _ = bound(problem, nodes)
    margins, units = problem.sizes
    size = margins[nodes.which] + nodes.feasible().abs().sum(0) @ units
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
        cancel = t[:, problem.columns[layer]].clamp_min(0) / problem.offset[layer]
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
    which, state, floor = nodes.which, nodes.state, nodes.floor()
    y, table, units, n = nodes.feasible(), _table(problem, state), problem.units, problem.inputs
    best, arg = y.new_full(y.shape[1:2], -torch.inf), y
    first, second = torch.zeros_like(y), torch.zeros_like(y)
    for step in range(steps + 1):
        value, t, w = _evaluate(problem, which, y, table)
        better = value > best
        best = torch.where(better, value, best)
        arg = torch.where(better[:, None], y, arg)
        if step == steps or bool((best > 0).all()) or time.monotonic() > until:
            break
        # A supergradient: what the multipliers add at minus the e that attains the minimum.
        e = t.sign()
        if problem.symbols.norm == "l2":
            moving = torch.linalg.vector_norm(t[:, :n], dim=1, keepdim=True)
            e[:, :n] = t[:, :n] / moving.clamp_min(torch.finfo(t.dtype).tiny)
        elif problem.symbols.norm == "words":
            e[:, :n] = -problem.symbols.find_ends(-t[:, :n].mT).mT
        of_z = units.centre - w.sign() * units.spread - e @ units.slopes.mT
        slope = table[0] * of_z + table[1] * (1 - e[:, problem.columns])
        first.lerp_(slope, 1 - _DECAY[0])
        second.lerp_(slope.square_(), 1 - _DECAY[1])
        size = (second / (1 - _DECAY[1] ** (step + 1))).sqrt_().add_(1e-8)
        pace = rate * (1 - 0.9 * step / steps) / (1 - _DECAY[0] ** (step + 1))
        y = torch.maximum(torch.addcdiv(y, first, size, value=pace), floor)
    return best, Nodes(which, state, arg)


def _table(problem: Problem, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the multipliers add to z and to 1 + eps (table above), (2, b, k) each."""
    a = problem.slope
    on_z = [torch.where(state == 1, -1.0, -a), torch.where(state == -1, 1.0, 1 - a)]
    return torch.stack(on_z), torch.stack([state != 1, state != -1]) * -problem.offset


def _evaluate(
    problem: Problem, which: Tensor, y: Tensor, table: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bounds, the coefficients of the symbols, (b, columns), and w, those of every z."""
    units, margins, n = problem.units, problem.margins, problem.inputs
    w, v = ((y * each).sum(0) for each in table)
    t = torch.addmm(margins.slopes[which], w, units.slopes).index_add_(1, problem.columns, v)
    value = margins.centre[which] + w @ units.centre + v.sum(1)
    value = value - (margins.spread[which] + w.abs() @ units.spread)
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
ROOT_STEPS, STEPS, LAST_STEPS = 20, 10, 400
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
    low = margins.range()[0].nan_to_num(nan=-torch.inf)
    # Margins that the forms prove need no search: only the open ones are branched on.
    whole, is_open = float(low.min()), (low <= 0).nonzero()[:, 0]
    if not len(is_open) or not margins.symbols.units or whole == -float("inf"):
        return Decision(whole > 0, whole, 0, 0, "" if whole > 0 else "signs")
    exact = problem_of(margins)
    if leaves is not None:
        covered = leaves.state.shape[1] == len(exact.slope) and leaves.prove(exact, is_open)
        return Decision(covered, whole, len(leaves), len(exact.slope), "" if covered else "nodes")
    rough = exact.to(torch.float32)
    roots = start(rough, is_open)
    # Multipliers differ in size between models: the rate is relative to those of the start.
    rate = RATE * float(roots.y.sum() / (roots.y > 0).sum().clamp_min(1))
    # Few margins have faces of their own: in one of all few symbols would keep their signs.
    climbed, some = [], -(-len(roots) // GROUPS)
    for i in range(0, len(roots), some):
        group = roots[i : i + some]
        for _ in range(FACES):
            face = restrict_to_face(rough, bound(rough, group)[1], SHARE)
            _, group = ascend(face, group, steps=ROOT_STEPS, rate=rate, until=deadline)
        climbed.append(group)
    roots = join_nodes(climbed)
    bounds = torch.maximum(prove_bounds(exact, roots), low[is_open])
    search = _Search(exact, rough, rate, nodes, deadline)
    limit, worst = search.run(roots, bounds)
    worst = min([worst, *low[low > 0].tolist()])
    proven = None if limit else join_nodes(search.proven)
    return Decision(not limit, worst, search.nodes, len(exact.slope), limit, proven)


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
        self.nodes, positive = len(roots), bounds > 0
        self.least = min([self.least, *bounds[positive].tolist()])
        self.proven.append(roots[positive])
        queue, worth = roots[~positive], bounds[~positive]
        while len(queue):
            if self.nodes >= self.most:
                return "nodes", float(worth.min())
            # Worst first: so the least bound of all parts, which is reported, rises fastest.
            if time.monotonic() > self.deadline:
                return "seconds", float(worth.min())
            order = worth.argsort()
            alike = queue.which[order] == queue.which[order[0]]  # one margin: one face suffices
            now = order[alike][:BATCH]
            later = torch.cat([order[alike][BATCH:], order[~alike]])
            batch, known = queue[now], (queue[now].state != 0).all(1)
            last, batch = batch[known], batch[~known]
            for haste in _LAST:
                if len(last):
                    _, t = bound(self.rough, last)
                    last, _ = self._bound_parts(t, last, LAST_STEPS, haste)
            if len(last):
                return "signs", float(worth.min())
            queue, worth = queue[later], worth[later]
            if len(batch):
                # Split every part at the most promising ReLU: the slack that the coefficient of
                # eps costs, and what the multipliers use. Trials of the best few with some steps
                # cost more than they save.
                _, t = bound(self.rough, batch)
                used = batch.y.clamp_min(0).sum(0) * self.rough.offset
                score = 2 * t[:, self.rough.columns].abs() + used
                unit = score.masked_fill(batch.state != 0, -1.0).argmax(1, keepdim=True)
                states = (batch.state.scatter(1, unit, sign) for sign in (1, -1))
                parts = join_nodes([Nodes(batch.which, state, batch.y) for state in states])
                parts, value = self._bound_parts(t, parts, STEPS)
                queue, worth = join_nodes([queue, parts]), torch.cat([worth, value])
        return "", self.least

    def _bound_parts(
        self, t: Tensor, parts: Nodes, steps: int, haste: float = 1.0
    ) -> tuple[Nodes, Tensor]:
        """Bound parts on a face near coefficients t, and return the open ones with bounds."""
        self.nodes += len(parts)
        face, rate = restrict_to_face(self.rough, t, SHARE), haste * self.rate
        value, parts = ascend(face, parts, steps=steps, rate=rate, until=self.deadline)
        value = value.to(self.exact.slope)
        hopeful = (value > 0).nonzero()[:, 0]
        value[hopeful] = prove_bounds(self.exact, parts[hopeful])
        is_open = ~(value > 0)
        self.least = min([self.least, *value[~is_open].tolist()])
        self.proven.append(parts[~is_open])
        return parts[is_open], value[is_open]
