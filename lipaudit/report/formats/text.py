"""A judgement line by line: for a terminal, and for the log of a job."""

from __future__ import annotations

from collections.abc import Sequence

from lipaudit.report.cells import plain
from lipaudit.report.form import Format


def render(lines: Sequence[str]) -> bytes:
    """Write lines of plain text; control characters are shown, not obeyed."""
    return ("\n".join(map(plain, lines)) + "\n").encode()


FORMAT = Format(
    "text",
    takes="lines",
    render=render,
    suffixes=(".txt",),
    refusal=("lines of text are of a judgement", "A report is written with -f table."),
)
