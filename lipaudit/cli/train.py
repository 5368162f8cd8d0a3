"""The command `train`: fine-tune a checkpoint, and go on where it was stopped."""

from __future__ import annotations

import io
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipaudit import __version__
from lipaudit.cli.app import command
from lipaudit.cli.options import Common, ModelSpec
from lipaudit.errors import EvaluationError, InputError, UsageError

if TYPE_CHECKING:
    from lipaudit.data.loading import Samples
    from lipaudit.models.net import Net
    from lipaudit.models.spec import LoadOptions
    from lipaudit.train import Epoch, Recipe

CHECKPOINT, RECORD = "checkpoint.pt", "train.json"
TAKEN = (CHECKPOINT, RECORD, "config.json", "model.safetensors")
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
    resume: Annotated[bool, typer.Option("--resume", help="Go on in --out.")] = False,
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
      [cyan]lipaudit train ./vit --data train/ --adversarial pgd --eps 2/255[/]
    """
    given: dict[str, object] = {"penalty": penalty, "k": k, "weight": weight}
    given |= {"reduction": reduction, "adversarial": adversarial, "eps": eps, "steps": steps}
    given |= {"epochs": epochs, "optimizer": optimizer, "lr": lr, "momentum": momentum}
    given |= {"weight_decay": weight_decay, "schedule": schedule}
    given |= {"flip": flip, "shift": shift, "mixup": mixup, "cutmix": cutmix}
    common = common.resolved()
    recipe = _recipe(common, given)
    _check_target(out, resume=resume)
    _train(model, common, recipe, held_out, out)


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


def _check_target(out: Path, *, resume: bool) -> None:
    """Refuse to write over another run or a model, or to go on where there is nothing."""
    if resume and not (out / CHECKPOINT).exists():
        raise UsageError(f"{out} holds nothing to resume", "Leave --resume out.")
    held = next((name for name in TAKEN if (out / name).exists()), None)
    if held and not resume:
        raise UsageError(
            f"{out} holds {held} already",
            "Give another --out, or --resume to go on with the run in it.",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"cannot write to {out}: {error.strerror}") from None


def _train(model: str, common: Common, recipe: Recipe, held_out: str | None, out: Path) -> None:
    from lipaudit.cli.run import load_options, tell
    from lipaudit.models.loading import load
    from lipaudit.train import train as run

    options = load_options(common)
    net = load(model, options)
    demo = net.info.source == "demo"
    data = _samples(common.data or ("demo:train" if demo else None), net, common, "--data")
    check = held_out or ("demo" if demo else None)
    tested = None if check is None else _samples(check, net, common, "--held-out")
    tell(common, net.info.notes + data.notes)
    record = _Record(out, net, data, tested, recipe)
    state = record.resumed()
    if state is not None and not common.quiet:
        typer.echo(f"Going on after epoch {state['epochs']} of {recipe.epochs}.", err=True)
    batch = None if tested is None else tested.batch
    epochs = run(net, data.batch, recipe, held_out=batch, state=state)
    for epoch in _told(epochs, recipe.epochs, quiet=common.quiet):
        record.keep(epoch)
    complete = _saved(net, out, options)
    record.finish()
    _farewell(out, complete, quiet=common.quiet)


def _samples(spec: str | None, net: Net, common: Common, option: str) -> Samples:
    from dataclasses import replace

    from lipaudit.cli.run import data_options
    from lipaudit.data.loading import load_data

    if spec in (None, "random"):
        raise UsageError("training needs labelled samples", f"Name them with {option}.")
    most = common.samples if option == "--data" else None
    samples = load_data(spec, net, data_options(common, most or sys.maxsize))
    kept = tuple(note for note in samples.notes if note.code != "fewer-samples")
    return replace(samples, notes=kept)


def _saved(net: Net, out: Path, options: LoadOptions) -> bool:
    """Write the model, each file whole or not at all; return whether `out` is now a MODEL."""
    from lipaudit.models.saving import save

    try:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            complete = save(net, Path(folder), options)
            for path in [p for p in Path(folder).rglob("*") if p.is_file()]:
                target = out / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
    except OSError as error:
        raise EvaluationError(f"cannot write to {out}: {error.strerror}") from None
    return complete


class _Record:
    """The directory of a run: a checkpoint after every epoch, and a record beside it."""

    def __init__(
        self, out: Path, net: Net, data: Samples, held_out: Samples | None, recipe: Recipe
    ) -> None:
        self.out, self.device = out, str(net.device)
        self.notes = [note.text for note in net.info.notes + data.notes]
        self.same: dict[str, dict[str, Any] | None] = {
            "model": {
                "spec": net.info.spec,
                "weights_sha256": net.info.weights_sha256,
                "preprocess": dict(net.info.preprocess),
                "dtype": str(net.dtype).removeprefix("torch."),
            },
            "data": _described(data),
            "held_out": None if held_out is None else _described(held_out),
            "recipe": recipe.model_dump(),
        }
        self.epochs: list[dict[str, Any]] = []

    def resumed(self) -> dict[str, Any] | None:
        """Return the state of an interrupted run, None for a new one.

        Raises:
            UsageError: the run was another one.
            InputError: the checkpoint is damaged.
        """
        import torch

        if not (self.out / CHECKPOINT).exists():
            return None
        try:
            stored = torch.load(self.out / CHECKPOINT, weights_only=True, map_location="cpu")
            kept, self.epochs = stored["run"], stored["epochs"]
        except Exception as error:  # pickle, zip and torch have exceptions of their own
            raise InputError(f"{self.out / CHECKPOINT} is damaged ({error})") from None
        for name, value in self.same.items():
            if kept.get(name) != value:
                raise UsageError(
                    f"{self.out} was trained with another {name}: "
                    f"{_difference(kept.get(name) or {}, value or {})}",
                    "Repeat the command of the run, or give another --out.",
                )
        return dict(stored["state"])

    def keep(self, epoch: Epoch) -> None:
        """Write an epoch: the record, and all that is needed to go on."""
        import torch

        from lipaudit.cli.emit import write

        facts = {
            name: getattr(epoch, name) for name in ("number", "loss", "penalty", "accuracy", "lr")
        }
        self.epochs.append(facts)
        stored = {"run": self.same, "epochs": self.epochs, "state": epoch.state}
        buffer = io.BytesIO()
        torch.save(stored, buffer)
        write(self.out / CHECKPOINT, buffer.getvalue())
        self._write(finished=False)

    def finish(self) -> None:
        """Write that the run is complete."""
        self._write(finished=True)

    def _write(self, *, finished: bool) -> None:
        from lipaudit.cli.emit import write
        from lipaudit.cli.run import versions

        record = {
            "schema": "lipaudit.train",
            "command": shlex.join(["lipaudit", *sys.argv[1:]]),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "lipaudit": __version__,
            "versions": versions(),
            "device": self.device,
            "notes": self.notes,
            **self.same,
            "finished": finished,
            "epochs": self.epochs,
        }
        write(self.out / RECORD, (json.dumps(record, indent=2) + "\n").encode())


def _described(samples: Samples) -> dict[str, Any]:
    return {
        "spec": samples.spec,
        "samples": len(samples.batch),
        "suite_id": samples.suite_id,
    }


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    key = next(key for key in {**before, **now} if before.get(key) != now.get(key))
    return f"{key} {before.get(key)}, not {now.get(key)}"


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
