"""Branch and bound: the ball in parts, by the signs of ReLUs, until every part is proven."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipaudit.theory.accuracy import NODES
from lipaudit.theory.relaxation.branch.duals import (
    Nodes,
    ascend,
    bound,
    joined,
    proven,
    start,
)
from lipaudit.theory.relaxation.branch.problem import Problem, faced, problem_of
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
        root_steps, steps, last_steps: of the multipliers, on the ball, on a part, and where every
            sign is known.
        rate: of the steps, as a share of the multipliers that the search begins with.
        share: of the symbols that are searched over beside those in doubt (`faced`).
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
    """What is known of the margins of a sample.

    Attributes:
        certified: every margin is positive on the whole ball, proven.
        pass_bound: the least margin by the forms alone.
        root_bound: the same with the lines of the ReLUs.
        bound: the least margin over all parts: proven where certified; else 0 or less, for parts
            that are still open as the search has it in single precision.
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
    _, roots = ascend(search, first, steps=effort.root_steps, rate=effort.rate, until=deadline)
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
        self.nodes, self.least = 0, torch.inf

    def run(self, roots: Nodes, bounds: Tensor) -> tuple[str, float]:
        """Return what ended the search, and the least bound of a part."""
        self.nodes = len(roots)
        positive = bounds > 0
        self.least = min([self.least, *bounds[positive].tolist()])
        queue, worth = roots[~positive], bounds[~positive]
        while len(queue):
            limit = self._limit()
            if limit:
                return limit, float(worth.min())
            order = worth.argsort()
            alike = queue.which[order] == queue.which[order[0]]  # one margin: one face fits
            now = order[alike][: self.effort.batch]
            later = torch.cat([order[alike][self.effort.batch :], order[~alike]])
            batch, known = queue[now], (queue[now].state != 0).all(1)
            if not self._settled(batch[known]):
                return "signs", float(worth.min())
            queue, worth = queue[later], worth[later]
            if not known.all():
                children, value = self._bounded(*self._cut(batch[~known]), self.effort.steps)
                queue, worth = joined([queue, children]), torch.cat([worth, value])
        return "", float(self.least)

    def _limit(self) -> str:
        if self.nodes >= self.effort.nodes:
            return "nodes"
        return "seconds" if time.monotonic() > self.deadline else ""

    def _settled(self, last: Nodes) -> bool:
        """Say if parts where every sign is known could be proven, one linear program each."""
        for haste in _LAST:
            if len(last):
                _, t = bound(self.search, last)
                face = faced(self.search, t, self.effort.share)
                last, _ = self._bounded(face, last, self.effort.last_steps, haste)
        return not len(last)

    def _bounded(
        self, face: Problem, parts: Nodes, steps: int, haste: float = 1.0
    ) -> tuple[Nodes, Tensor]:
        """Bound parts, and return those still open with their bounds."""
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
        """Cut every part in two at the ReLU that promises most; return the face to search too.

        Score: the slack that the coefficient of eps costs, and what the multipliers use. Trials of
        the best few with some steps cost more than they save.
        """
        _, t = bound(self.search, batch)
        used = batch.y.clamp_min(0).sum(0) * self.search.offset
        score = 2 * t[:, self.search.columns].abs() + used
        chosen = score.masked_fill(batch.state != 0, -1.0).argmax(1)
        parts = joined([_decided(batch, chosen, sign) for sign in (1, -1)])
        return faced(self.search, t, self.effort.share), parts


def _decided(nodes: Nodes, unit: Tensor, sign: int) -> Nodes:
    """Parts of the nodes where the ReLU `unit` of each has that sign."""
    state = nodes.state.scatter(1, unit[:, None], sign)
    return Nodes(nodes.which, state, nodes.y)
