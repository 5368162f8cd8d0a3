"""The commands that measure: one per measure, created from its options, then audit and merge."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipaudit.cli.app import BY_MEASURE, MODEL, Extent, ModelArgument, Output, Several, Terminal
from lipaudit.cli.output import check_outputs, emit
from lipaudit.engine import files, launcher
from lipaudit.errors import EvaluationError, ExitCode, LipauditError, UsageError
from lipaudit.measures import AuditOptions, load_measures
from lipaudit.measures.base import MeasureOptions
from lipaudit.settings import RunOptions
from lipaudit.settings.option import flag
from lipaudit.tables.plugins import load_object

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Request
    from lipaudit.engine.shards import Shard
    from lipaudit.tables import Report

RUNS = Path("lipaudit-runs")


def make_measure(name: str) -> Callable[..., None]:
    """Return the function of a command such as `lipaudit attack`, for ours and plug-ins' measures.

    The help of the command is the docstring of the options of the measure.
    """
    kind = load_measures()[name].options

    def measure(
        *,
        model: str | None,
        options: MeasureOptions,
        run: RunOptions,
        output: Output,
        extent: Extent,
        terminal: Terminal,
    ) -> None:
        """Measure the MODEL, or call the function of an option that runs without a MODEL."""
        run_alone = _find_function_alone(options, model)
        if run_alone is not None:
            run_alone(options, run, output)
            return
        if model is None:
            flags = " or ".join(map(flag, kind.alone))
            raise UsageError("missing argument 'MODEL'", f"Give a MODEL, or {flags}.")
        _measure_one(name, model, options, run, output, extent, terminal)

    # The command line reads the parameters and the help of a command from its function. MODEL may
    # be left out only if an option of the measure runs without it. `samples` replaces the default
    # of --samples in the help by that of the measure.
    measure.__kwdefaults__ = {"model": None} if kind.alone else {}
    measure.__doc__ = kind.__doc__
    measure.__annotations__ |= {
        "model": ModelArgument,
        "options": kind,
        "run": Annotated[RunOptions, {"samples": str(kind.samples)}],
    }
    return measure


def _find_function_alone(options: MeasureOptions, model: str | None) -> Any:
    """Return the function of an option that runs without a MODEL, if the user gave one; else None.

    `options.alone` has the function of each such option by name. An example is --verify REPORT of
    `lipaudit certify`: the report names its model.

    Raises:
        UsageError: a MODEL is given, too.
    """
    for alone, function in options.alone.items():
        if getattr(options, alone) is None:  # not on the command line
            continue
        if model is not None:
            raise UsageError(
                f"{flag(alone)} has models of its own, so the MODEL {model} has no effect",
                "Leave one of the two out.",
            )
        return load_object(function)
    return None


def _measure_one(
    name: str,
    model: str,
    options: MeasureOptions,
    run: RunOptions,
    output: Output,
    extent: Extent,
    terminal: Terminal,
) -> None:
    """Run one measure on a model, and write its report; or only a shard of it.

    Args:
        name: name of the measure.
        model: the MODEL.
        options: the options of the measure.
        run: the options that all measures share.
        output: where the report goes.
        extent: how much of the report stdout gets.
        terminal: gets progress and messages.

    Raises:
        LipauditError: the report is incomplete; raised after it is written.
    """
    from lipaudit.api import open_job
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine import execute, prepare
    from lipaudit.report import REPORT

    check_outputs(output, REPORT)
    request = prepare.Request(
        model,
        measures={name: options},
        run=run,
        command=typed_command(),
        place=launcher.find_place(),
    )
    if run.shard:  # measure only a part of the samples: no report
        measure_shard(request, output, terminal)
        return
    # `silence` sends what code of the model prints to stderr, until the report is printed.
    with (
        OnStderr(terminal) as observer,
        open_job(model, request) as job,
        execute.run_job(job, observer) as report,
    ):
        # Of several processes of a launcher (torchrun), only the first has the report.
        if report is None:
            return
        observer.silence.close()
        emit(report, output, details=extent.details)
    require_whole({model: report}, "Run the same command with --resume to measure the rest.")


def measure_shard(
    request: Request, output: Output, terminal: Terminal, folder: Path | None = None
) -> None:
    """Measure a shard of a run, and say where its parts are and how to merge them.

    Args:
        request: the request.
        output: destinations, of which a shard needs none.
        terminal: gets the messages.
        folder: folder for reports, which a shard does not need either.

    Raises:
        UsageError: a destination is given.
        LipauditError: a measure failed, or ran out of time.
    """
    from lipaudit.api import open_job
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.execute import run_shard

    given = sorted(output.model_fields_set)  # the destinations that were typed
    if folder is not None:
        given.append("run_dir")
    if given:
        raise UsageError(
            f"{flag(given[0])} has no effect with --shard: a shard writes parts, and no report",
            "Leave it out, and make the report of all shards: lipaudit merge FOLDER -o FILE.",
        )
    with OnStderr(terminal) as observer, open_job(request.model, request) as job:
        shard = run_shard(job, observer)
    parts = shlex.quote(str(request.run.parts))
    terminal.tell(f"\nshard {shard.name}: its parts are in {parts}")
    terminal.tell(f"next:   lipaudit merge {parts}, after all shards")
    require_whole({request.model: shard}, "Run the same command again to measure the rest.")


def audit(
    models: Annotated[list[str], MODEL],
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

    Examples:
      lipaudit audit demo
      lipaudit audit timm:vit_small_patch16_224 --data val/ --eps 2/255 --full
      lipaudit audit ./my-bert --data reviews.csv --skip attack
      lipaudit audit demo demo:jasmin demo:robust -o models.csv
    """
    from lipaudit.report import REPORT, of_reports, render

    several = len(models) > 1
    extent.check_ranking(len(models))
    check_outputs(output, REPORT)
    files.require_folder(options.run_dir or RUNS)
    if several:
        refuse_partial_run("several models", run, limited=True)
    requests = _plan_audits(models, options, run)
    if run.shard:  # measure only a part of the samples: no report, no page
        measure_shard(requests[0], output, terminal, folder=options.run_dir)
        return
    # Audits that begin in the same second have different folders.
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{_name_folder(models[0])}-{os.urandom(4).hex()}"
    folder = options.run_dir or RUNS / stamp
    reports = _measure_models(requests, folder, output, extent, terminal)
    if not reports:  # this process measured a shard for rank 0, which has the reports
        return
    # Show: rank several models on one page, print the result, name the files and the next command.
    subject = of_reports(*reports.values(), by=extent.rank_by)
    if several:
        files.write(folder / "report.html", render(subject, "html"))
    emit(subject, output, details=extent.details)
    saved = shlex.quote(str(folder)) + ("/*/report.json" if several else "/report.json")
    terminal.tell(f"\nreport: {folder / 'report.html'}\ndata:   {saved}")
    if not several:
        report = reports[models[0]]
        if report.status == "complete":
            terminal.tell(f"next:   {_choose_next(report, saved)}")
    require_whole(reports, "Run the same command with --resume to measure only what is missing.")


def _plan_audits(models: list[str], options: AuditOptions, run: RunOptions) -> list[Request]:
    """Return a request per model, with the attention map of the head with the largest norm."""
    from lipaudit import api

    demo = api.is_demo(*models)
    requests = []
    for model in models:
        request = api.plan_audit(model, options, run, demo=demo, command=typed_command())
        requests.append(replace(request, draws_steepest=True, place=launcher.find_place()))
    return requests


def _measure_models(
    requests: Sequence[Request], folder: Path, output: Output, extent: Extent, terminal: Terminal
) -> dict[str, Report]:
    """Measure one model after the other, and save the report of each before the next one.

    If a report cannot be saved, as on a full disk, the figures so far are printed.

    Args:
        requests: the audit of each model.
        folder: the folder for the report; of several models, each has a folder inside.
        output: where the figures go if a report cannot be saved.
        extent: how much of the figures is printed.
        terminal: gets progress and messages.

    Returns:
        The reports by model; none if this process measured a shard for another process.

    Raises:
        EvaluationError: a report cannot be saved.
    """
    from lipaudit import api
    from lipaudit.cli.progress import OnStderr
    from lipaudit.report import of_reports, render

    reports = {}
    models = [request.model for request in requests]
    with OnStderr(terminal) as observer:
        audits = api.run_audits(models, requests, observer=observer)
        for model, report in zip(models, audits, strict=True):
            if report is None:  # this process measured a part for another one, which has it
                continue
            reports[model] = report
            folder_of_model = folder
            if len(models) > 1:
                folder_of_model /= f"{len(reports)}-{_name_folder(model)}"
            try:
                make_folder(folder_of_model, flag="--run-dir")
                for format in ("json", "html"):
                    files.write(folder_of_model / f"report.{format}", render(report, format))
            except EvaluationError:
                observer.silence.close()  # from here on, stdout gets the result
                with suppress(EvaluationError):
                    emit(of_reports(*reports.values()), output, details=extent.details)
                raise
    return reports


def _choose_next(report: Report, saved: str) -> str:
    """Return the next step after an audit, as an advice or a command.

    With random weights or data, or an accuracy at chance, this is the advice on that. If an attack
    broke the model, this is `lipaudit inspect` for the weakest sample. Otherwise the report can
    become a baseline: `lipaudit baseline save`.
    """
    from lipaudit.measures import summarise
    from lipaudit.report.opening import list_obstacles, write_answer
    from lipaudit.tables.formats import CHARACTERS
    from lipaudit.tables.weakest import find_worst

    # Why the report cannot be a baseline, as advice.
    obstacles = " ".join(list_obstacles(report).values())
    if obstacles:
        return obstacles
    # The tone of the answer on the page is "broken" if an attack broke the model.
    answer = write_answer(summarise(report))
    weakest = find_worst(report)  # ids of samples, the least robust first
    if answer is not None and answer.tone == "broken" and weakest:
        return f"lipaudit inspect {saved} {weakest[0][:CHARACTERS]}"  # an id may be shortened
    return f"lipaudit baseline save {saved}"


PARTS = typer.Argument(metavar="FOLDER", help="Folders of --parts: one of all shards, or several.")


def merge(
    folders: Annotated[list[Path], PARTS], output: Output, extent: Extent, terminal: Terminal
) -> None:
    """Make the report of a run from the parts of its shards: what one process would have written.

    Every command that measures takes --shard i/n --parts FOLDER: each of n processes, wherever
    they run, measures a part of the samples. Missing samples and shards of other runs are refused.

    Examples:
      lipaudit attack ./vit --data val/ --eps 2/255 --shard 1/4 --parts run
      lipaudit merge run -o all.json -o all.html
    """
    from lipaudit.engine import shards
    from lipaudit.report import REPORT

    check_outputs(output, REPORT)
    report = shards.merge(*folders, command=typed_command())
    emit(report, output, print_always=False, terminal=terminal, details=extent.details)
    require_whole(
        {report.run.model.spec: report},
        "Run the commands of the shards again to measure the rest, then merge again.",
    )


def typed_command() -> str:
    """Return the command as typed."""
    return shlex.join(["lipaudit", *sys.argv[1:]])


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
        if folder.is_relative_to(RUNS):
            # The folder of all runs ignores itself, so no report is committed by accident.
            (RUNS / ".gitignore").write_text("*\n")
    except OSError as error:
        text = f"cannot write to {folder}: {error.strerror}"
        raise EvaluationError(text, f"Choose another place with {flag}.") from None
    return folder


def _name_folder(model: str) -> str:
    """Return the folder name of a model; for a path, its last part."""
    path = Path(model)
    if path.exists():
        model = path.resolve().name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model)
    return name.strip("-.")[:40] or "model"


def refuse_partial_run(what: str, run: RunOptions | None = None, *, limited: bool = False) -> None:
    """Refuse options that divide a run, for work that a single process does as a whole.

    These are --shard and --parts, --time-limit, and the several processes of a launcher.

    Args:
        what: the work, such as "a training", for the message "not for a training".
        run: the shared options; None: only several processes are refused.
        limited: whether the work accepts --time-limit.

    Raises:
        UsageError: one of these options is given, or there are several processes.
    """
    values: dict[str, object] = {"several processes": launcher.find_place()}
    if run is not None:
        values |= {"--shard": run.shard, "--parts": run.parts}
        if not limited:
            values["--time-limit"] = run.time_limit
    for name, value in values.items():
        if value is not None:
            advice = "Leave it out. One process: no srun, and RANK and WORLD_SIZE unset."
            raise UsageError(f"{name}: only when one MODEL is measured, not for {what}", advice)


def require_whole(reports: Mapping[str, Report | Shard], again: str) -> None:
    """End with an exit code if reports or a shard are incomplete, after they are written.

    The code is the first failure's, or else that of the time limit.

    Args:
        reports: the written reports, or the shard, by model.
        again: the command that measures the rest, as a hint for the user.

    Raises:
        LipauditError: some measures failed or ran out of time; the reports have the others.
    """
    failures = []
    reasons = []
    unmeasured = []
    for model, report in reports.items():
        prefix = f"{model}: " if len(reports) > 1 else ""
        for measure, failure in report.failures.items():
            failures.append(failure)
            reasons.append(f"{prefix}{measure} failed: {failure.reason}")
        for measure, samples in report.unmeasured.items():
            unmeasured.append(f"{samples} samples of {measure}")
    # With a failure and a time limit, the failure sets the exit code: it tells what to fix.
    if failures:
        first = failures[0]
        raise LipauditError(
            f"the report is partial: {'; '.join(reasons)}",
            f"{first.advice} {again}".strip(),
            first.exit_code,
        )
    if unmeasured:
        raise LipauditError(
            f"the report is partial: the time limit ended the run before {', '.join(unmeasured)}",
            again,
            ExitCode.TIME_LIMIT,
        )
