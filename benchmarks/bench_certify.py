"""CPU seconds of one pass of a whole ball through a network, its memory and what it proves.

digits: the demo checkpoint at order 2 (digits-1: at order 1), first test image. relu: a vision
transformer of three layers with BatchNorm and ReLU and random weights, on 3 x 32 x 32 noise, L-inf
1/255, order 1. --reference FILE takes a second program of that kind, a module with
`ball(x, eps, norm, order)` and `margins(logits, label)`, and times it in turn with ours. `left`:
the least margin that is proven, as a share of that at the centre. `shared`: the share of the time
that a pass without coefficients takes (one input, radius 0, no error symbols): the most that a
pass over many samples at once could save, as every sample has coefficients of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shared.timing import cpu_seconds, spread, timed
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.sources.loader import load_net
from lipaudit.wings.certificates.prove import ball, margins
from lipaudit.wings.certificates.prove import run as passed

DEPTH, WIDTH, HEADS, PATCH, SIDE, CLASSES = 3, 48, 3, 8, 32, 10
Case = tuple[Callable[[Any], Any], Tensor, int, float, str, int]
"""A model, an input and its label, a radius, its norm and the order of forms."""


class TokenNorm(nn.BatchNorm1d):
    """Statistics of every channel of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    """A pre-norm block with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([TokenNorm(WIDTH), TokenNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        p = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((p @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norms[1](x))))


class ReluViT(nn.Module):
    """17 tokens, or fewer of larger patches; the class token is read out."""

    def __init__(self, depth: int = DEPTH, patch: int = PATCH) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, patch, patch)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(0.1 * torch.randn(1, 1 + (SIDE // patch) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm, self.head = TokenNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, 32, 32) to logits (batch, 10)."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def digits(norm: str, eps: float, order: int = 2) -> Case:
    """The demo checkpoint on its first test image."""
    net = load_net("demo")
    batch = load_data("demo", net, DataOptions(samples=1)).batch
    module = net.module.requires_grad_(requires_grad=False)
    return lambda x: module((x - 0.5) / 0.5), batch.x, int(batch.y[0]), eps, norm, order


def relu() -> Case:
    """Random weights, with statistics of noise."""
    torch.manual_seed(0)
    model = ReluViT().train()
    with torch.no_grad():
        model(torch.rand(128, 3, SIDE, SIDE))
    model.eval().requires_grad_(requires_grad=False)
    x = torch.rand(1, 3, SIDE, SIDE)
    return model, x, int(model(x).argmax()), 1 / 255, "linf", 1


CASES: dict[str, Callable[[], Case]] = {
    "digits-linf": lambda: digits("linf", 0.004),
    "digits-1": lambda: digits("linf", 0.004, 1),
    "digits-l2": lambda: digits("l2", 0.015),
    "relu": relu,
}


def ours(case: Case) -> Any:
    """The margins of a pass in single precision."""
    model, x, label, eps, norm, order = case
    form = ball(x, eps, norm=norm, order=order, box=(0.0, 1.0), dtype=torch.float32)
    return margins(passed(model, form), label)


def bare(case: Case) -> float:
    """CPU seconds of a pass without coefficients."""
    model, x, _, _, norm, order = case
    first = torch.zeros_like(x, dtype=torch.bool)
    first.view(-1)[0] = True
    form = ball(
        x, 0.0, norm=norm, order=order, moving=first, dtype=torch.float32, slack_share=math.inf
    )
    return cpu_seconds(lambda: passed(model, form))


def theirs(reference: Any, case: Case) -> Any:
    """The margins of a pass of the reference."""
    model, x, label, eps, norm, order = case
    with torch.no_grad():
        return reference.margins(model(reference.ball(x, eps, norm, order)), label)


def one_pass(program: Callable[[Case], Any], case: Case) -> tuple[float, float]:
    """CPU seconds, and what is left of the least margin."""
    seconds, (low, high, *_) = timed(lambda: program(case).range())
    return seconds, float((2 * low / (low + high)).amin())


def load(path: str) -> Any:
    """Import a module from a file."""
    spec = importlib.util.spec_from_file_location("reference", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reference", metavar="FILE")


def run(asked: argparse.Namespace) -> None:
    """Print one line per case and program."""
    programs: dict[str, Callable[[Case], Any]] = {"ours": ours}
    if asked.reference:
        reference = load(asked.reference)
        programs["reference"] = lambda case: theirs(reference, case)
    for name in asked.cases:
        case = CASES[name]()
        model, x = case[:2]
        forward = min(timed_forward(model, x) for _ in range(20))
        rounds = [
            {which: one_pass(program, case) for which, program in programs.items()}
            for _ in range(asked.repeats)
        ]
        shared = min(bare(case) for _ in range(asked.repeats))
        for which in programs:
            seconds = spread(each[which][0] for each in rounds).median
            left = rounds[0][which][1]
            print(
                f"{name:12s} {which:10s} {seconds:6.2f} s {seconds / forward:8.0f} forwards"
                f"   left {left:.4f}   shared {shared / seconds:.0%}"
            )


def timed_forward(model: Callable[[Any], Any], x: Tensor) -> float:
    """CPU seconds of a plain forward."""
    with torch.no_grad():
        return cpu_seconds(lambda: model(x))
