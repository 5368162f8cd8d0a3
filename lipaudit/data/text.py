"""Text: tables with a text column, and plain files cut into windows."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipaudit.data.drawing import Drawn, class_indices, picks, require_labels
from lipaudit.data.intake import DataOptions, Intake, remark, warning
from lipaudit.errors import InputError, UsageError, suggestion
from lipaudit.results import Note

TEXTS = ("text", "sentence", "content", "review", "question", "document")
LABELS = ("label", "labels", "y", "target", "class")
TABLES = (".csv", ".tsv", ".jsonl")
LETTERS_PER_TOKEN = 16


def read_table(path: Path, net: Intake, options: DataOptions) -> Drawn:
    """Read a .csv, .tsv or .jsonl file with a header: a column of texts, perhaps one of labels.

    Labels are class names of the model, or its numbers.

    Raises:
        InputError: damaged, empty, a column missing, or labels the model does not have.
    """
    rows, origin = _rows(path), str(path)
    if not rows:
        raise InputError(f"{path} has no rows", "The first line names the columns.")
    text = text_column(list(rows[0]), options, origin=origin)
    label = label_column(list(rows[0]), options, origin=origin)
    order = picks(len(rows), options.samples, options.seed)
    texts = _values([rows[i] for i in order], text, origin)
    x, notes = tokenized([str(t) for t in texts], net, options, origin=origin)
    if label is None or net.classes is None:
        return Drawn(x, None, notes)
    every = _values(rows, label, origin)
    numbers, more = class_numbers(every, net, origin=origin)
    return Drawn(x, [numbers[i] for i in order], notes + more)


def text_column(columns: Sequence[str], options: DataOptions, *, origin: str) -> str:
    """Choose the column of the texts.

    Raises:
        InputError: none has a usual name, or not the one asked for.
    """
    column = _column(columns, options.text_column, TEXTS, origin)
    if column is None:
        raise InputError(
            f"{origin} has no text column (columns: {', '.join(columns)})",
            "Name it with --text-column.",
        )
    return column


def label_column(columns: Sequence[str], options: DataOptions, *, origin: str) -> str | None:
    """Choose the column of the labels; None where none has a usual name."""
    return _column(columns, options.label_column, LABELS, origin)


def read_text(path: Path, net: Intake, options: DataOptions) -> Drawn:
    """Cut a plain file into equal parts and take the beginning of each (see `windows`)."""
    notes: tuple[Note, ...] = ()
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        text = path.read_text("latin-1")
        notes = (remark("latin-1", f"{path} is not UTF-8 and was read as Latin-1"),)
    if not text.strip():
        raise InputError(f"{path} is empty", "Give a file with some text.")
    x, more = windows(text, net, options, origin=str(path))
    return Drawn(x, None, notes + more)


def windows(
    text: str, net: Intake, options: DataOptions, *, origin: str, after: str = ""
) -> tuple[list[Tensor], tuple[Note, ...]]:
    """Return as many windows as samples are asked for, spread evenly over a text.

    The text is cut into equal parts; a sample is the first `max_tokens` tokens from the first word
    that begins in a part, special tokens included. The last ones may be shorter, unless some text
    comes `after`.
    """
    limit, notes = _limit(net, options)
    starts = [round(i * len(text) / options.samples) for i in range(options.samples)]
    text += after
    parts = [text[_word_start(text, s) :][: LETTERS_PER_TOKEN * limit] for s in starts]
    return [_tokens(part, net, limit, origin) for part in parts if part.strip()], notes


def tokenized(
    texts: Sequence[str], net: Intake, options: DataOptions, *, origin: str
) -> tuple[list[Tensor], tuple[Note, ...]]:
    """Tokenize texts, and say how many were cut."""
    limit, notes = _limit(net, options)
    # one token more than allowed tells a text that was cut from one that just fits
    long = [_tokens(text, net, limit + 1, origin) for text in texts]
    cut = sum(len(tokens) > limit for tokens in long)
    x = [
        _tokens(text, net, limit, origin) if len(tokens) > limit else tokens
        for text, tokens in zip(texts, long, strict=True)
    ]
    if cut:
        text = f"{cut} of {len(texts)} texts were cut to {limit} tokens (--max-tokens)"
        notes += (warning("text-cut", text),)
    return x, notes


def class_numbers(
    values: Sequence[Any], net: Intake, *, origin: str
) -> tuple[list[int], tuple[Note, ...]]:
    """Return labels as the model's class numbers, from numbers or class names.

    Args:
        values: the labels of the whole data set, so that its classes are known.
        net: the model.
        origin: the data set, for messages.
    """
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        names = [str(value) for value in values]
        index, notes = class_indices(sorted(set(names)), net)
        return [index[name] for name in names], notes
    require_labels(numbers, net, origin=origin)
    return numbers, ()


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            if path.suffix == ".jsonl":
                return [dict(json.loads(line)) for line in lines if line.strip()]
            delimiter = "\t" if path.suffix == ".tsv" else ","
            return list(csv.DictReader(lines, delimiter=delimiter, strict=True))
    except (ValueError, TypeError, csv.Error) as error:
        raise InputError(
            f"{path} is not a readable {path.suffix} file ({error})",
            "It should be UTF-8, with a row per sample.",
        ) from error


def _values(rows: Sequence[dict[str, Any]], column: str, origin: str) -> list[Any]:
    values = [row.get(column) for row in rows]
    if None in values:
        raise InputError(
            f"{origin}: row {values.index(None) + 1} has no {column!r}", "Every row needs one."
        )
    return values


def _column(
    columns: Sequence[str], asked: str | None, usual: Sequence[str], origin: str
) -> str | None:
    if asked is not None and asked not in columns:
        raise InputError(f"{origin} has no column {asked!r}", suggestion(asked, columns))
    return asked or next((name for name in usual if name in columns), None)


def _limit(net: Intake, options: DataOptions) -> tuple[int, tuple[Note, ...]]:
    """Return the most tokens of a sample: what was asked for, or what the model can take."""
    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens {options.max_tokens} leaves nothing", "Give at least 1.")
    most = net.sample_shape[0]
    if options.max_tokens <= most:
        return options.max_tokens, ()
    text = f"the model takes at most {most} tokens, not {options.max_tokens}"
    return most, (warning("max-tokens", text),)


def _tokens(text: str, net: Intake, limit: int, origin: str) -> Tensor:
    if net.tokenize is None:
        raise InputError(
            f"{origin} holds text, and the model came without a tokenizer",
            "Put tokenizer.json beside config.json, or give token ids as an .npz file.",
        )
    tokens = net.tokenize(text, limit)
    if not tokens:
        raise InputError(f"{origin}: {text[:40]!r} has no tokens", "Remove empty texts.")
    return torch.as_tensor(tokens, dtype=torch.int64)


def _word_start(text: str, position: int) -> int:
    """Move on to the first word that begins at a position or after it."""
    while 0 < position < len(text) and not text[position - 1].isspace():
        position += 1
    return position
