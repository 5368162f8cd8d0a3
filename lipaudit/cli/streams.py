"""Standard streams that accept every character and survive a closed pipe."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from lipaudit.errors import visible

_SEQUENCE = re.compile(r"(\x1b\[(?:[\d;]*m|\?25[hl]|1A|2K)|\r)")
"""Escape sequences of colours and progress bars."""


def replace_streams() -> None:
    """Let stdout and stderr accept every character, also without a reader (None: closed)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        # Strict streams of an ASCII terminal would end a long run with a UnicodeEncodeError.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Unheeded(stream))


def say(text: str) -> None:
    """Write a line to stderr, with control characters of foreign text made visible.

    Args:
        text: may contain names of files, models and classes, and newlines.
    """
    print(visible(text, keep="\n\t"), file=sys.stderr, flush=True)


@contextmanager
def drop_output(stream: TextIO) -> Iterator[None]:
    """Redirect a stream whose reader is gone (`| head`) to nowhere; the work continues.

    A gate that ended together with its reader would pass in any case.
    """
    try:
        yield
    except BrokenPipeError:
        # Redirect the descriptor: Python flushes it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Unheeded:
    """A text stream that may have no reader.

    Args:
        stream: the stream, written to while it has a reader.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text with control characters made visible, or nothing.

        Terminals also get rich's colours and cursor moves.
        """
        shown = visible(text, keep="\n\t")
        if shown != text:
            from rich.console import Console

            if Console(file=self._stream).is_terminal:
                # Odd pieces are the escape sequences.
                pieces = enumerate(_SEQUENCE.split(text))
                shown = "".join(p if i % 2 else visible(p, keep="\n\t") for i, p in pieces)
        with drop_output(self._stream):
            self._stream.write(shown)
        return len(text)

    def flush(self) -> None:
        """Flush the written text."""
        with drop_output(self._stream):
            self._stream.flush()
