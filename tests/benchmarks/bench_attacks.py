"""What our loop adds to the bare calls of pyautoattack: CPU time per sample passed forward.

Run by hand: python tests/benchmarks/bench_attacks.py [--repeats 5] [--samples 64]
Both attack the same samples of the demo, interleaved, one thread, medians over the repeats. Random
starts differ, and so do the survivors: hence time per forward pass of a sample, not in total.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable

import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import Tensor

from lipaudit.attacks.evaluate import evaluate
from lipaudit.attacks.plan import make_plan
from lipaudit.models.sources.loading import load_net
from lipaudit.results.trials import parse_radius
from lipaudit.train.demos import shipped

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
    f.samples, start = 0, time.process_time()
    run()
    return (time.process_time() - start) / f.samples * 1e6


def main() -> None:
    """Print a line per attack."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    f, data = Counted(), shipped("test")[: asked.samples]
    with torch.no_grad():
        right = f(data.x).argmax(1) == data.y
    x, y = data.x[right], data.y[right]
    for name, bare in BARE.items():
        plan = make_plan(
            f"custom:{name}",
            norm="linf",
            radii=[parse_radius(EPS)],
            steps=STEPS,
            queries=QUERIES,
            restarts=1,
        )
        runs = {
            "bare": lambda bare=bare: bare(f).perturb(x.clone(), y.clone()),
            "ours": lambda plan=plan: list(evaluate(f, x, y, plan)),
        }
        times = {kind: [] for kind in runs}
        for _ in range(asked.repeats + 1):
            for kind, run in runs.items():
                times[kind].append(cost(f, run))
        bare_us, ours_us = (statistics.median(times[kind][1:]) for kind in ("bare", "ours"))
        line = (
            f"{name:8s} bare {bare_us:7.1f} us, ours {ours_us:7.1f} us, {ours_us / bare_us:5.3f}"
        )
        print(line, flush=True)


if __name__ == "__main__":
    main()
