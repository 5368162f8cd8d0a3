"""What stands under a heading: text, tables, samples, remarks, and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lipaudit.report.blocks.pictures import Picture
from lipaudit.results import Column, Note


@dataclass(frozen=True)
class Paragraph:
    """A sentence or two."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows under columns that say how they read.

    Attributes:
        title: printed above it.
        columns: one per cell of a row.
        rows: values; text is printed as it is.
        keys: how many leading columns name the row (repeated when a table is split).
        strong: numbers of the rows to emphasise.
        folded: long; the terminal leaves it out, pages fold it away.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    keys: int = 1
    strong: frozenset[int] = frozenset()
    folded: bool = False


@dataclass(frozen=True)
class Item:
    """What is shown of one sample: PNG files in base64 by their captions, and lines below."""

    title: str
    pictures: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Gallery:
    """Pictures of samples.

    Attributes:
        text: said in their place where none can be drawn.
        items: one per sample.
        folded: a terminal draws none, even where it could.
    """

    text: str
    items: tuple[Item, ...]
    folded: bool = False


@dataclass(frozen=True)
class Passage:
    """A text of tokens, each with its share of something.

    Attributes:
        title: printed above it.
        tokens: the first of them.
        shares: of each, of 1 in all.
        column: how a share reads.
        left_out: how many further tokens there are.
        folded: the terminal names the tokens with the largest shares, and leaves out the others.
    """

    title: str
    tokens: tuple[str, ...]
    shares: tuple[float, ...]
    column: Column
    left_out: int = 0
    folded: bool = False


@dataclass(frozen=True)
class Notes:
    """The remarks that belong to the numbers above."""

    notes: tuple[Note, ...]


@dataclass(frozen=True)
class Line:
    """One figure of a scorecard.

    Attributes:
        label: what it is.
        value: the figure.
        column: how the figure reads.
        text: what belongs to it: its interval, its sample, its heads.
        command: what to type to change it.
        aim: what that is for, in a sentence.
    """

    label: str
    value: Any
    column: Column
    text: str = ""
    command: str = ""
    aim: str = ""


@dataclass(frozen=True)
class Scorecard:
    """The figures that a reader is told first, a line each."""

    lines: tuple[Line, ...]


Block = Paragraph | Table | Picture | Gallery | Passage | Notes
