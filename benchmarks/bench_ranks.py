"""How much faster two processes of one run are than one: the time of measuring, and of all.

The cores of the machine have to be free. Commands of one process and of several take turns;
medians over the repeats. Measuring begins when the model is loaded and all processes are there.
The rest, which no number of processes shortens, is loading and writing the report.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shared.timing import spread
from lipaudit.engine import execute
from tests import processes

COMMANDS: dict[str, tuple[str, ...]] = {
    "jacobian": ("--batch-size", "4", "--per-layer"),
    "attack": ("--eps", "0.05", "--attack", "apgd-ce", "--steps", "100"),
}
SAMPLES = {"jacobian": 352, "attack": 22 * 64}
"""As many batches for each of two processes; the demo was trained on so many digits."""
TIMES = "measuring"


def timed() -> None:
    """Let rank 0 note how long its shard takes."""
    measure = execute.measure

    @functools.wraps(measure)
    def noting(*given):
        start = time.perf_counter()
        result = measure(*given)
        Path(TIMES).write_text(f"{time.perf_counter() - start}")
        return result

    execute.measure = noting


def seconds(size: int, args: Sequence[str], folder: Path) -> tuple[float, float]:
    """What measuring and the whole command take."""
    start = time.perf_counter()
    if size == 1:
        commands = [processes.begun(*args, cwd=folder, before=timed)]
    else:
        commands = processes.ranks(size, *args, cwd=folder, before=timed)
    ends = [each.ended() for each in commands]
    whole = time.perf_counter() - start
    assert all(code == 0 for code, _ in ends), ends
    return float((folder / TIMES).read_text()), whole


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the samples")


def run(asked: argparse.Namespace) -> None:
    """Print a line per measure."""
    for name, more in COMMANDS.items():
        count = int(SAMPLES[name] * asked.share)
        args = (name, "demo", "--data", "demo:train", "-n", f"{count}", "-q", "-o", "a.json")
        ratios = []
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(asked.repeats):
                one, several = (
                    seconds(size, (*args, *more), Path(folder)) for size in (1, asked.processes)
                )
                ratios.append([a / b for a, b in zip(one, several, strict=True)])
        measuring, whole = (spread(each).median for each in zip(*ratios, strict=True))
        print(
            f"{name}: {asked.processes} processes measure {measuring:.2f} times as fast as one "
            f"({one[0]:.1f} s), the whole command is {whole:.2f} times as fast"
        )
