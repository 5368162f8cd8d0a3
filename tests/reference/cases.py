"""Every model of the comparison, by library and name."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.reference.comparison import Outcome, compare
from tests.reference.limits import OutOfTime, time_limit
from tests.reference.loaded import timm_loader
from tests.reference.timm_models import TIMM

SECONDS = 60
"""What a model may take."""


@dataclass(frozen=True)
class Case:
    """A model to be compared."""

    library: str
    name: str


CASES = tuple(Case("timm", name) for name in TIMM)


def outcome_of(case: Case) -> Outcome:
    """Compare one model, in its time."""
    start = time.perf_counter()
    try:
        with time_limit(SECONDS), tempfile.TemporaryDirectory() as folder:
            return _compare(case, Path(folder))
    except OutOfTime:
        spent = round(time.perf_counter() - start, 1)
        reasons = [f"not finished in {SECONDS} s"]
        return Outcome(case.name, case.library, "unfinished", reasons, seconds=spent)


def _compare(case: Case, folder: Path) -> Outcome:
    return compare(case.name, "timm", timm_loader(TIMM[case.name]))
