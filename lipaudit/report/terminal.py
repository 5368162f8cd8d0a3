"""A page as text: tables, the map of heads, and a sentence for each chart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TextIO

from rich.cells import cell_len, chop_cells

from lipaudit.errors import visible
from lipaudit.report import blocks
from lipaudit.report.blocks import Card, Gallery, Grid, Heatmap, Paragraph, Passage, Points, Table

# The width of a file: tables are never split there.
FULL = 100_000
# Lines of prose are at most this long, however wide the terminal is.
PROSE = 100
LEVELS = " ▁▂▃▄▅▆▇█"
"""Bars behind the numbers of a map; the first one means no number."""
Line = tuple[str, str]
"""A line and its style: escape codes before it."""
BOLD, DIM, NORMAL = "\x1b[1m", "\x1b[2m", "\x1b[0m"
BLANK: Line = ("", "")


def render(page: blocks.Document, width: int | None = None, *, colour: bool = False) -> bytes:
    """Write a page as text.

    Args:
        page: the page.
        width: columns of the terminal; None never splits tables.
        colour: whether to write escape codes.
    """
    lines = _write_heading(page.title, "═", width or FULL)
    for chapter in page.chapters:
        lines += _write_heading(chapter.title, "─", width or FULL) if chapter.title else [BLANK]
        for block in chapter.blocks:
            lines += _write_block(block, width or FULL)
    texts = [
        f"{style}{text}{NORMAL}" if colour and style and text else text
        for text, style in ((text.rstrip(), style) for text, style in lines)
    ]
    return "\n".join(texts).strip("\n").encode() + b"\n"


def write(page: blocks.Document, stream: TextIO) -> None:
    """Write a page to a stream, with the width and colours of its terminal.

    The width is COLUMNS, else the width of the process's terminal, else 80.
    """
    able = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    colour = (able or bool(os.environ.get("FORCE_COLOR"))) and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size().columns
    stream.write(render(page, width, colour=colour).decode())


def wrap(text: str, width: int) -> list[str]:
    """Break prose into lines; a word that is too long is broken, not cut off."""
    lines = [""]
    for number, word in enumerate(visible(text).split(" ")):
        longer = f"{lines[-1]} {word}" if number else word
        if cell_len(longer) <= width:
            lines[-1] = longer
            continue
        pieces = chop_cells(word, max(width, 1))
        lines = [*lines, *pieces] if lines[-1].strip() else [*lines[:-1], *pieces]
    return [line.rstrip() for line in lines]


def _write_heading(title: str, rule: str, width: int) -> list[Line]:
    lines = wrap(title, min(width, PROSE))
    rule *= max(map(cell_len, lines))
    return [BLANK, *((line, BOLD) for line in (*lines, rule))]


def _write_item(mark: str, text: str, width: int) -> Iterator[Line]:
    for number, line in enumerate(wrap(text, min(width, PROSE) - len(mark) - 1)):
        yield f"{' ' * len(mark) if number else mark} {line}", ""


def _write_prose(text: str, width: int, style: str = "") -> Iterator[Line]:
    yield from ((line, style) for line in wrap(text, min(width, PROSE)))


def _write_block(block: blocks.Block, width: int) -> Iterator[Line]:
    match block:
        case Table(folded=True):
            yield from (BLANK, (f"{block.title}: in the json, markdown and html formats", DIM))
        case Table() | Card() | Heatmap(square=False):
            room = min(width, PROSE) if isinstance(block, Card) else width
            yield from _write_grid(_add_bars(block), room)
        case Paragraph():
            yield from _write_prose(block.text, width, BOLD if block.tone else DIM)
            yield from [BLANK] if block.tone else []
        case Points():
            yield BLANK
            for mark, text, command in block.points:
                yield from _write_item(f"{mark}:" if mark else "•", text, width)
                yield from _write_item(" ", command, width) if command else ()
        case Gallery():
            for item in block.items:
                yield from _write_item("•", f"{item.title}: {'; '.join(item.lines)}", width)
            yield from _write_prose(block.text, width, DIM)
        case Passage():
            yield from _write_passage(block, width)
        case _:
            text = f"Chart, in the html format: {blocks.describe(block)}"
            yield from _write_prose(text, width, DIM)


def _write_passage(block: Passage, width: int) -> Iterator[Line]:
    """Write the tokens of a text; with several texts, only the largest shares of each."""
    if block.folded:
        yield from _write_item("•", f"{block.title}: {blocks.explain_shades(block)}", width)
        return
    words = (f"{t.text} ({t.share})" if t.top else t.text for t in blocks.shade_tokens(block))
    yield from (BLANK, *_write_prose(block.title, width, BOLD))
    yield from _write_prose(" ".join(words), width)
    yield from _write_prose(blocks.explain_shades(block), width, DIM)


def _add_bars(block: Table | Card | Heatmap) -> Grid:
    """Lay a block out; a map has bars behind its numbers, in place of colours."""
    grid = blocks.lay_out(block)
    if not isinstance(block, Heatmap):
        return grid
    scale, rows = blocks.compute_scale(block), [list(row) for row in grid.rows]
    for row, values in zip(rows, block.values, strict=True):
        for j, share in enumerate(map(scale.share, values), start=1):
            row[j] += LEVELS[0 if share is None else 1 + min(int(share * 8), 7)]
    return replace(grid, rows=rows)


# Tables that never cut a number or a name; wide ones are split or wrapped


GAP = 2
"""Spaces between columns."""
STRONG = "▸ "
LEAST = 8
"""Smallest width to which a repeated name column is wrapped."""


def _write_grid(grid: Grid, width: int) -> Iterator[Line]:
    """Write a table; if it is too wide, split it into pieces that repeat the keys."""
    if grid.heads:
        yield BLANK
        yield from ((line, BOLD) for line in (wrap(grid.title, width) if grid.title else ()))
    rows = [[STRONG * (i in grid.strong) + row[0], *row[1:]] for i, row in enumerate(grid.rows)]
    widths = _choose_widths(grid, rows, width)
    heads = [wrap(head, w) for head, w in zip(grid.heads, widths, strict=False)]
    for number, group in enumerate(split_columns(widths, keys=grid.keys, width=width)):
        columns = [(widths[i], grid.align[i] == "r") for i in group]
        yield from [BLANK] if number else []
        if heads:  # they end in one line
            height = max(len(heads[i]) for i in group)
            padded = [[""] * (height - len(heads[i])) + heads[i] for i in group]
            yield from ((line, BOLD) for line in _join_cells(padded, columns))
            yield "─" * (sum(w for w, _ in columns) + GAP * (len(columns) - 1)), ""
        for i, row in enumerate(rows):
            cells = [wrap(row[j], widths[j]) for j in group]
            yield from ((line, BOLD * (i in grid.strong)) for line in _join_cells(cells, columns))
    for note in grid.notes:
        yield from _write_prose(note, width, DIM)


def _join_cells(
    cells: Sequence[Sequence[str]], columns: Sequence[tuple[int, bool]]
) -> Iterator[str]:
    """Write cells of one or more lines side by side, in columns of a width and a side."""
    for line in zip_longest(*cells, fillvalue=""):
        texts = []
        for text, (width, is_right) in zip(line, columns, strict=True):
            space = " " * (width - cell_len(text))
            texts.append(space + text if is_right else text + space)
        yield (" " * GAP).join(texts)


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
    if sum(widths[i] for i in names) > room:
        for i in names:
            widths[i] = min(widths[i], max(LEAST, room // len(names)))
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
