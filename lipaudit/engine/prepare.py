"""A request, and the job it becomes: a loaded model, its samples, what is measured on how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lipaudit.data.loading import DataOptions, Samples, load_data
from lipaudit.engine.files import require_writable
from lipaudit.errors import InputError, UsageError
from lipaudit.models.net import Net
from lipaudit.models.sources.loading import LoadOptions, load_net
from lipaudit.results import Note
from lipaudit.settings import MeasureOptions, RunOptions


@dataclass(frozen=True)
class Request:
    """What is to be measured: plain values only.

    Attributes:
        model: the MODEL argument.
        measures: the options of every measure that is to run, by its name, in this order.
        run: what they share.
        counts: how many samples each measure takes where `run` does not say.
        skip_unlabelled: leave out, with a note, what needs labels where there are none.
        command: what the report says it was made by.
    """

    model: str
    measures: Mapping[str, MeasureOptions]
    run: RunOptions = field(default_factory=RunOptions)
    counts: Mapping[str, int] = field(default_factory=dict)
    skip_unlabelled: bool = False
    command: str = ""

    def count(self, name: str) -> int:
        """Return how many samples a measure is to take."""
        return self.run.samples or self.counts.get(name, self.measures[name].samples)


@dataclass(frozen=True)
class Job:
    """A request with its model and samples at hand.

    Attributes:
        request: with what follows from model and samples filled in.
        net: the model.
        samples: enough for every measure.
        counts: how many of them each measure takes.
        notes: remarks on loading.
    """

    request: Request
    net: Net
    samples: Samples
    counts: Mapping[str, int]
    notes: tuple[Note, ...]


def prepare(request: Request, *, net: Net | None = None, samples: Samples | None = None) -> Job:
    """Load what a request names.

    Args:
        request: what is to be measured.
        net: a model that is loaded already.
        samples: samples that are at hand already.

    Raises:
        LipauditError: whatever goes wrong, with the exit code it deserves.
    """
    for path in (path for options in request.measures.values() for path in options.files):
        require_writable(path)
    request = _filled(request)
    net = net or load_net(request.model, load_options(request.run))
    suited = {name: options.suited(net.kind) for name, options in request.measures.items()}
    request = replace(request, measures=suited)
    wanted = {name: request.count(name) for name in request.measures}
    samples = samples or _samples(net, request, max(wanted.values()))
    notes = net.info.notes + samples.notes
    if request.skip_unlabelled and (samples.batch.y is None or net.classes is None):
        skipped = [name for name, options in request.measures.items() if options.labelled]
        notes += tuple(_skipped(name, net) for name in skipped)
        kept = {name: o for name, o in request.measures.items() if name not in skipped}
        if not kept:
            raise UsageError(
                f"nothing is left to measure: {_skipped(skipped[0], net).text}",
                "Name labelled samples (--data), or other measures.",
            )
        request = replace(request, measures=kept)
    counts = {name: min(wanted[name], len(samples.batch)) for name in request.measures}
    return Job(request, net, samples, counts, notes)


def _filled(request: Request) -> Request:
    """Give every measure the seed of the run, and texts the length that the measures need."""
    run = request.run
    needed = [options.tokens for options in request.measures.values() if options.tokens]
    if run.max_tokens is None and needed:
        run = run.model_copy(update={"max_tokens": max(needed)})
    measures = {
        name: options.model_copy(update={"seed": run.seed})
        for name, options in request.measures.items()
    }
    return replace(request, run=run, measures=measures)


def _skipped(name: str, net: Net) -> Note:
    text = f"{name} was left out: it needs labelled samples (--data)"
    if net.classes is None:
        text = f"{name} was left out: {net.info.architecture} has no classes to label samples with"
    return Note(level="warning", code="no-labels", text=text)


def _samples(net: Net, request: Request, count: int) -> Samples:
    spec = request.run.data or ("demo" if net.info.source == "demo" else "random")
    labelled = any(options.labelled for options in request.measures.values())
    if labelled and net.classes is None and not request.skip_unlabelled:
        raise InputError(
            f"{net.info.architecture} has no class scores", "Attack a classifier, with labels."
        )
    if labelled and spec == "random" and not request.skip_unlabelled:
        raise UsageError(
            "an attack needs labelled samples", "Name them with --data (a folder, .npz, .csv...)."
        )
    return load_data(spec, net, data_options(request.run, count))


def data_options(run: RunOptions, samples: int) -> DataOptions:
    """Return how to read so many samples."""
    return DataOptions(
        samples=samples,
        seed=run.seed,
        max_tokens=run.max_tokens or DataOptions.max_tokens,
        text_column=run.text_column,
        label_column=run.label_column,
        offline=run.offline,
        skip_bad=run.skip_bad,
    )


def load_options(run: RunOptions) -> LoadOptions:
    """Return how to load the model."""
    return LoadOptions(
        arch=run.arch,
        model_kwargs=run.model_kwargs or {},
        mean=run.mean,
        std=run.std,
        input_size=None if run.input_size is None else (run.input_size,),
        device=run.device or "auto",
        dtype=run.dtype,
        offline=run.offline,
        tower=run.tower,
    )
