"""The command `audit`: every measure on one load of a model, one page for people."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lipaudit.cli.app import command
from lipaudit.cli.measure import MEASURING, require_alone, require_whole, typed_command
from lipaudit.cli.options import BY_MEASURE, MODEL, Output, Several, Terminal
from lipaudit.errors import EvaluationError
from lipaudit.measures import AuditOptions
from lipaudit.settings import RunOptions

if TYPE_CHECKING:
    from lipaudit.tables import Report

RUNS = Path("lipaudit-runs")
AGAIN = "Run the same command with --resume to measure only what is missing."


@command("audit", panel=MEASURING)
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

    [dim]Examples:[/]
      [cyan]lipaudit audit demo[/]
      [cyan]lipaudit audit timm:vit_small_patch16_224 --data val/ --eps 2/255 --full[/]
      [cyan]lipaudit audit ./my-bert --data reviews.csv --skip attack[/]
      [cyan]lipaudit audit demo demo:jasmin demo:robust -o models.csv[/]
    """
    from lipaudit.api import plan_audit, run_audits
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.files import require_folder, write
    from lipaudit.engine.launcher import find_place
    from lipaudit.report import REPORT, of_reports, render

    several = len(models) > 1
    extent.require_several(len(models))
    check_outputs(output, REPORT)
    require_folder(options.run_dir or RUNS)
    if several:
        require_alone("several models", run, limited=True)
    # Samples, radii and the quick preset are a demo's only if every model is a demo.
    demo = all(model.partition(":")[0] == "demo" for model in models)
    requests = [
        plan_audit(model, options, run, demo=demo, command=typed_command()) for model in models
    ]
    place = find_place()
    requests = [replace(each, draws_steepest=True, place=place) for each in requests]
    # Audits that begin in the same second have different folders.
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{_name_folder(models[0])}-{os.urandom(4).hex()}"
    folder = options.run_dir or RUNS / stamp
    reports: dict[str, Report] = {}
    with OnStderr(terminal) as observer:
        for model, report in zip(
            models, run_audits(models, requests, observer=observer), strict=True
        ):
            if report is None:
                continue
            reports[model] = report
            part = f"{len(reports)}-{_name_folder(model)}" if several else ""
            try:
                _write(report, make_folder(folder / part, "--run-dir"))
            except EvaluationError:  # such as a full disk: print the figures first
                with suppress(EvaluationError):
                    emit(of_reports(*reports.values()), output, details=extent.details)
                raise
    if not reports:  # rank 0 has them
        return
    subject = of_reports(*reports.values(), by=extent.rank_by)
    if several:
        write(folder / "report.html", render(subject, "html"))
    emit(subject, output, details=extent.details)
    saved = shlex.quote(str(folder)) + "/*" * several + "/report.json"
    terminal.tell(f"\nreport: {folder / 'report.html'}\ndata:   {saved}")
    shard = any(report.shard for report in reports.values())
    if shard or not several:
        following = "merge of all shards" if shard else f"baseline save {saved}"
        terminal.tell(f"next:   lipaudit {following}")
    require_whole(reports, AGAIN)


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
        if folder.is_relative_to(RUNS):
            # The folder of all runs ignores itself, so no report is committed by accident.
            (RUNS / ".gitignore").write_text("*\n")
    except OSError as error:
        raise EvaluationError(
            f"cannot write to {folder}: {error.strerror}", f"Choose another place with {flag}."
        ) from None
    return folder


def _name_folder(model: str) -> str:
    """Return the folder name of a model; for a path, its last part."""
    # The last part of a path; for py:./own.py:make and similar, without `./`.
    path = Path(model)
    name = path.resolve().name if path.exists() else re.sub(r"(^|[:/])(\.{1,2}/)+", r"\1", model)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "model"
