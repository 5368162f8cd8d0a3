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
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lipaudit.theory import NODES
from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.problem import Problem, make_problem, restrict_to_face
from lipaudit.wings.certificates.symbols import DOUBLE, gamma, round_up, tiny

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
        """Return whether the parts, at their multipliers, prove margins on the whole ball.

        Args:
            problem: the problem in float64.
            margins: indices of the margins.
        """
        nodes = self[torch.isin(self.which, margins)]
        proven = [nodes[:0]]
        for i in range(0, len(nodes), BATCH):
            batch = nodes[i : i + BATCH]
            proven.append(batch[prove_bounds(problem, batch) > 0])
        parts = join_nodes(proven)
        for margin in margins.tolist():
            states = parts.state[parts.which == margin]
            if not _covers_ball(states):
                return False
        return True

    def floor(self) -> Tensor:
        """Return the smallest multipliers: 0 for inequalities, no limit for equations."""
        # Where z <= 0 is known, h = 0 is an equation; where z >= 0 is known, z - h = 0 is one.
        is_equation = torch.stack([self.state == -1, self.state == 1])
        return torch.zeros_like(self.y).masked_fill_(is_equation, -torch.inf)

    def feasible(self) -> Tensor:
        """Return the nearest allowed multipliers: those of inequalities are >= 0."""
        return torch.maximum(self.y, self.floor())


def _covers_ball(state: Int[Tensor, "b k"]) -> bool:
    """Return whether parts with these signs of ReLUs cover the ball.

    They do if one is the whole ball, or if all split a ReLU and cover both sides.
    """
    if (state == 0).all(1).any():
        return True
    is_split = (state != 0).all(0)
    split = is_split.nonzero()[:, 0]
    if not len(state) or not len(split):
        return False
    relu = split[0]
    signs = state[:, relu]
    is_other = torch.arange(state.shape[1], device=state.device) != relu
    others = state[:, is_other]
    return _covers_ball(others[signs == 1]) and _covers_ball(others[signs == -1])


def join_nodes(groups: list[Nodes]) -> Nodes:
    """Return the nodes of several groups as one group."""
    return Nodes(
        torch.cat([nodes.which for nodes in groups]),
        torch.cat([nodes.state for nodes in groups]),
        torch.cat([nodes.y for nodes in groups], 1),
    )


def bound_nodes(problem: Problem, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Return the lower bound of every node, up to rounding, and the coefficients (b, columns)."""
    evaluation = _evaluate(
        problem, nodes.which, nodes.feasible(), _find_effects(problem, nodes.state)
    )
    return evaluation.bounds, evaluation.coefficients


def prove_bounds(problem: Problem, nodes: Nodes) -> Float[Tensor, " b"]:
    """Return lower bounds that rounding cannot raise above the true minimum (problem in float64).

    A sum of n terms is off by gamma_n of the sum of their absolute values: that is taken off.
    """
    nodes = Nodes(nodes.which, nodes.state, nodes.y.to(DOUBLE))
    bounds, _ = bound_nodes(problem, nodes)
    multipliers = nodes.feasible().abs().sum(0)
    size = problem.margin_magnitude[nodes.which] + multipliers @ problem.relu_magnitude
    # The longest sums are over ReLUs and over columns; the coefficients themselves are rounded.
    roundings = sum(problem.relus.slopes.shape) + 64
    return bounds - round_up(gamma(roundings, DOUBLE) * size, roundings)


def start_nodes(problem: Problem, which: Int[Tensor, " b"]) -> Nodes:
    """Return whole balls with the multipliers of one pass backwards, last layer first.

    A positive coefficient of eps_k means that the lower side of the ReLU is used: a multiplier
    cancels it, of the line h >= 0 or h >= z that has the smaller area below.
    """
    k = len(problem.slope)
    y = problem.slope.new_zeros(2, len(which), k)
    state = torch.zeros(len(which), k, dtype=torch.long, device=y.device)
    for depth in sorted(set(problem.depth.tolist()), reverse=True):
        layer = (problem.depth == depth).nonzero()[:, 0]
        _, coefficients = bound_nodes(problem, Nodes(which, state, y))
        of_errors = coefficients[:, problem.columns[layer]]
        # Each multiplier adds -m to the coefficient of eps.
        multiplier = of_errors.clamp_min(0) / problem.offset[layer]
        is_flat = problem.slope[layer] < 0.5
        y[0, :, layer] = torch.where(is_flat, multiplier, 0.0)
        y[1, :, layer] = torch.where(is_flat, 0.0, multiplier)
    return Nodes(which, state, y)


def ascend(
    problem: Problem, nodes: Nodes, *, steps: int, rate: float, until: float = float("inf")
) -> tuple[Float[Tensor, " b"], Nodes]:
    """Raise the bounds by moving the multipliers; return the best bound and multipliers of each.

    Adam along the supergradient, back to what is allowed after every step, with a rate that falls
    to a tenth. Ends early where all bounds are positive, or at a time of `time.monotonic`.
    """
    relus = problem.relus
    effects = _find_effects(problem, nodes.state)
    floor = nodes.floor()
    y = nodes.feasible()
    best = y.new_full(y.shape[1:2], -torch.inf)
    best_y = y
    mean_gradient = torch.zeros_like(y)
    mean_square = torch.zeros_like(y)
    for step in range(steps + 1):
        bounds, coefficients, on_z = _evaluate(problem, nodes.which, y, effects)
        is_better = bounds > best
        best = torch.where(is_better, bounds, best)
        best_y = torch.where(is_better[:, None], y, best_y)
        if step == steps or bool((best > 0).all()) or time.monotonic() > until:
            break
        # A supergradient: what the multipliers add at the symbols -e that attain the minimum.
        e = _find_maximum(problem, coefficients)
        z = relus.centre - on_z.sign() * relus.spread - e @ relus.slopes.mT
        error = 1 - e[:, problem.columns]
        gradient = effects.on_z * z + effects.on_error * error
        mean_gradient.lerp_(gradient, 1 - _DECAY[0])
        mean_square.lerp_(gradient.square_(), 1 - _DECAY[1])
        # Both means begin at zero: Adam divides by what they lack.
        correction = 1 - _DECAY[0] ** (step + 1)
        square_correction = 1 - _DECAY[1] ** (step + 1)
        size = (mean_square / square_correction).sqrt_().add_(1e-8)
        step_size = rate * (1 - 0.9 * step / steps) / correction
        y = torch.addcdiv(y, mean_gradient, size, value=step_size)
        y = torch.maximum(y, floor)
    return best, replace(nodes, y=best_y)


def _find_maximum(problem: Problem, coefficients: Tensor) -> Tensor:
    """Return e (b, columns): -e are the symbols at which coefficients . symbols is least."""
    symbols = problem.symbols
    e = coefficients.sign()
    of_inputs = coefficients[:, : problem.inputs]
    if symbols.norm == "l2":
        size = torch.linalg.vector_norm(of_inputs, dim=1, keepdim=True)
        e[:, : problem.inputs] = of_inputs / size.clamp_min(tiny(coefficients.dtype))
    elif symbols.norm == "words":
        # The words at which -coefficients are largest are those at which coefficients are least.
        least = symbols.find_best_words(-of_inputs.mT).mT
        e[:, : problem.inputs] = -least
    return e


class Effects(NamedTuple):
    """What a unit of each multiplier adds (table above), (2, b, k) each.

    Attributes:
        on_z: to the coefficient of z.
        on_error: to the coefficient of 1 + eps.
    """

    on_z: Tensor
    on_error: Tensor


def _find_effects(problem: Problem, state: Tensor) -> Effects:
    """Return what a unit of each multiplier adds, where ReLUs have these signs.

    The output of a ReLU is h = a z + m (1 + eps). Its two multipliers are of constraints that are
    <= 0 (or = 0): -h and z - h if the sign of z is unknown, -z and z - h for z >= 0, -h and z for
    z <= 0.
    """
    a = problem.slope
    first_on_z = torch.where(state == 1, -1.0, -a)
    second_on_z = torch.where(state == -1, 1.0, 1 - a)
    # -z and z have no h, and so no eps.
    has_h = torch.stack([state != 1, state != -1])
    return Effects(torch.stack([first_on_z, second_on_z]), has_h * -problem.offset)


class Evaluation(NamedTuple):
    """Margins plus multipliers times constraints, which are affine in the symbols.

    Attributes:
        bounds: (b,), their minima over all symbols.
        coefficients: (b, columns), those of the symbols.
        on_z: (b, k), those of the input z of each ReLU.
    """

    bounds: Tensor
    coefficients: Tensor
    on_z: Tensor


def _evaluate(problem: Problem, which: Tensor, y: Tensor, effects: Effects) -> Evaluation:
    """Return lower bounds of the margins `which` (b,) by multipliers y (2, b, k).

    margin + sum y constraint is no larger than the margin where the constraints (<= 0) hold. It is
    affine in the symbols e, so its minimum is its constant less the dual norm of its coefficients.
    """
    relus = problem.relus
    margins = problem.margins
    n = problem.inputs
    # margin + on_z . z + on_error . (1 + eps), where z and the margin are affine in e.
    on_z = (y * effects.on_z).sum(0)
    on_error = (y * effects.on_error).sum(0)
    coefficients = torch.addmm(margins.slopes[which], on_z, relus.slopes)
    coefficients.index_add_(1, problem.columns, on_error)
    constant = margins.centre[which] + on_z @ relus.centre + on_error.sum(1)
    spread = margins.spread[which] + on_z.abs() @ relus.spread
    bounds = constant - spread
    # Symbols in [-1, 1] have the 1-norm; those of the input may have another dual norm.
    if problem.symbols.norm == "linf":
        bounds = bounds - torch.linalg.vector_norm(coefficients, 1, dim=1)
        return Evaluation(bounds, coefficients, on_z)
    of_inputs = coefficients[:, :n]
    if problem.symbols.norm == "words":
        bounds = bounds - problem.symbols.maximise_over_words(-of_inputs.mT).to(coefficients)
    else:
        bounds = bounds - torch.linalg.vector_norm(of_inputs, dim=1)
    bounds = bounds - torch.linalg.vector_norm(coefficients[:, n:], 1, dim=1)
    return Evaluation(bounds, coefficients, on_z)


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
_LAST_RATE_FACTORS = (10.0, 3.0, 1.0, 0.3)
"""Factors of the learning rate that are tried in turn on parts in which every sign is known."""


@dataclass(frozen=True)
class Decision:
    """The outcome for the margins of a sample.

    Attributes:
        certified: every margin is positive on the whole ball, proven.
        bound: smallest margin over all parts: proven if certified; otherwise 0 or less, in single
            precision for open parts.
        nodes: number of examined parts.
        relus: number of ReLUs of unknown sign.
        limit: the reason for the end of the search: none, "nodes", "seconds" or "signs" (all signs
            are fixed).
        leaves: if certified, the parts with their multipliers; `decide` takes them again.
    """

    certified: bool
    bound: float
    nodes: int
    relus: int
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
    smallest = float(low.min())
    if smallest > 0:
        return Decision(certified=True, bound=smallest, nodes=0, relus=0)
    if not margins.symbols.relu_calls or smallest == -float("inf"):
        return Decision(certified=False, bound=smallest, nodes=0, relus=0, limit="signs")
    problem = make_problem(margins)
    relus = len(problem.slope)
    if leaves is not None:
        open_margins = (low <= 0).nonzero()[:, 0]
        proven = leaves.state.shape[1] == relus and leaves.prove(problem, open_margins)
        limit = "" if proven else "nodes"
        return Decision(proven, smallest, len(leaves), relus, limit)
    return _branch(problem, low, nodes, deadline)


def _branch(problem: Problem, low: Tensor, nodes: int, deadline: float) -> Decision:
    """Search multipliers, then split the ball, until all margins are proven or at a limit.

    Args:
        problem: the problem in float64.
        low: lower ends of the ranges of the margins; those above 0 need no search.
        nodes: largest number of parts of the ball.
        deadline: time (of `time.monotonic`) at which the search ends.
    """
    open_margins = (low <= 0).nonzero()[:, 0]
    rough = problem.to(torch.float32)
    roots = start_nodes(rough, open_margins)
    # Multipliers differ in size between models: the rate is relative to those of the start.
    used = (roots.y > 0).sum().clamp_min(1)
    rate = RATE * float(roots.y.sum() / used)
    roots = _ascend_on_faces(rough, roots, rate, deadline)
    bounds = torch.maximum(prove_bounds(problem, roots), low[open_margins])
    search = BranchAndBound(problem, rough, rate, nodes, deadline)
    limit, smallest = search.run(roots, bounds)
    smallest = min([smallest, *low[low > 0].tolist()])
    relus = len(problem.slope)
    if limit:
        return Decision(False, smallest, search.nodes, relus, limit)
    return Decision(True, smallest, search.nodes, relus, leaves=join_nodes(search.proven))


def _ascend_on_faces(problem: Problem, roots: Nodes, rate: float, deadline: float) -> Nodes:
    """Return whole balls with better multipliers, searched on one face after the other."""
    improved = []
    # Few margins share a face: with all of them few symbols would keep their signs.
    size = math.ceil(len(roots) / GROUPS)
    for i in range(0, len(roots), size):
        group = roots[i : i + size]
        for _ in range(FACES):
            _, coefficients = bound_nodes(problem, group)
            face = restrict_to_face(problem, coefficients, SHARE)
            _, group = ascend(face, group, steps=ROOT_STEPS, rate=rate, until=deadline)
        improved.append(group)
    return join_nodes(improved)


@dataclass
class BranchAndBound:
    """A search over the open parts of a ball, worst first.

    Attributes:
        exact: the problem in float64, which proves bounds.
        rough: the problem in single precision, for the search.
        rate: learning rate of the multipliers.
        most_nodes: limit of `nodes`.
        deadline: time (of `time.monotonic`) at which the search ends.
        nodes: number of parts examined so far.
        smallest: smallest bound of a proven part.
        proven: the proven parts.
    """

    exact: Problem
    rough: Problem
    rate: float
    most_nodes: int
    deadline: float
    nodes: int = 0
    smallest: float = float("inf")
    proven: list[Nodes] = field(default_factory=list)

    def run(self, roots: Nodes, bounds: Tensor) -> tuple[str, float]:
        """Return the reason for the end of the search, and the smallest bound of a part."""
        self.nodes = len(roots)
        queue, queue_bounds = self._remove_proven(roots, bounds)
        while len(queue):
            if self.nodes >= self.most_nodes:
                return "nodes", float(queue_bounds.min())
            if time.monotonic() > self.deadline:
                return "seconds", float(queue_bounds.min())
            # Worst first: so the least bound of all parts, which is reported, rises fastest. All
            # of a batch are of one margin: then one face suffices.
            order = queue_bounds.argsort()
            margins = queue.which[order]
            is_first_margin = margins == margins[0]
            of_margin = order[is_first_margin]
            batch = queue[of_margin[:BATCH]]
            later = torch.cat([of_margin[BATCH:], order[~is_first_margin]])
            has_all_signs = (batch.state != 0).all(1)
            if self._stays_open(batch[has_all_signs]):
                return "signs", float(queue_bounds.min())
            queue = queue[later]
            queue_bounds = queue_bounds[later]
            unsplit = batch[~has_all_signs]
            if len(unsplit):
                parts, bounds = self._split(unsplit)
                queue = join_nodes([queue, parts])
                queue_bounds = torch.cat([queue_bounds, bounds])
        return "", self.smallest

    def _stays_open(self, parts: Nodes) -> bool:
        """Return whether a part in which every sign is known is unproven after many steps."""
        for factor in _LAST_RATE_FACTORS:
            if not len(parts):
                return False
            _, coefficients = bound_nodes(self.rough, parts)
            parts, _ = self._bound_parts(coefficients, parts, LAST_STEPS, factor * self.rate)
        return len(parts) > 0

    def _split(self, batch: Nodes) -> tuple[Nodes, Tensor]:
        """Split every part at the most promising ReLU; return the open halves with bounds.

        A ReLU promises what the coefficient of eps costs, and what its multipliers use. Trials of
        the best few with some steps cost more than they save.
        """
        _, coefficients = bound_nodes(self.rough, batch)
        used = batch.y.clamp_min(0).sum(0) * self.rough.offset
        score = 2 * coefficients[:, self.rough.columns].abs() + used
        score = score.masked_fill(batch.state != 0, -1.0)
        relu = score.argmax(1, keepdim=True)
        positive = replace(batch, state=batch.state.scatter(1, relu, 1))
        negative = replace(batch, state=batch.state.scatter(1, relu, -1))
        halves = join_nodes([positive, negative])
        return self._bound_parts(coefficients, halves, STEPS, self.rate)

    def _bound_parts(
        self, coefficients: Tensor, parts: Nodes, steps: int, rate: float
    ) -> tuple[Nodes, Tensor]:
        """Take steps on the face of these coefficients; return the open parts with bounds."""
        self.nodes += len(parts)
        face = restrict_to_face(self.rough, coefficients, SHARE)
        bounds, parts = ascend(face, parts, steps=steps, rate=rate, until=self.deadline)
        bounds = bounds.to(self.exact.slope)
        # Only what may be proven is evaluated in float64, on the whole box.
        hopeful = (bounds > 0).nonzero()[:, 0]
        bounds[hopeful] = prove_bounds(self.exact, parts[hopeful])
        return self._remove_proven(parts, bounds)

    def _remove_proven(self, parts: Nodes, bounds: Tensor) -> tuple[Nodes, Tensor]:
        """Record the proven parts, and return the open ones with their bounds."""
        is_proven = bounds > 0
        self.smallest = min([self.smallest, *bounds[is_proven].tolist()])
        self.proven.append(parts[is_proven])
        return parts[~is_proven], bounds[~is_proven]
