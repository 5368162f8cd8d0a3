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

A bound is a product of multipliers with the stack of rows: no pass through the network.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from lipaudit.theory import NODES
from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.problem import Problem, make_problem, restrict_to_face
from lipaudit.wings.certificates.rounding import DOUBLE, bound_rounding, round_up, tiny

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

    which: Tensor
    state: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: Tensor | slice) -> Nodes:
        return Nodes(self.which[index], self.state[index], self.y[:, index])

    def prove(self, problem: Problem, margins: Tensor) -> bool:
        """Return whether the parts, at their multipliers, prove that margins are positive.

        For each margin, the parts of the ball with a positive lower bound must cover the ball.
        `problem` is in float64, and `margins` has the indices of the margins to prove.
        """
        nodes = self[torch.isin(self.which, margins)]
        proven = [nodes[:0]]  # `join_nodes` needs at least one group, if only an empty one
        for i in range(0, len(nodes), BATCH):
            batch = nodes[i : i + BATCH]
            proven.append(batch[prove_bounds(problem, batch) > 0])
        parts = join_nodes(proven)
        return all(_covers_ball(parts.state[parts.which == i]) for i in margins.tolist())

    def find_smallest_multipliers(self) -> Tensor:
        """Return the smallest allowed multipliers: 0 for inequalities, -inf for equations.

        Each ReLU h = relu(z) has two constraints. In a part with z <= 0 the first constraint is
        the equation h = 0. In a part with z >= 0 the second one is z - h = 0. All other
        constraints are inequalities <= 0, whose multipliers must not be negative.
        """
        is_equation = torch.stack([self.state == -1, self.state == 1])
        return torch.zeros_like(self.y).masked_fill_(is_equation, -torch.inf)

    def clip_multipliers(self) -> Tensor:
        """Return the multipliers, with negative multipliers of inequalities replaced by 0."""
        return torch.maximum(self.y, self.find_smallest_multipliers())


def _covers_ball(state: Tensor) -> bool:
    """Return whether parts of a ball cover the whole ball: every input is in a part.

    Row i of `state` (b, k) describes part i by the signs of the inputs of k ReLUs: 1 or -1 if the
    part has only inputs with this sign, 0 if it has both signs. A part of zeros alone is the whole
    ball. Otherwise all parts must split a common ReLU, and the parts with each sign of this ReLU
    must cover the inputs with this sign.
    """
    if (state == 0).all(1).any():
        return True
    # Parts made by repeated splitting have a common ReLU: the one that was split first. (Without
    # any part, `all` is True: such a ball is not covered either.)
    is_split = (state != 0).all(0)
    split = is_split.nonzero()[:, 0]
    if not len(state) or not len(split):
        return False
    relu = split[0]  # any ReLU that all parts split
    signs = state[:, relu]
    others = state.index_fill(1, relu, 0)  # without this ReLU
    return _covers_ball(others[signs == 1]) and _covers_ball(others[signs == -1])


def join_nodes(groups: list[Nodes]) -> Nodes:
    """Return several groups of nodes as one group.

    A node is a part of the ball: the index `which` of the margin to bound, the signs `state` of
    the ReLUs on this part, and the multipliers `y`, whose axis 0 is not that of the nodes.
    """
    return Nodes(
        torch.cat([nodes.which for nodes in groups]),
        torch.cat([nodes.state for nodes in groups]),
        torch.cat([nodes.y for nodes in groups], 1),
    )


def bound_nodes(problem: Problem, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Return a lower bound of a margin on each of b parts, and coefficients of the symbols.

    A node is a part of the ball, given by the signs `state` of ReLUs, and the margin `which` that
    is bounded on this part. It has a multiplier for each constraint on a ReLU. The function
    margin + multipliers . constraints is affine in the symbols (unknowns), and its minimum is the
    bound (weak duality). The bounds are (b,), without the rounding errors of this computation. The
    coefficients of the symbols in this function are (b, columns).
    """
    # What each multiplier adds to the function depends on the signs of the ReLUs.
    effects = _find_effects(problem, nodes.state)
    evaluation = _evaluate(problem, nodes.which, nodes.clip_multipliers(), effects)
    return evaluation.bounds, evaluation.coefficients


def prove_bounds(problem: Problem, nodes: Nodes) -> Tensor:
    """Return lower bounds, (b,), of the margins on b parts that hold despite rounding.

    The problem is in float64. The error of a sum of n terms is at most gamma_n = n u / (1 - n u)
    times the sum of their absolute values, with the unit roundoff u = 2^-53. This error is
    subtracted from the bounds.
    """
    nodes = replace(nodes, y=nodes.y.to(DOUBLE))
    bounds, _ = bound_nodes(problem, nodes)
    # (b, relus): the sizes of both multipliers of each ReLU, as `bound_nodes` uses them: negative
    # multipliers of inequalities are replaced by 0.
    multipliers = nodes.clip_multipliers().abs().sum(0)
    # The sum of absolute values: of the margin's row, and of the ReLUs' rows times multipliers.
    size = problem.margin_magnitude[nodes.which] + multipliers @ problem.relu_magnitude
    # `slopes` is (ReLUs, columns): the longest sums are over ReLUs, and then over columns. 64
    # leaves room for the other steps.
    roundings = sum(problem.relus.slopes.shape) + 64
    return bounds - round_up(bound_rounding(roundings, DOUBLE) * size, roundings=roundings)


def start_nodes(problem: Problem, which: Tensor) -> Nodes:
    """Return the whole ball as one part for each margin, with good multipliers for the search.

    The ReLUs are those whose input z may have both signs. The output of ReLU k is h = a z +
    m (1 + eps_k), with m > 0 and a symbol eps_k in [-1, 1]. Two constraints, h >= 0 and h >= z,
    have the multipliers y[0] and y[1]. Each unit of either adds -m to the coefficient of eps_k in
    the bound of the margin. A positive coefficient loses most (eps_k = -1 is then worst, where a
    constraint is violated), so it is brought to 0. A unit of y[0] also adds -a to the coefficient
    of z, and a unit of y[1] adds 1 - a: the smaller change is taken, that of y[0] if a < 1/2.
    `which` (b,) has the indices of the margins.
    """
    k = len(problem.slope)
    y = problem.slope.new_zeros(2, len(which), k)
    state = y.new_zeros(len(which), k, dtype=torch.long)  # 0: the sign of z is unknown
    # The last layer first: its multipliers change the coefficients of earlier ReLUs.
    for depth in sorted(set(problem.depth.tolist()), reverse=True):
        layer = (problem.depth == depth).nonzero()[:, 0]
        _, coefficients = bound_nodes(problem, Nodes(which, state, y))
        of_errors = coefficients[:, problem.columns[layer]]
        # coefficient - y m = 0, if the coefficient is positive; else y = 0. In single precision a
        # tiny m (of a ReLU whose input is always 0) is 0, and so is the coefficient: y = 0.
        m = problem.offset[layer].clamp_min(tiny(y.dtype))
        multiplier = of_errors.clamp_min(0) / m
        is_flat = problem.slope[layer] < 0.5
        y[0, :, layer] = torch.where(is_flat, multiplier, 0.0)
        y[1, :, layer] = torch.where(is_flat, 0.0, multiplier)
    return Nodes(which, state, y)


def ascend(
    problem: Problem, nodes: Nodes, *, steps: int, rate: float, until: float = math.inf
) -> tuple[Tensor, Nodes]:
    """Raise the lower bounds of parts by moving their multipliers.

    A bound is a concave function of the multipliers of the constraints on ReLUs. Adam follows the
    supergradient of the bound. After every step the multipliers are clipped to allowed values. The
    learning rate falls linearly to a tenth.

    Args:
        problem: margins and ReLUs as affine functions of the symbols.
        nodes: the parts of the ball, with the multipliers to start from.
        steps: number of steps; fewer if all bounds are positive.
        rate: learning rate of the first step.
        until: time (of `time.monotonic`) at which the search ends.

    Returns:
        The best bound of each part, (b,), and the parts with the multipliers of these bounds.
    """
    # What a unit of each multiplier adds to the bounded function: it depends on signs of ReLUs.
    effects = _find_effects(problem, nodes.state)
    floor = nodes.find_smallest_multipliers()
    y = nodes.clip_multipliers()  # (2, b, k): two for each of k ReLUs
    best = y.new_full(y.shape[1:2], -torch.inf)  # (b,)
    best_y = y
    adam = _Adam(mean_gradient=torch.zeros_like(y), mean_square=torch.zeros_like(y))
    for step in range(steps + 1):
        evaluation = _evaluate(problem, nodes.which, y, effects)
        is_better = evaluation.bounds > best
        best = torch.where(is_better, evaluation.bounds, best)
        best_y = torch.where(is_better[:, None], y, best_y)
        if step == steps or bool((best > 0).all()) or time.monotonic() > until:
            break
        gradient = _find_supergradient(problem, evaluation, effects)
        y = adam.move(y, gradient, rate=rate * (1 - 0.9 * step / steps))
        y = torch.maximum(y, floor)
    return best, replace(nodes, y=best_y)


@dataclass
class _Adam:
    """The optimizer Adam, for maximisation.

    Attributes:
        mean_gradient: running mean of the gradient, at first 0.
        mean_square: running mean of the square of the gradient, at first 0.
        steps: number of steps so far.
    """

    mean_gradient: Tensor
    mean_square: Tensor
    steps: int = 0

    def move(self, y: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """Return y after a step of Adam along the gradient, which is overwritten by its square.

        The step is rate * mean gradient / root of the mean square. Both running means are updated.
        """
        gradient_decay, square_decay = _DECAY
        self.steps += 1
        self.mean_gradient.lerp_(gradient, 1 - gradient_decay)
        self.mean_square.lerp_(gradient.square_(), 1 - square_decay)
        # Both means begin at zero: Adam corrects their bias.
        correction = 1 - gradient_decay**self.steps
        square_correction = 1 - square_decay**self.steps
        size = (self.mean_square / square_correction).sqrt_().add_(1e-8)
        return torch.addcdiv(y, self.mean_gradient, size, value=rate / correction)


def _find_supergradient(problem: Problem, evaluation: Evaluation, effects: Effects) -> Tensor:
    """Return the supergradient of lower bounds in their multipliers, (2, b, k).

    A bound is the minimum of margin + multipliers . constraints over the symbols, so its
    supergradient has the values of the constraints at the minimum: of the two constraints (axis
    0) of each of k ReLUs, on each of b parts of the ball. A constraint of a ReLU is
    on_z z + on_error (1 + eps), with the input z = centre + slopes @ symbols +- spread.
    """
    relus = problem.relus
    # Where margin + multipliers . constraints is smallest. Of +-spread of z, it is smallest at the
    # sign against the coefficient of z in the whole function, `evaluation.on_z`.
    symbols = problem.find_minimum(evaluation.coefficients)  # (b, columns)
    z = relus.centre - evaluation.on_z.sign() * relus.spread + symbols @ relus.slopes.mT
    error = 1 + symbols[:, problem.columns]  # 1 + eps of each ReLU
    return effects.on_z * z + effects.on_error * error


class Effects(NamedTuple):
    """What a unit of each multiplier adds (table above), (2, b, k) each.

    Attributes:
        on_z: to the coefficient of z.
        on_error: to the coefficient of 1 + eps.
    """

    on_z: Tensor
    on_error: Tensor


def _find_effects(problem: Problem, state: Tensor) -> Effects:
    """Return what a unit of each multiplier adds to the coefficients of z and of 1 + eps.

    The output of a ReLU with input z is h = a z + m (1 + eps), with a symbol eps in [-1, 1]. Each
    ReLU has two constraints, each an expression that is <= 0 (or = 0): -h and z - h if the sign of
    z is unknown, -z and z - h for z >= 0, -h and z for z <= 0. Each constraint has a multiplier.

    Args:
        problem: has a and m of every ReLU.
        state: (b, k), signs of the ReLUs: 0 unknown, 1 for z >= 0, -1 for z <= 0.
    """
    # -h is -a z - m (1 + eps), and z - h is (1 - a) z - m (1 + eps).
    a = problem.slope
    first_on_z = torch.where(state == 1, -1.0, -a)
    second_on_z = torch.where(state == -1, 1.0, 1 - a)
    # -z and z contain no h, and so no eps.
    has_h = torch.stack([state != 1, state != -1])
    return Effects(on_z=torch.stack([first_on_z, second_on_z]), on_error=has_h * -problem.offset)


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

    The output of a ReLU with input z is h = a z + m (1 + eps), where eps is one of the symbols e
    (unknowns), namely the one with the number `problem.columns`. Each ReLU has two constraints
    on z and eps, such as -h <= 0: `effects` has their coefficients. For y >= 0,
    margin + sum y constraint is no larger than the margin where the constraints hold. It is affine
    in e, so its minimum is its constant less the dual norm of its coefficients (weak duality).

    Args:
        problem: margins and inputs z of k ReLUs as rows centre + slopes @ e +- spread.
        which: (b,), the margin to bound on each of b parts of the ball.
        y: (2, b, k), a multiplier for each of the two constraints of a ReLU.
        effects: what a unit of each multiplier adds to the coefficients of z and of 1 + eps.
    """
    relus = problem.relus
    margins = problem.margins
    # margin + on_z . z + on_error . (1 + eps), where z and the margin are affine in e. A ReLU of
    # unknown sign, for example, has the constraints -h = -a z - m (1 + eps) <= 0 and
    # z - h = (1 - a) z - m (1 + eps) <= 0.
    on_z = (y * effects.on_z).sum(0)
    on_error = (y * effects.on_error).sum(0)
    coefficients = torch.addmm(margins.slopes[which], on_z, relus.slopes)
    coefficients.index_add_(1, problem.columns, on_error)  # the symbol eps of each ReLU
    # The last term is the 1 of 1 + eps.
    constant = margins.centre[which] + on_z @ relus.centre + on_error.sum(1)
    spread = margins.spread[which] + on_z.abs() @ relus.spread
    bounds = _subtract_dual_norms(constant - spread, coefficients, problem)
    return Evaluation(bounds, coefficients, on_z)


def _subtract_dual_norms(constants: Tensor, coefficients: Tensor, problem: Problem) -> Tensor:
    """Return the minima of b functions constant + c . e over all symbols e of a ball, (b,).

    c . e falls to minus the dual norm of the coefficients c, (b, columns). Input symbols of an L2
    ball or of words have their own dual norm: ||c||, or the largest value of -c . e. All other
    symbols are in [-1, 1], whose dual norm is the 1-norm: errors, and inputs of a box.
    """
    of_inputs = coefficients[:, : problem.inputs]
    in_box = coefficients[:, problem.inputs :]
    if problem.symbols.norm == "l2":
        constants = constants - vector_norm(of_inputs, dim=1)
    elif problem.symbols.norm == "words":
        constants = constants - problem.symbols.maximise_over_words(-of_inputs.mT).to(coefficients)
    else:
        in_box = coefficients
    return constants - vector_norm(in_box, ord=1, dim=1)


BATCH = 48
"""Number of parts of the ball that are split at a time."""
FACE_ROUNDS = 3
"""Number of faces on which the multipliers of the whole ball are moved, one after the other."""
MARGIN_GROUPS = 16
"""Largest number of groups of margins that have faces of their own: each group takes its steps."""
ROOT_STEPS = 20
STEPS = 10
LAST_STEPS = 400
"""Steps of the multipliers: on each face of the ball, on a part, and on a part where every sign is
known."""
RATE = 0.2
"""Learning rate, as a share of the multipliers that the search begins with."""
COLUMN_SHARE = 0.02
"""Share of the symbols that are searched over beside those in doubt (`restrict_to_face`)."""
_LAST_RATE_FACTORS = (10.0, 3.0, 1.0, 0.3)
"""Factors of the learning rate that are tried in turn on parts in which every sign is known."""


@dataclass(frozen=True)
class Decision:
    """The outcome for the margins of a sample.

    Attributes:
        bound: smallest margin over all parts: proven if certified; otherwise 0 or less, in single
            precision for open parts.
        nodes: number of examined parts.
        relus: number of ReLUs of unknown sign.
        limit: why the search ended without a proof: "nodes", "seconds" or "signs" (the signs of
            all ReLUs are fixed); empty if certified.
        leaves: if certified by branching, the parts with their multipliers. `prove_positive` can
            check them again without a search.
    """

    bound: float
    nodes: int = 0
    relus: int = 0
    limit: str = ""
    leaves: Nodes | None = None

    @property
    def certified(self) -> bool:
        """Return whether every margin is proven to be positive on the whole ball."""
        return not self.limit


def prove_positive(
    margins: Form,
    *,
    nodes: int = NODES,
    seconds: float = math.inf,
    leaves: Nodes | None = None,
) -> Decision:
    """Try to prove that all margins are positive on the ball, by branch and bound over ReLUs.

    A form bounds the margins for all inputs: centre + coefficients . symbols +- slack. The ranges
    of the margins may already prove that they are positive. Otherwise the ball is split by the
    signs of ReLUs. On each part, multipliers of the constraints on ReLUs give lower bounds of the
    margins. The multipliers are searched in single precision. The claimed bound is evaluated in
    double precision, minus its rounding error (`prove_bounds`).

    Args:
        margins: a form of one axis, logit of the label minus every other logit.
        nodes: largest number of parts of the ball. With this limit alone, verdicts do not depend
            on the speed of the machine.
        seconds: time limit, which does depend on the speed of the machine.
        leaves: the parts and multipliers of an earlier proof, to check without a search.
    """
    deadline = time.monotonic() + seconds
    low, _ = margins.range()
    low = low.nan_to_num(nan=-torch.inf)
    smallest = float(low.min())
    if smallest > 0:
        return Decision(smallest)
    # Without ReLUs of unknown sign there is nothing to split. A bound of -inf (an overflow) cannot
    # be raised by splitting.
    if not margins.symbols.relu_calls or smallest == -math.inf:
        return Decision(smallest, limit="signs")
    problem = make_problem(margins)
    relus = len(problem.slope)
    if leaves is not None:
        open_margins = (low <= 0).nonzero()[:, 0]  # their range does not prove them
        # Parts with another number of ReLUs belong to another model or ball.
        proven = leaves.state.shape[1] == relus and leaves.prove(problem, open_margins)
        limit = "" if proven else "nodes"  # a search with more parts may prove it
        return Decision(smallest, nodes=len(leaves), relus=relus, limit=limit)
    return _branch(problem, low, nodes, deadline)


def _branch(problem: Problem, low: Tensor, nodes: int, deadline: float) -> Decision:
    """Try to prove that all margins are positive: on the whole ball first, then on parts of it.

    Each ReLU gives constraints (-h <= 0 and z - h <= 0 for input z and output h). For multipliers
    y >= 0, the minimum of margin + y . constraints over a part of the ball is a lower bound of the
    margin there (duality). Gradient ascent looks for multipliers with a high bound. A part that
    stays unproven is split by the sign of z of one ReLU.

    Args:
        problem: margins and ReLUs as affine functions of the symbols, in float64.
        low: (margins,), a lower bound of each margin; margins with a bound above 0 are proven.
        nodes: largest number of parts of the ball.
        deadline: time (of `time.monotonic`) at which the search ends.
    """
    open_margins = (low <= 0).nonzero()[:, 0]
    rough = problem.to(torch.float32)  # for the search, which proves nothing
    roots = start_nodes(rough, open_margins)
    # The size of multipliers differs between models. So the learning rate of the ascent is a share
    # (RATE) of the mean of the positive multipliers in roots.y.
    sizes = roots.y
    if not sizes.any():
        # The upper line of every ReLU is worst, which multipliers change only after a split. They
        # then get about the size of the margin's coefficient of the output h = a z + m (1 + eps).
        _, coefficients = bound_nodes(rough, roots)
        sizes = coefficients[:, rough.columns].abs() / rough.offset.clamp_min(tiny(torch.float32))
    count = (sizes > 0).sum().clamp_min(1)
    rate = RATE * float(sizes.sum() / count)
    # The ascent first fixes most symbols (a face of the box of symbols), so that a step is cheap.
    roots = _ascend_on_faces(rough, roots, rate, deadline)
    bounds = torch.maximum(prove_bounds(problem, roots), low[open_margins])
    search = BranchAndBound(
        exact=problem, rough=rough, rate=rate, most_nodes=nodes, deadline=deadline
    )
    # The limit that ended the search: "nodes", "seconds" or "signs"; "" if all parts are proven.
    limit, smallest = search.run(roots, bounds)
    smallest = min([smallest, *low[low > 0].tolist()])
    leaves = None if limit else join_nodes(search.proven)
    return Decision(
        smallest, nodes=search.nodes, relus=len(problem.slope), limit=limit, leaves=leaves
    )


def _ascend_on_faces(problem: Problem, roots: Nodes, rate: float, deadline: float) -> Nodes:
    """Return the parts `roots`, each a whole ball for one margin, with better multipliers.

    The multipliers of the constraints on ReLUs bound a margin from below, and gradient ascent
    raises the bound. The ascent runs on a face of the box of symbols: most symbols are fixed at an
    end of [-1, 1] (`restrict_to_face`), so a step is cheap. After ROOT_STEPS steps other symbols
    matter, and a new face is chosen. `rate` is the learning rate of the ascent, and `deadline` is
    the time (of `time.monotonic`) at which it ends.
    """
    improved = []
    # A face can fix a symbol only if its coefficient has the same sign for all margins of a group.
    # In a large group such symbols are few, so groups are small.
    size = math.ceil(len(roots) / MARGIN_GROUPS)
    for i in range(0, len(roots), size):
        group = roots[i : i + size]
        for _ in range(FACE_ROUNDS):
            _, coefficients = bound_nodes(problem, group)
            face = restrict_to_face(problem, coefficients, share=COLUMN_SHARE)
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
    smallest: float = math.inf
    proven: list[Nodes] = field(default_factory=list)

    def run(self, roots: Nodes, bounds: Tensor) -> tuple[str, float]:
        """Split unproven parts of the ball until all are proven or a limit ends the search.

        Args:
            roots: the whole ball once for each margin, with multipliers.
            bounds: (b,), a lower bound of the margin on each root.

        Returns:
            Why the search ended ("" if all is proven, else "nodes", "seconds", or "signs" if a
            part without a ReLU to split stays open), and the smallest bound of a part.
        """
        self.nodes = len(roots)
        queue, queue_bounds = self._remove_proven(roots, bounds)
        while len(queue):
            if self.nodes >= self.most_nodes:
                return "nodes", float(queue_bounds.min())
            if time.monotonic() > self.deadline:
                return "seconds", float(queue_bounds.min())
            first, later = _choose_batch(queue, queue_bounds)  # indices of parts in the queue
            batch = queue[first]
            # A part with known signs of all ReLUs cannot be split: its multipliers get more steps.
            has_all_signs = (batch.state != 0).all(1)
            if not self._prove_unsplit(batch[has_all_signs]):
                return "signs", float(queue_bounds.min())
            queue = queue[later]
            queue_bounds = queue_bounds[later]
            unsplit = batch[~has_all_signs]
            if len(unsplit):
                parts, bounds = self._split(unsplit)
                queue = join_nodes([queue, parts])
                queue_bounds = torch.cat([queue_bounds, bounds])
        return "", self.smallest

    def _prove_unsplit(self, parts: Nodes) -> bool:
        """Try to prove parts in which no ReLU can be split; return whether all are proven.

        The signs of all ReLUs are known in these parts, so only their multipliers can change, by
        many more steps. Several learning rates are tried in turn on the parts that are not proven
        yet.
        """
        for factor in _LAST_RATE_FACTORS:
            if not len(parts):
                return True
            # `rough` is the problem in single precision, for the search. The coefficients of the
            # symbols in margin + multipliers . constraints, (b, columns), say which symbols the
            # search may fix.
            _, coefficients = bound_nodes(self.rough, parts)
            # The parts that are not proven yet, with better multipliers.
            parts, _ = self._bound_parts(
                coefficients, parts, steps=LAST_STEPS, rate=factor * self.rate
            )
        return not len(parts)

    def _split(self, batch: Nodes) -> tuple[Nodes, Tensor]:
        """Split every part at its most promising ReLU; return the unproven halves with bounds.

        The output of a ReLU with input z is h = a z + m (1 + eps). Its score is what the bound of
        the margin may gain if the sign of z is known: twice the coefficient of eps in [-1, 1], and
        m times the multipliers of the ReLU. The ReLU with the highest score is split: z >= 0 in
        the first half, z <= 0 in the second.
        """
        # `rough` is the problem in single precision: its `offset` is m. The coefficients are those
        # of the symbols in margin + multipliers . constraints of each part, (b, columns).
        _, coefficients = bound_nodes(self.rough, batch)
        # ReLUs that can be split have multipliers >= 0. The others get the score -1 below.
        of_multipliers = batch.y.sum(0) * self.rough.offset
        score = 2 * coefficients[:, self.rough.columns].abs() + of_multipliers
        score = score.masked_fill(batch.state != 0, -1.0)  # split already: below all scores
        relu = score.argmax(1, keepdim=True)
        positive = replace(batch, state=batch.state.scatter(1, relu, 1))
        negative = replace(batch, state=batch.state.scatter(1, relu, -1))
        halves = join_nodes([positive, negative])
        # A half starts with the multipliers of its part, so its coefficients are about those of
        # the part: these say which symbols the search may fix. It gets a few more steps.
        return self._bound_parts(coefficients, halves, steps=STEPS, rate=self.rate)

    def _bound_parts(
        self, coefficients: Tensor, parts: Nodes, steps: int, rate: float
    ) -> tuple[Nodes, Tensor]:
        """Raise the bounds of parts by some steps; return the unproven parts with their bounds.

        Args:
            coefficients: (rows, columns), coefficients of the symbols on these parts, or on the
                parts that they are halves of. In the search, symbols whose coefficient has the
                same clear sign in all rows are fixed (`restrict_to_face`).
            parts: the parts, with the multipliers to start from.
            steps: number of steps.
            rate: learning rate.
        """
        self.nodes += len(parts)
        # The search runs on the problem in single precision with most symbols fixed: fast, but it
        # proves nothing.
        face = restrict_to_face(self.rough, coefficients, share=COLUMN_SHARE)
        bounds, parts = ascend(face, parts, steps=steps, rate=rate, until=self.deadline)
        bounds = bounds.to(DOUBLE)
        # Parts that look proven are evaluated on the problem in float64 with all symbols: this is
        # the proof.
        promising = (bounds > 0).nonzero()[:, 0]
        bounds[promising] = prove_bounds(self.exact, parts[promising])
        return self._remove_proven(parts, bounds)

    def _remove_proven(self, parts: Nodes, bounds: Tensor) -> tuple[Nodes, Tensor]:
        """Record the parts with a positive bound; return the other parts with their bounds."""
        is_proven = bounds > 0
        self.smallest = min([self.smallest, *bounds[is_proven].tolist()])
        self.proven.append(parts[is_proven])
        return parts[~is_proven], bounds[~is_proven]


def _choose_batch(queue: Nodes, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the parts of a ball to split next, and those of all other parts.

    Parts with small lower bounds `bounds` (b,) come first, because the smallest of all is
    reported. `queue.which` is the margin that each part bounds. All parts of a batch bound the
    same margin: so their coefficients have more signs in common, and the search can fix more
    symbols.
    """
    order = bounds.argsort()
    margins = queue.which[order]
    is_first_margin = margins == margins[0]
    of_margin = order[is_first_margin]
    later = torch.cat([of_margin[BATCH:], order[~is_first_margin]])
    return of_margin[:BATCH], later
