"""From finished parts to a report: its sections, and the origin of the numbers."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lipaudit import __version__
from lipaudit.data.batch import Samples
from lipaudit.engine.files import write
from lipaudit.errors import explain_error
from lipaudit.measures import layouts, load_measures
from lipaudit.measures.base import MeasureOptions, Part, sample_ids, select_complete
from lipaudit.tables import Data, Model, Note, Notes, Report, Run, Section
from lipaudit.tables.columns import Cell
from lipaudit.tables.plugins import load_wings
from lipaudit.tables.report import Failure
from lipaudit.tables.weakest import find_worst

if TYPE_CHECKING:
    from lipaudit.data.hub import Commit
    from lipaudit.engine.prepare import Job
    from lipaudit.models.net import ModelSpec, Net

PACKAGES = ("torch", "timm", "transformers", "numpy", "pyautoattack")


def make_report(
    run: Run,
    sections: Sequence[Section],
    samples: Mapping[str, tuple[Cell, ...]],
) -> Report:
    """Return the report of a run; it is partial if a measure failed or a time limit ended it.

    To stay small, the report has pictures and tokens of the worst samples only.
    """
    status: Literal["complete", "partial"] = "complete"
    if any(section.failure or section.unmeasured for section in sections):
        status = "partial"
    report = Report(run=run, status=status, samples=dict(samples), sections=tuple(sections))
    worst_samples = find_worst(report)
    smaller = []  # the sections, with pictures and tokens of the worst samples only
    for section in sections:
        update = {
            "examples": _select(section.examples, worst_samples),
            "gradients": _select(section.gradients, worst_samples),
        }
        smaller.append(section.model_copy(update=update))
    return report.model_copy(update={"sections": tuple(smaller)})


def _select(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the values of some samples, in the order of their names."""
    return {name: values[name] for name in names if name in values}


def describe_failure(error: Exception) -> Failure:
    """Return the reason why a measure failed."""
    fault = explain_error(error)
    return Failure(reason=fault.message, advice=fault.advice, exit_code=fault.exit_code)


def make_failed(
    name: str, options: MeasureOptions, failure: Failure, notes: Notes = ()
) -> Section:
    """Return the section of a failed measure, with the reason in place of figures."""
    layout = layouts()[name]  # title and columns of the measure's section
    return layout.section(settings=options.model_dump(), notes=notes, failure=failure)


def identify(job: Job, name: str, options: MeasureOptions) -> dict[str, object]:
    """Return everything that determines the numbers of a measure, except the batch size.

    Stored results of an interrupted run are used only if all of this is the same.
    """
    net = job.net
    run = job.request.run
    return {
        "measure": name,
        "options": options.identify(),
        "model": (net.name, net.weights_sha256, net.preprocess, str(net.dtype)),
        "device": net.device.type,
        "reading": run.reading(),  # options that decide how model and data are read
        "samples": job.samples.batch.ids[: job.counts[name]],
        "versions": versions(),
    }


def describe_run(job: Job) -> Run:
    """Describe the run of a job."""
    request = job.request
    net = job.net
    samples = job.samples
    device = net.device.type
    if device == "cuda":
        device = f"{device} ({torch.cuda.get_device_name(net.device)})"
    return Run(
        lipaudit=__version__,
        command=request.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=request.run.seed,
        device=device,
        dtype=str(net.dtype).removeprefix("torch."),
        versions=versions(),
        model=_describe_model(net),
        data=Data(
            spec=samples.spec,
            samples=len(samples.batch),
            suite_id=samples.suite_id,
            steps="; ".join(list_steps(net, samples)),
            **_describe_commit(samples.commit),
        ),
        preprocess=dict(net.preprocess),
        options=request.run.reading(),
        device_map=dict(net.device_map),
    )


def _describe_model(net: Net) -> Model:
    """Return what a report says about its model: name, origin, architecture and weights."""
    return Model(
        spec=net.name,
        source=net.source,
        architecture=net.architecture,
        parameters=net.parameters,
        weights_sha256=net.weights_sha256,
        quantised=net.quantised,
        **_describe_commit(net.commit),
    )


def _describe_commit(commit: Commit | None) -> dict[str, str]:
    """Return revision and commit of a model or data set of the Hub; empty for others."""
    if commit is None:
        return {}
    return {"revision": commit.repository.revision, "commit": commit.sha}


def list_origins(samples: Samples) -> dict[str, tuple[str, ...]]:
    """Return places, texts and groups of the samples by columns; empty for random samples."""
    if not samples.origins:
        return {}
    places = tuple(origin.place for origin in samples.origins)
    columns = {"ids": samples.batch.ids, "place": places}
    for name in ("text", "group"):
        values = tuple(getattr(origin, name) for origin in samples.origins)
        if any(values):
            columns[name] = values
    return columns


def list_steps(net: ModelSpec, samples: Samples) -> list[str]:
    """Return the steps of preprocessing for the first sample, as texts.

    The steps lead from the file to the normalisation in the model. Random samples have no steps.
    """
    if not samples.steps:
        return []
    steps = list(samples.steps)
    first = samples.batch.x[0]
    if net.kind != "text":
        steps.append(f"values {first.min():.4g} to {first.max():.4g}")
    mean = net.preprocess.get("mean")
    std = net.preprocess.get("std")
    if mean is not None:
        steps.append(f"in the model: minus mean {mean}, divided by std {std}")
    return steps


@functools.cache  # reading the metadata of every package takes as long as a small model
def versions() -> dict[str, str]:
    """Return the versions of packages that can change a number."""
    installed = {"python": platform.python_version(), "lipaudit": __version__}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    # Figures may come from plug-ins, which are packages, too.
    for point in load_wings():
        if point.dist is not None:
            installed.setdefault(point.dist.name, point.dist.version)
    return installed


def in_order(parts: Sequence[Part], ids: Sequence[str]) -> list[Part]:
    """Return parts in the order of `ids`, the samples of the run.

    A part is the result of a measure on some samples. If these are not neighbours in the order of
    `ids`, it is split into one part per sample.
    Figures of the whole part, such as its seconds, then belong to the part of its first sample.
    """
    position = {name: i for i, name in enumerate(ids)}
    pieces = []
    for part in parts:
        first = position[part.ids[0]]
        neighbours = ids[first : first + len(part.ids)]
        if list(part.ids) == list(neighbours):
            pieces.append(part)
        else:
            pieces += [_pick_sample(part, i) for i in range(len(part.ids))]
    return sorted(pieces, key=lambda piece: position[piece.ids[0]])


def _pick_sample(part: Part, i: int) -> Part:
    """Return the result on sample i alone, from a part, which is the result on some samples.

    Figures of the whole part, such as its seconds, go to its first sample.
    """
    values = {}
    for name, array in part.values.items():
        if len(array) == len(part.ids):  # a row per sample
            values[name] = array[i : i + 1]
        elif i == 0:  # an array of the whole part
            values[name] = array
        else:  # empty, so that joining the parts again counts it once
            values[name] = array[:0]
    if i == 0:
        return replace(part, ids=part.ids[:1], values=values)
    return Part(part.ids[i : i + 1], values, complete=part.complete)


def summarise(
    name: str, parts: Sequence[Part], options: MeasureOptions, notes: Notes, left: int
) -> list[Section]:
    """Return the sections of a measure, and write the files that its options name.

    Args:
        name: name of the measure.
        parts: its parts, in the order of the samples.
        options: its options.
        notes: notes on loading, which precede those of the measure.
        left: number of samples that a time limit left out or unfinished.

    Returns:
        The section of the measure; some measures give further sections.
    """
    if left:
        finished = len(sample_ids(select_complete(parts)))
        text = f"the time limit ended {name} after {finished} of {finished + left} samples"
        begun = len(sample_ids(parts)) - finished
        if begun:
            text += f", with {begun} begun"
        notes += (Note.warn("cut-short", text),)
    if not parts:  # no sample was measured in time: a section without figures
        settings = options.model_dump()
        return [layouts()[name].section(settings=settings, notes=notes, unmeasured=left)]
    measure = load_measures()[name]
    contents: Mapping[Path, bytes] = {}
    if options.files:
        contents = measure.encode_files(parts, options)
    for path, content in contents.items():
        write(path, content)
    first, *others = measure.summarise(parts, options)
    hashes = {str(path): sha256(content).hexdigest() for path, content in contents.items()}
    update = {"notes": notes + first.notes, "unmeasured": left, "files": hashes}
    return [first.model_copy(update=update), *others]
