"""Standard streams that can be written to, whatever their encoding."""

from __future__ import annotations

import codecs
import itertools
import sys
import unicodedata

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
        "└": "`",
        "│": "|",
        "═": "=",
        **dict.fromkeys("─━", "-"),
        **dict.fromkeys("█▓▇▆▅▉▊▋", "#"),
        **dict.fromkeys("▒▌▍▄▀", "+"),
        **dict.fromkeys("░▃▂▁▏▎", "."),
    }
)
"""What stands for a character where a terminal has none: numbers are to be read there, too."""


def make_printable() -> None:
    """Let stdout and stderr write text that their encoding lacks in plainer characters.

    An ASCII terminal, or PYTHONIOENCODING=ascii, would raise an error at the first of them.
    """
    codecs.register_error("lipaudit.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="lipaudit.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = _raised(error.object[error.start : error.end]).translate(PLAIN)
    parts = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return parts or "?", error.end


def _raised(text: str) -> str:
    """Write a caret before superscripts: they would run into what they stand behind."""
    runs = itertools.groupby(text, lambda c: unicodedata.decomposition(c).startswith("<super>"))
    return "".join("^" * above + "".join(run) for above, run in runs)
