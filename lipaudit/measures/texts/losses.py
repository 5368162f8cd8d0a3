"""How far attacks raise the loss of a continuation, whether or not they break it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipaudit.attacks.balls import distance
from lipaudit.attacks.evaluate import evaluate_chunk
from lipaudit.attacks.oracle import ByRow
from lipaudit.attacks.outcome import Chunk, Outcome
from lipaudit.data.batch import Batch
from lipaudit.measures.measure import Values
from lipaudit.models.net import Net
from lipaudit.results import Note
from lipaudit.results.trials import COSTS, parse_column

SMALL = 1e-3
"""Share of a score by which it has to fall before a loss counts as raised: beyond rounding."""


@dataclass(frozen=True)
class Continued:
    """The continuations of a chunk, of which the first score is log p.

    Attributes:
        net: what scores them (see `models.scoring`).
        batch: the samples.
        size: how many are on the device at a time.
    """

    net: Net
    batch: Batch
    size: int

    @torch.no_grad()
    def scores(self, z: Tensor) -> Tensor:
        """Return the scores of every sample, moved to z."""
        rows = torch.split(torch.arange(len(z), device=z.device), self.size)
        return torch.cat([self.net.forward(z[i], self.batch.unnamed(i)) for i in rows])

    def raised(self, chunk: Chunk, outcomes: Sequence[Outcome], seed: int) -> Iterator[Outcome]:
        """Let the attacks of each trial raise the loss of every continuation, right or wrong.

        They climb softplus(c - log p), c just below log p at the sample: in the direction of the
        gradient of the loss -log p, to the iterate where that is highest. A sample stands if it
        is right there too. Each trial gets one outcome more: at the point that broke the sample,
        else at that of the higher loss.

        Args:
            chunk: the samples as they were attacked.
            outcomes: what the attacks did to them, the clean samples first.
            seed: of the attacks.
        """
        floor = self.scores(chunk.x)[:, 0]
        floor = floor - SMALL * (1 + floor.abs())

        def loss(z: Tensor, rows: Tensor) -> Tensor:
            own = self.net.forward(z, self.batch.unnamed(rows))[:, 0]
            return torch.stack([own, floor[rows]], 1)

        ends = {str(o.trial.key): o for o in outcomes if o.trial is not None}
        for end in ends.values():
            assert end.trial is not None
            how: dict[str, Any] = {"box": self.net.box, "seed": seed, "batch_size": self.size}
            _, *climbs = evaluate_chunk(ByRow(loss), chunk, [end.trial], **how)
            yield self._further(chunk, outcomes[0].robust, end, climbs)

    def _further(
        self, chunk: Chunk, correct: Tensor, end: Outcome, climbs: Sequence[Outcome]
    ) -> Outcome:
        """Return the end of a trial, moved on to where a climb broke a sample or led higher."""
        top = climbs[-1]
        own, other = self.scores(end.x_adv), self.scores(top.x_adv)
        right = other.argmax(1) == chunk.y
        further = (other[:, 0] < own[:, 0]) & ~(correct & ~end.robust & right)
        further |= end.robust & ~right
        x_adv = torch.where(further[:, None, None], top.x_adv, end.x_adv)
        assert end.trial is not None
        return replace(
            end,
            robust=end.robust & right,
            x_adv=x_adv,
            distance=distance(x_adv, chunk.x, end.trial.norm),
            notes=(),
            **{what: sum(getattr(climb, what) for climb in climbs) for what in COSTS},
        )

    def losses(self, points: Sequence[Tensor]) -> Tensor:
        """Return the loss -log p of every sample at some points, (batch, points)."""
        return torch.stack([-self.scores(z)[:, 0] for z in points], 1)


def remark(losses: dict[str, Values]) -> Note:
    """Say what the losses are on average.

    Args:
        losses: of every sample, as it is (`loss`), and under each attack (`loss@ATTACK,NORM,EPS`).
    """
    parsed = [(parse_column(name)[1], values.mean()) for name, values in losses.items()]
    clean = next(mean for key, mean in parsed if key is None)
    after = [
        f"{mean:#.3g} by {key.attack} ({key.ball})" for key, mean in parsed if key is not None
    ]
    text = f"the mean loss of a continuation, {clean:#.3g} nats, was raised to {', '.join(after)}"
    return Note(level="info", code="loss", text=text)
