"""A page as text, by rich: tables, maps, pictures out of characters."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

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
    Shares,
    Table,
)
from lipaudit.report.draw import colours, forest, glyphs, intervals, passages, portraits
from lipaudit.report.draw.alt import extent
from lipaudit.report.draw.colours import Rgb, viridis
from lipaudit.report.draw.layout import card, lines, split, wrap

FULL = 100_000
PROSE = 100
PICTURED = ("256", "truecolor")
"""The colours that a picture can be seen in."""
MAP = 64
AXIS = 9
"""Room for the ticks left of a map."""
STYLES = {"head": "bold", "rule": "", "row": "", "strong": "bold", "note": "dim"}


def drawn(page: Document, width: int | None, colour: str | None) -> bytes:
    """Draw a page in some width, None is as wide as its tables are, and in rich's colours."""
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
        shown = page if colour in PICTURED else _without_pictures(page)
        for item in _page(shown, width or FULL, colour is not None):
            console.print(item, markup=False, highlight=False, emoji=False, soft_wrap=True)
    text = capture.get().strip("\n").split("\n")
    return "\n".join(line if colour else line.rstrip() for line in text).encode() + b"\n"


def look(stream: TextIO) -> tuple[int, str | None]:
    """Return the width and the colours of a stream; colours are None where it is no terminal.

    COLUMNS says how wide it is, else the terminal that the process runs in, else it is 80.
    """
    console = Console(file=stream, legacy_windows=False)
    return console.width, None if console.no_color else console.color_system


def _without_pictures(page: Document) -> Document:
    """Return the page with what is said in the place of pictures."""
    chapters = tuple(
        replace(
            chapter,
            blocks=tuple(
                replace(b, folded=True) if isinstance(b, Gallery) else b for b in chapter.blocks
            ),
        )
        for chapter in page.chapters
    )
    return replace(page, chapters=chapters)


def _page(page: Document, width: int, colour: bool) -> Iterator[RenderableType]:
    yield from _opening(page, width, colour)
    for chapter in page.chapters:
        yield _heading(chapter.title, "─", width)
        for block in chapter.blocks:
            yield from _block(block, width, colour)
    if page.more:
        yield Text("\n".join(["", *wrap(page.more, min(width, PROSE))]), STYLES["note"])


def _opening(page: Document, width: int, colour: bool) -> Iterator[RenderableType]:
    yield _heading(page.title, "═", width)
    if page.outcome:
        yield Text("\n".join(wrap(page.outcome.text, min(width, PROSE))), "bold")
    if page.partial:
        yield Text("\n".join(wrap(f"PARTIAL: {page.partial}", min(width, PROSE))), "bold red")
    yield from _facts(page, width)
    if page.notes:
        yield from _block(Notes(page.notes), width, colour)
    if page.scorecard:
        yield _heading("Scorecard", "─", width)
        said = card(page.scorecard, min(width, PROSE))
        yield from (Text(line, STYLES[kind]) for kind, line in said)
    if page.findings:
        yield _heading("What stands out", "─", width)
        for text, source in page.findings:
            yield _item("•", f"{text} [{source}]" if source else text, width)


def _heading(title: str, rule: str, width: int) -> Text:
    lines = wrap(title, min(width, PROSE))
    return Text("\n".join(["", *lines, rule * max(map(cell_len, lines))]), "bold")


def _facts(page: Document, width: int) -> Iterator[Text]:
    pad = max((len(name) for name, _ in page.facts), default=0)
    yield from (_item(name.ljust(pad), value, width) for name, value in page.facts)


def _item(mark: str, text: str, width: int) -> Text:
    lines = wrap(text, min(width, PROSE) - len(mark) - 1)
    return Text(f"{mark} " + f"\n{' ' * (len(mark) + 1)}".join(lines))


def _block(block: Block, width: int, colour: bool) -> Iterator[RenderableType]:
    match block:
        case Table():
            yield from _table(block, width)
        case Heatmap():
            yield from _heatmap(block, width, colour)
        case Histogram() | Shares() | Scatter() | Curve() | Intervals() | Forest():
            yield _title(block.title, width)
            yield Text("\n".join(_drawing(block, width)))
        case Density():
            yield _title(block.title, width)
            yield from _density(block, min(width - AXIS, MAP), colour)
            yield Text("\n".join(wrap(extent(block), min(width, PROSE))), STYLES["note"])
        case Paragraph():
            yield Text("\n".join(wrap(block.text, min(width, PROSE))))
        case Gallery() | Passage():
            yield from _samples(block, width, colour)
        case Notes():
            yield Text("")
            yield from (_item(f"{n.level}:", f"{n.text} ({n.code})", width) for n in block.notes)


def _drawing(
    block: Histogram | Shares | Scatter | Curve | Intervals | Forest, width: int
) -> list[str]:
    if isinstance(block, Intervals):
        drawing = intervals.lines(block, min(width, PROSE))
        return [*drawing, *wrap(intervals.legend(block), min(width, PROSE))]
    if isinstance(block, Forest):
        return [*forest.lines(block, min(40, width - 45)), cells.standing(block.x)]
    if isinstance(block, Histogram | Shares):
        return [*glyphs.bars(block, min(40, width - 30)), *filter(None, [cells.standing(block.x)])]
    plot = glyphs.plot(block, min(60, width - 12))
    return [*plot, *wrap(glyphs.legend(block), min(width, PROSE))]


def _density(block: Density, width: int, colour: bool) -> Iterator[Text]:
    """Draw a density in shades, or in colours with two of its lines in a line of half blocks."""
    if not colour:
        yield from map(Text, glyphs.map_plot(block, width))
        return
    shares = glyphs.pixels(block, width)
    left, axis = glyphs.frame(block, len(shares[0]), len(shares) // 2)
    for start, above, below in zip(left, shares[::2], shares[1::2], strict=True):
        line = Text(start)
        for pair in zip(above, below, strict=True):
            upper, lower = (f"rgb{viridis(share)}".replace(" ", "") for share in pair)
            line.append("▀", Style(color=upper, bgcolor=lower))
        yield line
    yield from map(Text, axis)


def _samples(block: Gallery | Passage, width: int, colour: bool) -> Iterator[Text]:
    if isinstance(block, Passage):
        return _passage(block, width, colour)
    return _gallery(block, width)


def _gallery(block: Gallery, width: int) -> Iterator[Text]:
    """Draw the pictures of samples, and say what became of each."""
    for item in block.items:
        if not block.folded:
            yield Text("")
            yield from portraits.half_blocks(item, min(width, PROSE))
        yield _item("•", f"{item.title}: {'; '.join(item.lines)}", width)
    if block.folded and block.text:
        yield Text("\n".join(wrap(block.text, min(width, PROSE))), STYLES["note"])


def _passage(block: Passage, width: int, colour: bool) -> Iterator[Text]:
    if block.folded:
        yield _item("•", f"{block.title}: {passages.most(block)}", width)
        return
    yield _title(block.title, width)
    yield from passages.shaded(block, min(width, PROSE), colour=colour)
    yield Text("\n".join(wrap(passages.legend(block), min(width, PROSE))), STYLES["note"])


def _title(title: str, width: int) -> Text:
    return Text("\n".join(["", *wrap(title, width)]) if title else "", "bold")


def _table(block: Table, width: int) -> Iterator[RenderableType]:
    if block.folded:
        yield Text(f"\n{block.title}: in the json, markdown and html formats")
        return
    yield _title(block.title, width)
    yield from (Text(line, STYLES[kind]) for kind, line in lines(block, width))


def _heatmap(block: Heatmap, width: int, colour: bool) -> Iterator[RenderableType]:
    scale = colours.scale(block)
    texts = [[cells.text(v, block.column) for v in row] for row in block.values]
    cell = max((cell_len(t) for row in texts for t in row), default=1) + 2
    lead = max(map(len, (*block.rows, block.axes[0]))) + 1
    yield _title(block.title, width)
    for group in split([lead, *[cell] * len(block.columns)], keys=1, width=width, gap=0):
        picked = [i - 1 for i in group[1:]]
        ticks = "".join(f"{block.columns[i]:>{cell - 1}} " for i in picked)
        yield Text(f"{block.axes[0]:<{lead}}" + ticks, "bold")
        for name, row, values in zip(block.rows, texts, block.values, strict=True):
            line = Text(f"{name:>{lead - 1}} ")
            for i in picked:
                share = scale.share(values[i])
                paint = scale.colour(share) if colour and share is not None else None
                line.append_text(_tile(row[i].rjust(cell - 1), share, paint))
            yield line
    down, across = block.axes
    said = f"{down} down, {across} across; {cells.standing(block.column)}"
    yield Text(said, STYLES["note"])


def _tile(number: str, share: float | None, colour: Rgb | None) -> Text:
    """Write one number on its colour, or with a bar glyph behind it."""
    if colour is None:
        return Text(number + (" " if share is None else glyphs.level(share)))
    style = Style(color=colours.contrast(colour), bgcolor=f"rgb{colour}".replace(" ", ""))
    return Text(f"{number} ", style)
