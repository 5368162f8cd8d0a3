"""Preview of an audit: model, data, attention layers and memory, without measuring."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from lipaudit.data.batch import Share
from lipaudit.data.labels import LabelError
from lipaudit.engine.prepare import LEFT_OUT, Job, Request, load_options, prepare
from lipaudit.engine.provenance import list_origins
from lipaudit.errors import LipauditError, find_user_error, out_of_memory
from lipaudit.measures import CertifyOptions, Measure, MeasureOptions, load_measures
from lipaudit.measures.by_layer import choose_layers, note_unread
from lipaudit.models.attention.sites import Site
from lipaudit.models.attention.survey import NoHeadsError, find_layers
from lipaudit.models.memory import Footprint, Held, find_free_memory, read_used_memory
from lipaudit.models.precision import eager, exact_arithmetic, seed_device
from lipaudit.models.sources.loading import load_net
from lipaudit.models.sources.own import UnknownInputError

SHOWN = 5
"""Number of samples shown."""
TIMED = 8
"""Batch size of the timed forward pass."""


def preview(request: Request) -> dict[str, Any]:
    """Describe model and data, the needs of each measure, and the measures that cannot run.

    Args:
        request: the request of the audit.

    Raises:
        LipauditError: the model or the data cannot be read, or the model does not run.
    """
    try:
        net = load_net(request.model, load_options(request.run))
    except UnknownInputError as error:
        lacks = dict.fromkeys((*request.measures, "certify"), _write_sentence(error))
        return {"model": request.model, "measures": {}, "needs": lacks, "notes": []}
    needs: dict[str, str] = {}
    try:
        job = prepare(request, net=net)
    except LabelError as error:
        needs = {n: _write_sentence(error) for n, how in request.measures.items() if how.labelled}
        kept = {n: how for n, how in request.measures.items() if n not in needs}
        job = prepare(replace(request, measures=kept), net=net)
    for note in job.notes:
        if note.code == LEFT_OUT:
            name, _, reason = note.text.partition(" was left out: ")
            needs[name] = reason
    net = job.net
    sites: tuple[Site, ...] = ()
    first = job.samples.batch[:1].trim().to(net.device, net.dtype)
    with eager(), exact_arithmetic(net.device):
        try:
            # A model that scores reads several texts per sample: no layer is read.
            sites = () if net.scored else find_layers(net, first)
        except NoHeadsError as error:
            headed = [n for n, how in job.request.measures.items() if how.reads_heads]
            needs |= dict.fromkeys(headed, _write_sentence(error))
        timed = time_batch(job)
        measures = {name: _plan_measure(job, name) for name in job.counts if name not in needs}
        try:  # an audit has certificates on request
            options = CertifyOptions.checked({"eps": "1/255"}).adapt(net.kind)
            load_measures()["certify"].check(net, first, options)
        except LipauditError as error:
            needs["certify"] = _write_sentence(error)
    unread: Counter[str] = Counter()
    for site in sites:
        unread[site.reason or ""] += site.heads
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
        "heads": sum(site.heads for site in sites),
        "closed_form": unread.pop("", 0),
        "numerical": dict(unread),
        "data": job.samples.spec,
        "samples": len(job.samples.batch),
        "first": _describe_first(job),
        "memory": {"held": read_used_memory(net.device), "free": find_free_memory(net.device)},
        "forward": None if timed is None else {"samples": timed[0], "seconds": timed[1]},
        "measures": measures,
        "needs": needs,
        "notes": [
            note.text for note in (*job.notes, *note_unread(net, sites)) if note.code != LEFT_OUT
        ],
    }


def _write_sentence(error: LipauditError) -> str:
    end = "" if error.message.endswith("?") else "."
    return f"{error.message}{end} {error.advice[:1].upper()}{error.advice[1:]}".strip()


def _plan_measure(job: Job, name: str) -> dict[str, Any]:
    """Return the samples of a measure, in total and at a time, and its memory."""
    size, needed = min(job.size(name), job.counts[name]), None
    why: str | None = "no layer has a closed form: trying one sample would take long"
    try:
        if (known := footprint(job, name)) is not None:
            held = read_used_memory(job.net.device)
            needed, why = None if held is None else held + known.of(size), None
    except Exception as error:
        if (fault := find_user_error(error)) is None:
            raise
        why = fault.message
    return {"samples": job.counts[name], "batch": size, "bytes": needed, "unknown": why}


def _describe_first(job: Job) -> list[dict[str, Any]]:
    """Return place, shape, label and class of the first samples."""
    known, batch = list_origins(job.samples), job.samples.batch[:SHOWN]
    names = job.net.labels or ()
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


def time_batch(job: Job) -> tuple[int, float] | None:
    """Time one forward pass of a batch, after a pass that is not timed.

    Returns:
        The number of samples of the batch and its seconds; None if memory runs out.
    """
    batch = job.samples.batch[:TIMED].to(job.net.device, job.net.dtype)
    try:
        with eager(), torch.no_grad():
            # The first pass compiles kernels and fills caches.
            job.net.output(batch).sum().item()
            start = time.perf_counter()
            job.net.output(batch).sum().item()  # wait for the device
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None
    return len(batch), time.perf_counter() - start


def footprint(job: Job, name: str) -> Footprint | None:
    """Estimate the memory of a measure from one and from two samples, in a shortened run.

    Args:
        job: the job.
        name: name of the measure.

    Returns:
        The memory; None if a trial would take longer than seconds.
    """
    # Options with which the measure needs its full memory in little time.
    options, net = job.request.measures[name], job.net
    sites: tuple[Site, ...] = ()
    if options.reads_heads:
        sites = find_layers(net, job.first(name).to(net.device, net.dtype))
    chosen = choose_layers(sites, options.layers if sites else None)
    shorter = options.shorten({site.index: site.closed_form for site in chosen})
    if shorter is None:
        return None
    one, two = (_find_peak(job, load_measures()[name], shorter, samples) for samples in (1, 2))
    # The second sample adds the memory of one sample; the rest is fixed.
    sample = max(two - one, 0)
    return Footprint(max(one - sample, 0), sample)


def _find_peak(job: Job, measure: Measure, options: MeasureOptions, samples: int) -> int:
    """Return the peak memory of a measure on copies of the longest sample."""
    batch, net = job.samples.batch, job.net
    # The longest text determines the memory of a batch.
    longest = 0 if batch.mask is None else int(batch.mask.sum(1).argmax())
    copies = batch.rows(torch.full((samples,), longest)).trim()
    copies = replace(copies, ids=tuple(f"{i}-{k}" for k, i in enumerate(copies.ids)))
    with seed_device(0, net.device), Held(net.module) as taken:
        copies = copies.to(net.device, net.dtype)
        if measure.by_gradient:
            with torch.enable_grad():
                z = net.point(copies).requires_grad_()
                torch.autograd.grad(net.forward(z, copies).sum(), z)
        else:
            for _ in measure.parts(net, Share(copies, [copies]), options):
                pass
    return taken.most
