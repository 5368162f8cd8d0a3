"""Measure a MODEL with the settings of a report."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipaudit.cli.audit import RUNS, make_folder
from lipaudit.cli.options import Terminal
from lipaudit.errors import UsageError
from lipaudit.settings import RunOptions
from lipaudit.settings.option import Keywords, Settings, Size, flag, option

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Request
    from lipaudit.tables import Report

OF_RUN: Any = RunOptions.model_fields


class Remeasure(Settings):
    """The options of a MODEL that is measured like a baseline: other paths, another machine."""

    # Not as for every run: LIPAUDIT_DATA says nothing about the baseline's samples.
    data: str | None = option(
        None, "Where the baseline's samples are now.", usual="the path in the baseline"
    )
    arch: str | None = copy(OF_RUN["arch"])
    model_kwargs: Keywords = copy(OF_RUN["model_kwargs"])
    device: str | None = copy(OF_RUN["device"])
    batch_size: Size = copy(OF_RUN["batch_size"])
    resume: bool = copy(OF_RUN["resume"])
    offline: bool = copy(OF_RUN["offline"])
    report: Path | None = option(
        None, "File for the report of a MODEL.", usual="in a new folder of lipaudit-runs"
    )

    @property
    def given(self) -> dict[str, Any]:
        """Return the given options, by name."""
        values = {name: getattr(self, name) for name in self.options()}
        return {n: v for n, v in values.items() if v is not None and v is not False}


def read_or_measure(
    current: str, baseline: Report, how: Remeasure, terminal: Terminal
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
    from lipaudit.api import open_job
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.execute import run_job
    from lipaudit.engine.files import require_writable, write
    from lipaudit.gate.conditions import require_samples
    from lipaudit.report import render

    path = how.report
    if path:
        require_writable(path)
    request = _plan_again(current, baseline, how)
    with OnStderr(terminal) as observer, open_job(current, request) as job:
        ids = job.samples.batch.ids
        require_samples(baseline, {name: ids[:count] for name, count in job.counts.items()})
        with run_job(job, observer) as report:
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


def _plan_again(model: str, baseline: Report, how: Remeasure) -> Request:
    """Return the request of the baseline for another model; given options change only paths."""
    from lipaudit.cli.measure import typed_command
    from lipaudit.engine.launcher import find_place
    from lipaudit.engine.prepare import Request
    from lipaudit.measures import option_types

    before = baseline.run
    run = {"data": before.data.spec, "seed": before.seed, "dtype": before.dtype} | before.options
    run |= {name: value for name, value in how.given.items() if name != "report"}
    measures, counts = {}, {}
    for section in baseline.sections:
        if "." not in section.measure:
            kind = option_types()[section.measure]
            # `once` has values that old reports lack: the defaults of that time.
            measures[section.measure] = kind.parse({**kind.once, **section.settings})
            counts[section.measure] = len(section.ids) or before.data.samples
    options = RunOptions.parse(run)
    return Request(model, measures, options, counts, command=typed_command(), place=find_place())
