"""What an accelerator takes: seconds, forwards, memory and the share of its peak, piece by piece.

    python -m benchmarks gpu results.jsonl --seconds 500      # go on where it ended
    python -m benchmarks gpu results.jsonl --table

A ViT-B/16 at 224 with random weights in float32, on 100 random images: heads, layers, bounds,
statistics, the norm of the whole model at 1,000 classes beside power iteration with recomputation,
and AutoAttack at a radius at which samples stand, on --attacked of them. Times are wall seconds
with the device's work done. The share is that of the measured rate of a product of two large
matrices in float32, from operations that are counted on few samples. On CUDA the tests marked
`gpu` come first. --device simulated tries all of it where there is no card.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.bench_heads import PARTS, READING, STATISTICS, SURVEY, profiled
from benchmarks.shared.flops import Flops
from benchmarks.shared.models import batch_of, loaded
from benchmarks.shared.timing import resident, spread
from lipaudit.measures import load_measures
from lipaudit.measures.attack_options import AttackOptions
from lipaudit.measures.attention import AttentionOptions
from lipaudit.measures.bounds import BoundsOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.models.precision import exact_arithmetic

OPTIONS = {"bounds": BoundsOptions, "attention": AttentionOptions, "jacobian": JacobianOptions}
FORWARD, NORM = "a plain forward", "whole-model norm"
POWER, ATTACK = "power iteration with recomputation", "AutoAttack, of samples that stand"
COUNTED = {
    "bounds": (SURVEY, *PARTS),
    "attention": (STATISTICS,),
    "jacobian": (NORM,),
    "attack": (ATTACK,),
}
RADIUS = "1e-6"
Line = dict[str, Any]


class Place:
    """A device, its clock and its memory."""

    def __init__(self, name: str) -> None:
        if name.startswith("simulated"):
            from tests.simulated import device

            device.start()
        self.name, self.kind = name, torch.device(name).type

    def clock(self) -> float:
        """Wall seconds, when the device has done all that was asked of it."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def forget_peak(self) -> None:
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()

    @property
    def peak(self) -> float:
        """MB, of the process where there is no CUDA."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return resident("VmHWM")

    def seconds(self, work: Callable[[], object]) -> float:
        start = self.clock()
        work()
        return self.clock() - start

    @property
    def title(self) -> str:
        return torch.cuda.get_device_name() if self.kind == "cuda" else self.name


class Trial:
    """The model and its samples on a device."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.place, self.asked = Place(asked.device), asked
        self.net = loaded(asked.model, device=asked.device)
        batch = batch_of(self.net, asked.samples)
        with torch.no_grad():
            self.batches = [self._labelled(each) for each in batch.split(asked.batch_size)]

    def _labelled(self, batch: Any) -> Any:
        return replace(batch, y=self.net.forward(self.net.point(batch), batch).argmax(1))

    def forward(self, batch: Any) -> float:
        """Seconds of a plain forward."""
        with torch.no_grad():
            self.net.output(batch)
            return spread(
                self.place.seconds(lambda: self.net.output(batch)) for _ in range(5)
            ).median

    def measure(self, name: str, batch: Any) -> dict[str, float]:
        """Seconds of what a measure tells."""
        if name in ("bounds", "attention"):
            _, spent, _ = profiled(name, self.net, batch, self.place.clock)
            parts = [part for part in COUNTED[name] if part in spent]
            return {part: spent[part] + (part != SURVEY) * spent[READING] for part in parts}
        work = partial(self.run, name, batch)
        return {COUNTED[name][0]: self.place.seconds(work)}

    def run(self, name: str, batch: Any) -> None:
        """Run a measure."""
        asked = AttackOptions(attack="autoattack", eps=RADIUS) if name == "attack" else None
        list(load_measures()[name].compute(self.net, [batch], asked or OPTIONS[name]()))

    def flops(self, name: str) -> Line:
        """Operations of a sample by precision, and those of float64 by file, counted on a few."""
        batch = self.batches[0][:2]
        with Flops() as counter:
            if name == FORWARD:
                with torch.no_grad():
                    self.net.output(batch)
            else:
                self.run(name, batch)
        kinds = {"flops": counter.counts, "double": counter.double}
        return {k: {n: c // len(batch) for n, c in each.items()} for k, each in kinds.items()}

    def power(self, batch: Any, tol: float = 1e-6) -> None:
        """The norm by power iteration, every product from scratch, one sample at a time."""
        for one in batch.split(1):
            z, sigma, before = self.net.point(one), 1.0, 0.0
            v, call = torch.randn_like(z), partial(self.net.forward, batch=one)
            while abs(sigma - before) > tol * sigma:
                before = sigma
                with sdpa_kernel(SDPBackend.MATH):
                    _, u = torch.autograd.functional.jvp(call, z, v / v.norm())
                sigma = float(u.norm())
                _, v = torch.autograd.functional.vjp(call, z, u)


def pieces(asked: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Line]]]:
    """Every piece by its name, none of them above a few minutes on a card of today."""
    trial = cache(lambda: Trial(asked))
    if asked.device.startswith("cuda"):
        yield "tests", tests
    for kind in (torch.float32, torch.float64):
        yield f"rate of {kind}", partial(rate, asked, kind)
    for name in (FORWARD, "bounds", "attention", "jacobian"):
        yield f"operations of {name}", lambda name=name: trial().flops(name)
    for i in range(-(-asked.samples // asked.batch_size)):
        for name in ("bounds", "attention", "jacobian"):
            yield f"{name} {i}", lambda name=name, i=i: costs(trial(), name, i)
    yield "power 0", lambda: power_of(trial())
    for i in range(asked.attacked):
        yield f"attack {i}", lambda i=i: attacked(trial(), i)


def costs(trial: Trial, name: str, i: int) -> Line:
    """Measure a batch."""
    batch = trial.batches[i]
    forward = trial.forward(batch)
    trial.place.forget_peak()
    start = trial.place.clock()
    seconds = {FORWARD: forward} | trial.measure(name, batch)
    facts = {"whole": trial.place.clock() - start, "memory": trial.place.peak}
    return facts | {"seconds": seconds, "samples": len(batch)}


def power_of(trial: Trial) -> Line:
    """Power iteration on two samples."""
    batch = trial.batches[0][:2]
    seconds = {POWER: trial.place.seconds(lambda: trial.power(batch))}
    return {"seconds": seconds | {FORWARD: trial.forward(batch)}, "samples": len(batch)}


def attacked(trial: Trial, i: int) -> Line:
    """Attack one sample, whose forwards are those of a batch of copies."""
    batch = trial.batches[0][i : i + 1]
    seconds = {FORWARD: trial.forward(batch)} | trial.measure("attack", batch)
    return {"seconds": seconds, "samples": 1, "memory": trial.place.peak}


def rate(asked: argparse.Namespace, kind: torch.dtype) -> Line:
    """Operations per second of a large product."""
    place = Place(asked.device)
    size = 8192 if place.kind == "cuda" else 1024
    a = torch.randn(size, size, dtype=kind).to(asked.device)
    with exact_arithmetic(a.device):
        seconds = min(place.seconds(lambda: a @ a) for _ in range(5))
    return {"rate": 2 * size**3 / seconds}


def tests() -> Line:
    """Run the tests that need a card."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"said": done.stdout.strip().splitlines()[-1:], "code": done.returncode}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="a file of lines, which is continued")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="vit_base")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--attacked", type=int, default=4, help="samples (0: none)")
    parser.add_argument("--seconds", type=float, default=500, help="begin no piece after that")
    parser.add_argument("--table", action="store_true", help="of what has been measured")


def run(asked: argparse.Namespace) -> None:
    """Do the pieces that are missing, or write the table."""
    asked.results.touch()
    known = [json.loads(line) for line in asked.results.read_text().splitlines()]
    if asked.table:
        print("\n".join(table(known)))
        return
    begun, done = time.monotonic(), {line["piece"] for line in known}
    for name, work in pieces(asked):
        if name not in done and time.monotonic() - begun < asked.seconds:
            line = json.dumps({"piece": name} | work())
            with asked.results.open("a") as file:
                file.write(f"{line}\n")
            print(line, flush=True)


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Write what was measured as Markdown."""
    facts = {line["piece"]: line for line in lines}
    if "tests" in facts:
        yield f"Tests: {' '.join(facts['tests']['said'])}\n"
    rates = {k: line["rate"] for k, line in facts.items() if "rate" in line}
    yield "; ".join(f"{name}: {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items()) + "\n"
    yield "| | s per sample | forwards | peak (MB) |\n|---|--:|--:|--:|"
    timed = [line for line in lines if "seconds" in line]
    for name in dict.fromkeys(name for line in timed for name in line["seconds"]):
        own = [line for line in timed if name in line["seconds"]]
        each = spread(line["seconds"][name] / line["samples"] for line in own)
        ratio = spread(line["seconds"][name] / line["seconds"][FORWARD] for line in own)
        peak = max(line.get("memory", 0) for line in own)
        yield f"| {name} | {each} | {ratio} | {f'{peak:,.0f}' if peak else ''} |"
    yield "\n| operations of a sample | float32 (G) | float64 (G) | share of the float32 rate |"
    yield "|---|--:|--:|--:|"
    for piece, line in facts.items():
        if "flops" in line:
            yield shared(piece.removeprefix("operations of "), line["flops"], timed, rates)
    yield "\n| float64 of `bounds` by file | G |\n|---|--:|"
    double = facts.get("operations of bounds", {}).get("double", {})
    for name, count in sorted(double.items(), key=lambda item: -item[1]):
        yield f"| `{name}` | {count / 1e9:,.2f} |"


def shared(
    name: str, flops: dict[str, int], timed: Sequence[Line], rates: dict[str, float]
) -> str:
    """A row: the time that the operations would take at the float32 rate, by that they took."""
    single, double = (flops.get(kind, 0) for kind in ("float32", "float64"))
    own = [line for line in timed if line["piece"].startswith(name) or name == FORWARD]
    took = [whole(name, line) / line["samples"] for line in own]
    peak = rates.get("rate of torch.float32")
    share = f"{100 * (single + double) / peak / spread(took).median:.1f}%" if took and peak else ""
    return f"| {name} | {single / 1e9:,.3g} | {double / 1e9:,.3g} | {share} |"


def whole(name: str, line: Line) -> float:
    """Seconds of a measure, or of a forward: its parts each include reading the model."""
    return line["seconds"][FORWARD] if name == FORWARD else line["whole"]
