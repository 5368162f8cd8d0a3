"""Whole pages, and the little that is shown of a result apart from its page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lipaudit.report.blocks.parts import Block, Scorecard
from lipaudit.report.blocks.pictures import State
from lipaudit.results import Note


@dataclass(frozen=True)
class Outcome:
    """What a page is read for: how a gate ended."""

    text: str
    state: State


@dataclass(frozen=True)
class Chapter:
    """A heading and what stands under it."""

    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A page: what was audited, what is to be known of it all, what stands out, the sections.

    Attributes:
        title: its heading.
        outcome: what comes first, where there is one thing that is to be known.
        facts: what was audited and how, by name.
        findings: what stands out, and the rows that it comes from.
        chapters: the sections.
        partial: what the report lacks; empty where it is complete.
        notes: what is to be known before any figure.
        scorecard: the first figures.
        more: where the rest is, of a page that is not whole.
        steps: what to do next, each with its command; for pages with room.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    findings: tuple[tuple[str, str], ...]
    chapters: tuple[Chapter, ...]
    outcome: Outcome | None = None
    partial: str = ""
    notes: tuple[Note, ...] = ()
    scorecard: Scorecard | None = None
    more: str = ""
    steps: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Brief:
    """The little that a reader of a pull request is shown.

    Attributes:
        title: its heading.
        remarks: what is to be known of the figures, the outcome first.
        heads: of the columns.
        rows: texts; what matters most comes first.
        align: l or r for each column.
    """

    title: str
    remarks: tuple[str, ...]
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str


@dataclass(frozen=True)
class Frame:
    """Rows of plain values, for other programs; None is a value that there is not.

    Attributes:
        names: of the columns.
        rows: as many values each.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
