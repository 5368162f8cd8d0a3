"""Write results: one to stdout, any number to files, each whole or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lipaudit.cli.options import Output
from lipaudit.engine.files import write
from lipaudit.errors import EvaluationError, UsageError

if TYPE_CHECKING:
    from lipaudit.results import Report

SUFFIXES = {
    ".json": "json",
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
    ".txt": "table",
    ".png": "png",
}


def check_outputs(output: Output, *, drawn: bool = False) -> None:
    """Refuse an unknown format or an unwritable file before any work is done.

    Args:
        output: where the result goes.
        drawn: whether there will be an attention map, which is what a PNG shows.

    Raises:
        UsageError: for an unknown format or file name extension, or a PNG of nothing.
        EvaluationError: for a file that cannot be written.
    """
    from lipaudit.report import RENDERERS

    formats = {output.format, *map(renderer_of, output.output)}
    if "png" in formats and not drawn:
        raise UsageError(
            "a PNG shows one attention map",
            "lipaudit attention MODEL --map LAYER.HEAD -o map.png draws one.",
        )
    if output.format is not None and output.format not in RENDERERS:
        raise UsageError(
            f"unknown format {output.format!r}", f"Choose one of: {', '.join(RENDERERS)}."
        )
    for path in output.output:
        folder = path.resolve().parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise EvaluationError(f"cannot write {path}", "Name a file in a writable folder.")


def renderer_of(path: Path) -> str:
    """Return the format that a file's extension asks for.

    Raises:
        UsageError: for an extension without a format.
    """
    try:
        return SUFFIXES[path.suffix.lower()]
    except KeyError:
        raise UsageError(
            f"cannot tell the format of {path} from its name",
            f"Use one of: {', '.join(SUFFIXES)}.",
        ) from None


def emit(report: Report, output: Output) -> None:
    """Write the files first, then stdout."""
    from lipaudit.report import RENDERERS, render_terminal

    for path in output.output:
        write(path, RENDERERS[renderer_of(path)](report))
    if output.format in (None, "table"):
        render_terminal(report, stream=sys.stdout)
    else:
        sys.stdout.buffer.write(RENDERERS[output.format](report))
    sys.stdout.flush()
