"""The command line: parse arguments, load, measure, print or write."""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    """Run the command that the arguments name (entry point `lipaudit`)."""
    # Collecting garbage takes a tenth of the time of a command that reads reports. It goes on
    # where a model is loaded (`OnStderr`) or a page is written (`emit`).
    gc.disable()
    try:
        from lipaudit.cli.app import app
        from lipaudit.cli.output import GuardedStream

        # Stdout and stderr accept every character, also without a reader (None: closed).
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name) or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
            # Strict streams of an ASCII terminal would end a long run with a UnicodeEncodeError.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, GuardedStream(stream))
        app()
    except KeyboardInterrupt:  # before the command line is read; commands say it themselves
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
