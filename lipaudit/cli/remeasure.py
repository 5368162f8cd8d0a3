"""Measure a MODEL with the settings of a report."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipaudit.cli.audit import RUNS, make_folder
from lipaudit.cli.options import Plain
from lipaudit.errors import InputError, UsageError
from lipaudit.settings import RunOptions
from lipaudit.settings.option import Settings, flag, option
from lipaudit.settings.parsing import Keywords, Size

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Job
    from lipaudit.tables import Report

PANEL = "Measure a MODEL now"
OF_RUN: Any = RunOptions.model_fields


class Remeasure(Settings):
    """How a MODEL is measured as the baseline was: where things are, and on what it runs."""

    data: str | None = option(
        None,
        "Where the baseline's samples are now.",
        panel=PANEL,
        usual="the path in the baseline",
    )
    arch: str | None = option(
        None, "Architecture of a weights file.", panel=PANEL, usual="the baseline's"
    )
    model_kwargs: Keywords = option(
        None, "k=v,... for the model's constructor.", panel=PANEL, usual="the baseline's"
    )
    report: Path | None = option(
        None,
        "Folder for the report of this measurement.",
        panel=PANEL,
        usual="a new folder in lipaudit-runs",
    )
    # Declared in the same way as for every run.
    device: str | None = copy(OF_RUN["device"])
    batch_size: Size = copy(OF_RUN["batch_size"])
    resume: bool = copy(OF_RUN["resume"])
    offline: bool = copy(OF_RUN["offline"])

    @property
    def given(self) -> dict[str, object]:
        """Return the given options, by name."""
        values = {name: getattr(self, name) for name in self.options()}
        return {n: v for n, v in values.items() if v is not None and v is not False}


def read_or_measure(
    current: str, baseline: Report, how: Remeasure, terminal: Plain
) -> Report | None:
    """Read the report, or measure the model with the baseline's settings and save the report.

    Args:
        current: a report, or a MODEL.
        baseline: the report with the settings.
        how: the options that may differ.
        terminal: what is said on stderr.

    Returns:
        The report; None in a process that measured a shard for rank 0.

    Raises:
        UsageError: options of a measurement are given for a report.
        BaselineError: the samples differ from the baseline's; raised before the measurement.
        LipauditError: any other failure.
    """
    from lipaudit import schema

    if is_report(current):
        if how.given:
            flags = ", ".join(map(flag, how.given))
            raise UsageError(
                f"{current} is a report, so {flags} has no effect",
                "Leave them out: they are for a MODEL.",
            )
        return schema.load(Path(current))
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.execute import run_job
    from lipaudit.engine.files import require_writable, write
    from lipaudit.report import render

    path = how.report
    if path:
        require_writable(path)
    with (
        OnStderr(current, quiet=terminal.quiet) as observer,
        run_job(_prepare(current, baseline, how), observer) as report,
    ):
        if report is None:
            return None
        if path is None:
            folder = RUNS / f"gate-{report.run.model.weights_sha256[:12]}"
            path = make_folder(folder, "--report") / "report.json"
        write(path, render(report, "json"))
    terminal.tell(f"measured: {path}")
    return report


def is_report(given: str) -> bool:
    """Say whether a command got a report rather than a MODEL."""
    return given.endswith(".json")


def _prepare(current: str, baseline: Report, how: Remeasure) -> Job:
    """Load the model and the baseline's samples, with the baseline's settings."""
    from lipaudit.cli.measure import typed_command
    from lipaudit.engine.launcher import find_place
    from lipaudit.engine.prepare import Request, prepare
    from lipaudit.gate import require_samples
    from lipaudit.measures import option_types

    before, spec = baseline.run, baseline.run.data.spec
    # Given options change only paths and the machine.
    run = {"data": spec, "seed": before.seed, "dtype": before.dtype} | before.options
    run |= {name: value for name, value in how.given.items() if name != "report"}
    measures, counts = {}, {}
    for section in baseline.sections:
        if "." not in section.measure:
            kind = option_types()[section.measure]
            # `once` has values that old reports lack: the defaults of that time.
            measures[section.measure] = kind.checked({**kind.once, **section.settings})
            counts[section.measure] = len(section.ids) or before.data.samples
    request = Request(
        current,
        measures,
        RunOptions.checked(run),
        counts,
        command=typed_command(),
        place=find_place(),
    )
    try:
        job = prepare(request)
    except InputError as error:
        if how.data or repr(spec) not in error.message:
            raise
        raise InputError(
            f"{error.message}, and the baseline was measured on it",
            f"Run in the folder that holds {spec}, or give the path of the same samples with "
            "--data PATH.",
        ) from None
    ids = job.samples.batch.ids
    require_samples(baseline, {name: ids[:count] for name, count in job.counts.items()})
    return job
