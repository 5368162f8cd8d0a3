"""A page, or the little that a pull request shows, as GitHub-flavoured Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from lipaudit.report import cells, portraits
from lipaudit.report.blocks import (
    Block,
    Brief,
    Document,
    Gallery,
    Notes,
    Paragraph,
    Passage,
    Scorecard,
    Table,
    lay_out,
    list_scores,
)
from lipaudit.report.pictures import Heatmap, describe

SPECIAL = re.compile(r"([\\`*_\[\]|#~$])")


def render(page: Document, level: int = 1) -> bytes:
    """Write a page.

    Args:
        page: what is written.
        level: of its title among headings; those of its sections are one below.
    """
    title, section = "#" * level, "#" * (level + 1)
    lines = [f"{title} {escape(page.title)}", "", *_first(page)]
    if page.facts:
        facts = [[name, escape(value)] for name, value in page.facts]
        lines += [*grid(["", ""], facts, "ll"), ""]
    if page.notes:
        lines += [*_block(Notes(page.notes)), ""]
    if page.scorecard:
        lines += [f"{section} Scorecard", "", *_card(page.scorecard), ""]
    if page.findings:
        lines += [f"{section} What stands out", ""]
        lines += [
            f"- {escape(text)} <sub>{escape(source)}</sub>" for text, source in page.findings
        ]
        lines += [""]
    for chapter in page.chapters:
        lines += [f"{section} {escape(chapter.title)}", ""]
        for block in chapter.blocks:
            lines += [*_block(block), ""]
    return ("\n".join(lines).rstrip("\n") + "\n").encode()


def _first(page: Document) -> Iterator[str]:
    """Write the outcome, and that the report is partial."""
    if page.outcome:
        yield from (f"**{escape(page.outcome.text)}**", "")
    if page.partial:
        yield from (f"**Partial: {escape(page.partial)}**", "")


def escape(text: str) -> str:
    """Write text that Markdown and HTML take literally."""
    return SPECIAL.sub(r"\\\1", html.escape(cells.show_controls(text), quote=False))


def _block(block: Block) -> Iterator[str]:
    match block:
        case Table() | Heatmap():
            yield from _table(block)
        case Paragraph() | Gallery():
            yield from _prose(block)
        case Passage():
            yield from _passage(block)
        case Notes():
            yield from (
                f"- **{n.level}**: {escape(n.text)} ({escape(n.code)})" for n in block.notes
            )
        case _:
            yield f"<sub>Chart, in the html format: {escape(describe(block))}</sub>"


def _card(block: Scorecard) -> Iterator[str]:
    rows, notes = list_scores(block)
    yield from grid(["", "", ""], [_write_score(*row) for row in rows], "lrl")
    yield from ["", f"<sub>{'; '.join(map(escape, notes))}</sub>"] if notes else []


def _write_score(name: str, figure: str, text: str, command: str) -> list[str]:
    typed = f"<code>{escape(command)}</code>" if command else ""
    return [
        escape(name),
        f"**{escape(figure)}**",
        "<br>".join(filter(None, (escape(text), typed))),
    ]


def _prose(block: Paragraph | Gallery) -> Iterator[str]:
    if isinstance(block, Gallery):
        for item in block.items:
            yield f"- {escape(item.title)}: {escape('; '.join(item.lines))}"
        yield ""
    yield escape(block.text)


def _passage(block: Passage) -> Iterator[str]:
    tokens = portraits.shade_tokens(block)
    yield f"**{escape(block.title)}**" if block.title else ""
    yield ""
    yield " ".join(f"**{escape(t.text)}**" if t.top else escape(t.text) for t in tokens)
    yield ""
    yield f"<sub>{escape(portraits.explain_shades(block))}</sub>"


def _table(block: Table | Heatmap) -> Iterator[str]:
    shown = lay_out(block)
    rows = [
        [f"**{escape(text)}**" if index in shown.strong else escape(text) for text in row]
        for index, row in enumerate(shown.rows)
    ]
    folded = isinstance(block, Table) and block.folded
    title = escape(shown.title)
    if title:
        yield f"<details><summary>{title}</summary>" if folded else f"**{title}**"
        yield ""
    yield from grid([*map(escape, shown.heads)], rows, shown.align)
    notes = "; ".join(map(escape, shown.notes))
    yield from ["", f"<sub>{notes}</sub>"] if notes else []
    yield from ["", "</details>"] if folded else []


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> Iterator[str]:
    """Write a table of texts; `align` has l or r for each column."""
    yield _line(heads)
    yield _line([{"l": ":--", "r": "--:"}[side] for side in align])
    yield from (_line(row) for row in rows)


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


MOST = 9
"""Rows of the table: with them it is 15 lines."""


def render_brief(brief: Brief) -> bytes:
    """Write the title, the remarks in one paragraph, and the first rows of the table."""
    rows = list(brief.rows)
    if len(rows) > MOST:
        more = f"and {len(rows) - MOST + 1} more"
        rows = [*rows[: MOST - 1], (more, *[""] * (len(brief.heads) - 1))]
    texts = [[escape(text) for text in row] for row in rows]
    remarks = "<br>".join(map(escape, brief.remarks))
    lines = [f"### {escape(brief.title)}", "", remarks, ""]
    lines += grid([*map(escape, brief.heads)], texts, brief.align) if texts else []
    return ("\n".join(lines).rstrip("\n") + "\n").encode()
