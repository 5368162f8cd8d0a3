"""Plain-text tables that never cut a number or a name: too wide, they are split or wrapped."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from lipaudit.report import cells
from lipaudit.report.blocks import Scorecard, Table

GAP = "  "
STRONG = "▸ "
LEAST = 8
"""A name that is repeated by every piece of a table is wrapped to no fewer characters."""
Line = tuple[str, str]


def lines(block: Table, width: int) -> Iterator[Line]:
    """Yield the lines of a table with their kind: head, rule, row, strong or note."""
    marks, notes = cells.footnotes(block.columns)
    heads = [
        cells.pretty(cells.plain(column.label)) + mark
        for column, mark in zip(block.columns, marks, strict=True)
    ]
    rows = [_texts(block, index) for index in range(len(block.rows))]
    named = [column.format == "s" for column in block.columns]
    widths = [_width(h, [r[i] for r in rows]) for i, h in enumerate(heads)]
    if sum(widths) + len(GAP) * (len(widths) - 1) > width:  # text may wrap, numbers never do
        most = [width // 3] * len(widths)
        most[0] = width // (2 if block.keys == 1 else 3)  # a name is repeated by every piece
        widths = [min(w, m) if n else w for w, m, n in zip(widths, most, named, strict=True)]
        widths = _narrowed(widths, [i for i in range(block.keys) if named[i]], block.keys, width)
    for number, group in enumerate(split(widths, keys=block.keys, width=width)):
        if number:
            yield "rule", ""
        aligned = [(i, widths[i], named[i]) for i in group]
        wrapped = {i: _wrapped(heads[i], widths[i]) for i in group}
        yield from (("head", line) for line in _row(wrapped, aligned, bottom=True))
        yield "rule", "─" * (sum(widths[i] for i in group) + len(GAP) * (len(group) - 1))
        for index, row in enumerate(rows):
            kind = "strong" if index in block.strong else "row"
            wrapped = {i: _wrapped(row[i], widths[i]) for i in group}
            yield from ((kind, line) for line in _row(wrapped, aligned))
    yield from (("note", line) for note in notes for line in wrap(note, width))


def card(block: Scorecard, width: int) -> Iterator[Line]:
    """Yield the lines of a scorecard: name, figure and what belongs to it, which is wrapped."""
    rows, notes = scored(block)
    names, figures = (max(cell_len(row[i]) for row in rows) for i in (0, 1))
    lead = names + figures + 2 * len(GAP)
    for name, figure, text, command in rows:
        said = wrap(text, width - lead)
        pad = " " * (figures - cell_len(figure))
        start = f"{name}{' ' * (names - cell_len(name))}{GAP}{pad}{figure}{GAP}"
        yield "row", start + said[0]
        yield from (("row", " " * lead + line) for line in said[1:])
        yield from (
            ("row", " " * len(GAP) + line) for line in wrap(command, width - len(GAP)) if command
        )
    yield from (("note", line) for line in wrap("   ".join(notes), width) if notes)


def scored(block: Scorecard) -> tuple[list[tuple[str, str, str, str]], list[str]]:
    """Return the texts of each line, and what the marks behind their names stand for."""
    marks, notes = cells.footnotes([line.column for line in block.lines])
    rows = [
        (
            cells.pretty(line.label) + mark,
            cells.text(line.value, line.column),
            cells.pretty(cells.plain(line.text)),
            cells.plain(line.command),
        )
        for line, mark in zip(block.lines, marks, strict=True)
    ]
    return rows, notes


def split(widths: Sequence[int], *, keys: int, width: int, gap: int = len(GAP)) -> list[list[int]]:
    """Group columns so that no group is wider than `width`; every group repeats the keys."""
    lead = sum(widths[:keys]) + gap * keys
    groups: list[list[int]] = [[]]
    used = lead
    for index in range(keys, len(widths)):
        if groups[-1] and used + widths[index] > width:
            groups.append([])
            used = lead
        groups[-1].append(index)
        used += widths[index] + gap
    return [[*range(keys), *group] for group in groups]


def wrap(text: str, width: int) -> list[str]:
    """Break prose into lines; a word that is too long is broken, not cut."""
    return _wrapped(cells.plain(text), max(width, 10), break_on_hyphens=False) or [""]


def _wrapped(text: str, width: int, *, break_on_hyphens: bool = True) -> list[str]:
    """Break a text as textwrap does, or where characters are two cells wide, as rich does."""
    if cell_len(text) == len(text):
        return textwrap.wrap(text, width, break_on_hyphens=break_on_hyphens)
    return [line.plain.rstrip() for line in Text(text).wrap(Console(), width)]


def _narrowed(widths: Sequence[int], named: Sequence[int], keys: int, width: int) -> list[int]:
    """Make the widest of the keys that are `named` narrower, until any column fits beside them."""
    narrowed = list(widths)
    room = width - max(widths[keys:], default=0) - len(GAP) * keys
    while named and sum(narrowed[:keys]) > room:
        widest = max(named, key=lambda i: narrowed[i])
        if narrowed[widest] <= LEAST:
            break
        narrowed[widest] -= 1
    return narrowed


def _texts(block: Table, index: int) -> list[str]:
    values = zip(block.rows[index], block.columns, strict=True)
    texts = [cells.text(value, column) for value, column in values]
    return [STRONG + texts[0], *texts[1:]] if index in block.strong else texts


def _width(head: str, column: Sequence[str]) -> int:
    """Return the width of a column: its longest value or the longest word of its heading."""
    return max(map(cell_len, [*head.split(), *column]))


def _row(
    wrapped: dict[int, list[str]], aligned: Sequence[tuple[int, int, bool]], bottom: bool = False
) -> Iterator[str]:
    height = max(len(lines) for lines in wrapped.values())
    for level in range(height):
        line = []
        for index, width, named in aligned:
            lines = wrapped[index]
            at = level - (height - len(lines)) * bottom
            text = lines[at] if 0 <= at < len(lines) else ""
            pad = " " * (width - cell_len(text))
            line.append(text + pad if named else pad + text)
        yield GAP.join(line)
