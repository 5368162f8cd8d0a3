"""The command `audit`: every measure on one load of a model, one page for people."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lipaudit.cli.app import command
from lipaudit.cli.measure import MEASURING, require_alone, require_whole, typed_command
from lipaudit.cli.options import BY_MEASURE, ModelsArgument, Output, Several, Terminal
from lipaudit.cli.streams import say
from lipaudit.errors import EvaluationError
from lipaudit.measures import AuditOptions
from lipaudit.settings import RunOptions

if TYPE_CHECKING:
    from lipaudit.engine.journal import Journal
    from lipaudit.engine.prepare import Request
    from lipaudit.tables import Report

RUNS = Path("lipaudit-runs")
AGAIN = "Run the same command with --resume to measure only what is missing."


@command("audit", panel=MEASURING)
def audit(
    models: ModelsArgument,
    options: AuditOptions,
    run: Annotated[RunOptions, BY_MEASURE],
    output: Output,
    extent: Several,
    terminal: Terminal,
) -> None:
    """Everything about a checkpoint: bounds, attention, Jacobian, attacks, one report.

    Writes report.json and report.html to a run directory, with the attention map of the most
    amplifying head. Quick is the default on the demo. If a measure fails, the others still run:
    the report says why, and the exit code is that of the failure.

    Several MODELs are measured on the same samples, one after the other, and ranked: a report of
    each and a page of all. If one model fails, the others are still measured.

    [dim]Examples:[/]
      [cyan]lipaudit audit demo[/]
      [cyan]lipaudit audit timm:vit_small_patch16_224 --data val/ --eps 2/255 --full[/]
      [cyan]lipaudit audit ./my-bert --data reviews.csv --skip attack[/]
      [cyan]lipaudit audit demo demo:jasmin demo:robust -o models.csv[/]
    """
    from lipaudit.cli.emit import check_outputs
    from lipaudit.engine.files import require_folder
    from lipaudit.report import REPORT

    # Samples, radii and the quick preset are a demo's only if every model is a demo.
    demo = all(model.partition(":")[0] == "demo" for model in models)
    extent.require_several(len(models))
    check_outputs(output, REPORT)
    require_folder(options.run_dir or RUNS)
    if len(models) > 1:
        require_alone(run, "several models")
    requests = [audit_request(model, options, run, demo=demo) for model in models]
    if len(models) == 1:
        _audit_one(requests[0], options.run_dir, output, extent, terminal)
    else:
        _audit_each(requests, options.run_dir, output, extent, terminal)


def audit_request(model: str, options: AuditOptions, run: RunOptions, *, demo: bool) -> Request:
    """Return the request of an audit of one model.

    Raises:
        UsageError: a radius, attack or norm is invalid.
    """
    from lipaudit.engine.prepare import Request

    return Request(
        model,
        options.plan(demo=demo),
        run,
        options.counts(demo=demo),
        optional={*options.names} - options.required,
        partial=True,
        command=typed_command(),
        draws_steepest=True,
    )


def _audit_one(
    request: Request, folder: Path | None, output: Output, extent: Several, terminal: Terminal
) -> None:
    import hashlib  # loads OpenSSL: not for --help

    from lipaudit.cli.emit import emit
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.execute import run_job
    from lipaudit.engine.launcher import find_place
    from lipaudit.engine.prepare import prepare

    request = replace(request, place=find_place())
    quiet, verbose = terminal.quiet, terminal.verbose
    with OnStderr(request.model, quiet=quiet, verbose=verbose) as observer:
        job = prepare(request)
        if request.place is None or request.place.rank == 0:
            # A launcher tells of all samples, `--shard` of those of its shard.
            own = {name: sum(map(len, job.batches(name))) for name in job.counts}
            counts = own if request.place is None else job.counts
            terminal.tell(f"audit of {request.model}: {_list_counts(counts)}")
        with run_job(job, observer) as report:
            if report is None:
                return
            # A run directory is named by time, model, and a hash of the run.
            digest = hashlib.sha256(report.run.model_dump_json().encode()).hexdigest()[:8]
            name = f"{_format_time()}-{_name_folder(report.run.model.spec)}-{digest}"
            folder = make_folder(folder or RUNS / name, "--run-dir")
            try:
                _write(report, folder)
            except EvaluationError:  # such as a full disk: print the figures first
                with suppress(EvaluationError):
                    emit(report, output, details=extent.details)
                raise
            emit(report, output, details=extent.details)
    saved = folder / "report.json"
    terminal.tell(f"\nreport: {folder / 'report.html'}\ndata:   {saved}")
    if report.shard is not None:
        terminal.tell("next:\n  lipaudit merge of the report.json of all shards")
    elif report.status == "complete":
        model = shlex.quote(report.run.model.spec)
        terminal.tell(f"next:\n  lipaudit baseline save {shlex.quote(str(saved))}")
        terminal.tell(f"  lipaudit gate {model} --baseline lipaudit-baseline.json")
    require_whole({request.model: report}, AGAIN)


def _audit_each(
    requests: Sequence[Request],
    folder: Path | None,
    output: Output,
    extent: Several,
    terminal: Terminal,
) -> None:
    """Measure several models on the same samples, one model in memory at a time."""
    from lipaudit.cli.emit import emit
    from lipaudit.cli.progress import OnStderr, mute_libraries
    from lipaudit.engine.execute import run_job
    from lipaudit.engine.files import write
    from lipaudit.engine.prepare import prepare
    from lipaudit.engine.several import (
        make_failed_report,
        name_errors,
        outline_job,
        require_shared,
    )
    from lipaudit.report import of_reports, render

    outlines, quiet = [], terminal.quiet
    for request in requests:
        with name_errors(request.model), mute_libraries(quiet=quiet):
            outlines.append(outline_job(prepare(request)))
    require_shared(outlines)
    folder = make_folder(folder or RUNS / f"{_format_time()}-{len(requests)}-models", "--run-dir")
    counts = {name: count for outline in outlines for name, count in outline.counts.items()}
    models = ", ".join(outline.model for outline in outlines)
    terminal.tell(f"audit of {models}: {_list_counts(counts)}")
    reports: dict[str, Report] = {}
    journals: list[Journal] = []  # of all models, until all are finished: --resume reads them
    for number, (request, outline) in enumerate(zip(requests, outlines, strict=True), 1):
        try:
            with OnStderr(request.model, quiet=quiet, verbose=terminal.verbose) as observer:
                try:
                    with run_job(prepare(request), observer, journals) as measured:
                        assert measured is not None, "one process measures several models"
                        report = measured
                except Exception as error:  # the model's report has the reason
                    observer.fails("audit", error)
                    report = make_failed_report(outline, error)
            reports[outline.model] = report
            place = folder / f"{number}-{_name_folder(outline.model)}"
            _write(report, make_folder(place, "--run-dir"))
        except (Exception, KeyboardInterrupt):
            if reports:
                say(f"note: finished reports: {len(reports)}, in {folder}: {request.continuation}")
            raise
    subject = of_reports(*reports.values(), by=extent.rank_by)
    write(folder / "report.html", render(subject, "html"))
    emit(subject, output, details=extent.details)
    each = f"{shlex.quote(str(folder))}/*/report.json"
    terminal.tell(f"\nreport: {folder / 'report.html'}\ndata:   {each}")
    require_whole(reports, AGAIN)
    for journal in journals:
        journal.clear()


def _write(report: Report, folder: Path) -> None:
    from lipaudit.engine.files import write
    from lipaudit.report import render

    for name, format in (("report.json", "json"), ("report.html", "html")):
        write(folder / name, render(report, format))


def make_folder(folder: Path, flag: str) -> Path:
    """Return a directory, created if missing; git ignores the directory of all runs.

    Args:
        folder: path of the directory.
        flag: the option that chooses another directory.

    Raises:
        EvaluationError: the directory cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.parent == RUNS:
            # The folder of all runs ignores itself, so no report is committed by accident.
            (RUNS / ".gitignore").write_text("*\n")
    except OSError as error:
        raise EvaluationError(
            f"cannot write to {folder}: {error.strerror}", f"Choose another place with {flag}."
        ) from None
    return folder


def _list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count} samples)" for name, count in counts.items())


def _format_time() -> str:
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


def _name_folder(model: str) -> str:
    """Return the folder name of a model; for a path, its last part."""
    # The last part of a path; for py:./own.py:make and similar, without `./`.
    path = Path(model)
    name = path.resolve().name if path.exists() else re.sub(r"(^|[:/])(\.{1,2}/)+", r"\1", model)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "model"
