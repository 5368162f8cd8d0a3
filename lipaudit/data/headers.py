"""Tables whose first line is data: find that out, and which columns are read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import zip_longest

from lipaudit.data.intake import DataOptions, remark
from lipaudit.errors import InputError
from lipaudit.results import Note

SENTENCE = 5
"""Words of a cell that is a text: names of columns are shorter."""
LABEL = 3
"""Words that a label has at most."""
SHOWN = 40
"""Letters of a cell that a message has room for."""


def lacks_header(lines: Sequence[Sequence[str]], known: Collection[str]) -> bool:
    """Say whether the first line of a table is data.

    It is if one of its cells is a number, a sentence, or a value that the same column has again;
    unless a cell is a known name, or the cells are 0, 1, 2..., as pandas numbers columns.

    >>> lacks_header([["a fine film", "1"], ["a bad one", "0"]], ["text"])
    True
    >>> lacks_header([["tweet", "stars"], ["a fine film", "1"]], ["text"])
    False
    """
    first, *others = lines
    numbered = [str(i) for i in range(len(first))]
    if {word for cell in first for word in (cell, cell.strip().lower())} & {*known}:
        return False
    if list(first) == numbered:
        return False
    below = [set(column) for column in zip_longest(*others)]
    again = any(cell and cell in column for cell, column in zip(first, below, strict=False))
    return again or any(_is_number(cell) or len(cell.split()) >= SENTENCE for cell in first)


def assign_columns(
    lines: Sequence[Sequence[str]], options: DataOptions, *, origin: str
) -> tuple[DataOptions, Note]:
    """Choose the columns of a table without names: they are called 1, 2, 3...

    Args:
        lines: all rows, as cells.
        options: with the columns that the user named.
        origin: the table, for messages.

    Returns:
        The options with the columns to read, and a note that says which.

    Raises:
        InputError: it is not clear which column is the text.
    """
    first, count = lines[0], len(lines[0])
    cells = ", ".join(f"{i}: {_shorten(cell)}" for i, cell in enumerate(first, 1))
    start = f"{origin} has no line of column names; its first row is {cells}"
    if options.text_column is None:
        options = replace(options, text_column=_text_column(lines))
    if options.text_column is None:
        raise InputError(start, "Name the columns by their numbers, as in --text-column 2.")
    if options.label_column is None and count == 2 and options.text_column in ("1", "2"):
        options = replace(options, label_column=str(3 - int(options.text_column)))
    label = options.label_column
    labels = f"column {label} as its label" if label else "no column as a label"
    text = f"{start}. Column {options.text_column} is read as text, {labels}"
    return options, remark("no-header", text)


def _text_column(lines: Sequence[Sequence[str]]) -> str | None:
    """Return the number of the only column of texts, if there is but one, beside one of labels."""
    count = len(lines[0])
    columns = [[line[i] for line in lines if i < len(line)] for i in range(count)]
    ranks = [(not all(map(_is_number, column)), sum(map(len, column))) for column in columns]
    text = ranks.index(max(ranks))
    others = [cell for i, column in enumerate(columns) if i != text for cell in column]
    clear = count <= 2 and all(len(cell.split()) <= LABEL for cell in others)
    return str(text + 1) if clear else None


def _shorten(cell: str) -> str:
    return repr(cell if len(cell) <= SHOWN else f"{cell[:SHOWN]}...")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
