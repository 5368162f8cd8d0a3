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
    from lipaudit.train import Epoch, Recipe

CHECKPOINT, RECORD = "checkpoint.pt", "train.json"


@command("train", panel="Improve a checkpoint")
def train(
    model: ModelSpec,
    common: Common,
    out: Annotated[Path, typer.Option(help="Directory of the result.")] = Path("trained"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on in --out.")] = False,
    held_out: Annotated[
        str | None, typer.Option(help="Data to measure the accuracy on after every epoch.")
    ] = None,
    penalty: Annotated[str | None, typer.Option(help="jasmin or specformer.")] = None,
    k: Annotated[int | None, typer.Option(help="Of JaSMin: 0, or more than 1.")] = None,
    weight: Annotated[float | None, typer.Option(help="Factor of the penalty.")] = None,
    reduction: Annotated[str | None, typer.Option(help="Over rows: mean or max.")] = None,
    adversarial: Annotated[
        str | None, typer.Option(help="pgd: train on adversarial examples.")
    ] = None,
    eps: Annotated[str | None, typer.Option(help="Their L-inf radius: 2/255.")] = None,
    steps: Annotated[int | None, typer.Option(help="Their PGD steps.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adamw.")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of the optimizer.")] = None,
    schedule: Annotated[str | None, typer.Option(help="cosine or onecycle.")] = None,
    flip: Annotated[bool | None, typer.Option(help="Mirror images at random.")] = None,
    shift: Annotated[int | None, typer.Option(help="Move images by up to so many pixels.")] = None,
    mixup: Annotated[float | None, typer.Option(help="Alpha of MixUp; 0 for none.")] = None,
    cutmix: Annotated[float | None, typer.Option(help="Alpha of CutMix; 0 for none.")] = None,
) -> None:
    """Fine-tune a classifier with the JaSMin or Specformer penalty, or against attacks.

    The defaults are the recipe of Yudin 2025: 40 epochs of SGD (momentum 0.9, weight decay 1e-4,
    cosine schedule, batches of 512), flips, CutMix and MixUp. Every epoch is kept: after an
    interruption the same command with --resume goes on, to the same result.

    [dim]Examples:[/]
      [cyan]lipaudit train demo --penalty jasmin --epochs 5 --lr 1e-3 --no-flip[/]
      [cyan]lipaudit train ./vit --data train/ --penalty jasmin --k 10 --weight 1e-2[/]
      [cyan]lipaudit train ./vit --data train/ --adversarial pgd --eps 2/255 --out robust[/]
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
    return options_of(Recipe, common, said)


def _check_target(out: Path, *, resume: bool) -> None:
    """Refuse to write over another run, or to go on where there is nothing."""
    there = (out / RECORD).exists()
    if there and not resume:
        raise UsageError(f"{out} holds a training run", "Add --resume to go on, or give --out.")
    if resume and not (out / CHECKPOINT).exists():
        raise UsageError(f"{out} holds nothing to resume", "Leave --resume out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"cannot write to {out}: {error.strerror}") from None


def _train(model: str, common: Common, recipe: Recipe, held_out: str | None, out: Path) -> None:
    from lipaudit.cli.emit import write
    from lipaudit.cli.run import load_options, tell
    from lipaudit.models.loading import load
    from lipaudit.models.saving import save
    from lipaudit.train import train as run

    options = load_options(common)
    net = load(model, options)
    demo = net.info.source == "demo"
    data = _samples(common.data or ("demo:train" if demo else None), net, common)
    check = held_out or ("demo" if demo else None)
    tested = None if check is None else _samples(check, net, common).batch
    tell(common, net.info.notes + data.notes)
    record = _Record(out, model, net, data, recipe)
    epochs = run(net, data.batch, recipe, held_out=tested, state=record.resumed())
    for epoch in _told(epochs, recipe.epochs, quiet=common.quiet):
        record.keep(epoch)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        complete = save(net, Path(folder), options)
        for path in Path(folder).iterdir():
            write(out / path.name, path.read_bytes())
    record.finish()
    _farewell(out, complete, quiet=common.quiet)


def _samples(spec: str | None, net: Net, common: Common) -> Samples:
    from dataclasses import replace

    from lipaudit.cli.run import data_options
    from lipaudit.data.loading import load_data

    if spec in (None, "random"):
        raise UsageError("training needs labelled samples", "Name them with --data.")
    samples = load_data(spec, net, data_options(common, common.samples or sys.maxsize))
    kept = tuple(note for note in samples.notes if note.code != "fewer-samples")
    return replace(samples, notes=kept)


class _Record:
    """The directory of a run: a checkpoint after every epoch, and a record beside it."""

    def __init__(self, out: Path, model: str, net: Net, data: Samples, recipe: Recipe) -> None:
        self.out = out
        self.same: dict[str, dict[str, Any]] = {
            "model": {"spec": model, "weights_sha256": net.info.weights_sha256},
            "data": {"spec": data.spec, "samples": len(data.batch), "suite_id": data.suite_id},
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
            kept = stored["run"]
        except Exception as error:  # pickle, zip and torch have exceptions of their own
            raise InputError(f"{self.out / CHECKPOINT} is damaged ({error})") from None
        for name, value in self.same.items():
            for key in value:
                if kept[name].get(key) != value[key]:
                    raise UsageError(
                        f"{self.out} was trained with another {name}: {key} "
                        f"{kept[name].get(key)}, not {value[key]}",
                        "Repeat the command of the run, or give another --out.",
                    )
        self.epochs = stored["epochs"]
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
            **self.same,
            "finished": finished,
            "epochs": self.epochs,
        }
        write(self.out / RECORD, (json.dumps(record, indent=2) + "\n").encode())


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
    how = f"lipaudit audit {out}" if complete else f"load {out}/model.safetensors in a py: factory"
    typer.echo(str(out))
    if not quiet:
        typer.echo(f"Trained. What changed: {how}", err=True)
