"""The commands that measure a model: one per measure, created from its options."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.options import Extent, ModelArgument, Output, Terminal
from lipaudit.errors import ExitCode, LipauditError, UsageError
from lipaudit.measures import option_types
from lipaudit.measures.base import MeasureOptions
from lipaudit.settings import RunOptions

if TYPE_CHECKING:
    from lipaudit.tables import Report

MEASURING = "Measure a checkpoint"


def _command(name: str, options_type: type[MeasureOptions]) -> Callable[..., None]:
    """Return the body of a measure's command; its help is the docstring of its options."""

    def measure(
        model: str, options: MeasureOptions, run: RunOptions, output: Output, terminal: Terminal
    ) -> None:
        from lipaudit.api import open_job
        from lipaudit.cli.emit import check_outputs, emit
        from lipaudit.cli.progress import OnStderr
        from lipaudit.engine.execute import run_job
        from lipaudit.engine.launcher import find_place
        from lipaudit.engine.prepare import Request
        from lipaudit.report import REPORT

        check_outputs(output, REPORT)
        kept = output.format == "json" or any(path.suffix == ".json" for path in output.output)
        if run.shard and not kept:
            number, of = run.shard
            raise UsageError(
                f"--shard {number}/{of}: a shard must be written as JSON to be merged later",
                f"Add -o shard-{number}.json.",
            )
        request = Request(model, {name: options}, run, command=typed_command(), place=find_place())
        with (
            OnStderr(terminal) as observer,
            open_job(model, request) as job,
            run_job(job, observer) as report,
        ):
            if report is None:
                return
            emit(report, output)
        require_whole({model: report}, "Run the same command with --resume to measure the rest.")

    measure.__doc__ = options_type.__doc__
    usual = {"samples": str(options_type.samples)}
    measure.__annotations__ |= {
        "model": ModelArgument,
        "options": options_type,
        "run": Annotated[RunOptions, usual],
    }
    return measure


# This includes plug-ins: their commands are created in the same way.
for _name, _options in option_types().items():
    command(_name, panel=MEASURING)(_command(_name, _options))


def require_alone(what: str, run: RunOptions | None = None, *, limited: bool = False) -> None:
    """Refuse shards, launchers or time limits for work that one process does as a whole.

    Args:
        what: the work, as a text after "not for".
        run: the shared options; None: only several processes are refused.
        limited: whether the work observes time limits.

    Raises:
        UsageError: a shard, several processes or a time limit is requested.
    """
    from lipaudit.engine.launcher import find_place

    refused = {"several processes": find_place() is not None}
    if run is not None:
        refused |= {
            "--shard": run.shard is not None,
            "--time-limit": run.time_limit is not None and not limited,
        }
    for name, given in refused.items():
        if given:
            raise UsageError(
                f"{name}: only when one MODEL is measured, not for {what}",
                "Leave it out. One process: no srun, and RANK and WORLD_SIZE unset.",
            )


def typed_command() -> str:
    """Return the command as typed."""
    return shlex.join(["lipaudit", *sys.argv[1:]])


@command("merge", panel=MEASURING)
def merge(
    reports: Annotated[
        list[Path], typer.Argument(metavar="SHARD", help="Reports of commands with --shard.")
    ],
    output: Output,
    extent: Extent,
    terminal: Terminal,
) -> None:
    """Make one report of all shards of a run: what one process would have written.

    Every command that measures takes --shard i/n: each of n processes, wherever they run, measures
    a part of the samples. Shards of different runs are refused.

    [dim]Examples:[/]
      [cyan]lipaudit attack ./vit --data val/ --eps 2/255 --shard 1/4 -o shard-1.json[/]
      [cyan]lipaudit merge shard-*.json -o all.json -o all.html[/]
    """
    from lipaudit import schema
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.engine.results import merge as merge_shards
    from lipaudit.report import REPORT

    check_outputs(output, REPORT)
    report = merge_shards([schema.load(path) for path in reports], command=typed_command())
    emit(report, output, always=False, details=extent.details)
    again = "Measure the failed shards again, then merge all shards."
    require_whole({report.run.model.spec: report}, again)


def require_whole(reports: Mapping[str, Report], again: str) -> None:
    """End with an exit code if reports are incomplete, after they are written.

    The code is the first failure's, or else that of the time limit.

    Args:
        reports: the written reports, by model.
        again: the hint.

    Raises:
        LipauditError: some measures failed or ran out of time; the reports have the others.
    """
    faults = {(m, n): fault for m, r in reports.items() for n, fault in r.failures.items()}
    left = [
        f"{count} samples of {n}" for r in reports.values() for n, count in r.unmeasured.items()
    ]
    # A failure outweighs a time limit: its exit code tells what to fix.
    if faults:
        several = len(reports) > 1
        reasons = [
            f"{f'{model}: ' * several}{name} failed: {fault.reason}"
            for (model, name), fault in faults.items()
        ]
        first = next(iter(faults.values()))
        advice = f"{first.advice} {again}".strip()
        raise LipauditError(
            f"the report is partial: {'; '.join(reasons)}", advice, first.exit_code
        )
    if left:
        text = f"the report is partial: the time limit ended the run before {', '.join(left)}"
        raise LipauditError(text, again, ExitCode.TIME_LIMIT)
