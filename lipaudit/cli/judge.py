"""The commands that compare reports: report, compare, gate, baseline. None of them loads torch.

In place of a report, `compare` and `gate` take a MODEL, measured with the settings of the first.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from copy import copy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipaudit import schema
from lipaudit.cli import app
from lipaudit.cli.app import Config, Extent, Group, Output, Several, Terminal
from lipaudit.cli.measure import RUNS, make_folder, refuse_partial_run, typed_command
from lipaudit.cli.output import check_outputs, emit, emit_facts
from lipaudit.engine import files, launcher
from lipaudit.errors import BaselineError, UsageError
from lipaudit.measures import find_measure, load_measures
from lipaudit.settings import RunOptions
from lipaudit.settings.option import Option, Settings, add_options, flag, option

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Request
    from lipaudit.tables import Report

SAVED = "A report written with -o X.json."
Saved = Annotated[Path, typer.Argument(metavar="REPORT", help=SAVED)]
SavedReports = Annotated[list[Path], typer.Argument(metavar="REPORT", help=SAVED)]
DEFAULT_BASE = Path("lipaudit-baseline.json")


# The options of a run that may differ from those of the baseline's run.
REPEATED = (
    "arch",
    "model_kwargs",
    "quantize",
    "autocast",
    "device",
    "batch_size",
    "resume",
    "offline",
)


class Remeasure(Settings):
    """The options of a MODEL that is measured like a baseline: other paths, another machine."""

    # Not as for every run: LIPAUDIT_DATA says nothing about the baseline's samples.
    data: str | None = option(
        None, "Where the baseline's samples are now.", usual="the path in the baseline"
    )
    classes: str | None = option(
        None,
        "Where the baseline's file of class names is now.",
        usual="the path in the baseline",
        rare=True,
    )
    report: Path | None = option(
        None, "File for the report of a MODEL.", usual="in a new folder of lipaudit-runs"
    )

    @classmethod
    def complete(cls) -> type[Remeasure]:
        """Return the class with all options, which `Settings` uses in place of this class.

        They include options of a run, and of files that may have moved since the baseline. The
        latter are declared by measures, which are imported late: only when the options are needed.
        """
        if cls is Remeasure:
            return load_remeasure()
        return cls

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the options by name, in the order of the help."""
        known = super().options()
        # --report is declared before the options that measures add: move it to the end.
        known["report"] = known.pop("report")
        return known

    @property
    def moved(self) -> dict[str, dict[str, Any]]:
        """Return the new paths of files that the baseline's run read, by measure and option.

        Only paths that the user typed, for example `{"attack": {"transfer": (path, ...)}}`.
        """
        moved: dict[str, dict[str, Any]] = {}
        for name, measure in load_measures().items():
            # `measure.moved` has the options whose files may have moved since the baseline.
            for field in measure.moved.keys() & self.model_fields_set:
                moved.setdefault(name, {})[field] = getattr(self, field)
        return moved


@cache
def load_remeasure() -> type[Remeasure]:
    """Return `Remeasure`, the options for a MODEL that is measured like a baseline, extended.

    It gets the options of a run in REPEATED. Measures add options for files that may have moved
    since the baseline, such as --transfer.
    """
    fields = {name: copy(RunOptions.model_fields[name]) for name in REPEATED}
    for measure in load_measures().values():
        fields |= measure.moved
    return add_options(Remeasure, fields)


def report(reports: SavedReports, output: Output, extent: Several, terminal: Terminal) -> None:
    """Render a saved report again, or several ranked side by side.

    It needs no model and no torch: the figures are those of the run.

    Examples:
      lipaudit report audit.json -o audit.html
      lipaudit report before.json after.json -f markdown
      lipaudit report step-*.json --rank-by order -o training.html
    """
    from lipaudit.report import of_reports

    extent.check_ranking(len(reports))
    subject = of_reports(*map(schema.load, reports), by=extent.rank_by)
    emit(subject, output, print_always=False, terminal=terminal, details=extent.details)


ONE_SAMPLE = "A sample: its id (or how it begins) or its place in the data; usual: the worst ones."
SampleArgument = Annotated[str | None, typer.Argument(metavar="[SAMPLE]", help=ONE_SAMPLE)]


def inspect(
    report: Saved, output: Output, terminal: Terminal, sample: SampleArgument = None
) -> None:
    """All that a report says of one sample, beside what it says of all.

    Examples:
      lipaudit inspect audit.json
      lipaudit inspect audit.json 9206cd4c -o sample.html
      lipaudit inspect audit.json cat/0007.png
    """
    from lipaudit.report import of_sample

    emit(
        of_sample(schema.load(report), shlex.quote(str(report)), sample),
        output,
        print_always=False,
        terminal=terminal,
    )


AFTER = f"{SAVED} After the first also a MODEL."
Compared = Annotated[list[str], typer.Argument(metavar="REPORT", help=AFTER)]


def compare(
    reports: Compared, remeasure: Remeasure, output: Output, extent: Extent, terminal: Terminal
) -> None:
    """Compare reports with the first one, sample by sample where they share samples.

    What improved, what regressed and what chance may explain, with 95% limits; which samples
    changed sides, and which heads moved most. Nothing fails here: that is the gate's. A MODEL in
    place of a later report is measured as the first one was.

    Examples:
      lipaudit compare before.json after.json
      lipaudit compare standard.json jasmin.json robust.json -o compared.html
    """
    from lipaudit import gate
    from lipaudit.report import REPORT, of_comparison

    check_outputs(output, REPORT)
    first, *others = reports
    models = sum(not is_report(other) for other in others)
    if models > 1:
        _refuse_options_of_one(models, remeasure)
    # A MODEL in place of a report is measured with the settings of the first report.
    loaded = [schema.load(first)]
    paths = [first]
    for other in others:
        report, path = read_or_measure(other, loaded[0], Path(first), remeasure, terminal)
        loaded.append(report)
        paths.append(str(path))
    emit(
        of_comparison(gate.compare(loaded), loaded, paths),
        output,
        print_always=False,
        terminal=terminal,
        details=extent.details,
    )


def _refuse_options_of_one(models: int, remeasure: Remeasure) -> None:
    """Refuse --report and several processes, if several models are measured for a comparison."""
    # Processes of a launcher (torchrun, srun) exchange results over one port, which a second model
    # could not use: several models need a single process.
    refuse_partial_run("comparing several")
    if remeasure.report:
        raise UsageError(
            f"--report names one file, and {models} MODELs are measured",
            "Leave it out: each report gets a folder.",
        )


CURRENT = typer.Argument(metavar="CURRENT", help="A report, or a MODEL to measure now.")
BASELINE = typer.Option("--baseline", "-b", help="The baseline report.")
INSTEAD = "Judge this rule in place of the configured ones; repeatable."
STRICT = typer.Option("--strict", help="Also fail if a rule is not proven to hold (exit code 6).")


def gate(
    current: Annotated[str, CURRENT],
    remeasure: Remeasure,
    output: Output,
    terminal: Terminal,
    baseline: Annotated[Path, BASELINE] = DEFAULT_BASE,
    fail_on: Annotated[list[str] | None, typer.Option(metavar="RULE", help=INSTEAD)] = None,
    strict: Annotated[bool, STRICT] = False,
    config: Config = None,
) -> None:
    """Fail (exit 1) when a checkpoint is less robust than the baseline.

    With a MODEL in place of a report, the baseline's own protocol is run on it first, on the same
    samples.

    Examples:
      lipaudit gate audit.json --baseline lipaudit-baseline.json
      lipaudit gate ./model -b base.json --fail-on 'attack.robust >= -2pp'
      lipaudit gate ./model -b base.json --data /data/val --report now.json
    """
    from lipaudit.gate import judge
    from lipaudit.gate.conditions import load_baseline
    from lipaudit.gate.judging import require_judgeable
    from lipaudit.gate.rules import configure
    from lipaudit.report import JUDGEMENT, of_judgement, render

    check_outputs(output, JUDGEMENT)
    before = load_baseline(baseline)
    # The result is not used: this raises an error for unknown tables, such as [gates], and for
    # options of the gate outside of [gate].
    app.read_defaults(config)
    settings = configure(app.read_config(config).get("gate", {}), fail_on or (), before.sections)
    settings["strict"] = settings["strict"] or strict
    if not is_report(current):  # a wrong rule fails here, not after hours of measuring
        require_judgeable(settings["rules"], before, settings["alpha"])
    report, path = read_or_measure(current, before, baseline, remeasure, terminal)
    judgement = judge(report, before, **settings)
    judgement = judgement.model_copy(update={"baseline_file": str(baseline)})
    subject = of_judgement(judgement, [before, report], [str(baseline), str(path)])
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _tell_github(render(subject, "markdown"), judgement.reason)
    emit(subject, output)
    raise typer.Exit(judgement.exit_code)


def _tell_github(summary: bytes, verdict: str) -> None:
    """Show a summary below the job of a GitHub workflow, and give its later steps the verdict."""
    _append("GITHUB_STEP_SUMMARY", summary)
    # A newline would end the value.
    line = " ".join(verdict.split())
    _append("GITHUB_OUTPUT", f"verdict={line}\n".encode())


def _append(variable: str, content: bytes) -> None:
    """Append to the file that an environment variable names, if it is set."""
    path = os.environ.get(variable)
    if path:
        with Path(path).open("ab") as file:
            file.write(content)


baselines = Group(
    name="baseline",
    members={
        name: ("Commands", f"lipaudit.cli.judge:{name}") for name in ("save", "update", "check")
    },
    help="Save, update and check a baseline.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
Reason = Annotated[str, typer.Option("--reason", help="Why this report becomes the baseline.")]
Target = Annotated[Path, typer.Option("--output", "-o", help="File of the baseline.")]


def save(
    report: Saved,
    terminal: Terminal,
    output: Target = DEFAULT_BASE,
    reason: Reason = "first baseline",
) -> None:
    """Promote a report to a baseline; refuses to overwrite one (use update)."""
    if output.exists():
        words = shlex.quote(str(report))
        if output != DEFAULT_BASE:
            words += f" -o {shlex.quote(str(output))}"
        raise UsageError(
            f"{output} exists", f"Use: lipaudit baseline update {words} --reason '...'"
        )
    update(report, reason, terminal, output)


def update(
    report: Saved, reason: Reason, terminal: Terminal, output: Target = DEFAULT_BASE
) -> None:
    """Replace a baseline by a report, and record why."""
    from lipaudit.gate.conditions import promote
    from lipaudit.gate.planning import describe_power

    files.require_writable(output)
    baseline = promote(schema.load(report), reason)
    files.write(output, schema.dumps(baseline).encode())
    terminal.tell(f"wrote {output}")
    with suppress(UsageError):  # no default rule exists for its sections
        for line in describe_power(baseline):
            terminal.tell(f"  {line}")


Kept = Annotated[Path, typer.Argument(metavar="BASELINE", help="The baseline.")]


def check(output: Output, terminal: Terminal, baseline: Kept = DEFAULT_BASE) -> None:
    """Check that a baseline can be read and gated against."""
    from lipaudit.gate.conditions import find_problems, load_baseline

    problems = find_problems(load_baseline(baseline))
    if problems:
        raise BaselineError(f"{baseline}: {problems[0]}", "Save a new one from a finished report.")
    emit_facts({"baseline": str(baseline), "fit": True}, output, [f"{baseline}: usable"])


def read_or_measure(
    current: str, baseline: Report, file: Path, remeasure: Remeasure, terminal: Terminal
) -> tuple[Report, Path]:
    """Return a report and its file: it is read, or measured with the baseline's settings.

    Args:
        current: a report, or a MODEL.
        baseline: the report with the settings.
        file: path of the baseline; its saved adversarial examples may be in the same folder.
        remeasure: the options that may differ from those of the baseline's run.
        terminal: gets the messages.

    Raises:
        Exit: this process measured a shard for rank 0.
        UsageError: options of a measurement are given for a report.
        BaselineError: the samples differ from the baseline's; raised before the measurement.
        LipauditError: any other failure.
    """
    if not is_report(current):
        return _measure_again(current, baseline, file, remeasure, terminal)
    flags = ", ".join(map(flag, sorted(remeasure.model_fields_set)))
    if flags:
        raise UsageError(
            f"{current} is a report, so {flags} has no effect",
            "Leave them out: they are for a MODEL.",
        )
    return schema.load(Path(current)), Path(current)


def _measure_again(
    model: str, baseline: Report, file: Path, remeasure: Remeasure, terminal: Terminal
) -> tuple[Report, Path]:
    """Measure a model as the baseline was measured, on the same samples, and save the report.

    Arguments and errors are those of `read_or_measure`.
    """
    from lipaudit.api import open_job
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine import execute
    from lipaudit.gate.conditions import require_samples
    from lipaudit.report import render

    path = remeasure.report
    if path:
        files.require_writable(path)
    request = _plan_remeasurement(model, baseline, file, remeasure, terminal)
    with OnStderr(terminal) as observer, open_job(model, request) as job:
        ids = job.samples.batch.ids
        # Each measure takes the first samples, as many as in the baseline.
        require_samples(baseline, {name: ids[:count] for name, count in job.counts.items()})
        if path is None:
            folder = RUNS / f"gate-{job.net.weights_sha256[:12]}"
            path = make_folder(folder, flag="--report") / "report.json"
        with execute.run_job(job, observer) as report:
            if report is not None:
                files.write(path, render(report, "json"))
    if report is None:  # this process measured a part for another one, which has the report
        raise typer.Exit
    terminal.tell(f"measured: {path}")
    return report, path


def _merge_run_options(baseline: Report, remeasure: Remeasure) -> RunOptions:
    """Return the options of the baseline's run, replaced by options that are typed now."""
    before = baseline.run
    run = {"data": before.data.spec, "seed": before.seed, "dtype": before.dtype} | before.options
    for name in remeasure.model_fields_set & RunOptions.model_fields.keys():
        run[name] = getattr(remeasure, name)
    return RunOptions.parse(run)


def is_report(given: str) -> bool:
    """Say whether a command got a report rather than a MODEL."""
    return given.endswith(".json")


def _plan_remeasurement(
    model: str, baseline: Report, file: Path, remeasure: Remeasure, terminal: Terminal
) -> Request:
    """Return the request to measure a model as the baseline was measured, on the same samples.

    Args:
        model: the MODEL.
        baseline: the report with the settings.
        file: path of the baseline; its saved adversarial examples may be in the same folder.
        remeasure: the options that may differ from those of the baseline's run.
        terminal: gets the messages.
    """
    from lipaudit.engine.prepare import Request

    moved = _find_moved_files(baseline, file, remeasure, terminal)
    measures = {}
    counts = {}
    for section in baseline.main_sections:
        kind = find_measure(section.measure).options
        # Older reports do not store all options: `older_defaults` has the values of that time.
        settings = {**kind.older_defaults, **section.settings}
        measures[section.measure] = kind.parse(settings | moved.get(section.measure, {}))
        counts[section.measure] = len(section.ids) or baseline.run.data.samples
    return Request(
        model,
        measures=measures,
        run=_merge_run_options(baseline, remeasure),
        counts=counts,
        command=typed_command(),
        place=launcher.find_place(),
    )


def _find_moved_files(
    baseline: Report, file: Path, remeasure: Remeasure, terminal: Terminal
) -> dict[str, Any]:
    """Return the files to read in place of the baseline's, by measure and option.

    An example is `{"attack": {"transfer": (path, ...)}}`. These are the files that the user typed,
    because those of the baseline's run may have moved. If no adversarial examples were typed,
    those that the baseline's run saved are added.

    Args:
        baseline: the report.
        file: path of the baseline; its saved examples may be in the same folder.
        remeasure: the options that the user typed.
        terminal: gets the messages.

    Raises:
        UsageError: a file is for a measure that the baseline does not have.
    """
    moved = remeasure.moved
    # Adversarial examples of another model: the files typed for --transfer, else the files that
    # the baseline's run saved, if they still exist.
    examples = moved.get("attack", {}).get("transfer", ())
    if not examples:
        examples = _find_examples(baseline, file, terminal)
    for measure, given in moved.items():
        if baseline.section(measure) is None:
            # The message names one of the typed options: the first by name.
            text = f"{flag(min(given))} needs a section {measure} in the baseline"
            raise UsageError(text, "Leave it out.")
    # After the check: examples that nobody typed must not be refused as an option without effect.
    moved.setdefault("attack", {})["transfer"] = examples
    return moved


def _find_examples(baseline: Report, file: Path, terminal: Terminal) -> tuple[Path, ...]:
    """Return the files of adversarial examples that the baseline saved, if they still exist.

    Raises:
        BaselineError: the baseline tried examples of another model, and no file is left to try.
    """
    from lipaudit.attacks.transfer import find_saved
    from lipaudit.gate.conditions import list_examples, tries_transfer

    examples: tuple[Path, ...] = ()
    saved = list_examples(baseline)
    if saved:
        examples = find_saved(saved, file.parent)
        names = ", ".join(map(str, examples)) or "none: moved or changed, see --transfer"
        terminal.tell(f"examples that {file} saved, tried again: {names}")
    attack = baseline.section("attack")
    if not examples and attack is not None and tries_transfer(attack):
        raise BaselineError(
            "baseline: the attack transfer tried examples of another model",
            "Give this model examples too: --transfer FILE.",
        )
    return examples
