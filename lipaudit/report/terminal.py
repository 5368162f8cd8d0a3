"""A page as text, by rich: tables, the map of heads, and a sentence for each chart."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, TextIO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from lipaudit.errors import visible
from lipaudit.report import blocks, records
from lipaudit.report.blocks import (
    Block,
    Card,
    Chapter,
    Curve,
    Document,
    Forest,
    Gallery,
    Grid,
    Heatmap,
    Paragraph,
    Passage,
    Points,
    Table,
    compute_scale,
    explain_shades,
    lay_out,
    shade_tokens,
)
from lipaudit.report.markup import HTML, MARKDOWN

# The width of a file: tables are never split there.
FULL = 100_000
# Lines of prose are at most this long, however wide the terminal is.
PROSE = 100
LEVELS = " ▁▂▃▄▅▆▇█"
"""Bars behind the numbers of a map; the first one means no number."""
DIM = "dim"


def render(page: Document, width: int | None = None, colour: str | None = None) -> bytes:
    """Write a page as text.

    Args:
        page: the page.
        width: columns of the terminal; None never splits tables.
        colour: rich's colour system ("standard", "256", "truecolor"); None: no escapes.
    """
    console = Console(
        file=io.StringIO(),
        width=width or FULL,
        # Any height: without one, rich asks the terminal of the process.
        height=100,
        color_system=colour,  # type: ignore[arg-type]
        force_terminal=colour is not None,
        no_color=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        # The items are wrapped already: rich must neither wrap the texts nor read markup.
        for item in _write_page(page, console.width):
            console.print(item, markup=False, highlight=False, emoji=False, soft_wrap=True)
    lines = capture.get().strip("\n").split("\n")
    if colour is None:
        lines = [line.rstrip() for line in lines]
    return "\n".join([*lines, ""]).encode()


def _write_page(page: Document, width: int) -> Iterator[RenderableType]:
    """Yield the texts of a page, for a terminal of this width: titles, then blocks."""
    yield _heading(page.title, rule="═", width=width)
    for chapter in page.chapters:
        if chapter.title:
            yield _heading(chapter.title, rule="─", width=width)
        # A blank line in place of a title, but not between the title of the page and a table: a
        # table prints a blank line itself.
        elif chapter is not page.chapters[0] or not _begins_with_table(chapter):
            yield Text("")
        for block in chapter.blocks:
            if not isinstance(block, Forest):  # the table below it has the same figures
                yield from _write_block(block, width)


def write(page: Document, stream: TextIO) -> None:
    """Write a page to a stream, with the width and colours of its terminal.

    The width is COLUMNS, else the width of the process's terminal, else 80.
    """
    console = Console(file=stream, legacy_windows=False)
    colour = None if console.no_color else console.color_system
    stream.write(render(page, width=console.width, colour=colour).decode())


def _begins_with_table(chapter: Chapter) -> bool:
    """Say whether the first block of a chapter is a table: a table prints a blank line first."""
    return bool(chapter.blocks) and isinstance(chapter.blocks[0], Table)


def _heading(title: str, rule: str, width: int) -> Text:
    """Return a blank line, a title and a line below it, drawn with the character `rule`."""
    lines = wrap(title, min(width, PROSE))
    longest = max(map(cell_len, lines))
    text = "\n".join(lines)
    return Text(f"\n{text}\n{rule * longest}", "bold")


def _prose(text: str, width: int, style: str = "", mark: str = "") -> Text:
    """Return wrapped text. A mark stands before the first line; later lines are indented."""
    lines = wrap(text, min(width, PROSE) - len(mark))
    indent = " " * len(mark)
    body = f"\n{indent}".join(lines)
    return Text(mark + body, style)


def wrap(text: str, width: int) -> list[str]:
    """Break prose into lines; a word that is too long is broken, not cut off."""
    lines = Text(visible(text)).wrap(Console(), max(width, 1))
    return [line.plain.rstrip() for line in lines] or [""]


def _write_block(block: Block, width: int) -> Iterator[RenderableType]:
    """Yield the texts of a block, for a terminal of this width."""
    match block:
        # Tables and lists come first: pictures (the last case) are only described.
        case Table(folded=True):
            formats = f"{records.JSON}, {MARKDOWN} and {HTML}"
            yield Text(f"\n{block.title}: in the {formats} formats", DIM)
        case Card():
            yield from _write_grid(lay_out(block), min(width, PROSE))
        case Table() | Curve(table=Table()):
            cut = isinstance(block, Table) and block.cut
            yield from _write_grid(lay_out(block), width, cut=cut)
        case Heatmap(is_attention=False):  # of layers and heads
            yield from _write_grid(_add_bars(block), width)
        case Paragraph(tone=""):
            yield _prose(block.text, width, style=DIM)
        case Paragraph():  # with a tone: the answer of the page, or what is missing
            yield _prose(block.text, width, style="bold")
            yield Text("")
        case Points():
            yield from _write_points(block, width)
        case Gallery():
            for item in block.items:
                yield _prose(f"{item.title}: {'; '.join(item.lines)}", width, mark="• ")
            yield _prose(block.text, width, style=DIM)
        case Passage():
            yield from _write_passage(block, width)
        case _:
            yield _prose(
                f"Chart, in the {HTML} format: {blocks.describe(block)}", width, style=DIM
            )


def _write_passage(block: Passage, width: int) -> Iterator[Text]:
    """Yield the tokens of a text; tokens with the largest shares are followed by their share."""
    shares = explain_shades(block)
    if block.folded:  # one of several texts: only the largest shares, in a line
        yield _prose(f"{block.title}: {shares}", width, mark="• ")
        return
    words = []
    for token in shade_tokens(block):
        share = f" ({token.share})" if token.top else ""
        words.append(token.text + share)
    yield _title(block.title, width)
    yield _prose(" ".join(words), width)
    yield _prose(shares, width, style=DIM)


def _write_points(block: Points, width: int) -> Iterator[Text]:
    """Yield the sentences of a list, each with its mark in front and its command on a line below.

    The mark is the level of a note (`warning`), or a dot.
    """
    yield Text("")
    for mark, text, command in block.points:
        yield _prose(text, width, mark=f"{mark}: " if mark else "• ")
        if command:
            yield _prose(command, width, mark="  ")


def _add_bars(block: Heatmap) -> Grid:
    """Return a map as a table of texts, with a bar of up to 8 levels behind each number.

    The bars show what colours show on a page: where the number is on the scale of the map.
    """
    grid = lay_out(block)
    scale = compute_scale(block)
    rows = []
    for names_and_numbers, values in zip(grid.rows, block.values, strict=True):
        row = list(names_and_numbers)
        for j, value in enumerate(values, start=1):  # cell 0 is the name of the row
            share = scale.share(value)
            if share is None:
                row[j] += LEVELS[0]  # no bar: the value is missing or beyond the scale
            else:
                row[j] += LEVELS[1 + min(int(share * 8), 7)]
        rows.append(row)
    return replace(grid, rows=rows)


def _title(title: str, width: int) -> Text:
    """Return a blank line and the title of a table."""
    lines = "\n".join(wrap(title, width))
    return Text(f"\n{lines}", "bold")


# Tables that never cut a number or a name; wide ones are split or wrapped


GAP = 2
"""Spaces between columns."""
STRONG = "▸ "
LEAST = 8
"""Smallest width to which a repeated name column is wrapped."""


def _write_grid(grid: Grid, width: int, *, cut: bool = False) -> Iterator[RenderableType]:
    """Write a table; if it is too wide, split it into pieces that repeat the names of the rows.

    Args:
        grid: the table.
        width: columns of the terminal.
        cut: whether to write only the first piece, and to name all columns that are left out.
    """
    if grid.heads:
        # Without a title, a blank line separates the table from the text above.
        yield _title(grid.title, width) if grid.title else Text("")
    rows = [list(row) for row in grid.rows]
    for i in grid.strong:  # emphasised rows begin with a mark
        rows[i][0] = STRONG + rows[i][0]
    widths = _choose_widths(grid, rows, width)
    # The indices of the columns of each piece.
    first, *others = split_columns(widths, keys=grid.keys, width=width)
    yield _write_piece(grid, rows, widths, first)
    left_out = []
    for group in others:
        if cut:
            left_out += [grid.heads[i] for i in group[grid.keys :]]
        else:
            yield Text("")
            yield _write_piece(grid, rows, widths, group)
    if left_out:
        yield _prose(f"More columns with --details: {', '.join(left_out)}.", width, style=DIM)
    for note in grid.notes:
        yield _prose(note, width, style=DIM)


def _write_piece(
    grid: Grid, rows: Sequence[Sequence[str]], widths: Sequence[int], group: Sequence[int]
) -> RichTable:
    """Return some columns of a table for the terminal.

    Args:
        grid: the table.
        rows: the rows of texts; rows to emphasise already begin with a mark.
        widths: the width of every column.
        group: the indices of the columns to write.
    """
    piece = RichTable(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True,
        show_header=bool(grid.heads),
    )  # fmt: skip
    names = grid.heads or [""] * len(widths)
    heads = {i: wrap(names[i], widths[i]) for i in group}
    height = max(map(len, heads.values()))
    for i, lines in heads.items():
        # Blank lines above short headings: all headings end at the same line.
        above = "\n" * (height - len(lines))
        side: Literal["left", "right"] = "right" if grid.align[i] == "r" else "left"
        head = Text(above + "\n".join(lines))
        piece.add_column(head, width=widths[i], justify=side, overflow="fold")
    for i, row in enumerate(rows):
        style = "bold" if i in grid.strong else ""
        piece.add_row(*[Text(row[j]) for j in group], style=style)
    return piece


def _choose_widths(grid: Grid, rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the width of each column, so that the table fits the terminal if possible.

    A column is as wide as its longest value or the longest word of its heading. If the columns do
    not fit, prose gets the remaining width, and names and texts are narrowed.

    Args:
        grid: the table. Its first `keys` columns name the row. `align` has one letter for each
            column: l for text, r for numbers, p for prose, which is the last column.
        rows: the texts of each row.
        width: columns of the terminal.
    """
    widths = _measure_columns(grid, rows)
    gaps = GAP * (len(widths) - 1)
    if sum(widths) + gaps <= width:  # everything fits
        return widths
    if grid.align.endswith("p"):  # prose gets the remaining width
        *others, _ = widths
        return [*others, width - sum(others) - gaps]
    for i, side in enumerate(grid.align):  # text may wrap, numbers never do
        if side == "l":
            # The only name of a row gets at most two thirds of the width, other texts a third.
            thirds = 2 if i == 0 and grid.keys == 1 else 1
            widths[i] = min(widths[i], thirds * width // 3)
    _narrow_names(grid, widths, width)
    return widths


def _narrow_names(grid: Grid, widths: list[int], width: int) -> None:
    """Narrow the columns of names in `widths`, so that every other column fits beside them.

    A table that is too wide is split into pieces, and each piece repeats the names of the rows.

    Args:
        grid: the table. Its first `keys` columns name the row: by texts, which may wrap, or by
            numbers, which may not.
        widths: the width of each column; those of the names change.
        width: columns of the terminal.
    """
    texts = [i for i in range(grid.keys) if grid.align[i] == "l"]
    # What the widest other column, the gaps and the numbers among the names leave for the texts.
    room = width - max(widths[grid.keys :], default=0) - GAP * grid.keys
    room -= sum(widths[i] for i in range(grid.keys) if i not in texts)
    if sum(widths[i] for i in texts) > room:
        for i in texts:
            widths[i] = min(widths[i], max(LEAST, room // len(texts)))


def _measure_columns(grid: Grid, rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of the longest value of each column, or of the longest word of its heading.

    A heading may wrap at spaces, a value never does.
    """
    widths = []
    for i in range(len(grid.align)):
        texts = [row[i] for row in rows]
        if grid.heads:
            texts += grid.heads[i].split()
        widths.append(max(map(cell_len, texts), default=0))
    return widths


def split_columns(widths: Sequence[int], *, keys: int, width: int) -> list[list[int]]:
    """Return the indices of columns in groups that are at most `width` wide.

    Every group repeats the first `keys` columns, which name the rows. A single column that is too
    wide is a group of its own.
    """
    lead = sum(widths[:keys]) + GAP * keys
    groups: list[list[int]] = [[]]
    used = lead
    for index in range(keys, len(widths)):
        if groups[-1] and used + widths[index] > width:
            groups.append([])
            used = lead
        groups[-1].append(index)
        used += widths[index] + GAP
    return [[*range(keys), *group] for group in groups]
