"""The application with all commands: importing a module registers its commands."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import typer

from lipaudit.cli import audit, judge, measure, tools, train, watch  # noqa: F401
from lipaudit.cli.app import app

BREAKS = (":", "=")
"""Characters at which bash splits words before it completes the last piece."""


def build() -> typer.Typer:
    """Return the application with every command registered."""
    return app


@contextmanager
def words_of_bash() -> Iterator[None]:
    """Pass whole words to a completion of bash: `demo:ro`, not `demo`, `:` and `ro`."""
    if os.environ.get("_LIPAUDIT_COMPLETE") != "complete_bash":
        yield
        return
    words: list[str] = []
    for piece in os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]:
        if words and (piece in BREAKS or words[-1].endswith(BREAKS)):
            words[-1] += piece
        else:
            words.append(piece)
    os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    # Bash replaces only the part after the last colon, so the answer has only that part.
    whole = words[-1].rpartition("=")[2]
    prefix = whole[: whole.rfind(":") + 1]
    written = io.StringIO()
    try:
        with redirect_stdout(written):
            yield
    finally:
        lines = written.getvalue().splitlines()
        sys.stdout.write("\n".join(line.removeprefix(prefix) for line in lines))
