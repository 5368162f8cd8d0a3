"""Branch and bound: the ball in parts, by the signs of ReLUs, until every part is proven."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipaudit.theory.accuracy import NODES
from lipaudit.theory.relaxation.duals import (
    Nodes,
    Problem,
    ascend,
    bound,
    joined,
    problem_of,
    proven,
    start,
)
from lipaudit.theory.relaxation.form import Form

_LAST = (10.0, 3.0, 1.0, 0.3)
"""Times the rate, one after the other, where every sign is known: a linear program is left."""


@dataclass(frozen=True)
class Effort:
    """How much is spent on a sample, and how.

    Attributes:
        nodes: parts of the ball at most; the limit that gives equal verdicts everywhere.
        seconds: at most; a limit that depends on the machine and its load.
        batch: parts that are cut at a time.
        candidates: ReLUs that are tried before one is cut.
        root_steps, steps, trial_steps, last_steps: of the multipliers, on the ball, on a part, on
            a trial, and where every sign is known.
        rate: of the steps, as a share of the multipliers that the search begins with.
    """

    nodes: int = NODES
    seconds: float = float("inf")
    batch: int = 48
    candidates: int = 3
    root_steps: int = 60
    steps: int = 10
    trial_steps: int = 4
    last_steps: int = 400
    rate: float = 0.2


@dataclass(frozen=True)
class Verdict:
    """What is known of the margins of a sample.

    Attributes:
        certified: every margin is positive on the whole ball, proven.
        pass_bound: the least margin by the forms alone.
        root_bound: the same with the lines of the ReLUs.
        bound: the least proven margin over all parts; 0 or less where not certified.
        nodes: parts that were looked at.
        units: ReLUs that cut their range.
        limit: what ended the search: nothing, "nodes", "seconds" or "signs" (all are decided).
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

    Multipliers are searched for in single precision; what is claimed is evaluated in double, with
    its rounding taken off (`proven`).
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
    _, roots = ascend(search, first, steps=effort.root_steps, rate=effort.rate)
    bounds = torch.maximum(proven(exact, roots), low[is_open])
    root = min(float(bounds.min()), float(low[low > 0].min()) if (low > 0).any() else torch.inf)
    left = _Search(exact, search, effort, deadline)
    limit, worst = left.run(roots, bounds)
    settled = [float(low[low > 0].min())] if (low > 0).any() else []
    bound = min([worst, *settled])
    return Verdict(not limit, whole, root, bound, left.nodes, len(exact.slope), limit)


class _Search:
    """The parts that are still open, worst first."""

    def __init__(self, exact: Problem, search: Problem, effort: Effort, deadline: float) -> None:
        self.exact, self.search, self.effort, self.deadline = exact, search, effort, deadline
        self.nodes = 0

    def run(self, roots: Nodes, bounds: Tensor) -> tuple[str, float]:
        """Return what ended the search, and the least bound of a part."""
        least = torch.inf
        self.nodes = len(roots)
        positive = bounds > 0
        least = min([least, *bounds[positive].tolist()])
        queue, worth = roots[~positive], bounds[~positive]
        while len(queue):
            limit = self._limit()
            if limit:
                return limit, float(worth.min())
            order = worth.argsort()
            now, later = order[: self.effort.batch], order[self.effort.batch :]
            batch, known = queue[now], (queue[now].state != 0).all(1)
            last = batch[known]
            for haste in _LAST if len(last) else ():
                last, value, closed = self._bounded(last, self.effort.last_steps, haste)
                least = min([least, *closed.tolist()])
            if len(last):
                return "signs", float(worth.min())
            children, value, closed = self._bounded(self._cut(batch[~known]), self.effort.steps)
            least = min([least, *closed.tolist()])
            queue = joined([queue[later], children])
            worth = torch.cat([worth[later], value])
        return "", float(least)

    def _limit(self) -> str:
        if self.nodes >= self.effort.nodes:
            return "nodes"
        return "seconds" if time.monotonic() > self.deadline else ""

    def _bounded(
        self, children: Nodes, steps: int, haste: float = 1.0
    ) -> tuple[Nodes, Tensor, Tensor]:
        """Bound parts; return those still open, their bounds, and the bounds of the others."""
        self.nodes += len(children)
        rate = haste * self.effort.rate
        value, children = ascend(self.search, children, steps=steps, rate=rate)
        value = value.to(self.exact.slope)
        hopeful = (value > 0).nonzero()[:, 0]
        value[hopeful] = proven(self.exact, children[hopeful])
        is_open = ~(value > 0)
        return children[is_open], value[is_open], value[~is_open]

    def _cut(self, batch: Nodes) -> Nodes:
        """Cut every part in two at the ReLU that promises most.

        Score: the slack that the coefficient of eps costs, and what the multipliers use; the best
        few are tried with some steps on both sides.
        """
        b = len(batch)
        few = min(self.effort.candidates, batch.state.shape[1])
        _, t = bound(self.search, batch)
        used = batch.y.clamp_min(0).sum(0) * self.search.offset
        score = 2 * t[:, self.search.columns].abs() + used
        score = score.masked_fill(batch.state != 0, -1.0)
        best, top = score.topk(few, 1)
        trials = joined([_decided(batch, top[:, i], sign) for i in range(few) for sign in (1, -1)])
        value, _ = ascend(
            self.search, trials, steps=self.effort.trial_steps, rate=2 * self.effort.rate
        )
        value = value.view(few, 2, b).clamp_max(0)
        gain = (value.amin(1) + 0.1 * value.sum(1)).masked_fill(best.mT < 0, -torch.inf)
        chosen = top.gather(1, gain.argmax(0)[:, None])[:, 0]
        return joined([_decided(batch, chosen, sign) for sign in (1, -1)])


def _decided(nodes: Nodes, unit: Tensor, sign: int) -> Nodes:
    """Parts of the nodes where the ReLU `unit` of each has that sign."""
    state = nodes.state.scatter(1, unit[:, None], sign)
    return Nodes(nodes.which, state, nodes.y)
