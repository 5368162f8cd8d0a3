"""A page, or a brief for a pull request, as GitHub-flavoured Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lipaudit.errors import visible
from lipaudit.report.blocks import (
    Banner,
    Block,
    Document,
    Facts,
    Gallery,
    Grid,
    Notes,
    Paragraph,
    Passage,
    Points,
    Scorecard,
    Table,
    explain_shades,
    lay_out,
    shade_tokens,
)
from lipaudit.report.pictures import Heatmap, describe

# GitHub reads $...$ as mathematics and # and | within tables.
SPECIAL = re.compile(r"([\\`*_\[\]|#~$])")


def render(page: Document) -> bytes:
    """Write a page."""
    lines = [f"# {escape(page.title)}", ""]
    for chapter in page.walk():
        lines += [f"## {escape(chapter.title)}", ""] if chapter.title else []
        for block in chapter.blocks:
            lines += [*_write_block(block), ""]
    return ("\n".join(lines).rstrip("\n") + "\n").encode()


def escape(text: str) -> str:
    """Escape text for Markdown and HTML."""
    return SPECIAL.sub(r"\\\1", html.escape(visible(text), quote=False))


def _write_block(block: Block) -> Iterator[str]:
    match block:
        case Table() | Heatmap() | Scorecard():
            yield from _write_table(block)
        case Paragraph():
            yield escape(block.text)
        case Banner():
            yield f"**{escape(block.text)}**"
        case Facts():
            yield from _write_grid(Grid("", (), block.pairs, "ll", ()))
        case Points():
            for text, source in block.points:
                command = f" <code>{escape(source)}</code>" if block.commands else ""
                yield f"- {escape(text)}{command}"
        case Gallery():
            yield from (f"- {escape(i.title)}: {escape('; '.join(i.lines))}" for i in block.items)
            yield from ["", escape(block.text)]
        case Passage():
            tokens = (
                f"**{escape(t.text)}**" if t.top else escape(t.text) for t in shade_tokens(block)
            )
            yield from [f"**{escape(block.title)}**", ""] if block.title else []
            yield from [" ".join(tokens), "", _small(explain_shades(block))]
        case Notes():
            yield from (f"- **{note.level}**: {escape(note.text)}" for note in block.notes)
        case _:
            yield _small(f"Chart, in the html format: {describe(block)}")


def _small(text: str) -> str:
    return f"<sub>{escape(text)}</sub>"


def _write_table(block: Table | Heatmap | Scorecard) -> Iterator[str]:
    grid = lay_out(block)
    folded, title = isinstance(block, Table) and block.folded, escape(grid.title)
    if title:
        yield from [f"<details><summary>{title}</summary>" if folded else f"**{title}**", ""]
    yield from _write_grid(grid)
    yield from ["", _small("; ".join(grid.notes))] if any(grid.notes) else []
    yield from ["", "</details>"] if folded else []


def _write_grid(grid: Grid) -> Iterator[str]:
    yield _line(grid.heads or [""] * len(grid.align))
    yield f"| {' | '.join('--:' if side == 'r' else ':--' for side in grid.align)} |"
    for index, row in enumerate(grid.rows):
        yield _line(row, "**%s**" if index in grid.strong else "%s")


def _line(texts: Sequence[str], style: str = "%s") -> str:
    return f"| {' | '.join(style % escape(text) for text in texts)} |"


MOST = 9
"""Largest number of rows, so that the brief has 15 lines."""


def render_brief(page: Document) -> bytes:
    """Write a page for a pull request: the answer, warnings, and the first rows of one table."""
    blocks = [page.scorecard, *(b for chapter in page.chapters for b in chapter.blocks)]
    first = next((b for b in blocks if isinstance(b, Table | Scorecard)), None)
    grid = lay_out(first) if first else Grid("", (), (), "", ())
    rows = grid.rows
    if len(rows) > MOST:
        more = f"and {len(rows) - MOST + 1} more"
        rows = [*rows[: MOST - 1], (more, *[""] * (len(grid.align) - 1))]
    remarks = [
        page.outcome.text if page.outcome else "",
        f"Partial: {page.partial}" if page.partial else "",
        *(f"{note.level}: {note.text}" for note in page.notes),
        dict(page.facts).get("data", ""),
        "; ".join(grid.notes) if page.scorecard else "",
    ]
    text = [f"### {escape(page.title)}", "", "<br>".join(map(escape, filter(None, remarks))), ""]
    text += _write_grid(replace(grid, rows=rows, strong=())) if rows else []
    return ("\n".join(text).rstrip("\n") + "\n").encode()
