"""Write results: one to stdout, any number to files, each completely or not at all."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from lipaudit.cli.options import Output
from lipaudit.cli.streams import drop_output
from lipaudit.engine.files import require_writable, write
from lipaudit.errors import EvaluationError

if TYPE_CHECKING:
    from lipaudit.report import Form, Format, Subject
    from lipaudit.tables import Report


def check_outputs(output: Output, forms: Collection[Form]) -> None:
    """Refuse what cannot be written before any work is done.

    Args:
        output: the destinations.
        forms: the forms of the result.

    Raises:
        UsageError: a format or suffix is unknown, or cannot show the result; or a file cannot be
            written.
    """
    _formats(output, forms)
    for path in output.output:
        require_writable(path)


def emit(
    result: Report | Subject, output: Output, *, always: bool = True, details: bool = True
) -> None:
    """Write the files first, then stdout, also if a file cannot be written.

    Args:
        result: the result.
        output: the destinations.
        always: whether stdout gets the result if files are named and no format is.
        details: whether a terminal gets the whole result, not only one screen.

    Raises:
        UsageError: a format or suffix is unknown, or cannot show the result.
        EvaluationError: a file cannot be written.
    """
    from lipaudit.report import of_reports
    from lipaudit.tables import Report

    subject = of_reports(result) if isinstance(result, Report) else result
    if not always:  # no measurement would be lost
        check_outputs(output, subject.forms)
    # Files first: a pipe without a reader must not prevent them.
    stdout, files = _formats(output, subject.forms)
    refused: list[EvaluationError] = []
    for path, format in files.items():
        try:
            write(path, format.render(subject.take(format.takes)))
        except EvaluationError as error:  # such as a full disk: print the figures
            refused.append(error)
    if always or output.format or not files or refused:
        shown = subject.take(stdout.takes, short=bool(stdout.screen) and not details)
        if stdout.screen:
            stdout.screen(shown, sys.stdout)
        else:
            content = stdout.render(shown)
            with drop_output(sys.stdout):
                if hasattr(sys.stdout, "buffer"):
                    sys.stdout.buffer.write(content)
                else:  # `redirect_stdout(io.StringIO())` around a command has no buffer
                    sys.stdout.write(content.decode())
        sys.stdout.flush()
    if refused:
        raise refused[0]


def _formats(output: Output, forms: Collection[Form]) -> tuple[Format, dict[Path, Format]]:
    """Return the formats of stdout and of each file."""
    from lipaudit.report import find_format

    files = {path: find_format(path, forms) for path in output.output}
    return find_format(output.format or "", forms), files
