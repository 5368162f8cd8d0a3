"""Measure a MODEL as the model of a report was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipaudit.cli.audit import RUNS, made_folder
from lipaudit.cli.streams import say
from lipaudit.errors import InputError, UsageError
from lipaudit.settings import RunOptions
from lipaudit.settings.option import Settings, flag, option
from lipaudit.settings.parsing import Keywords, Size

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Job, Request
    from lipaudit.engine.ranks import Ranks
    from lipaudit.results import Report

PANEL = "Measure a MODEL now"


def _of_runs(name: str) -> Any:
    """Declare an option as every run has it."""
    return copy(RunOptions.model_fields[name])


class Remeasure(Settings):
    """How a MODEL is measured as the baseline was: where things are, and on what it runs."""

    data: str | None = option(
        None, "Where the same samples lie now.", panel=PANEL, usual="where the baseline says"
    )
    arch: str | None = option(
        None, "Architecture of a weights file.", panel=PANEL, usual="the baseline's"
    )
    model_kwargs: Keywords = option(
        None, "k=v,... for the model's constructor.", panel=PANEL, usual="the baseline's"
    )
    report: Path | None = option(
        None, "Where the report of it is kept.", panel=PANEL, usual="a folder in lipaudit-runs"
    )
    device: str | None = _of_runs("device")
    batch_size: Size = _of_runs("batch_size")
    resume: bool = _of_runs("resume")
    offline: bool = _of_runs("offline")

    @property
    def given(self) -> dict[str, object]:
        """What was given, by name."""
        values = {name: getattr(self, name) for name in self.options()}
        return {
            n: value for n, value in values.items() if value is not None and value is not False
        }


def read_or_measured(
    current: str,
    baseline: Report,
    how: Remeasure,
    *,
    quiet: bool,
    ranks: Ranks | None = None,
) -> Report | None:
    """Read the report, or measure the model as the baseline was measured, and keep the report.

    Args:
        current: a report, or a MODEL.
        baseline: as which it is measured.
        how: how it is.
        quiet: whether nothing is said meanwhile.
        ranks: this process and the others that measure with it.

    Returns:
        The report; None in a process that measured a shard of it for rank 0.

    Raises:
        UsageError: options of a measurement where there is none.
        BaselineError: the samples are not the baseline's; it is said before they are measured.
        LipauditError: whatever else goes wrong.
    """
    from lipaudit import schema

    if not models_of([current]):
        if how.given:
            flags = ", ".join(map(flag, how.given))
            raise UsageError(
                f"{current} is a report: {flags} would do nothing", "They are for a MODEL."
            )
        return schema.load(Path(current))
    from lipaudit.cli.progress import OnStderr, mute_libraries
    from lipaudit.engine.files import require_writable, write
    from lipaudit.engine.merging import executed_together
    from lipaudit.report import render

    if how.report:
        require_writable(how.report)
    with mute_libraries(quiet=quiet):
        job = _prepare(current, baseline, how)
    with (
        OnStderr(current, quiet=quiet) as observer,
        executed_together(job, observer, ranks) as report,
    ):
        if report is None:
            return None
        kept = how.report
        if kept is None:
            folder = RUNS / f"gate-{job.net.info.weights_sha256[:12]}"
            kept = made_folder(folder, "--report") / "report.json"
        write(kept, render(report, "json"))
    if not quiet:
        say(f"measured: {kept}")
    return report


def models_of(given: Iterable[str]) -> list[str]:
    """Return those of some reports and MODELs that are to be measured."""
    return [each for each in given if not each.endswith(".json")]


@contextmanager
def together(*given: str) -> Iterator[Ranks | None]:
    """Meet the other processes that measure a MODEL among reports, if a launcher started some.

    Raises:
        UsageError: there are several.
    """
    from lipaudit.cli.measure import require_one_process
    from lipaudit.engine.place import placed

    models = models_of(given)
    if len(models) > 1:
        require_one_process("comparing several")
    place = placed() if models else None
    if place is None:
        yield None
        return
    from lipaudit.engine.ranks import join

    with join(place) as ranks:
        yield ranks


def _prepare(current: str, baseline: Report, how: Remeasure) -> Job:
    """Load the model and the baseline's samples."""
    from lipaudit.engine.place import placed, share_run
    from lipaudit.engine.prepare import prepare
    from lipaudit.gate import require_samples

    request, place = _request(current, baseline, how), placed()
    if place is not None:
        request = replace(request, run=share_run(request.run, place))
    spec = baseline.run.data.spec
    try:
        job = prepare(request)
    except InputError as error:
        if how.data or repr(spec) not in error.message:
            raise
        raise InputError(
            f"{error.message}: the baseline was measured on it",
            f"Run where {spec} is, or say where the same samples are now with --data PATH.",
        ) from None
    ids = job.samples.batch.ids
    require_samples(baseline, {name: ids[:count] for name, count in job.counts.items()})
    return job


def _request(current: str, baseline: Report, how: Remeasure) -> Request:
    from lipaudit.cli.measure import typed_command
    from lipaudit.engine.prepare import Request
    from lipaudit.gate import read_protocol
    from lipaudit.settings import option_types

    before = read_protocol(baseline)
    run = {"data": before.data, "seed": before.seed, "dtype": before.dtype} | before.options
    given = {name: value for name, value in how.given.items() if name != "report"}
    measures = {
        name: (kind := option_types()[name]).checked({**kind.once, **settings})
        for name, settings in before.settings.items()
    }
    return Request(
        current, measures, RunOptions.checked(run | given), before.samples, command=typed_command()
    )
