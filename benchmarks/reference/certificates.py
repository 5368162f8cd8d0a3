"""Which models certificates take: every family of timm, every type of transformers, with points.

Run by hand, from the root: python -m benchmarks.reference.certificates [timm] [transformers]
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import tempfile
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from benchmarks.reference.cases import Case, cases
from benchmarks.reference.limits import OutOfTime, time_limit
from benchmarks.reference.loaded import (
    Loader,
    alone,
    batch_for,
    pairs,
    timm_loader,
    transformers_loader,
)
from benchmarks.reference.timm_models import TIMM
from benchmarks.reference.transformers_models import small_config
from lipaudit.data.batch import Batch
from lipaudit.models.net import Net
from lipaudit.wings.certificates.form import NoRuleError, UnboundedError
from lipaudit.wings.certificates.prove import ball, run

RADIUS, ENTRIES, POINTS, GAIN, SECONDS = 1e-8, 4, 4, 0.5, 20
FLOAT32 = 1e-6
"""Share of an output that parts of a model that insist on single precision may round by."""


def outcome_of(case: Case) -> tuple[str, str]:
    """Return what comes of a model, and why; wrong and crash are faults of ours."""
    try:
        with time_limit(SECONDS), tempfile.TemporaryDirectory() as folder:
            try:
                net = _net(case, Path(folder))
                sample = alone(batch_for(net), 0)
                net.forward(net.point(sample), sample)
            except Exception as error:  # theirs: there is no such small model, or it takes no ball
                return "unbuilt", f"{type(error).__name__}: {error}"
            return _outcome(net, sample)
    except OutOfTime:
        return "slow", f"not finished in {SECONDS} s"
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"


def _net(case: Case, folder: Path) -> Net:
    loader: Loader
    if case.library == "timm":
        loader = timm_loader(TIMM[case.name])
    else:
        loader = transformers_loader(small_config(case.name), folder)
    _, net = next(pairs(loader, [GAIN]))
    return net


def _outcome(net: Net, sample: Batch) -> tuple[str, str]:
    generator = torch.Generator().manual_seed(0)
    point = net.point(sample)
    moving = torch.zeros(point.numel(), dtype=torch.bool)
    moving[torch.randperm(point.numel(), generator=generator)[:ENTRIES]] = True
    moving = moving.view(point.shape)
    try:
        low, high = _ranges(net, sample, moving)
    except NoRuleError as error:
        return "refused", f"{error.operation} in {error.module}"
    except UnboundedError as error:
        return "unbounded", str(error)
    for _ in range(POINTS):
        step = torch.randn(point.shape, generator=generator, dtype=point.dtype) * moving
        z = point + RADIUS * step / torch.linalg.vector_norm(step)
        if not _inside(net.forward(z, sample), low, high):
            return "wrong", "an output leaves its range"
    return "runs", f"widest range {float((high - low).amax()):.1e}"


def _ranges(net: Net, sample: Batch, moving: Tensor) -> tuple[Tensor, Tensor]:
    """Run the model on a ball; slack stays slack, for few forwards and wider ranges."""
    start = ball(net.point(sample), RADIUS, norm="l2", moving=moving, slack_share=math.inf)
    ends: tuple[Tensor, Tensor] = run(
        lambda z: net.forward(z, sample), start, module=net.module
    ).range()
    if not all(torch.isfinite(end).all() for end in ends):
        raise UnboundedError
    return ends


def _inside(output: Tensor, low: Tensor, high: Tensor) -> bool:
    spare = FLOAT32 * float(output.abs().amax())
    return bool(((low - spare <= output) & (output <= high + spare)).all())


def main() -> None:
    """Print a line per model, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries", nargs="*", default=["timm", "transformers"])
    parser.add_argument("--only", nargs="*", help="names of models")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    counts: Counter[tuple[str, str]] = Counter()
    for case in cases():
        if case.library not in options.libraries or case.name not in (options.only or [case.name]):
            continue
        outcome, why = outcome_of(case)
        counts[case.library, outcome] += 1
        print(f"{case.library:13s} {case.name:32s} {outcome:10s} {why[:120]}", flush=True)
    for (library, outcome), count in sorted(counts.items()):
        print(f"{library:13s} {outcome:10s} {count}")


if __name__ == "__main__":
    main()
