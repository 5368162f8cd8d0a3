"""The command `watch`: the checkpoints of a training, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.measure import MEASURING, require_alone, require_whole, typed_command
from lipaudit.cli.options import BY_MEASURE, Extent, Output, Terminal
from lipaudit.errors import InputError, LipauditError, UsageError, explain_error
from lipaudit.measures import AuditOptions
from lipaudit.settings import RunOptions

FOLDER = "lipaudit-checkpoints"
AGAIN = "Delete its report to measure it again."


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
) -> None:
    """Audit every checkpoint of a training, and show them side by side in their order.

    Checkpoints (checkpoint-100/, step_200.pt, epoch=3-step=600.ckpt...) are measured in the order
    of their steps, on the same samples. A report of each is kept in --run-dir: the next time only
    new checkpoints are measured.

    [dim]Examples:[/]
      [cyan]lipaudit watch trainer_output --data val/[/]
      [cyan]lipaudit watch weights/ --arch timm:vit_tiny_patch16_224 --data val/[/]
      [cyan]lipaudit watch out/ --data val/ --only jacobian,attack --eps 1/255 -o training.html[/]
    """
    from lipaudit.api import plan_audit
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.cli.progress import OnStderr
    from lipaudit.monitor.checkpoints import CheckpointFolder
    from lipaudit.report import REPORT, of_reports

    check_outputs(output, REPORT)
    require_alone("the course of a training", run)
    if not folder.is_dir():
        raise InputError(
            f"there is no directory {folder}", "Give a directory that holds checkpoints."
        )
    request = plan_audit("", options, run, demo=False, command=typed_command())
    where = options.run_dir or folder / FOLDER
    watched = CheckpointFolder(folder, request, where)
    pending = watched.list_pending()
    failed: dict[str, LipauditError] = {}
    interrupted: KeyboardInterrupt | None = None
    try:
        for number, checkpoint in enumerate(pending, 1):
            count = f"{number} of {len(pending)} new"
            terminal.tell(f"step {checkpoint.step}: {checkpoint.name} ({count})")
            try:
                with OnStderr(terminal) as observer:
                    watched.measure(checkpoint, observer)
            except UsageError:  # for every checkpoint
                raise
            except Exception as error:  # it may be incomplete: the others are measured
                failed[checkpoint.name] = explain_error(error)
    except KeyboardInterrupt as stop:
        interrupted = stop
    reports = watched.reports.load()
    if reports:
        page = watched.reports.draw(reports)
        emit(of_reports(*reports, by="order"), output, details=extent.details)
        terminal.tell(f"reports: {where}\npage:    {page}")
    if interrupted is not None:
        raise interrupted
    # Checkpoints that could not be measured decide the exit code; the others have reports.
    if failed:
        reasons = "; ".join(f"{name}: {fault.message}" for name, fault in failed.items())
        first = next(iter(failed.values()))
        raise LipauditError(
            f"not every checkpoint was measured: {reasons}", first.advice, first.exit_code
        )
    if not reports:
        raise InputError(
            f"{folder} holds no checkpoint with a step in its name",
            "Use names like checkpoint-100/, step_200.pt or epoch=3-step=600.ckpt.",
        )
    require_whole({each.run.model.spec: each for each in reports}, AGAIN)
