"""The commands that measure a model: one for each measure, made from its options."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.options import Extent, ModelArgument, Output, Plain, Shown, Terminal
from lipaudit.cli.streams import say
from lipaudit.errors import ExitCode, LipauditError, UsageError
from lipaudit.settings import MeasureOptions, RunOptions, option_types

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Job, Request
    from lipaudit.engine.ranks import Ranks
    from lipaudit.results import Report

MEASURING = "Measure a checkpoint"


def _command(name: str, options_type: type[MeasureOptions]) -> Callable[..., None]:
    """Return the body of a measure's command; its help is the docstring of its options."""

    def measure(
        model: str, options: MeasureOptions, run: RunOptions, output: Output, terminal: Terminal
    ) -> None:
        outline = options.outline(run.samples or options.samples)
        if outline and not terminal.quiet:
            say(f"{name} of {model}: {outline}")
        run_measures(model, {name: options}, run, output, terminal)

    measure.__doc__ = options_type.__doc__
    measure.__annotations__ |= {"model": ModelArgument, "options": options_type}
    return measure


for _name, _options in option_types().items():
    _usual = {"samples": str(_options.samples)}
    command(_name, panel=MEASURING, usual=_usual)(_command(_name, _options))


def run_measures(
    model: str,
    measures: Mapping[str, MeasureOptions],
    run: RunOptions,
    output: Output,
    terminal: Terminal,
) -> None:
    """Run measures on a model and write what was asked for."""
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.merging import executed_together
    from lipaudit.engine.prepare import Request
    from lipaudit.report import DRAWN, REPORT

    drawn = any(options.draws for options in measures.values())
    check_outputs(output, DRAWN if drawn else REPORT)
    require_mergeable(run, output)
    request = Request(model, measures, run, command=typed_command())
    with prepare_run(request, quiet=terminal.quiet) as (job, ranks):
        with (
            OnStderr(model, quiet=terminal.quiet) as observer,
            executed_together(job, observer, ranks) as report,
        ):
            if report is None:
                return
            emit(report, output)
        require_whole({model: report}, "The same command with --resume measures the rest.")


@contextmanager
def prepare_run(request: Request, *, quiet: bool) -> Iterator[tuple[Job, Ranks | None]]:
    """Load what this process measures, and meet the other processes of the run, if any."""
    from lipaudit.cli.progress import mute_libraries
    from lipaudit.engine.place import placed, share_run
    from lipaudit.engine.prepare import prepare
    from lipaudit.engine.ranks import join

    place = placed()
    with mute_libraries(quiet=quiet):
        if place is not None:
            request = replace(request, run=share_run(request.run, place))
        job = prepare(request)
    if place is None:
        yield job, None
    else:
        with join(place) as ranks:
            yield job, ranks


def require_mergeable(run: RunOptions, output: Output) -> None:
    """Refuse a shard of which nothing is kept that can be merged.

    Raises:
        UsageError: no JSON is asked for.
    """
    kept = output.format == "json" or any(path.suffix == ".json" for path in output.output)
    if run.shard and not kept:
        number, of = run.shard
        raise UsageError(
            f"--shard {number}/{of}: shards are merged from their JSON, and none is written",
            f"Add -o shard-{number}.json.",
        )


def require_alone(run: RunOptions, what: str) -> None:
    """Refuse to share out what one process does.

    Args:
        run: its options.
        what: it does; to be read after "not for".

    Raises:
        UsageError: this process is to measure some of the samples.
    """
    if run.shard:
        text = f"--shard is for measuring one MODEL, not for {what}"
        raise UsageError(text, "Leave it out.")
    require_one_process(what)


def require_one_process(what: str) -> None:
    """Refuse a launcher of several where one process does all.

    Args:
        what: it does; to be read after "not for".

    Raises:
        UsageError: there is one.
    """
    from lipaudit.engine.place import placed

    if placed():
        raise UsageError(
            f"a launcher of several processes is for measuring one MODEL, not for {what}",
            "Run it without RANK and WORLD_SIZE, or srun.",
        )


def require_unlimited(run: RunOptions, what: str) -> None:
    """Refuse a time limit where nothing keeps to it.

    Args:
        run: its options.
        what: is done; to be read after "not for".

    Raises:
        UsageError: there is one.
    """
    if run.time_limit:
        text = f"--time-limit is for measuring a MODEL, not for {what}"
        raise UsageError(text, "Leave it out; what is interrupted goes on later.")


def typed_command() -> str:
    """Return the command as it was typed."""
    return shlex.join(["lipaudit", *sys.argv[1:]])


@command("merge", panel=MEASURING)
def merge(
    reports: Annotated[
        list[Path], typer.Argument(metavar="SHARD", help="Reports of commands with --shard.")
    ],
    output: Shown,
    extent: Extent,
    terminal: Plain,
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
    from lipaudit.engine.merging import merge as merged
    from lipaudit.report import REPORT

    check_outputs(output, REPORT)
    report = merged([schema.load(path) for path in reports], command=typed_command())
    emit(report, output, always=False, details=extent.details)
    again = "Measure the shards in which it failed again, and merge all."
    require_whole({report.run.model.spec: report}, again)


def require_whole(reports: Mapping[str, Report], again: str) -> None:
    """End with the exit code of what the reports lack, once they are written.

    That is the code of the first failure; without one, that of a time limit.

    Args:
        reports: that are written, by their models.
        again: what to do about it.

    Raises:
        LipauditError: some measures failed or were ended; the reports have the others.
    """
    failures = [
        (f"{model}: {name}" if len(reports) > 1 else name, fault)
        for model, report in reports.items()
        for name, fault in report.failures.items()
    ]
    if not failures:
        _require_in_time(reports, again)
        return
    reasons = "; ".join(f"{name} failed: {fault.reason}" for name, fault in failures)
    first = failures[0][1]
    advice = f"{first.advice} {again}".strip()
    raise LipauditError(f"the report is partial: {reasons}", advice, first.exit_code)


def _require_in_time(reports: Mapping[str, Report], again: str) -> None:
    left = [
        f"{count} samples of {model + ': ' if len(reports) > 1 else ''}{name}"
        for model, report in reports.items()
        for name, count in report.unmeasured.items()
    ]
    if left:
        text = f"the report is partial: the time limit left {', '.join(left)} unmeasured"
        raise LipauditError(text, again, ExitCode.TIME_LIMIT)
