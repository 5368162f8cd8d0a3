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
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.certify.form import Form
from lipaudit.certify.rounding import DOUBLE, gamma, up
from lipaudit.certify.symbols import Norm, Symbols
from lipaudit.theory.policy import NODES

NUMBERS = 2**26
"""Largest number of coefficients kept for a problem (0.5 GB). Further symbols are merged into a
radius per row."""

FEW = 256
"""Smallest number of columns that a face keeps."""


@dataclass(frozen=True)
class Rows:
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
        norm: norm of the ball.
    """

    margins: Rows
    units: Rows
    slope: Tensor
    offset: Tensor
    columns: Tensor
    depth: Tensor
    inputs: int
    norm: Norm

    @cached_property
    def reach(self) -> Tensor:
        """Return how much multipliers change each symbol's coefficient, up to a common factor."""
        sizes = torch.linalg.vector_norm(self.units.slopes, dim=0)
        return sizes.clamp_min(torch.finfo(sizes.dtype).tiny)

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the problem in another precision, for the search only."""

        def cast(rows: Rows) -> Rows:
            return Rows(*(getattr(rows, field.name).to(dtype) for field in fields(rows)))

        return replace(
            self,
            margins=cast(self.margins),
            units=cast(self.units),
            slope=self.slope.to(dtype),
            offset=self.offset.to(dtype),
        )


def problem_of(margins: Form, numbers: int = NUMBERS) -> Problem:
    """Return the problem whose margins are a form of one axis, in float64.

    ReLUs that no margin depends on, even through other ReLUs, are left out, such as those of
    tokens that the last attention does not read.

    Args:
        margins: the form.
        numbers: largest number of coefficients; further symbols become a radius per row.
    """
    symbols, units = margins.symbols, margins.symbols.units
    births = [u.first + torch.arange(len(u.slope), device=margins.device) for u in units]
    used = _find_units(margins, births)
    count = max([len(margins.generators), *(len(u.generators) for u in units)])
    rows = [(margins.centre, margins.generators, margins.slack)]
    rows += [
        (u.centre[own], u.generators[:, own], u.slack[own])
        for u, own in zip(units, used, strict=True)
    ]
    own = torch.cat([birth[mask] for birth, mask in zip(births, used, strict=True)])
    kept = _columns(rows, max([count, *(own + 1).tolist()]), own, symbols, numbers)
    first, *others = (_rows(*each, kept, symbols) for each in rows)

    def join_nodes(name: str) -> Tensor:
        parts = zip(units, used, strict=True)
        return torch.cat([getattr(u, name)[mask].to(DOUBLE) for u, mask in parts])

    return Problem(
        margins=first,
        units=Rows(
            *(torch.cat(each) for each in zip(*(vars(r).values() for r in others), strict=True))
        ),
        slope=join_nodes("slope"),
        offset=join_nodes("offset"),
        columns=(kept.cumsum(0) - 1)[own],
        depth=torch.cat(
            [torch.full_like(b[m], i) for i, (b, m) in enumerate(zip(births, used, strict=True))]
        ),
        inputs=symbols.n,
        norm=symbols.norm,
    )


def _find_units(margins: Form, births: list[Tensor]) -> list[Tensor]:
    """Return the ReLUs of every call that a margin depends on."""
    reached = (margins.generators != 0).any(1)
    used = []
    for unit, birth in reversed(list(zip(margins.symbols.units, births, strict=True))):
        own = F.pad(reached, (0, max(0, int(birth[-1]) + 1 - len(reached))))[birth]
        more = (unit.generators[:, own] != 0).any(1)
        size = max(len(reached), len(more))
        reached = F.pad(reached, (0, size - len(reached))) | F.pad(more, (0, size - len(more)))
        used.append(own)
    return used[::-1]


def _columns(
    rows: list[tuple[Tensor, Tensor, Tensor]],
    count: int,
    own: Tensor,
    symbols: Symbols,
    numbers: int,
) -> Tensor:
    """Return the symbols with a column: input, ReLUs, and the largest others, as many as fit."""
    size = torch.zeros(count, dtype=DOUBLE, device=own.device)
    for _, g, _ in rows:
        size[: len(g)] += g.abs().sum(1)
    size[symbols.n : symbols.first_error] = 0  # products are bounded together
    always = torch.cat([torch.arange(symbols.n, device=own.device), own])
    size[always] = 0
    room = numbers // sum(g.shape[1] for _, g, _ in rows) - len(always)
    most = min(max(room, 0), int((size > 0).sum()))
    kept = torch.zeros(count, dtype=torch.bool, device=own.device)
    kept[always] = True
    kept[size.topk(most).indices] = True
    return kept


def _rows(c: Tensor, g: Tensor, slack: Tensor, kept: Tensor, symbols: Symbols) -> Rows:
    other = g * ~kept[: len(g), None]
    low, high = symbols.quadratic_range(g)
    spread = up(symbols.sizes(other).errors + torch.maximum(-low, high) + slack)
    slopes = g.new_zeros(g.shape[1], int(kept.sum()), dtype=DOUBLE)
    present = g[kept[: len(g)]].mT.to(DOUBLE)
    slopes[:, : present.shape[1]] = present
    return Rows(c.to(DOUBLE), slopes, spread)


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
    firm = torch.maximum(low, -high) / problem.reach
    inputs = 0 if problem.norm == "linf" else problem.inputs
    firm[:inputs] = -torch.inf
    firm[problem.columns] = -torch.inf
    always = inputs + len(problem.columns)
    loose = int((firm <= 0).sum())
    most = min(len(firm), max(always + few, loose + int(share * len(firm))))
    kept = torch.zeros_like(firm, dtype=torch.bool)
    kept[firm.topk(most, largest=False).indices] = True
    end = torch.where(kept, 0.0, (low + high).sign())

    def cut(rows: Rows) -> Rows:
        return Rows(rows.centre - rows.slopes @ end, rows.slopes[:, kept], rows.spread)

    return replace(
        problem,
        margins=cut(problem.margins),
        units=cut(problem.units),
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


def join_nodes(nodes: list[Nodes]) -> Nodes:
    """Return the nodes of several groups as one group."""
    return Nodes(
        torch.cat([each.which for each in nodes]),
        torch.cat([each.state for each in nodes]),
        torch.cat([each.y for each in nodes], 1),
    )


def bound(problem: Problem, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Return the lower bound of every node, up to rounding, and the coefficients (b, columns)."""
    w, v = _multiply_table(problem, nodes)
    t = _coefficients(problem, nodes.which, w, v)
    return _evaluate(problem, nodes.which, w, v, t), t


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
    """Return whole balls: for every ReLU the closer of its lower lines, last layer first.

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
    """Return the smallest multipliers: 0 for inequalities, no limit for equations."""
    free = torch.stack([nodes.state == -1, nodes.state == 1])
    return torch.zeros_like(nodes.y).masked_fill_(free, -torch.inf)


def _feasible(nodes: Nodes) -> Tensor:
    """Return the multipliers with those of inequalities >= 0."""
    return torch.maximum(nodes.y, _floor(nodes))


def _table(problem: Problem, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the multipliers add to z and to 1 + eps (table above), (2, b, k) each."""
    a = problem.slope
    on_z = torch.stack(
        [
            torch.where(state == 1, -1.0, -a),
            torch.where(state == -1, 1.0, 1 - a),
        ]
    )
    return on_z, torch.stack([state != 1, state != -1]) * -problem.offset


def _multiply_table(problem: Problem, nodes: Nodes) -> tuple[Tensor, Tensor]:
    y, (on_z, on_h) = _feasible(nodes), _table(problem, nodes.state)
    return (y * on_z).sum(0), (y * on_h).sum(0)


def _coefficients(problem: Problem, which: Tensor, w: Tensor, v: Tensor) -> Tensor:
    t = torch.addmm(problem.margins.slopes[which], w, problem.units.slopes)
    return t.index_add_(1, problem.columns, v)


def _evaluate(problem: Problem, which: Tensor, w: Tensor, v: Tensor, t: Tensor) -> Tensor:
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
    value = _evaluate(problem, which, w, v, t)
    e = t.sign()
    if problem.norm == "l2":
        moving = torch.linalg.vector_norm(t[:, :n], dim=1, keepdim=True)
        e[:, :n] = t[:, :n] / moving.clamp_min(torch.finfo(t.dtype).tiny)
    of_w = units.centre - w.sign() * units.spread - e @ units.slopes.mT
    of_v = 1 - e[:, problem.columns]
    return value, on_z * of_w + on_h * of_v


_LAST = (10.0, 3.0, 1.0, 0.3)
"""Learning-rate factors used if every ReLU sign is fixed, when only a linear program remains."""


@dataclass(frozen=True)
class Effort:
    """The effort for a sample.

    Attributes:
        nodes: largest number of parts of the ball; this limit gives equal verdicts on all
            machines.
        seconds: time limit, which depends on the machine and its load.
        batch: number of parts split at a time.
        root_steps, steps, last_steps: of the multipliers, on the ball, on a part, and where every
            sign is known.
        rate: of the steps, as a share of the multipliers that the search begins with.
        share: of the symbols that are searched over beside those in doubt (`restrict_to_face`).
    """

    nodes: int = NODES
    seconds: float = float("inf")
    batch: int = 48
    root_steps: int = 60
    steps: int = 10
    last_steps: int = 400
    rate: float = 0.2
    share: float = 0.02


@dataclass(frozen=True)
class Verdict:
    """The outcome for the margins of a sample.

    Attributes:
        certified: every margin is positive on the whole ball, proven.
        pass_bound: smallest margin from the forms alone.
        root_bound: smallest margin with the lines of the ReLUs.
        bound: smallest margin over all parts: proven if certified; otherwise 0 or less, in single
            precision for open parts.
        nodes: number of examined parts.
        units: number of ReLUs of unknown sign.
        limit: the reason for the end of the search: none, "nodes", "seconds" or "signs" (all signs
            are fixed).
    """

    certified: bool
    pass_bound: float
    root_bound: float
    bound: float
    nodes: int
    units: int
    limit: str = ""


def decide(margins: Form, effort: Effort | None = None) -> Verdict:
    """Try to prove that all margins (a form of one axis) are positive.

    The search for multipliers runs in single precision. The claimed bound is evaluated in double
    precision, minus its rounding error (`proven`).
    """
    effort = effort or Effort()
    deadline = time.monotonic() + effort.seconds
    low, _ = margins.range()
    low = low.nan_to_num(nan=-torch.inf)
    whole = float(low.min())
    count, is_open = len(margins.symbols.units), (low <= 0).nonzero()[:, 0]
    if not len(is_open) or not count or whole == -float("inf"):
        return Verdict(whole > 0, whole, whole, whole, 0, 0, "" if whole > 0 else "signs")
    exact = problem_of(margins)
    search = exact.to(torch.float32)
    first = start(search, is_open)
    unit = float(first.y.sum() / (first.y > 0).sum().clamp_min(1))
    effort = replace(effort, rate=effort.rate * unit)
    _, roots = ascend(search, first, steps=effort.root_steps, rate=effort.rate, until=deadline)
    bounds = torch.maximum(proven(exact, roots), low[is_open])
    root = min(float(bounds.min()), float(low[low > 0].min()) if (low > 0).any() else torch.inf)
    left = _BranchSearch(exact, search, effort, deadline)
    limit, worst = left.run(roots, bounds)
    settled = [float(low[low > 0].min())] if (low > 0).any() else []
    bound = min([worst, *settled])
    return Verdict(not limit, whole, root, bound, left.nodes, len(exact.slope), limit)


class _BranchSearch:
    """The open parts, worst first."""

    def __init__(self, exact: Problem, search: Problem, effort: Effort, deadline: float) -> None:
        self.exact, self.search, self.effort, self.deadline = exact, search, effort, deadline
        self.nodes, self.least = 0, torch.inf

    def run(self, roots: Nodes, bounds: Tensor) -> tuple[str, float]:
        """Return the reason for the end of the search, and the smallest bound of a part."""
        self.nodes = len(roots)
        positive = bounds > 0
        self.least = min([self.least, *bounds[positive].tolist()])
        queue, worth = roots[~positive], bounds[~positive]
        while len(queue):
            limit = self._limit()
            if limit:
                return limit, float(worth.min())
            order = worth.argsort()
            alike = queue.which[order] == queue.which[order[0]]  # one margin: one face suffices
            now = order[alike][: self.effort.batch]
            later = torch.cat([order[alike][self.effort.batch :], order[~alike]])
            batch, known = queue[now], (queue[now].state != 0).all(1)
            if not self._try_programs(batch[known]):
                return "signs", float(worth.min())
            queue, worth = queue[later], worth[later]
            if not known.all():
                children, value = self._bound_parts(*self._cut(batch[~known]), self.effort.steps)
                queue, worth = join_nodes([queue, children]), torch.cat([worth, value])
        return "", float(self.least)

    def _limit(self) -> str:
        if self.nodes >= self.effort.nodes:
            return "nodes"
        return "seconds" if time.monotonic() > self.deadline else ""

    def _try_programs(self, last: Nodes) -> bool:
        """Return whether parts with all signs fixed could be proven, one linear program each."""
        for haste in _LAST:
            if len(last):
                _, t = bound(self.search, last)
                face = restrict_to_face(self.search, t, self.effort.share)
                last, _ = self._bound_parts(face, last, self.effort.last_steps, haste)
        return not len(last)

    def _bound_parts(
        self, face: Problem, parts: Nodes, steps: int, haste: float = 1.0
    ) -> tuple[Nodes, Tensor]:
        """Bound parts, and return the open ones with their bounds."""
        self.nodes += len(parts)
        rate = haste * self.effort.rate
        value, parts = ascend(face, parts, steps=steps, rate=rate, until=self.deadline)
        value = value.to(self.exact.slope)
        hopeful = (value > 0).nonzero()[:, 0]
        value[hopeful] = proven(self.exact, parts[hopeful])
        is_open = ~(value > 0)
        self.least = min([self.least, *value[~is_open].tolist()])
        return parts[is_open], value[is_open]

    def _cut(self, batch: Nodes) -> tuple[Problem, Nodes]:
        """Split every part at the most promising ReLU; return the face to search, too.

        Score: the slack that the coefficient of eps costs, and what the multipliers use. Trials of
        the best few with some steps cost more than they save.
        """
        _, t = bound(self.search, batch)
        used = batch.y.clamp_min(0).sum(0) * self.search.offset
        score = 2 * t[:, self.search.columns].abs() + used
        chosen = score.masked_fill(batch.state != 0, -1.0).argmax(1)
        parts = join_nodes([_fix_sign(batch, chosen, sign) for sign in (1, -1)])
        return restrict_to_face(self.search, t, self.effort.share), parts


def _fix_sign(nodes: Nodes, unit: Tensor, sign: int) -> Nodes:
    """Return the parts of the nodes in which the ReLU `unit` has the given sign."""
    state = nodes.state.scatter(1, unit[:, None], sign)
    return Nodes(nodes.which, state, nodes.y)
