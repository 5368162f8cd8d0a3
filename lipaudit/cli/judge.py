"""The commands that compare reports: report, compare, gate, baseline. None of them loads torch."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipaudit.cli.app import app, command, guarded
from lipaudit.cli.options import Common

if TYPE_CHECKING:
    from lipaudit.gate import Judgement
    from lipaudit.gate.comparison import Pair
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

    [dim]Examples:[/]
      [cyan]lipaudit report audit.json -o audit.html[/]
      [cyan]lipaudit report before.json after.json -f markdown[/]
    """
    from lipaudit import schema
    from lipaudit.cli.emit import renderer_of, write
    from lipaudit.report import RENDERERS

    loaded = [schema.load(path) for path in reports]
    for path in output or ():
        write(path, _render(RENDERERS, renderer_of(path), loaded))
    if format is not None or not output:
        sys.stdout.buffer.write(_render(RENDERERS, format or "table", loaded))


def _render(renderers: dict[str, Any], name: str, reports: list[Report]) -> bytes:
    from lipaudit.errors import UsageError

    if name not in renderers:
        raise UsageError(f"unknown format {name!r}", f"Choose one of: {', '.join(renderers)}.")
    return renderers[name](*reports)


@command("compare", panel=COMPARE)
def compare(reports: Reports, format: Format = None, output: Outputs = None) -> None:
    """Compare reports with the first one, sample by sample where they share samples.

    [dim]Example:[/] [cyan]lipaudit compare before.json after.json[/]
    """
    from lipaudit import schema
    from lipaudit.cli.emit import renderer_of, write
    from lipaudit.gate import compare as compared
    from lipaudit.report import RENDERERS

    loaded = [schema.load(path) for path in reports]
    found = compared(loaded)
    verdicts = "".join(map(_told, found.pairs))

    def rendered(name: str) -> bytes:
        if name == "json":
            return found.model_dump_json(indent=2).encode() + b"\n"
        page = _render(RENDERERS, name, loaded)
        return verdicts.encode() + b"\n" + page if name == "table" else page

    for path in output or ():
        write(path, rendered(renderer_of(path)))
    if format is not None or not output:
        sys.stdout.buffer.write(rendered(format or "table"))


def _told(pair: Pair) -> str:
    """Write one comparison: a line per metric, and the change of every head."""
    lines = [f"{pair.new} against {pair.old}"]
    lines += [f"  {verdict.line}" for verdict in pair.verdicts]
    lines += [f"  note: {note}" for note in pair.notes]
    for ratios in pair.ratios:
        lines += ["", f"{ratios.metric}, change of every head (layer down, head across)"]
        lines += [f"{'layer':>7}" + "".join(f"{head:>8}" for head in ratios.heads)]
        lines += [
            f"{layer:>7}" + "".join(f"{_percent(value):>8}" for value in values)
            for layer, values in zip(ratios.layers, ratios.values, strict=True)
        ]
    return "\n".join(lines) + "\n"


def _percent(log_ratio: float | None) -> str:
    return "-" if log_ratio is None else f"{math.expm1(log_ratio):+.1%}"


@command("gate", panel=COMPARE)
def gate(
    current: Annotated[str, typer.Argument(help="A report, or a MODEL to measure now.")],
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
      [cyan]lipaudit gate ./checkpoint -b base.json --fail-on 'jacobian.norm:median <= +5%'[/]
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
    from lipaudit.cli.run import run
    from lipaudit.gate import protocol
    from lipaudit.measures import MEASURES

    how = protocol(baseline)
    reading = how.options | {name: value for name, value in given.items() if value is not None}
    common = Common(data=how.data, seed=how.seed, dtype=how.dtype, quiet=quiet, **reading)
    options = {
        name: MEASURES[name].options.model_validate(settings)
        for name, settings in how.settings.items()
    }
    return run(current, common, options, counts=how.samples)


def _publish(judgement: Judgement, format: str, output: list[Path]) -> None:
    """Write the judgement: files, then GitHub's summary and annotations, then stdout."""
    from lipaudit.cli.emit import write
    from lipaudit.errors import UsageError
    from lipaudit.gate import render_annotations, render_junit, render_markdown, render_text

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

    found = load_baseline(baseline)
    sys.stdout.write(f"baseline because: {found.run.reason or 'no reason given'}\n")
    sys.stdout.flush()
    sys.stdout.buffer.write(RENDERERS["table"](found))


@baselines.command("check")
@guarded
def check(baseline: Kept = DEFAULT_BASE) -> None:
    """Check that a baseline can be read and gated against."""
    from lipaudit.errors import BaselineError
    from lipaudit.gate import load_baseline, problems

    found = problems(load_baseline(baseline))
    if found:
        raise BaselineError(f"{baseline}: {found[0]}", "Save a new one from a finished report.")
    typer.echo(f"{baseline}: fit to gate against")


def _promote(report: Path, output: Path, reason: str) -> None:
    from lipaudit import schema
    from lipaudit.cli.emit import write
    from lipaudit.gate import promote

    write(output, schema.dumps(promote(schema.load(report), reason)).encode())
    typer.echo(f"wrote {output}", err=True)
