"""A result as CSV: a line for each cell of a report, or for each of several models."""

from __future__ import annotations

import csv
import io
from typing import Any

from lipaudit.report.blocks import Frame
from lipaudit.report.cells import plain
from lipaudit.report.form import Format


def render(frame: Frame) -> bytes:
    """Write the names, then the rows; what is not there is empty, and control characters go."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(frame.names)
    writer.writerows([_written(value) for value in row] for row in frame.rows)
    return file.getvalue().encode()


def _written(value: Any) -> Any:
    """Write numbers to their last digit, zero without a sign, and inf and nan as pandas does."""
    if isinstance(value, float):
        return value + 0.0
    return plain(value) if isinstance(value, str) else value


FORMAT = Format(
    "csv",
    takes="frame",
    render=render,
    suffixes=(".csv",),
    refusal=(
        "CSV is of reports",
        "lipaudit report A.json -f csv writes one cell a line, of several reports one model.",
    ),
)
