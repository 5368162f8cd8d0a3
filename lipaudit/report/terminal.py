"""A page as text, by rich: tables, the map of heads, and a sentence for each chart."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

from lipaudit.report import cells
from lipaudit.report.blocks import (
    Banner,
    Block,
    Document,
    Facts,
    Gallery,
    Notes,
    Paragraph,
    Passage,
    Points,
    Scorecard,
    Table,
    explain_shades,
    list_largest,
    list_scores,
    shade_tokens,
)
from lipaudit.report.colours import choose_ink, compute_scale
from lipaudit.report.pictures import Heatmap, describe

FULL = 100_000
PROSE = 100
LEVELS = "▁▂▃▄▅▆▇█"
"""Bars behind the numbers of a map where there are no colours."""
DIM = "dim"
STYLES = {"head": "bold", "rule": "", "row": "", "strong": "bold", "note": DIM}


def render(page: Document, width: int | None = None, colour: str | None = None) -> bytes:
    """Write a page as text.

    Args:
        page: what is written.
        width: columns of the terminal; None writes tables as wide as they are.
        colour: rich's colour system ("standard", "256", "truecolor"); None writes no escapes.
    """
    console = Console(
        file=io.StringIO(),
        width=width or FULL,
        height=100,
        color_system=colour,  # type: ignore[arg-type]
        force_terminal=colour is not None,
        no_color=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        for item in _write_page(page, width or FULL, colour is not None):
            console.print(item, markup=False, highlight=False, emoji=False, soft_wrap=True)
    text = capture.get().strip("\n").split("\n")
    return "\n".join(line if colour else line.rstrip() for line in text).encode() + b"\n"


def write(page: Document, stream: TextIO) -> None:
    """Write a page to a stream, as wide as it is; on a terminal in its colours.

    COLUMNS says how wide it is, else the terminal that the process runs in, else it is 80.
    """
    console = Console(file=stream, legacy_windows=False)
    colour = None if console.no_color else console.color_system
    stream.write(render(page, console.width, colour).decode())


def _write_page(page: Document, width: int, colour: bool) -> Iterator[RenderableType]:
    yield _heading(page.title, "═", width)
    for chapter in page.walk():
        if chapter.name == "next-steps":  # commands are on the scorecard already
            continue
        yield _heading(chapter.title, "─", width) if chapter.title else Text("")
        for block in chapter.blocks:
            yield from _write_block(block, width, colour)


def _heading(title: str, rule: str, width: int) -> Text:
    lines = wrap(title, min(width, PROSE))
    return Text("\n".join(["", *lines, rule * max(map(cell_len, lines))]), "bold")


def _item(mark: str, text: str, width: int) -> Text:
    lines = wrap(text, min(width, PROSE) - len(mark) - 1)
    return Text(f"{mark} " + f"\n{' ' * (len(mark) + 1)}".join(lines))


def _prose(text: str, width: int, style: str = "") -> Text:
    return Text("\n".join(wrap(text, min(width, PROSE))), style)


def _write_block(block: Block, width: int, colour: bool) -> Iterator[RenderableType]:
    match block:
        case Table():
            yield from _write_table(block, width)
        case Scorecard():
            said = write_card(block, min(width, PROSE))
            yield from (Text(line, STYLES[kind]) for kind, line in said)
        case Heatmap():
            yield from _heatmap(block, width, colour)
        case Paragraph():
            yield _prose(block.text, width, DIM)
        case Banner():
            yield _prose(block.text, width, "bold")
            yield Text("")
        case Facts():
            pad = min(max(len(name) for name, _ in block.pairs), 24)
            yield from (_item(name.ljust(pad), value, width) for name, value in block.pairs)
        case Points():
            yield from (_item("•", text, width) for text, _ in block.points)
        case Gallery() | Passage():
            yield from _write_sample(block, width)
        case Notes():
            yield Text("")
            yield from (_item(f"{note.level}:", note.text, width) for note in block.notes)
        case _:
            yield _prose(f"Chart, in the html format: {describe(block)}", width, DIM)


def _write_table(block: Table, width: int) -> Iterator[Text]:
    if block.folded:
        yield Text(f"\n{block.title}: in the json, markdown and html formats", DIM)
        return
    yield _title(block.title, width)
    yield from (Text(line, STYLES[kind]) for kind, line in write_rows(block, width))


def _write_sample(block: Gallery | Passage, width: int) -> Iterator[Text]:
    """Write what is known of a sample; of one of several texts only its largest shares."""
    if isinstance(block, Gallery):
        yield from (_item("•", f"{i.title}: {'; '.join(i.lines)}", width) for i in block.items)
        yield from [_prose(block.text, width, DIM)] if block.text else []
    elif block.folded:
        yield _item("•", f"{block.title}: {list_largest(block)}", width)
    else:
        words = (f"{t.text} ({t.share})" if t.top else t.text for t in shade_tokens(block))
        yield _title(block.title, width)
        yield _prose(" ".join(words), width)
        yield _prose(explain_shades(block), width, DIM)


def _title(title: str, width: int) -> Text:
    return Text("\n".join(["", *wrap(title, width)]) if title else "", "bold")


def _heatmap(block: Heatmap, width: int, colour: bool) -> Iterator[RenderableType]:
    scale = compute_scale(block)
    texts = [[cells.format_value(v, block.column) for v in row] for row in block.values]
    cell = max((cell_len(t) for row in texts for t in row), default=1) + 2
    lead = max(map(len, (*block.rows, "layer"))) + 1
    yield _title(block.title, width)
    for group in split_columns([lead, *[cell] * len(block.columns)], keys=1, width=width, gap=0):
        picked = [i - 1 for i in group[1:]]
        ticks = "".join(f"{block.columns[i]:>{cell - 1}} " for i in picked)
        yield Text(f"{'layer':<{lead}}" + ticks, "bold")
        for name, row, values in zip(block.rows, texts, block.values, strict=True):
            line = Text(f"{name:>{lead - 1}} ")
            for i in picked:
                share = scale.share(values[i])
                paint = scale.colour(share) if colour and share is not None else None
                line.append_text(_tile(row[i].rjust(cell - 1), share, paint))
            yield line
    yield Text(f"layer down, head across; {cells.describe_standing(block.column)}", DIM)


def _tile(number: str, share: float | None, colour: tuple[int, int, int] | None) -> Text:
    """Write one number on its colour, or with a bar glyph behind it."""
    if colour is None:
        last = len(LEVELS) - 1
        bar = " " if share is None else LEVELS[min(int(share * len(LEVELS)), last)]
        return Text(number + bar)
    style = Style(color=choose_ink(colour), bgcolor=f"rgb{colour}".replace(" ", ""))
    return Text(f"{number} ", style)


# Tables that never cut a number or a name: too wide, they are split or wrapped


GAP = "  "
STRONG = "▸ "
LEAST = 8
"""A name that is repeated by every piece of a table is wrapped to no fewer characters."""
Line = tuple[str, str]


def write_rows(block: Table, width: int) -> Iterator[Line]:
    """Yield the lines of a table with their kind: head, rule, row, strong or note."""
    marks, notes = cells.list_footnotes(block.columns)
    heads = [
        cells.write_math(cells.show_controls(column.label)) + mark
        for column, mark in zip(block.columns, marks, strict=True)
    ]
    rows = []
    for index, values in enumerate(block.rows):
        texts = [cells.format_value(v, c) for v, c in zip(values, block.columns, strict=True)]
        rows.append([STRONG * (index in block.strong) + texts[0], *texts[1:]])
    named = [column.format == "s" for column in block.columns]
    # As wide as the longest value, or the longest word of the heading.
    widths = [max(map(cell_len, [*h.split(), *(r[i] for r in rows)])) for i, h in enumerate(heads)]
    if sum(widths) + len(GAP) * (len(widths) - 1) > width:  # text may wrap, numbers never do
        most = [width // 3] * len(widths)
        most[0] = width // (2 if block.keys == 1 else 3)  # a name is repeated by every piece
        widths = [min(w, m) if n else w for w, m, n in zip(widths, most, named, strict=True)]
        widths = _narrow(widths, [i for i in range(block.keys) if named[i]], block.keys, width)
    for number, group in enumerate(split_columns(widths, keys=block.keys, width=width)):
        if number:
            yield "rule", ""
        aligned = [(i, widths[i], named[i]) for i in group]
        wrapped = {i: _wrap_cells(heads[i], widths[i]) for i in group}
        yield from (("head", line) for line in _write_row(wrapped, aligned, bottom=True))
        yield "rule", "─" * (sum(widths[i] for i in group) + len(GAP) * (len(group) - 1))
        for index, row in enumerate(rows):
            kind = "strong" if index in block.strong else "row"
            wrapped = {i: _wrap_cells(row[i], widths[i]) for i in group}
            yield from ((kind, line) for line in _write_row(wrapped, aligned))
    yield from (("note", line) for note in notes for line in wrap(note, width))


def write_card(block: Scorecard, width: int) -> Iterator[Line]:
    """Yield the lines of a scorecard: name, figure and its remark, which is wrapped."""
    rows, notes = list_scores(block)
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


def split_columns(
    widths: Sequence[int], *, keys: int, width: int, gap: int = len(GAP)
) -> list[list[int]]:
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
    return _wrap_cells(cells.show_controls(text), max(width, 10), break_on_hyphens=False) or [""]


def _wrap_cells(text: str, width: int, *, break_on_hyphens: bool = True) -> list[str]:
    """Break a text as textwrap does, or where characters are two cells wide, as rich does."""
    if cell_len(text) == len(text):
        return textwrap.wrap(text, width, break_on_hyphens=break_on_hyphens)
    return [line.plain.rstrip() for line in Text(text).wrap(Console(), width)]


def _narrow(widths: Sequence[int], named: Sequence[int], keys: int, width: int) -> list[int]:
    """Make the widest of the keys that are `named` narrower, until any column fits beside them."""
    narrowed = list(widths)
    room = width - max(widths[keys:], default=0) - len(GAP) * keys
    while named and sum(narrowed[:keys]) > room:
        widest = max(named, key=lambda i: narrowed[i])
        if narrowed[widest] <= LEAST:
            break
        narrowed[widest] -= 1
    return narrowed


def _write_row(
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
