"""The clock of all benchmarks: CPU time of this process and its children, medians, memory."""

from __future__ import annotations

import re
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

Result = TypeVar("Result")


def short(x: float) -> str:
    """Three digits, or all before the point."""
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"


class Spread(NamedTuple):
    """The middle of some figures and their ends."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        middle, low, high = map(short, self)
        return middle if low == high else f"{middle} ({low} to {high})"


def spread(values: Iterable[float]) -> Spread:
    """Median, least and largest."""
    known = list(values)
    return Spread(statistics.median(known), min(known), max(known))


def quartiles(values: Iterable[float]) -> Spread:
    """Median and quartiles."""
    known = list(values)
    if len(known) < 2:
        return spread(known)
    low, median, high = statistics.quantiles(known, n=4, method="inclusive")
    return Spread(median, low, high)


def cpu_clock() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """CPU seconds of one call, and what it returns."""
    start = cpu_clock()
    result = work()
    return cpu_clock() - start, result


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    return timed(work)[0]


def least(work: Callable[[], object], seconds: float = 0.2) -> float:
    """CPU seconds of the quickest of three calls at least, and of 50 at most of short ones."""
    times = [cpu_seconds(work) for _ in range(3)]
    while len(times) < 50 and sum(times) < seconds:
        times.append(cpu_seconds(work))
    return min(times)


def in_turn(works: Mapping[str, Callable[[], object]], repeats: int) -> list[dict[str, float]]:
    """CPU seconds of works that take turns, round by round; what the first takes is left out."""
    rounds = [
        {name: cpu_seconds(work) for name, work in works.items()} for _ in range(repeats + 1)
    ]
    return rounds[1:]


def resident(which: str) -> float:
    """Memory of this process in MB: VmRSS now, VmHWM at its peak.

    Not ru_maxrss, which begins at the peak of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+) kB", status)[1]) / 1024
