"""Results and messages: to stdout, to files, and to stderr, whoever reads them."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lipaudit.engine.files import require_writable, write
from lipaudit.errors import EvaluationError, visible
from lipaudit.tables import Report

if TYPE_CHECKING:
    from lipaudit.cli.app import Output, Terminal
    from lipaudit.report import Form, Format, Subject

# Escape sequences of colours and progress bars: a terminal gets these, and no others.
_SEQUENCE = re.compile(r"(\x1b\[(?:[\d;]*m|\?25[hl]|1A|2K)|\r)")


def say(text: str) -> None:
    """Write a line to stderr, with control characters of foreign text made visible.

    Args:
        text: may contain names of files, models and classes, and newlines.
    """
    print(visible(text, keep="\n\t"), file=sys.stderr, flush=True)


@contextmanager
def drop_output(stream: TextIO) -> Iterator[None]:
    """Drop the output of a stream whose reader is gone, as after `| head`.

    The command continues: a gate that ended here would not return its exit code, and a build
    would pass. A full disk ends the command.
    """
    try:
        yield
    except OSError as error:
        # Python flushes the stream again at exit, which must not fail: redirect it to null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


@dataclass(eq=False)
class GuardedStream:
    """A text stream for stdout and stderr, which neither its text nor its reader can break.

    Control characters in the text become visible, and the text is dropped once the reader is gone.
    """

    stream: TextIO

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text with control characters made visible; without a reader, drop the text.

        A name in a model or data set must not be able to control the terminal. On a terminal,
        rich's own escape sequences for colours and progress bars stay as they are.

        Returns:
            The number of characters in `text`, as streams do.
        """
        safe = visible(text, keep="\n\t")
        if safe != text:  # the text contains control characters: keep rich's on a terminal
            from rich.console import Console

            if Console(file=self.stream).is_terminal:
                # `split` by a pattern with a group alternates: text, escape sequence, text, ...
                pieces = _SEQUENCE.split(text)
                pieces[::2] = [visible(piece, keep="\n\t") for piece in pieces[::2]]
                safe = "".join(pieces)
        with drop_output(self.stream):
            self.stream.write(safe)
        return len(text)

    def flush(self) -> None:
        """Flush the written text."""
        with drop_output(self.stream):
            self.stream.flush()


def check_outputs(
    output: Output, forms: Collection[Form], *, writable: bool = True
) -> tuple[Format, dict[Path, Format]]:
    """Return the formats of stdout and of each file; refuse files that cannot be written.

    Called before any work is done. A format takes a result in one of its forms: html takes a
    "page", and json the "record". A result without this form cannot be written in the format.

    Args:
        output: the destinations.
        forms: the forms that the result has.
        writable: whether to refuse files that cannot be written.

    Raises:
        UsageError: a format or suffix is unknown, or cannot show the result; or a file cannot be
            written.
    """
    from lipaudit.report import find_format

    files = {path: find_format(path, forms) for path in output.output}
    stdout = find_format(output.format or "", forms)
    if writable:
        for path in output.output:
            require_writable(path)
    return stdout, files


def emit(
    result: Report | Subject,
    output: Output,
    *,
    print_always: bool = True,
    details: bool = True,
    terminal: Terminal | None = None,
) -> None:
    """Write a result to the files of --output, then print it to stdout.

    If a file cannot be written, the result is printed nevertheless, and then the error is raised.

    Args:
        result: the result.
        output: the destinations.
        print_always: whether stdout gets the result in any case, as for a measurement or a
            verdict. False: only without a file, with --format, or if a file cannot be written.
        details: whether a terminal gets the whole result, not only one screen.
        terminal: gets the name of each written file; None: files are not named.

    Raises:
        UsageError: a format or suffix is unknown, or cannot show the result.
        EvaluationError: a file cannot be written.
    """
    from lipaudit.report import of_reports

    subject = of_reports(result) if isinstance(result, Report) else result
    # With `print_always` the result took time: a file that cannot be written must not prevent the
    # print below. All other results are refused here if a file cannot be written.
    stdout, files = check_outputs(output, subject.forms, writable=not print_always)
    if files or output.format:
        gc.enable()  # `main` disabled it, and pages have pictures, whose garbage is large
    failures = []
    # Files first: a pipe without a reader must not prevent them.
    for path, format in files.items():
        try:
            write(path, format.render(subject.take(format.takes)))
            if terminal:
                terminal.tell(f"wrote {path}")
        except EvaluationError as error:  # such as a full disk: print the figures
            failures.append(error)
    if print_always or output.format or not files or failures:
        _print(subject, stdout, details=details)
    if failures:
        raise failures[0]


def _print(subject: Subject, format: Format, *, details: bool) -> None:
    """Write a result to stdout.

    Args:
        subject: the result.
        format: the format.
        details: whether to print the whole result; else formats for a terminal get one screen.
    """
    # Formats for a terminal have a function `screen`, all others a function `render`.
    content = subject.take(format.takes, short=bool(format.screen) and not details)
    if format.screen:  # it writes with the width and colours of the terminal
        format.screen(content, sys.stdout)
    else:
        document = format.render(content)
        with drop_output(sys.stdout):
            if hasattr(sys.stdout, "buffer"):
                sys.stdout.buffer.write(document)
            else:  # `redirect_stdout(io.StringIO())` around a command has no buffer
                sys.stdout.write(document.decode())
    sys.stdout.flush()


def emit_facts(record: Any, output: Output, lines: Sequence[str] = ()) -> None:
    """Write facts that are no report, such as the models that exist: as text or as JSON.

    Args:
        record: the facts, for JSON.
        output: the destinations.
        lines: the facts as lines of text, for people; empty: only JSON is offered.
    """
    from lipaudit.report import FACTS, Subject

    # What formats can take of facts: ("lines", "record"), for text and for JSON. Without --format,
    # the first is printed.
    forms = FACTS
    if not lines:
        forms = FACTS[1:]
    emit(Subject(forms, record, lines=lines), output)
