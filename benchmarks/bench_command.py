"""What a whole command takes: a process from its start to its end, CPU, wall clock and memory.

    python -m benchmarks command --against COMMIT
    python -m benchmarks command --against COMMIT -- jacobian demo --samples 16

The command is `lipaudit bounds` of a ViT-B on four random samples, or what follows --.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared.rounds import Round, Subject

COMMAND = "bounds timm:vit_base_patch16_224 --data random --samples 4 --model-kwargs"
USUAL = [*COMMAND.split(), "pretrained=false"]
EXACT = {("bounds", "exact"), ("bounds.layers", "exact"), ("bounds.layers", "exact_out")}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", default=USUAL, metavar="-- COMMAND")


def subjects(asked: argparse.Namespace) -> dict[str, Subject]:
    return {f"`lipaudit {' '.join(asked.words)}`": partial(one_round, asked.words)}


def one_round(words: Sequence[str]) -> Round:
    """Run it once, in an empty folder that is its cache, too."""
    import lipaudit

    package = Path(lipaudit.__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        own = {"PYTHONPATH": str(package), "XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "lipaudit", *words, "-q", "-o", "report.json"]
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | own, stdout=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            return Round(problems={"figures": f"the command ended with {process.returncode}"})
        report = json.loads(Path(folder, "report.json").read_text())
    plain = {"CPU (s)": used.ru_utime + used.ru_stime, "wall clock (s)": wall}
    plain["peak memory (MB)"] = used.ru_maxrss / 1024
    return Round(plain=plain, figures=dict(figures(report)))


def figures(report: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Exact norms, and `sharp` of heads, of a report."""
    for section in report["sections"]:
        name = section["measure"]
        for column, array in section.get("arrays", {}).items():
            if (name, column) in EXACT:
                yield f"exact {name}.{column}", numbers(array)
            elif (name, column) == ("bounds", "sharp"):
                yield "bound sharp of exact bounds.exact", numbers(array)
        if name == "jacobian" and "norm" in section.get("samples", {}):
            yield "exact jacobian.norm", list(map(float, section["samples"]["norm"]))


def numbers(array: dict[str, Any]) -> list[float]:
    """The entries of an array of a report, which has them to six digits."""
    return [math.nan if entry is None else float(entry) for entry in array["data"]]
