"""Load the models of reports again: to measure one as a baseline was, or to swap their layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipaudit.cli.audit import RUNS, made_folder
from lipaudit.cli.streams import say
from lipaudit.errors import BaselineError, InputError, UsageError
from lipaudit.settings import JacobianOptions, RunOptions
from lipaudit.settings.jacobian import SWAPPED, Grouping
from lipaudit.settings.option import Need, Settings, flag, option
from lipaudit.settings.parsing import Keywords, Size

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Job, Request
    from lipaudit.engine.ranks import Ranks
    from lipaudit.gate import Comparison
    from lipaudit.results import Report

PANEL, SWAP = "Measure a MODEL now", "Attribution"
ATTRIBUTED = Need("--attribute", lambda swapping: swapping.attribute)


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


class Swapping(Settings):
    """Whether the change of the norm is attributed to layers, and how."""

    attribute: bool = option(
        False,
        "Say which layer's change explains that of the Jacobian norm: load the models, and swap "
        "their layers one by one.",
        panel=SWAP,
    )
    groups: Grouping = option(
        "layer",
        "What is swapped at a time: layer (attention, MLP and norms of a block apart) or block.",
        need=ATTRIBUTED,
        panel=SWAP,
    )
    samples: int = option(
        SWAPPED,
        "How many samples to swap on.",
        "--samples",
        "-n",
        need=ATTRIBUTED,
        panel=SWAP,
        ge=1,
    )

    @property
    def serving(self) -> tuple[str, ...]:
        """The options of `Remeasure` that it makes use of."""
        return ("data", "device", "batch_size", "offline") if self.attribute else ()


def read_or_measured(
    current: str,
    baseline: Report,
    how: Remeasure,
    *,
    quiet: bool,
    serving: Collection[str] = (),
    ranks: Ranks | None = None,
) -> Report:
    """Read the report, or measure the model as the baseline was measured, and keep the report.

    Args:
        current: a report, or a MODEL.
        baseline: as which it is measured.
        how: how it is.
        quiet: whether nothing is said meanwhile.
        serving: the options of `how` that serve something else as well.
        ranks: the other processes that measure with this one, the first of them.

    Raises:
        UsageError: options of a measurement where there is none.
        BaselineError: the samples are not the baseline's; it is said before they are measured.
        LipauditError: whatever else goes wrong.
    """
    from lipaudit import schema

    if not models_of([current]):
        if idle := how.given.keys() - serving:
            flags = ", ".join(flag(name) for name in how.given if name in idle)
            raise UsageError(
                f"{current} is a report: {flags} would do nothing", "They are for a MODEL."
            )
        return schema.load(Path(current))
    from lipaudit.cli.progress import OnStderr, muted
    from lipaudit.engine.execute import executed
    from lipaudit.engine.files import require_writable, write
    from lipaudit.report import render

    if how.report:
        require_writable(how.report)
    with muted(quiet=quiet):
        job = _prepared(current, baseline, how)
    kept = how.report
    if kept is None:
        folder = RUNS / f"gate-{job.net.info.weights_sha256[:12]}"
        kept = made_folder(folder, "--report") / "report.json"
    with (
        OnStderr(current, quiet=quiet) as observer,
        executed(job, observer, ranks=ranks) as report,
    ):
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


def measure_for_first(current: str, baseline: Report, how: Remeasure, ranks: Ranks) -> None:
    """Measure for the first of several processes what it leaves.

    Raises:
        LipauditError: whatever goes wrong, here or there.
    """
    from lipaudit.cli.progress import muted
    from lipaudit.engine.execute import follow

    with muted(quiet=True):
        job = _prepared(current, baseline, how)
    follow(job, ranks)


def _prepared(current: str, baseline: Report, how: Remeasure) -> Job:
    """Load the model and the baseline's samples."""
    from lipaudit.engine.place import local, placed
    from lipaudit.engine.prepare import prepare
    from lipaudit.gate import require_samples

    request, place = _request(current, baseline, how), placed()
    if place is not None:
        request = replace(request, run=local(request.run, place))
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
    return replace(job, processes=1 if place is None else place.size)


def _request(current: str, baseline: Report, how: Remeasure) -> Request:
    from lipaudit.cli.measure import typed_command
    from lipaudit.engine.prepare import Request
    from lipaudit.gate import protocol
    from lipaudit.settings import option_types

    before = protocol(baseline)
    run = {"data": before.data, "seed": before.seed, "dtype": before.dtype} | before.options
    given = {name: value for name, value in how.given.items() if name != "report"}
    measures = {
        name: (kind := option_types()[name]).checked({**kind.once, **settings})
        for name, settings in before.settings.items()
    }
    return Request(
        current, measures, RunOptions.checked(run | given), before.samples, command=typed_command()
    )


def attributed(
    comparison: Comparison,
    reports: Sequence[Report],
    how: Remeasure,
    swapping: Swapping,
    *,
    quiet: bool,
) -> Comparison:
    """Attribute the changes of a comparison's models, against the first, to their layers.

    Raises:
        UsageError: a model was measured from Python and has no name to load it by.
        InputError: a model is another one by now, or of another architecture.
        BaselineError: two reports share no samples.
    """
    from lipaudit.cli.progress import OnStderr, muted
    from lipaudit.engine.attribution import attribute
    from lipaudit.engine.prepare import load_options
    from lipaudit.models.sources.loading import load_net

    first, *others = reports
    with muted(quiet=quiet):
        job = _swapped_into(first, how)
    shares = []
    for report, pair in zip(others, comparison.pairs, strict=True):
        part = _on_shared(job, first, report, swapping.samples)
        with muted(quiet=quiet):
            other = load_net(_reloaded(report), load_options(_run_of(report, how)))
        _require_weights(report, other.info.weights_sha256)
        with OnStderr(report.run.model.spec, quiet=quiet) as observer:
            share = attribute(part, other, grouping=swapping.groups, observer=observer)
        shares.append(share.model_copy(update={"old": pair.old, "new": pair.new}))
    return comparison.model_copy(update={"attributions": tuple(shares)})


def _swapped_into(report: Report, how: Remeasure) -> Job:
    """Load the model of a report, and all of its samples."""
    from lipaudit.engine.prepare import Request, prepare

    section = report.section("jacobian")
    settings = {} if section is None else section.settings | {"norm": "2", "per_layer": False}
    measures = {"jacobian": JacobianOptions.checked(settings)}
    count = {"jacobian": report.run.data.samples}
    job = prepare(Request(_reloaded(report), measures, _run_of(report, how), count))
    _require_weights(report, job.net.info.weights_sha256)
    return job


def _run_of(report: Report, how: Remeasure) -> RunOptions:
    run = {"data": report.run.data.spec, "seed": report.run.seed, "dtype": report.run.dtype}
    given = {n: v for n, v in how.given.items() if n in Swapping(attribute=True).serving}
    return RunOptions.checked(run | report.run.options | given)


def _reloaded(report: Report) -> str:
    """Return by which name a model is loaded again."""
    from lipaudit.models.net import OWN

    model = report.run.model
    if model.source == OWN:
        raise UsageError(
            f"{model.spec} was measured from Python: no name leads back to it",
            "From Python, lipaudit.attribute(OLD, NEW) swaps the layers of two modules.",
        )
    return model.spec


def _require_weights(report: Report, weights: str) -> None:
    model = report.run.model
    if model.weights_sha256 != weights:
        raise InputError(
            f"{model.spec} has other weights by now than when it was measured",
            "Measure it again, and compare with that report.",
        )


def _on_shared(job: Job, old: Report, new: Report, count: int) -> Job:
    """Return a job on the first samples that both reports have."""
    import torch

    known = _ids(old) & _ids(new)
    batch = job.samples.batch
    take = [i for i, name in enumerate(batch.ids) if name in known][:count]
    if not take:
        raise BaselineError(
            f"no sample that both reports have is in {job.samples.spec}",
            "Measure both on the same data, and say where they lie now with --data.",
        )
    samples = replace(job.samples, batch=batch.rows(torch.tensor(take)))
    return replace(job, samples=samples, counts={"jacobian": len(take)})


def _ids(report: Report) -> set[str]:
    return {name for section in report.sections for name in section.ids}
