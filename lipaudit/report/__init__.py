"""Reports as bytes: a renderer per format.

A report becomes blocks (`views`), blocks become a page (`document`), and each renderer draws the
blocks of a page; only `json` writes the report itself, and `png` draws its attention map.
"""

from __future__ import annotations

from collections.abc import Callable

from lipaudit.report.formats import html, json, markdown, png, table
from lipaudit.report.formats.table import render_terminal as render_terminal

RENDERERS: dict[str, Callable[..., bytes]] = {
    "table": table.render,
    "json": json.render,
    "markdown": markdown.render,
    "html": html.render,
    "png": png.render,
}
"""Renderer of each format: one report, or several side by side, in; the bytes of a file out."""
