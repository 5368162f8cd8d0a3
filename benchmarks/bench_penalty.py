"""Cost of a training step with JaSMin, beside the same step without, one thread.

CPU time, interleaved within one process: medians, and medians of the ratios to fused and to math.
Memory: what two steps add to a process of their own (Linux).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

from benchmarks.shared.timing import in_turn, resident, spread
from lipaudit.wings.training.penalty import attention_penalty

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


def added(kind: str, tokens: int, batch: int) -> float:
    """Return what two steps add at their peak to a process that holds the model."""
    run = step(kind, tokens, batch)
    before = resident("VmRSS")
    run()
    run()
    return resident("VmHWM") - before


def elsewhere(kind: str, tokens: int, batch: int) -> float:
    """Return `added` of a process of its own."""
    command = [
        sys.executable,
        str(Path(__file__).parent),
        "penalty",
        "--one",
        kind,
        "--tokens",
        str(tokens),
    ]
    done = subprocess.run([*command, "--batch", str(batch)], capture_output=True, check=True)
    return float(done.stdout)


def measured(tokens: int, batch: int, repeats: int) -> Iterator[str]:
    """Yield a line per kind of step: seconds, ratios to fused and math, MB."""
    runs = {kind: step(kind, tokens, batch) for kind in STEPS}
    rounds = in_turn(runs, repeats)
    for kind in STEPS:
        median = spread(each[kind] for each in rounds).median
        ratios = [spread(e[kind] / e[base] for e in rounds).median for base in STEPS[:2]]
        facts = f"{median:7.2f} s {ratios[0]:5.2f} {ratios[1]:5.2f}"
        yield f"{tokens:5d} {kind:14s} {facts} {elsewhere(kind, tokens, batch):7.0f} MB"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="*", default=[197, 1025])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=STEPS, help="print the memory of this step alone")


def run(asked: argparse.Namespace) -> None:
    """Print a line per kind of step and number of tokens."""
    if asked.one:
        print(added(asked.one, asked.tokens[0], asked.batch))
        return
    for tokens in asked.tokens:
        for line in measured(tokens, asked.batch, asked.repeats):
            print(line, flush=True)
