"""The command `train`: fine-tune a checkpoint, and go on where it was stopped."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lipaudit.cli.app import command, complain
from lipaudit.cli.measure import require_unlimited, require_unsharded, typed_command
from lipaudit.cli.options import Lines, ModelArgument, Terminal
from lipaudit.cli.streams import say
from lipaudit.errors import LipauditError, UsageError
from lipaudit.settings import Recipe, RunOptions
from lipaudit.settings.audit import DEMO_EPS

if TYPE_CHECKING:
    import torch

    from lipaudit.data.batch import Batch
    from lipaudit.data.loading import Samples
    from lipaudit.engine.place import Place
    from lipaudit.models.net import Net
    from lipaudit.train import Epoch
    from lipaudit.train.record import TrainingRecord
    from lipaudit.train.replicas import Replica

FOLDER = "lipaudit-watch"
READ_AS = ("data", "text_column", "label_column", "max_tokens", "skip_bad")
"""Options that say how data are read, whatever the model."""
UNSAID = "TORCH_CPP_LOG_LEVEL", "ERROR"
"""Keeps the warnings of torch's C++ from users: they are for who writes a training loop."""

USUAL = {
    "batch_size": str(Recipe.model_fields["batch_size"].default),
    "data": "demo:train for demos",
    "samples": "all",
}


@command("train", panel="Improve a checkpoint", usual=USUAL)
def train(
    model: ModelArgument,
    recipe: Recipe,
    run: RunOptions,
    output: Lines,
    terminal: Terminal,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Directory of the result; -f and -o give its record."),
    ] = Path("trained"),
    classes: Annotated[
        int | None,
        typer.Option(help="Of the data: a model of another number gets a new, random classifier."),
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Data to measure the accuracy on after every epoch.")
    ] = None,
    watch: Annotated[
        int | None,
        typer.Option(
            metavar="EPOCHS",
            min=1,
            help="Measure what an audit does after so many epochs each, on the held-out data: "
            "curves in DIR/lipaudit-watch.",
        ),
    ] = None,
) -> None:
    """Fine-tune a classifier with a penalty, on attention or certificates, or against attacks.

    The defaults are the recipe of Yudin 2025, in batches of 512. Every epoch is
    kept: after an interruption the same command with --resume goes on, to the same result.

    [dim]Examples:[/]
      [cyan]lipaudit train demo --penalty jasmin --epochs 5 --lr 1e-3 --no-flip[/]
      [cyan]lipaudit train ./vit --data train/ --penalty jasmin --k 10 --weight 1e-2[/]
      [cyan]lipaudit train timm:vit_small_patch16_224 --data flowers/ --classes 17[/]
      [cyan]lipaudit train ./vit --data train/ --adversarial pgd --eps 2/255[/]
      [cyan]lipaudit train ./vit --data train/ --penalty certified --eps 2/255 --weight 1[/]
    """
    os.environ.setdefault(*UNSAID)
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.train.record import check_target, written

    require_unsharded(run, "a training")
    require_unlimited(run, "a training")
    if classes is not None and classes < 2:
        raise UsageError(f"--classes {classes}: a classifier has 2 at least")
    given = {"seed": run.seed} | ({"batch_size": run.batch_size} if run.batch_size else {})
    recipe = recipe.model_copy(update=given)
    check_outputs(output, ("lines", "record"))
    task, run = _placed(Task(classes, held_out, out, watch), run)
    if task.first:
        check_target(out, resume=run.resume)
    _train(model, run, recipe, task, quiet=terminal.quiet or not task.first)
    if task.first:
        emit({"lines": lambda: [str(out)], "record": lambda: written(out)}, output)


@dataclass(frozen=True)
class Task:
    """What a run is for, besides its recipe."""

    classes: int | None
    held_out: str | None
    out: Path
    watch: int | None
    place: Place | None = None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.place is None or self.place.rank == 0


def _placed(task: Task, run: RunOptions) -> tuple[Task, RunOptions]:
    """Return which of several processes this is, and the options with the device of this one."""
    from lipaudit.engine.place import local, placed

    place = placed()
    if place is None:
        return task, run
    return replace(task, place=place), local(run, place)


def _train(model: str, run: RunOptions, recipe: Recipe, task: Task, *, quiet: bool) -> None:
    from lipaudit.cli.progress import OnStderr, muted
    from lipaudit.engine.prepare import load_options
    from lipaudit.models.sources.loading import load_net
    from lipaudit.train import train as epochs_of
    from lipaudit.train.record import TrainingRecord, require_shared, save_model

    options = replace(load_options(run), classes=task.classes)
    with muted(quiet=quiet):
        net = load_net(model, options)
        run.require_kind(net.kind)
        demo = net.info.source == "demo"
        data = _samples(run.data or ("demo:train" if demo else None), net, run, "--data")
        check = task.held_out or ("demo" if demo else None)
        tested = None if check is None else _samples(check, net, run, "--held-out")
    observer = OnStderr(model, quiet=quiet)
    for note in net.info.notes + data.notes:
        observer.note(note)
    size = 1 if task.place is None else task.place.size
    said = typed_command()
    record = TrainingRecord(task.out, net, data, tested, recipe, command=said, processes=size)
    batch = None if tested is None else tested.batch
    with _together(task.place, net.device) as replica, _kept(record, quiet=quiet):
        require_shared(replica.gathered(record.same))
        state = replica.first(record.resumed() if task.first else None)
        done = 0 if state is None else int(state["epochs"])
        if done and not quiet:
            say(f"Going on after epoch {done} of {recipe.epochs}.")
        epochs = epochs_of(net, data.batch, recipe, held_out=batch, state=state, replica=replica)
        epochs = _watched(epochs, net, batch, task, after=done)
        for epoch in _reported(epochs, recipe.epochs, quiet=quiet):
            if task.first:
                record.keep(epoch)
    if not task.first:
        return
    complete = save_model(net, task.out, options)
    record.finish()
    if not quiet and task.watch:
        say(f"Curves: {task.out / FOLDER / 'history.html'}")
    if not quiet:
        asked = run.model_copy(update={"data": check or run.data})
        _farewell(task.out, _measuring(task.out, asked) if complete else None)


@contextmanager
def _together(place: Place | None, device: torch.device) -> Iterator[Replica]:
    """Meet the other processes that train the model, if there are any."""
    from lipaudit.engine.ranks import join
    from lipaudit.train.collective import collective
    from lipaudit.train.replicas import Replica

    if place is None:
        yield Replica()
        return
    with join(place) as ranks, collective(ranks, device, _end):
        yield Replica(place.rank, place.size, device)


def _end(error: LipauditError) -> NoReturn:
    complain(error.message, error.advice)
    os._exit(error.exit_code)


@contextmanager
def _kept(record: TrainingRecord, *, quiet: bool) -> Iterator[None]:
    """Say what is kept of a training that is cut short."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        if record.epochs and not quiet:
            text = "finished epochs are kept: the same command with --resume goes on"
            say(f"note: {text}")
        raise


def _watched(
    epochs: Iterable[Epoch], net: Net, held_out: Batch | None, task: Task, *, after: int
) -> Iterator[Epoch]:
    """Yield the epochs unchanged, and measure the model as often as was asked for."""
    if task.watch is None:
        yield from epochs
        return
    from lipaudit.monitor import watch

    if held_out is None or held_out.y is None:
        raise UsageError("--watch measures held-out data", "Name them with --held-out.")
    asked: dict[str, Any] = {"every": task.watch, "to": task.out / FOLDER}
    if net.info.source == "demo":
        asked["eps"] = DEMO_EPS
    monitor = watch(net, data=(held_out.x, held_out.y), **asked)
    if not after:  # the weights of a run that goes on are not loaded yet
        monitor.measure(0)
    for epoch in epochs:
        yield epoch
        names = ("loss", "penalty", "accuracy", "lr")
        known = {name: getattr(epoch, name) for name in names}
        figures = {name: value for name, value in known.items() if value is not None}
        monitor(epoch.number, epoch=epoch.number, **figures)
    monitor.close()


def _samples(spec: str | None, net: Net, run: RunOptions, option: str) -> Samples:
    from lipaudit.data.loading import load_data
    from lipaudit.engine.prepare import data_options

    if spec in (None, "random"):
        raise UsageError("training needs labelled samples", f"Name them with {option}.")
    most = run.samples if option == "--data" else None
    samples = load_data(spec, net, data_options(run, most or sys.maxsize))
    kept = tuple(note for note in samples.notes if note.code != "fewer-samples")
    return replace(samples, notes=kept)


def _reported(epochs: Iterable[Epoch], total: int, *, quiet: bool) -> Iterator[Epoch]:
    """Yield the epochs unchanged, with a line on stderr for each."""
    start, first = time.monotonic(), None
    for epoch in epochs:
        yield epoch
        first = first or epoch.number
        left = (time.monotonic() - start) / (epoch.number - first + 1) * (total - epoch.number)
        facts = [f"loss {epoch.loss:.4g}"]
        facts += [] if epoch.penalty is None else [f"penalty {epoch.penalty:.4g}"]
        facts += [] if epoch.accuracy is None else [f"held out {epoch.accuracy:.1%}"]
        if not quiet:
            line = f"epoch {epoch.number}/{total}: {', '.join(facts)}; about {left:.0f} s left"
            say(line)


def _measuring(out: Path, run: RunOptions) -> str:
    """Return the command that measures the result, on the data it was held against."""
    options = RunOptions.options()
    words = ["lipaudit", "audit", str(out)]
    for name in READ_AS:
        value = getattr(run, name)
        if value is not None and value is not False:
            words += [options[name].flags[0], *([] if value is True else [str(value)])]
    return shlex.join(words)


def _farewell(out: Path, measuring: str | None) -> None:
    if measuring is not None:
        say(f"Trained. Measure it: {measuring}")
    else:
        say(f"Trained. Load {out}/model.safetensors in your py: factory.")
