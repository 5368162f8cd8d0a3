"""A page as its outline: the titles of its chapters."""

from __future__ import annotations

from lipaudit.errors import visible
from lipaudit.report import blocks


def render(page: blocks.Document) -> bytes:
    """Write the title of the page, then a line for each chapter."""
    titles = [page.title, *(f"- {c.title}" for c in page.chapters if c.title)]
    return ("\n".join(map(visible, titles)) + "\n").encode()
