"""Every model of the comparison, by library and name."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reference.comparison import Outcome, compare
from benchmarks.reference.limits import OutOfTime, time_limit
from benchmarks.reference.loaded import timm_loader, transformers_loader
from benchmarks.reference.timm_models import TIMM
from benchmarks.reference.transformers_models import small_config, types

SECONDS = 40
"""Of the processor that a model may take."""


@dataclass(frozen=True)
class Case:
    """A model to be compared."""

    library: str
    name: str


def cases() -> tuple[Case, ...]:
    """Return every family of timm and every type of transformers."""
    named = {"timm": tuple(TIMM), "transformers": types()}
    return tuple(Case(library, name) for library, names in named.items() for name in names)


def outcome_of(case: Case) -> Outcome:
    """Compare one model, in its time."""
    start = time.process_time()
    try:
        with time_limit(SECONDS), tempfile.TemporaryDirectory() as folder:
            return _compare(case, Path(folder))
    except OutOfTime:
        spent = round(time.process_time() - start, 1)
        reasons = [f"not finished in {SECONDS} s"]
        return Outcome(case.name, case.library, "unfinished", reasons, seconds=spent)


def _compare(case: Case, folder: Path) -> Outcome:
    if case.library == "timm":
        return compare(case.name, case.library, timm_loader(TIMM[case.name]))
    try:
        config = small_config(case.name)
    except Exception as error:  # transformers' own: there is no small model by our rules
        return Outcome(case.name, case.library, "unbuilt", [str(error)])
    return compare(case.name, case.library, transformers_loader(config, folder))
