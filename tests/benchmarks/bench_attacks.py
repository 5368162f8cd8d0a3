"""What our loop adds to the bare calls of pyautoattack: CPU time per sample passed forward.

Both attack the same samples of the demo, interleaved, one thread, medians over the repeats. Random
starts differ, and so do the survivors: hence time per forward pass of a sample, not in total.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import Tensor

from lipaudit.attacks.evaluate import evaluate
from lipaudit.attacks.outcome import Outcome
from lipaudit.attacks.plan import make_plan
from lipaudit.models.sources.loading import load_net
from lipaudit.results.trials import parse_radius
from lipaudit.train.demos import shipped
from tests.benchmarks.shared.rounds import Round, Subject
from tests.benchmarks.shared.timing import cpu_seconds, spread, timed

EPS, STEPS, QUERIES = "0.05", 20, 300
HOW = {"norm": "Linf", "eps": float(EPS), "device": "cpu", "seed": 0, "verbose": False}
MUTE = logging.Logger("pyautoattack", logging.CRITICAL)
Model = Callable[[Tensor], Tensor]

BARE: dict[str, Callable[[Model], object]] = {
    "apgd-ce": lambda f: APGDAttack(f, n_iter=STEPS, logger=MUTE, **HOW),
    "apgd-t": lambda f: APGDAttack_targeted(f, n_iter=STEPS, logger=MUTE, **HOW),
    "fab-t": lambda f: FABAttack_PT(f, n_iter=STEPS, targeted=True, **HOW),
    "square": lambda f: SquareAttack(f, n_queries=QUERIES, p_init=0.8, **HOW),
}


class Counted:
    """A model that counts the samples it is given."""

    def __init__(self) -> None:
        self.net, self.samples = load_net("demo"), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.samples += len(x)
        return self.net.read(self.net.call(x, None))


def cost(f: Counted, run: Callable[[], object]) -> float:
    """CPU time per sample passed forward, in microseconds."""
    f.samples = 0
    return cpu_seconds(run) / f.samples * 1e6


def problem(samples: int) -> tuple[Counted, Tensor, Tensor]:
    """The demo, and the samples that it has right."""
    f, data = Counted(), shipped("test")[:samples]
    with torch.no_grad():
        right = f(data.x).argmax(1) == data.y
    return f, data.x[right], data.y[right]


def ours(name: str, f: Counted, x: Tensor, y: Tensor) -> list[Outcome]:
    """Our run of an attack."""
    radii, counts = [parse_radius(EPS)], {"steps": STEPS, "queries": QUERIES, "restarts": 1}
    return list(evaluate(f, x, y, make_plan(f"custom:{name}", norm="linf", radii=radii, **counts)))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=64)


def subjects(asked: argparse.Namespace) -> dict[str, Subject]:
    """Ours alone, beside a commit."""
    return {f"{name}, {asked.samples} samples": partial(one_round, name, asked) for name in BARE}


def one_round(name: str, asked: argparse.Namespace) -> Round:
    """Attack the samples, and count those that are passed forward."""
    f, x, y = _warm(name, asked.samples)
    f.samples = 0
    seconds, outcomes = timed(lambda: ours(name, f, x, y))
    plain = {"CPU (s)": seconds, "samples passed forward": float(f.samples)}
    plain["CPU per sample passed (us)"] = 1e6 * seconds / f.samples
    last = {outcome.chunk: int(outcome.robust.sum()) for outcome in outcomes}
    return Round(plain=plain | {"samples that stand": float(sum(last.values()))})


@cache
def _warm(name: str, samples: int) -> tuple[Counted, Tensor, Tensor]:
    f, x, y = problem(samples)
    ours(name, f, x[:1], y[:1])
    return f, x, y


def run(asked: argparse.Namespace) -> None:
    """Print a line per attack, ours beside the bare one."""
    f, x, y = problem(asked.samples)
    for name, bare in BARE.items():
        runs = {
            "bare": lambda bare=bare: bare(f).perturb(x.clone(), y.clone()),
            "ours": lambda name=name: ours(name, f, x, y),
        }
        rounds = [{kind: cost(f, work) for kind, work in runs.items()}]
        rounds += [
            {kind: cost(f, work) for kind, work in runs.items()} for _ in range(asked.repeats)
        ]
        bare_us, ours_us = (spread(each[kind] for each in rounds[1:]).median for kind in runs)
        line = (
            f"{name:8s} bare {bare_us:7.1f} us, ours {ours_us:7.1f} us, {ours_us / bare_us:5.3f}"
        )
        print(line, flush=True)
