"""Roughly how long a job takes: timed forwards, times what each measure costs in forwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from lipaudit.attacks.plan import Attack
from lipaudit.engine.prepare import Job
from lipaudit.errors import out_of_memory
from lipaudit.models.attention.sites import Site
from lipaudit.models.certificate import order_of, rows_of
from lipaudit.models.precision import eager
from lipaudit.results import Note
from lipaudit.results.trials import Radius
from lipaudit.settings import AttackOptions, CertifyOptions

SURVEY = 30.0
"""Forwards that finding out what a model is costs, once, before the first sample is read."""
READ = {"attention": 5.0, "bounds": 75.0}
"""Forwards per sample of what is computed layer by layer; docs/performance.md has measurements."""
MOST_PRODUCTS = 60.0
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
TIMED = 8
UNKNOWN = "how long that takes is not known: memory ran out for several samples at once"


@dataclass(frozen=True)
class Cost:
    """Seconds that a job takes at least and at most, and a forward of one sample by itself."""

    least: float
    most: float
    forward: float


def takes(job: Job) -> str:
    """Say how long the measures of a job take, and by what measurement."""
    known = cost(job)
    if known is None:
        return UNKNOWN
    return (
        f"roughly {_span([known])} (estimate; a forward of a sample takes {_short(known.forward)})"
    )


def together(costs: Sequence[Cost | None]) -> str:
    """Say how long several jobs take, one after the other."""
    known = [each for each in costs if each is not None]
    return UNKNOWN if len(known) < len(costs) else f"roughly {_span(known)} in all (estimate)"


def cost(job: Job) -> Cost | None:
    """Estimate the measures of a job; None where memory runs out before it can be told."""
    try:
        return _cost_of(job)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None


def _span(costs: Sequence[Cost]) -> str:
    ends = sum(each.least for each in costs), sum(each.most for each in costs)
    return " to ".join(dict.fromkeys(map(_time, ends)))


def _cost_of(job: Job) -> Cost:
    alone, batched = _forward(job, 1), _forward(job, TIMED)
    count = job.here
    reading = [cost * count[name] for name, cost in READ.items() if name in count]
    sure = alone * (sum(reading) + (SURVEY if reading else 0.0))
    if "jacobian" in count:
        sure += batched * _norm_cost(job) * count["jacobian"]
    least = most = 0.0
    if "attack" in count:
        options = cast("AttackOptions", job.request.measures["attack"])
        least, most = (batched * count["attack"] * cost for cost in attack_costs(options))
    if "certify" in count:
        ends = proof_costs(job)
        least, most = (
            each + batched * cost for each, cost in zip((least, most), ends, strict=True)
        )
    return Cost(sure + least, sure + most, alone)


def numerical(job: Job, sites: Sequence[Site]) -> tuple[Note, ...]:
    """Say how long the exact norms of layers without a closed form take, if it is long."""
    heads = sum(site.heads for site in sites if not site.closed_form and site.inputs)
    samples = job.here["bounds"]
    forward = _forward(job, 1) if heads else 0.0
    costs = [cost * heads * samples * forward for cost in PER_HEAD]
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
    """Forwards of the Jacobian norm of a sample."""
    return min(1.5 * (job.net.classes or MOST_PRODUCTS), MOST_PRODUCTS)


def proof_costs(job: Job) -> tuple[float, float]:
    """Forwards of all certificates: where one pass settles a sample, and where none does."""
    options = cast("CertifyOptions", job.request.measures["certify"])
    sample = job.samples.batch[:1].trimmed().to(job.net.device, job.net.dtype)
    rows = rows_of(job.net, sample, order_of(job.net, sample, options.order))
    passes = max(len(options.eps), 1) + options.radius * SEARCH
    rows *= job.here["certify"]
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
    """Time a forward per sample, after one that is not timed."""
    import torch

    batch = job.samples.batch[:samples].to(job.net.device, job.net.dtype)
    seconds = 0.0
    with eager(), torch.no_grad():
        for _ in range(2):
            start = time.perf_counter()
            job.net.output(batch).sum().item()  # waits for the device
            seconds = time.perf_counter() - start
    return seconds / len(batch)


def _short(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 1 else f"{seconds:.2g} s"


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 1):.0f} s"
