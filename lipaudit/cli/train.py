"""The command `train`: fine-tune a checkpoint, and go on where it was stopped."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.measure import require_alone, typed_command
from lipaudit.cli.options import ModelArgument, Output, Terminal
from lipaudit.errors import UsageError
from lipaudit.settings import Recipe, RunOptions

if TYPE_CHECKING:
    from lipaudit.data.loading import Samples
    from lipaudit.models.net import Net
    from lipaudit.train import Epoch

USUAL = {
    "batch_size": str(Recipe.model_fields["batch_size"].default),
    "data": "demo:train for demos",
    "samples": "all",
}


@command("train", panel="Improve a checkpoint")
def train(
    model: ModelArgument,
    recipe: Recipe,
    run: Annotated[RunOptions, USUAL],
    output: Output,
    terminal: Terminal,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for the model; -f and -o write its record.",
        ),
    ] = Path("trained"),
    classes: Annotated[
        int | None,
        typer.Option(
            help="Number of classes of the data. If the model has another number, "
            "its classifier is replaced by a new one."
        ),
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Data to measure the accuracy on after every epoch.")
    ] = None,
) -> None:
    """Fine-tune a classifier with a penalty on attention, or against attacks.

    The defaults are the recipe of Yudin 2025, in batches of 512. Every epoch is
    kept: after an interruption the same command with --resume goes on, to the same result.

    [dim]Examples:[/]
      [cyan]lipaudit train demo --penalty jasmin --epochs 5 --lr 1e-3 --no-flip[/]
      [cyan]lipaudit train ./vit --data train/ --penalty jasmin --k 10 --weight 1e-2[/]
      [cyan]lipaudit train timm:vit_small_patch16_224 --data flowers/ --classes 17[/]
      [cyan]lipaudit train ./vit --data train/ --adversarial pgd --eps 2/255[/]
    """
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.prepare import load_options
    from lipaudit.models.sources.loading import load_net
    from lipaudit.report import FACTS, Subject
    from lipaudit.train import train as epochs_of
    from lipaudit.train.record import TrainingRecord, check_target, read_record, save_model

    require_alone("a training", run)
    if classes is not None and classes < 2:
        raise UsageError(f"--classes {classes}: a classifier needs at least 2 classes")
    given = {"seed": run.seed} | ({"batch_size": run.batch_size} if run.batch_size else {})
    recipe = recipe.model_copy(update=given)
    check_outputs(output, ("lines", "record"))
    check_target(out, resume=run.resume)
    options = replace(load_options(run), classes=classes)
    with OnStderr(terminal) as observer:
        net = load_net(model, options)
        run.require_kind(net.kind)
        demo = "demo" if net.source == "demo" else None
        data = _load_samples(run.data or (demo and "demo:train"), net, run, "--data")
        held_out = held_out or demo
        tested = None if held_out is None else _load_samples(held_out, net, run, "--held-out")
        for note in net.notes + data.notes:
            observer.note(note)
    record = TrainingRecord(out, net, data, tested, recipe, command=typed_command())
    batch = None if tested is None else tested.batch
    try:
        state = record.read_state()
        done = 0 if state is None else int(state["epochs"])
        if done:
            terminal.tell(f"Continuing after epoch {done} of {recipe.epochs}.")
        epochs = epochs_of(net, data.batch, recipe, held_out=batch, state=state)
        for epoch in _report_epochs(epochs, recipe.epochs, terminal):
            record.keep(epoch)
    except (Exception, KeyboardInterrupt):
        if record.epochs:
            text = "finished epochs are kept: run the same command with --resume to continue"
            terminal.tell(f"note: {text}")
        raise
    complete = save_model(net, out, options)
    record.write_record(finished=True)
    words = ["lipaudit", "audit", str(out), "--data", str(held_out or run.data)]
    advice = f"Measure the result: {shlex.join(words)}"
    if not complete:
        advice = f"Load {out}/model.safetensors in your py: factory."
    terminal.tell(f"Training finished. {advice}")
    emit(Subject(FACTS, read_record(out), lines=[str(out)]), output)


def _load_samples(spec: str | None, net: Net, run: RunOptions, option: str) -> Samples:
    from lipaudit.data.loading import load_data
    from lipaudit.engine.prepare import data_options

    if spec in (None, "random"):
        raise UsageError("training needs labelled samples", f"Add {option} DATA.")
    most = run.samples if option == "--data" else None
    samples = load_data(spec, net, data_options(run, most or sys.maxsize))
    # Training uses all samples: a note that these are fewer than sys.maxsize is useless.
    kept = tuple(note for note in samples.notes if note.code != "fewer-samples")
    return replace(samples, notes=kept)


def _report_epochs(epochs: Iterable[Epoch], total: int, terminal: Terminal) -> Iterator[Epoch]:
    """Yield the epochs unchanged, and print a line for each on stderr."""
    # A resumed run starts at a later epoch: only epochs of this process are timed.
    start, first = time.monotonic(), None
    for epoch in epochs:
        yield epoch
        first = first or epoch.number
        left = (time.monotonic() - start) / (epoch.number - first + 1) * (total - epoch.number)
        facts = [f"loss {epoch.loss:.4g}"]
        facts += [] if epoch.penalty is None else [f"penalty {epoch.penalty:.4g}"]
        facts += [] if epoch.accuracy is None else [f"held out {epoch.accuracy:.1%}"]
        line = f"epoch {epoch.number}/{total}: {', '.join(facts)}; about {left:.0f} s left"
        terminal.tell(line)
