"""Watch a training: a module every n-th step, unchanged, or every checkpoint of a folder.

`TrainerCallback` and `LightningCallback` are attributes of `lipaudit.wings.training.monitor`.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lipaudit import schema
from lipaudit.api import AnyData, Measures, audit_request, open_job
from lipaudit.data.loading import Samples
from lipaudit.engine.execute import Observer, execute
from lipaudit.engine.files import require_folder, write
from lipaudit.engine.prepare import Job, Request, prepare
from lipaudit.errors import InputError, UsageError, explain_error
from lipaudit.measures import summarise
from lipaudit.measures.base import Facts
from lipaudit.models.net import ModelSpec, Net
from lipaudit.models.precision import exact_arithmetic, seed_device
from lipaudit.models.sources.own import unwrap
from lipaudit.models.sources.weight_files import BESIDE, SUFFIXES, list_weight_files
from lipaudit.report import of_reports, render
from lipaudit.tables import Report
from lipaudit.tables.columns import finite, middle

# Default attack during a training: only one, because of its cost.
ATTACK = "pgd"
# Prefix of the figures that loggers get, apart from those of the training itself.
PREFIX = "lipaudit/"
# Figures of a summary that loggers know by another name.
LOGGED = {"jacobian_norm": "jacobian_norm/median", "steepest_head": "heads/steepest"}
# Called with figures by name, and their step: `mlflow.log_metrics` is one.
Logger = Callable[[dict[str, float], int], object]
FOLDER = "lipaudit-watch"
# Types of sharded weights and modules.
SHARDED = ("DTensor", "FlatParameter", "FullyShardedDataParallel")

CONFIG = "config.json"
STEP = re.compile(r"(?:step|iter(?:ation)?|checkpoint|ckpt)s?[-_=]?(\d+)")
EPOCH = re.compile(r"epochs?[-_=]?(\d+)")
# Pattern of the step at the end of a name; it does not match decimals such as an accuracy
# (0.91).
LAST = re.compile(r"(?<![\d.])(\d+)(?:-v\d+)?$")
SHARD = re.compile(r"-\d+-of-\d+$")
PAGE = "report.html"
# Options of a run that do not change results.
FREE = {"resume", "device", "batch_size", "offline", "time_limit"}

Watched = nn.Module | ModelSpec | Net


def watch(
    model: Watched,
    measures: Measures = None,
    *,
    data: AnyData = None,
    every: int = 100,
    to: str | os.PathLike[str] = FOLDER,
    loggers: Iterable[Logger] = (),
    strict: bool = False,
    step: int = 0,
    **options: Any,
) -> Monitor:
    """Measure a module every n-th step of its training, on the same samples each time.

    The training does not change, to the last bit: weights, gradients, flags, buffers and random
    states are restored. In a distributed run the process of rank 0 measures.

        with lipaudit.watch(model, data=(x, y), every=100, to="watched") as monitor:
            for batch in loader:
                ...
                monitor.step()

    Args:
        model: the module in training, or a model loaded by lipaudit. Wrappers
            (DistributedDataParallel, DataParallel, torch.compile) are removed.
        measures: as in `lipaudit.audit`, on few samples; the attack is pgd.
        data: as in `lipaudit.audit`.
        every: number of steps between two measurements.
        to: folder of the reports (`step-0000100.json`) and of the page that shows them side by
            side. A report of the same step is replaced: use one folder per training.
        loggers: functions of figures by name and a step, such as `mlflow.log_metrics`.
        strict: whether a failed measurement ends the training; otherwise it is a Python warning.
        step: number of steps already done, if the training continues from a checkpoint.
        options: as in `lipaudit.audit`.

    Raises:
        LipauditError: the model cannot be measured; raised before the training begins.
    """
    request = _plan_measurement(measures, options)
    if every < 1:
        raise UsageError(
            f"every = {every}", "Give a positive number of steps between two measurements."
        )
    inner = _unwrap_model(model)
    functions = tuple(loggers)
    if not all(map(callable, functions)):
        raise UsageError(
            "loggers are functions of figures and a step", "Give [mlflow.log_metrics]."
        )
    if isinstance(inner, Net):
        name = inner.name
    else:
        name = type(_get_module(inner)).__name__
    request = replace(request, model=name, partial=not strict)
    return Monitor(inner, request, data, every, Path(to), functions, step)


def _plan_measurement(measures: Measures, options: dict[str, Any]) -> Request:
    """Return the request of one measurement of a model in training.

    Args:
        measures: as in `lipaudit.audit`; the default is few samples and the attack pgd.
        options: further options of `lipaudit.audit`.

    Raises:
        UsageError: an option is unknown, invalid, or has no meaning for a training.
    """
    if "time_limit" in options:
        raise UsageError("time_limit applies to one run, not to a training", "Leave it out.")
    names = [measures] if isinstance(measures, str) else measures
    defaults: dict[str, Any] = {"quick": True}
    if names is None or "attack" in names:
        defaults["attack"] = ATTACK
    # The caller sets the name of the model.
    request = audit_request(
        model="",
        measures=measures,
        options=defaults | options,
        demo=False,
        command="lipaudit.watch()",
    )
    for name in ("shard", "parts"):
        if getattr(request.run, name):
            raise UsageError(
                f"{name} is not possible here: a training is measured on all samples",
                "Leave it out.",
            )
    return request


@dataclass(eq=False, repr=False)
class Monitor:
    """Measures a module during its training; `lipaudit.watch` creates one.

    As a context manager, it measures before the first step and, if the block ends without an
    error, after the last.

    Attributes:
        folder: folder of the reports and the page.
        report: the last report; None before the first.
        seconds: total time of all measurements.
    """

    _model: Watched
    _request: Request
    _data: AnyData
    _every: int
    folder: Path
    _loggers: tuple[Logger, ...]
    _first_step: int
    report: Report | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Load the samples for all measurements, so that errors appear before the training.

        In a distributed run only the process of rank 0 loads and measures.
        """
        # Numbers of finished steps of the training: now, and at the last measurement.
        self._step = self._first_step
        self._last_measured: int | None = None
        is_distributed = distributed.is_available() and distributed.is_initialized()
        # Whether this process measures and writes reports: in others `measure` does nothing.
        self._is_measuring = not is_distributed or distributed.get_rank() == 0
        if not self._is_measuring:
            return
        with self._open_job() as job:
            samples = job.samples
        notes = samples.notes
        # Without a typed number of samples, the note that DATA has fewer samples is useless.
        if self._request.run.samples is None:
            notes = tuple(note for note in notes if note.code != "fewer-samples")
        self._samples = replace(samples, notes=notes)
        self._reports = StepReports(self.folder)

    def __enter__(self) -> Self:
        self.measure(self._step)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def step(self) -> None:
        """Count one more step of the training; measure if it is due."""
        self(self._step + 1)

    def __call__(self, step: int) -> None:
        """Set the number of finished steps; measure the model at every n-th step."""
        self._step = step
        if step % self._every == 0:
            self.measure(step)

    def measure(self, step: int) -> None:
        """Measure the model now: write the report of this step, and send its figures to loggers.

        A step that was just measured is not measured again.
        """
        if not self._is_measuring or step == self._last_measured:
            return
        self._step = step
        self._last_measured = step
        start = time.monotonic()
        with self._warn_on_failure(step):
            try:
                with self._open_job(self._samples) as job:
                    report = execute(job)
            finally:
                seconds = time.monotonic() - start
                self.seconds += seconds
            self.report = _name_step(report, step)
            self._reports.write(step, self.report)
            figures = collect_figures(self.report) | {f"{PREFIX}seconds": round(seconds, 3)}
            for log in self._loggers:
                log(figures, step)

    def close(self) -> None:
        """Measure after the last step, and write a page of all steps up to it.

        Processes that do not measure (all but that of rank 0) do nothing.
        """
        if self._step > self._first_step:
            self.measure(self._step)  # does nothing if this step was just measured
        if self._is_measuring:
            with self._warn_on_failure(self._step):
                reports = self._reports.load(self._step)
                if reports:
                    self._reports.draw(reports)

    @contextmanager
    def _open_job(self, samples: Samples | None = None) -> Iterator[Job]:
        """Prepare a measurement of the model; nothing in the block changes the training.

        Without `samples` they are loaded.
        """
        protected = _protect(_get_module(self._model), self._request.run.seed)
        opened = open_job(self._model, self._request, self._data, samples=samples)
        with protected, opened as job:
            yield job

    @contextmanager
    def _warn_on_failure(self, step: int) -> Iterator[None]:
        """Turn a failure in the block into a Python warning; raise it if strict."""
        try:
            yield
        except Exception as error:
            if not self._request.partial:  # strict
                raise
            warnings.warn(f"lipaudit, step {step}: {explain_error(error).message}", stacklevel=2)


def _name_step(report: Report, step: int) -> Report:
    """Return a report whose model is named with the step."""
    model = report.run.model
    model = model.model_copy(update={"spec": f"{model.spec}, step {step}"})
    return report.model_copy(update={"run": report.run.model_copy(update={"model": model})})


def _get_module(model: Watched) -> nn.Module:
    """Return the module of a model."""
    return model.module if isinstance(model, ModelSpec) else model


def _unwrap_model(model: Watched) -> Watched:
    """Return the model without wrappers, such as those of torch.compile or for several devices.

    Raises:
        InputError: the model is neither a module nor a ModelSpec, or its weights are sharded over
            processes, so that no process has all of them.
    """
    if not isinstance(_get_module(model), nn.Module):
        raise InputError(
            f"{type(model).__name__} is not a model", "Give an nn.Module or a lipaudit.ModelSpec."
        )
    inner = unwrap(_get_module(model))
    while isinstance(inner, DistributedDataParallel | DataParallel):
        inner = unwrap(inner.module)
    if isinstance(model, nn.Module):
        model = inner
    elif not isinstance(model, Net):  # a ModelSpec; a Net was loaded by lipaudit, without wrappers
        model = replace(model, module=inner)
    for name, part in (*inner.named_modules(), *inner.named_parameters()):
        # DeepSpeed gives its sharded parameters a `ds_id`.
        if hasattr(part, "ds_id") or type(part).__name__ in SHARDED:
            raise InputError(
                f"the weights are sharded over processes ({name or 'all'}), so no process can "
                "measure the whole model",
                "Measure the saved checkpoints instead: lipaudit watch FOLDER.",
            )
    return model


@contextmanager
def _protect(module: nn.Module, seed: int) -> Iterator[None]:
    """Restore random states and buffers after the block, so that measuring changes no training.

    The random states are those of torch, numpy and Python. Buffers, such as a count of forward
    passes, are replaced by copies in the block: changing the originals would break a later
    backward pass. (Flags and gradients are restored elsewhere, by `borrow`.)
    """
    # For each submodule, its dict of buffers and a copy of this dict with the original tensors.
    tables = [(each._buffers, dict(each._buffers)) for each in module.modules()]
    copies: dict[int, torch.Tensor | None] = {}  # modules that share a buffer also share its copy
    state = random.getstate()
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    try:
        for buffers, originals in tables:
            for name, value in originals.items():
                copy = None
                if value is not None:
                    copy = value.detach().clone()
                buffers[name] = copies.setdefault(id(value), copy)
        # `seed_device` restores the random states of torch and numpy after the block; Python's is
        # restored here.
        with seed_device(seed, device), exact_arithmetic(device):
            yield
    finally:
        random.setstate(state)
        for buffers, originals in tables:
            buffers.clear()
            buffers.update(originals)


def collect_figures(report: Report) -> dict[str, float]:
    """Return the finite figures of a report for loggers, by name.

    Names have only characters that every logger accepts.
    """
    figures: Facts = {}
    for row in summarise(report).rows:
        name = LOGGED.get(row.name, row.name)
        if row.norm:
            ball = f"{row.norm} {row.radius}".rstrip()
            name += "/" + re.sub(r"[^A-Za-z0-9.]+", "_", ball)
        figures[name] = row.value
    jacobian = report.section("jacobian")
    if jacobian is not None and jacobian.rows:
        of_model = jacobian.rows[0]  # the row of the whole model; rows of blocks follow
        figures["jacobian_norm/p95"] = of_model.p95
        figures["jacobian_norm/max"] = of_model.max
    bounds = report.section("bounds")
    if bounds is not None:
        figures["heads/median"] = middle(row.exact for row in bounds.rows)
    return {PREFIX + name: value for name, value in figures.items() if finite([value])}


class StepReports:
    """The reports of the steps of one training, in a folder.

    Args:
        folder: folder of the reports; created with the first one.
        suffix: suffix of their names, if the folder holds other reports as well.

    Raises:
        UsageError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, suffix: str = "") -> None:
        require_folder(folder)
        self.folder = folder
        self.suffix = suffix  # the end of the names of reports

    def path(self, step: int) -> Path:
        """Return the path of a step's report."""
        return self.folder / f"step-{step:07}{self.suffix}.json"

    def write(self, step: int, report: Report) -> None:
        """Write the report of a step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.path(step), schema.dumps(report).encode())

    def load(self, last: int | None = None) -> list[Report]:
        """Return the reports in the order of their steps, up to the last requested step.

        Raises:
            InputError: a report is damaged.
        """
        pattern = re.compile(rf"step-(\d+){self.suffix}\.json")
        steps = []
        for path in self.folder.glob("step-*.json"):
            match = pattern.fullmatch(path.name)
            if match and (last is None or int(match[1]) <= last):
                steps.append(int(match[1]))
        return [schema.load(self.path(step)) for step in sorted(steps)]

    def draw(self, reports: list[Report]) -> Path:
        """Write a page with the reports side by side; return its path."""
        page = self.folder / PAGE
        write(page, render(of_reports(*reports, by="order"), "html"))
        return page


# The checkpoints of a folder, measured one by one in the order of their steps.


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose name has a step.

    Attributes:
        name: name of its file or directory.
        model: what to load: the directory, or a file of weights.
        step: step of the training, or the epoch if the name has no step.
        changed: time of the last change, in nanoseconds.
    """

    name: str
    model: Path
    step: int
    changed: int


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder in the order of their steps.

    If several checkpoints have the same step, only the newest is returned.
    """
    checkpoints = [*filter(None, map(_read_checkpoint, folder.iterdir()))]
    # Among checkpoints with the same step the newest comes last, and stays in the dictionary.
    checkpoints.sort(key=lambda checkpoint: (checkpoint.step, checkpoint.changed))
    return list({checkpoint.step: checkpoint for checkpoint in checkpoints}.values())


def _read_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint that a file or a folder holds; None if it holds no whole one."""
    step = read_step(path.name)
    if step is None or path.name.startswith("."):
        return None
    files = [path]
    model = path
    if path.is_dir():
        names = [file.name for file in path.iterdir()]
        weights = list_weight_files(names)
        if not weights:
            return None  # no weights yet
        files = [path / name for name in (*weights, CONFIG) if name in names]
        if CONFIG not in names:  # the folder cannot be loaded as a MODEL: load the weights
            model = files[0]
    elif path.suffix not in SUFFIXES:
        return None
    try:
        changed = max(file.stat().st_mtime_ns for file in files)
    except FileNotFoundError:  # a broken link, or a checkpoint that the training just removed
        return None
    return Checkpoint(path.name, model, step, changed)


def read_step(name: str) -> int | None:
    """Read the step, else the epoch, from the name of a checkpoint; None without either.

    >>> read_step("checkpoint-100"), read_step("epoch=3-step=600.ckpt"), read_step("epoch_3.pt")
    (100, 600, 3)
    >>> read_step("model_0200.safetensors"), read_step("best.ckpt"), read_step("acc=0.91.pt")
    (200, None, None)
    """
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    stem = name.removesuffix(suffix).lower()
    if SHARD.search(stem) or BESIDE.match(stem):  # a part of a checkpoint, or an optimizer state
        return None
    match = STEP.search(stem) or EPOCH.search(stem) or LAST.search(stem)
    if match:
        return int(match[1])
    return None


class CheckpointFolder:
    """The checkpoints of a folder, and the reports of the measured ones.

    The names of reports depend on the options: with other options every checkpoint is measured
    again.

    Args:
        folder: folder of the checkpoints.
        request: the request for each checkpoint; its model is filled in.
        to: folder of the reports.
    """

    def __init__(self, folder: Path, request: Request, to: Path) -> None:
        """Choose the names of the reports in the folder `to` by the options of the request."""
        self.folder = folder
        self.request = request
        # Names of reports end in a hash of all options that change results. So reports with other
        # options stay, and are never mixed with the new reports.
        measures = {name: options.model_dump() for name, options in request.measures.items()}
        settings = repr((request.run.model_dump(exclude=FREE), measures, dict(request.counts)))
        digest = hashlib.sha256(settings.encode()).hexdigest()
        self.reports = StepReports(to, suffix=f"-{digest[:8]}")
        # Loaded with the first checkpoint; all others are measured on the same samples.
        self.samples: Samples | None = None

    def list_pending(self) -> list[Checkpoint]:
        """Return the checkpoints without a report, or newer than their report, by step."""
        pending = []
        for checkpoint in list_checkpoints(self.folder):
            report = self.reports.path(checkpoint.step)
            if not report.exists() or report.stat().st_mtime_ns <= checkpoint.changed:
                pending.append(checkpoint)
        return pending

    def measure(self, checkpoint: Checkpoint, observer: Observer) -> None:
        """Measure a checkpoint, on the same samples as all others, and write its report.

        Raises:
            LipauditError: the checkpoint could not be measured.
        """
        job = prepare(replace(self.request, model=str(checkpoint.model)), samples=self.samples)
        self.samples = job.samples
        self.reports.write(checkpoint.step, execute(job, observer))


# Callbacks of the Trainers of transformers and Lightning. Each class is created on first use, from
# the installed packages.

ChoosePart = Callable[[nn.Module], nn.Module | ModelSpec]


class WatchingCallback:
    """Watches the model of a trainer: `Trainer(..., callbacks=[TrainerCallback(data=(x, y))])`.

    Args:
        part: returns the part of the trainer's model to watch; None: all of it.
        to: as in `lipaudit.watch`; by default a folder in the trainer's folder.
        options: other arguments of `lipaudit.watch`: data, measures, every, loggers...
    """

    def __init__(
        self,
        part: ChoosePart | None = None,
        *,
        to: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()  # the callback class of transformers or Lightning
        self.part = part  # returns the part of the model to watch
        self.to = to  # folder of the reports
        self.options = options  # arguments of `lipaudit.watch`
        self.monitor: Monitor | None = None  # created when the training begins

    def start_watching(self, model: Any, folder: str, step: int, **defaults: Any) -> None:
        """Create the monitor of a training, and measure before its first step.

        Args:
            model: the model of the trainer.
            folder: the folder of the trainer.
            step: number of steps done, more than 0 if the training continues from a checkpoint.
            defaults: arguments of `lipaudit.watch`, unless the user gave them.
        """
        if self.part is not None:
            model = self.part(model)
        to = Path(folder) / FOLDER if self.to is None else self.to
        self.monitor = watch(model, to=to, **(defaults | self.options))
        self.monitor.measure(step)

    def finish_step(self, step: int) -> None:
        """Measure if this step is due."""
        if self.monitor is not None:
            self.monitor(step)

    def on_train_end(self, *_: Any, **known: Any) -> None:
        """Measure after the last step, and write the page."""
        if self.monitor is not None:
            self.monitor.close()


@cache
def make_trainer_callback() -> type:
    """Return the class TrainerCallback, for the Trainer of transformers, which it imports."""
    import transformers

    class TrainerCallback(WatchingCallback, transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            if state.is_world_process_zero:  # one process measures
                self.start_watching(known["model"], args.output_dir, step=state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            self.finish_step(state.global_step)

    return TrainerCallback


@cache
def make_lightning_callback() -> type:
    """Return the class LightningCallback, for the Trainer of Lightning, which it imports."""
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError as error:
        if error.name != "lightning":  # Lightning is installed, but lacks another module
            raise
        raise UsageError("Lightning is not installed", "Run pip install lightning.") from None

    class LightningCallback(WatchingCallback, Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # Processes communicate when they read `log_dir`: all of them must do so.
            folder = trainer.log_dir or trainer.default_root_dir
            if trainer.is_global_zero:
                loggers = [logger.log_metrics for logger in trainer.loggers]
                self.start_watching(pl_module, folder, step=trainer.global_step, loggers=loggers)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.finish_step(trainer.global_step)

    return LightningCallback
