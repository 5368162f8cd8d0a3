"""A page, or the little that a pull request shows, as GitHub-flavoured Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from lipaudit.report import cells
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
    list_scores,
    shade_tokens,
)
from lipaudit.report.pictures import Heatmap, describe

SPECIAL = re.compile(r"([\\`*_\[\]|#~$])")


def render(page: Document) -> bytes:
    """Write a page."""
    lines = [f"# {escape(page.title)}", ""]
    for chapter in page.walk():
        if chapter.name == "next-steps":  # commands are on the scorecard already
            continue
        lines += [f"## {escape(chapter.title)}", ""] if chapter.title else []
        for block in chapter.blocks:
            lines += [*_write_block(block), ""]
    return ("\n".join(lines).rstrip("\n") + "\n").encode()


def escape(text: str) -> str:
    """Write text that Markdown and HTML take literally."""
    return SPECIAL.sub(r"\\\1", html.escape(cells.show_controls(text), quote=False))


def _write_block(block: Block) -> Iterator[str]:
    match block:
        case Table() | Heatmap():
            yield from _write_table(block)
        case Scorecard():
            rows, notes = list_scores(block)
            yield from write_grid(["", "", ""], [_write_score(*row) for row in rows], "lrl")
            yield from ["", _small("; ".join(notes))] if notes else []
        case Paragraph():
            yield escape(block.text)
        case Banner():
            yield f"**{escape(block.text)}**"
        case Facts():
            pairs = [[escape(name), escape(value)] for name, value in block.pairs]
            yield from write_grid(["", ""], pairs, "ll")
        case Points():
            yield from (f"- {escape(text)}" for text, _ in block.points)
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


def _write_score(name: str, figure: str, text: str, command: str) -> list[str]:
    typed = f"<code>{escape(command)}</code>" if command else ""
    return [
        escape(name),
        f"**{escape(figure)}**",
        "<br>".join(filter(None, (escape(text), typed))),
    ]


def _write_table(block: Table | Heatmap) -> Iterator[str]:
    shown = lay_out(block)
    rows = [
        [f"**{escape(text)}**" if index in shown.strong else escape(text) for text in row]
        for index, row in enumerate(shown.rows)
    ]
    folded, title = isinstance(block, Table) and block.folded, escape(shown.title)
    if title:
        yield from [f"<details><summary>{title}</summary>" if folded else f"**{title}**", ""]
    yield from write_grid([*map(escape, shown.heads)], rows, shown.align)
    yield from ["", _small("; ".join(shown.notes))] if shown.notes else []
    yield from ["", "</details>"] if folded else []


def write_grid(heads: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> Iterator[str]:
    """Write a table of texts; `align` has l or r for each column."""
    yield _line(heads)
    yield _line([{"l": ":--", "r": "--:"}[side] for side in align])
    yield from (_line(row) for row in rows)


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


MOST = 9
"""Rows of the table: with them it is 15 lines."""


def render_brief(page: Document) -> bytes:
    """Write a page for a pull request: the answer, warnings, and the first rows of one table."""
    notes: Sequence[str] = ()
    rows: list[tuple[str, ...]] = []
    if page.scorecard:
        lines, notes = list_scores(page.scorecard)
        heads, align = ["", "", ""], "lrl"
        rows += [line[:3] for line in lines]
    else:
        blocks = (block for chapter in page.chapters for block in chapter.blocks)
        shown = next(
            (lay_out(b) for b in blocks if isinstance(b, Table)), Grid("", (), (), "", ())
        )
        heads, align = [*shown.heads], shown.align
        rows += map(tuple, shown.rows)
    if len(rows) > MOST:
        more = f"and {len(rows) - MOST + 1} more"
        rows = [*rows[: MOST - 1], (more, *[""] * (len(heads) - 1))]
    remarks = [
        page.outcome.text if page.outcome else "",
        f"Partial: {page.partial}" if page.partial else "",
        *(f"{note.level}: {note.text}" for note in page.notes),
        dict(page.facts).get("data", ""),
        "; ".join(notes),
    ]
    text = [f"### {escape(page.title)}", "", "<br>".join(map(escape, filter(None, remarks))), ""]
    text += (
        write_grid([*map(escape, heads)], [[*map(escape, row)] for row in rows], align)
        if rows
        else []
    )
    return ("\n".join(text).rstrip("\n") + "\n").encode()
