"""The command `watch`: the checkpoints of a training, one after the other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.audit import audit_request
from lipaudit.cli.measure import MEASURING, require_alone, require_whole
from lipaudit.cli.options import BY_MEASURE, Extent, Output, Terminal
from lipaudit.cli.streams import say
from lipaudit.errors import InputError, LipauditError, explain_error
from lipaudit.measures import AuditOptions
from lipaudit.settings import RunOptions, Settings, option
from lipaudit.settings.option import Need
from lipaudit.settings.parsing import Names

if TYPE_CHECKING:
    from lipaudit.cli.progress import OnStderr
    from lipaudit.monitor.checkpoints import CheckpointFolder
    from lipaudit.monitor.loggers import Logger

FOLDER = "lipaudit-checkpoints"
PANEL = "Watch"
TRIES = 3
"""Number of attempts to read a checkpoint that may still be incomplete."""
AGAIN = "Delete its report to measure it again."


def _list_loggers() -> tuple[str, ...]:
    from lipaudit.monitor.loggers import LOGGERS

    return tuple(LOGGERS)


class Following(Settings):
    """Whether it waits for more checkpoints, and where the figures go besides."""

    follow: bool = option(False, "Keep waiting for new checkpoints until Ctrl-C.", panel=PANEL)
    poll: float = option(
        10.0,
        "Seconds between two checks for new checkpoints.",
        panel=PANEL,
        need=Need("--follow", lambda options: options.follow),
        gt=0,
    )
    logger: Names = option(
        None,
        "Also log to: tensorboard, mlflow, wandb (comma-separated).",
        panel=PANEL,
        values=_list_loggers,
    )


@command("watch", panel=MEASURING)
def watch(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder with checkpoints whose names contain a step."),
    ],
    options: AuditOptions,
    run: Annotated[RunOptions, BY_MEASURE],
    output: Output,
    extent: Extent,
    terminal: Terminal,
    following: Following,
) -> None:
    """Audit every checkpoint of a training, and show them side by side in their order.

    Checkpoints (checkpoint-100/, step_200.pt, epoch=3-step=600.ckpt...) are measured in the order
    of their steps, on the same samples. A report of each is kept in --run-dir: the next time only
    new checkpoints are measured.

    [dim]Examples:[/]
      [cyan]lipaudit watch trainer_output --data val/[/]
      [cyan]lipaudit watch weights/ --arch timm:vit_tiny_patch16_224 --data val/ --follow[/]
      [cyan]lipaudit watch out/ --data val/ --only jacobian,attack --eps 1/255 -o training.html[/]
    """
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.cli.progress import OnStderr
    from lipaudit.monitor.checkpoints import CheckpointFolder
    from lipaudit.monitor.loggers import loggers
    from lipaudit.report import REPORT, of_reports

    check_outputs(output, REPORT)
    require_alone(run, "the course of a training", unlimited=True)
    if not folder.is_dir():
        raise InputError(
            f"there is no directory {folder}", "Give a directory that holds checkpoints."
        )
    request = audit_request("", options, run, demo=False)
    where = options.run_dir or folder / FOLDER
    watched = CheckpointFolder(folder, request, where, tries=TRIES if following.follow else 1)
    logs = loggers(following.logger or (), where)
    observer = OnStderr("", quiet=terminal.quiet, verbose=terminal.verbose)
    stopped: KeyboardInterrupt | None = None
    waiting = False
    try:
        _measure_pending(watched, logs, observer)
        while following.follow:
            waiting = True
            time.sleep(following.poll)
            waiting = False
            _measure_pending(watched, logs, observer)
    except KeyboardInterrupt as stop:
        # Ctrl-C while waiting ends --follow; SIGTERM has an argument and is an interruption.
        stopped = None if waiting and not stop.args else stop
    reports = watched.reports.load()
    if reports:
        page = watched.reports.draw(reports)
        emit(of_reports(*reports, by="order"), output, details=extent.details)
        terminal.tell(f"reports: {where}\npage:    {page}")
    if stopped is not None:
        raise stopped
    # Checkpoints that could not be measured decide the exit code; the others have reports.
    if faults := {name: explain_error(error) for name, error in watched.failed.items()}:
        reasons = "; ".join(f"{name}: {fault.message}" for name, fault in faults.items())
        first = next(iter(faults.values()))
        raise LipauditError(
            f"not every checkpoint was measured: {reasons}", first.advice, first.exit_code
        )
    if not reports:
        raise InputError(
            f"{folder} holds no checkpoint with a step in its name",
            "Use names like checkpoint-100/, step_200.pt or epoch=3-step=600.ckpt.",
        )
    require_whole({each.run.model.spec: each for each in reports}, AGAIN)


def _measure_pending(watched: CheckpointFolder, logs: list[Logger], observer: OnStderr) -> None:
    from lipaudit.monitor.loggers import collect_figures

    pending = watched.pending()
    for number, checkpoint in enumerate(pending, 1):
        if not observer.quiet:
            said = f"step {checkpoint.step}: {checkpoint.name} ({number} of {len(pending)} new)"
            say(said)
        observer.model = checkpoint.name
        with observer:
            report = watched.measure(checkpoint, observer)
        figures = collect_figures(report) if report else {}
        for log in logs if figures else ():
            log(figures, checkpoint.step)
