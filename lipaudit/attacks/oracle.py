"""The attacked function, as attacks see it: in pieces that fit the device, counted; and a turn.

Its gradient is in x alone: `param.grad` is never touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.attacks.balls import Ball
from lipaudit.attacks.plan import Attack
from lipaudit.errors import EvaluationError

NUDGE = 2.0**-12
"""Step of coordinates with a NaN gradient, as a share of the sample's largest value."""
STEEP = 1e15
"""Replaces an infinite slope: larger than all others, but its square does not overflow in sums."""
Classifier = Callable[[Tensor], Any]
"""x -> logits (batch, classes), or an object that holds them as `.logits`."""


@dataclass(frozen=True)
class ByRow:
    """A model that must know which samples it is given (their token ids and padding).

    Attributes:
        f: (z, rows) -> logits, with rows the positions of the samples in their chunk.
    """

    f: Callable[[Tensor, Tensor], Any]


@dataclass
class Meter:
    """Samples passed forward and backward, as the attacks asked for them.

    A forward pass that is repeated to save memory is not counted: the figures do not depend on
    the device batch size.

    Attributes:
        forwards: samples passed forward.
        backwards: samples passed backward.
        broken: those of them whose gradient was not finite, as a tensor: the device need not wait.
        began: when the count began, in seconds of `time.perf_counter`.
        mends: whether NaN is looked for, and replaced by what is right beside the point; it waits
            for the device, so that attacks do it once they have met NaN.
    """

    forwards: int = 0
    backwards: int = 0
    broken: int | Tensor = 0
    mends: bool = False
    began: float = field(default_factory=time.perf_counter)

    def mend(self, gradient: Tensor, near: Callable[[Tensor], Tensor]) -> Tensor:
        """Count a gradient that is not finite; make infinity large, and NaN 0 if it is left.

        Args:
            gradient: of some samples.
            near: a change of the samples -> their gradient after it, which replaces NaN.
        """
        self.backwards += len(gradient)
        self.broken = self.broken + (~gradient.isfinite().flatten(1).all(1)).sum()
        for side in (1, -1) if self.mends else ():
            lost = gradient.isnan()
            if not bool(lost.any()):
                break
            self.forwards += len(gradient)
            self.backwards += len(gradient)
            gradient = torch.where(lost, near(side * lost.to(gradient)), gradient)
        return gradient.nan_to_num(0.0, STEEP, -STEEP)


@dataclass(frozen=True)
class Oracle:
    """f at given rows of a chunk, evaluated in pieces of at most `batch_size` samples.

    It is differentiable in its argument and in nothing else: `param.grad` is never touched, even
    by `loss.backward()`. Its gradients are finite, whatever those of f are (see `Meter.mend`).
    When a chunk takes several pieces the gradient repeats their forward passes, so memory holds
    the graph of one piece.

    Attributes:
        f: the model.
        rows: positions in the chunk of the samples it will be given.
        batch_size: the device batch size.
        meter: where passes are counted.
    """

    f: Classifier | ByRow
    rows: Int[Tensor, " rows"]
    batch_size: int
    meter: Meter = field(default_factory=Meter)

    def __call__(self, z: Float[Tensor, " rows *sample"]) -> Float[Tensor, "rows classes"]:
        """Return the logits, in a tensor that the caller may overwrite."""
        self.meter.forwards += len(z)
        if torch.is_grad_enabled() and z.requires_grad:
            return _InPieces.apply(z, self)
        with torch.no_grad():
            return self.in_pieces(z)

    def in_pieces(self, z: Tensor) -> Tensor:
        """Return the logits, piece by piece."""
        starts = range(0, len(z), self.batch_size)
        return torch.cat([self.piece(z[i : i + self.batch_size], i) for i in starts])

    def piece(self, z: Tensor, start: int) -> Tensor:
        """Return the logits of samples start, start + 1, ... as f gives them."""
        if isinstance(self.f, ByRow):
            return logits_of(self.f.f(z, self.rows[start : start + len(z)]))
        return logits_of(self.f(z))


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, oracle: Oracle) -> Tensor:
        ctx.oracle, ctx.z = oracle, z.detach()
        if len(z) > oracle.batch_size:
            ctx.graph = None
            return oracle.in_pieces(ctx.z)
        ctx.graph = _graph(oracle, ctx.z, 0)
        return ctx.graph[1].detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        oracle, z, size = ctx.oracle, ctx.z, ctx.oracle.batch_size

        def at(point: Tensor) -> Tensor:
            cuts = [slice(i, i + size) for i in range(0, len(point), size)]
            return torch.cat([pull(_graph(oracle, point[c], c.start), above[c]) for c in cuts])

        def near(change: Tensor) -> Tensor:
            largest = z.flatten(1).abs().amax(1).reshape(-1, *[1] * (z.ndim - 1))
            return at(z + change * NUDGE * torch.where(largest > 0, largest, 1.0))

        graph, ctx.graph = ctx.graph, None
        gradient = at(z) if graph is None else pull(graph, above)
        return oracle.meter.mend(gradient, near), None


def _graph(oracle: Oracle, z: Tensor, start: int) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        return leaf, oracle.piece(leaf, start)


def pull(graph: tuple[Tensor, Tensor], above: Tensor) -> Tensor:
    """J^T times `above`; zero where f does not depend on its argument differentiably."""
    leaf, out = graph
    if not out.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(out, leaf, above, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient


def logits_of(output: Any) -> Float[Tensor, "batch classes"]:
    """Take the logits out of what a model returns: a tensor, `.logits`, or a tuple's first.

    Raises:
        EvaluationError: there is no tensor (batch, classes) in it.
    """
    logits = getattr(output, "logits", output)
    logits = logits[0] if isinstance(logits, tuple) else logits
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise EvaluationError(
            f"the model returns {shape}, but an attack needs logits of shape (batch, classes)",
            "Attack a classifier that returns one row of class scores per sample.",
        )
    return logits


def logits_and_gradient(
    f: Classifier, x: Float[Tensor, " batch *sample"], y: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, " batch *sample"]]:
    """Return the logits at x and the gradient in x of each sample's cross-entropy.

    An oracle is asked piece by piece, each forward and backward at once: none is repeated.
    """
    if isinstance(f, Oracle) and len(x) > f.batch_size:
        cuts = [slice(i, i + f.batch_size) for i in range(0, len(x), f.batch_size)]
        parts = [logits_and_gradient(replace(f, rows=f.rows[c]), x[c], y[c]) for c in cuts]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        logits = logits_of(f(leaf))
        loss = F.cross_entropy(logits, y, reduction="sum")
    return logits.detach(), pull((leaf, loss), torch.ones_like(loss))


def margins(
    logits: Float[Tensor, "batch classes"], y: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return f_y - max_{j != y} f_j: negative exactly where another class is ahead."""
    own = logits.gather(1, y[:, None])
    others = logits.scatter(1, y[:, None], -torch.inf)
    return own[:, 0] - others.amax(1)


@dataclass(frozen=True)
class Turn:
    """One of the runs that an attack makes: one start, and one target where it has targets.

    Attributes:
        attack: the attack and its settings.
        number: 0, 1, ... below `attack.turns`.
        generator: where the run's random numbers come from, on the CPU.
        start: draws a random point of the ball of each sample.
        copies: how many turns are run together, this one and those that follow; x and y then hold
            the samples so many times, turn after turn.
        logits: of the clean samples, where they are known.
        closest: the smallest margin of each sample at what attacks of the trial returned.
    """

    attack: Attack
    number: int
    generator: torch.Generator
    start: Callable[[], Tensor]
    copies: int = 1
    logits: Float[Tensor, "samples classes"] | None = None
    closest: Float[Tensor, " samples"] | None = None

    @property
    def target(self) -> int:
        """Rank of the class that is aimed at: 2 is the runner-up."""
        return 2 + self.number // self.attack.restarts

    @property
    def restart(self) -> int:
        """Which start of this target it is, from 0."""
        return self.number % self.attack.restarts

    def each(self) -> tuple[Turn, ...]:
        """Return the turns that are run together."""
        numbers = range(self.number, self.number + self.copies)
        return tuple(replace(self, number=number, copies=1) for number in numbers)

    def hopeless(self, gap: Tensor, progress: Tensor, left: float | Tensor) -> Tensor:
        """Tell which samples to give up.

        Args:
            gap: what is missing until a sample is broken.
            progress: by how much that shrank over the last stretch.
            left: how many such stretches are left.
        """
        return gap > self.attack.hope * progress * left

    def map_starts(self, unit: Callable[[Tensor], Tensor]) -> Turn:
        """Return the turn with starts in another unit."""
        start = self.start
        return replace(self, start=lambda: unit(start()))


AttackFunction = Callable[[Classifier, Tensor, Tensor, Ball, Turn], Tensor]
"""(f, x, y, ball, turn) -> x_adv, as `AttackKind` describes it."""
