"""The command `audit`: every measure on one load of a model, one page for people."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lipaudit.cli.app import command
from lipaudit.cli.measure import MEASURING, require_alone, require_whole, typed_command
from lipaudit.cli.options import BY_MEASURE, ModelsArgument, Output, Several, Terminal
from lipaudit.cli.streams import say
from lipaudit.errors import EvaluationError, LipauditError
from lipaudit.settings import AuditOptions, RunOptions

if TYPE_CHECKING:
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.prepare import Request
    from lipaudit.engine.several import Outline
    from lipaudit.tables import Report

RUNS = Path("lipaudit-runs")
AGAIN = "The same command with --resume measures only what is missing."


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
    from lipaudit.report import RANKED, REPORT

    demo = all(model.partition(":")[0] == "demo" for model in models)
    extent.require_several(len(models))
    check_outputs(output, REPORT if len(models) == 1 else RANKED)
    require_folder(options.run_dir or RUNS)
    if len(models) > 1:
        require_alone(run, "several of them")
    requests = [audit_request(model, options, run, demo=demo) for model in models]
    target = _Target(output, extent, terminal, options.run_dir)
    if len(models) == 1:
        _audit_one(requests[0], target)
    else:
        _audit_each(requests, target)


def audit_request(model: str, options: AuditOptions, run: RunOptions, *, demo: bool) -> Request:
    """Return what an audit of a model is to measure.

    Raises:
        UsageError: for a bad radius, attack or norm.
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


@dataclass(frozen=True)
class _Target:
    """Where what is measured goes, and what is said of it."""

    output: Output
    extent: Several
    terminal: Terminal
    folder: Path | None

    @contextmanager
    def watch(self, model: str) -> Iterator[OnStderr]:
        """Show the progress on a model, and of libraries as much as was asked for."""
        from lipaudit.cli.progress import OnStderr, mute_libraries

        quiet, verbose = self.terminal.quiet, self.terminal.verbose
        with (
            mute_libraries(quiet=quiet),
            OnStderr(model, quiet=quiet, verbose=verbose) as observer,
        ):
            yield observer

    def say(self, *lines: str) -> None:
        """Say lines on stderr, unless it is to be quiet."""
        if not self.terminal.quiet:
            say("\n".join(lines))


def _audit_one(request: Request, target: _Target) -> None:
    from lipaudit.cli.emit import emit
    from lipaudit.engine.execute import executed
    from lipaudit.engine.launcher import find_place
    from lipaudit.engine.prepare import prepare

    request, details = replace(request, place=find_place()), target.extent.details
    with target.watch(request.model) as observer:
        job = prepare(request)
        if request.place is None or request.place.rank == 0:
            target.say(_announce(request.model, job.announced))
        with executed(job, observer) as report:
            if report is None:
                return
            folder = make_folder(target.folder or RUNS / _name(report), "--run-dir")
            try:
                _write(report, folder)
            except EvaluationError:  # a full disk, say: what is measured is shown
                with suppress(EvaluationError):
                    emit(report, target.output, details=details)
                raise
            emit(report, target.output, details=details)
    target.say(*_conclude(report, folder))
    require_whole({request.model: report}, AGAIN)


def _audit_each(requests: Sequence[Request], target: _Target) -> None:
    """Measure several models on the same samples, with one of them in memory at a time."""
    from lipaudit.cli.emit import emit
    from lipaudit.engine.files import write
    from lipaudit.engine.prepare import prepare
    from lipaudit.engine.several import name_errors, outline_job, require_shared
    from lipaudit.report import of_reports, render

    outlines = []
    for request in requests:
        with name_errors(request.model), target.watch(request.model):
            outlines.append(outline_job(prepare(request)))
    require_shared(outlines)
    folder = make_folder(target.folder or _folder_of_several(requests), "--run-dir")
    places = [folder / f"{i}-{_plain(r.model)}" for i, r in enumerate(requests, start=1)]
    finished = [_find_finished(*each) for each in zip(requests, outlines, places, strict=True)]
    target.say(_announce_several(outlines, finished))
    reports: dict[str, Report] = {}
    for request, outline, place, report in zip(requests, outlines, places, finished, strict=True):
        try:
            reports[request.model] = report or _measure_one(request, outline, place, target)
        except (Exception, KeyboardInterrupt):
            if reports:
                say(f"note: {len(reports)} finished in {folder}: {request.continuation}")
            raise
    subject = of_reports(*reports.values(), by=target.extent.rank_by)
    write(folder / "report.html", render(subject, "html"))
    emit(subject, target.output, details=target.extent.details)
    each = f"{shlex.quote(str(folder))}/*/report.json"
    target.say("", f"report: {folder / 'report.html'}", f"data:   {each}")
    require_whole(reports, AGAIN)


def _measure_one(request: Request, outline: Outline, folder: Path, target: _Target) -> Report:
    """Measure one of several models and keep its report; where it fails, that says why."""
    from lipaudit.engine.execute import executed
    from lipaudit.engine.prepare import prepare
    from lipaudit.engine.several import make_failed_report

    make_folder(folder, "--run-dir")
    with target.watch(request.model) as observer:
        try:
            with executed(prepare(request), observer) as report:
                assert report is not None, "one process measures several models"
                _write(report, folder)
        except Exception as error:
            observer.fails("audit", error)
            report = make_failed_report(outline, error)
            _write(report, folder)
    return report


def _find_finished(request: Request, outline: Outline, folder: Path) -> Report | None:
    """Return the report that an interrupted audit left of a model, if it is to be resumed."""
    from lipaudit.engine.several import is_finished
    from lipaudit.schema import load

    path = folder / "report.json"
    if not request.run.resume or not path.exists():
        return None
    try:
        report = load(path)
    except LipauditError:
        return None
    return report if is_finished(report, outline) else None


def _folder_of_several(requests: Sequence[Request]) -> Path:
    """Return the run directory of these requests: to resume, the last that they had."""
    free = {"resume", "device", "batch_size", "offline", "time_limit"}
    asked = [
        (r.model, r.run.model_dump(exclude=free),
         {name: options.model_dump() for name, options in r.measures.items()}, dict(r.counts))
        for r in requests
    ]  # fmt: skip
    name = f"{len(requests)}-models-{hashlib.sha256(repr(asked).encode()).hexdigest()[:8]}"
    before = sorted(RUNS.glob(f"*-{name}")) if requests[0].run.resume else []
    return before[-1] if before else RUNS / f"{_now()}-{name}"


def _write(report: Report, folder: Path) -> None:
    from lipaudit.engine.files import write
    from lipaudit.report import render

    for name, format in (("report.json", "json"), ("report.html", "html")):
        write(folder / name, render(report, format))


def make_folder(folder: Path, flag: str) -> Path:
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


def _announce_several(outlines: Sequence[Outline], finished: Sequence[Report | None]) -> str:
    counts = {name: count for outline in outlines for name, count in outline.counts.items()}
    done = len(finished) - finished.count(None)
    more = f"; {done} of them finished before" if done else ""
    return _announce(", ".join(outline.model for outline in outlines), counts) + more


def _announce(models: str, counts: Mapping[str, int]) -> str:
    parts = ", ".join(f"{name} ({count} samples)" for name, count in counts.items())
    return f"audit of {models}: {parts}"


def _name(report: Report) -> str:
    """Name the run directory: time, model, and a hash of the run."""
    digest = hashlib.sha256(report.run.model_dump_json().encode()).hexdigest()[:8]
    return f"{_now()}-{_plain(report.run.model.spec)}-{digest}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


def _plain(model: str) -> str:
    """Return what a folder of a model is called: of a path its last part."""
    path = Path(model)
    name = path.resolve().name if path.exists() else re.sub(r"(^|[:/])(\.{1,2}/)+", r"\1", model)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "model"


def _conclude(report: Report, folder: Path) -> list[str]:
    """Say where the report is, and what to type next."""
    saved = folder / "report.json"
    lines = ["", f"report: {folder / 'report.html'}", f"data:   {saved}"]
    if report.shard is not None:
        lines += ["next:", "  lipaudit merge of the report.json of all shards"]
    elif report.status == "complete":
        lines += [
            "next:",
            f"  lipaudit baseline save {shlex.quote(str(saved))}",
            f"  lipaudit gate {shlex.quote(report.run.model.spec)} "
            "--baseline lipaudit-baseline.json",
        ]
    return lines
