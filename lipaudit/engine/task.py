"""One measure of a job: its parts, kept as they come, and the sections they make."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice, takewhile

from lipaudit.data.batch import Batch, Share
from lipaudit.engine.files import write
from lipaudit.engine.fitting import less
from lipaudit.engine.journal import Journal
from lipaudit.engine.observer import Observer
from lipaudit.engine.prepare import Job
from lipaudit.engine.provenance import versions
from lipaudit.errors import EvaluationError, as_user_meets, bug, out_of_memory
from lipaudit.measures import MEASURES, Measure, Part
from lipaudit.measures.measure import in_order, listening, sample_ids
from lipaudit.models.requirements import first_failure
from lipaudit.results import Note, Section
from lipaudit.results.report import Failure
from lipaudit.settings import MeasureOptions
from lipaudit.settings.parsing import write_duration


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


class Task:
    """One measure of a job, on the samples that are measured here."""

    def __init__(self, job: Job, name: str, options: MeasureOptions, observer: Observer) -> None:
        self.job, self.name, self.options, self.observer = job, name, options, observer
        self.measure: Measure = MEASURES[name]
        self.batches = job.batches(name)
        self.ids = tuple(chain.from_iterable(batch.ids for batch in self.batches))

    def sections(self, parts: Sequence[Part]) -> list[Section]:
        """Write the files of the options, and sum up what was measured."""
        left = len(self.ids) - len(sample_ids(parts))
        notes = (*self.job.notes, *self._lacks(left))
        if not parts:
            settings = self.options.model_dump()
            return [Section(measure=self.name, settings=settings, notes=notes, unmeasured=left)]
        written = self.measure.written(parts, self.options)
        for path, content in zip(self.options.files, written, strict=True):
            write(path, content)
        first, *others = reduced(self.name, parts, self.options, notes)
        return [first.model_copy(update={"unmeasured": left}), *others]

    def _lacks(self, left: int) -> Iterator[Note]:
        if not self.ids:
            yield self._empty()
        if left:
            limit = write_duration(self.job.request.run.time_limit or 0.0)
            text = (
                f"the time limit of {limit} ended {self.name} after {len(self.ids) - left} of "
                f"{len(self.ids)} samples"
            )
            yield Note(level="warning", code="cut-short", text=text)

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
            "versions": versions(),
        }

    def parts(self, journal: Journal) -> list[Part]:
        """Return the parts in order, those of an interrupted run among them if it is to go on."""
        kept = journal.parts(self.ids)
        if kept:
            self.observer.note(self._kept(len(sample_ids(kept))))
        kept = kept if self.job.request.run.resume else []
        said = False
        self.observer.begins(self.name, sum(map(len, self.left(sample_ids(kept)))))
        with listening(partial(self.observer.moves, self.name)):
            for part in journal.record(self.measured(sample_ids(kept))):
                if journal.refusal and not said:
                    said = True
                    text = f"what is finished is not kept for --resume: {journal.refusal}"
                    self.observer.note(Note(level="info", code="not-kept", text=text))
                self.observer.advances(self.name, len(part.ids))
                kept.append(part)
        self.observer.ends(self.name)
        return in_order(kept, self.job.samples.batch.ids)

    def left(self, finished: Collection[str], size: int | None = None) -> list[Batch]:
        """Return the batches without what is finished, each of so many samples at most."""
        done = {*finished}
        left = [rest for batch in self.batches for rest in _without(batch, done)]
        if size is None or self.measure.chunk is not None:
            return left
        return [piece for batch in left for piece in batch.split(size)]

    def _kept(self, done: int) -> Note:
        text = f"an interrupted run finished {done} of {len(self.ids)} samples of {self.name}: "
        if self.job.request.run.resume:
            return Note(level="info", code="reused", text=f"{text}going on from there")
        text += "stop this one and add --resume to go on with it"
        return Note(level="info", code="kept", text=text)

    def measured(self, finished: Collection[str]) -> Iterator[Part]:
        """Yield the parts of what is not finished, of half as many samples where memory runs out.

        Once time is up no further batch is taken.
        """
        done, size = {*finished}, self.job.size(self.name)
        while left := self.left(done, size):
            try:
                for part in self._run(left, size):
                    done.update(part.ids)
                    yield part
                return
            except Exception as error:
                if not out_of_memory(error):
                    self._lay(error, [self.job.first(self.name), *self.left(done, size)[:1]])
                    raise
                if size == 1:
                    text = "out of memory with one sample at a time"
                    raise EvaluationError(text, less(self.job)) from None
                size = max(1, min(size, max(map(len, left))) // 2)

    def _lay(self, error: Exception, batches: Sequence[Batch]) -> None:
        """Find the sample on which the model itself fails, and blame the error on both.

        Raises:
            EvaluationError: it does.
        """
        if type(error) is not EvaluationError and as_user_meets(error) is not None:
            return
        net = self.job.net
        for batch in batches:
            failure = first_failure(net, batch.to(net.device, net.dtype))
            if failure is not None:
                place, text, cause = failure
                raise EvaluationError(
                    f"the model fails on {self._named(batch, place)}: {text}",
                    "Leave that sample out of --data, or mend the model; where numbers overflow, "
                    "try --dtype float64.",
                ) from (cause or error)

    def _named(self, batch: Batch, place: int) -> str:
        name, samples = batch.ids[place], self.job.samples
        whole, origins = samples.batch.ids, samples.origins
        where = f" ({origins[whole.index(name)].place})" if origins else ""
        return f"sample {name[:12]}{where}"

    def _run(self, batches: Sequence[Batch], size: int) -> Iterator[Part]:
        net, first = self.job.net, self.job.first(self.name)
        place = net.device, net.dtype
        if size < self.job.size(self.name):
            first = first[:size].trim()
        units = _until(self.job.request.end, batches)
        for begun in islice(units, 1):  # nothing is run once time is up
            share = Share(first.to(*place), (b.to(*place) for b in chain([begun], units)))
            yield from self.measure.parts(net, share, self._sized(size))

    def _sized(self, size: int) -> MeasureOptions:
        """Return options that know the size of batches, where chunks are fixed."""
        if self.measure.chunk is None:
            return self.options
        return self.options.model_copy(update={"batch_size": size})


def _until(end: float, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches for as long as there is time."""
    yield from takewhile(lambda _: time.monotonic() < end, batches)


def _without(batch: Batch, finished: set[str]) -> Iterator[Batch]:
    """Yield the runs of a batch's samples that are not finished."""
    left = [i for i, name in enumerate(batch.ids) if name not in finished]
    for _, run in groupby(enumerate(left), key=lambda pair: pair[1] - pair[0]):
        places = [place for _, place in run]
        yield batch[places[0] : places[-1] + 1].trim()
