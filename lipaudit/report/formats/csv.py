"""A result as CSV: a line for each cell of a report, or for each of several models."""

from __future__ import annotations

import csv
import io
from typing import Any

from lipaudit.report.blocks import Frame
from lipaudit.report.cells import plain
from lipaudit.report.form import Format


def render(frame: Frame) -> bytes:
    """Write the names, then the rows; what is missing is empty, control characters are shown."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_written, frame.names))
    writer.writerows([_written(value) for value in row] for row in frame.rows)
    return file.getvalue().encode()


def _written(value: Any) -> Any:
    """Write numbers to their last digit, zero without a sign, and inf and nan as pandas does.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    if isinstance(value, float):
        return value + 0.0
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


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
