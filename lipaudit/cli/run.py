"""Load a model and its samples, run measures on them, and make the report."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.markup import escape

from lipaudit import __version__
from lipaudit.cli.emit import check_outputs
from lipaudit.cli.options import Common
from lipaudit.cli.progress import tracked
from lipaudit.data.loading import DataOptions, Samples, load_data
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.measures import MEASURES, Measure, Options, Part
from lipaudit.models.loading import LoadOptions, load
from lipaudit.models.net import Net
from lipaudit.results import Data, Model, Note, Report, Run, Section

PACKAGES = ("lipaudit", "torch", "timm", "transformers", "numpy", "pyautoattack")


Keep = Callable[[str, list[Part], Samples], None]
Adapt = Callable[[Options, Sequence[Section]], Options]


@dataclass(frozen=True)
class Job:
    """A loaded model, its samples, and what is to be measured on how many of them."""

    spec: str
    common: Common
    net: Net
    samples: Samples
    measures: Mapping[str, Options]
    counts: Mapping[str, int]
    notes: tuple[Note, ...]


def run(
    spec: str,
    common: Common,
    measures: Mapping[str, Options],
    *,
    keep: Keep = lambda *_: None,
    counts: Mapping[str, int] | None = None,
) -> Report:
    """Run measures on one load of a model and one set of samples: `prepare` and `execute`."""
    return execute(prepare(spec, common, measures, counts=counts), keep=keep)


def prepare(
    spec: str,
    common: Common,
    measures: Mapping[str, Options],
    *,
    skip_unlabelled: bool = False,
    counts: Mapping[str, int] | None = None,
) -> Job:
    """Load a model and its samples.

    Args:
        spec: the MODEL argument.
        common: the shared options.
        measures: which measures, with their options.
        skip_unlabelled: leave out, with a note, what needs labels where there are none.
        counts: how many samples each measure takes when --samples is not given.

    Raises:
        LipauditError: whatever goes wrong, with the exit code it deserves.
    """
    common = common.resolved()
    check_outputs(common, drawn=any(getattr(o, "map", None) for o in measures.values()))
    net = load(spec, load_options(common))
    wanted = {name: _count(name, common, counts or {}) for name in measures}
    samples = _samples(net, common, measures, wanted, skip_unlabelled)
    notes = net.info.notes + samples.notes
    if skip_unlabelled and samples.batch.y is None:
        notes += tuple(_skipped(name) for name in measures if MEASURES[name].labelled)
        measures = {name: o for name, o in measures.items() if not MEASURES[name].labelled}
    most = len(samples.batch)
    found = {name: min(wanted[name], most) for name in measures}
    return Job(spec, common, net, samples, measures, found, notes)


def execute(
    job: Job, *, keep: Keep = lambda *_: None, adapt: Adapt = lambda options, _: options
) -> Report:
    """Run the measures of a job.

    Args:
        job: from `prepare`.
        keep: gets the parts of each measure before they are summarised.
        adapt: changes the options of a measure by the sections of those before it.

    Raises:
        LipauditError: whatever goes wrong, with the exit code it deserves.
    """
    tell(job.common, job.notes)
    sections: list[Section] = []
    for name, given in job.measures.items():
        options = adapt(given, sections)
        part = replace(job.samples, batch=job.samples.batch[: job.counts[name]])
        parts = _measure(name, options, job.net, part, job.common)
        keep(name, parts, part)
        made = MEASURES[name].summarise(parts, options)
        sections += [made[0].model_copy(update={"notes": job.notes + made[0].notes}), *made[1:]]
    return Report(run=_run(job), sections=tuple(sections))


def _count(name: str, common: Common, counts: Mapping[str, int]) -> int:
    return common.samples or counts.get(name, MEASURES[name].samples)


def _skipped(name: str) -> Note:
    text = f"{name} was left out: it needs labelled samples (--data)"
    return Note(level="warning", code="no-labels", text=text)


def _measure(
    name: str, options: Options, net: Net, samples: Samples, common: Common
) -> list[Part]:
    measure = MEASURES[name]
    parts = _parts(measure, options, net, samples, _batch_size(common, measure))
    label, total = f"{name} {net.info.spec}", len(samples.batch)
    return list(tracked(parts, total=total, label=label, quiet=common.quiet))


def _parts(
    measure: Measure, options: Options, net: Net, samples: Samples, size: int
) -> Iterator[Part]:
    """Yield the parts; when memory runs out, go on from there with half the batch."""
    rest = samples.batch
    while len(rest):
        done = len(samples.batch) - len(rest)
        try:
            cut, how = _cut(measure, options, size, done)
            batches = (b.to(net.device, net.dtype) for b in rest.split(cut))
            for part in measure.run(net, batches, how):
                rest = rest[len(part.ids) :]
                yield part
        except torch.OutOfMemoryError:
            if size == 1:
                raise EvaluationError(
                    "out of memory with one sample at a time", "Try --device cpu or --max-tokens."
                ) from None
            size = max(1, size // 2)


def _cut(measure: Measure, options: Options, size: int, done: int) -> tuple[int, Options]:
    """Return how to cut the samples, and options that know it where chunks are fixed."""
    if measure.chunk is None:
        return size, options
    known = {"batch_size": size, "first_chunk": done // measure.chunk}
    return measure.chunk, options.model_copy(update=known)


def _samples(
    net: Net,
    common: Common,
    measures: Mapping[str, Options],
    wanted: Mapping[str, int],
    skip_unlabelled: bool,
) -> Samples:
    spec = common.data or ("demo" if net.info.source == "demo" else "random")
    labelled = any(MEASURES[name].labelled for name in measures)
    if labelled and spec == "random" and not skip_unlabelled:
        raise UsageError(
            "an attack needs labelled samples", "Name them with --data (a folder, .npz, .csv...)."
        )
    return load_data(spec, net, data_options(common, max(wanted.values())))


def data_options(common: Common, samples: int) -> DataOptions:
    """Return how to read so many samples."""
    return DataOptions(
        samples=samples,
        seed=common.seed or 0,
        max_tokens=common.max_tokens or DataOptions.max_tokens,
        text_column=common.text_column,
        label_column=common.label_column,
        offline=common.offline,
    )


def load_options(common: Common) -> LoadOptions:
    """Return how to load the model."""
    return LoadOptions(
        arch=common.arch,
        model_kwargs=_keywords(common.model_kwargs),
        mean=_numbers("--mean", common.mean),
        std=_numbers("--std", common.std),
        input_size=None if common.input_size is None else (common.input_size,),
        device=common.device or "auto",
        dtype=common.dtype or "float32",  # type: ignore[arg-type]  # loading refuses others
        offline=common.offline,
    )


def _keywords(text: str | None) -> dict[str, object]:
    """Read `k=v,...`; values are JSON where they can be, else strings."""
    pairs = [piece.partition("=") for piece in (text or "").split(",") if piece]
    for key, equals, _ in pairs:
        if not (key.strip().isidentifier() and equals):
            raise UsageError(f"--model-kwargs {text!r} is not k=v,...", "Example: depth=2")
    return {key.strip(): _value(value.strip()) for key, _, value in pairs}


def _value(text: str) -> object:
    literals = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in literals:
        return literals[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(piece) for piece in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is not a list of numbers", "Example: 0.5,0.5,0.5"
        ) from None


def _batch_size(common: Common, measure: Measure) -> int:
    text = common.batch_size or "auto"
    if text == "auto":
        return measure.batch
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--batch-size must be auto or a positive number, not {text!r}")
    return int(text)


def tell(common: Common, notes: tuple[Note, ...]) -> None:
    """Print remarks on stderr as they arise; they are also in the report."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for note in () if common.quiet else notes:
        colour = "yellow" if note.level == "warning" else "dim"
        console.print(f"[{colour}]note:[/] {escape(note.text)}")


def _run(job: Job) -> Run:
    common, net, samples, info = job.common, job.net, job.samples, job.net.info
    digest = hashlib.sha256("\n".join(sorted(samples.batch.ids)).encode()).hexdigest()
    return Run(
        lipaudit=__version__,
        command=shlex.join(["lipaudit", *sys.argv[1:]]),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=common.seed or 0,
        device=_device_name(net.device),
        dtype=str(net.dtype).removeprefix("torch."),
        versions=versions(),
        model=Model(
            spec=job.spec,
            source=info.source,
            architecture=info.architecture,
            parameters=info.parameters,
            weights_sha256=info.weights_sha256,
        ),
        data=Data(spec=samples.spec, samples=len(samples.batch), suite_id=digest[:16]),
        preprocess=dict(info.preprocess),
        options=common.reading(),
    )


def versions() -> dict[str, str]:
    """Return the versions that can change a number."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device.type} ({torch.cuda.get_device_name(device)})"
    return device.type
