"""Rows of tables: CSV, TSV, JSON lines and parquet, and which columns hold texts and labels."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lipaudit.data.samples import DEFLATED, DataOptions, check_size, refuse_damage
from lipaudit.errors import InputError, suggestion

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
"""Number of rows of a parquet file read at once."""
LONGEST = 40
"""Number of characters of an id shown in a place."""


@dataclass(frozen=True)
class TableRow:
    """A row of a table.

    Attributes:
        place: place of the row in messages: `line 7`.
        values: values by column name.
        fault: why the row cannot be read; empty if it can.
    """

    place: str
    values: dict[str, Any]
    fault: str = ""

    @property
    def name(self) -> str:
        """Return its place, with the id of the row in the file if there is one."""
        given = self.values.get("id")
        return self.place if given is None else f"{self.place}, id {str(given)[:LONGEST]}"


def read_rows(path: Path) -> list[TableRow]:
    """Read every row of a file; unreadable rows have a `fault`.

    Raises:
        InputError: the file cannot be read, or has no rows.
    """
    readers = {".jsonl": _read_json_lines, ".parquet": _read_parquet}
    with refuse_damage(path, f"{path.suffix} file", "Save it as UTF-8, with one row per sample."):
        rows = list(readers.get(path.suffix, _read_separated)(path))
    if not rows:
        raise InputError(
            f"{path} has no rows",
            "Write the column names into the first line and the samples below.",
        )
    return rows


def _read_separated(path: Path) -> Iterator[TableRow]:
    """Yield the rows of a file whose first line has the column names; skip empty lines."""
    # Spreadsheets write a byte order mark, which is not part of the first name.
    with path.open(encoding="utf-8-sig", newline="") as lines:
        table = csv.reader(lines, delimiter=SEPARATORS[path.suffix], strict=True)
        names: list[str] = []
        try:
            for cells in filter(None, table):
                if not names:
                    names = cells
                    continue
                surplus, known = len(cells) - len(names), f"the columns' {len(names)} fields"
                fault = f"has {surplus} more than {known}: put texts with commas in quotes"
                values = dict(zip_longest(names, cells[: len(names)]))
                yield TableRow(f"line {table.line_num}", values, fault if surplus > 0 else "")
        except csv.Error as error:
            raise ValueError(f"line {table.line_num}: {error}") from None


def _read_json_lines(path: Path) -> Iterator[TableRow]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            values: Any = None
            try:
                values = json.loads(line)
                fault = "" if isinstance(values, dict) else "is not a {...} object"
            except json.JSONDecodeError as error:
                fault = f"is not JSON ({error.msg}, column {error.colno})"
            except (ValueError, RecursionError) as error:  # a number or a depth beyond all bounds
                fault = f"is not JSON ({error})"
            yield TableRow(f"line {number}", {} if fault else values, fault)


def _read_parquet(path: Path) -> Iterator[TableRow]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            f"{path} needs the library `pyarrow`, which is not installed",
            "pip install pyarrow, or save the table as .csv or .jsonl.",
        ) from error
    size = path.stat().st_size
    # A dictionary of one value may encode a million rows.
    room, number = DEFLATED * size, 0
    with parquet.ParquetFile(path) as file:
        check_size([file.metadata.num_rows], 1, size)  # a row takes at least one byte
        for batch in file.iter_batches(BATCH):
            room -= batch.nbytes
            if room < 0:
                raise ValueError(f"it unpacks to more than {DEFLATED} times its size")
            for values in batch.to_pylist():
                number += 1
                yield TableRow(f"row {number}", values)


def list_columns(rows: Sequence[TableRow]) -> list[str]:
    """Return all columns that occur in some row, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def check_row(row: TableRow, texts: Sequence[str], label: str | None = None) -> TableRow:
    """Set a fault on a row without text or label, or with a value of the wrong type."""
    for name in (*texts, *([] if label is None else [label])):
        value = row.values.get(name)
        if value is None or (name == label and str(value).strip().lower() in ("", "nan")):
            return replace(row, fault=f"has no {name!r}")
        if isinstance(value, (list, tuple, dict)):
            more = ", and a sample has only one" if name == label else ", not a text"
            return replace(row, fault=f"has a {type(value).__name__} in {name!r}{more}")
    return row


def choose_text_columns(
    columns: Sequence[str], options: DataOptions, *, origin: str, usual: Sequence[str] = ()
) -> tuple[str, ...]:
    """Choose the column of the texts, or the two columns of pairs.

    Args:
        columns: columns of the table.
        options: hold the requested columns.
        origin: the table, for messages.
        usual: further usual names of a text column, tried first.

    Raises:
        InputError: no column has a usual name, or the requested one is missing.
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
        unnamed = (
            " If the first line is data, add a line with column names above it: text,label."
        ) * separated
        raise InputError(
            f"{origin} has no text column (columns: {', '.join(columns)})",
            "Name it with --text-column. For pairs, give two: --text-column FIRST,SECOND."
            + unnamed,
        )
    return (column,)


def choose_label_column(
    columns: Sequence[str], options: DataOptions, *, origin: str, usual: Sequence[str] = ()
) -> str | None:
    """Choose the column of the labels; None if no column has a usual name.

    `usual` holds further usual names, tried first.
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
            f"--text-column names {len(asked)} columns",
            "Give one column, or two for pairs of texts.",
        )
    return asked
