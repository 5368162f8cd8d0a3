"""One measure of a job: its parts, kept as they come, and the sections they make."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice
from typing import Any

from lipaudit.data.batch import Batch, Share
from lipaudit.engine.files import write
from lipaudit.engine.fitting import fitting, less
from lipaudit.engine.journal import Journal
from lipaudit.engine.observer import Observer
from lipaudit.engine.prepare import Job
from lipaudit.engine.provenance import versions
from lipaudit.engine.ranks import Begun, Ranks
from lipaudit.errors import EvaluationError, as_user_meets, bug, out_of_memory
from lipaudit.measures import MEASURES, Measure, Part
from lipaudit.measures.measure import listening, sample_ids
from lipaudit.models.failing import first_failure
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
            "shard": run.shard,
            "versions": versions(),
        }

    def parts(self, journal: Journal, ranks: Ranks | None = None) -> list[Part]:
        """Return the parts in order, those of an interrupted run among them if it is to go on.

        Args:
            journal: that keeps them.
            ranks: the other processes that measure with this one, the first of them.
        """
        kept = journal.parts(self.ids)
        if kept:
            self.observer.note(self._kept(len(sample_ids(kept)), anew=ranks is not None))
        kept = kept if self.job.request.run.resume else []
        finished = sample_ids(kept)
        left = self.left(finished)
        samples = sum(map(len, left))
        said = self._unkept(journal, "")
        if ranks is not None:
            if not kept:
                journal.begin()  # the others keep what they measure there, too
            ranks.begin(self.name, Begun(self._adapted(), finished, journal.keeps))
        self.observer.begins(self.name, samples)
        if ranks is None:
            parts = self.measured(left)
        else:
            own = self.measured(ranks.units(self.name, left))
            parts = ranks.gathered(self.name, own, left, self.job.request.end)
        before = len(kept) if ranks is None else 1
        with listening(partial(self.observer.moves, self.name)):
            for part in journal.recorded(parts, after=before):
                said = self._unkept(journal, said)
                self.observer.advances(self.name, len(part.ids))
                kept.append(part)
        self.observer.ends(self.name)
        place = {name: i for i, name in enumerate(self.ids)}
        return sorted(kept, key=lambda part: place[part.ids[0]])

    def left(self, finished: Collection[str]) -> list[Batch]:
        """Return what is left of the batches but for the samples that are finished."""
        return [rest for batch in self.batches for rest in _without(batch, {*finished})]

    def _adapted(self) -> dict[str, Any]:
        """Return the options that are not those that were asked for."""
        asked = self.job.request.measures[self.name].unkept()
        return {n: v for n, v in self.options.unkept().items() if v != asked[n]}

    def _kept(self, done: int, *, anew: bool) -> Note:
        resumed = self.job.request.run.resume
        text = f"an interrupted run finished {done} of {len(self.ids)} samples of {self.name}: "
        if resumed:
            return Note(level="info", code="reused", text=f"{text}going on from there")
        if anew:
            text += "it is begun anew; --resume would have gone on with it"
        else:
            text += "stop this one and add --resume to go on with it"
        return Note(level="info", code="kept", text=text)

    def _unkept(self, journal: Journal, said: str) -> str:
        """Say why nothing is kept, if that is not said yet."""
        if journal.refusal and not said:
            text = f"what is finished is not kept for --resume: {journal.refusal}"
            self.observer.note(Note(level="info", code="not-kept", text=text))
        return journal.refusal

    def measured(self, units: Iterable[Batch]) -> Iterator[Part]:
        """Yield the parts of batches; when memory runs out, go on from there with half of each.

        Once time is up no further batch is taken; what is begun is finished.
        """
        taken, size = _Taken(_until(self.job.request.end, units)), self.job.size(self.name)
        first, begun = self.job.first(self.name), False
        while taken.more():
            try:
                if not begun:
                    begun = True
                    if (fits := self._fitting()) < size:
                        size, first = fits, first[:fits].trimmed()
                        taken.again(None if self.measure.chunk else size)
                yield from self._run(first, taken, size)
            except Exception as error:
                if not out_of_memory(error):
                    self._lay(error, [first, *taken.begun])
                    raise
                if size == 1:
                    raise EvaluationError(
                        "out of memory with one sample at a time", less(self.job)
                    ) from None
                size = max(1, min(size, taken.largest) // 2)
                first = first[:size].trimmed()
                taken.again(None if self.measure.chunk else size)

    def _lay(self, error: Exception, batches: Sequence[Batch]) -> None:
        """Lay an error to the model and a sample, where the model fails there by itself.

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
        name, origins = batch.ids[place], self.job.samples.origins
        where = f" ({origins[batch.start + place].place})" if origins else ""
        return f"sample {name[:12]}{where}"

    def _fitting(self) -> int:
        """Return how many samples fit at a time, and say so where they are fewer than usual."""
        usual, size = self.job.size(self.name), fitting(self.job, self.name)
        if size < min(usual, max(map(len, self.batches), default=1)):
            text = (
                f"{self.name} takes {size} samples at a time in place of {usual}: more would not "
                "fit into the memory that is free (estimate)"
            )
            self.observer.note(Note(level="info", code="memory", text=text))
        return size

    def _run(self, first: Batch, taken: _Taken, size: int) -> Iterator[Part]:
        net = self.job.net
        place = net.device, net.dtype
        batches = Share(first.to(*place), (batch.to(*place) for batch in taken))
        for part in self.measure.parts(net, batches, self._sized(size)):
            taken.finish(len(part.ids))
            yield part

    def _sized(self, size: int) -> MeasureOptions:
        """Return options that know the size of batches, where chunks are fixed."""
        if self.measure.chunk is None:
            return self.options
        return self.options.model_copy(update={"batch_size": size})


def _until(end: float, units: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches for as long as there is time: none is taken that is not yielded."""
    units = iter(units)
    while time.monotonic() < end and (batch := next(units, None)) is not None:
        yield batch


class _Taken:
    """Batches, each taken when it is asked for; what is begun can be taken again."""

    def __init__(self, units: Iterable[Batch]) -> None:
        self._units, self._next, self._begun = iter(units), list[Batch](), list[Batch]()

    def __iter__(self) -> Iterator[Batch]:
        while self.more():
            self._begun.append(self._next.pop(0))
            yield self._begun[-1]

    def more(self) -> bool:
        """Say whether there is a batch to take, and take it."""
        if not self._next:
            self._next += islice(self._units, 1)
        return bool(self._next)

    @property
    def largest(self) -> int:
        """The samples of the largest batch that is taken and not finished."""
        return max((len(batch) for batch in self.begun), default=1)

    @property
    def begun(self) -> list[Batch]:
        """What is taken and not finished."""
        return self._begun + self._next

    def finish(self, samples: int) -> None:
        """Leave out so many samples of those begun: they are measured."""
        rest, self._begun = self._begun, []
        for batch in rest:
            if samples < len(batch):
                self._begun.append(batch[samples:].trimmed() if samples else batch)
            samples = max(0, samples - len(batch))

    def again(self, size: int | None) -> None:
        """Take again what is begun, in batches of another size if one is given."""
        rest, self._begun = self.begun, []
        self._next = [piece for batch in rest for piece in batch.split(size or len(batch))]


def _without(batch: Batch, finished: set[str]) -> Iterator[Batch]:
    """Yield the runs of a batch's samples that are not finished."""
    left = [i for i, name in enumerate(batch.ids) if name not in finished]
    for _, run in groupby(enumerate(left), key=lambda pair: pair[1] - pair[0]):
        places = [place for _, place in run]
        yield batch[places[0] : places[-1] + 1].trimmed()
