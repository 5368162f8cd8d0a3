"""A page as GitHub-flavoured Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from lipaudit.errors import visible
from lipaudit.report import blocks
from lipaudit.report.blocks import Card, Gallery, Heatmap, Paragraph, Passage, Points, Table
from lipaudit.report.html import NAME as HTML

NAME = "markdown"
# GitHub reads $...$ as mathematics and # and | within tables.
SPECIAL = re.compile(r"([\\`*_\[\]|#~$])")


def render(page: blocks.Document) -> bytes:
    """Write a page."""
    lines = [f"# {escape(page.title)}", ""]
    for chapter in page.chapters:
        lines += [f"## {escape(chapter.title)}", ""] if chapter.title else []
        for block in chapter.blocks:
            lines += [*_write_block(block), ""]
    return ("\n".join(lines).rstrip("\n") + "\n").encode()


def escape(text: str) -> str:
    """Escape text for Markdown and HTML."""
    return SPECIAL.sub(r"\\\1", html.escape(visible(text), quote=False))


def _write_block(block: blocks.Block) -> Iterator[str]:
    match block:
        case Table() | Card() | Heatmap(square=False):
            yield from _write_table(block)
        case Paragraph():
            yield f"**{escape(block.text)}**" if block.tone else escape(block.text)
        case Points():
            for mark, text, command in block.points:
                start = f"**{mark}**: " if mark else ""
                end = f" <code>{escape(command)}</code>" if command else ""
                yield f"- {start}{escape(text)}{end}"
        case Gallery():
            yield from (f"- {escape(i.title)}: {escape('; '.join(i.lines))}" for i in block.items)
            yield from ["", escape(block.text)]
        case Passage():
            shown = blocks.shade_tokens(block)
            tokens = (f"**{escape(t.text)}**" if t.top else escape(t.text) for t in shown)
            yield from [f"**{escape(block.title)}**", "", " ".join(tokens), ""]
            yield _small(blocks.explain_shades(block))
        case _:
            yield _small(f"Chart, in the {HTML} format: {blocks.describe(block)}")


def _small(text: str) -> str:
    return f"<sub>{escape(text)}</sub>"


def _write_table(block: Table | Heatmap | Card) -> Iterator[str]:
    grid = blocks.lay_out(block)
    folded, title = isinstance(block, Table) and block.folded, escape(grid.title)
    if title:
        yield from [f"<details><summary>{title}</summary>" if folded else f"**{title}**", ""]
    yield _line(grid.heads or [""] * len(grid.align))
    yield f"| {' | '.join('--:' if side == 'r' else ':--' for side in grid.align)} |"
    for index, row in enumerate(grid.rows):
        yield _line(row, "**%s**" if index in grid.strong else "%s")
    yield from ["", _small("; ".join(grid.notes))] if any(grid.notes) else []
    yield from ["", "</details>"] if folded else []


def _line(texts: Sequence[str], style: str = "%s") -> str:
    return f"| {' | '.join(style % escape(text) for text in texts)} |"
