"""Run the measures of a job part by part, store each part on disk, and make the report.

The model of a report can be attacked again, with the examples of another one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from lipaudit.data.batch import Batch, ProcessBatches
from lipaudit.engine import results, shards
from lipaudit.engine.files import Journal
from lipaudit.engine.launcher import Place, gather, wait_for_all
from lipaudit.engine.prepare import Job, leave_out_layers
from lipaudit.errors import (
    EvaluationError,
    find_user_error,
    is_out_of_memory,
)
from lipaudit.measures import load_measures
from lipaudit.measures.base import (
    Listener,
    Measure,
    MeasureOptions,
    Part,
    TimeOverError,
    listening,
    sample_ids,
    select_complete,
)
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.models.requirements import find_first_failure
from lipaudit.tables import Note, Notes, Report, Section
from lipaudit.tables.report import Failure


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

    The results of finished batches stay on disk until the block ends without an error and the
    report is complete. So neither a full disk nor a failure in another process loses them. If the
    request allows a partial report, a measure that fails leaves its reason in the report and the
    others run; the first error is raised only if all fail. After the time limit no further batch
    begins: the report is partial and holds the finished batches.

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
    place = request.place  # the rank of this process among several; None: the only one
    if place and place.rank > 0:  # only rank 0 shows notes: those of all processes are equal
        observer = None
    assert place or not request.run.shard, "a shard has no report: see `run_shard`"
    findings = Findings(observer or Observer())
    with _explain_resuming(job, findings):
        job, shard = _measure_each(job, findings)
        if place is None:
            run = results.describe_run(job)
            origins = results.list_origins(job.samples)
            report: Report | None = results.make_report(run, findings.sections, origins)
            is_complete = shard.is_complete
        else:
            report, is_complete = _gather_report(shard, findings.parts, place, request.command)
        # Nothing but the report stays in memory while the caller writes it: this frees the model.
        del job
        findings.sections.clear()
        findings.parts.clear()
        yield report
    # All processes arrive here once rank 0 has written the report.
    if place is not None:
        wait_for_all(place)
    if is_complete:
        for journal in findings.journals:
            journal.clear()


def _gather_report(
    shard: shards.Shard, parts: dict[str, list[Part]], place: Place, command: str
) -> tuple[Report | None, bool]:
    """Return the report of all processes (None if the rank is not 0), and if it is complete.

    Args:
        shard: the shard of this process: the samples that it measured.
        parts: its results by measure.
        place: the rank of this process.
        command: the command that the report records.
    """
    gathered = gather((shard, parts), place)
    all_shards = [shard_of_process for shard_of_process, _ in gathered]
    is_complete = all(shard_of_process.is_complete for shard_of_process in all_shards)
    if place.rank > 0:
        return None, is_complete
    all_parts: dict[str, list[Part]] = {name: [] for name in shard.measures}
    for _, parts_of_process in gathered:
        for name, parts_of_measure in parts_of_process.items():
            all_parts[name] += parts_of_measure
    return shards.join_shards(all_shards, all_parts, command), is_complete


def run_shard(job: Job, observer: Observer | None = None) -> shards.Shard:
    """Measure one shard of a run (every n-th batch), and store its results in `--parts`.

    Args:
        job: from `prepare`.
        observer: receives progress and notes.

    Returns:
        The shard, with the measures that failed and the samples that a time limit left out.

    Raises:
        LipauditError: any failure, with its exit code.
    """
    findings = Findings(observer or Observer())
    with _explain_resuming(job, findings):
        _, shard = _measure_each(job, findings)
    return shard


@dataclass
class Findings:
    """What a process has measured so far.

    Attributes:
        observer: receives progress and notes.
        journals: the journals of the measures.
        sections: the sections of a run of one process, with those of measures that failed.
        parts: the parts of each measure, if the samples are shared between processes.
        failures: the measures that failed, with the reasons.
        remainder: ids of the samples that the time limit left out, by measure.
    """

    observer: Observer
    journals: list[Journal] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    remainder: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add_failure(
        self, name: str, options: MeasureOptions, error: Exception, notes: Notes
    ) -> None:
        """Show that a measure failed, and add a section with the reason in place of figures."""
        self.observer.fails(name, error)
        failure = results.describe_failure(error)
        self.failures[name] = failure
        self.sections.append(results.make_failed(name, options, failure, notes))


@contextmanager
def _explain_resuming(job: Job, findings: Findings) -> Iterator[None]:
    """Show the notes on loading; if the block fails, say that finished batches are kept.

    Args:
        job: the job, with its model; not kept while the block runs.
        findings: receives the results of the block; its observer shows notes.
    """
    for note in job.notes:
        findings.observer.note(note)
    text = f"finished batches are kept: {job.request.continuation}"
    # This generator waits at `yield` until the block ends. A reference to the job would keep the
    # model in memory, but the block frees the model before the report is written.
    del job
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        # One error may end the jobs of several models: the remark is added only once.
        remarks = getattr(error, "__notes__", ())
        # `paths`: files with finished batches. Without any, there is nothing to continue from.
        if any(journal.paths for journal in findings.journals) and text not in remarks:
            error.add_note(text)
            findings.observer.note(Note.info("kept", text))
        raise


def _measure_each(job: Job, findings: Findings) -> tuple[Job, shards.Shard]:
    """Run the measures of a job one after the other, and describe its shard.

    The description is stored with the parts (`--parts`): before the run, and again after it.

    Args:
        job: the job.
        findings: receives the sections of the report, or the parts of a shard.

    Returns:
        The job, without optional measures that do not work on the model; and its shard, with the
        failed measures and the samples that the time limit left out.

    Raises:
        Exception: the first failure, if no partial report is wanted or if all measures failed.
    """
    planned = shards.describe_shard(job)
    request = job.request
    folder = request.run.parts  # where the parts of a shard are stored; None: only in the cache
    if folder is not None:
        shards.save_shard(planned, folder)
    job = _run_measures(job, findings)
    left_out = tuple(name for name in request.measures if name not in job.request.measures)
    shard = planned.model_copy(
        update={
            "notes": job.notes,
            "is_finished": True,
            "left_out": left_out,
            "failures": findings.failures,
            "remainder": findings.remainder,
        }
    )
    if folder is not None:
        shards.save_shard(shard, folder)
    return job, shard


def _run_measures(job: Job, findings: Findings) -> Job:
    """Run the measures of a job; return the job without measures that its model does not allow.

    Args:
        job: the job.
        findings: receives the results and the failures.

    Raises:
        Exception: the first failure, if no partial report is wanted or if all measures failed.
    """
    errors = []
    for name, options in job.request.measures.items():
        # `leave_out_layers` below makes a smaller job: the measures that it left out do not run.
        if name not in job.request.measures:
            continue
        try:
            _add_findings(job, name, options, findings)
        except Exception as error:
            if not job.request.partial:
                raise
            # A model without attention layers: leave out the optional measures of attention.
            smaller = leave_out_layers(job, error)
            if smaller is not None:
                job = smaller
                findings.observer.note(job.notes[-1])
                continue
            errors.append(error)
            findings.add_failure(name, options, error, job.notes)
    # A report without any figures is useless: raise the first error.
    if len(errors) == len(job.request.measures):
        raise errors[0]
    # The traceback of an error refers to the frames of its measure, and so keeps the model alive.
    errors.clear()
    return job


def _add_findings(job: Job, name: str, options: MeasureOptions, findings: Findings) -> None:
    """Run a measure; add its sections to the findings, or, for a shard, its parts."""
    run = job.request.run
    # Draw the attention map of the head with the largest norm, as found by `bounds`. A shard does
    # not know this head, and stored parts must not depend on it.
    if job.request.draws_steepest and not run.shard and run.parts is None:
        options = options.draw_steepest(findings.sections)
    parts, unmeasured = run_measure(job, name, options, findings)
    if unmeasured:
        findings.remainder[name] = unmeasured
    if run.shard:
        findings.parts[name] = parts
    else:
        findings.sections += results.summarise(name, parts, options, job.notes, len(unmeasured))


@dataclass
class _Progress:
    """The results of a measure on the samples of this process so far.

    Attributes:
        measure: name of the measure.
        observer: receives the number of measured samples.
        journal: stores the results on the disk.
        parts: results by the id of their first sample. A new part replaces an incomplete one of
            the same samples.
    """

    measure: str
    observer: Observer
    journal: Journal
    parts: dict[str, Part] = field(default_factory=dict)

    def keep(self, part: Part) -> None:
        """Add a part (the result on some samples) and store it on the disk.

        The id of its first sample identifies a part: so a part replaces an earlier, incomplete
        result on the same samples. The samples of an incomplete part do not count as measured yet.
        """
        self.journal.keep(part)
        self.parts[part.ids[0]] = part
        if part.complete:
            self.observer.advances(self.measure, len(part.ids))

    def list_unfinished(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the samples without a complete result, as batches of adjacent samples."""
        finished = {*sample_ids(select_complete(self.parts.values()))}
        remaining = []
        for batch in batches:
            # The finished samples cut the batch into pieces begin ... end - 1, some of them empty.
            finished_rows = [row for row, name in enumerate(batch.ids) if name in finished]
            begin = 0
            for end in (*finished_rows, len(batch)):
                if begin < end:  # a piece of shorter texts needs less padding: trim it
                    remaining.append(batch[begin:end].trim())
                begin = end + 1
        return remaining


def run_measure(
    job: Job, name: str, options: MeasureOptions, findings: Findings
) -> tuple[list[Part], tuple[str, ...]]:
    """Measure the samples of this process batch by batch, and store each part.

    A part is the result on one batch. After the time limit no further part begins.

    Args:
        job: the job.
        name: the measure.
        options: its options.
        findings: receives the journal, which stores the parts on the disk.

    Returns:
        The parts in the order of the samples, including parts of an interrupted run; and the ids
        of samples without a complete part, because the time limit came first.
    """
    request = job.request
    observer = findings.observer
    # `first`: the first samples of the run, on which measures find the attention layers.
    first, batches = job.batches(name)
    progress = _open_journal(job, name, options, batches, findings)
    unfinished = progress.list_unfinished(batches)
    total = sum(map(len, unfinished))
    observer.begins(name, total)
    listener = Listener(
        moves=partial(observer.moves, name),
        costs=partial(_note_cost, observer, name, total),
        notes=observer.note,
        end=request.started + (request.run.time_limit or math.inf),
    )
    # This adds each part to `progress.parts`, and calls the listener while it runs.
    _measure_in_memory(job, options, first, unfinished, progress, listener)
    if progress.journal.refusal:
        text = f"results are not saved for --resume: {progress.journal.refusal}"
        observer.note(Note.info("not-kept", text))
    observer.ends(name)
    unmeasured = sample_ids(progress.list_unfinished(batches))
    # Texts are batched by length: their parts come in another order.
    return results.in_order([*progress.parts.values()], job.samples.batch.ids), unmeasured


def _measure_in_memory(
    job: Job,
    options: MeasureOptions,
    whole_first: Batch,
    remaining: list[Batch],
    progress: _Progress,
    listener: Listener,
) -> None:
    """Measure batches and keep each part; if memory runs out, go on with batches of half the size.

    Args:
        job: the job.
        options: the options of the measure.
        whole_first: the first samples of the run, on which measures find the attention layers.
        remaining: the batches to measure.
        progress: receives the parts, and names the measure.
        listener: hears the measure while it runs, and has the time limit.

    Raises:
        Exception: the measure fails, or memory runs out on a single sample.
    """
    measure = load_measures()[progress.measure]
    run = job.request.run
    net = job.net
    if run.autocast and options.deploys:  # --autocast rounds predictions, not norms and bounds
        net = net.deploy(run.autocast)
    size = run.batch_size or job.choose_batch(progress.measure)
    first = whole_first  # halved together with the batches
    while remaining and time.monotonic() < listener.end:
        # A measure with `chunk` has results that depend on the batch: its batches stay as they
        # are, and the model runs on `size` samples of a batch at a time.
        if measure.chunk is not None:
            options = options.model_copy(update={"batch_size": size})
        try:
            _measure_batches(measure, net, options, first, remaining, progress, listener)
            return
        except Exception as error:
            remaining = progress.list_unfinished(remaining)
            if not is_out_of_memory(error):
                # A measure may fail on one of two batches: the first samples of the run, on which
                # it finds the layers, or the first batch without a result.
                _blame_sample(job, net, error, [whole_first, *remaining[:1]])
                raise
            if size == 1:
                raise
            # The largest remaining batch may be smaller than `size`: halve the smaller of the two.
            size = max(1, min(size, max(map(len, remaining))) // 2)
            if measure.chunk is None:
                remaining = [half for batch in remaining for half in batch.split(size)]
            first = first[:size].trim()


def _measure_batches(
    measure: Measure,
    net: Net,
    options: MeasureOptions,
    first: Batch,
    batches: Sequence[Batch],
    progress: _Progress,
    listener: Listener,
) -> None:
    """Measure batches and keep each part, until the time limit of the listener.

    Args:
        measure: the measure.
        net: the model.
        options: the options of the measure.
        first: the first samples of the run. A measure finds the attention layers on them. All
            processes use these samples, so all find the same layers.
        batches: the batches to measure.
        progress: receives the parts, and has the incomplete parts of an interrupted run.
        listener: hears the measure while it runs.
    """
    on_device = (batch.to(net.device, net.dtype) for batch in batches)
    first_on_device = first.to(net.device, net.dtype)
    samples = ProcessBatches(first_on_device, on_device, unfinished=dict(progress.parts))
    # A measure itself raises TimeOverError if the limit comes before the part is complete.
    with exact_arithmetic(net.device), listening(listener), suppress(TimeOverError):
        for part in measure.compute(net, samples, options):
            progress.keep(part)
            if time.monotonic() >= listener.end:
                return


def _note_cost(
    observer: Observer, name: str, total: int, passes: int, seconds: float, unit: str
) -> None:
    """Give the observer a note with the estimated time of one sample and of all samples.

    Args:
        observer: receives the note.
        name: the measure.
        total: number of samples.
        passes: number of passes of the model for a sample.
        seconds: time of one pass.
        unit: the word for passes, in the plural.
    """
    of_sample = passes * seconds
    cost = f"{passes:,} {unit} of {1000 * seconds:,.2f} ms: {of_sample:,.1f} s"
    text = f"{name}: a sample takes {cost}, all take about {total * of_sample:,.0f} s"
    observer.note(Note.info("cost", text))


def _open_journal(
    job: Job, name: str, options: MeasureOptions, batches: Sequence[Batch], findings: Findings
) -> _Progress:
    """Open the journal of a measure, and read the parts that an interrupted run left in it.

    The journal stores the finished parts of a run on the disk, if the job `stores` them. It is
    added to `findings`. Its parts are read only with --resume (`job.continues`).
    """
    facts = results.identify(job, name, options)
    journal = Journal(facts, home=job.request.run.parts, keeps=job.stores)
    findings.journals.append(journal)
    progress = _Progress(name, findings.observer, journal)
    if not job.continues:
        return progress
    ids = sample_ids(batches)
    parts = journal.read_parts(ids)
    if parts:
        finished = sample_ids(select_complete(parts))
        text = f"an interrupted run finished {len(finished)} of {len(ids)} samples of {name}"
        begun = len(sample_ids(parts)) - len(finished)
        if begun:
            text += f" and began {begun}"
        findings.observer.note(Note.info("reused", f"{text}: continuing from there"))
    # Further results on the same samples replace these parts: see `_Progress.keep`.
    progress.parts |= {part.ids[0]: part for part in parts}
    return progress


def _blame_sample(job: Job, net: Net, error: Exception, batches: Sequence[Batch]) -> None:
    """Run the model again after a failure, and raise an error that names the failing sample.

    The function returns without an error if the model runs on all samples: then the failure has
    another cause, and the caller raises it.

    Args:
        job: the job.
        net: the model as it was measured.
        error: the failure of a measure.
        batches: the samples on which the model runs again.

    Raises:
        EvaluationError: the model fails on a sample.
    """
    # Errors of the user or the machine already have an explanation. A plain EvaluationError (such
    # as an overflow) or an unknown error may come from the model.
    if type(error) is not EvaluationError and find_user_error(error) is not None:
        return
    samples = job.samples
    advice = "On overflow, try --dtype float64."
    # With --autocast, `net` is a rounded model and `net.exact` is the model without rounding.
    # bfloat16 has the range of float32, which float16 has not.
    if net.exact is not None:
        advice = "On overflow, try --autocast bfloat16."
    for batch in batches:
        with exact_arithmetic(net.device):  # the same arithmetic as in the measure
            failure = find_first_failure(net, batch.to(net.device, net.dtype))
        if failure is not None:
            sample_id = batch.ids[failure.index]
            sample = sample_id[:12]  # an id is a long hash: its beginning identifies it
            if samples.origins:
                origin = samples.origins[samples.batch.ids.index(sample_id)]
                sample = f"{sample} ({origin.place})"
            raise EvaluationError(
                f"the model fails on sample {sample}: {failure.reason}",
                f"Leave that sample out, or fix the model. {advice}",
            ) from (failure.cause or error)
