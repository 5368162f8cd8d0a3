"""The command `audit`: every measure on one load of a model, one page for people."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lipaudit.cli.app import command
from lipaudit.cli.measure import MEASURING, typed_command
from lipaudit.cli.options import Extent, ModelArgument, Output, Terminal
from lipaudit.errors import EvaluationError, ExitCode, LipauditError
from lipaudit.settings import AttentionOptions, AuditOptions, MeasureOptions, RunOptions

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Job
    from lipaudit.results import BoundsRow, Report, Section

RUNS = Path("lipaudit-runs")


@command("audit", panel=MEASURING, usual={"samples": "by measure"})
def audit(
    model: ModelArgument,
    options: AuditOptions,
    run: RunOptions,
    output: Output,
    extent: Extent,
    terminal: Terminal,
) -> None:
    """Everything about a checkpoint: bounds, attention, Jacobian, attacks, one report.

    Writes report.json and report.html to a run directory, with the attention map of the most
    amplifying head. Quick is the default on the demo. Where a measure fails the others go on: the
    report says why, and the exit code is that of the failure.

    [dim]Examples:[/]
      [cyan]lipaudit audit demo[/]
      [cyan]lipaudit audit timm:vit_small_patch16_224 --data val/ --eps 2/255 --full[/]
      [cyan]lipaudit audit ./my-bert --data reviews.csv --skip attack[/]
    """
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.cli.progress import OnStderr, muted
    from lipaudit.engine.execute import executed
    from lipaudit.engine.files import require_folder, write
    from lipaudit.engine.prepare import Request, prepare
    from lipaudit.report import REPORT, render

    demo = model.partition(":")[0] == "demo"
    check_outputs(output, REPORT)
    require_folder(options.run_dir or RUNS)
    request = Request(
        model,
        options.plan(demo=demo),
        run,
        options.counts(demo=demo),
        optional={*options.names} - options.required,
        partial=True,
        command=typed_command(),
    )
    with muted(quiet=terminal.quiet):
        job = prepare(request)
    if not terminal.quiet:
        _announce(job)
    with (
        OnStderr(model, quiet=terminal.quiet, verbose=terminal.verbose) as observer,
        executed(job, observer, adapt=_with_strongest) as report,
    ):
        folder = made_folder(options.run_dir or RUNS / _name(model, report), "--run-dir")
        for name, format in (("report.json", "json"), ("report.html", "html")):
            write(folder / name, render(report, format))
        emit(report, output, details=extent.details)
    if not terminal.quiet:
        _conclude(model, report, folder)
    _require_complete(report)


def made_folder(folder: Path, flag: str) -> Path:
    """Return a directory, made if it is not there; version control leaves ours alone.

    Args:
        folder: where it is.
        flag: the option that names another place.

    Raises:
        EvaluationError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.parent == RUNS:
            (RUNS / ".gitignore").write_text("*\n")
    except OSError as error:
        raise EvaluationError(
            f"cannot write to {folder}: {error.strerror}", f"Name another place with {flag}."
        ) from None
    return folder


def _require_complete(report: Report) -> None:
    """End with the exit code of the first measure that failed, once the report is written.

    Raises:
        LipauditError: some measures failed; the report has the others.
    """
    if not report.failures:
        return
    reasons = "; ".join(
        f"{name} failed: {fault.reason}" for name, fault in report.failures.items()
    )
    first = next(iter(report.failures.values()))
    again = "The same command with --resume measures only what failed."
    error = LipauditError(f"the report is partial: {reasons}", f"{first.advice} {again}".strip())
    error.exit_code = ExitCode(first.exit_code)
    raise error


def _announce(job: Job) -> None:
    from lipaudit.engine.estimate import takes

    parts = ", ".join(f"{name} ({count} samples)" for name, count in job.counts.items())
    typer.echo(f"audit of {job.request.model}: {parts}; {takes(job)}", err=True)


def _with_strongest(options: MeasureOptions, sections: Sequence[Section]) -> MeasureOptions:
    """Let the measure of attention keep the map of the most amplifying head."""
    head = _strongest(sections)
    if head is None or not isinstance(options, AttentionOptions):
        return options
    return options.model_copy(update={"map": f"{head.layer}.{head.head}"})


def _strongest(sections: Sequence[Section]) -> BoundsRow | None:
    from lipaudit.results import BoundsRow
    from lipaudit.results.figures import largest, typed

    rows = [row for section in sections for row in typed(section, BoundsRow)]
    return next(iter(largest(rows, "exact", 1)), None)


def _name(model: str, report: Report) -> str:
    """Name the run directory: time, model, and a hash of the run."""
    when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-")[:40]
    digest = hashlib.sha256(report.run.model_dump_json().encode()).hexdigest()[:8]
    return f"{when}-{plain}-{digest}"


def _conclude(model: str, report: Report, folder: Path) -> None:
    """Say where the report is, and what to type next."""
    saved = folder / "report.json"
    lines = [
        "",
        f"report: {folder / 'report.html'}",
        f"data:   {saved}",
    ]
    if not report.failures:
        lines += [
            "next:",
            f"  lipaudit baseline save {shlex.quote(str(saved))}",
            f"  lipaudit gate {shlex.quote(model)} --baseline lipaudit-baseline.json",
        ]
    typer.echo("\n".join(lines), err=True)
