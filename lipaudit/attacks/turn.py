"""A turn: what one run of an attack is given beside the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.attacks.balls import Ball
from lipaudit.attacks.oracle import Classifier
from lipaudit.attacks.plan import Attack


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

    def mapped(self, unit: Callable[[Tensor], Tensor]) -> Turn:
        """Return the turn with starts in another unit."""
        start = self.start
        return replace(self, start=lambda: unit(start()))


AttackFunction = Callable[[Classifier, Tensor, Tensor, Ball, Turn], Tensor]
"""(f, x, y, ball, turn) -> x_adv, as `AttackKind` describes it."""
