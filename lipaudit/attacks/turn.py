"""A turn: what one run of an attack is given beside the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
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
    """

    attack: Attack
    number: int
    generator: torch.Generator
    start: Callable[[], Tensor]

    @property
    def target(self) -> int:
        """Rank of the class that is aimed at: 2 is the runner-up."""
        return 2 + self.number // self.attack.restarts

    @property
    def restart(self) -> int:
        """Which start of this target it is, from 0."""
        return self.number % self.attack.restarts


AttackFunction = Callable[[Classifier, Tensor, Tensor, Ball, Turn], Tensor]
"""(f, x, y, ball, turn) -> x_adv, as `AttackKind` describes it."""
