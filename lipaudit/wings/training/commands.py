"""The commands `train`, which fine-tunes a checkpoint, and `watch`, which measures its steps."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import BY_MEASURE, Extent, ModelArgument, Output, Terminal
from lipaudit.cli.measure import refuse_partial_run, require_whole, typed_command
from lipaudit.cli.output import check_outputs, emit, emit_facts
from lipaudit.errors import InputError, LipauditError, UsageError, explain_error
from lipaudit.measures import AuditOptions
from lipaudit.settings import RunOptions, spell_options
from lipaudit.wings.training.recipe import Recipe

if TYPE_CHECKING:
    from lipaudit.data.loading import Samples
    from lipaudit.models.net import Net
    from lipaudit.wings.training.loop import Epoch, TrainingRecord
    from lipaudit.wings.training.watching import CheckpointFolder

USUAL = {
    "batch_size": str(Recipe.model_fields["batch_size"].default),
    "data": "demo:train for demos",
    "samples": "all",
}
OUT = typer.Option(metavar="FOLDER", help="Folder for the model; -f and -o write its record.")
HELD_OUT = typer.Option(metavar="DATA", help="Data to measure the accuracy on after every epoch.")


def train(
    model: ModelArgument,
    recipe: Recipe,
    run: Annotated[RunOptions, USUAL],
    output: Output,
    terminal: Terminal,
    out: Annotated[Path, OUT] = Path("trained"),
    held_out: Annotated[str | None, HELD_OUT] = None,
) -> None:
    """Fine-tune a classifier with a penalty on attention, or against attacks.

    The defaults are the recipe of Yudin 2025, in batches of 512. Every epoch is
    kept: after an interruption the same command with --resume goes on, to the same result.

    Examples:
      lipaudit train demo --penalty jasmin --epochs 5 --lr 1e-3 --no-flip
      lipaudit train ./vit --data train/ --penalty jasmin --k 10 --weight 1e-2
      lipaudit train timm:vit_small_patch16_224 --data flowers/ --classes 17
      lipaudit train ./vit --data train/ --adversarial pgd --eps 2/255
    """
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.prepare import load_options
    from lipaudit.models.sources.loader import load_net
    from lipaudit.wings.training import loop

    refuse_partial_run("a training", run)
    if run.autocast is not None:
        raise UsageError("--autocast has no effect on train: it runs in --dtype", "Leave it out.")
    classes = _read_classes(run)
    # Without classes, because `load_options` would read a file of names for zero-shot classes.
    run = run.model_copy(update={"classes": None})
    options = replace(load_options(run), classes=classes)
    recipe = recipe.model_copy(
        update={"seed": run.seed, "batch_size": run.batch_size or recipe.batch_size}
    )
    check_outputs(output, forms=("lines", "record"))
    loop.check_target(out, resume=run.resume)
    with OnStderr(terminal) as observer:
        net = load_net(model, options)
        run.require_kind(net.kind)
        spec, held_out = _choose_data(net, run.data, held_out)
        data = _load_samples(spec, net, run, option="--data")
        test = None
        if held_out is not None:
            test = _load_samples(held_out, net, run, option="--held-out")
        for note in net.notes + data.notes:
            observer.note(note)
        record = loop.TrainingRecord(out, net, data, test, recipe, command=typed_command())
        _run_epochs(net, data, test, recipe, record, terminal)
    complete = loop.save_model(net, out, options)
    document = record.write_record(finished=True)
    command = _spell_audit(out, complete, model, run, held_out or run.data)
    terminal.tell(f"Training finished. Measure the result: {command}")
    emit_facts(document, output, lines=[str(out)])


def _read_classes(run: RunOptions) -> int | None:
    """Return --classes, which for this command is the number of classes of a new classifier."""
    classes = run.classes
    if classes is None:
        return None
    if not classes.isdecimal() or int(classes) < 2 or run.prompt:
        raise UsageError(
            f"--classes {classes}: train needs a number, at least 2 classes, and no --prompt"
        )
    return int(classes)


def _choose_data(
    net: Net, spec: str | None, held_out: str | None
) -> tuple[str | None, str | None]:
    """Return DATA to train on and DATA to measure on: as given, else those of a demo model."""
    if net.source == "demo":
        return spec or "demo:train", held_out or "demo"
    return spec, held_out


def _spell_audit(out: Path, complete: bool, model: str, run: RunOptions, data: str | None) -> str:
    """Return the command that measures a trained model, on the data it was tested on.

    Args:
        out: folder of the trained model.
        complete: whether the folder has a config.json with the architecture. For some models, such
            as a py: factory, only weights are saved: then options say how to load them.
        model: MODEL before the training.
        run: options of the training.
        data: DATA to measure on.
    """
    given = run.reading()  # the given options that say how a model is loaded
    if complete:
        path = out
        given.pop("arch", None)
        given.pop("model_kwargs", None)
    else:
        path = out / "model.safetensors"
        given |= {"arch": run.arch or model}
    options = spell_options(given)
    return shlex.join(["lipaudit", "audit", str(path), *options, "--data", str(data)])


def _run_epochs(
    net: Net,
    data: Samples,
    test: Samples | None,
    recipe: Recipe,
    record: TrainingRecord,
    terminal: Terminal,
) -> None:
    """Train, and record and print every epoch.

    If the record has the state of an interrupted run, the training goes on from there.
    """
    from lipaudit.wings.training import loop

    state = record.read_state()
    finished = 0
    if state is not None:
        finished = state["epochs"]
    if finished:
        terminal.tell(f"Continuing after epoch {finished} of {recipe.epochs}.")
    held_out = None if test is None else test.batch
    start = time.monotonic()  # only epochs of this process are timed
    try:
        for epoch in loop.train(net, data.batch, recipe, held_out=held_out, state=state):
            record.add(epoch)
            seconds = (time.monotonic() - start) / (epoch.number - finished)
            left = seconds * (recipe.epochs - epoch.number)
            terminal.tell(f"epoch {epoch.number}/{recipe.epochs}: {_format_figures(epoch, left)}")
    except (Exception, KeyboardInterrupt):
        if record.epochs:
            terminal.tell(
                "note: finished epochs are kept: run the same command with --resume to continue"
            )
        raise


def _format_figures(epoch: Epoch, left: float) -> str:
    """Return the figures of an epoch in words, and the seconds that are left."""
    facts = [f"loss {epoch.loss:.4g}"]
    if epoch.penalty is not None:
        facts.append(f"penalty {epoch.penalty:.4g}")
    if epoch.accuracy is not None:
        facts.append(f"held out {epoch.accuracy:.1%}")
    facts.append(f"about {left:.0f} s left")
    return ", ".join(facts)


def _load_samples(spec: str | None, net: Net, run: RunOptions, option: str) -> Samples:
    """Return the labelled samples of DATA.

    Args:
        spec: DATA as typed; None: it is missing.
        net: the model.
        run: options of the run; --samples limits only --data.
        option: the option that takes this DATA: --data or --held-out.
    """
    from lipaudit.data.loading import load_data
    from lipaudit.engine.prepare import data_options

    if spec in (None, "random"):
        raise UsageError("training needs labelled samples", f"Add {option} DATA.")
    most = run.samples if option == "--data" else None
    if most is not None:
        return load_data(spec, net, data_options(run, most))
    # All samples: sys.maxsize are requested, and the note that there are fewer is left out.
    samples = load_data(spec, net, data_options(run, sys.maxsize))
    notes = tuple(note for note in samples.notes if note.code != "fewer-samples")
    return replace(samples, notes=notes)


# Folder of the reports, inside that of the checkpoints.
REPORTS = "lipaudit-checkpoints"
FOLDER = typer.Argument(
    metavar="FOLDER", help="Folder with checkpoints whose names contain a step."
)


def watch(
    folder: Annotated[Path, FOLDER],
    options: AuditOptions,
    run: Annotated[RunOptions, BY_MEASURE],
    output: Output,
    extent: Extent,
    terminal: Terminal,
) -> None:
    """Audit every checkpoint of a training, and show them side by side in their order.

    Checkpoints (checkpoint-100/, step_200.pt, epoch=3-step=600.ckpt...) are measured in the order
    of their steps, on the same samples. A report of each is kept in --run-dir: the next time only
    new checkpoints are measured.

    Examples:
      lipaudit watch trainer_output --data val/
      lipaudit watch weights/ --arch timm:vit_tiny_patch16_224 --data val/
      lipaudit watch out/ --data val/ --only jacobian -o training.html
    """
    from lipaudit.api import plan_audit
    from lipaudit.report import REPORT, of_reports
    from lipaudit.wings.training.watching import CheckpointFolder

    check_outputs(output, forms=REPORT)
    refuse_partial_run("the course of a training", run)
    if not folder.is_dir():
        raise InputError(
            f"there is no directory {folder}", "Give a directory that holds checkpoints."
        )
    # Each checkpoint is measured by a copy of the request with its own model.
    request = plan_audit(model="", options=options, run=run, demo=False, command=typed_command())
    run_dir = options.run_dir or folder / REPORTS
    checkpoints = CheckpointFolder(folder, request, run_dir)
    failures, interruption = _measure_pending(checkpoints, terminal)
    reports = checkpoints.reports.load()
    if reports:
        page = checkpoints.reports.draw(reports)
        emit(of_reports(*reports, by="order"), output, details=extent.details)
        terminal.tell(f"reports: {run_dir}\npage:    {page}")
    if interruption is not None:
        raise interruption
    if failures:
        raise _join_failures(failures)
    if not reports:
        raise InputError(
            f"{folder} holds no checkpoint with a step in its name",
            "Use names like checkpoint-100/, step_200.pt or epoch=3-step=600.ckpt.",
        )
    by_checkpoint = {report.run.model.spec: report for report in reports}
    require_whole(by_checkpoint, "Delete its report to measure it again.")


def _join_failures(failures: Mapping[str, LipauditError]) -> LipauditError:
    """Return one error that names all checkpoints that failed, and why; the first has its code."""
    reasons = "; ".join(f"{name}: {error.message}" for name, error in failures.items())
    first = next(iter(failures.values()))
    text = f"not every checkpoint was measured: {reasons}"
    return LipauditError(text, first.advice, first.exit_code)


def _measure_pending(
    checkpoints: CheckpointFolder, terminal: Terminal
) -> tuple[dict[str, LipauditError], KeyboardInterrupt | None]:
    """Measure all checkpoints without a report, and write their reports.

    Returns:
        The failures by name of the checkpoint; and the interruption (Ctrl-C) that ended this
        early, to be raised again once the reports so far are shown.

    Raises:
        UsageError: an option is wrong, so that every checkpoint would fail.
    """
    from lipaudit.cli.progress import OnStderr

    pending = checkpoints.list_pending()
    failures: dict[str, LipauditError] = {}
    try:
        for number, checkpoint in enumerate(pending, 1):
            count = f"{number} of {len(pending)} new"
            terminal.tell(f"step {checkpoint.step}: {checkpoint.name} ({count})")
            try:
                with OnStderr(terminal) as observer:
                    checkpoints.measure(checkpoint, observer)
            except UsageError:
                raise
            except Exception as error:  # a broken checkpoint, for example: measure the others
                failures[checkpoint.name] = explain_error(error)
    except KeyboardInterrupt as interruption:
        return failures, interruption
    return failures, None
