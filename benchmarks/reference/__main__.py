"""Measure every family of timm and every type of transformers, and write docs/coverage.md.

Run by hand, from the root: python -m benchmarks.reference [timm] [transformers] [--write]
Outcomes are kept in a file of JSON lines, so that the run can be stopped and taken up again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.reference.cases import Case, cases, outcome_of
from benchmarks.reference.page import page

KEPT = Path(tempfile.gettempdir()) / "lipaudit-reference.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the outcomes that are known already."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["library"], row["name"]): row for row in rows}


def run(chosen: list[Case], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the outcome of every case; measure those that are not in the file yet."""
    known = read(path)
    for case in chosen:
        row = known.get((case.library, case.name))
        if row is None:
            row = outcome_of(case).plain()
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        yield row


def main() -> None:
    """Print a line per model, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries", nargs="*", default=["timm", "transformers"])
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--kept", type=Path, default=KEPT)
    parser.add_argument("--write", action="store_true", help="write docs/coverage.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    chosen = [case for case in cases() if case.library in options.libraries]
    chosen = [case for case in chosen if not options.only or case.name in options.only]
    for row in run(chosen, options.kept):
        facts = f"{row['closed']}/{row['layers']} {row['checked']} {row['worst']:.0e}"
        print(f"{row['name']:32s} {row['outcome']:10s} {facts} {row['seconds']} s", flush=True)
        shown = sorted(row["reasons"], key=lambda reason: not reason.startswith("crash"))[:5]
        if row["outcome"] in ("wrong", "crash", "unfinished") or options.only:
            print(*(f"    {reason[:300]}" for reason in shown), sep="\n", flush=True)
            print(*(f"    unchecked {reason[:200]}" for reason in row["unchecked"]), sep="\n")
    if options.write:
        rows = list(read(options.kept).values())
        PAGE.write_text(page(rows, versions()), "utf-8")


def versions() -> str:
    """Say what the outcomes were had with."""
    names = ("torch", "timm", "transformers")
    return ", ".join(f"{name} {metadata.version(name).partition('+')[0]}" for name in names) + "."


if __name__ == "__main__":
    main()
