"""Cost of a training step with JaSMin, beside the same step without, one thread.

Run by hand: python tests/benchmarks/bench_penalty.py [--tokens 197 1025] [--repeats 5]
CPU time, interleaved within one process: medians, and medians of the ratios to fused and to math.
Memory: what two steps add to a process of their own (Linux).
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

from lipaudit.train.penalty import attention_penalty

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


def resident(which: str) -> float:
    """Memory of this process in MB: VmRSS now, VmHWM at its peak.

    Not ru_maxrss, which begins at the peak of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+) kB", status)[1]) / 1024


def added(kind: str, tokens: int, batch: int) -> float:
    """Return what two steps add at their peak to a process that holds the model."""
    run = step(kind, tokens, batch)
    before = resident("VmRSS")
    run()
    run()
    return resident("VmHWM") - before


def elsewhere(kind: str, tokens: int, batch: int) -> float:
    """Return `added` of a process of its own."""
    command = [sys.executable, __file__, "--one", kind, "--tokens", str(tokens)]
    done = subprocess.run([*command, "--batch", str(batch)], capture_output=True, check=True)
    return float(done.stdout)


def measured(tokens: int, batch: int, repeats: int) -> Iterator[str]:
    """Yield a line per kind of step: seconds, ratios to fused and math, MB."""
    runs = {kind: step(kind, tokens, batch) for kind in STEPS}
    rounds = [{kind: seconds(run) for kind, run in runs.items()} for _ in range(repeats + 1)][1:]
    for kind in STEPS:
        median = statistics.median(each[kind] for each in rounds)
        ratios = [statistics.median(e[kind] / e[base] for e in rounds) for base in STEPS[:2]]
        facts = f"{median:7.2f} s {ratios[0]:5.2f} {ratios[1]:5.2f}"
        yield f"{tokens:5d} {kind:14s} {facts} {elsewhere(kind, tokens, batch):7.0f} MB"


def main() -> None:
    """Print a line per kind of step and number of tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="*", default=[197, 1025])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=STEPS, help="print the memory of this step alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.one:
        print(added(asked.one, asked.tokens[0], asked.batch))
        return
    for tokens in asked.tokens:
        for line in measured(tokens, asked.batch, asked.repeats):
            print(line, flush=True)


if __name__ == "__main__":
    main()
