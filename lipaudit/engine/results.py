"""From finished parts to a report: sections, the origin of the numbers, and merged shards."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from lipaudit import __version__
from lipaudit.data.batch import Samples
from lipaudit.engine.files import pack_parts, unpack_parts, write
from lipaudit.errors import InputError, explain_error
from lipaudit.measures import layouts, load_measures
from lipaudit.measures.base import MeasureOptions, Part, in_order, sample_ids
from lipaudit.schema import to_json_values
from lipaudit.tables import Data, Model, Note, Report, Run, Section
from lipaudit.tables.columns import Cell
from lipaudit.tables.plugins import load_wings
from lipaudit.tables.report import Failure, Shard
from lipaudit.tables.weakest import worst

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Job
    from lipaudit.models.net import ModelSpec

PACKAGES = ("torch", "timm", "transformers", "numpy", "pyautoattack")


def make_report(
    run: Run,
    sections: Sequence[Section],
    samples: Mapping[str, tuple[Cell, ...]],
    shard: Shard | None = None,
) -> Report:
    """Return the report of a run; it is partial if a measure failed or a time limit ended it.

    It holds pictures and tokens of the worst samples only, to stay small.
    """
    cut = any(section.failure or section.unmeasured for section in sections)
    report = Report(
        run=run,
        status="partial" if cut else "complete",
        shard=shard,
        samples=dict(samples),
        sections=tuple(sections),
    )
    names, kept = worst(report), []
    for section in sections:
        known: dict[str, Any] = {"examples": section.examples, "gradients": section.gradients}
        shown = {n: {i: each[i] for i in names if i in each} for n, each in known.items()}
        kept.append(section.model_copy(update=shown))
    return report.model_copy(update={"sections": tuple(kept)})


def make_failed(
    name: str, settings: Mapping[str, Any], error: Exception, notes: tuple[Note, ...] = ()
) -> Section:
    """Return the section of a failed measure, with the reason in place of figures."""
    fault = explain_error(error)
    failure = Failure(reason=fault.message, advice=fault.advice, exit_code=fault.exit_code)
    return layouts()[name].section(settings=settings, notes=notes, failure=failure)


def identify(job: Job, name: str, options: MeasureOptions) -> dict[str, object]:
    """Return everything that determines the numbers of a measure, except the batch size."""
    net, run = job.net, job.request.run
    return {
        "measure": name,
        "options": options.identify(),
        "model": (net.name, net.weights_sha256, net.preprocess, str(net.dtype)),
        "device": net.device.type,
        "reading": run.reading(),
        "samples": job.samples.batch.ids[: job.counts[name]],
        "versions": versions(),
    }


def describe_run(job: Job) -> Run:
    """Describe the run of a job."""
    request, net, samples = job.request, job.net, job.samples
    of_model, of_data = (  # commits on the Hub
        {"revision": commit.repository.revision, "commit": commit.sha} if commit else {}
        for commit in (net.commit, samples.commit)
    )
    names = ("source", "architecture", "parameters", "weights_sha256", "quantised")
    of_net = {name: getattr(net, name) for name in names}
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
        model=Model(spec=net.name, **of_net, **of_model),
        data=Data(
            spec=samples.spec,
            samples=len(samples.batch),
            suite_id=samples.suite_id,
            steps="; ".join(list_steps(net, samples)),
            **of_data,
        ),
        preprocess=dict(net.preprocess),
        options=request.run.reading(),
        device_map=dict(net.device_map),
    )


def list_origins(samples: Samples) -> dict[str, tuple[str, ...]]:
    """Return the places of the samples in the data, by columns; empty for random samples."""
    if not samples.origins:
        return {}
    places, texts = zip(*((origin.place, origin.text) for origin in samples.origins), strict=True)
    return {"ids": samples.batch.ids, "place": places} | ({"text": texts} if any(texts) else {})


def list_steps(net: ModelSpec, samples: Samples) -> list[str]:
    """Return what is done to the first sample, in order, to its last step in the model."""
    if not samples.steps:
        return []
    steps = list(samples.steps)
    first = samples.batch.x[0]
    if net.kind != "text":
        steps.append(f"values {first.min():.4g} to {first.max():.4g}")
    mean, std = (net.preprocess.get(name) for name in ("mean", "std"))
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
    # Plug-ins compute figures, too.
    for point in load_wings():
        if point.dist is not None:
            installed.setdefault(point.dist.name, point.dist.version)
    return installed


# Fields in which shards of one run may differ (devices must be of one kind).
MAY_DIFFER = frozenset({"command", "created", "device", "device_map"})


def make_shard(job: Job, finished: Mapping[str, Sequence[Part]]) -> Shard:
    """Return the data of a shard for `merge`, if a job measures some of the samples."""
    number, of = job.request.run.shard or (1, 1)
    return Shard(
        number=number,
        of=of,
        ids=job.samples.batch.ids,
        counts=dict(job.counts),
        notes=job.notes,
        options={name: o.unkept() for name, o in job.request.measures.items()},
        parts={name: pack_parts(parts, name) for name, parts in finished.items()},
    )


def summarise(
    name: str, parts: Sequence[Part], options: MeasureOptions, notes: tuple[Note, ...], left: int
) -> list[Section]:
    """Return the sections of a measure, and write the files that its options name.

    Args:
        name: name of the measure.
        parts: its parts, in the order of the samples.
        options: its options.
        notes: notes on loading, which come first.
        left: number of samples that a time limit left out.
    """
    if left:
        done = len(sample_ids(parts))
        text = f"the time limit ended {name} after {done} of {done + left} samples"
        notes += (Note.warn("cut-short", text),)
    if not parts:
        settings = options.model_dump()
        return [layouts()[name].section(settings=settings, notes=notes, unmeasured=left)]
    measure = load_measures()[name]
    contents = measure.encode_files(parts, options) if options.files else {}  # a shard has none
    for path, content in contents.items():
        write(path, content)
    first, *others = measure.summarise(parts, options)
    known: dict[str, Any] = {"notes": notes + first.notes, "unmeasured": left}
    known["files"] = {str(path): sha256(each).hexdigest() for path, each in contents.items()}
    return [first.model_copy(update=known), *others]


def merge(reports: Sequence[Report], *, command: str = "lipaudit.merge()") -> Report:
    """Merge the reports of all shards of a run into one, for `lipaudit merge`.

    The result equals the report of a single process, to the last digit if the shards ran on a CPU;
    times are sums. A measure that failed in one shard has failed.

    Args:
        reports: reports of the shards, in any order.
        command: the command that the report records.

    Raises:
        InputError: the shards do not belong together, or one is missing, repeated or damaged.
    """
    pairs = []
    for report in reports:
        if report.shard is None:
            run = report.run
            raise InputError(
                f"the report of {run.model.spec} written by {run.command!r} is not a shard",
                "Give reports of commands with --shard.",
            )
        pairs.append((report.shard, report))
    whole = sorted(pairs, key=lambda pair: pair[0].number)
    shards = [shard for shard, _ in whole]
    _require_whole(shards)
    (shard, first), *others = whole
    conditions = _list_conditions(shard, first)
    for other, report in others:
        differing = _list_differences(conditions, _list_conditions(other, report))
        if differing:
            raise InputError(
                f"shards {shard.number} and {other.number} are not from the same run: they differ "
                f"in {', '.join(differing)}",
                "Measure both with the same command and software; only --shard may differ.",
            )
    sections: list[Section] = []
    for section in first.sections:
        name = section.measure
        if "." in name:  # a part of another section
            continue
        found = [report.section(name) for _, report in whole]
        failed = [each for each in found if each is not None and each.failure]
        if failed:
            sections.append(failed[0])
            continue
        left = sum(report.unmeasured.get(name, 0) for _, report in whole)
        parts = _join_shards(name, shards, left)
        options = load_measures()[name].options.parse(_read_settings(shard, first, name))
        sections += summarise(name, parts, options, shard.notes, left)
    devices = ", ".join(dict.fromkeys(report.run.device for _, report in whole))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    own = {"command": command, "created": created, "device": devices}
    return make_report(first.run.model_copy(update=own), sections, first.samples)


def _require_whole(shards: Sequence[Shard]) -> None:
    """Refuse shards, in their order, that are not those of a run, once each."""
    numbers = [shard.number for shard in shards]
    if not shards or numbers != list(range(1, shards[0].of + 1)):
        names = ", ".join(f"{shard.number}/{shard.of}" for shard in shards) or "none"
        raise InputError(
            f"shards given: {names}; the shards of a run are needed once each",
            "Measure a missing one with --shard, and name each once.",
        )


def _list_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the conditions that differ."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _list_conditions(shard: Shard, report: Report) -> dict[str, Any]:
    """Return everything that determines the numbers, by name."""
    run = report.run.model_dump(mode="json")
    measures = [s.measure for s in report.sections if "." not in s.measure]
    return {
        **{name: value for name, value in run.items() if name not in MAY_DIFFER},
        # GPUs of one kind may differ by name; a CPU and a GPU may not be mixed.
        "device": report.run.device.split(" ")[0],
        "samples": (shard.ids, shard.counts),
        **{name: _read_settings(shard, report, name) for name in measures},
    }


def _read_settings(shard: Shard, report: Report, measure: str) -> dict[str, Any]:
    """Return the options of a measure as JSON: settings of its section, and others."""
    section = report.section(measure)
    settings = {} if section is None else section.settings
    return to_json_values(settings | shard.options.get(measure, {}))


def _join_shards(measure: str, shards: Sequence[Shard], left: int) -> list[Part]:
    """Return the parts of all shards in the order of the samples; `left` samples are missing.

    Raises:
        InputError: parts are damaged, or batched differently.
    """
    parts: list[Part] = []
    for shard in shards:
        try:
            parts += unpack_parts(shard.parts[measure])
        except (KeyError, ValueError) as error:
            text = f"{measure} of shard {shard.number} of {shard.of} cannot be read: {error}"
            raise InputError(text, "Copy the file again, or measure the shard again.") from error
    names, ids = sample_ids(parts), shards[0].ids[: shards[0].counts[measure]]
    # With another batch size a shard has other batches: samples are then repeated or missing.
    uneven = sorted({*names} & {*ids}) != sorted(names) or len(names) + left != len(ids)
    if uneven:
        text = (
            f"the shards of {measure} do not contain each sample exactly once: their batch sizes"
        )
        raise InputError(f"{text} differ", "Measure all of them with the same --batch-size.")
    return in_order(parts, ids)
