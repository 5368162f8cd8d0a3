"""The commands that compare reports: report, compare, gate, baseline. None of them loads torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import app, command, guarded

if TYPE_CHECKING:
    from lipaudit.gate import Judgement
    from lipaudit.report.blocks import Chapter
    from lipaudit.results import Report

COMPARE = "Compare and gate"
Reports = Annotated[list[Path], typer.Argument(help="Reports written with -o X.json.")]
Format = Annotated[
    str | None, typer.Option("--format", "-f", help="table, json, markdown or html.")
]
Outputs = Annotated[
    list[Path] | None, typer.Option("--output", "-o", help="Also write FILE; repeatable.")
]
Base = Annotated[Path, typer.Option("--baseline", "-b", help="The baseline report.")]
DEFAULT_BASE = Path("lipaudit-baseline.json")  # gate.DEFAULT_PATH, which costs an import


@command("report", panel=COMPARE)
def report(reports: Reports, format: Format = None, output: Outputs = None) -> None:
    """Render a saved report again, or several side by side.

    It needs no model and no torch: the figures are those of the run.

    [dim]Examples:[/]
      [cyan]lipaudit report audit.json -o audit.html[/]
      [cyan]lipaudit report before.json after.json -f markdown[/]
    """
    from lipaudit import schema

    _publish_pages([schema.load(path) for path in reports], format, output)


def _publish_pages(
    reports: list[Report],
    format: str | None,
    output: list[Path] | None,
    *,
    lead: Sequence[Chapter] = (),
    json: bytes | None = None,
) -> None:
    """Write reports side by side: files, and stdout where a format or no file is named.

    Args:
        reports: one or more.
        format: what stdout gets.
        output: files; their extensions say the format.
        lead: chapters that go before the sections.
        json: what the format json is, in place of the report.
    """
    from lipaudit.cli.emit import renderer_of
    from lipaudit.engine.files import write
    from lipaudit.errors import UsageError
    from lipaudit.report import RENDERERS, render_terminal

    def rendered(name: str) -> bytes:
        if name == "json":
            return json or RENDERERS["json"](*reports)
        return RENDERERS[name](*reports, lead=lead)

    if format is not None and format not in RENDERERS:
        raise UsageError(f"unknown format {format!r}", f"Choose one of: {', '.join(RENDERERS)}.")
    for path in output or ():
        write(path, rendered(renderer_of(path)))
    if format == "table" or not (format or output):
        render_terminal(*reports, stream=sys.stdout, lead=lead)
    elif format:
        sys.stdout.buffer.write(rendered(format))


@command("compare", panel=COMPARE)
def compare(reports: Reports, format: Format = None, output: Outputs = None) -> None:
    """Compare reports with the first one, sample by sample where they share samples.

    Changes carry 95 % limits, and what the gate would say of each; nothing fails here.

    [dim]Examples:[/]
      [cyan]lipaudit compare before.json after.json[/]
      [cyan]lipaudit compare standard.json jasmin.json robust.json -o compared.html[/]
    """
    from lipaudit import schema
    from lipaudit.gate import compare as compared
    from lipaudit.report.page.comparison import chapters

    loaded = [schema.load(path) for path in reports]
    comparison = compared(loaded)
    json = comparison.model_dump_json(indent=2).encode() + b"\n"
    _publish_pages(loaded, format, output, lead=chapters(comparison), json=json)


@command("gate", panel=COMPARE)
def gate(
    current: Annotated[
        str, typer.Argument(metavar="CURRENT", help="A report, or a MODEL to measure now.")
    ],
    baseline: Base = DEFAULT_BASE,
    fail_on: Annotated[
        list[str] | None, typer.Option(help="A rule, in place of the configured ones; repeatable.")
    ] = None,
    strict: Annotated[bool, typer.Option(help="Fail on what is not proven (exit 6).")] = False,
    output: Outputs = None,
    format: Annotated[str, typer.Option("--format", "-f", help="text, json, markdown.")] = "text",
    config: Annotated[
        Path | None, typer.Option(help="A TOML file in place of pyproject.toml.")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Of a weights file, in place of the baseline's.")
    ] = None,
    model_kwargs: Annotated[
        str | None, typer.Option(help="k=v,... in place of the baseline's.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks.")] = False,
) -> None:
    """Fail (exit 1) when a checkpoint is less robust than the baseline.

    With a MODEL in place of a report, the baseline's own protocol is run on it first.

    [dim]Examples:[/]
      [cyan]lipaudit gate audit.json --baseline lipaudit-baseline.json[/]
      [cyan]lipaudit gate ./model -b base.json --fail-on 'attack.robust >= -2pp'[/]
    """
    from lipaudit.cli.config import read
    from lipaudit.gate import configure, judge, load_baseline

    before = load_baseline(baseline)
    settings = configure(read(config).get("gate", {}), fail_on or ())
    settings["strict"] = settings["strict"] or strict
    report = _current(current, before, quiet=quiet, arch=arch, model_kwargs=model_kwargs)
    judgement = judge(report, before, **settings)
    _publish(judgement, format, output or [])
    raise typer.Exit(judgement.exit_code)


def _current(current: str, baseline: Report, *, quiet: bool, **given: str | None) -> Report:
    """Read the report, or measure the model as the baseline was measured.

    Options that are `given` stand in place of the baseline's.
    """
    from lipaudit import schema

    if current.endswith(".json"):
        return schema.load(Path(current))
    from lipaudit.cli.measure import typed
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.execute import execute
    from lipaudit.engine.prepare import Request, prepare
    from lipaudit.gate import protocol
    from lipaudit.settings import RECORDS, RunOptions

    how = protocol(baseline)
    replaced = {name: value for name, value in given.items() if value is not None}
    run = {"data": how.data, "seed": how.seed, "dtype": how.dtype} | how.options | replaced
    measures = {
        name: RECORDS[name].options.checked(settings) for name, settings in how.settings.items()
    }
    request = Request(current, measures, RunOptions.checked(run), how.samples, command=typed())
    return execute(prepare(request), OnStderr(current, quiet=quiet))


def _publish(judgement: Judgement, format: str, output: list[Path]) -> None:
    """Write the judgement: files, then GitHub's summary and annotations, then stdout."""
    from lipaudit.engine.files import write
    from lipaudit.errors import UsageError
    from lipaudit.report.formats.text import (
        render_annotations,
        render_junit,
        render_markdown,
        render_text,
    )

    texts = {
        "text": lambda: render_text(judgement).encode(),
        "json": lambda: judgement.model_dump_json(indent=2).encode() + b"\n",
        "markdown": lambda: render_markdown(judgement).encode(),
        "junit": lambda: render_junit(judgement),
    }
    suffixes = {".xml": "junit", ".json": "json", ".md": "markdown", ".txt": "text"}
    if format not in texts:
        raise UsageError(f"unknown format {format!r}", f"Choose one of: {', '.join(texts)}.")
    for path in output:
        if path.suffix not in suffixes:
            raise UsageError(f"cannot tell the format of {path}", "Use .xml, .json, .md or .txt.")
        write(path, texts[suffixes[path.suffix]]())
    if os.environ.get("GITHUB_ACTIONS") == "true":
        sys.stderr.write(render_annotations(judgement))
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(render_markdown(judgement))
    sys.stdout.buffer.write(texts[format]())
    sys.stdout.flush()


baselines = typer.Typer(no_args_is_help=True, help="Save, show, check and update a baseline.")
app.add_typer(baselines, name="baseline", rich_help_panel=COMPARE)
Reason = Annotated[str, typer.Option("--reason", help="Why this is the new standard.")]
Source = Annotated[Path, typer.Argument(help="A report written with -o X.json.")]
Target = Annotated[Path, typer.Option("--output", "-o", help="Where the baseline is kept.")]
Kept = Annotated[Path, typer.Argument(help="The baseline.")]


@baselines.command("save")
@guarded
def save(report: Source, output: Target = DEFAULT_BASE, reason: Reason = "first baseline") -> None:
    """Promote a report to a baseline; refuses to overwrite one (use update)."""
    from lipaudit.errors import UsageError

    if output.exists():
        raise UsageError(f"{output} exists", "Use: lipaudit baseline update --reason '...'")
    _promote(report, output, reason)


@baselines.command("update")
@guarded
def update(report: Source, reason: Reason, output: Target = DEFAULT_BASE) -> None:
    """Replace a baseline by a report, and record why."""
    _promote(report, output, reason)


@baselines.command("show")
@guarded
def show(baseline: Kept = DEFAULT_BASE) -> None:
    """Print a baseline as a table."""
    from lipaudit.gate import load_baseline
    from lipaudit.report import RENDERERS

    standard = load_baseline(baseline)
    sys.stdout.write(f"baseline because: {standard.run.reason or 'no reason given'}\n")
    sys.stdout.flush()
    sys.stdout.buffer.write(RENDERERS["table"](standard))


@baselines.command("check")
@guarded
def check(baseline: Kept = DEFAULT_BASE) -> None:
    """Check that a baseline can be read and gated against."""
    from lipaudit.errors import BaselineError
    from lipaudit.gate import load_baseline, problems

    reasons = problems(load_baseline(baseline))
    if reasons:
        raise BaselineError(f"{baseline}: {reasons[0]}", "Save a new one from a finished report.")
    typer.echo(f"{baseline}: fit to gate against")


def _promote(report: Path, output: Path, reason: str) -> None:
    from lipaudit import schema
    from lipaudit.engine.files import write
    from lipaudit.gate import promote

    write(output, schema.dumps(promote(schema.load(report), reason)).encode())
    typer.echo(f"wrote {output}", err=True)
