"""The commands that measure a model: one for each measure, made from its options."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping

import typer

from lipaudit.cli.app import command
from lipaudit.cli.options import ModelArgument, Output, Terminal
from lipaudit.settings import MeasureOptions, RunOptions, option_types

MEASURING = "Measure a checkpoint"


def _command(name: str, options_type: type[MeasureOptions]) -> Callable[..., None]:
    """Return the body of a measure's command; its help is the docstring of its options."""

    def measure(
        model: str, options: MeasureOptions, run: RunOptions, output: Output, terminal: Terminal
    ) -> None:
        outline = options.outline(run.samples or options.samples)
        if outline and not terminal.quiet:
            takes = "under a minute" if model.startswith("demo") else "minutes"
            typer.echo(f"{name} of {model}: {outline}; {takes}", err=True)
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
    from lipaudit.cli.progress import OnStderr, muted
    from lipaudit.engine.execute import executed
    from lipaudit.engine.prepare import Request, prepare
    from lipaudit.report import DRAWN, REPORT

    drawn = any(options.draws for options in measures.values())
    check_outputs(output, DRAWN if drawn else REPORT)
    request = Request(model, measures, run, command=typed_command())
    with muted(quiet=terminal.quiet):
        job = prepare(request)
    with (
        OnStderr(model, quiet=terminal.quiet) as observer,
        executed(job, observer) as report,
    ):
        emit(report, output)


def typed_command() -> str:
    """Return the command as it was typed."""
    return shlex.join(["lipaudit", *sys.argv[1:]])
