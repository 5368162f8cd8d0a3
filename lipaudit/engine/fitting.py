"""How much memory a measure takes, and how long a batch takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipaudit.data.batch import Batch, Share
from lipaudit.engine.prepare import Job
from lipaudit.errors import out_of_memory
from lipaudit.measures import MEASURES
from lipaudit.measures.by_layer import choose_layers
from lipaudit.models.attention.survey import surveyed
from lipaudit.models.memory import Footprint, Held
from lipaudit.models.precision import eager, seed_device
from lipaudit.settings import AttentionOptions, BoundsOptions, JacobianOptions

STEPS = 2
"""Lanczos steps that are tried: each further one takes a vector more."""
TIMED = 8
"""Samples of the batch that is timed."""


def time_batch(job: Job) -> tuple[int, float] | None:
    """Time a forward pass of a batch, after one that is not timed.

    Returns:
        The samples of the batch and the seconds it takes; None where memory runs out for it.
    """
    batch = job.samples.batch[:TIMED].to(job.net.device, job.net.dtype)
    try:
        with eager(), torch.no_grad():
            job.net.output(batch).sum().item()
            start = time.perf_counter()
            job.net.output(batch).sum().item()  # waits for the device
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None
    return len(batch), time.perf_counter() - start


def footprint(job: Job, name: str) -> Footprint | None:
    """Try a measure on one sample, and on two: in two of its layers, or some of its steps.

    Args:
        job: with the measure.
        name: of the measure.

    Returns:
        What it takes; None where it cannot be tried in seconds.
    """
    run = _trial(job, name)
    if run is None:
        return None
    one, two = (_most(job, run, samples) for samples in (1, 2))
    sample = max(two - one, 0)
    return Footprint(max(one - sample, 0), sample)


def less(job: Job) -> str:
    """Say what to type where memory ran out for a single sample."""
    ways = {
        "--weights stored": any(n.code == "half-precision" for n in job.net.info.notes),
        "--max-tokens": job.net.kind == "text",
        "--input-size": job.net.kind == "image",
        "--device cpu": job.net.device.type != "cpu",
    }
    helping = " or ".join(name for name, helps in ways.items() if helps)
    start = f"Try {helping}, or" if helping else "Try"
    return f"{start} a machine with more memory; lipaudit check says what a sample takes."


def _most(job: Job, run: Callable[[Batch], Any], samples: int) -> int:
    """Return the most bytes that a run on copies of the longest sample takes."""
    batch, net = job.samples.batch, job.net
    longest = 0 if batch.mask is None else int(batch.mask.sum(1).argmax())
    copies = batch.rows(torch.full((samples,), longest)).trim()
    copies = replace(copies, ids=tuple(f"{i}-{k}" for k, i in enumerate(copies.ids)))
    with seed_device(0, net.device), Held(net.module) as taken:
        run(copies.to(net.device, net.dtype))
    return taken.most


def _trial(job: Job, name: str) -> Callable[[Batch], Any] | None:
    """Return what takes the memory of a measure, in a small part of its time."""
    options, net = job.request.measures[name], job.net
    if name == "attack":
        return lambda batch: _gradient(job, batch)
    if isinstance(options, JacobianOptions):
        end = options.target and options.target.replace(":all", ":last")  # as many at a time
        quick = {"max_steps": STEPS, "per_layer": False, "target": end}
        options = options.model_copy(update=quick)
    elif isinstance(options, AttentionOptions | BoundsOptions):
        sites = choose_layers(
            surveyed(net, job.first(name).to(net.device, net.dtype)), options.layers
        )
        sites = tuple(s for s in sites if s.closed_form or name == "attention")
        if not sites:
            return None
        ends = tuple(sorted({sites[0].index, sites[-1].index}))
        options = options.model_copy(update={"layers": ends})
    else:
        return None
    return lambda batch: list(MEASURES[name].parts(net, Share(batch, [batch]), options))


def _gradient(job: Job, batch: Batch) -> Tensor:
    with torch.enable_grad():
        z = job.net.point(batch).requires_grad_()
        return torch.autograd.grad(job.net.forward(z, batch).sum(), z)[0]
