"""Cost of a training step with JaSMin, beside the same step without, one thread.

Run by hand: python tests/benchmarks/bench_penalty.py [--tokens 197 1025] [--repeats 5]
Ratios of CPU time within one process, medians over interleaved repeats; memory in a process each.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import timm
import torch
import torch.nn.functional as F

from lipaudit.models.penalty import attention_penalty

STEPS = ("fused", "math", "fused, jasmin", "math, jasmin")


def step(kind: str, tokens: int, batch: int) -> Callable[[], None]:
    """Return one training step of ViT-Ti on images of so many tokens."""
    side = 16 * int((tokens - 1) ** 0.5)
    model = timm.create_model("vit_tiny_patch16_224", img_size=side).train()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = kind.startswith("fused")
    x, y = torch.rand(batch, 3, side, side), torch.arange(batch)
    watch = attention_penalty if kind.endswith("jasmin") else lambda _: nullcontext(lambda: 0.0)

    def run() -> None:
        model.zero_grad()
        with watch(model) as penalty:
            loss = F.cross_entropy(model(x), y) + 1e-2 * penalty()
        loss.backward()

    return run


def seconds(run: Callable[[], None]) -> float:
    """CPU time of one step."""
    start = time.process_time()
    run()
    return time.process_time() - start


def peak(kind: str, tokens: int, batch: int) -> float:
    """Peak memory of two steps in a process of its own, in MB."""
    command = [sys.executable, __file__, "--one", kind, "--tokens", str(tokens)]
    done = subprocess.run([*command, "--batch", str(batch)], capture_output=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Print a line per kind of step and number of tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="*", default=[197, 1025])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=STEPS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.one:
        run = step(asked.one, asked.tokens[0], asked.batch)
        run()
        run()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    for tokens in asked.tokens:
        runs = {kind: step(kind, tokens, asked.batch) for kind in STEPS}
        times = {kind: [] for kind in STEPS}
        for _ in range(asked.repeats + 1):
            for kind, run in runs.items():
                times[kind].append(seconds(run))
        base = statistics.median(times["fused"][1:])
        for kind in STEPS:
            median = statistics.median(times[kind][1:])
            memory = peak(kind, tokens, asked.batch)
            print(f"{tokens:5d} {kind:14s} {median:7.2f} s {median / base:5.2f} {memory:7.0f} MB")


if __name__ == "__main__":
    main()
