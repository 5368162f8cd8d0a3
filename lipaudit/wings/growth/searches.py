"""Gradient ascent for inputs of a head with a large norm; the result is a lower limit.

The searches take one head of affine self-attention.

The steepest tokens are at three points (ours): most tokens are followers, which share their
attention between two leaders on opposite sides of the ball, so every follower's output changes
with a leader. Without a mask, no search over all tokens was seen to end higher from n = 5 on. With
the closed form for copies, the search costs as much as one for three tokens, for every n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lipaudit.theory.head_norms import head_norms
from lipaudit.theory.heads import Heads, Projection
from lipaudit.theory.pullback import pull_back
from lipaudit.wings.growth.worst_tokens import affine_projections, duplicated_norm, move_heads

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Rows = Float[Tensor, "rows size"]
    Heights = Callable[[Rows], Float[Tensor, " rows"]]

_MEMORY = 12
_FIRST = 0.1  # length of a step without a memory
_RISE = 1e-4  # least share of the rise that the gradient promises
_SHRINK = 0.2
_TRIES = 10
_PATIENCE = 5


class Position(NamedTuple):
    """A point of each row, with the height of the function there and its gradient."""

    x: Rows
    height: Float[Tensor, " rows"]
    slope: Rows


def climb(heights: Heights, x: Rows, *, steps: int, gain: float = 1e-6) -> Position:
    """Maximise a function by L-BFGS from every row of x; return where each row ends.

    Rows are independent searches, computed together.

    Args:
        heights: the function, from rows to one number per row; differentiable.
        x: the starts.
        steps: largest number of steps.
        gain: a search stops after `_PATIENCE` steps in succession with a relative gain below this.

    >>> peak = climb(lambda x: 5 - (x - 3).square().sum(1), torch.zeros(1, 2), steps=50)
    >>> peak.x
    tensor([[3., 3.]])
    """
    position = measure_heights(heights, x)
    # Of each row of x: the number of latest steps that gained too little.
    idle = torch.zeros_like(position.height)
    memory: list[CurvaturePair] = []
    for _ in range(steps):
        last = position
        direction = _choose_direction(last.slope, memory)
        position = _search_line(heights, last, direction, idle < _PATIENCE)
        pair = _make_pair(position.x - last.x, last.slope - position.slope)
        memory = [*memory[1 - _MEMORY :], pair]  # the last _MEMORY steps
        gains = position.height - last.height > gain * position.height.abs()
        idle = torch.where(gains, 0.0, idle + 1)
        if (idle >= _PATIENCE).all():
            break
    return position


def measure_heights(heights: Heights, x: Rows) -> Position:
    """Return the rows x with the value of the function and its gradient at each."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        height = heights(x)
        # Rows are independent, so the gradient of the sum has the gradient of each row.
        (slope,) = torch.autograd.grad(height.sum(), x)
    return Position(x.detach(), height.detach(), slope)


class CurvaturePair(NamedTuple):
    """A step of L-BFGS in each row, and what it shows of the curvature.

    Attributes:
        step: the step, (rows, size).
        fall: how much the gradient fell along it.
        weight: 1 / <step, fall>, (rows, 1); 0, so that the pair is ignored, if it did not fall.
    """

    step: Tensor
    fall: Tensor
    weight: Tensor


def _make_pair(step: Tensor, fall: Tensor) -> CurvaturePair:
    """Return a step and the fall of the gradient along it, with the weight 1 / <step, fall>.

    The weight is 0 if the gradient did not fall: L-BFGS then ignores the pair.
    """
    curvature = _dot(step, fall)
    lengths = step.norm(dim=1, keepdim=True) * fall.norm(dim=1, keepdim=True)
    weight = torch.where(curvature > 1e-12 * lengths, 1 / curvature, 0.0)
    return CurvaturePair(step, fall, weight)


def _search_line(heights: Heights, start: Position, step: Tensor, active: Tensor) -> Position:
    """Return the rows after a line search: steps are shortened until the function rises enough.

    The function has to rise by at least a share of the rise that the gradient predicts (Armijo).
    A row for which none of `_TRIES` step lengths is enough does not move.

    Args:
        heights: the function to maximise.
        start: the rows before the step.
        step: the step of each row.
        active: which rows move.
    """
    predicted = _dot(step, start.slope)[:, 0]  # the rise that the gradient predicts
    # A row is at a maximum if this rise is too small to be seen beside rounding errors.
    rounding = torch.finfo(step.dtype).eps ** 0.5
    is_top = predicted <= rounding * start.height.abs()
    rows = (active & ~is_top).nonzero()[:, 0]  # indices of the rows that still have to move
    position = start
    size = 1.0
    for _ in range(_TRIES):
        if not len(rows):
            break
        tried = measure_heights(heights, start.x[rows] + size * step[rows])
        required = start.height[rows] + _RISE * size * predicted[rows]
        rises = tried.height >= required
        # The rows that rise enough move: x, height and slope are replaced.
        moved = rows[rises]
        pairs = zip(position, tried, strict=True)
        position = Position._make(old.index_copy(0, moved, new[rises]) for old, new in pairs)
        rows = rows[~rises]
        size *= _SHRINK
    return position


def _choose_direction(slope: Tensor, memory: list[CurvaturePair]) -> Tensor:
    """Return the next step of L-BFGS in each row, at most 1 long.

    The step is the gradient times an estimate of the inverse Hessian, by the two-loop recursion
    (Nocedal & Wright, algorithm 7.4) for an ascent.

    Args:
        slope: the gradient of each row.
        memory: the latest steps: in the book s is the step, y the fall of the gradient along it,
            and rho = 1 / <s, y> the weight, which is 0 to ignore the step.
    """
    direction = slope
    shares = []  # alpha in the book, by step from the last to the first
    for pair in reversed(memory):
        share = pair.weight * _dot(pair.step, direction)
        direction = direction - share * pair.fall
        shares.append(share)
    # The scale is the inverse curvature along the last step. Without a last step, or if the
    # gradient did not fall along it, the scale makes the gradient _FIRST long.
    tiny = torch.finfo(slope.dtype).tiny
    steepness = slope.norm(dim=1, keepdim=True).clamp_min(tiny)
    scale = _FIRST / steepness
    if memory:
        last = memory[-1]
        # <fall, fall> / <step, fall>
        curvature = (last.weight * _dot(last.fall, last.fall)).clamp_min(tiny)
        scale = torch.where(last.weight > 0, 1 / curvature, scale)
    direction = scale * direction
    for pair, share in zip(memory, reversed(shares), strict=True):
        back = pair.weight * _dot(pair.fall, direction)  # beta in the book
        direction = direction + (share - back) * pair.step
    # If the step points downhill, follow the gradient instead.
    plain = _FIRST * (slope / steepness)
    direction = torch.where(_dot(direction, slope) > 0, direction, plain)
    return direction / direction.norm(dim=1, keepdim=True).clamp_min(1.0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each row, (rows, 1)."""
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

    The tokens are copies of three points: two leaders, and followers that attend to both. J is the
    Jacobian of the head at all tokens, and u a unit vector in the space of its outputs. Each
    search maximises ||J^T u|| over the points, the number of copies of the leaders and u together.
    A search starts from random points and from its own result at the previous length; u is drawn
    anew at each length, because its size depends on n (`_Objective.climb_all`). Searches run on
    the CPU in float64, so that the tokens do not depend on the device.

    Args:
        heads: one head, in float64.
        radius: R.
        lengths: numbers of tokens, ascending.
        seed: seed of the starts.
        causal: whether later keys are masked; leaders then come first, one copy each.
    """
    # The head for tokens in fewer coordinates, and their axes, (coordinates, D).
    head, basis = _narrow_head(heads)
    generator = torch.Generator().manual_seed(seed)
    # A row of parameters is three points, and an angle for the number of copies (`_Objective`),
    # here without u.
    parameters = 3 * len(basis) + 1
    # The results at the previous length, (searches, starts, parameters). At first there are none.
    ends = torch.empty(SEARCHES, 0, parameters, dtype=basis.dtype)
    for n in lengths:
        objective = _Objective(head, radius, n, causal)
        random_starts = objective.draw_starts(SEARCHES * STARTS, generator)
        random_starts = random_starts.view(SEARCHES, STARTS, -1)
        highest = objective.climb_all(torch.cat([random_starts, ends], 1), generator)
        yield objective.measure_ends(highest, basis, seed)
        ends = highest[:, None]  # one more start of each search at the next length


def _narrow_head(heads: Heads) -> tuple[Heads, Tensor]:
    """Return a head on the CPU that acts on tokens in fewer coordinates, and their axes.

    The axes, (coordinates, D), are orthonormal, and span all directions of a token on which q, k
    or v depend. A search for tokens can leave out the other directions.
    """
    projections = affine_projections(heads)
    basis = _span_columns([projection.weight[0].cpu() for projection in projections])
    narrow = []
    for projection in projections:
        weight = basis @ projection.weight[0].cpu()
        bias = projection.bias
        if bias is not None:
            bias = bias.cpu()
        narrow.append(Projection(weight[None], bias, local=None, kind="affine"))
    head = replace(
        heads,
        to_q=narrow[0],
        to_k=narrow[1],
        to_v=narrow[2],
        scale=heads.scale[:1].cpu(),
        out=None,
    )
    # A head needs some tokens: a single zero token, until the search moves the head to others.
    return move_heads(head, basis.new_zeros(1, 1, len(basis))), basis


def _span_columns(weights: list[Tensor]) -> Tensor:
    """Return orthonormal rows, (rank, D), that span the columns of all weights, (D, d) each.

    All-zero weights get one row.
    """
    left_singular, values, _ = torch.linalg.svd(torch.cat(weights, 1), full_matrices=False)
    rank = int((values > 1e-12 * values[0]).sum())
    return left_singular[:, : max(rank, 1)].mT


@dataclass(frozen=True)
class _Objective:
    """||J^T u|| / ||u|| as a function of rows of parameters: three points, an angle, and u.

    Parameters are any real numbers, so that the searches need no constraints:

    - a vector z for each of three points, two leaders and a follower: R sin|z| z / |z|, a point of
    the ball of radius R;
    - an angle t: each leader has (n / 3)^(sin^2 t) copies, between 1 and n / 3. All other tokens
    are copies of the follower;
    - u, a vector in the outputs of the tokens. Without a mask, u has an output for each of the
    three points only, whose copies move together (`_measure_gain`).

    Attributes:
        head: the head, for tokens in the coordinates of `_narrow_head`.
        radius: R.
        n: number of tokens.
        causal: whether later keys are masked.
        whole: whether numbers of copies are rounded to whole numbers, which a search then keeps.
    """

    head: Heads
    radius: float
    n: int
    causal: bool
    whole: bool = False

    def draw_starts(self, count: int, generator: torch.Generator) -> Tensor:
        """Return random rows of parameters without u, (count, parameters): where searches start.

        A row describes n tokens, which are copies of three points: two leaders and a follower. It
        has a vector z for each point, and an angle t for the number of copies of the leaders. That
        number is 1 in rows 0, 2, 4, ... and random in the other rows. The search maximises
        ||J^T u|| also over u, a vector in the outputs, which `climb_all` adds to each row.

        Args:
            count: number of rows.
            generator: source of random numbers.
        """
        points = self._draw_points(count, generator)
        # A point z stands for the token R sin |z| z / |z|: |z| = pi / 2 is the edge of the ball,
        # where the gradient in |z| is 0. _EDGE = 0.95 keeps starts slightly inside.
        points = points * (_EDGE * math.pi / 2)
        # An angle t stands for (n / 3)^(sin^2 t) copies: sin^2 t is uniform in [0, 1].
        power = torch.rand(count, 1, generator=generator, dtype=points.dtype)
        angle = power.sqrt().asin()
        angle[::2] = 0.0  # (n / 3)^0 = 1 copy
        return torch.cat([points.flatten(1), angle], 1)

    def _draw_points(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw two leaders and a follower that attends to both, (count, 3, D), all of length 1.

        Leaders are on opposite sides of the ball, where their values differ most. The caller makes
        all other tokens copies of the follower.
        """
        to_q, to_k, to_v = affine_projections(self.head)
        wq = to_q.weight[0]
        wk = to_k.weight[0]
        wv = to_v.weight[0]
        directions = _draw_normal(generator, 2, count, len(wq))
        follower, across = normalize(directions, dim=-1)  # each (count, D)
        bias = torch.zeros_like(wq[0])
        if to_q.bias is not None:
            bias = to_q.bias[0]
        # Followers should not attend to each other. The bias of the queries adds <b_Q, W_K^T x> to
        # the logit of a follower x: choose the sign of x that makes this negative.
        raised = (follower @ wk @ bias)[:, None]
        follower = torch.where(raised > 0, -follower, follower)
        # The direction in which a token's logit grows fastest, for the query of the follower x:
        # W_K (W_Q^T x + b_Q).
        query = self.radius * follower @ wq + bias
        query = normalize(query @ wk.mT, dim=1)
        # The leaders are opposite each other and orthogonal to this direction, so the follower
        # attends to both alike. The product with W_V W_V^T makes their values differ more.
        across = across @ wv @ wv.mT
        across = normalize(across - _dot(across, query) * query, dim=1)
        # Both are moved a little in this direction, so that the follower attends to them.
        leader = normalize(across + _TILT * query, dim=1)
        opposite = normalize(-across + _TILT * query, dim=1)
        return torch.stack([leader, opposite, follower], 1)

    def climb_all(self, starts: Tensor, generator: torch.Generator) -> Tensor:
        """Run all searches; return the parameters with the largest norm of each search, without u.

        A search maximises ||J^T u|| / ||u|| over the n tokens and over u, a vector in the outputs
        of the head. The maximum over u is the norm ||J||. The tokens are copies of three points: a
        row of parameters has the points, two leaders and a follower, and an angle t for the
        numbers of copies. Both leaders have c = (n / 3)^(sin^2 t) copies: 1 for t = 0, and n / 3
        for t = pi / 2. The follower has the other n - 2 c. Each search climbs from several starts.

        In the first ascent the number of copies is a real number. In the second ascent the
        number is rounded and fixed, so that the result stands for n tokens.

        Args:
            starts: rows of parameters without u, (searches, starts, parameters).
            generator: source of random numbers for the first u.
        """
        rows = starts.flatten(0, 1)
        u = self._start_directions(rows, generator)
        rough = climb(self._measure_gain, torch.cat([rows, u], 1), steps=STEPS, gain=_ROUGH)
        # The best end of each search: one row of parameters, with u.
        highest = _select_highest(rough.x.view(*starts.shape[:2], -1), rough.height)
        # Climb again from this end, once with the copies rounded down and once rounded up.
        rounded = self._round_copies(highest)
        with_whole_copies = replace(self, whole=True)
        end = climb(with_whole_copies._measure_gain, rounded.flatten(0, 1), steps=_POLISH)
        highest = _select_highest(end.x.view_as(rounded), end.height)
        return highest[:, : starts.shape[2]]  # without u

    def _start_directions(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return a unit vector u for each row, close to the leading left singular vector of J.

        J is the Jacobian at the tokens of the row.

        Args:
            rows: rows of parameters without u.
            generator: source of random numbers.
        """
        tokens = self.n
        # All tokens are copies of three points. Without a mask, copies of a point have the same
        # output: u has one part for each point. Behind a causal mask copies see different keys.
        if not self.causal:
            tokens = min(self.n, 3)
        size = tokens * self.head.v.shape[3]
        u = normalize(_draw_normal(generator, len(rows), size), dim=1)
        for _ in range(_POWER_STEPS):  # u <- J J^T u
            position = measure_heights(self._measure_gain, torch.cat([rows, u], 1))
            # The gradient of h = ||J^T u|| / ||u|| in a unit vector u is J J^T u / h - h u.
            image = position.slope[:, -size:] + position.height[:, None] * u
            u = normalize(image, dim=1)
        return u

    def _round_copies(self, rows: Tensor) -> Tensor:
        """Return each row twice, with the number of copies of the leaders rounded down and up.

        The number is stored in a row as an angle t: (n / 3)^(sin^2 t) copies. The result has the
        shape (searches, 2, parameters), or (searches, 1, parameters) if leaders always have one
        copy, which needs no rounding.
        """
        if self._most_copies == 1:
            single = rows.clone()
            single[:, self._angle_column] = 0.0
            return single[:, None]
        # The leaders are points 0 and 1, with the same number of copies. The best whole number is
        # on one of both sides of it, so the caller climbs from both.
        leaders = self._count_copies(rows)[:, 0]
        rounded = []
        for copies in (leaders.floor(), leaders.ceil()):
            # copies = (n / 3)^(sin^2 t), solved for t.
            power = copies.clamp(1, self._most_copies).log() / self._log_most_copies
            changed = rows.clone()
            changed[:, self._angle_column] = power.sqrt().asin()
            rounded.append(changed)
        return torch.stack(rounded, 1)  # (searches, 2, parameters)

    def measure_ends(self, rows: Tensor, basis: Tensor, seed: int) -> Steepest:
        """Return the points at which searches ended, their numbers of copies, and ||J|| there.

        Args:
            rows: the parameters at the end of each search: three points, of which the n tokens are
                copies, and an angle for the numbers of copies. The vector u, over which a search
                maximises ||J^T u|| as well, is left out.
            basis: axes of the coordinates of the search, (coordinates, D).
            seed: seed of the norms.
        """
        points = self._read_points(rows)  # (searches, points, coordinates)
        # `whole` rounds the numbers of copies, which are real numbers during a search.
        copies = replace(self, whole=True)._count_copies(rows)
        if self.causal:  # copies of a token see different keys: every token is needed
            x = points[:, self._point_of_token]
            heads = move_heads(self.head, x, causal=True)
            norms = head_norms(heads, seeds=[seed] * len(x)).norm
        else:  # a closed form in the points and their numbers of copies
            heads = move_heads(self.head, points, causal=False)
            norms = torch.cat(
                [duplicated_norm(heads.row(i), counts) for i, counts in enumerate(copies)]
            )
        # Points in all D coordinates; norms are (searches, heads), with a single head.
        return Steepest(points @ basis, copies.long(), norms[:, 0])

    @property
    def _angle_column(self) -> int:
        """Return the column of t, behind three points."""
        return 3 * self.head.x.shape[2]

    @property
    def _most_copies(self) -> int:
        """Return how often each of the two leaders is repeated among n tokens, at most.

        All tokens are copies of two leaders and of a follower, which has at least as many copies
        as a leader. Behind a causal mask each leader has a single copy.
        """
        if self.causal:
            return 1
        return max(self.n // 3, 1)

    @property
    def _point_of_token(self) -> Tensor:
        """Return which of the three points each token is: 0, 1, 2, 2, ..., 2."""
        return torch.arange(self.n).clamp_max(2)

    def _read_points(self, rows: Tensor) -> Tensor:
        """Return the points that rows of parameters stand for, (rows, points, D).

        A row has a vector z for each of three points. Any z stands for a token inside the ball of
        radius R: R sin|z| z / |z|. So the search needs no constraint.
        """
        z = rows[:, : self._angle_column]  # three points, before the angle
        z = z.view(len(rows), 3, -1)[:, : self.n]  # fewer for fewer tokens
        length = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        length = length.clamp_min(1e-12)  # no division by 0 for z = 0, the token 0
        return self.radius * torch.sin(length) * z / length

    def _count_copies(self, rows: Tensor) -> Tensor:
        """Return how often each point of rows of parameters is repeated, (rows, points).

        An angle t stands for (n / 3)^(sin^2 t) copies of each of the two leaders, between 1 and
        n / 3: the search needs no constraint. All other tokens are followers.
        """
        angle = rows[:, self._angle_column]
        leaders = torch.exp(self._log_most_copies * torch.sin(angle) ** 2)
        if self.whole:  # the search no longer changes the number of copies
            leaders = leaders.detach().round()
        followers = self.n - 2 * leaders
        copies = torch.stack([leaders, leaders, followers], 1)
        return copies[:, : self.n]  # of two tokens both are leaders

    @property
    def _log_most_copies(self) -> float:
        """Return the logarithm of the largest number of copies of a leader: n / 3, or 1.

        Leaders are the two tokens to which all other tokens, the followers, attend. A follower has
        at least as many copies as each leader, so a leader has at most n / 3. Only the end of a
        search needs whole numbers (at most `_most_copies`): until then n / 3 is not rounded.
        """
        if self._most_copies > 1:
            return math.log(self.n / 3)
        return 0.0  # log 1

    def _measure_gain(self, rows: Tensor) -> Tensor:
        """Return ||J^T u|| / ||u|| of each row of parameters: what the searches maximise.

        A row has u and parameters of n tokens, which are copies of three points. J is the Jacobian
        of the head at these tokens. The quotient is at most ||J||, with equality at the leading
        left singular vector u.
        """
        x = self._read_points(rows)
        if self.causal:
            # Copies of a token see different keys: every token is computed.
            x = x[:, self._point_of_token]
            heads = move_heads(self.head, x, causal=True)
            root = torch.ones_like(x[..., :1])  # S = I (below)
        else:
            # w copies of a point move together and are computed as one token, with a bias log w of
            # its key in the softmax. Lengths of inputs and outputs count every copy:
            # sum w ||x||^2 = ||S x||^2 with S = diag(w^1/2). With S x and S y in place of points x
            # and their outputs y, J is S J S^-1, and J^T u is S^-1 J^T S u, with u of the size of
            # the outputs of the points.
            copies = self._count_copies(rows)
            heads = move_heads(self.head, x, causal=False)
            bias = copies.log()[:, None, None]  # (rows, head, query, points): one for each key
            heads = replace(heads, bias=bias)
            root = copies.sqrt()[..., None]  # the diagonal of S, (rows, points, 1)
        u = rows[:, self._angle_column + 1 :]  # behind the points and the angle
        u = u.view(*x.shape[:2], -1)
        outputs = (heads.attention() @ heads.v)[:, 0]  # (rows, tokens, d_v)
        (pulled,) = pull_back(outputs, x, root * u, create_graph=True)  # J^T S u
        length = (pulled / root).flatten(1).norm(dim=1)  # || S^-1 J^T S u ||
        return length / u.flatten(1).norm(dim=1)


def _select_highest(rows: Tensor, height: Tensor) -> Tensor:
    """Return the row of each search with the largest height.

    Args:
        rows: (searches, starts, parameters).
        height: one number per row, flat.
    """
    index = height.view(rows.shape[:2]).argmax(1)
    return rows[torch.arange(len(rows)), index]


def _draw_normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw from the standard normal distribution, in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
