"""A long audit of the demo: does memory grow, does a sample take longer than those before it?

The samples are digits of the training set, moved by up to one pixel and made noisy. Of every
measure it prints the growth of the resident memory after its first fifth, by a straight line
through all readings, and the time per sample of its second half by that of its first. A measure
that is quick (attacks go 64 samples at a time) has few readings.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil

from benchmarks.shared.demos import load_shipped
from benchmarks.shared.timing import cpu_clock
from lipaudit.cli import main, progress

Reading = tuple[int, float, float]
"""Samples that are measured, seconds, MB."""


def digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits of the training set, moved and made noisy: no two are equal."""
    generator = np.random.default_rng(0)
    known = load_shipped("train")
    x, y = known.x.numpy(), known.y.numpy()
    at = generator.integers(len(x), size=count)
    moves = generator.integers(-1, 2, size=(count, 2))
    moved = np.stack([np.roll(x[i], move, axis=(1, 2)) for i, move in zip(at, moves, strict=True)])
    noise = generator.normal(scale=0.05, size=moved.shape)
    return (moved + noise).clip(0, 1).astype(np.float32), y[at]


def watched() -> dict[str, list[Reading]]:
    """Let every step of progress be a reading of clock and memory, by its measure."""
    readings: dict[str, list[Reading]] = defaultdict(list)
    own, done = psutil.Process(), defaultdict[str, int](int)
    advances = progress.OnStderr.advances

    def reading(self, measure: str, samples: int) -> None:
        done[measure] += samples
        memory = own.memory_info().rss / 2**20
        readings[measure].append((done[measure], cpu_clock(), memory))
        advances(self, measure, samples)

    progress.OnStderr.advances = reading
    return readings


def slope(readings: list[Reading]) -> float:
    """MB per 1000 samples, after the first fifth."""
    samples, _, memory = np.array(readings[len(readings) // 5 :]).T
    return 1000 * float(np.polyfit(samples, memory, 1)[0]) if len(samples) > 1 else float("nan")


def slowing(readings: list[Reading]) -> float:
    """The time per sample of the second half by that of the first."""
    first, middle, last = (readings[i] for i in (0, len(readings) // 2, -1))
    halves = [(b[1] - a[1]) / max(1, b[0] - a[0]) for a, b in ((first, middle), (middle, last))]
    return halves[1] / halves[0] if halves[0] else float("nan")


def soak(samples: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = folder
        x, y = digits(samples)
        np.savez("digits.npz", x=x, y=y)
        sys.argv = ["lipaudit", "audit", "demo", "--quick", "--data", "digits.npz"]
        sys.argv += ["-n", f"{samples}", "--run-dir", "run"]
        readings, begun = watched(), time.monotonic()
        try:
            main()
        except SystemExit as end:
            print(f"exit code {end.code} after {time.monotonic() - begun:.0f} s")
        size = Path("run/report.json").stat().st_size / 2**20
    peak = psutil.Process().memory_info().rss / 2**20
    print(f"report.json {size:.1f} MB; resident memory at the end {peak:.0f} MB")
    for measure, each in readings.items():
        (_, start, before), (count, end, after) = each[0], each[-1]
        print(
            f"{measure}: {count} samples, {1000 * (end - start) / count:.1f} ms of CPU each, "
            f"second half {slowing(each):.2f} times the first; {before:.0f} to {after:.0f} MB, "
            f"{slope(each):+.1f} MB per 1000 samples"
        )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=2000)


def run(asked: argparse.Namespace) -> None:
    soak(asked.samples)
