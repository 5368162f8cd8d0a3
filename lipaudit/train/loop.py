"""The training loop: an epoch at a time, each with all that is needed to go on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lipaudit.attacks.balls import Ball, random_start
from lipaudit.attacks.pgd import pgd, usual_step
from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.models.lifting import held
from lipaudit.models.net import Net
from lipaudit.models.precision import seeded
from lipaudit.settings.recipe import Recipe
from lipaudit.train.augment import Mix, flipped, mixing, translated
from lipaudit.train.descent import batched, optimizer_of, schedule_of
from lipaudit.train.penalty import SpecformerPenalty, attention_penalty, certified_loss
from lipaudit.train.replicas import ALONE, Objective, Replica

LOOK = 32
"""Steps between two looks at the losses: an accelerator works on while nobody looks."""

CheckpointState = dict[str, Any]
"""What a checkpoint holds: tensors, numbers, strings, and lists and dictionaries of them."""


@dataclass(frozen=True)
class Epoch:
    """What one pass over the data did.

    Attributes:
        number: from 1.
        loss: mean cross-entropy over the samples as they were trained on.
        penalty: mean of the penalty, not weighted; None without one.
        accuracy: share of the held-out samples labelled rightly; None without any.
        lr: learning rate at its end.
        state: all that is needed to go on from here.
    """

    number: int
    loss: float
    penalty: float | None
    accuracy: float | None
    lr: float
    state: CheckpointState


def train(
    net: Net,
    data: Batch,
    recipe: Recipe,
    *,
    held_out: Batch | None = None,
    state: Mapping[str, Any] | None = None,
    replica: Replica = ALONE,
) -> Iterator[Epoch]:
    """Fine-tune a classifier in place, and yield after every epoch.

    Runs with the same recipe, data and start repeat to the last bit on a CPU, also when they are
    cut in two by way of `state`. The caller's random state is left alone. Several processes take
    the steps of one, each on its part of every batch: what is random is drawn for the whole.

    Args:
        net: the model; its module is trained, and put back in eval mode with frozen parameters.
        data: labelled samples; images in [0, 1].
        recipe: how.
        held_out: samples to measure the accuracy on.
        state: of an earlier epoch, to go on from.
        replica: which of several processes this is; all of them have the same arguments.

    Raises:
        UsageError: the samples have no labels, or the recipe does not fit the model.
        EvaluationError: the loss is not finite.
    """
    _require_fit(net, recipe)
    _require_labels(net, data, "the data")
    if held_out is not None:
        _require_labels(net, held_out, "the held-out data")
    with _trainable(net.module):
        run = _Training.start(net, data, recipe, replica)
        first = run.restore(state) if state is not None else 0
        for number in range(first, recipe.epochs):
            with _seeded(recipe.seed, number, net.device, replica.stream):
                loss, penalty = run.epoch(data)
            share = (
                None if held_out is None else accuracy(net, held_out, recipe.batch_size, replica)
            )
            lr = float(run.optimizer.param_groups[0]["lr"])
            yield Epoch(number + 1, loss, penalty, share, lr, run.state(number + 1))


@dataclass(frozen=True)
class _Training:
    """What moves along with training."""

    net: Net
    recipe: Recipe
    optimizer: Optimizer
    schedule: LRScheduler
    mix: Mix
    rng: torch.Generator
    weights: SpecformerPenalty | None
    steps: int
    replica: Replica

    @classmethod
    def start(cls, net: Net, data: Batch, recipe: Recipe, replica: Replica = ALONE) -> _Training:
        steps = recipe.epochs * len(batched(torch.arange(len(data)), recipe.batch_size))
        optimizer = optimizer_of(net.module, recipe)
        whole = recipe.adversarial is not None or recipe.penalty == "certified"
        mixes = net.kind == "image" and not whole
        mix = mixing(mixes * recipe.mixup, mixes * recipe.cutmix, net.classes or 0)
        rng = torch.Generator().manual_seed(recipe.seed)
        weights = None
        if recipe.penalty == "specformer":
            weights = SpecformerPenalty(net, data[:2].to(net.device, net.dtype))
        schedule = schedule_of(optimizer, recipe, steps)
        return cls(net, recipe, optimizer, schedule, mix, rng, weights, steps, replica)

    @cached_property
    def objective(self) -> Objective:
        """What a step descends, with gradients that are those of the whole batch."""
        return self.replica.synchronised(self.net.module, self.value)

    def state(self, epochs: int) -> CheckpointState:
        # Copies: the next epoch changes the tensors in place.
        return {
            "model": _copied(self.net.module.state_dict()),
            "optimizer": _copied(self.optimizer.state_dict()),
            "schedule": _copied(self.schedule.state_dict()),
            "rng": self.rng.get_state(),
            "vectors": [] if self.weights is None else list(self.weights.vectors),
            "epochs": epochs,
        }

    def restore(self, state: Mapping[str, Any]) -> int:
        self.net.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.rng.set_state(state["rng"])
        if self.weights is not None:
            self.weights.vectors = [vector.to(self.net.device) for vector in state["vectors"]]
        return int(state["epochs"])

    def epoch(self, data: Batch) -> tuple[float, float | None]:
        """Train on all samples once; return the mean loss and the mean penalty."""
        self.net.module.train()
        sums, losses = np.zeros(2), []
        order = torch.randperm(len(data), generator=self.rng)
        batches = batched(order, self.recipe.batch_size)
        for number, index in enumerate(batches, 1):
            batch = data.rows(index).to(self.net.device, self.net.dtype)
            losses.append(self.step(batch))
            if number % LOOK == 0 or number == len(batches):
                sums = np.sum([sums, *_lost(losses, self.replica)], axis=0)
                losses.clear()
        self.net.module.eval()
        loss, penalty = sums / len(data)
        self.require_sense(penalty)
        return float(loss), float(penalty) if self.recipe.penalty else None

    def require_sense(self, penalty: float) -> None:
        """Refuse to go on after an epoch that destroyed the weights or never met the penalty."""
        finite = [p.isfinite().all() for p in self.net.module.parameters()]
        if not torch.stack(finite).all():
            raise EvaluationError("the weights are not finite", "Lower --lr or --weight.")
        if self.recipe.penalty == "jasmin" and self.recipe.k and penalty == 0:
            raise UsageError(
                f"no query sees more than k = {self.recipe.k} keys, so that JaSMin is 0",
                "Give a smaller --k.",
            )

    def step(self, batch: Batch) -> tuple[int, Tensor]:
        """Take one step; return of how many samples, and their loss and penalty, (2,).

        It does not wait for them. Where others step along, the samples are a part of the batch.
        """
        part = self.replica.part(len(batch))
        batch = replace(batch, x=self.changed(batch))
        x, target = self.mix(batch.x, _labels(batch))
        if self.recipe.adversarial:
            x = self.attacked(batch.x, _labels(batch), part.rows)
        else:
            x = x[part.rows]
        self.optimizer.zero_grad()
        with self.replica.drawing(part):
            total, losses = self.objective(x, target[part.rows], batch[part.rows])
            torch.autograd.backward(part.factor * total)
        if self.recipe.clip:
            nn.utils.clip_grad_norm_(self.net.module.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.schedule.step()
        return part.samples, losses

    def value(self, x: Tensor, target: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of loss and penalty, and both, (2,), without a gradient.

        Args:
            x: samples as the model sees them, mixed or attacked.
            target: their labels, or shares of the classes.
            batch: the samples themselves.
        """
        with self.watched(batch) as penalty:
            logits = self.net.read(self.net.call(x, batch.mask))
        loss, extra = F.cross_entropy(logits, target), penalty()
        both = torch.stack([loss.detach(), extra.detach().to(loss)])
        return loss + self.recipe.weight * extra, both

    def changed(self, batch: Batch) -> Tensor:
        """Return the samples, shifted and flipped as the recipe says."""
        x = batch.x
        if self.net.kind != "image":
            return x
        x = translated(x, self.recipe.shift, self.rng) if self.recipe.shift else x
        return flipped(x, self.rng) if self.recipe.flip else x

    def attacked(self, x: Tensor, y: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return adversarial examples of some rows for the model as it is used: in eval mode."""
        net, steps = self.net, self.recipe.steps
        ball = Ball("linf", float(self.recipe.eps), net.box)
        start = random_start(x, ball, self.rng)[rows]
        with _evaluated(net.module):
            return pgd(
                lambda z: net.read(net.call(z, None)),
                x[rows],
                y[rows],
                ball,
                start=start,
                steps=steps,
                step_size=usual_step(ball.eps, steps),
            )

    def watched(self, batch: Batch) -> AbstractContextManager[Callable[[], Tensor]]:
        """Read the penalty of the forward pass in the block."""
        if self.weights is not None:
            return nullcontext(self.weights)
        if self.recipe.penalty is None:
            return nullcontext(lambda: torch.zeros((), device=self.net.device))
        if self.recipe.penalty == "certified":
            return nullcontext(lambda: self.certified(batch))
        return attention_penalty(
            self.net.module, k=self.recipe.k, reduction=self.recipe.reduction, mask=batch.mask
        )

    def certified(self, batch: Batch) -> Tensor:
        """Return the loss at the radius of this step, for the model as it is used."""
        growth = self.recipe.ramp * self.steps
        share = min(1.0, self.schedule.last_epoch / growth) if growth else 1.0
        with _evaluated(self.net.module):
            return certified_loss(self.net, batch, share * float(self.recipe.eps))


def _lost(losses: Sequence[tuple[int, Tensor]], replica: Replica) -> Any:
    """What steps lost, each times its samples; the host waits for a device once."""
    values = torch.stack([loss for _, loss in losses]).cpu().double().numpy()
    total = replica.total(np.array([[size] for size, _ in losses]) * values)
    if not np.isfinite(total).all():
        raise EvaluationError("the loss is not finite", "Lower --lr or --weight.")
    return total


def _require_fit(net: Net, recipe: Recipe) -> None:
    if net.classes is None:
        raise UsageError(
            f"training needs a classifier, and {net.info.spec} is none",
            "--classes gives a model of timm or transformers a new one.",
        )
    if held(net.module) or net.info.device_map:
        raise UsageError(
            "training needs its weights on one device, in the precision of the run",
            "Leave --weights and --device-map out: they are for measuring.",
        )
    if recipe.adversarial and net.kind != "image":
        raise UsageError("adversarial training is for images", "Leave --adversarial out.")
    if recipe.penalty == "certified" and net.kind != "image":
        raise UsageError("the certified penalty is for images", "Give another --penalty.")


def _require_labels(net: Net, data: Batch, name: str) -> None:
    classes = net.classes or 0
    known = data.y is not None and bool(((data.y >= 0) & (data.y < classes)).all())
    if not known or not len(data):
        raise UsageError(
            f"{name} should have samples, each with a label from 0 to {classes - 1}",
            "Name labelled ones (a folder of classes, .npz, .csv).",
        )


def _labels(batch: Batch) -> Tensor:
    assert batch.y is not None
    return batch.y


def accuracy(net: Net, data: Batch, size: int, replica: Replica = ALONE) -> float:
    """Return the share of samples that get their label, so many at a time."""
    right = 0
    with torch.no_grad():
        for part in list(data.split(size))[replica.rank :: replica.size]:
            batch = part.to(net.device, net.dtype)
            right += int((net.output(batch).argmax(1) == _labels(batch)).sum())
    return float(replica.total(right)) / len(data)


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


@contextmanager
def _trainable(module: nn.Module) -> Iterator[None]:
    module.requires_grad_(True)
    try:
        yield
    finally:
        module.requires_grad_(False).eval()


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    module.eval()
    try:
        yield
    finally:
        module.train()


@contextmanager
def _seeded(seed: int, epoch: int, device: torch.device, stream: int = 0) -> Iterator[None]:
    """Give dropout and timm's mixing a state that depends on the epoch, and on a stream of it."""
    kept, number = np.random.get_state(), seed * 100_003 + epoch
    with seeded(number + stream * 2**40, device):
        np.random.seed(number % 2**32)
        try:
            yield
        finally:
            np.random.set_state(kept)
