"""The origin of a report's numbers: everything needed to repeat them."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import torch

from lipaudit import __version__
from lipaudit.attacks.kinds import GROUP as ATTACKS
from lipaudit.data.hub import Commit
from lipaudit.data.loading import Samples
from lipaudit.engine.prepare import Job
from lipaudit.errors import explain_error
from lipaudit.measures import layouts
from lipaudit.measures.registry import GROUP as MEASURES
from lipaudit.tables import Data, Model, Note, Report, Run, Section
from lipaudit.tables.columns import Cell
from lipaudit.tables.report import Failure, Shard
from lipaudit.tables.worst import worst
from lipaudit.theory.bounds.record import GROUP as BOUNDS

PACKAGES = ("torch", "timm", "transformers", "numpy", "pyautoattack")
GROUPS = (BOUNDS, MEASURES, ATTACKS)


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
    shown = worst(report)
    sections = [
        section.model_copy(
            update={
                "examples": {n: section.examples[n] for n in shown if n in section.examples},
                "gradients": {n: section.gradients[n] for n in shown if n in section.gradients},
            }
        )
        for section in sections
    ]
    return report.model_copy(update={"sections": tuple(sections)})


def make_failed(
    name: str, settings: Mapping[str, Any], error: Exception, notes: tuple[Note, ...] = ()
) -> Section:
    """Return the section of a failed measure, with the reason in place of figures."""
    fault = explain_error(error)
    failure = Failure(reason=fault.message, advice=fault.advice, exit_code=fault.exit_code)
    return layouts()[name].section(settings=settings, notes=notes, failure=failure)


def describe_run(job: Job) -> Run:
    """Describe the run of a job."""
    request, net, samples = job.request, job.net, job.samples
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
        model=Model(
            spec=net.name,
            source=net.source,
            architecture=net.architecture,
            parameters=net.parameters,
            weights_sha256=net.weights_sha256,
            **_name_state(net.commit),
        ),
        data=Data(
            spec=samples.spec,
            samples=len(samples.batch),
            suite_id=samples.suite_id,
            **_name_state(samples.commit),
        ),
        preprocess=dict(net.preprocess),
        options=request.run.reading(),
        device_map=dict(net.device_map),
    )


def list_origins(samples: Samples) -> dict[str, tuple[str, ...]]:
    """Return the places of the samples in the data, by columns; empty for random samples."""
    if not samples.origins:
        return {}
    places = tuple(origin.place for origin in samples.origins)
    texts = tuple(origin.text for origin in samples.origins)
    columns = {"ids": samples.batch.ids, "place": places}
    return columns | ({"text": texts} if any(texts) else {})


def _name_state(commit: Commit | None) -> dict[str, str]:
    """Return the commit of a repository of the Hub, as a field of the report."""
    if commit is None:
        return {}
    return {"revision": commit.repository.revision, "commit": commit.sha}


@functools.cache  # reading the metadata of every package takes as long as a small model
def versions() -> dict[str, str]:
    """Return the versions of packages that can change a number."""
    installed = {"python": platform.python_version(), "lipaudit": __version__}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    # Plug-ins compute figures, too.
    plugins = [point.dist for group in GROUPS for point in entry_points(group=group)]
    return installed | {dist.name: dist.version for dist in plugins if dist is not None}
