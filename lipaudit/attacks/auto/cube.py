"""The problem as AutoAttack states it: values in [0, 1], float32 logits, seeds for the CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipaudit.attacks.balls import Ball
from lipaudit.attacks.oracle import Classifier, Oracle, logits_of, margins, pull
from lipaudit.attacks.turn import AttackFunction, Turn
from lipaudit.results.trials import Norm

CLOSE = 0.1
"""Share of the whole way to success: a sample that came closer is not given up."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits, labels, classes aimed at) -> the loss of each row."""


@dataclass(frozen=True)
class Cube:
    """Samples of [0, 1], of which f gives float32 logits.

    Attributes:
        f: the model, in the unit of the cube.
        x: samples, as often as turns are run together.
        y: their labels.
        norm: linf or l2.
        eps: the radius.
        size: most rows that f is given at once where a gradient is taken.
    """

    f: Callable[[Tensor], Tensor]
    x: Tensor
    y: Tensor
    norm: Norm
    eps: float
    size: int

    def ascend(
        self, z: Tensor, loss: Loss, y: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, losses and the gradient of each row's loss, piece by piece."""
        cuts = [slice(i, i + self.size) for i in range(0, len(z), self.size)]
        parts = [self._piece(z[cut], loss, y[cut], target[cut]) for cut in cuts]
        logits, losses, gradients = zip(*parts, strict=True)
        return torch.cat(logits), torch.cat(losses), torch.cat(gradients)

    def _piece(
        self, z: Tensor, loss: Loss, y: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            logits = self.f(leaf)
            values = loss(logits, y, target)
            total = values.sum()
        gradient = pull((leaf, total), torch.ones_like(total))
        return logits.detach(), values.detach(), gradient

    def lengths(self, delta: Tensor) -> Tensor:
        """Return the norm of each row, ready to broadcast."""
        flat = delta.flatten(1)
        length = flat.abs().amax(1) if self.norm == "linf" else (flat**2).sum(1).sqrt()
        return column(length, delta)


_Run = Callable[[Cube, Turn], Tensor]


def in_unit_cube(run: _Run) -> AttackFunction:
    """Make an attack on samples in [0, 1] one on any samples.

    Samples of another box are mapped there, embeddings (box None) with room to spare on both
    sides, so that clipping never binds. The attack returns, for each sample, an adversarial
    example or else the best point the run came to (x itself for FAB), inside the ball up to
    rounding.
    """

    @functools.wraps(run)
    @torch.no_grad()
    def attack(f: Classifier, x: Tensor, y: Tensor, ball: Ball, turn: Turn) -> Tensor:
        low, width = _range(x, ball)

        def logits(u: Tensor) -> Tensor:
            return logits_of(f(low + width * u.to(x.dtype))).float()

        def unit(z: Tensor) -> Tensor:
            return ((z - low) / width).contiguous()

        size = f.batch_size if isinstance(f, Oracle) else len(x)
        cube = Cube(logits, unit(x), y, ball.norm, ball.eps / width, size)
        best = run(cube, turn.mapped(unit))
        return x + width * (best - cube.x).to(x.dtype)

    return attack


def _range(x: Tensor, ball: Ball) -> tuple[float, float]:
    """Lowest value and width of the box; for an embedding space, a power of two that has room."""
    if ball.box is not None:
        return ball.box[0], ball.box[1] - ball.box[0]
    reach = 2.0 ** math.ceil(math.log2(float(x.abs().amax()) + 2 * ball.eps))
    return -reach, 2 * reach


def targets(cube: Cube, turn: Turn) -> Tensor:
    """Return the class that each row aims at: of the rank of its turn on the clean sample."""
    order = _clean(cube, turn).sort(dim=1)[1]
    return torch.cat([order[:, -each.target] for each in turn.each()])


def close_margins(cube: Cube, turn: Turn) -> Tensor:
    """Return the margin below which each row is not given up; infinite where it was there before.

    All turns of a sample count: on its way to one class an attack may come upon another.
    """
    if math.isinf(turn.attack.hope):
        return torch.full_like(cube.y, torch.inf, dtype=torch.float32)
    whole = margins(_clean(cube, turn), cube.y[: len(cube.y) // turn.copies])
    before = whole if turn.closest is None else turn.closest
    close = CLOSE * whole
    return torch.where(before <= close, torch.inf, close).float().repeat(turn.copies)


def _clean(cube: Cube, turn: Turn) -> Tensor:
    """Return the logits of the samples, once each."""
    return cube.f(cube.x[: len(cube.x) // turn.copies]) if turn.logits is None else turn.logits


def seed(turn: Turn) -> int:
    """Draw the seed of one turn."""
    return int(torch.randint(2**62, (1,), generator=turn.generator))


def starts(turn: Turn) -> Tensor:
    """Draw the starts of all turns. Each draws a seed before, for attacks that go by one."""
    drawn = []
    for each in turn.each():
        seed(each)
        drawn.append(each.start())
    return torch.cat(drawn)


def column(values: Tensor, x: Tensor) -> Tensor:
    """Shape a value per row so that it broadcasts over samples."""
    return values.reshape(-1, *[1] * (x.ndim - 1))
