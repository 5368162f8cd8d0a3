"""A page for a terminal or a pipe, or as plain text of full width for a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from lipaudit.report.form import Format

if TYPE_CHECKING:
    from lipaudit.report.blocks import Document


def render(page: Document, width: int | None = None, colour: str | None = None) -> bytes:
    """Write a page as text.

    Args:
        page: what is written.
        width: columns of the terminal; None writes tables as wide as they are.
        colour: rich's colour system ("standard", "256", "truecolor"); None writes no escapes.
    """
    from lipaudit.report.draw.terminal import drawn

    return drawn(page, width, colour)


def screen(page: Document, stream: TextIO) -> None:
    """Write a page to a stream, as wide as it is; on a terminal in its colours."""
    from lipaudit.report.draw.terminal import look

    width, colour = look(stream)
    stream.write(render(page, width, colour).decode())


FORMAT = Format("table", takes="page", render=render, suffixes=(".txt",), screen=screen)
