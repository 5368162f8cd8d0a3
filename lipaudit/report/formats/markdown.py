"""A page as GitHub-flavoured Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from lipaudit.report import cells
from lipaudit.report.blocks import (
    Block,
    Curve,
    Density,
    Document,
    Forest,
    Gallery,
    Heatmap,
    Histogram,
    Intervals,
    Notes,
    Paragraph,
    Passage,
    Scatter,
    Scorecard,
    Shares,
    Table,
)
from lipaudit.report.draw import forest, glyphs, intervals, passages
from lipaudit.report.draw.alt import extent
from lipaudit.report.draw.grids import lay_out
from lipaudit.report.draw.layout import scored
from lipaudit.report.form import Format

SPECIAL = re.compile(r"([\\`*_\[\]|#~$])")
BARS = 40
PLOT = 60


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
    """Write what is to be known before all else."""
    if page.outcome:
        yield from (f"**{escape(page.outcome.text)}**", "")
    if page.partial:
        yield from (f"**Partial: {escape(page.partial)}**", "")


def escape(text: str) -> str:
    """Write text that Markdown and HTML take literally."""
    return SPECIAL.sub(r"\\\1", html.escape(cells.plain(text), quote=False))


def _block(block: Block) -> Iterator[str]:
    match block:
        case Table() | Heatmap():
            yield from _table(block)
        case Histogram() | Shares() | Scatter() | Curve() | Density() | Intervals() | Forest():
            yield from _drawn(block.title, *_plotted(block))
        case Paragraph() | Gallery():
            yield from _prose(block)
        case Passage():
            yield from _passage(block)
        case Notes():
            yield from (
                f"- **{n.level}**: {escape(n.text)} ({escape(n.code)})" for n in block.notes
            )


def _plotted(
    block: Histogram | Shares | Scatter | Curve | Density | Intervals | Forest,
) -> tuple[list[str], str]:
    """Return a picture out of characters, and its legend."""
    match block:
        case Histogram() | Shares():
            return glyphs.bars(block, BARS), cells.standing(block.x)
        case Forest():
            return list(forest.lines(block, BARS)), cells.standing(block.x)
        case Scatter() | Curve():
            return glyphs.plot(block, PLOT), glyphs.legend(block)
        case Density():
            return glyphs.map_plot(block, PLOT), extent(block)
        case Intervals():
            return list(intervals.lines(block, PLOT)), intervals.legend(block)


def _card(block: Scorecard) -> Iterator[str]:
    rows, notes = scored(block)
    yield from grid(["", "", ""], [_scored(*row) for row in rows], "lrl")
    yield from ["", f"<sub>{'; '.join(map(escape, notes))}</sub>"] if notes else []


def _scored(name: str, figure: str, text: str, command: str) -> list[str]:
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
    tokens = passages.drawn_tokens(block)
    yield f"**{escape(block.title)}**" if block.title else ""
    yield ""
    yield " ".join(f"**{escape(t.text)}**" if t.top else escape(t.text) for t in tokens)
    yield ""
    yield f"<sub>{escape(passages.legend(block))}</sub>"


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


def _drawn(title: str, drawing: Sequence[str], legend: str) -> Iterator[str]:
    """Set a drawing as an indented block: no text in it can end that."""
    yield f"**{escape(title)}**"
    yield ""
    yield from (f"    {cells.plain(line)}".rstrip() for line in drawing)
    yield from ["", f"<sub>{escape(legend)}</sub>"] if legend else []


FORMAT = Format("markdown", takes="page", render=render, suffixes=(".md", ".markdown"))
