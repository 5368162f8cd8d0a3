"""The blocks of a page, as data: chapters create them, and every format renders them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lipaudit.errors import visible
from lipaudit.report import cells
from lipaudit.report.pictures import Heatmap, Picture, State
from lipaudit.tables import Column, Note


@dataclass(frozen=True)
class Paragraph:
    """A sentence or two."""

    text: str


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
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    keys: int = 1
    strong: frozenset[int] = frozenset()
    folded: bool = False


def make_table(title: str, columns: Iterable[tuple[Column, Iterable[Any]]], **how: Any) -> Table:
    """Return a table from columns, each with its cells from top to bottom; `how` as in `Table`."""
    pairs = list(columns)
    rows = tuple(zip(*(cells for _, cells in pairs), strict=True))
    return Table(title, tuple(column for column, _ in pairs), rows, **how)


@dataclass(frozen=True)
class Item:
    """One sample: PNG files in base64 by caption, and lines of text."""

    title: str
    pictures: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Gallery:
    """Pictures of samples.

    Attributes:
        text: shown in formats without pictures.
        items: one per sample.
    """

    text: str
    items: tuple[Item, ...]


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
    tokens: tuple[str, ...]
    shares: tuple[float, ...]
    column: Column
    left_out: int = 0
    folded: bool = False


@dataclass(frozen=True)
class Notes:
    """Notes on the numbers above them."""

    notes: tuple[Note, ...]


@dataclass(frozen=True)
class Banner:
    """The answer of a page in one or two sentences, at the top.

    Attributes:
        text: one or two sentences.
        state: whether the answer is good; None without a judgement.
    """

    text: str
    state: State | None = None


@dataclass(frozen=True)
class Facts:
    """Facts by name."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Points:
    """A list of sentences.

    Attributes:
        points: sentences, each with a command or the name of its chapter.
        commands: whether these are commands.
    """

    points: tuple[tuple[str, str], ...]
    commands: bool = False


@dataclass(frozen=True)
class Line:
    """One line of a scorecard.

    Attributes:
        label: name of the figure.
        value: the figure.
        column: the column that formats it.
        text: details: its interval, its sample, its heads.
        command: a command that may improve it.
        aim: the purpose of the command, in a sentence.
    """

    label: str
    value: Any
    column: Column
    text: str = ""
    command: str = ""
    aim: str = ""


@dataclass(frozen=True)
class Scorecard:
    """The first figures of a page, one line each."""

    lines: tuple[Line, ...]


Block = (
    Paragraph | Table | Picture | Gallery | Passage | Notes | Banner | Facts | Points | Scorecard
)


@dataclass(frozen=True)
class Chapter:
    """A heading and its blocks.

    Attributes:
        name: anchor on the page, words joined by . or -.
        title: the heading; empty for the opening of a page.
        blocks: the blocks below the heading.
        folded: whether an HTML page shows only the heading at first.
    """

    name: str
    title: str
    blocks: tuple[Block, ...]
    folded: bool = False

    @property
    def short(self) -> str:
        """Return the chapter's name in the contents of a page: `Bounds layers`."""
        return self.name.replace(".", " ").replace("-", " ").capitalize()


@dataclass(frozen=True)
class Document:
    """A page: an opening (answer, facts, notes, scorecard, findings), then chapters.

    Attributes:
        title: its heading.
        facts: facts on the model, the data and the run, by name.
        findings: sentences, each with the name of its chapter.
        chapters: the sections.
        outcome: the answer in a sentence.
        partial: the missing parts; empty if the report is complete.
        notes: warnings and notes on all figures.
        scorecard: the first figures.
        more: how to see the rest of a page that is cut to one screen.
        steps: next steps, each with a command; shown on HTML pages.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    findings: tuple[tuple[str, str], ...]
    chapters: tuple[Chapter, ...]
    outcome: Banner | None = None
    partial: str = ""
    notes: tuple[Note, ...] = ()
    scorecard: Scorecard | None = None
    more: str = ""
    steps: tuple[tuple[str, str], ...] = ()

    def walk(self) -> Iterator[Chapter]:
        """Yield the whole page as chapters, the opening first, for formats to write."""
        partial = Banner(f"Partial: {self.partial}", "broken") if self.partial else None
        facts = Facts(self.facts) if self.facts else None
        notes = Notes(self.notes) if self.notes else None
        opening = tuple(block for block in (self.outcome, partial, facts, notes) if block)
        yield Chapter("", "", opening)
        if self.scorecard:
            yield Chapter("scorecard", "Scorecard", (self.scorecard,))
        if self.steps:
            yield Chapter("next-steps", "What to do next", (Points(self.steps, commands=True),))
        if self.findings:
            yield Chapter("findings", "What stands out", (Points(self.findings),))
        yield from self.chapters
        if self.more:
            yield Chapter("", "", (Paragraph(self.more),))


# Texts of blocks for all formats


TOP = 5
"""Number of tokens listed beside a text."""
LEAST = 0.02
"""Tokens with a smaller share are not listed."""


@dataclass(frozen=True)
class Token:
    """One token in its drawn form.

    Attributes:
        text: its text; invisible spaces are replaced by a sign.
        share: the formatted share.
        shade: 0 to 1, relative to the largest share.
        top: whether it is among the few tokens listed by name.
    """

    text: str
    share: str
    shade: float
    top: bool


def shade_tokens(block: Passage) -> list[Token]:
    """Return the tokens of a text in their drawn form."""
    largest = max(block.shares, default=0.0) or 1.0
    order = sorted(range(len(block.shares)), key=lambda i: -block.shares[i])
    top = {i for i in order[:TOP] if block.shares[i] >= LEAST}
    return [
        Token(
            visible(token).strip() or "␣",
            cells.format_value(share, block.column),
            share / largest,
            i in top,
        )
        for i, (token, share) in enumerate(zip(block.tokens, block.shares, strict=True))
    ]


def list_largest(block: Passage) -> str:
    """Name the tokens with the largest shares, largest first."""
    tokens = sorted((t for t in shade_tokens(block) if t.top), key=lambda token: -token.shade)
    return ", ".join(f"{token.text} {token.share}" for token in tokens)


def explain_shades(block: Passage) -> str:
    """Explain the shades, and count the tokens that are left out."""
    standing = cells.describe_standing(block.column)
    text = f"{block.column.label} ({standing}): {list_largest(block)}"
    if not block.left_out:
        return text
    share = cells.format_value(max(0.0, 1 - sum(block.shares)), block.column)
    count = cells.format_number(block.left_out, "d")
    return f"{text}; {count} more tokens are left out: {share}"


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


def lay_out(block: Table | Heatmap | Scorecard) -> Grid:
    """Return a table, a map or a scorecard with all cells as texts."""
    if isinstance(block, Scorecard):
        marks, notes = cells.list_footnotes([line.column for line in block.lines])
        lines = [
            (
                cells.write_math(line.label) + mark,
                cells.format_value(line.value, line.column),
                cells.write_math(visible(line.text)),
            )
            for line, mark in zip(block.lines, marks, strict=True)
        ]
        return Grid("", (), lines, "lrp", ["; ".join(notes)] if notes else [], keys=3)
    if isinstance(block, Heatmap):
        corner = Column("layer\\head", "", format="")
        heads = (corner, *(replace(block.column, label=name) for name in block.columns))
        rows = ((name, *row) for name, row in zip(block.rows, block.values, strict=True))
        block = Table(block.title, heads, tuple(rows))
    columns = block.columns
    marks, notes = cells.list_footnotes(columns)
    labels = (cells.write_math(visible(column.label)) for column in columns)
    return Grid(
        block.title,
        [label + mark for label, mark in zip(labels, marks, strict=True)],
        [list(map(cells.format_value, row, columns)) for row in block.rows],
        "".join("l" if c.format == "s" else "r" for c in columns),
        notes,
        block.strong,
        block.keys,
    )
