"""Measure a module while it is trained, every so many steps, and leave the training as it is."""

from __future__ import annotations

import os
import random
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lipaudit.api.measuring import AnyData, prepared
from lipaudit.api.requests import audit_request
from lipaudit.data.loading import Samples
from lipaudit.engine.execute import execute
from lipaudit.engine.prepare import Request
from lipaudit.errors import InputError, UsageError, as_user_meets, bug
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic, seeded
from lipaudit.models.sources.assembly import unwrapped
from lipaudit.models.sources.spec import ModelSpec
from lipaudit.monitor.diary import Diary, now, opening
from lipaudit.monitor.loggers import Logger, logged, loggers
from lipaudit.results import Report
from lipaudit.results.history import History, Point

ATTACK = "pgd"
"""What a training is attacked by where nothing else is asked for: one attack, for its cost."""
FOLDER = "lipaudit-watch"
SHARDED = ("DTensor", "FlatParameter", "FullyShardedDataParallel")
"""Types of weights and of modules whose weights are in pieces."""


Watched = nn.Module | ModelSpec | Net


def watch(
    model: Watched,
    measures: str | Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    *,
    data: AnyData = None,
    every: int = 100,
    to: str | os.PathLike[str] = FOLDER,
    loggers: str | Logger | Iterable[str | Logger] = (),
    strict: bool = False,
    step: int = 0,
    **options: Any,
) -> Monitor:
    """Measure a module every so many steps of its training, on the same samples each time.

    The training is bit for bit what it would be without: weights, gradients, flags, buffers and
    random states come back as they were. In a distributed run the process of rank 0 measures.

        with lipaudit.watch(model, data=(x, y), every=100, to="watched") as monitor:
            for batch in loader:
                ...
                monitor.step(loss=loss.item())

    Args:
        model: the module that is trained, or a model that lipaudit has loaded; what
            DistributedDataParallel, DataParallel or torch.compile wrap is measured itself.
        measures: as of `lipaudit.audit`, on few samples; its attack is pgd.
        data: as of `lipaudit.audit`.
        every: how many steps lie between two measurements.
        to: the folder of the history, the page and the reports. A training that goes back to an
            earlier step, or to the first, goes on from there in the same history.
        loggers: where figures go besides: tensorboard, mlflow, wandb, or a function of figures by
            name and a step.
        strict: whether a measurement that fails ends the training; else it leaves a note.
        step: where the training begins: how many steps are done, if it goes on from a checkpoint.
        options: as of `lipaudit.audit`.

    Raises:
        LipauditError: what cannot be measured, before the training begins.
    """
    plan = Plan.of(measures, options, strict=strict, step=step)
    return Monitor(model, plan, data, every, to, loggers)


@dataclass(frozen=True)
class Plan:
    """What is measured, whether a failure ends the training, and where that begins.

    Attributes:
        request: what is measured at every step.
        strict: whether a failure is raised.
        step: how many steps of the training are done.
    """

    request: Request
    strict: bool
    step: int

    @classmethod
    def of(cls, measures: Any, options: Mapping[str, Any], *, strict: bool, step: int) -> Plan:
        """Check what was asked for.

        Raises:
            UsageError: a measure or an option that there is not, or a shard.
        """
        if "time_limit" in options:
            raise UsageError("time_limit is of one run, not of a training", "Leave it out.")
        names = [measures] if isinstance(measures, str) else measures
        usual = {"attack": ATTACK} if names is None or "attack" in names else {}
        request = audit_request(
            "", measures, usual | dict(options), quick=True, command="lipaudit.watch()"
        )
        if request.run.shard:
            raise UsageError("shard: a history is of all samples", "Leave it out.")
        return cls(replace(request, partial=not strict), strict, step)


class Monitor:
    """Measures a module while it is trained; `lipaudit.watch` makes one.

    As a context it measures before the first step and, if the block ends well, after the last.

    Attributes:
        folder: where history, page and reports are.
        report: what was measured last; None before.
        seconds: what all measuring has taken.
    """

    def __init__(
        self,
        model: Watched,
        plan: Plan,
        data: AnyData,
        every: int,
        to: str | os.PathLike[str],
        loggers_: str | Logger | Iterable[str | Logger],
    ) -> None:
        if every < 1:
            raise UsageError(f"every = {every}", "Give the steps between two measurements.")
        self.folder, self.report = Path(to), None
        self.seconds, self._every, self._plan, self._data = 0.0, every, plan, data
        self._model = _innermost(model)
        self._step, self._known = plan.step, dict[str, Any]()
        self._last: int | None = None
        self._active = not _another_rank()
        if self._active:
            request = replace(plan.request, model=_name(self._model))
            self._plan = replace(plan, request=request)
            self._samples = self._drawn()
            self._diary = Diary(self.folder, opening(request, request.model, self._samples.spec))
            self._diary.require_suite(self._samples.suite_id)
            self._loggers = loggers(loggers_, self.folder)
            self._session, self._begun = uuid.uuid4().hex[:8], time.monotonic()

    report: Report | None

    def __enter__(self) -> Self:
        self.measure(self._step)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def step(self, *, epoch: float | None = None, **figures: float) -> None:
        """Say that another step of the training is done."""
        self(self._step + 1, epoch=epoch, **figures)

    def __call__(self, step: int, *, epoch: float | None = None, **figures: float) -> None:
        """Say that so many steps of the training are done.

        Args:
            step: how many.
            epoch: which pass over the data this is.
            figures: the training's own (loss, lr...), to be kept beside those that are measured.
        """
        self._step, self._known = step, {"epoch": epoch, "figures": figures}
        if step % self._every == 0:
            self.measure(step, epoch=epoch, **figures)

    def measure(self, step: int, *, epoch: float | None = None, **figures: float) -> None:
        """Measure now, whatever the step; a step that was measured last is not measured again."""
        if not self._active or step == self._last:
            return
        self._step, self._last = step, step
        own = {name: float(value) for name, value in figures.items()}
        known: dict[str, Any] = {"step": step, "session": self._session, "epoch": epoch}
        self._measure(known | {"figures": own})

    def close(self) -> None:
        """Measure after the last step, and draw the page of the history."""
        if self._known:
            self.measure(self._step, epoch=self._known["epoch"], **self._known["figures"])
        if self._active:
            with self._forgiving(self._step):
                self._diary.draw()

    @property
    def history(self) -> History:
        """All that was measured so far."""
        return self._diary.history

    def _measure(self, known: dict[str, Any]) -> None:
        start = time.monotonic()
        with self._forgiving(known["step"]) as reasons:
            self.report = self._measured()
        now_ = time.monotonic()
        self.seconds += now_ - start
        known["seconds"] = round(now_ - start, 3)
        if known["step"]:
            known["share"] = round(self.seconds / (now_ - self._begun), 4)
        with self._forgiving(known["step"]):
            point = self._kept(known, reasons)
            for log in self._loggers if not reasons else ():
                log(logged(point), point.step)

    def _kept(self, known: dict[str, Any], reasons: Sequence[str]) -> Point:
        if not reasons and self.report is not None:
            return self._diary.keep(self.report, **known)
        failures = dict.fromkeys(self._plan.request.measures, "".join(reasons))
        point = Point(time=now(), suite=self._samples.suite_id, failures=failures, **known)
        self._diary.add(point)
        return point

    def _measured(self) -> Report:
        with (
            _untouched(_module(self._model), self._plan.request.run.seed),
            prepared(self._model, self._plan.request, self._data, samples=self._samples) as job,
        ):
            return execute(job)

    def _drawn(self) -> Samples:
        """Draw the samples that are measured at every step, and see that they can be."""
        request = self._plan.request
        with (
            _untouched(_module(self._model), request.run.seed),
            prepared(self._model, request, self._data) as job,
        ):
            samples = job.samples
        few = request.run.samples is None
        notes = tuple(n for n in samples.notes if not (few and n.code == "fewer-samples"))
        return replace(samples, notes=notes)

    @contextmanager
    def _forgiving(self, step: int) -> Iterator[list[str]]:
        """Make a failure in the block a reason and a Python warning; raise it if strict."""
        reasons: list[str] = []
        try:
            yield reasons
        except Exception as error:
            if self._plan.strict:
                raise
            reasons.append((as_user_meets(error) or bug(error)).message)
            warnings.warn(f"lipaudit, step {step}: {reasons[0]}", stacklevel=2)


def _another_rank() -> bool:
    """Tell whether another process of a distributed run measures."""
    distributed = torch.distributed
    return (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0
    )


def _name(model: Watched) -> str:
    return model.info.spec if isinstance(model, Net) else type(_module(model)).__name__


def _module(model: Watched) -> nn.Module:
    return model.module if isinstance(model, ModelSpec | Net) else model


def _innermost(model: Watched) -> Watched:
    """Return the model itself, without what runs it on several devices.

    Raises:
        InputError: no process has all of its weights.
    """
    if not isinstance(_module(model), nn.Module):
        raise InputError(
            f"{type(model).__name__} is no model", "Give an nn.Module or a lipaudit.ModelSpec."
        )
    inner = unwrapped(_module(model))
    while isinstance(inner, DistributedDataParallel | DataParallel):
        inner = unwrapped(inner.module)
    if isinstance(model, nn.Module):
        model = inner
    elif isinstance(model, ModelSpec):
        model = replace(model, module=inner)
    for name, part in (*inner.named_modules(), *inner.named_parameters()):
        if hasattr(part, "ds_id") or type(part).__name__ in SHARDED:
            where = name or "all"
            raise InputError(
                f"the weights are sharded over processes ({where}): no process can measure them",
                "Watch the checkpoints that the training writes: lipaudit watch DIR --follow",
            )
    return model


@contextmanager
def _untouched(module: nn.Module, seed: int) -> Iterator[None]:
    """Put back what running the module in the block may change beside what `borrowed` does.

    Those are random states, torch's, numpy's and Python's own, and buffers: a module may count its
    forward passes, say. They are stood in for: a change would spoil a backward pass to come.
    """
    tables = [(each._buffers, dict(each._buffers)) for each in module.modules()]
    copies: dict[int, torch.Tensor | None] = {}
    states = np.random.get_state(), random.getstate()
    place = next((p.device for p in module.parameters()), torch.device("cpu"))
    try:
        for table, own in tables:
            for name, value in own.items():
                copy = None if value is None else value.detach().clone()
                table[name] = copies.setdefault(id(value), copy)
        with seeded(seed, place), exact_arithmetic(place):
            yield
    finally:
        np.random.set_state(states[0])
        random.setstate(states[1])
        for table, own in tables:
            table.clear()
            table.update(own)
