"""What an audit would read and measure, in how much memory: looked at, not measured."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lipaudit.engine.fitting import fitting, footprint, time_batch
from lipaudit.engine.prepare import Job
from lipaudit.engine.provenance import origins
from lipaudit.errors import as_user_meets
from lipaudit.measures.by_layer import unread_notes
from lipaudit.models.attention.survey import surveyed
from lipaudit.models.memory import Footprint, free, held
from lipaudit.models.precision import eager, exact_arithmetic

SHOWN = 5
"""Samples that are shown."""


def preview(job: Job) -> dict[str, Any]:
    """Return what is read of a job's model and data, and what each measure takes.

    Args:
        job: from `prepare`.

    Raises:
        InputError, EvaluationError: the model does not run at its samples.
    """
    net, info = job.net, job.net.info
    first = job.samples.batch[:1].trimmed().to(net.device, net.dtype)
    with eager(), exact_arithmetic(net.device):
        # What is scored is several texts for each sample, and no layer is read.
        sites = () if net.scored else surveyed(net, first)
        timed = time_batch(job)
        measures = {name: _planned(job, name) for name in job.counts}
    unread: Counter[str] = Counter()
    for site in sites:
        unread[site.reason or ""] += site.heads
    return {
        "model": info.spec,
        "architecture": info.architecture,
        "parameters": info.parameters,
        "takes": net.kind,
        "classes": net.classes,
        "device": str(net.device),
        "device_map": dict(info.device_map),
        "dtype": str(net.dtype).removeprefix("torch."),
        "layers": len(sites),
        "heads": sum(site.heads for site in sites),
        "closed_form": unread.pop("", 0),
        "numerical": dict(unread),
        "data": job.samples.spec,
        "samples": len(job.samples.batch),
        "first": _first(job),
        "memory": {"held": held(net.device), "free": free(net.device)},
        "forward": None if timed is None else {"samples": timed[0], "seconds": timed[1]},
        "measures": measures,
        "notes": [note.text for note in (*job.notes, *unread_notes(net, sites))],
    }


def _planned(job: Job, name: str) -> dict[str, Any]:
    """Return how many samples a measure takes, at a time too, and in how much memory."""
    size = min(fitting(job, name), job.counts[name])
    known, why = _footprint(job, name)
    there = held(job.net.device)
    return {
        "samples": job.counts[name],
        "batch": size,
        "bytes": None if known is None or there is None else there + known.of(size),
        "unknown": why,
    }


def _footprint(job: Job, name: str) -> tuple[Footprint | None, str | None]:
    """Return what memory a measure takes, or why that is not known."""
    try:
        known = footprint(job, name)
    except Exception as error:
        met = as_user_meets(error)
        if met is None:
            raise
        return None, met.message
    return (
        known,
        None if known else "no layer has a closed form: trying one sample would take long",
    )


def _first(job: Job) -> list[dict[str, Any]]:
    """Return place, shape, label and class of the first samples."""
    known, batch = origins(job.samples), job.samples.batch[:SHOWN]
    names = job.net.info.labels or ()
    shown = []
    for i, sample in enumerate(batch.split(1)):
        label = None if sample.y is None or sample.y[0] < 0 else int(sample.y[0])
        shown.append(
            {
                "id": sample.ids[0],
                "place": known["place"][i] if known else "",
                "text": known["text"][i] if "text" in known else "",
                "shape": list(sample.x.shape[1:]),
                "label": label,
                "class": names[label] if label is not None and label < len(names) else "",
            }
        )
    return shown
