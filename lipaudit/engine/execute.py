"""Run the measures of a job, keep what is finished, and make the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Literal

from lipaudit.data.batch import Batch, Share
from lipaudit.engine.estimate import numerical, proofs
from lipaudit.engine.files import write
from lipaudit.engine.journal import Journal, packed
from lipaudit.engine.observer import Observer
from lipaudit.engine.prepare import Job
from lipaudit.engine.provenance import origins, provenance, versions
from lipaudit.errors import EvaluationError, as_user_meets, bug, out_of_memory
from lipaudit.measures import MEASURES, Measure, Part
from lipaudit.measures.by_layer import chosen
from lipaudit.measures.measure import listening, sample_ids
from lipaudit.models.attention.survey import surveyed
from lipaudit.models.net import OWN
from lipaudit.models.precision import eager, exact_arithmetic
from lipaudit.results import Note, Report, Section
from lipaudit.results.report import Failure, Shard
from lipaudit.results.worst import worst
from lipaudit.settings import BoundsOptions, CertifyOptions, MeasureOptions

Adapt = Callable[[MeasureOptions, Sequence[Section]], MeasureOptions]
"""Changes the options of a measure by the sections of those before it."""


@contextmanager
def executed(
    job: Job, observer: Observer | None = None, *, adapt: Adapt = lambda options, _: options
) -> Iterator[Report]:
    """Run the measures of a job; the block writes the report.

    What is measured is kept on disk until the block has ended well: a full disk loses nothing.
    Where the request takes a partial report, a measure that fails leaves its reason in its place
    and the others run; only where all fail, the first error is raised.

    Args:
        job: from `prepare`.
        observer: is told what happens.
        adapt: changes the options of a measure by the sections of those before it.

    Raises:
        LipauditError: whatever goes wrong, with the exit code it deserves.
    """
    observer = observer or Observer()
    for note in job.notes:
        observer.note(note)
    journals: list[Journal] = []
    measured: dict[str, list[Part]] = {}
    exact = exact_arithmetic(job.net.device)
    with ExitStack() as held, _kept_if_cut_short(observer, journals), eager(), exact:
        sections: list[Section] = []
        errors: list[Exception] = []
        for name, given in job.request.measures.items():
            task = _Task(job, name, adapt(given, sections), observer)
            journal = Journal(task.identity())
            # What makes a module of one's own give its numbers has no name: it keeps nothing.
            own = job.net.info.source == OWN
            journals.append(journal if own else held.enter_context(journal))
            try:
                measured[name] = task.parts(journals[-1])
                sections += task.sections(measured[name])
            except Exception as error:
                if not job.request.partial:
                    raise
                errors.append(error)
                sections.append(task.failed(error))
        if len(errors) == len(job.request.measures):
            raise errors[0]
        status: Literal["complete", "partial"] = "partial" if errors else "complete"
        yield with_worst_drawn(
            Report(
                run=provenance(job),
                status=status,
                shard=_shard(job, measured),
                samples=origins(job.samples),
                sections=tuple(sections),
            )
        )
        for journal in journals if not errors else ():
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


def reduced(
    name: str, parts: Sequence[Part], options: MeasureOptions, notes: tuple[Note, ...]
) -> list[Section]:
    """Return the sections of a measure.

    Args:
        name: of the measure.
        parts: of all samples, in their order.
        options: it ran with.
        notes: remarks on loading.
    """
    first, *others = MEASURES[name].summarise(parts, options)
    return [first.model_copy(update={"notes": notes + first.notes}), *others]


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
        parts={name: packed(parts) for name, parts in measured.items()},
    )


@contextmanager
def _kept_if_cut_short(observer: Observer, journals: Sequence[Journal]) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader had enough: nothing is lost
        raise
    except (Exception, KeyboardInterrupt):
        if any(journal.paths() for journal in journals):
            text = "what is finished is kept: the same command with --resume goes on"
            observer.note(Note(level="info", code="kept", text=text))
        raise


class _Task:
    """One measure of a job, on the samples that are measured here."""

    def __init__(self, job: Job, name: str, options: MeasureOptions, observer: Observer) -> None:
        self.job, self.name, self.options, self.observer = job, name, options, observer
        self.measure: Measure = MEASURES[name]
        self.batches = job.batches(name)
        self.ids = tuple(chain.from_iterable(batch.ids for batch in self.batches))

    def sections(self, parts: Sequence[Part]) -> list[Section]:
        """Write the files of the options, and sum up."""
        if not parts:
            settings, notes = self.options.model_dump(), (*self.job.notes, self._empty())
            return [Section(measure=self.name, settings=settings, notes=notes)]
        written = self.measure.written(parts, self.options)
        for path, content in zip(self.options.files, written, strict=True):
            write(path, content)
        return reduced(self.name, parts, self.options, self.job.notes)

    def _empty(self) -> Note:
        text = (
            f"{self.name} has nothing to measure in this shard: {self.job.counts[self.name]} "
            f"samples in batches of {self.job.cut(self.name)} are fewer batches than shards"
        )
        return Note(level="info", code="empty-shard", text=text)

    def failed(self, error: Exception) -> Section:
        """Say why there are no figures, in their place."""
        self.observer.fails(self.name, error)
        fault = as_user_meets(error) or bug(error)
        failure = Failure(reason=fault.message, advice=fault.advice, exit_code=fault.exit_code)
        return Section(
            measure=self.name,
            settings=self.options.model_dump(),
            notes=self.job.notes,
            failure=failure,
        )

    def identity(self) -> dict[str, object]:
        """Return all that decides the numbers, but for how samples are batched."""
        net, run = self.job.net, self.job.request.run
        return {
            "measure": self.name,
            "options": dict(self.options),
            "model": (net.info.spec, net.info.weights_sha256, net.info.preprocess, str(net.dtype)),
            "device": net.device.type,
            "reading": run.reading(),
            "samples": self.job.samples.batch.ids[: self.job.counts[self.name]],
            "shard": run.shard,
            "versions": versions(),
        }

    def parts(self, journal: Journal) -> list[Part]:
        """Return the parts, those of an interrupted run among them if it is to be resumed."""
        resume, total = self.job.request.run.resume, len(self.ids)
        kept = journal.parts(self.ids)
        if kept:
            self.observer.note(_kept(self.name, len(sample_ids(kept)), total, resume))
        kept = kept if resume else []
        done = len(sample_ids(kept))
        self.observer.begins(self.name, total - done)
        with listening(partial(self.observer.moves, self.name)):
            for part in journal.recorded(self._measured(done), after=len(kept)):
                self.observer.advances(self.name, len(part.ids))
                kept.append(part)
        self.observer.ends(self.name)
        return kept

    def _forewarn(self, first: Batch) -> None:
        """Say before it begins what will take long, as the layers are; they are surveyed once."""
        net, options = self.job.net, self.options
        notes: tuple[Note, ...] = ()
        if isinstance(options, BoundsOptions):
            sites = surveyed(net, first.to(net.device, net.dtype))
            notes = numerical(self.job, chosen(sites, options.layers))
        elif isinstance(options, CertifyOptions):
            notes = proofs(self.job)
        for note in notes:
            self.observer.note(note)

    def _measured(self, done: int) -> Iterator[Part]:
        """Yield the parts; when memory runs out, go on from there with half the batch."""
        net, left = self.job.net, _rest(self.batches, done)
        first, size, begun = self.job.first(self.name), self.job.size(self.name), False
        while left:
            try:
                if not begun:
                    self._forewarn(first)
                    begun = True
                for part in self.measure.parts(net, self._loaded(first, left), self._sized(size)):
                    left = _rest(left, len(part.ids))
                    yield part
            except Exception as error:
                if not out_of_memory(error):
                    raise
                if size == 1:
                    raise EvaluationError(
                        "out of memory with one sample at a time",
                        "Try --device cpu or --max-tokens.",
                    ) from None
                size = max(1, min(size, max(map(len, left))) // 2)
                first = first[:size].trimmed()
                if self.measure.chunk is None:
                    left = [piece for batch in left for piece in batch.split(size)]

    def _loaded(self, first: Batch, batches: Sequence[Batch]) -> Share:
        """Return batches as the model takes them, each once its turn has come."""
        place = self.job.net.device, self.job.net.dtype
        return Share(first.to(*place), (batch.to(*place) for batch in batches))

    def _sized(self, size: int) -> MeasureOptions:
        """Return options that know the size of batches, where chunks are fixed."""
        if self.measure.chunk is None:
            return self.options
        return self.options.model_copy(update={"batch_size": size})


def _rest(batches: Sequence[Batch], done: int) -> list[Batch]:
    """Return what is left of batches behind so many of their samples."""
    left = []
    for batch in batches:
        if done < len(batch):
            left.append(batch[done:].trimmed() if done else batch)
        done = max(0, done - len(batch))
    return left


def _kept(name: str, done: int, total: int, resumed: bool) -> Note:
    text = f"an interrupted run finished {done} of {total} samples of {name}: "
    text += "going on from there" if resumed else "stop this one and add --resume to go on with it"
    return Note(level="info", code="kept", text=text)
