"""Standard streams that accept every character and survive a closed pipe."""

from __future__ import annotations

import codecs
import itertools
import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from lipaudit.errors import visible

PLAIN = str.maketrans(
    {
        "‖": "||",
        "×": "x",
        "≤": "<=",
        "≥": ">=",
        "±": "+-",
        "∘": "o",
        "•": "*",
        "–": "-",
        "⁻": "-",
        "✓": "+",
        "✗": "x",
        "▸": ">",
        "═": "=",
        **dict.fromkeys("─━", "-"),
        **dict.fromkeys("█▇▆▅", "#"),
        **dict.fromkeys("▄", "+"),
        **dict.fromkeys("▃▂▁", "."),
    }
)
"""ASCII replacements of characters that a terminal cannot show."""

_SEQUENCE = re.compile(r"(\x1b\[(?:[\d;]*m|\?25[hl]|1A|2K)|\r)")
"""Escape sequences of colours and progress bars."""


def make_unheeded() -> None:
    """Make stdout and stderr accept text without a reader (None: closed)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        setattr(sys, name, Unheeded(stream))


def make_printable() -> None:
    """Let stdout and stderr replace characters that their encoding lacks.

    An ASCII terminal, or PYTHONIOENCODING=ascii, would raise an error at the first such character.
    """
    # Strict streams would end a long run with a UnicodeEncodeError at its last line.
    codecs.register_error("lipaudit.plain", _replace_characters)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="lipaudit.plain")


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
        shown = text if text.isprintable() else visible(text, keep="\n\t")
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


def _replace_characters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    # A caret before superscripts, which would otherwise run into the text before them.
    runs = itertools.groupby(text, lambda c: unicodedata.decomposition(c).startswith("<super>"))
    text = "".join("^" * above + "".join(run) for above, run in runs).translate(PLAIN)
    parts = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return parts or "?", error.end
