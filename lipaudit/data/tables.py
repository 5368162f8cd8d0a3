"""Rows of tables: CSV, TSV, JSON lines and parquet, with or without a header."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lipaudit.data.samples import DEFLATED, DataOptions, claimed_size, refuse_damage, remark
from lipaudit.errors import InputError, suggestion
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


SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLES = (*SEPARATORS, ".jsonl", ".parquet")
TEXTS = ("text", "sentence", "content", "review", "question", "document")
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("text", "text_b"),
    ("text", "text_pair"),
)
"""Usual names of the columns of a pair of texts."""
LABELS = ("label", "labels", "y", "target", "class", "sentiment")
BATCH = 256
"""Rows of a parquet file that are unpacked at once."""
LONGEST = 40
"""Letters of an id that a place has room for."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        place: where it is, for messages: `line 7`.
        values: by the names of their columns.
        fault: why it cannot be read; empty where it can.
    """

    place: str
    values: dict[str, Any]
    fault: str = ""

    @property
    def name(self) -> str:
        """Its place, and the id that the file gives it where there is one."""
        given = self.values.get("id")
        return self.place if given is None else f"{self.place}, id {str(given)[:LONGEST]}"


@dataclass(frozen=True)
class Table:
    """The rows of a file.

    Attributes:
        rows: all of them.
        options: with the columns to read, by number, where the file does not name its columns.
        notes: which columns these are.
    """

    rows: list[Row]
    options: DataOptions
    notes: tuple[Note, ...] = ()


def read_rows(path: Path, options: DataOptions) -> Table:
    """Read every row of a file; one that is no row says so by its `fault`.

    Raises:
        InputError: the file cannot be read at all, has no rows, or names no columns and it is not
            clear which of them is the text.
    """
    notes: tuple[Note, ...] = ()
    with refuse_damage(path, f"{path.suffix} file", "It should be UTF-8, with a row per sample."):
        if path.suffix in SEPARATORS:
            rows, options, notes = _read_separated(path, options)
        else:
            rows = list(_parquet(path) if path.suffix == ".parquet" else _json_lines(path))
    if not rows:
        raise InputError(f"{path} has no rows", "The first line names the columns.")
    return Table(rows, options, notes)


def _read_separated(
    path: Path, options: DataOptions
) -> tuple[list[Row], DataOptions, tuple[Note, ...]]:
    """Read rows whose cells are separated; where the file names no columns, by their numbers."""
    lines = list(_cells(path))
    if not lines:
        return [], options, ()
    notes: tuple[Note, ...] = ()
    cells = [each for _, each in lines]
    names = cells[0]
    if lacks_header(cells, _known_names(options)):
        names = [str(i) for i, _ in enumerate(names, 1)]
        options, note = assign_columns(cells, options, origin=str(path))
        notes = (note,)
    else:
        lines = lines[1:]
    return [_of_cells(names, each, place) for place, each in lines], options, notes


def _known_names(options: DataOptions) -> set[str]:
    """Return names by which a first line is known to name columns: usual ones, and those given."""
    given = f"{options.text_column or ''},{options.label_column or ''}".split(",")
    named = {name.strip() for name in given if name and not name.strip().isdigit()}
    return {*TEXTS, *LABELS, "id", *(name for pair in PAIRS for name in pair), *named}


def _cells(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the cells of every line that has any."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        table = csv.reader(lines, delimiter=SEPARATORS[path.suffix], strict=True)
        try:
            for cells in table:
                if cells:
                    yield f"line {table.line_num}", cells
        except csv.Error as error:
            raise ValueError(f"line {table.line_num}: {error}") from None


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _json(line, f"line {number}")


def _of_cells(names: Sequence[str], cells: Sequence[str], place: str) -> Row:
    values, surplus = dict(zip_longest(names, cells[: len(names)])), len(cells) - len(names)
    more = f"has {surplus} more than the columns' {len(names)} fields: quote texts with commas"
    return Row(place, values, more if surplus > 0 else "")


def _json(line: str, place: str) -> Row:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        return Row(place, {}, f"is no JSON ({error.msg}, column {error.colno})")
    except (ValueError, RecursionError) as error:  # a number, or a depth, beyond all bounds
        return Row(place, {}, f"is no JSON ({error})")
    return Row(place, values) if isinstance(values, dict) else Row(place, {}, "is no {...} object")


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            f"{path} needs the library `pyarrow`, which is not installed",
            "pip install pyarrow, or save the table as .csv or .jsonl.",
        ) from error
    size = path.stat().st_size
    with parquet.ParquetFile(path) as file:
        claimed_size([file.metadata.num_rows], 1, size)  # a row takes a byte at least
        rows = _unpack(file.iter_batches(BATCH), DEFLATED * size)
        yield from (Row(f"row {number}", values) for number, values in enumerate(rows, 1))


def _unpack(batches: Iterable[Any], most: int) -> Iterator[dict[str, Any]]:
    for batch in batches:
        most -= batch.nbytes
        if most < 0:
            raise ValueError(f"it unpacks to more than {DEFLATED} times its size")
        yield from batch.to_pylist()


def all_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns that any row has, in the order in which they come."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def complete(row: Row, texts: Sequence[str], label: str | None = None) -> Row:
    """Note where a row has no text or label, or something that is neither."""
    for name in (*texts, *([] if label is None else [label])):
        value = row.values.get(name)
        if value is None or (name == label and str(value).strip().lower() in ("", "nan")):
            return replace(row, fault=f"has no {name!r}")
        if isinstance(value, (list, tuple, dict)):
            more = ", of which a sample has one" if name == label else ", not a text"
            return replace(row, fault=f"has a {type(value).__name__} in {name!r}{more}")
    return row


def text_columns(
    columns: Sequence[str], options: DataOptions, *, origin: str, usual: Sequence[str] = ()
) -> tuple[str, ...]:
    """Choose the column of the texts, or the two of pairs of texts.

    Args:
        columns: of the table.
        options: which were asked for.
        origin: the table, for messages.
        usual: further names of a column of texts, looked for first.

    Raises:
        InputError: none has a usual name, or not the one asked for.
    """
    if options.text_column is not None:
        asked = tuple(name.strip() for name in options.text_column.split(","))
        whole = options.text_column in columns  # a name may hold a comma
        return (options.text_column,) if whole else _check_columns(asked, columns, origin)
    pair = next((pair for pair in PAIRS if set(pair) <= set(columns)), None)
    if pair is not None:
        return pair
    column = next((name for name in (*usual, *TEXTS) if name in columns), None)
    if column is None:
        separated = Path(origin).suffix in SEPARATORS
        unnamed = " If these are data, begin the file with names: text,label." * separated
        raise InputError(
            f"{origin} has no text column (columns: {', '.join(columns)})",
            "Name it with --text-column, or two of a pair: --text-column FIRST,SECOND." + unnamed,
        )
    return (column,)


def label_column(
    columns: Sequence[str], options: DataOptions, *, origin: str, usual: Sequence[str] = ()
) -> str | None:
    """Choose the column of the labels; None where none has a usual name.

    `usual` are further names, looked for first.
    """
    if options.label_column is not None:
        return _check_columns((options.label_column,), columns, origin)[0]
    return next((name for name in (*usual, *LABELS) if name in columns), None)


def _check_columns(asked: tuple[str, ...], columns: Sequence[str], origin: str) -> tuple[str, ...]:
    strange = next((name for name in asked if name not in columns), None)
    if strange is not None:
        raise InputError(f"{origin} has no column {strange!r}", suggestion(strange, columns))
    if len(asked) > 2:
        raise InputError(
            f"--text-column names {len(asked)} columns", "A text has one, a pair of texts two."
        )
    return asked
