"""The command `train`: fine-tune a checkpoint, and go on where it was stopped."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipaudit.cli.app import command
from lipaudit.cli.options import Common, ModelSpec
from lipaudit.cli.trained import Record, check_target, save_model
from lipaudit.errors import UsageError

if TYPE_CHECKING:
    from lipaudit.data.sources import Samples
    from lipaudit.models.net import Net
    from lipaudit.train import Epoch, Recipe

NEEDS = {
    "k": ("penalty", ("jasmin",)),
    "reduction": ("penalty", ("jasmin",)),
    "weight": ("penalty", ("jasmin", "specformer")),
    "eps": ("adversarial", ("pgd",)),
    "steps": ("adversarial", ("pgd",)),
    "momentum": ("optimizer", ("sgd",)),
}
"""Options that do nothing unless another one has a certain value."""


def _option(help: str, panel: str) -> Any:
    return typer.Option(help=help, rich_help_panel=panel)


PENALTY, ADVERSARIAL = "Penalty", "Adversarial training"
DESCENT, IMAGES = "Optimization", "Augmentation of images"


@command("train", panel="Improve a checkpoint")
def train(
    model: ModelSpec,
    common: Common,
    out: Annotated[Path, typer.Option(help="Directory of the result.")] = Path("trained"),
    classes: Annotated[
        int | None,
        typer.Option(help="Of the data: a model of another number gets a new, random classifier."),
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Data to measure the accuracy on after every epoch.")
    ] = None,
    penalty: Annotated[
        str | None, _option("jasmin or specformer; none if not given.", PENALTY)
    ] = None,
    k: Annotated[int | None, _option("Of JaSMin: 0, or more than 1 (0).", PENALTY)] = None,
    weight: Annotated[float | None, _option("Factor in the loss (0.01).", PENALTY)] = None,
    reduction: Annotated[
        str | None, _option("Of JaSMin over rows: mean or max (mean).", PENALTY)
    ] = None,
    adversarial: Annotated[
        str | None, _option("pgd: train on adversarial examples.", ADVERSARIAL)
    ] = None,
    eps: Annotated[str | None, _option("Their L-inf radius (2/255).", ADVERSARIAL)] = None,
    steps: Annotated[int | None, _option("Their PGD steps (5).", ADVERSARIAL)] = None,
    epochs: Annotated[int | None, _option("Passes over the data (40).", DESCENT)] = None,
    optimizer: Annotated[str | None, _option("sgd or adamw (sgd).", DESCENT)] = None,
    lr: Annotated[float | None, _option("Highest learning rate (0.01).", DESCENT)] = None,
    momentum: Annotated[float | None, _option("Of sgd (0.9).", DESCENT)] = None,
    weight_decay: Annotated[float | None, _option("Of the optimizer (1e-4).", DESCENT)] = None,
    schedule: Annotated[str | None, _option("cosine or onecycle (cosine).", DESCENT)] = None,
    flip: Annotated[bool | None, _option("Mirror at random (on).", IMAGES)] = None,
    shift: Annotated[int | None, _option("Move by up to so many pixels (0).", IMAGES)] = None,
    mixup: Annotated[float | None, _option("Alpha of MixUp, 0 for none (0.8).", IMAGES)] = None,
    cutmix: Annotated[float | None, _option("Alpha of CutMix, 0 for none (1).", IMAGES)] = None,
) -> None:
    """Fine-tune a classifier with the JaSMin or Specformer penalty, or against attacks.

    The defaults, in brackets, are the recipe of Yudin 2025, in batches of 512. Every epoch is
    kept: after an interruption the same command with --resume goes on, to the same result.

    [dim]Examples:[/]
      [cyan]lipaudit train demo --penalty jasmin --epochs 5 --lr 1e-3 --no-flip[/]
      [cyan]lipaudit train ./vit --data train/ --penalty jasmin --k 10 --weight 1e-2[/]
      [cyan]lipaudit train timm:vit_small_patch16_224 --data flowers/ --classes 17[/]
      [cyan]lipaudit train ./vit --data train/ --adversarial pgd --eps 2/255[/]
    """
    given: dict[str, object] = {"penalty": penalty, "k": k, "weight": weight}
    given |= {"reduction": reduction, "adversarial": adversarial, "eps": eps, "steps": steps}
    given |= {"epochs": epochs, "optimizer": optimizer, "lr": lr, "momentum": momentum}
    given |= {"weight_decay": weight_decay, "schedule": schedule}
    given |= {"flip": flip, "shift": shift, "mixup": mixup, "cutmix": cutmix}
    common = common.resolved()
    recipe = _recipe(common, given)
    if classes is not None and classes < 2:
        raise UsageError(f"--classes {classes}: a classifier has 2 at least")
    check_target(out, resume=common.resume)
    _train(model, common, recipe, Task(classes, held_out, out))


def _recipe(common: Common, given: Mapping[str, object]) -> Recipe:
    from lipaudit.cli.measure import options_of
    from lipaudit.train import Recipe

    if common.output or common.format:
        raise UsageError(
            "train writes a directory", "Name it with --out; -o and -f are for reports."
        )
    said = {name: value for name, value in given.items() if value is not None}
    size = common.batch_size or "auto"
    if size != "auto":
        said["batch_size"] = size
    recipe = options_of(Recipe, common, said)
    for name in NEEDS.keys() & said.keys():
        other, values = NEEDS[name]
        if getattr(recipe, other) not in values:
            raise UsageError(f"--{name} goes with --{other} {' or '.join(values)}")
    return recipe


@dataclass(frozen=True)
class Task:
    """What a run is for, besides its recipe."""

    classes: int | None
    held_out: str | None
    out: Path


def _train(model: str, common: Common, recipe: Recipe, task: Task) -> None:
    from lipaudit.cli.job import load_options, tell
    from lipaudit.models.sources.loading import load
    from lipaudit.train import train as run

    options = replace(load_options(common), classes=task.classes)
    net = load(model, options)
    demo = net.info.source == "demo"
    data = _samples(common.data or ("demo:train" if demo else None), net, common, "--data")
    check = task.held_out or ("demo" if demo else None)
    tested = None if check is None else _samples(check, net, common, "--held-out")
    tell(common, net.info.notes + data.notes)
    record = Record(task.out, net, data, tested, recipe)
    state = record.resumed()
    if state is not None and not common.quiet:
        typer.echo(f"Going on after epoch {state['epochs']} of {recipe.epochs}.", err=True)
    batch = None if tested is None else tested.batch
    epochs = run(net, data.batch, recipe, held_out=batch, state=state)
    for epoch in _told(epochs, recipe.epochs, quiet=common.quiet):
        record.keep(epoch)
    complete = save_model(net, task.out, options)
    record.finish()
    _farewell(task.out, complete, quiet=common.quiet)


def _samples(spec: str | None, net: Net, common: Common, option: str) -> Samples:
    from lipaudit.cli.job import data_options
    from lipaudit.data.sources import load_data

    if spec in (None, "random"):
        raise UsageError("training needs labelled samples", f"Name them with {option}.")
    most = common.samples if option == "--data" else None
    samples = load_data(spec, net, data_options(common, most or sys.maxsize))
    kept = tuple(note for note in samples.notes if note.code != "fewer-samples")
    return replace(samples, notes=kept)


def _told(epochs: Iterable[Epoch], total: int, *, quiet: bool) -> Iterator[Epoch]:
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
            typer.echo(line, err=True)


def _farewell(out: Path, complete: bool, *, quiet: bool) -> None:
    typer.echo(str(out))
    if quiet:
        return
    if complete:
        typer.echo(f"Trained. Measure it: lipaudit audit {shlex.quote(str(out))}", err=True)
    else:
        typer.echo(f"Trained. Load {out}/model.safetensors in your py: factory.", err=True)
