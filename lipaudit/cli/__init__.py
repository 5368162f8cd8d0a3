"""The command line: parse arguments, load, measure, print or write."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that the arguments name (entry point `lipaudit`)."""
    try:
        from lipaudit.cli.commands import build, words_of_bash
        from lipaudit.cli.streams import make_printable, make_unheeded

        make_printable()
        make_unheeded()
        with words_of_bash():
            build()()
    except KeyboardInterrupt:  # before a command begins: imports take a second or two
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
