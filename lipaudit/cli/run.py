"""Run the measures of a job, keep what is finished, and make the report."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from lipaudit import __version__
from lipaudit.cli.estimate import numerical
from lipaudit.cli.job import Job, prepare, tell
from lipaudit.cli.journal import Journal
from lipaudit.cli.options import Common
from lipaudit.cli.progress import tracked
from lipaudit.data.sources import Samples
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.measures import MEASURES, Measure, Options, Part
from lipaudit.measures.by_layer import SURVEYED
from lipaudit.measures.measure import sample_ids
from lipaudit.models.net import Net
from lipaudit.results import Data, Model, Note, Report, Run, Section

PACKAGES = ("lipaudit", "torch", "timm", "transformers", "numpy", "pyautoattack")


Keep = Callable[[str, list[Part], Samples], None]
Adapt = Callable[[Options, Sequence[Section]], Options]


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
    journals: list[Journal] = []
    with ExitStack() as held, _telling_what_is_kept(job.common, journals):
        for name, given in job.measures.items():
            options = adapt(given, sections)
            part = replace(job.samples, batch=job.samples.batch[: job.counts[name]])
            journals.append(held.enter_context(Journal(_identity(name, options, job, part))))
            parts = _measure(name, options, job, part, journals[-1])
            keep(name, parts, part)
            made = MEASURES[name].summarise(parts, options)
            head = made[0].model_copy(update={"notes": job.notes + made[0].notes})
            sections += [head, *made[1:]]
        for journal in journals:
            journal.clear()
    return Report(run=_run(job), sections=tuple(sections))


@contextmanager
def _telling_what_is_kept(common: Common, journals: Sequence[Journal]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if any(journal.paths() for journal in journals):
            text = "what is finished is kept: the same command with --resume goes on"
            tell(common, (Note(level="info", code="kept", text=text),))
        raise


def _measure(
    name: str, options: Options, job: Job, samples: Samples, journal: Journal
) -> list[Part]:
    """Return the parts of a measure, with --resume those of an interrupted run among them."""
    measure, common, total = MEASURES[name], job.common, len(samples.batch)
    kept = journal.parts(samples.batch.ids)
    if kept:
        tell(common, (_kept(name, len(sample_ids(kept)), total, common.resume),))
    kept = kept if common.resume else []
    done = len(sample_ids(kept))
    parts = _parts(measure, options, job.net, samples, _batch_size(common, measure), done)
    parts = journal.recorded(parts, after=len(kept))
    label = f"{name} {job.net.info.spec}"
    with _forewarning(name, job):
        return kept + list(tracked(parts, total=total - done, label=label, quiet=common.quiet))


@contextmanager
def _forewarning(name: str, job: Job) -> Iterator[None]:
    """Say before it begins what will take long, once the layers are known."""
    if name != "bounds" or job.common.quiet:
        yield
        return
    token = SURVEYED.set(lambda sites: tell(job.common, numerical(job, sites)))
    try:
        yield
    finally:
        SURVEYED.reset(token)


def _kept(name: str, done: int, total: int, resumed: bool) -> Note:
    text = f"an interrupted run finished {done} of {total} samples of {name}: "
    text += "going on from there" if resumed else "stop this one and add --resume to go on with it"
    return Note(level="info", code="kept", text=text)


def _identity(name: str, options: Options, job: Job, samples: Samples) -> dict[str, object]:
    """Return all that decides the numbers of a measure, but for how samples are batched."""
    net = job.net
    return {
        "measure": name,
        "options": dict(options),
        "model": (job.spec, net.info.weights_sha256, net.info.preprocess, str(net.dtype)),
        "device": net.device.type,
        "reading": job.common.reading(),
        "samples": samples.batch.ids,
        "versions": versions(),
    }


def _parts(
    measure: Measure, options: Options, net: Net, samples: Samples, size: int, done: int
) -> Iterator[Part]:
    """Yield the parts; when memory runs out, go on from there with half the batch."""
    rest = samples.batch[done:]
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


def _batch_size(common: Common, measure: Measure) -> int:
    text = common.batch_size or "auto"
    if text == "auto":
        return measure.batch
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--batch-size must be auto or a positive number, not {text!r}")
    return int(text)


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
