"""A request, the job made from it (a loaded model, its samples, the measures), and its preview."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lipaudit.data.batch import Batch, LabelError
from lipaudit.data.loading import DataOptions, Samples, find_data_forms, load_data
from lipaudit.engine.files import require_folder, require_writable
from lipaudit.engine.launcher import Place, share_run
from lipaudit.engine.results import list_origins, list_steps
from lipaudit.errors import InputError, LipauditError, UsageError
from lipaudit.measures import load_measures
from lipaudit.measures.base import MeasureOptions
from lipaudit.measures.layers import note_unread
from lipaudit.models import requirements
from lipaudit.models.attention.capture import Site
from lipaudit.models.attention.survey import NoHeadsError, find_layers
from lipaudit.models.net import NEEDED, OWN, LoadOptions, Net
from lipaudit.models.outputs import complete_form
from lipaudit.models.precision import exact_arithmetic
from lipaudit.models.sources import classifiers
from lipaudit.models.sources.loader import load_net
from lipaudit.settings import RunOptions
from lipaudit.tables import Note, Notes

# Code of the note on an optional measure that was left out.
LEFT_OUT = "left-out"


@dataclass(frozen=True)
class Request:
    """A request to measure: plain values only.

    Attributes:
        model: the MODEL argument.
        measures: the options of every measure to run, by its name, in order.
        run: the shared options.
        counts: number of samples of each measure, unless `run` sets it.
        optional: measures that are left out, with a note, if model or samples do not allow them.
        partial: whether the other measures continue if one fails; the report is then partial.
        command: the command that the report records.
        draws_steepest: whether the attention map of the head with the largest norm is drawn.
        place: the process among those of a launcher; it measures a shard.
        started: start of the time limit, by the monotonic clock.
    """

    model: str
    measures: Mapping[str, MeasureOptions]
    run: RunOptions = field(default_factory=RunOptions)
    counts: Mapping[str, int] = field(default_factory=dict)
    optional: Collection[str] = ()
    partial: bool = False
    command: str = ""
    draws_steepest: bool = False
    place: Place | None = None
    started: float = field(default_factory=time.monotonic, compare=False)

    @property
    def continuation(self) -> str:
        """Return how to continue a stopped run, with the command if it is known."""
        text = "run the same command"
        command = self.command
        if not self.run.continues:  # `continues`: the stopped run already had --resume
            text += " with --resume"
            command += " --resume"
        if self.command:
            return f"{text} to continue: {command}"
        return f"{text} to continue"

    def count(self, name: str) -> int:
        """Return the number of samples of a measure."""
        return self.run.samples or self.counts.get(name, self.measures[name].samples)


@dataclass(frozen=True)
class Job:
    """A request with its model and samples loaded.

    Attributes:
        request: the request, completed with defaults that depend on model and samples.
        net: the model.
        samples: enough samples for every measure.
        counts: number of samples of each measure.
        notes: remarks on loading.
    """

    request: Request
    net: Net
    samples: Samples
    counts: Mapping[str, int]
    notes: Notes

    @property
    def stores(self) -> bool:
        """Say whether finished batches are stored on the disk.

        A later run may only continue from batches of the same model. For a module object from
        Python the code is unknown, so batches are stored only to merge shards (`--parts`).
        """
        return self.net.source != OWN or self.request.run.parts is not None

    @property
    def continues(self) -> bool:
        """Say whether this run reuses the finished batches of an earlier run."""
        return self.net.source != OWN and self.request.run.continues

    def choose_batch(self, name: str) -> int:
        """Return how many samples a measure gets at a time if no option says so.

        Short samples (few tokens, or small images) may come in larger batches, `short_batch`.
        """
        measure = load_measures()[name]
        if measure.short_batch is not None and self.samples.batch.is_short:
            return measure.short_batch
        return measure.batch

    def batches(self, name: str) -> tuple[Batch, list[Batch]]:
        """Return the first samples of a measure, and the batches that this process measures.

        A measure finds the attention layers on the first samples: as many as a batch has, in the
        order of the data, and the same in every shard. They need not be one of the batches.

        A single process measures all batches. A shard has every n-th batch of the run, so its
        numbers equal the numbers of a single process. The texts of a batch have the same length
        (`by_length`), so no figure depends on padding; `in_order` later sorts the results by
        sample. Some measures depend on all samples of a batch: these get fixed batches of `chunk`
        adjacent samples, and texts are padded. `trim` cuts padding that all texts share.
        """
        run = self.request.run
        measure = load_measures()[name]
        size = measure.chunk or run.batch_size or self.choose_batch(name)
        samples = self.samples.batch[: self.counts[name]]
        first = samples[:size].trim()
        if measure.chunk:
            batches = list(samples.split(size))
        else:
            batches = list(samples.by_length(size))
        number, shards = run.shard or (1, 1)
        return first, batches[number - 1 :: shards]


def prepare(request: Request, *, net: Net | None = None, samples: Samples | None = None) -> Job:
    """Load the model and the samples of a request, and check that every measure can run on them.

    Optional measures that cannot run are left out with a note.

    Args:
        request: the request.
        net: a model that is already loaded.
        samples: samples that are already loaded.

    Raises:
        LipauditError: any failure, with its exit code.
    """
    request = _check_request(request)
    net = net or load_net(request.model, load_options(request.run))
    request, notes_on_model = _adapt_to_model(request, net)
    run = request.run
    requested = {name: request.count(name) for name in request.measures}
    samples = samples or _load_samples(net, request, max(requested.values()))
    # Loading ran the model on a blank sample. If that output was not finite, the kind of output
    # (logits or probabilities) is read from the first sample.
    net = complete_form(net, samples.batch)
    # The model whose figures are reported: `net`, or with --score a classifier that calls it.
    measured = _score_continuations(net, samples, run.score)
    # Refuse outputs that depend on the other samples of a batch. Texts are checked measure by
    # measure, together with their padding: see `require_padding_is_unread`.
    if net.kind != "text":
        with exact_arithmetic(net.device):
            requirements.require_per_sample(net, samples.batch, singly=run.batch_size == 1)
    notes = measured.notes + requirements.require_autocast(measured, samples.batch, run.autocast)

    def check(name: str, options: MeasureOptions) -> MeasureOptions:
        # The options of a measure, if it can run with them on its samples; else an error.
        return _check_measure(name, measured, samples.batch[: requested[name]], options)

    request, notes_on_samples = _leave_out_refused(request, check)
    notes_on_passes = requirements.compare_derivative(measured, samples.batch)
    notes_on_passes += requirements.note_fast_path(net, samples.batch)
    if any(options.reads_samples for options in request.measures.values()):
        notes += samples.notes
    notes += notes_on_model + notes_on_samples + notes_on_passes
    counts = {name: min(requested[name], len(samples.batch)) for name in request.measures}
    return Job(request, measured, samples, counts, notes)


def _score_continuations(net: Net, samples: Samples, score: Literal["sum", "mean"] | None) -> Net:
    """Return the model that is measured: with --score, a classifier of continuations.

    The classifier chooses among the continuations of a prompt. Without --score, the model itself
    is measured.

    Raises:
        InputError: the samples have no continuations.
    """
    if score is None:
        return net
    if samples.task is None:
        raise InputError(
            f"{samples.spec} has no continuations, choices or labels to score",
            "Give a table with prompt and continuation; question, choices and answer; or text and "
            "label.",
        )
    return classifiers.score_continuations(net, samples.task, score)


def _check_request(request: Request) -> Request:
    """Check a request as far as possible without model and samples; return it for this process.

    Under a launcher such as torchrun, several processes share a run, and `request.place` is the
    rank of this process. The returned request then has the shard of the samples and the device of
    this process. Without a launcher, `place` is None.

    Raises:
        UsageError: a file or folder cannot be written, or options have no effect together.
    """
    # Options of a measure may ask for another measure instead: certificates with --smooth are the
    # measure `smoothing`.
    measures = dict(options.redirect(name) for name, options in request.measures.items())
    run = request.run
    if request.place is not None:
        run = share_run(run, request.place)
    for options in measures.values():
        for path in options.files:
            require_writable(path)
    if run.parts is not None:
        require_folder(run.parts)
    _require_autocast_effect(run, measures)
    return replace(request, run=run, measures=measures)


def _adapt_to_model(request: Request, net: Net) -> tuple[Request, Notes]:
    """Return the request with defaults for the model, and a note on each measure left out.

    Raises:
        LipauditError: the options or a required measure do not suit the model.
    """
    run = request.run
    measures = dict(request.measures)
    for settings in (run, *measures.values()):
        settings.require_kind(net.kind)  # refuses options for another kind of samples
    if run.score and net.next_logits is None:
        raise UsageError(
            f"{net.architecture} is not a language model, so it cannot score continuations",
            "Leave --score out.",
        )
    # All measures share the samples, so texts get the largest length that any measure needs.
    lengths = [options.tokens for options in measures.values() if options.tokens]
    if run.max_tokens is None and lengths:
        run = run.model_copy(update={"max_tokens": max(lengths)})
    # A language model scores continuations if every measure needs such scores.
    need_scores = all(options.scores == "always" for options in measures.values())
    if run.score is None and net.next_logits is not None and need_scores:
        run = run.model_copy(update={"score": "sum"})
    for name, options in measures.items():
        measures[name] = options.model_copy(update={"seed": run.seed})
    request = replace(request, run=run, measures=measures)
    # Adapt the options of each measure to the model; a measure that does not suit it is left out.
    return _leave_out_refused(request, check=partial(_adapt_measure, net, run.score))


def _require_autocast_effect(run: RunOptions, measures: Mapping[str, MeasureOptions]) -> None:
    """Refuse --autocast if it has no effect: it rounds predictions of models in float32 only.

    Raises:
        UsageError: no measure judges predictions, or autocast would not round a model in float64.
    """
    if run.autocast is None:
        return
    # `deploys`: the measure judges predictions (as `attack` does), not norms or bounds.
    if not any(options.deploys for options in measures.values()):
        names = " and ".join(measures)
        raise UsageError(
            f"--autocast has no effect on {names}: norms and bounds are computed in {run.dtype}",
            "Leave it out, or measure attack, too.",
        )
    if run.dtype == "float64":
        raise UsageError(
            "--autocast rounds only a model in float32, and --dtype is float64", "Leave one out."
        )


def _leave_out_refused(
    request: Request, check: Callable[[str, MeasureOptions], MeasureOptions]
) -> tuple[Request, Notes]:
    """Return the request without the optional measures that a check refuses, and a note on each.

    Args:
        request: the request.
        check: (name of a measure, options) -> the options to run the measure with. It raises
            LipauditError to refuse the measure.

    Raises:
        LipauditError: a required measure is refused, or all measures are.
    """
    accepted = {}
    notes: list[Note] = []
    for name, options in request.measures.items():
        try:
            accepted[name] = check(name, options)
        except LipauditError as error:
            is_last = len(notes) + 1 == len(request.measures)  # all others were refused, too
            if name not in request.optional or is_last:
                raise
            text = f"{name} was not measured here: {error.message}"
            if error.advice:
                text += f". {error.advice}"
            notes.append(Note.warn(LEFT_OUT, text))
    return replace(request, measures=accepted), tuple(notes)


def leave_out_layers(job: Job, error: Exception) -> Job | None:
    """Return the job without measures of attention layers, for a model without such layers.

    Args:
        job: the job.
        error: the failure of one of its measures.

    Returns:
        The smaller job, with a note. None if the failure has another reason, if a measure of
        attention is required, or if there are no other measures.
    """
    if not isinstance(error, NoHeadsError):
        return None
    request = job.request
    others = {}
    left_out = []
    for name, options in request.measures.items():
        if options.reads_layers:
            left_out.append(name)
        else:
            others[name] = options
    if not others or not {*left_out} <= {*request.optional}:
        return None
    counts = {name: job.counts[name] for name in others}
    note = Note.info(LEFT_OUT, f"{' and '.join(left_out)} were not measured here: {error.message}")
    smaller = replace(request, measures=others)
    return replace(job, request=smaller, counts=counts, notes=(*job.notes, note))


def _adapt_measure(
    net: Net, score: str | None, name: str, options: MeasureOptions
) -> MeasureOptions:
    """Return the options of a measure, with defaults for the kind of model.

    Args:
        net: the model.
        score: how a language model scores continuations (--score); None: it does not.
        name: the measure.
        options: its options.

    Raises:
        UsageError: the options do not suit the model, or the measure does not work on scores.
    """
    if score is None:
        return options.adapt(net.kind, changes=net.changes, why=NEEDED)
    if options.scores == "never":
        raise UsageError(
            f"--score {score} makes the scores of continuations the model's output, and {name} "
            "measures plain texts",
            f"Measure them without --score: lipaudit {name} MODEL --data TEXTS.",
        )
    return options.adapt_scores(net.changes)


def _check_measure(name: str, net: Net, batch: Batch, options: MeasureOptions) -> MeasureOptions:
    """Return the options of a measure, if the measure can run on this model and these samples.

    Raises:
        LipauditError: the measure cannot run.
    """
    if options.labelled and net.classes is not None and batch.y is None:
        raise _make_label_error(name)
    measure = load_measures()[name]
    with exact_arithmetic(net.device):
        measure.check(net, batch, options)
        # A measure with a fixed number of samples per batch (`chunk`) gets padded texts: the model
        # must not read the padding. All other measures get texts of one length at a time.
        if measure.chunk and batch.mask is not None:
            requirements.require_padding_is_unread(net, batch)
    return options


def _make_label_error(name: str) -> UsageError:
    return UsageError(
        f"{name} needs labelled samples",
        "Give labelled samples with --data (a folder of classes, .npz, .csv...), or name the "
        "label column with --label-column.",
    )


def _load_samples(net: Net, request: Request, count: int) -> Samples:
    """Load the samples of a request; without data, those of the demo or random ones.

    Labels that are no classes of the model are dropped if no measure needs labels.

    Args:
        net: the model.
        request: the request: the data, and the measures. `optional` names the measures that are
            left out later if the samples do not allow them.
        count: number of samples.

    Raises:
        UsageError: the samples are random, and a measure that is not optional needs labels.
        LabelError: the labels are no classes of the model, and a measure needs labels.
    """
    default = "demo" if net.source == "demo" else "random"
    spec = request.run.data or default
    need_labels = [name for name, options in request.measures.items() if options.labelled]
    required = [name for name in need_labels if name not in request.optional]
    if spec == "random" and required:
        raise _make_label_error(required[0])
    options = data_options(request.run, count)
    try:
        return load_data(spec, net, options)
    except LabelError as error:
        if need_labels:
            raise
        text = f"labels are not used: {error.message}"
        # Loaded again: for a model without classes, labels are not matched to classes.
        samples = load_data(spec, replace(net, classes=None), options)
    # A table of texts notes that a model without classes uses no labels. The warning gives the
    # true reason, so it replaces this note, which has the same code.
    warning = Note.warn("labels-unused", text)
    others = [note for note in samples.notes if note.code != warning.code]
    unlabelled = replace(samples.batch, y=None)
    return replace(samples, batch=unlabelled, notes=(*others, warning))


def data_options(run: RunOptions, samples: int) -> DataOptions:
    """Return the options for reading a number of samples.

    `scored`: the samples are prompts with continuations, whose probability a language model
    scores (--score).
    """
    counted = {"samples": samples, "scored": run.score is not None}
    return DataOptions(**_select_options(DataOptions, run) | counted)


def load_options(run: RunOptions) -> LoadOptions:
    """Return the options for loading the model."""
    values = _select_options(LoadOptions, run)
    # The possible shapes of the samples, for a module that does not declare its input.
    values["forms"] = lambda: find_data_forms(run.data)
    # Two options of a run are files of names, and fields of `LoadOptions` with the same names are
    # something else. --class-names has names for the model's own classes: the field `labels`.
    path = values.pop("class_names", None)
    if path is not None:
        values["labels"] = classifiers.read_class_names(Path(path), "--class-names")
    # --classes makes a zero-shot classifier of these names: the field `class_names`.
    if run.classes is not None:
        del values["classes"]
        values["class_names"] = classifiers.read_class_names(Path(run.classes))
        values["prompts"] = classifiers.read_prompts(run.prompt)
    return LoadOptions(**values)


def _select_options(kind: type[DataOptions | LoadOptions], run: RunOptions) -> dict[str, Any]:
    """Return the options of a run that are given and are fields of `kind`, by name."""
    values = {}
    for option_field in fields(kind):
        value = getattr(run, option_field.name, None)
        if value is not None:
            values[option_field.name] = value
    return values


# Number of samples shown.
SHOWN = 5
# Largest number of samples of the timed batch.
TIMED = 8


def preview(request: Request) -> dict[str, Any]:
    """Describe the model, the data, the attention layers and the measures of an audit.

    Args:
        request: the request of the audit.

    Raises:
        LipauditError: the model or the data cannot be read, or the model does not run.
    """
    job = prepare(request)
    net = job.net
    batch = job.samples.batch
    job, sites, remarks = _find_sites(job)
    # Number of heads by the reason why their layer has no closed form; layers that have a closed
    # form are counted under "closed form".
    heads = Counter[str]()
    for site in sites:
        heads[site.reason or "closed form"] += site.heads
    return {
        "model": net.name,
        "architecture": net.architecture,
        "parameters": net.parameters,
        "takes": net.kind,
        "classes": net.classes,
        "device": str(net.device),
        "device_map": dict(net.device_map),
        "dtype": str(net.dtype).removeprefix("torch."),
        "layers": len(sites),
        "heads": dict(heads),
        "data": job.samples.spec,
        "samples": len(batch),
        "first": _describe_first_samples(job),
        "preprocessing": list_steps(net, job.samples),
        "forward": _time_batch(job),
        "measures": dict(job.counts),
        "notes": [*(note.text for note in job.notes), *remarks],
    }


def _find_sites(job: Job) -> tuple[Job, tuple[Site, ...], list[str]]:
    """Find the attention layers of the model of an audit, by running its first sample.

    Returns:
        The job, without optional measures of attention if there are no layers; the layers; and
        remarks on attention that is not measured.
    """
    net = job.net
    # A model that scores continuations runs on several texts for a sample: then no measure reads
    # layers.
    if net.scored:
        return job, (), []
    with exact_arithmetic(net.device):
        try:
            sites = find_layers(net, job.samples.batch[:1].trim().to(net.device, net.dtype))
        except NoHeadsError as error:
            smaller = leave_out_layers(job, error)
            if smaller is None:  # the audit would fail
                return job, (), [f"{error.message}. {error.advice}"]
            return smaller, (), []
    return job, sites, [note.text for note in note_unread(net, sites)]


def _describe_first_samples(job: Job) -> list[str]:
    """Return a line with place and label for each of the first samples, to show wrong labels."""
    batch = job.samples.batch
    places = list_origins(job.samples).get("place", batch.ids)
    labels = [-1] * SHOWN  # -1: no label
    if batch.y is not None:
        labels = batch.y[:SHOWN].tolist()
    names = dict(enumerate(job.net.labels or ()))
    lines = []
    for place, label in zip(places, labels, strict=False):  # at most SHOWN samples
        name = names.get(label)
        if label < 0:
            lines.append(f"{place}: no label")
        elif name in (None, str(label)):  # a class without a name of its own
            lines.append(f"{place}: label {label}")
        else:
            lines.append(f"{place}: label {label} ({name})")
    return lines


def _time_batch(job: Job) -> dict[str, Any]:
    """Return size, seconds and peak memory of one forward pass, the basis of time estimates.

    The memory is the peak since the start: of the device, or of this process on a CPU.
    """
    net = job.net
    size = min(TIMED, job.request.run.batch_size or TIMED)
    # Texts of one length, because a model may take no padding.
    batch = next(job.samples.batch[:size].by_length(size))
    batch = batch.to(net.device, net.dtype)
    with exact_arithmetic(net.device), torch.no_grad():
        for _ in range(2):  # the first pass compiles kernels and fills caches
            start = time.perf_counter()
            net.output(batch).sum().item()  # waits for the device
            seconds = time.perf_counter() - start
    if net.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(net.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux
    gigabytes = round(peak / 1e9, 2)
    return {"samples": len(batch), "seconds": round(seconds, 4), "gigabytes": gigabytes}
