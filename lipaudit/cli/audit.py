"""The command `audit`: every measure on one load of a model, one page for people."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lipaudit.cli.app import command
from lipaudit.cli.measure import (
    MEASURING,
    prepare_run,
    require_alone,
    require_whole,
    typed_command,
)
from lipaudit.cli.options import ModelsArgument, Output, Several, Terminal
from lipaudit.cli.streams import say
from lipaudit.errors import EvaluationError, LipauditError, as_user_meets, bug
from lipaudit.settings import AttentionOptions, AuditOptions, MeasureOptions, RunOptions

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Request
    from lipaudit.engine.several import Outline
    from lipaudit.results import Report, Section

RUNS = Path("lipaudit-runs")
CANDIDATES = 8
"""Heads whose maps a shard keeps."""
AGAIN = "The same command with --resume measures only what is missing."


@command("audit", panel=MEASURING, usual={"samples": "by measure"})
def audit(
    models: ModelsArgument,
    options: AuditOptions,
    run: RunOptions,
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
    how = _How(output, extent, terminal, options.run_dir)
    (_audit_one(requests[0], how) if len(models) == 1 else _audit_each(requests, how))


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
    )


@dataclass(frozen=True)
class _How:
    """Where what is measured goes, and what is said of it."""

    output: Output
    extent: Several
    terminal: Terminal
    folder: Path | None


def _audit_one(request: Request, how: _How) -> None:
    from lipaudit.cli.emit import emit
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.merging import executed_together

    model, terminal = request.model, how.terminal
    with prepare_run(request, quiet=terminal.quiet) as (job, ranks):
        if not terminal.quiet and (ranks is None or ranks.rank == 0):
            _announce(model, job.here if ranks is None else job.counts)
        adapt = partial(_with_map, shard=job.request.run.shard is not None)
        with (
            OnStderr(model, quiet=terminal.quiet, verbose=terminal.verbose) as observer,
            executed_together(job, observer, ranks, adapt=adapt) as report,
        ):
            if report is None:
                return
            folder = made_folder(how.folder or RUNS / _name(model, report), "--run-dir")
            try:
                _write(report, folder)
            except EvaluationError:  # a full disk, say: what is measured is shown
                with suppress(EvaluationError):
                    emit(report, how.output, details=how.extent.details)
                raise
            emit(report, how.output, details=how.extent.details)
        if not terminal.quiet:
            _conclude(model, report, folder)
        require_whole({model: report}, AGAIN)


def _audit_each(requests: Sequence[Request], how: _How) -> None:
    """Measure several models on the same samples, with one of them in memory at a time."""
    from lipaudit.cli.emit import emit
    from lipaudit.cli.progress import mute_libraries
    from lipaudit.engine.files import write
    from lipaudit.engine.prepare import prepare
    from lipaudit.engine.several import named, outline, require_shared
    from lipaudit.report import of_reports, render

    quiet, outlines = how.terminal.quiet, []
    for request in requests:
        with named(request.model), mute_libraries(quiet=quiet):
            outlines.append(outline(prepare(request)))
    require_shared(outlines)
    folder = made_folder(how.folder or _folder_of_several(requests), "--run-dir")
    places = [folder / f"{i}-{_plain(r.model)}" for i, r in enumerate(requests, start=1)]
    kept = [_find_finished(*each) for each in zip(requests, outlines, places, strict=True)]
    if not quiet:
        _announce_several(outlines, kept)
    reports: list[Report] = []
    for request, known, place, report in zip(requests, outlines, places, kept, strict=True):
        with _resumable(request, len(reports), folder):
            reports.append(report or _measure_one(request, known, place, how.terminal))
    subject = of_reports(*reports, by=how.extent.rank_by)
    write(folder / "report.html", render(subject, "html"))
    emit(subject, how.output, details=how.extent.details)
    if not quiet:
        each = f"{shlex.quote(str(folder))}/*/report.json"
        lines = ("", f"report: {folder / 'report.html'}", f"data:   {each}")
        say("\n".join(lines))
    require_whole({request.model: r for request, r in zip(requests, reports, strict=True)}, AGAIN)


def _measure_one(request: Request, known: Outline, folder: Path, terminal: Terminal) -> Report:
    """Measure one of several models and keep its report; where it fails, that says why."""
    from lipaudit.cli.progress import OnStderr, mute_libraries
    from lipaudit.engine.execute import executed
    from lipaudit.engine.prepare import prepare
    from lipaudit.engine.several import lost

    folder = made_folder(folder, "--run-dir")
    quiet, verbose = terminal.quiet, terminal.verbose
    with OnStderr(request.model, quiet=quiet, verbose=verbose) as observer:
        try:
            with mute_libraries(quiet=quiet):
                job = prepare(request)
            with executed(job, observer, adapt=partial(_with_map, shard=False)) as report:
                _write(report, folder)
        except Exception as error:
            observer.fails("audit", error)
            report = lost(known, as_user_meets(error) or bug(error))
            _write(report, folder)
    return report


def _find_finished(request: Request, known: Outline, folder: Path) -> Report | None:
    """Return the report that an interrupted audit left of a model, if it is to be resumed."""
    from lipaudit.engine.several import finished
    from lipaudit.schema import load

    path = folder / "report.json"
    if not request.run.resume or not path.exists():
        return None
    try:
        report = load(path)
    except LipauditError:
        return None
    return report if finished(report, known) else None


@contextmanager
def _resumable(request: Request, done: int, folder: Path) -> Iterator[None]:
    """Say what is kept of several models where their audit is cut short."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        if done:
            text = f"{done} finished in {folder}: {request.continuation}"
            say(f"note: {text}")
        raise


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


def _announce_several(outlines: Sequence[Outline], kept: Sequence[Report | None]) -> None:
    counts: dict[str, int] = {}
    for known in outlines:
        counts |= {name: max(count, counts.get(name, 0)) for name, count in known.counts.items()}
    done = len(kept) - kept.count(None)
    finished = f"; {done} of them finished before" if done else ""
    _announce(", ".join(known.model for known in outlines), counts, finished)


def _announce(models: str, counts: Mapping[str, int], more: str = "") -> None:
    parts = ", ".join(f"{name} ({count} samples)" for name, count in counts.items())
    say(f"audit of {models}: {parts}{more}")


def _with_map(
    options: MeasureOptions, sections: Sequence[Section], *, shard: bool
) -> MeasureOptions:
    """Let the measure of attention keep the map of the most amplifying head.

    A shard has some of the samples: it keeps those of the heads that may turn out to be that.
    """
    from lipaudit.results.summary import steepest

    heads = steepest(sections, CANDIDATES if shard else 1)
    if not heads or not isinstance(options, AttentionOptions):
        return options
    return options.model_copy(update={"candidates": heads} if shard else {"map": heads[0]})


def _name(model: str, report: Report) -> str:
    """Name the run directory: time, model, and a hash of the run."""
    digest = hashlib.sha256(report.run.model_dump_json().encode()).hexdigest()[:8]
    return f"{_now()}-{_plain(model)}-{digest}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


def _plain(model: str) -> str:
    """Return what a folder of a model is called: of a path its last part."""
    path = Path(model)
    name = path.resolve().name if path.exists() else re.sub(r"(^|[:/])(\.{1,2}/)+", r"\1", model)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "model"


def _conclude(model: str, report: Report, folder: Path) -> None:
    """Say where the report is, and what to type next."""
    saved = folder / "report.json"
    lines = [
        "",
        f"report: {folder / 'report.html'}",
        f"data:   {saved}",
    ]
    if report.shard is not None:
        lines += ["next:", "  lipaudit merge of the report.json of all shards"]
    elif report.status == "complete":
        lines += [
            "next:",
            f"  lipaudit baseline save {shlex.quote(str(saved))}",
            f"  lipaudit gate {shlex.quote(model)} --baseline lipaudit-baseline.json",
        ]
    say("\n".join(lines))
