"""Run the measures of a job, keep what is finished, and make the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from lipaudit.engine.journal import Journal, pack_parts
from lipaudit.engine.observer import Observer
from lipaudit.engine.prepare import Job
from lipaudit.engine.provenance import origins, provenance
from lipaudit.engine.task import Task
from lipaudit.measures import Part
from lipaudit.measures.measure import sample_ids
from lipaudit.models.net import OWN
from lipaudit.models.precision import eager, exact_arithmetic
from lipaudit.results import Note, Report, Section
from lipaudit.results.report import Shard
from lipaudit.results.worst import worst
from lipaudit.settings import MeasureOptions

Adapt = Callable[[MeasureOptions, Sequence[Section]], MeasureOptions]
"""Changes the options of a measure by the sections of those before it."""
Join = Callable[[Report], Report]


@contextmanager
def executed(
    job: Job,
    observer: Observer | None = None,
    *,
    adapt: Adapt = lambda options, _: options,
    join: Join = lambda report: report,
) -> Iterator[Report]:
    """Run the measures of a job; the block writes the report.

    What is measured is kept on disk until the block has ended well: a full disk loses nothing.
    Where the request takes a partial report, a measure that fails leaves its reason in its place
    and the others run; only where all fail, the first error is raised. Once the time of the
    request is up no further batch is begun: the report is partial, and of what is measured.

    Args:
        job: from `prepare`.
        observer: is told what happens.
        adapt: changes the options of a measure by the sections of those before it.
        join: makes the report of the whole run of that of a shard, where other processes measure
            the others.

    Raises:
        LipauditError: whatever goes wrong, with the exit code it deserves.
    """
    observer = observer or Observer()
    for note in job.notes:
        observer.note(note)
    journals: dict[str, Journal] = {}
    measured: dict[str, list[Part]] = {}
    exact = exact_arithmetic(job.net.device)
    with _kept_if_cut_short(job, observer, journals), eager(), exact:
        sections: list[Section] = []
        errors: list[Exception] = []
        for name, given in job.request.measures.items():
            task = Task(job, name, adapt(given, sections), observer)
            # What makes a module of one's own give its numbers has no name: it keeps nothing.
            keeps = job.net.info.source != OWN
            journals[name] = Journal(task.identity(), keeps=keeps)
            try:
                measured[name] = task.parts(journals[name])
                sections += task.sections(measured[name])
            except Exception as error:
                if not job.request.partial:
                    raise
                errors.append(error)
                sections.append(task.failed(error))
        if len(errors) == len(job.request.measures):
            raise errors[0]
        cut = any(section.unmeasured for section in sections)
        status: Literal["complete", "partial"] = "partial" if errors or cut else "complete"
        report = with_worst_drawn(
            Report(
                run=provenance(job),
                status=status,
                shard=_shard(job, measured),
                samples=origins(job.samples),
                sections=tuple(sections),
            )
        )
        report = join(report)
        yield report
        for journal in journals.values() if report.status == "complete" else ():
            journal.clear()


def execute(
    job: Job, observer: Observer | None = None, *, adapt: Adapt = lambda options, _: options
) -> Report:
    """Run the measures of a job, as `executed` does, and return the report.

    Raises:
        LipauditError: whatever goes wrong, with the exit code it deserves.
    """
    with executed(job, observer, adapt=adapt) as report:
        return report


def with_worst_drawn(report: Report) -> Report:
    """Keep the pictures and the tokens of the worst samples alone: a report stays small."""
    kept = worst(report)
    sections = tuple(
        s.model_copy(
            update={
                "examples": {n: s.examples[n] for n in kept if n in s.examples},
                "gradients": {n: s.gradients[n] for n in kept if n in s.gradients},
            }
        )
        for s in report.sections
    )
    return report.model_copy(update={"sections": sections})


def _shard(job: Job, measured: Mapping[str, Sequence[Part]]) -> Shard | None:
    """Return what the whole is made of, where a job measures some samples of a run."""
    if job.request.run.shard is None:
        return None
    number, of = job.request.run.shard
    return Shard(
        number=number,
        of=of,
        ids=job.samples.batch.ids,
        counts=dict(job.counts),
        notes=job.notes,
        options={name: o.unkept() for name, o in job.request.measures.items()},
        parts={name: pack_parts(parts) for name, parts in measured.items()},
    )


def _kept(job: Job, journals: Mapping[str, Journal]) -> Iterator[str]:
    """Yield how many samples of each measure are kept."""
    for name, journal in journals.items():
        ids = job.samples.batch.ids[: job.counts[name]]
        if done := len(sample_ids(journal.parts(ids))):
            yield f"{done} of {len(ids)} samples of {name}"


@contextmanager
def _kept_if_cut_short(
    job: Job, observer: Observer, journals: Mapping[str, Journal]
) -> Iterator[None]:
    try:
        yield
    except (Exception, KeyboardInterrupt):
        if kept := ", ".join(_kept(job, journals)):
            text = f"{kept} are kept: {job.request.continuation}"
            observer.note(Note(level="info", code="kept", text=text))
        raise
