"""Tables and maps as texts in rows and columns, before any markup."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lipaudit.report import cells
from lipaudit.report.blocks import Heatmap, Table


@dataclass(frozen=True)
class Grid:
    """A table as texts.

    Attributes:
        title: of the table; may be empty.
        heads: of the columns, with the marks of the notes.
        rows: a text for each column.
        align: l or r for each column.
        notes: how far the columns are proven, and where.
        strong: the indices of rows that stand out.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str
    notes: Sequence[str]
    strong: Collection[int] = ()


def lay_out(block: Table | Heatmap) -> Grid:
    """Return a table or a map as texts."""
    if isinstance(block, Heatmap):
        heads = [" \\ ".join(block.axes), *block.columns]
        rows = [
            [name, *(cells.text(v, block.column) for v in values)]
            for name, values in zip(block.rows, block.values, strict=True)
        ]
        return Grid(block.title, heads, rows, "r" * len(heads), [cells.standing(block.column)])
    marks, notes = cells.footnotes(block.columns)
    return Grid(
        block.title,
        [cells.pretty(c.label) + mark for c, mark in zip(block.columns, marks, strict=True)],
        [
            [cells.text(value, c) for value, c in zip(row, block.columns, strict=True)]
            for row in block.rows
        ],
        "".join("l" if c.format == "s" else "r" for c in block.columns),
        notes,
        block.strong,
    )
