"""The commands that compare reports: report, compare, gate, baseline. None of them loads torch."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from lipaudit.cli.app import Group, app, command
from lipaudit.cli.measure import require_alone
from lipaudit.cli.options import Config, Extent, Output, Several, Terminal, read_config
from lipaudit.cli.remeasure import Remeasure, is_report, read_or_measure

COMPARE = "Compare and gate"
SAVED = "A report written with -o X.json."
Saved = Annotated[Path, typer.Argument(metavar="REPORT", help=SAVED)]
DEFAULT_BASE = Path("lipaudit-baseline.json")


@command("report", panel=COMPARE)
def report(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT", help=SAVED)],
    output: Output,
    extent: Several,
    terminal: Terminal,
) -> None:
    """Render a saved report again, or several ranked side by side.

    It needs no model and no torch: the figures are those of the run.

    [dim]Examples:[/]
      [cyan]lipaudit report audit.json -o audit.html[/]
      [cyan]lipaudit report before.json after.json -f markdown[/]
      [cyan]lipaudit report step-*.json --rank-by order -o training.html[/]
    """
    from lipaudit import schema
    from lipaudit.cli.emit import emit
    from lipaudit.report import of_reports

    extent.require_several(len(reports))
    subject = of_reports(*map(schema.load, reports), by=extent.rank_by)
    emit(subject, output, always=False, details=extent.details)


@command("inspect", panel=COMPARE)
def inspect(
    report: Saved,
    output: Output,
    terminal: Terminal,
    sample: Annotated[
        str | None,
        typer.Argument(
            metavar="[SAMPLE]",
            help="A sample: its id (or the first characters) or its place in the data. "
            "Without it: the worst samples.",
        ),
    ] = None,
) -> None:
    """All that a report says of one sample, beside what it says of all.

    [dim]Examples:[/]
      [cyan]lipaudit inspect audit.json[/]
      [cyan]lipaudit inspect audit.json 9206cd4c -o sample.html[/]
      [cyan]lipaudit inspect audit.json cat/0007.png[/]
    """
    from lipaudit import schema
    from lipaudit.cli.emit import emit
    from lipaudit.report import of_sample

    loaded = schema.load(report)
    emit(of_sample(loaded, shlex.quote(str(report)), sample), output, always=False)


@command("compare", panel=COMPARE)
def compare(
    reports: Annotated[
        list[str],
        typer.Argument(metavar="REPORT", help=f"{SAVED} After the first also a MODEL."),
    ],
    how: Remeasure,
    output: Output,
    extent: Extent,
    terminal: Terminal,
) -> None:
    """Compare reports with the first one, sample by sample where they share samples.

    What improved, what regressed and what chance may explain, with 95 % limits; which samples
    changed sides, and which heads moved most. Nothing fails here: that is the gate's. A MODEL in
    place of a later report is measured as the first one was.

    [dim]Examples:[/]
      [cyan]lipaudit compare before.json after.json[/]
      [cyan]lipaudit compare standard.json jasmin.json robust.json -o compared.html[/]
    """
    from lipaudit import schema
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.gate import compare as compared
    from lipaudit.report import REPORT, of_comparison

    check_outputs(output, REPORT)
    # The store of a launcher serves one run: two models would use one port.
    if sum(not is_report(each) for each in reports[1:]) > 1:
        require_alone("comparing several")
    loaded = [schema.load(reports[0])]
    for each in reports[1:]:
        report = read_or_measure(each, loaded[0], how, terminal)
        if report is None:
            return
        loaded.append(report)
    shown = of_comparison(compared(loaded), loaded)
    emit(shown, output, always=False, details=extent.details)


@command("gate", panel=COMPARE)
def gate(
    current: Annotated[
        str, typer.Argument(metavar="CURRENT", help="A report, or a MODEL to measure now.")
    ],
    how: Remeasure,
    output: Output,
    terminal: Terminal,
    baseline: Annotated[
        Path, typer.Option("--baseline", "-b", help="The baseline report.")
    ] = DEFAULT_BASE,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Judge this rule in place of the configured ones; repeatable.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Also fail if a rule is not proven to hold (exit code 6)."),
    ] = False,
    config: Config = None,
) -> None:
    """Fail (exit 1) when a checkpoint is less robust than the baseline.

    With a MODEL in place of a report, the baseline's own protocol is run on it first, on the same
    samples.

    [dim]Examples:[/]
      [cyan]lipaudit gate audit.json --baseline lipaudit-baseline.json[/]
      [cyan]lipaudit gate ./model -b base.json --fail-on 'attack.robust >= -2pp'[/]
      [cyan]lipaudit gate ./model -b base.json --data /data/val --report now.json[/]
    """
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.gate import judge
    from lipaudit.gate.conditions import load_baseline
    from lipaudit.gate.rules import configure
    from lipaudit.report import JUDGEMENT, of_judgement, render

    check_outputs(output, JUDGEMENT)
    before = load_baseline(baseline)
    settings = configure(read_config(config).get("gate", {}), fail_on or (), before.sections)
    settings["strict"] = settings["strict"] or strict
    report = read_or_measure(current, before, how, terminal)
    if report is None:
        return
    judged = judge(report, before, **settings).model_copy(update={"baseline_file": str(baseline)})
    subject = of_judgement(judged)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        # GitHub shows this file below the job.
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(summary).open("ab") as file:
                file.write(render(subject, "markdown"))
        # Later steps of the workflow read the verdict here; a newline would end the value.
        if outputs := os.environ.get("GITHUB_OUTPUT"):
            with Path(outputs).open("ab") as file:
                file.write(f"verdict={' '.join(judged.reason.split())}\n".encode())
    emit(subject, output)
    raise typer.Exit(judged.exit_code)


baselines = typer.Typer(cls=Group, no_args_is_help=True, help="Save, update and check a baseline.")
app.add_typer(baselines, name="baseline", rich_help_panel=COMPARE)
Reason = Annotated[str, typer.Option("--reason", help="Why this report becomes the baseline.")]
Target = Annotated[Path, typer.Option("--output", "-o", help="File of the baseline.")]


@command("save", parent=baselines)
def save(
    report: Saved,
    terminal: Terminal,
    output: Target = DEFAULT_BASE,
    reason: Reason = "first baseline",
) -> None:
    """Promote a report to a baseline; refuses to overwrite one (use update)."""
    from lipaudit.errors import UsageError

    if output.exists():
        where = "" if output == DEFAULT_BASE else f" -o {shlex.quote(str(output))}"
        advice = f"Use: lipaudit baseline update {shlex.quote(str(report))}{where} --reason '...'"
        raise UsageError(f"{output} exists", advice)
    update(report, reason, terminal, output)


@command("update", parent=baselines)
def update(
    report: Saved, reason: Reason, terminal: Terminal, output: Target = DEFAULT_BASE
) -> None:
    """Replace a baseline by a report, and record why."""
    from lipaudit import schema
    from lipaudit.engine.files import require_writable, write
    from lipaudit.gate.conditions import promote

    require_writable(output)
    write(output, schema.dumps(promote(schema.load(report), reason)).encode())
    terminal.tell(f"wrote {output}")


@command("check", parent=baselines)
def check(
    output: Output,
    terminal: Terminal,
    baseline: Annotated[
        Path, typer.Argument(metavar="BASELINE", help="The baseline.")
    ] = DEFAULT_BASE,
) -> None:
    """Check that a baseline can be read and gated against."""
    from lipaudit.cli.emit import emit
    from lipaudit.errors import BaselineError
    from lipaudit.gate.conditions import find_problems, load_baseline
    from lipaudit.report import FACTS, Subject

    if reasons := find_problems(load_baseline(baseline)):
        raise BaselineError(f"{baseline}: {reasons[0]}", "Save a new one from a finished report.")
    record = {"baseline": str(baseline), "fit": True}
    emit(Subject(FACTS, record, lines=[f"{baseline}: usable"]), output)
