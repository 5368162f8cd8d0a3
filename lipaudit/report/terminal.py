"""A page as text, by rich: tables, the map of heads, and a sentence for each chart."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, TextIO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

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
    list_largest,
    shade_tokens,
)
from lipaudit.report.pictures import Heatmap, choose_ink, compute_scale, describe

# The width of a file: tables are never split there.
FULL = 100_000
# Lines of prose are at most this long, however wide the terminal is.
PROSE = 100
LEVELS = " ▁▂▃▄▅▆▇█"
"""Bars behind the numbers of a map without colours; the first one means no number."""
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
    items: list[RenderableType] = [_heading(page.title, "═", console.width)]
    for chapter in page.walk():
        items.append(_heading(chapter.title, "─", console.width) if chapter.title else Text(""))
        for block in chapter.blocks:
            items += _write_block(block, console.width, colour is not None)
    with console.capture() as capture:
        for item in items:
            console.print(item, markup=False, highlight=False, emoji=False, soft_wrap=True)
    text = capture.get().strip("\n").split("\n")
    return "\n".join(line if colour else line.rstrip() for line in text).encode() + b"\n"


def write(page: Document, stream: TextIO) -> None:
    """Write a page to a stream, with the width and colours of its terminal.

    The width is COLUMNS, else the width of the process's terminal, else 80.
    """
    console = Console(file=stream, legacy_windows=False)
    colour = None if console.no_color else console.color_system
    stream.write(render(page, console.width, colour).decode())


def _heading(title: str, rule: str, width: int) -> Text:
    lines = wrap(title, min(width, PROSE))
    return Text("\n".join(["", *lines, rule * max(map(cell_len, lines))]), "bold")


def _item(mark: str, text: str, width: int) -> Text:
    lines = wrap(text, min(width, PROSE) - len(mark) - 1)
    return Text(f"{mark} " + f"\n{' ' * (len(mark) + 1)}".join(lines))


def _prose(text: str, width: int, style: str = "") -> Text:
    return Text("\n".join(wrap(text, min(width, PROSE))), style)


def wrap(text: str, width: int) -> list[str]:
    """Break prose into lines; a word that is too long is broken, not cut off."""
    return _wrap(visible(text), max(width, 10))


def _wrap(text: str, width: int) -> list[str]:
    return [line.plain.rstrip() for line in Text(text).wrap(Console(), width)] or [""]


def _write_block(block: Block, width: int, colour: bool) -> Iterator[RenderableType]:
    match block:
        case Table(folded=True):
            yield Text(f"\n{block.title}: in the json, markdown and html formats", DIM)
        case Table() | Scorecard():
            room = width if isinstance(block, Table) else min(width, PROSE)
            yield from _write_grid(lay_out(block), room)
        case Heatmap():
            yield from _write_heatmap(block, width, colour)
        case Paragraph():
            yield _prose(block.text, width, DIM)
        case Banner():
            yield _prose(block.text, width, "bold")
            yield Text("")
        case Facts():
            pad = min(max(len(name) for name, _ in block.pairs), 24)
            yield from (_item(name.ljust(pad), value, width) for name, value in block.pairs)
        case Points():
            for text, source in block.points:
                yield _item("•", text, width)
                yield from [_item(" ", source, width)] if block.commands else []
        case Gallery():
            yield from (_item("•", f"{i.title}: {'; '.join(i.lines)}", width) for i in block.items)
            yield from [_prose(block.text, width, DIM)] if block.text else []
        case Passage():
            yield from _write_passage(block, width)
        case Notes():
            yield Text("")
            yield from (_item(f"{note.level}:", note.text, width) for note in block.notes)
        case _:
            yield _prose(f"Chart, in the html format: {describe(block)}", width, DIM)


def _write_passage(block: Passage, width: int) -> Iterator[Text]:
    """Write the tokens of a text; with several texts, only the largest shares of each."""
    if block.folded:
        yield _item("•", f"{block.title}: {list_largest(block)}", width)
        return
    words = (f"{t.text} ({t.share})" if t.top else t.text for t in shade_tokens(block))
    yield _title(block.title, width)
    yield _prose(" ".join(words), width)
    yield _prose(explain_shades(block), width, DIM)


def _title(title: str, width: int) -> Text:
    return Text("\n".join(["", *wrap(title, width)]), "bold")


def _write_heatmap(block: Heatmap, width: int, colour: bool) -> Iterator[RenderableType]:
    """Write a map as a table of coloured numbers, or of numbers with bars behind them."""
    scale, grid = compute_scale(block), lay_out(block)
    rows, styles = [list(row) for row in grid.rows], {}
    for i, values in enumerate(block.values):
        for j, share in enumerate(map(scale.share, values), start=1):
            level = 0 if share is None else 1 + int(share * (len(LEVELS) - 1 - 1e-9))
            rows[i][j] += " " if colour else LEVELS[level]
            if colour and share is not None:
                paint = scale.colour(share)
                styles[i, j] = Style(
                    color=choose_ink(paint), bgcolor=f"rgb{paint}".replace(" ", "")
                )
    yield from _write_grid(replace(grid, rows=rows), width, styles)


# Tables that never cut a number or a name; wide ones are split or wrapped


GAP = 2
"""Spaces between columns."""
STRONG = "▸ "
LEAST = 8
"""Smallest width to which a repeated name column is wrapped."""


def _write_grid(
    grid: Grid, width: int, styles: Mapping[tuple[int, int], Style] = MappingProxyType({})
) -> Iterator[RenderableType]:
    """Write a table; if it is too wide, split it into pieces that repeat the keys.

    Args:
        grid: the table.
        width: width of the terminal.
        styles: styles of cells, by row and column.
    """
    if grid.heads:
        yield _title(grid.title, width) if grid.title else Text("")
    rows = [[STRONG * (i in grid.strong) + row[0], *row[1:]] for i, row in enumerate(grid.rows)]
    widths = _choose_widths(grid, rows, width)
    heads = [
        _wrap(head, w) for head, w in zip(grid.heads or [""] * len(widths), widths, strict=True)
    ]
    for number, group in enumerate(split_columns(widths, keys=grid.keys, width=width)):
        if number:
            yield Text("")
        piece = RichTable(
            box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True,
            show_header=bool(grid.heads),
        )  # fmt: skip
        height = max(len(heads[i]) for i in group)
        for i in group:
            side: Literal["left", "right"] = "right" if grid.align[i] == "r" else "left"
            head = Text("\n" * (height - len(heads[i])) + "\n".join(heads[i]))
            piece.add_column(head, width=widths[i], justify=side, overflow="fold")
        for i, row in enumerate(rows):
            texts = (Text(row[j], styles.get((i, j), "")) for j in group)
            piece.add_row(*texts, style="bold" if i in grid.strong else "")
        yield piece
    yield from (_prose(note, width, DIM) for note in grid.notes)


def _choose_widths(grid: Grid, rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the width of each column: of its longest value or the longest word of its heading."""
    heads = grid.heads or [""] * len(grid.align)
    # A heading may wrap at spaces, a value never does.
    widths = [
        max(map(cell_len, [*head.split(), *(row[i] for row in rows)]), default=0)
        for i, head in enumerate(heads)
    ]
    if sum(widths) + GAP * (len(widths) - 1) <= width:
        return widths
    if grid.align.endswith("p"):  # prose gets the remaining width
        return [*widths[:-1], width - sum(widths[:-1]) - GAP * (len(widths) - 1)]
    for i, side in enumerate(grid.align):  # text may wrap, numbers never do
        if side == "l":
            widths[i] = min(widths[i], width // (2 if i == 0 and grid.keys == 1 else 3))
    # The repeated names must leave room for the widest column beside them.
    names = [i for i in range(grid.keys) if grid.align[i] == "l"]
    room = width - max(widths[grid.keys :], default=0) - GAP * grid.keys
    room -= sum(widths[i] for i in range(grid.keys) if i not in names)
    while names and sum(widths[i] for i in names) > room:
        widest = max(names, key=lambda i: widths[i])
        if widths[widest] <= LEAST:
            break
        widths[widest] -= 1
    return widths


def split_columns(widths: Sequence[int], *, keys: int, width: int) -> list[list[int]]:
    """Group columns so that no group is wider than `width`; every group repeats the keys."""
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
