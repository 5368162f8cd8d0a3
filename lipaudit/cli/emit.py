"""Write results: one to stdout, any number to files, each whole or not at all."""

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
        output: where the result is to go.
        forms: those that the result will have.

    Raises:
        UsageError: for an unknown format or suffix, or one that cannot show the result.
        UsageError: for a file that cannot be written.
    """
    _formats(output, forms)
    for path in output.output:
        require_writable(path)


def emit(
    shown: Report | Subject, output: Output, *, always: bool = True, details: bool = True
) -> None:
    """Write the files first, then stdout, which has the figures where a file cannot be written.

    Args:
        shown: what is written.
        output: where it goes.
        always: whether stdout gets it where files are named and no format is.
        details: whether a terminal gets all of it, not only what fits a screen.

    Raises:
        UsageError: for an unknown format or suffix, or one that cannot show the result.
        EvaluationError: for a file that cannot be written.
    """
    from lipaudit.report import of_reports
    from lipaudit.tables import Report

    subject = of_reports(shown) if isinstance(shown, Report) else shown
    if not always:  # nothing was measured that would be lost
        check_outputs(output, subject.keys())
    # Files come first: a pipe that nobody reads must not keep them from being written.
    stdout, files = _formats(output, subject.keys())
    refused: list[EvaluationError] = []
    for path, format in files.items():
        try:
            write(path, format.render(subject[format.takes]()))
        except EvaluationError as error:  # a full disk, say: what is measured is shown
            refused.append(error)
    if always or output.format or not files or refused:
        _print(subject, stdout, details=details)
    if refused:
        raise refused[0]


def _formats(output: Output, forms: Collection[Form]) -> tuple[Format, dict[Path, Format]]:
    """Return the format of stdout and that of each file."""
    from lipaudit.report import find_file_format, find_format, find_usual_format

    chosen = find_format(output.format, forms) if output.format else None
    files = {path: find_file_format(path, forms, chosen) for path in output.output}
    return chosen or find_usual_format(forms), files


def _print(subject: Subject, format: Format, *, details: bool) -> None:
    if format.screen:
        short = format.takes == "page" and "screen" in subject and not details
        format.screen(subject["screen" if short else format.takes](), sys.stdout)
    else:
        content = format.render(subject[format.takes]())
        with drop_output(sys.stdout):
            if hasattr(sys.stdout, "buffer"):
                sys.stdout.buffer.write(content)
            else:  # `redirect_stdout(io.StringIO())` around a command
                sys.stdout.write(content.decode())
    sys.stdout.flush()
