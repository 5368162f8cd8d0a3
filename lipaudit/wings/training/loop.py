"""The training loop, which yields after each epoch everything needed to continue from there.

Image augmentation is below the loop, then the directory of a run: a checkpoint after every epoch,
a record, the model.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from lipaudit import __version__
from lipaudit.attacks.balls import Ball, random_start
from lipaudit.attacks.oracle import pgd
from lipaudit.data.batch import Batch
from lipaudit.data.loading import Samples
from lipaudit.engine.files import ordinary_mode, require_folder, write
from lipaudit.engine.results import versions
from lipaudit.errors import EvaluationError, InputError, UsageError, is_out_of_memory
from lipaudit.measures.base import Facts
from lipaudit.models.net import LoadOptions, Net
from lipaudit.models.precision import has_converted_weights, seed_device
from lipaudit.models.sources.saving import save_net
from lipaudit.wings.training.penalty import Penalty, SpecformerPenalty, attention_penalty
from lipaudit.wings.training.recipe import Recipe

# Steps between two reads of the losses: each read makes an accelerator wait.
READ_EVERY = 32

CHECKPOINT = "checkpoint.pt"
RECORD = "train.json"
Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# Tensors, numbers, strings, and lists and dictionaries of them: `torch.load` reads no other
# objects with `weights_only`.
CheckpointState = dict[str, Any]


@dataclass(frozen=True)
class Epoch:
    """The results of one pass over the data.

    Attributes:
        number: number of the epoch, from 1.
        loss: mean cross-entropy over the training samples (augmented, mixed or attacked).
        penalty: mean penalty, not weighted; None without a penalty.
        accuracy: accuracy on held-out samples; None without any.
        lr: learning rate at the end of the epoch.
        state: everything needed to continue from here.
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
    state: CheckpointState | None = None,
) -> Iterator[Epoch]:
    """Fine-tune a classifier in place, and yield after every epoch.

    On a CPU, runs with the same recipe, data and start are equal to the last bit, also if they are
    interrupted and continued with `state`. The caller's random state does not change.

    Args:
        net: the model; its module is trained, and put back in eval mode with frozen parameters.
        data: labelled samples; images in [0, 1].
        recipe: settings of the training.
        held_out: samples to measure the accuracy on.
        state: state of an earlier epoch to continue from.

    Raises:
        UsageError: the samples have no labels, or the recipe does not fit the model.
        EvaluationError: the loss is not finite.
    """
    _require_fit(net, recipe)
    _require_labels(net, data, "the data")
    if held_out is not None:
        _require_labels(net, held_out, "the held-out data")
    net.module.requires_grad_(True)
    try:
        training = Training(net, data, recipe)
        finished = 0
        if state is not None:
            finished = training.restore(state)
        for number in range(finished, recipe.epochs):
            # Dropout draws from torch's random state, timm's mixing from numpy's. Each epoch has a
            # seed of its own, so that a resumed run draws the same numbers.
            with seed_device(recipe.seed * 100_003 + number, net.device):
                loss, penalty = training.epoch(data)
            accuracy = None
            if held_out is not None:
                accuracy = _measure_accuracy(net, held_out, recipe.batch_size)
            lr = training.optimizer.param_groups[0]["lr"]
            yield Epoch(number + 1, loss, penalty, accuracy, lr, training.state(number + 1))
    finally:
        net.module.requires_grad_(False).eval()


@torch.no_grad()
def _measure_accuracy(net: Net, data: Batch, batch_size: int) -> float:
    """Return the share of labelled samples that are classified correctly."""
    right = 0
    for part in data.split(batch_size):
        batch = part.to(net.device, net.dtype)
        predicted = net.output(batch).argmax(1)
        right += int((predicted == _read_labels(batch)).sum())
    return right / len(data)


class Training:
    """The state of a training, at first before its first step.

    Attributes:
        optimizer: the optimizer.
        schedule: the learning rate schedule, by steps.
        mix: MixUp and CutMix.
        rng: source of the order of samples, of shifts and of noise.
        specformer: the penalty on weights; None: another one, or none.
        parts: what a checkpoint holds besides random states, by name.
    """

    def __init__(self, net: Net, data: Batch, recipe: Recipe) -> None:
        """Create optimizer, learning rate schedule, augmentation and penalty of a recipe.

        Args:
            net: the model to train.
            data: all samples. Their number sets the length of the schedule. For the penalty
                specformer, the model runs on the first two samples to find the weights of heads.
            recipe: the settings.
        """
        self.net = net
        self.recipe = recipe
        self.optimizer = _make_optimizer(net, recipe)
        batches = split_batches(torch.arange(len(data)), recipe.batch_size)
        self.schedule = _make_schedule(self.optimizer, recipe, recipe.epochs * len(batches))
        # Adversarial training has no MixUp or CutMix: the attack needs an image with one label.
        mixup = cutmix = 0.0
        if net.kind == "image" and recipe.adversarial is None:
            mixup = recipe.mixup
            cutmix = recipe.cutmix
        self.mix = make_mix(mixup, cutmix, net.classes or 0)
        # A generator on the CPU gives the same order and shifts of samples on every device.
        self.rng = torch.Generator().manual_seed(recipe.seed)
        # specformer keeps singular vectors from step to step; other penalties have no state.
        self.specformer: SpecformerPenalty | None = None
        if recipe.penalty == "specformer":
            self.specformer = SpecformerPenalty(net, data[:2].to(net.device, net.dtype))
        # The objects whose `state_dict` is stored in a checkpoint.
        self.parts: dict[str, Any] = {
            "model": net.module,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    def state(self, epochs: int) -> CheckpointState:
        """Return everything that a checkpoint needs to continue after this number of epochs."""
        # Copies: the next epoch changes the tensors in place.
        return {
            **{name: deepcopy(part.state_dict()) for name, part in self.parts.items()},
            "rng": self.rng.get_state(),
            "vectors": [] if self.specformer is None else list(self.specformer.vectors),
            "epochs": epochs,
        }

    def restore(self, state: CheckpointState) -> int:
        """Load the state of an interrupted training; return its number of finished epochs."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.rng.set_state(state["rng"])
        if self.specformer is not None:  # a penalty that continues from its singular vectors
            self.specformer.vectors = [vector.to(self.net.device) for vector in state["vectors"]]
        return int(state["epochs"])

    def epoch(self, data: Batch) -> tuple[float, float | None]:
        """Train on all samples once; return the mean loss and the mean penalty.

        Losses stay on the device for READ_EVERY steps: reading a loss waits for the device.

        Raises:
            EvaluationError: a loss or a weight is not finite.
            UsageError: the penalty is 0 for all attention rows.
        """
        net = self.net
        recipe = self.recipe
        net.module.train()
        sums = np.zeros(2)  # of loss and penalty over the samples
        order = torch.randperm(len(data), generator=self.rng)
        batches = split_batches(order, recipe.batch_size)
        for first in range(0, len(batches), READ_EVERY):
            group = batches[first : first + READ_EVERY]
            # Loss and penalty of each step, (2,), still on the device.
            means = [self.step(data.rows(i).to(net.device, net.dtype)) for i in group]
            values = torch.stack(means).cpu().double().numpy()  # (batches, 2)
            if not np.isfinite(values).all():
                raise EvaluationError("the loss is not finite", "Lower --lr or --weight.")
            # The mean of a batch counts as often as the batch has samples. Along axis 0 numpy adds
            # in order, first the sums so far and then batch by batch: so rounding does not depend
            # on READ_EVERY.
            sizes = np.array([len(index) for index in group])
            sums = np.sum([sums, *sizes[:, None] * values], axis=0)
        net.module.eval()
        loss, penalty = sums / len(data)
        self._require_progress(penalty)  # also refuses weights that are not finite
        return float(loss), float(penalty) if recipe.penalty else None

    def _require_progress(self, penalty: float) -> None:
        """Refuse to go on after an epoch with infinite weights, or with a penalty without effect.

        `penalty` is the mean penalty of the epoch.
        """
        finite = [weight.isfinite().all() for weight in self.net.module.parameters()]
        if not torch.stack(finite).all():
            raise EvaluationError("the weights are not finite", "Lower --lr or --weight.")
        k = self.recipe.k
        if self.recipe.penalty == "jasmin" and k and penalty == 0:
            raise UsageError(
                f"no query attends to more than k = {k} keys, so JaSMin is 0",
                "Give a smaller --k.",
            )

    def step(self, batch: Batch) -> Tensor:
        """Take one step of the optimizer on a batch; return its mean loss and penalty, (2,).

        The step does not wait for the device: loss and penalty stay there.
        """
        net = self.net
        recipe = self.recipe
        x, target = self.augment(batch)
        self.optimizer.zero_grad()
        with self._watch_penalty(batch.mask) as measure_penalty:
            logits = net.read(net.call(x, batch.mask))
        loss = F.cross_entropy(logits, target)
        penalty = measure_penalty()
        torch.autograd.backward(loss + recipe.weight * penalty)
        if recipe.clip:
            nn.utils.clip_grad_norm_(net.module.parameters(), recipe.clip)
        self.optimizer.step()
        self.schedule.step()
        return torch.stack([loss.detach(), penalty.detach().to(loss)])

    def augment(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the samples of a batch as the recipe changes them, and their targets.

        Targets are the labels, or for mixed images the share of each class, (samples, classes).
        """
        recipe = self.recipe
        x = batch.x
        y = _read_labels(batch)
        if self.net.kind == "image" and recipe.shift:
            x = shift_images(x, recipe.shift, self.rng)
        if self.net.kind == "image" and recipe.flip:
            x = flip_images(x, self.rng)
        if recipe.adversarial:  # neither mixed nor noisy
            return self.attack(x, y), y
        x, target = self.mix(x, y)
        if recipe.noise:
            x = x + recipe.noise * torch.randn(x.shape, generator=self.rng).to(x)
        return x, target

    def _watch_penalty(self, mask: Tensor | None) -> AbstractContextManager[Penalty]:
        """Return a context manager for the forward pass of a training step.

        The block gets a function that returns the penalty of the step, to be called after it:

            with self._watch_penalty(mask) as measure_penalty:
                logits = model(x)
            penalty = measure_penalty()

        Args:
            mask: True at real tokens, (batch, tokens); None: no padding.
        """
        recipe = self.recipe
        if self.specformer is not None:  # a function of the weights alone
            return nullcontext(self.specformer)
        if recipe.penalty is None:
            return nullcontext(lambda: torch.zeros((), device=self.net.device))
        # jasmin records the calls of attention in the block.
        return attention_penalty(
            self.net.module, k=recipe.k, reduction=recipe.reduction, mask=mask
        )

    def attack(self, x: Tensor, y: Tensor) -> Tensor:
        """Return adversarial examples of images x with labels y, made by PGD in an linf ball."""
        net = self.net
        ball = Ball(norm="linf", eps=float(self.recipe.eps), box=net.box)
        start = random_start(x, ball, self.rng)

        def f(z: Tensor) -> Tensor:
            """Return the logits of images z, which have no mask."""
            return net.read(net.call(z, None))

        net.module.eval()  # dropout would make gradients noisy
        try:
            return pgd(f, x, y, ball, start=start, steps=self.recipe.steps)
        finally:
            net.module.train()


def _make_optimizer(net: Net, recipe: Recipe) -> Optimizer:
    """Return the optimizer of a recipe, for all parameters of a model."""
    parameters = net.module.parameters()
    settings: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "adamw":
        return AdamW(parameters, **settings)
    return SGD(parameters, momentum=recipe.momentum, **settings)


def _make_schedule(optimizer: Optimizer, recipe: Recipe, steps: int) -> LRScheduler:
    """Return the learning rate schedule of a recipe, for a training of so many steps."""
    if recipe.schedule == "onecycle":
        return OneCycleLR(optimizer, recipe.lr, total_steps=steps)
    return CosineAnnealingLR(optimizer, steps)


def _require_fit(net: Net, recipe: Recipe) -> None:
    """Refuse a model that cannot be trained, or a recipe that does not suit it.

    Raises:
        UsageError: the message says why.
    """
    if net.classes is None:
        advice = "For a timm or transformers model, add a new classifier with --classes."
        raise UsageError(f"training needs a classifier, and {net.name} is not one", advice)
    if has_converted_weights(net.module) or net.device_map:
        raise UsageError(
            "training needs its weights on one device, in the precision of the run",
            "Leave --weights and --device-map out.",
        )
    if net.quantised:
        raise UsageError(
            f"training would move rounded weights ({net.name}: {net.quantised})",
            "Train the model before it is quantised, and quantise the result.",
        )
    if recipe.noise and net.kind == "text":
        raise UsageError("--noise works only for images and vectors", "Leave it out.")
    if recipe.adversarial and net.kind != "image":
        raise UsageError("adversarial training works only for images", "Leave --adversarial out.")


def _require_labels(net: Net, data: Batch, name: str) -> None:
    """Refuse data without a label of the model's classes for every sample."""
    classes = net.classes or 0
    is_labelled = data.y is not None and bool(((data.y >= 0) & (data.y < classes)).all())
    if not is_labelled or not len(data):
        raise UsageError(
            f"{name} needs samples with labels from 0 to {classes - 1}",
            "Give labelled samples (a folder of classes, .npz, .csv).",
        )


def _read_labels(batch: Batch) -> Tensor:
    """Return the labels, which `_require_labels` found."""
    assert batch.y is not None
    return batch.y


def split_batches(order: Tensor, size: int) -> list[Tensor]:
    """Return the sample numbers of each batch, in the given order.

    A last batch of a single sample joins the batch before. Batch normalisation cannot train on a
    single sample, which has no variance.
    """
    *full, last = torch.split(order, size)
    if len(last) > 1 or size == 1 or not full:
        return [*full, last]
    return [*full[:-1], torch.cat([full[-1], last])]


def shift_images(x: Tensor, pixels: int, rng: torch.Generator) -> Tensor:
    """Shift each image at random by up to `pixels` in each direction, and fill with zeros."""
    samples, _, height, width = x.shape
    padded = F.pad(x, (pixels, pixels, pixels, pixels))
    # Views of all shifted images: (samples, channels, shifts down, shifts right, height, width).
    columns = padded.unfold(2, height, 1)
    windows = columns.unfold(3, width, 1)
    dy, dx = torch.randint(2 * pixels + 1, (2, samples), generator=rng)
    return windows[torch.arange(samples), :, dy, dx]


def flip_images(x: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror each image with probability 1/2."""
    mirror = torch.rand(len(x), generator=rng) < 0.5
    return torch.where(mirror.to(x.device)[:, None, None, None], x.flip(-1), x)


def make_mix(mixup: float, cutmix: float, classes: int) -> Mix:
    """Return a function (x, y) -> (x, target) that applies timm's MixUp and CutMix to a batch.

    The target of a sample is the share of each class in it, (samples, classes). Samples are mixed
    in pairs; in a batch of odd size the last one is not mixed. Random numbers are numpy's.

    Args:
        mixup: alpha of MixUp; 0: no MixUp.
        cutmix: alpha of CutMix; 0: no CutMix.
        classes: number of classes.
    """
    if not mixup and not cutmix:  # x and labels stay as they are
        return lambda x, y: (x, y)
    from timm.data import Mixup

    mixer = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=classes)

    def mix(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed samples, and the share of each class in them."""
        count = len(x) // 2 * 2  # of samples that have a partner
        # The target of the last sample if the batch has an odd size; else empty.
        unmixed = F.one_hot(y[count:], classes).to(x.dtype)
        if not count:  # a batch of one sample
            return x, unmixed
        images, shares = mixer(x[:count].clone(), y[:count])
        return torch.cat([images, x[count:]]), torch.cat([shares, unmixed])

    return mix


def check_target(out: Path, *, resume: bool) -> None:
    """Refuse a folder that holds another run or a model; with --resume, a folder without a run."""
    if resume and not (out / CHECKPOINT).exists():
        raise UsageError(f"{out} has no unfinished training to resume", "Leave --resume out.")
    for name in (CHECKPOINT, RECORD, "config.json", "model.safetensors"):
        if (out / name).exists() and not resume:
            advice = "Give another --out, or add --resume to continue the training in it."
            raise UsageError(f"{out} already contains {name}", advice)
    require_folder(out)


class TrainingRecord:
    """The directory of a run: a checkpoint after every epoch, and a record.

    Attributes:
        identity: what defines a run: a run that continues another one has the same.
        epochs: the figures of the finished epochs.
    """

    def __init__(
        self,
        out: Path,
        net: Net,
        data: Samples,
        held_out: Samples | None,
        recipe: Recipe,
        *,
        command: str,
    ) -> None:
        """Collect what the record says of a run; nothing is written yet.

        Args:
            out: the directory.
            net: the model before the training.
            data: the samples to train on.
            held_out: the samples to measure the accuracy on.
            recipe: settings of the training.
            command: the typed command.
        """
        self.out = out
        self.device = str(net.device)
        self.command = command
        self.notes = [note.text for note in net.notes + data.notes]
        # A run that is resumed must have the same identity: model, data and settings.
        self.identity: Facts = {
            "model": {
                "spec": net.name,
                "weights_sha256": net.weights_sha256,
                "preprocess": dict(net.preprocess),
                "dtype": str(net.dtype).removeprefix("torch."),
            },
            "data": _describe(data),
            "held_out": None if held_out is None else _describe(held_out),
            "recipe": recipe.model_dump(mode="json"),
        }
        self.epochs: list[Facts] = []

    def read_state(self) -> CheckpointState | None:
        """Return the state of an interrupted run, None for a new one.

        Raises:
            UsageError: the directory belongs to another run.
            InputError: the checkpoint is damaged.
        """
        if not (self.out / CHECKPOINT).exists():
            return None
        try:
            stored = torch.load(self.out / CHECKPOINT, weights_only=True, map_location="cpu")
            identity = stored["run"]
            epochs = stored["epochs"]
            state = dict(stored["state"])
        except Exception as error:  # pickle, zip and torch have their own exceptions
            if is_out_of_memory(error):
                raise
            raise InputError(f"{self.out / CHECKPOINT} is damaged ({error})") from None
        # Model, data, held-out data and recipe must be the same as in the interrupted run.
        changed = [name for name, now in self.identity.items() if identity.get(name) != now]
        if changed:
            raise UsageError(
                f"{self.out} was trained with another {' and another '.join(changed)}",
                f"Repeat the command of {self.out / RECORD}, or give another --out.",
            )
        self.epochs = epochs
        return state

    def add(self, epoch: Epoch) -> None:
        """Store an epoch: its figures in the record, and a checkpoint to continue from."""
        # The folder is created after the first epoch: a command that fails earlier leaves none.
        self.out.mkdir(parents=True, exist_ok=True)
        figures = ("number", "loss", "penalty", "accuracy", "lr")
        self.epochs.append({name: getattr(epoch, name) for name in figures})
        buffer = io.BytesIO()
        torch.save({"run": self.identity, "epochs": self.epochs, "state": epoch.state}, buffer)
        write(self.out / CHECKPOINT, buffer.getvalue())
        self.write_record(finished=False)

    def write_record(self, *, finished: bool) -> Facts:
        """Write the record of the training (command, data, recipe, epochs), and return it."""
        record = {
            "schema": "lipaudit.wings.training",
            "command": self.command,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "lipaudit": __version__,
            "versions": versions(),
            "device": self.device,
            "notes": self.notes,
            **self.identity,
            "finished": finished,
            "epochs": self.epochs,
        }
        write(self.out / RECORD, (json.dumps(record, indent=2) + "\n").encode())
        return record


def _describe(samples: Samples) -> Facts:
    """Return what identifies the samples: DATA as typed, their number, and a hash of them."""
    return {"spec": samples.spec, "samples": len(samples.batch), "suite_id": samples.suite_id}


def save_model(net: Net, out: Path, options: LoadOptions) -> bool:
    """Write the model into a folder; return whether the folder can be loaded as a MODEL.

    If not, the folder has only weights, which need --arch. Files are written into a temporary
    folder and then moved, so that an interruption leaves no broken file.
    """
    try:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            complete = save_net(net, Path(folder), options)
            for path in list(Path(folder).rglob("*")):
                if path.is_file():
                    target = out / path.relative_to(folder)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.chmod(ordinary_mode())
                    path.replace(target)
    except OSError as error:
        raise EvaluationError(f"cannot write to {out}: {error.strerror}") from None
    return complete
