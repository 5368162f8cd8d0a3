"""Preview of an audit: model, data, attention layers and one timed batch, without measuring."""

from __future__ import annotations

import resource
import time
from collections import Counter
from typing import Any

import torch

from lipaudit.engine.prepare import Job, Request, prepare
from lipaudit.engine.provenance import list_origins
from lipaudit.measures.by_layer import note_unread
from lipaudit.models.attention.survey import NoHeadsError, find_layers
from lipaudit.models.precision import eager, exact_arithmetic

SHOWN = 5
"""Number of samples shown."""
TIMED = 8
"""Largest number of samples of the timed batch."""


def preview(request: Request) -> dict[str, Any]:
    """Describe the model, the data, the attention layers and the measures of an audit.

    Args:
        request: the request of the audit.

    Raises:
        LipauditError: the model or the data cannot be read, or the model does not run.
    """
    job = prepare(request)
    net, batch = job.net, job.samples.batch
    notes = [note.text for note in job.notes]
    heads: Counter[str] = Counter()
    with eager(), exact_arithmetic(net.device):
        try:
            # A model that scores reads several texts per sample: no layer is read.
            first = batch[:1].trim().to(net.device, net.dtype)
            sites = () if net.scored else find_layers(net, first)
            notes += [note.text for note in note_unread(net, sites)]
        except NoHeadsError as error:
            sites = ()
            notes.append(f"{error.message}. {error.advice}")
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
        "first": _describe_first(job),
        "forward": _time_batch(job),
        "measures": dict(job.counts),
        "notes": notes,
    }


def _describe_first(job: Job) -> list[str]:
    """Return place and label of the first samples: wrong labels are a common mistake."""
    batch = job.samples.batch[:SHOWN]
    names = dict(enumerate(job.net.labels or ()))
    places = list_origins(job.samples).get("place", batch.ids)
    labels = [-1] * len(batch) if batch.y is None else batch.y.tolist()
    shown = []
    for place, y in zip(places[:SHOWN], labels, strict=True):
        name = "" if names.get(y, str(y)) == str(y) else f" ({names[y]})"
        shown.append(f"{place}: label {y}{name}" if y >= 0 else f"{place}: no label")
    return shown


def _time_batch(job: Job) -> dict[str, Any]:
    """Return samples, seconds and memory of one forward pass, the basis of every estimate.

    The memory is the most that was in use so far: of the device, or of this process on a CPU.
    """
    net = job.net
    batch = job.samples.batch[:TIMED].to(net.device, net.dtype)
    with eager(), torch.no_grad():
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
