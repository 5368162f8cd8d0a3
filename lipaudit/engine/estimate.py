"""Roughly what a job takes: time in timed forwards, and memory by that of one sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from lipaudit.attacks.plan import Attack
from lipaudit.data.batch import Batch, Share
from lipaudit.engine.prepare import Job
from lipaudit.errors import out_of_memory
from lipaudit.measures import MEASURES
from lipaudit.measures.by_layer import chosen
from lipaudit.models.attention.sites import Site
from lipaudit.models.attention.survey import surveyed
from lipaudit.models.certificate import order_of, rows_of
from lipaudit.models.lifting import held, lift_all
from lipaudit.models.memory import Footprint, Held, free
from lipaudit.models.precision import eager, seeded
from lipaudit.results import Note
from lipaudit.results.trials import Radius
from lipaudit.settings import (
    AttackOptions,
    AttentionOptions,
    BoundsOptions,
    CertifyOptions,
    JacobianOptions,
)
from lipaudit.settings.jacobian import Target

SURVEY = 16.0
"""Forwards that finding out what a model is costs, once, before the first sample is read."""
READ = {"attention": 5.0, "bounds": 50.0}
"""Forwards per sample of what is computed layer by layer; docs/performance.md has measurements."""
LIFTED = 5
"""Passes for which a survey lifts weights that are held; reading lifts them once a batch."""
MOST_PRODUCTS = 50.0
"""Forwards of the Jacobian norm of a sample, when its steps do not depend on the classes."""
PER_HEAD = 10.0, 300.0
"""Forwards per sample of the norm of a head without closed form, where it settles soon and where
it takes every step it may."""
DERIVATIVES = 6.0
"""Norms that the derivatives of the norm at both ends take the time of."""
CHECKS = 20.0
"""Forwards of one sample that a norm takes before the first of its samples is measured."""
SEARCH = 6
"""Passes of the search for a certified radius."""
LONG = 60.0
"""Seconds that nobody minds."""
PASS = 3.0
"""Forwards that a forward with its backward costs."""
STEPS = 2
"""Lanczos steps that are tried: each further one takes a vector more."""
PLENTY, AMPLE = 100, 2**30
"""Forwards of a sample whose memory no measure of it takes, beside so many bytes for weights."""
SHARE = 0.8
"""Of the memory that is free, what a batch may take."""
TIMED, SLOW = 8, 1.0
"""Samples timed together, and as often, unless that takes longer: a busy machine delays some."""
UNKNOWN = "how long that takes is not known: memory ran out for several samples at once"


@dataclass(frozen=True)
class Pace:
    """Seconds of a forward per sample, alone and together, and of lifting weights in any one."""

    alone: float
    together: float
    lifting: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Seconds that a job takes at least and at most, and a forward of one sample by itself."""

    least: float
    most: float
    forward: float


def paced(job: Job) -> Pace | None:
    """Time forwards; None where memory runs out for several samples."""
    try:
        alone = _forward(job, 1)
        several = _forward(job, TIMED) if alone < SLOW else alone
        return Pace(alone, several, min(alone, _lifting(job)))
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None


def takes(job: Job, pace: Pace | None = None) -> str:
    """Say how long the measures of a job take, and by what measurement.

    Args:
        job: the job.
        pace: of its model at its samples; None: it is timed.
    """
    pace = pace or paced(job)
    if pace is None:
        return UNKNOWN
    cost = _cost_of(job, pace)
    return f"roughly {_span([cost])} (estimate; a forward of a sample takes {_short(pace.alone)})"


def together(costs: Sequence[Cost | None]) -> str:
    """Say how long several jobs take, one after the other."""
    known = [each for each in costs if each is not None]
    return UNKNOWN if len(known) < len(costs) else f"roughly {_span(known)} in all (estimate)"


def cost(job: Job) -> Cost | None:
    """Estimate the measures of a job; None where memory runs out before it can be told."""
    pace = paced(job)
    return None if pace is None else _cost_of(job, pace)


def _span(costs: Sequence[Cost]) -> str:
    ends = sum(each.least for each in costs), sum(each.most for each in costs)
    return " to ".join(dict.fromkeys(map(_time, ends)))


def _cost_of(job: Job, pace: Pace) -> Cost:
    batched, count = pace.together, job.own
    sure = 0.0
    if read := [name for name in READ if name in count]:
        batches = sum(math.ceil(count[name] / job.size(name)) for name in read)
        forwards = SURVEY + sum(READ[name] * count[name] for name in read)
        sure = (pace.alone - pace.lifting) * forwards + pace.lifting * (LIFTED + batches)
    if "jacobian" in count:
        sure += batched * _norm_cost(job) * count["jacobian"]
    least = most = 0.0
    if "attack" in count:
        options = cast("AttackOptions", job.request.measures["attack"])
        least, most = (batched * count["attack"] * cost for cost in attack_costs(options))
    if "certify" in count:
        least, most = (
            each + batched * cost
            for each, cost in zip((least, most), proof_costs(job), strict=True)
        )
    return Cost(sure + least, sure + most, pace.alone)


def numerical(job: Job, sites: Sequence[Site]) -> tuple[Note, ...]:
    """Say how long the exact norms of layers without a closed form take, if it is long."""
    heads = sum(site.heads for site in sites if not site.closed_form and site.inputs)
    samples, own = job.here["bounds"], job.own["bounds"]
    forward = _forward(job, 1) if heads else 0.0
    costs = [cost * heads * own * forward for cost in PER_HEAD]
    if costs[-1] < LONG:
        return ()
    shown = " to ".join(dict.fromkeys(map(_time, costs)))
    text = (
        f"{heads} heads have no closed form: their exact norms take roughly {shown} on "
        f"{samples} samples (estimate); --layers and --samples choose fewer"
    )
    return (Note(level="info", code="long", text=text),)


def proofs(job: Job) -> tuple[Note, ...]:
    """Say how long certificates take, if it is long."""
    forward = _forward(job, TIMED)
    costs = [forward * cost for cost in proof_costs(job)]
    if costs[-1] < LONG:
        return ()
    shown = " to ".join(dict.fromkeys(map(_time, costs)))
    text = (
        f"certificates of {job.here['certify']} samples take roughly {shown} (estimate), more "
        "where branch and bound is long; --samples, --seconds and --order 1 make it less"
    )
    return (Note(level="info", code="long", text=text),)


def swaps(job: Job, layers: int, same: int) -> Note:
    """Say what it takes to swap so many layers one by one, and how many more are the same."""
    samples, norms = job.counts["jacobian"], 2 * layers + 2
    measured = samples * (_norm_cost(job) + PASS)
    alone, together = _forward(job, 1), _forward(job, min(samples, TIMED))
    forwards = (norms + DERIVATIVES) * (CHECKS + measured)
    seconds = (norms + DERIVATIVES) * (CHECKS * alone + measured * together)
    less = "; --groups block or fewer --samples make it less" if seconds >= LONG else ""
    text = (
        f"{layers} of {layers + same} layers differ: {norms} norms of {samples} samples, roughly "
        f"{float(f'{forwards:.2g}'):,.0f} forwards or {_time(seconds)} (estimate){less}"
    )
    return Note(level="info", code="swaps", text=text)


def _norm_cost(job: Job) -> float:
    """Forwards of the Jacobian norm of a sample: of every position of its text, where asked."""
    options = cast("JacobianOptions", job.request.measures["jacobian"])
    what, where = Target.parse(options.target or "logits")
    classes = job.net.classes if what in ("logits", "probabilities") else None
    one = PASS if what == "loss" else min(1.5 * (classes or MOST_PRODUCTS), MOST_PRODUCTS)
    batch = job.samples.batch[: job.counts["jacobian"]]
    tokens = batch.x.numel() if batch.mask is None else int(batch.mask.sum())
    return one * tokens / len(batch) if where == "all" else one


def proof_costs(job: Job) -> tuple[float, float]:
    """Forwards of all certificates: where one pass settles a sample, and where none does."""
    options = cast("CertifyOptions", job.request.measures["certify"])
    sample = job.samples.batch[:1].trimmed().to(job.net.device, job.net.dtype)
    rows = rows_of(job.net, sample, order_of(job.net, sample, options.order))
    passes = max(len(options.eps), 1) + options.radius * SEARCH
    rows *= job.own["certify"]
    return rows, rows * passes


def attack_costs(options: AttackOptions) -> tuple[float, float]:
    """Forwards per sample: where the first attack of a trial breaks it, and where none does."""
    costs = [
        [_cost(attack, trial.radius) for attack in trial.attacks] for trial in options.trials()
    ]
    return sum(each[0] for each in costs), sum(map(sum, costs))


def _cost(attack: Attack, radius: Radius) -> float:
    plain, gradients = attack.passes(radius)
    return plain + PASS * gradients


def _forward(job: Job, samples: int) -> float:
    """Time a forward per sample: the quickest of a few, after one that is not timed."""
    batch = job.samples.batch[:samples].to(job.net.device, job.net.dtype)
    seconds: list[float] = []
    with eager(), torch.no_grad():
        while sum(seconds) < SLOW and len(seconds) < TIMED:
            start = time.perf_counter()
            job.net.output(batch).sum().item()  # waits for the device
            seconds.append(time.perf_counter() - start)
    return min(seconds[1:] or seconds) / len(batch)


def _lifting(job: Job) -> float:
    """Time lifting the weights once, after a forward; 0 where none are held."""
    if not held(job.net.module):
        return 0.0
    start = time.perf_counter()
    lift_all(job.net.module)
    return time.perf_counter() - start


def _short(seconds: float) -> str:
    value, unit = (1e3 * seconds, "ms") if seconds < 1 else (seconds, "s")
    return f"{float(f'{value:.2g}'):g} {unit}"


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 1):.0f} s"


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


def fitting(job: Job, name: str) -> int:
    """Return how many samples a measure takes at a time: as many as fit, at most its usual size.

    On a GPU that shows when memory runs out; a CPU's process would be killed.
    """
    size = job.size(name)
    room = free(job.net.device)
    if job.request.run.batch_size or job.net.device.type != "cpu" or room is None:
        return size
    room = int(SHARE * room / job.processes)
    try:
        if AMPLE + PLENTY * size * _most(job, torch.no_grad()(job.net.output), 1) < room:
            return size
        known = footprint(job, name)
    except Exception as error:
        if out_of_memory(error):
            raise
        return size  # the measure will say what it is
    return size if known is None else min(size, known.fits(room))


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
    copies = batch.rows(torch.full((samples,), longest)).trimmed()
    copies = replace(copies, ids=tuple(f"{i}-{k}" for k, i in enumerate(copies.ids)))
    with seeded(0, net.device), Held(net.module) as taken:
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
        sites = chosen(surveyed(net, job.first(name).to(net.device, net.dtype)), options.layers)
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
