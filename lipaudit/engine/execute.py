"""Run the measures of a job part by part, store each part on disk, and make the report."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby, islice, takewhile

from lipaudit.data.batch import Batch, Share
from lipaudit.engine.files import write
from lipaudit.engine.journal import Journal
from lipaudit.engine.launcher import gather_texts, join_processes
from lipaudit.engine.prepare import Job
from lipaudit.engine.provenance import (
    describe_run,
    list_origins,
    make_failed,
    make_report,
    versions,
)
from lipaudit.engine.shards import make_shard, merge, summarise
from lipaudit.errors import EvaluationError, find_user_error, out_of_memory
from lipaudit.measures import MeasureOptions, Part, load_measures
from lipaudit.measures.measure import in_order, listening, sample_ids
from lipaudit.models.net import OWN
from lipaudit.models.precision import eager, exact_arithmetic
from lipaudit.models.requirements import find_first_failure
from lipaudit.schema import dumps, loads
from lipaudit.tables import Note, Report, Section
from lipaudit.tables.summary import steepest


class Observer:
    """Receives progress and notes, and does nothing; a command line overrides it to draw them."""

    def note(self, note: Note) -> None:
        """Receive a note."""

    def begins(self, measure: str, samples: int) -> None:
        """Called when a measure begins, with its number of samples."""

    def advances(self, measure: str, samples: int) -> None:
        """Called when more samples are measured."""

    def moves(self, measure: str, samples: float) -> None:
        """Called within a part, with its number of finished samples; `advances` follows."""

    def fails(self, measure: str, error: Exception) -> None:
        """Called when a measure fails; the others continue."""

    def ends(self, measure: str) -> None:
        """Called when a measure ends."""


def execute(job: Job, observer: Observer | None = None) -> Report:
    """Run the measures of a job in this process, as `run_job` does, and return the report.

    Raises:
        LipauditError: any failure, with its exit code.
    """
    with run_job(job, observer) as report:
        assert report is not None, "a job of one process has a report"
        return report


@contextmanager
def run_job(job: Job, observer: Observer | None = None) -> Iterator[Report | None]:
    """Run the measures of a job; the caller writes the report inside the block.

    Finished parts stay on disk until the block ends without an error and the report is complete,
    so neither a full disk nor a failure in another process loses them. If the request allows a
    partial report, a measure that fails leaves its reason in the report and the others run; the
    first error is raised only if all fail. After the time limit no further batch begins: the
    report is partial and holds the finished batches.

    Args:
        job: from `prepare`; not referenced while the block runs, which frees the model.
        observer: receives progress and notes.

    Yields:
        The report. With several processes of a launcher, rank 0 yields the report of all samples,
        the others None.

    Raises:
        LipauditError: any failure, with its exit code.
    """
    request = job.request
    place = request.place
    if observer is None or (place is not None and place.rank > 0):
        # Only rank 0 reports: the notes of all processes are equal.
        observer = Observer()
    for note in job.notes:
        observer.note(note)
    journals: list[Journal] = []
    with join_processes(place):
        try:
            report: Report | None = _measure(job, observer, journals)
            del job
            assert report is not None
            complete = report.status == "complete"
            if place is not None:
                # Shards travel as JSON, as between machines: one format, and no pickles.
                shards = [loads(text) for text in gather_texts(dumps(report), place)]
                complete = all(shard.status == "complete" for shard in shards)
                report = merge(shards, command=request.command) if place.rank == 0 else None
            yield report
        except (Exception, KeyboardInterrupt):
            if any(journal.paths for journal in journals):
                text = f"finished batches are kept: {request.continuation}"
                observer.note(Note(level="info", code="kept", text=text))
            raise
    # All processes arrive here once rank 0 has written the report.
    for journal in journals if complete else ():
        journal.clear()


def _measure(job: Job, observer: Observer, journals: list[Journal]) -> Report:
    """Run every measure on the samples of this process, and make its report."""
    sections: list[Section] = []
    errors: list[Exception] = []
    measured: dict[str, list[Part]] = {}
    with eager(), exact_arithmetic(job.net.device):
        # In this order: the attention map is drawn for the head that bounds found to be the
        # steepest. A shard does not know it.
        for name, options in job.request.measures.items():
            if job.request.draws_steepest and job.request.run.shard is None:
                for head in steepest(sections, 1):
                    options = options.draw_steepest(head)
            measurement = Measurement(job, name, options, observer)
            # The code of a module object is unknown: its runs cannot be recognised, so nothing is
            # stored.
            journals.append(Journal(measurement.identity(), keeps=job.net.source != OWN))
            try:
                measured[name] = measurement.run(journals[-1])
                sections += measurement.summarise(measured[name])
            except Exception as error:
                if not job.request.partial:
                    raise
                observer.fails(name, error)
                errors.append(error)
                sections.append(make_failed(name, options.model_dump(), error, job.notes))
    # A report without any figures is useless: raise the first error.
    if len(errors) == len(job.request.measures):
        raise errors[0]
    shard = make_shard(job, measured) if job.request.run.shard else None
    return make_report(describe_run(job), sections, list_origins(job.samples), shard)


class Measurement:
    """One measure of a job on the samples of this process."""

    def __init__(self, job: Job, name: str, options: MeasureOptions, observer: Observer) -> None:
        self.job, self.name, self.options, self.observer = job, name, options, observer
        self.measure = load_measures()[name]
        self.batches = job.batches(name)
        self.ids = tuple(chain.from_iterable(batch.ids for batch in self.batches))

    def identity(self) -> dict[str, object]:
        """Return everything that determines the numbers, except the batch size."""
        net, run = self.job.net, self.job.request.run
        return {
            "measure": self.name,
            "options": dict(self.options),
            "model": (net.name, net.weights_sha256, net.preprocess, str(net.dtype)),
            "device": net.device.type,
            "reading": run.reading(),
            "samples": self.job.samples.batch.ids[: self.job.counts[self.name]],
            "versions": versions(),
        }

    def run(self, journal: Journal) -> list[Part]:
        """Return the parts in order, with those of an interrupted run if it is continued."""
        parts = journal.read_parts(self.ids) if self.job.request.run.resume else []
        if parts:
            done = f"{len(sample_ids(parts))} of {len(self.ids)} samples of {self.name}"
            text = f"an interrupted run finished {done}: continuing from there"
            self.observer.note(Note(level="info", code="reused", text=text))
        self.observer.begins(self.name, sum(map(len, self._list_left(sample_ids(parts)))))
        with listening(partial(self.observer.moves, self.name)):
            for part in journal.record(self._measure_left(sample_ids(parts))):
                self.observer.advances(self.name, len(part.ids))
                parts.append(part)
        if journal.refusal:
            text = f"results are not saved for --resume: {journal.refusal}"
            self.observer.note(Note(level="info", code="not-kept", text=text))
        self.observer.ends(self.name)
        # Texts are batched by length: their parts come in another order.
        return in_order(parts, self.job.samples.batch.ids)

    def summarise(self, parts: Sequence[Part]) -> list[Section]:
        """Write the files of the options, and return the sections of the measure."""
        if parts:
            contents = self.measure.written(parts, self.options)
            for path, content in zip(self.options.files, contents, strict=True):
                write(path, content)
        left = len(self.ids) - len(sample_ids(parts))
        return summarise(self.name, parts, self.options, self.job.notes, left)

    def _list_left(self, finished: Collection[str], size: int | None = None) -> list[Batch]:
        """Return the unfinished samples of each batch, in batches of at most `size`."""
        done, left = {*finished}, []
        for batch in self.batches:
            places = enumerate(i for i, name in enumerate(batch.ids) if name not in done)
            # Neighbours form a run: index minus position is constant within it.
            for _, run in groupby(places, key=lambda pair: pair[1] - pair[0]):
                at = [place for _, place in run]
                left.append(batch[at[0] : at[-1] + 1].trim())
        if size is None or self.measure.chunk is not None:
            return left
        return [piece for batch in left for piece in batch.split(size)]

    def _measure_left(self, finished: Collection[str]) -> Iterator[Part]:
        """Yield the parts of unfinished batches; halve the batch if memory runs out.

        After the time limit no further batch begins.
        """
        done, size = {*finished}, self.job.size(self.name)
        while left := self._list_left(done, size):
            try:
                for part in self._measure_batches(left, size):
                    done.update(part.ids)
                    yield part
                return
            except Exception as error:
                if not out_of_memory(error):
                    suspects = [self.job.first(self.name), *self._list_left(done, size)[:1]]
                    self._blame_sample(error, suspects)
                    raise
                if size == 1:
                    raise
                # The largest remaining batch may be smaller than the size: halve that one.
                size = max(1, min(size, max(map(len, left))) // 2)

    def _measure_batches(self, batches: Sequence[Batch], size: int) -> Iterator[Part]:
        net, first, options = self.job.net, self.job.first(self.name), self.options
        # Layers are surveyed on the first batch, which must fit into memory, too.
        if size < self.job.size(self.name):
            first = first[:size].trim()
        if self.measure.chunk is not None:  # chunks are fixed by the options
            options = options.model_copy(update={"batch_size": size})
        end = self.job.request.end
        units = takewhile(lambda _: time.monotonic() < end, batches)
        for begun in islice(units, 1):  # nothing runs after the time limit
            moved = (b.to(net.device, net.dtype) for b in chain([begun], units))
            share = Share(first.to(net.device, net.dtype), moved)
            yield from self.measure.parts(net, share, options)

    def _blame_sample(self, error: Exception, batches: Sequence[Batch]) -> None:
        """Find the sample on which the model fails, if there is one.

        Raises:
            EvaluationError: the message names the sample.
        """
        # Faults of the machine or the user are already explained; others may come from the model.
        if type(error) is not EvaluationError and find_user_error(error) is not None:
            return
        net, samples = self.job.net, self.job.samples
        for batch in batches:
            failure = find_first_failure(net, batch.to(net.device, net.dtype))
            if failure is not None:
                index, text, cause = failure
                name = batch.ids[index]
                where = ""
                if samples.origins:
                    where = f" ({samples.origins[samples.batch.ids.index(name)].place})"
                raise EvaluationError(
                    f"the model fails on sample {name[:12]}{where}: {text}",
                    "Leave that sample out of --data, or fix the model. If numbers overflow, "
                    "try --dtype float64.",
                ) from (cause or error)
