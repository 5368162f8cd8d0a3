"""Where the numbers of a report come from: all that is needed to repeat them."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, entry_points, version

import torch

from lipaudit import __version__
from lipaudit.attacks.kinds import GROUP as ATTACKS
from lipaudit.data.hub import Commit
from lipaudit.data.loading import Samples
from lipaudit.engine.prepare import Job
from lipaudit.results import Data, Model, Run
from lipaudit.results.bounds import GROUP as BOUNDS
from lipaudit.results.measures import GROUP as MEASURES

PACKAGES = ("torch", "timm", "transformers", "numpy", "pyautoattack")
GROUPS = (BOUNDS, MEASURES, ATTACKS)


def provenance(job: Job) -> Run:
    """Describe the run of a job."""
    request, net, samples, info = job.request, job.net, job.samples, job.net.info
    return Run(
        lipaudit=__version__,
        command=request.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=request.run.seed,
        device=_device(net.device),
        dtype=str(net.dtype).removeprefix("torch."),
        versions=versions(),
        model=Model(
            spec=info.spec,
            source=info.source,
            architecture=info.architecture,
            parameters=info.parameters,
            weights_sha256=info.weights_sha256,
            **_state(info.commit),
        ),
        data=Data(
            spec=samples.spec,
            samples=len(samples.batch),
            suite_id=samples.suite_id,
            **_state(samples.commit),
        ),
        preprocess=dict(info.preprocess),
        options=request.run.reading(),
        device_map=dict(info.device_map),
    )


def origins(samples: Samples) -> dict[str, tuple[str, ...]]:
    """Return where each sample is found, by columns; nothing where they are made up."""
    if not samples.origins:
        return {}
    texts = tuple(origin.text for origin in samples.origins)
    places = tuple(origin.place for origin in samples.origins)
    said = {"text": texts} if any(texts) else {}
    return {"ids": samples.batch.ids, "place": places, **said}


def _state(commit: Commit | None) -> dict[str, str]:
    """Return which state of a repository of the Hub was read."""
    if commit is None:
        return {}
    return {"revision": commit.repository.revision, "commit": commit.sha}


def versions() -> dict[str, str]:
    """Return the versions that can change a number."""
    installed = {"python": platform.python_version(), "lipaudit": __version__}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed | _plugins()


def _plugins() -> dict[str, str]:
    """Return the versions of the packages that add bounds, measures or attacks."""
    brought = [point.dist for group in GROUPS for point in entry_points(group=group)]
    return {dist.name: dist.version for dist in brought if dist is not None}


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device.type} ({torch.cuda.get_device_name(device)})"
    return device.type
