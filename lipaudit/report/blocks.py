"""The blocks of a page, as data: chapters create them, and every format renders them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Any, Literal

from lipaudit.errors import visible
from lipaudit.report.cells import (
    describe_standing,
    format_number,
    format_value,
    list_footnotes,
    write_math,
)
from lipaudit.tables import Column, Note
from lipaudit.tables.columns import finite
from lipaudit.tables.formats import format_count

Tone = Literal["", "answer", "kept", "open", "broken"]


@dataclass(frozen=True)
class Paragraph:
    """A sentence or two.

    Attributes:
        text: the sentences.
        tone: empty for prose; else this is the answer of the page: without a judgement, or good,
            undecided or bad.
    """

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Points:
    """A list of sentences.

    Attributes:
        points: the level of a note or nothing, a sentence, and a command or nothing.
    """

    points: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Card:
    """Figures or facts, one line each, without headings.

    Attributes:
        rows: (name, text) of a fact; (name, figure, text) of a scorecard.
        note: status and domain of the figures.
        meanings: what each figure means, which only pages with room show.
    """

    rows: Sequence[Sequence[str]]
    note: str = ""
    meanings: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """Rows under columns; each column defines the format of its cells.

    Attributes:
        title: printed above the table.
        columns: one per cell of a row.
        rows: values; text is printed as it is.
        keys: number of leading columns that name the row (repeated when a table is split).
        strong: indices of the rows to emphasise.
        folded: whether the terminal leaves the table out, and pages fold it.
        cut: whether the terminal leaves out the last columns if it has no room for them.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    keys: int = 1
    strong: Collection[int] = ()
    folded: bool = False
    cut: bool = False


ALL_COLUMNS = "All columns"
"""Title of the folded table that has every column of its chapter."""
Cells = dict[str, Any]
"""The cells of a row by the names of their columns."""


@dataclass(frozen=True)
class Item:
    """One sample: PNG files in base64 by caption, and lines of text."""

    title: str
    pictures: Sequence[tuple[str, str]]
    lines: Sequence[str]


@dataclass(frozen=True)
class Gallery:
    """Pictures of samples; the text is for formats without pictures."""

    text: str
    items: Sequence[Item]


@dataclass(frozen=True)
class Passage:
    """The tokens of a text, each with its share of a quantity.

    Attributes:
        title: printed above it.
        tokens: the first tokens.
        shares: the share of each token; all shares of the text sum to 1.
        column: the column that formats a share.
        left_out: number of further tokens.
        folded: whether the terminal lists only the tokens with the largest shares.
    """

    title: str
    tokens: Sequence[str]
    shares: Sequence[float]
    column: Column
    left_out: int = 0
    folded: bool = False


# Charts


EXTREME = 1e290
"""Larger values are not drawn: matplotlib overflows when it adds margins."""


@dataclass(frozen=True)
class Heatmap:
    """A matrix in colours: one value per layer and head, or per query and key.

    Attributes:
        title: printed above the map.
        values: one row per name of `rows`; None for missing entries.
        rows: names of the rows.
        columns: names of the columns.
        column: the column that formats a value.
        axes: what rows and columns are.
        centre: neutral value of a scale with two sides, such as 0 for differences.
        is_attention: whether this is a map of queries and keys: its cells are square, and shown in
            pictures only. Other maps are of layers and heads.
        scale: the colours that maps of one unit share on a page; None: by the values.
    """

    title: str
    values: Sequence[Sequence[float | None]]
    rows: Sequence[str]
    columns: Sequence[str]
    column: Column
    axes: tuple[str, str] = ("layer", "head")
    centre: float | None = None
    is_attention: bool = False
    scale: Scale | None = None


@dataclass(frozen=True)
class Histogram:
    """The distribution of values, for one or several groups.

    Attributes:
        title: printed above it.
        x: the column of the values.
        values: the values of each group.
        colours: indices of colours by group, if not those of their order.
    """

    title: str
    x: Column
    values: Mapping[str, Sequence[float]]
    colours: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """Named points, with an interval around y if `low` and `high` are given.

    Attributes:
        label: name of the series.
        x: coordinates along the horizontal axis.
        y: coordinates along the vertical axis.
        low: lower ends of the intervals.
        high: upper ends of the intervals.
        guide: whether this is a line for comparing slopes, drawn thin and without marks.
        names: name of each point (a head, a sample), for its tooltip.
        colour: index of its colour; None: its place among the series.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    guide: bool = field(default=False, kw_only=True)
    names: Sequence[str] = field(default=(), kw_only=True)
    colour: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Curve:
    """Points with intervals.

    Attributes:
        title: printed above it.
        x: the column of the horizontal axis.
        y: the column of the vertical axis.
        series: one colour each.
        log: draw both axes logarithmic.
        joined: whether lines join the points.
        ticks: places on the horizontal axis by name; empty: automatic.
        table: its figures, for formats without pictures; pages fold it below the picture.
    """

    title: str
    x: Column
    y: Column
    series: Sequence[Series]
    log: bool = False
    joined: bool = True
    ticks: dict[str, float] = field(default_factory=dict)
    table: Table | None = None


@dataclass(frozen=True)
class Stack:
    """Bars of parts on top of one another; negative parts are below zero.

    Attributes:
        title: printed above it.
        places: name of each bar.
        y: the column of the vertical axis.
        parts: the height of each part in every bar, by name.
    """

    title: str
    places: Sequence[str]
    y: Column
    parts: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Bar:
    """A figure of a forest plot, with its interval.

    Attributes:
        label: what the figure is.
        value: the figure.
        low: lower end of its interval; None without one.
        high: upper end of its interval.
        text: written beside the label.
        colour: index of its colour.
        limit: where a rule has its limit; None without one.
    """

    label: str
    value: float
    low: float | None
    high: float | None
    text: str
    colour: int
    limit: float | None = None


@dataclass(frozen=True)
class Forest:
    """A forest plot: figures with their intervals below one another, on one axis.

    Attributes:
        title: printed above it.
        x: the column of the axis.
        bars: the figures, from top to bottom.
        centre: where a line marks no change.
        log: whether the axis is logarithmic.
        legend: what the colours mean.
    """

    title: str
    x: Column
    bars: Sequence[Bar]
    centre: float = 0.0
    log: bool = False
    legend: dict[int, str] = field(default_factory=dict)


Picture = Heatmap | Histogram | Curve | Stack | Forest
Block = Paragraph | Points | Card | Table | Picture | Gallery | Passage


def list_notes(notes: Iterable[Note]) -> list[Block]:
    """Return a list with one block, `Points` of the distinct notes; empty without notes."""
    points = [(note.level, note.text, "") for note in dict.fromkeys(notes)]
    return [Points(points)] if points else []


@dataclass(frozen=True)
class Chapter:
    """A heading and its blocks.

    Attributes:
        name: anchor on the page, words joined by . or -.
        title: the heading; empty for the opening and the end of a page.
        blocks: the blocks below the heading.
        folded: whether an HTML page shows only the heading at first.
    """

    name: str
    title: str
    blocks: Sequence[Block]
    folded: bool = False


def list_steps(steps: Iterable[tuple[str, str, str]]) -> list[Chapter]:
    """Return a list with the chapter of next steps, as `Points`; an empty list without steps."""
    points = [*steps]
    if not points:
        return []
    return [Chapter("next-steps", "What to do next", [Points(points)])]


@dataclass(frozen=True)
class Document:
    """A page: its heading and its chapters, the first without a heading.

    Attributes:
        title: the heading.
        chapters: the chapters.
        models: labels of the models that have a colour each.
    """

    title: str
    chapters: Sequence[Chapter]
    models: Sequence[str] = ()


# Texts of blocks for all formats


TOP = 5
"""Number of tokens listed beside a text."""
LEAST = 0.02
"""Tokens with a smaller share are not listed."""


@dataclass(frozen=True)
class Token:
    """One token in its drawn form; `shade` is relative to the largest share."""

    text: str
    share: str
    shade: float
    top: bool


def shade_tokens(block: Passage) -> list[Token]:
    """Return the tokens of a text with their shares of a quantity, such as the gradient.

    The shade of a token is its share relative to the largest share. A token of spaces is printed
    as a visible sign.
    """
    largest = max(block.shares, default=0.0) or 1.0
    # The largest shares: a page also lists these tokens in a sentence below the text.
    listed = [share for share in sorted(block.shares)[-TOP:] if share >= LEAST]
    tokens = []
    for token, share in zip(block.tokens, block.shares, strict=True):
        text = visible(token).strip() or "␣"
        shown = format_value(share, block.column)
        tokens.append(Token(text, share=shown, shade=share / largest, top=share in listed))
    return tokens


def explain_shades(block: Passage) -> str:
    """Return a sentence with the tokens of the largest shares and the number of omitted tokens."""
    column = block.column
    top = [token for token in shade_tokens(block) if token.top]
    top.sort(key=lambda token: -token.shade)
    names = ", ".join(f"{token.text} {token.share}" for token in top)
    text = f"{column.label} ({describe_standing(column)}): {names}"
    if block.left_out:
        share = max(0.0, 1 - sum(block.shares))  # all shares of the text sum to 1
        others = format_value(share, column)
        text += f"; {format_count(block.left_out, 'more token')} left out: {others}"
    return text


@dataclass(frozen=True)
class Grid:
    """A table with all cells as texts.

    Attributes:
        title: title of the table; may be empty.
        heads: headings of the columns, with the marks of the notes; empty for none.
        rows: a text for each column.
        align: l (left), r (right) or p (prose) for each column.
        notes: status and domain of the columns.
        strong: indices of emphasised rows.
        keys: number of leading columns that name the row.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str
    notes: Sequence[str]
    strong: Collection[int] = ()
    keys: int = 1


def lay_out(block: Table | Heatmap | Card | Curve) -> Grid:
    """Return a table, a map, a card or the table of a curve with all cells as texts."""
    if isinstance(block, Card):
        return _lay_out_card(block)
    if isinstance(block, Curve):
        assert block.table is not None
        block = block.table
    elif isinstance(block, Heatmap):
        block = _tabulate_map(block)
    columns = block.columns
    marks, notes = list_footnotes(columns)
    heads = []
    align = ""
    for column, mark in zip(columns, marks, strict=True):
        heads.append(write_math(visible(column.label)) + mark)
        align += "l" if column.format == "s" else "r"
    rows = [list(map(format_value, row, columns)) for row in block.rows]
    return Grid(
        title=block.title,
        heads=heads,
        rows=rows,
        align=align,
        notes=notes,
        strong=block.strong,
        keys=block.keys,
    )


def _lay_out_card(block: Card) -> Grid:
    """Return a card as a table without headings.

    A row has a name and a text, or a name, a figure and a text.
    """
    rows = [list(map(visible, row)) for row in block.rows]
    align = "lp"  # one letter per column: left, right, or prose that wraps
    if max(map(len, rows)) == 3:
        align = "lrp"
    notes = [block.note] if block.note else []
    # All columns are keys, which name a row: a terminal never splits a card.
    return Grid(title="", heads=(), rows=rows, align=align, notes=notes, keys=len(align))


def _tabulate_map(block: Heatmap) -> Table:
    """Return a map (a matrix with row and column names) as a table.

    The first column of the table has the row names.
    """
    columns = [Column("\\".join(block.axes), meaning="", format="")]  # heading: layer\head
    columns += [replace(block.column, label=name) for name in block.columns]
    rows = [(name, *row) for name, row in zip(block.rows, block.values, strict=True)]
    return Table(block.title, columns, rows)


def describe(block: Picture) -> str:
    """Describe a picture in words: its title, its axes, and the largest figure."""
    match block:
        case Heatmap():
            text = f"{len(block.rows)} x {len(block.columns)} entries"
            values = chain.from_iterable(block.values)
            known = [value for value in values if value is not None and not math.isnan(value)]
            if known:
                text += f", largest {format_value(max(known), block.column)}"
        case Histogram():
            counted = list(chain.from_iterable(block.values.values()))
            low = format_number(min(counted), ".3g")
            high = format_number(max(counted), ".3g")
            text = f"histogram of {write_math(block.x.label)} from {low} to {high}"
        case Curve():
            names = ", ".join(series.label for series in block.series)
            axes = f"{block.y.label} over {block.x.label}"
            text = f"{write_math(axes)} for {names}"
        case Stack():
            text = f"{block.y.label} of {', '.join(block.parts)} in {len(block.places)} bars"
        case Forest():
            text = "; ".join(f"{bar.label} {bar.text}" for bar in block.bars)
    return f"{block.title}: {text}."


@dataclass(frozen=True)
class Scale:
    """A range of colours for values between two ends."""

    low: float
    high: float
    log: bool

    def share(self, value: float | None) -> float | None:
        """Return where a value is on the scale, from 0 (lowest colour) to 1 (highest colour).

        The result is None if the value is missing, not a number or outside the scale.
        """
        if value is None or not self.low <= value <= self.high:
            return None
        low = self.low
        high = self.high
        if self.log:
            low = math.log(low)
            high = math.log(high)
            value = math.log(value)
        return (value - low) / ((high - low) or 1.0)


def compute_scale(block: Heatmap) -> Scale:
    """Return the range of values that the colours of a map cover.

    A map with a neutral value (`centre`) gets a range that is symmetric around this value. Other
    maps run from the smallest to the largest value. The scale is logarithmic if the values span
    more than a decade and most of them are at the low end. Shares are always linear.
    """
    if block.scale is not None:  # several maps of the page share a scale
        return block.scale
    numbers = finite(chain.from_iterable(block.values))
    values = [value for value in numbers if abs(value) < EXTREME]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    centre = block.centre
    if centre is not None:  # a map of changes, for example, has "no change" in the middle
        far = max(high - centre, centre - low) or 1.0
        return Scale(centre - far, centre + far, log=False)
    if high <= low:
        return Scale(low, low + 1.0, log=False)
    # Shares keep a linear scale: 10% has to look like a tenth of 100%.
    is_share = block.is_attention or block.column.format.endswith("%")
    spans_decade = 0 < 10 * low < high
    if is_share or not spans_decade:
        return Scale(low, high, log=False)
    # Crowded: the median is in the lowest quarter, where a linear scale would show one colour.
    is_crowded = median(values) < low + 0.25 * (high - low)
    return Scale(low, high, log=is_crowded)
