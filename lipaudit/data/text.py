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
from lipaudit.errors import InputError, UsageError
from lipaudit.results import Note

TEXTS = ("text", "sentence", "content", "review", "question", "document")
LABELS = ("label", "labels", "y", "target", "class")
TABLES = (".csv", ".tsv", ".jsonl")
LETTERS_PER_TOKEN = 16

Rows = Sequence[dict[str, Any]]


def read_table(path: Path, net: Intake, options: DataOptions) -> Drawn:
    """Read a .csv, .tsv or .jsonl file with a header: a column of texts, perhaps one of labels.

    Labels are class names of the model, or its numbers.

    Raises:
        InputError: damaged, empty, a column missing, or labels the model does not have.
    """
    rows = _rows(path)
    if not rows:
        raise InputError(f"{path} has no rows", "The first line names the columns.")
    drawn = [rows[i] for i in picks(len(rows), options.samples, options.seed)]
    return from_rows(drawn, net, options, origin=str(path))


def from_rows(rows: Rows, net: Intake, options: DataOptions, *, origin: str) -> Drawn:
    """Take the text and label columns of rows."""
    text = _column(rows[0], options.text_column, TEXTS, origin)
    if text is None:
        raise InputError(
            f"{origin} has no text column (columns: {', '.join(rows[0])})",
            "Name it with --text-column.",
        )
    label = _column(rows[0], options.label_column, LABELS, origin)
    x, notes = tokenized([str(r[text]) for r in rows], net, options, origin=origin)
    if label is None or net.classes is None:
        return Drawn(x, None, notes)
    y, more = label_numbers([r[label] for r in rows], net, origin=origin)
    return Drawn(x, y, notes + more)


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
    return Drawn(windows(text, net, options, origin=str(path)), None, notes)


def windows(text: str, net: Intake, options: DataOptions, *, origin: str) -> list[Tensor]:
    """Return as many windows as samples are asked for, spread evenly over a text.

    The text is cut into equal parts; a sample is the first `max_tokens` tokens from the first word
    that begins in a part, special tokens included. The last ones may be shorter.
    """
    limit, _ = _limit(net, options)
    starts = [round(i * len(text) / options.samples) for i in range(options.samples)]
    parts = [text[_word_start(text, s) :][: LETTERS_PER_TOKEN * limit] for s in starts]
    return [_tokens(part, net, limit, origin) for part in parts if part.strip()]


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


def label_numbers(
    values: Sequence[Any], net: Intake, *, origin: str
) -> tuple[list[int], tuple[Note, ...]]:
    """Return labels as the model's class numbers, from numbers or class names."""
    try:
        numbers = [int(value) for value in values]
    except (TypeError, ValueError):
        names = [str(value) for value in values]
        index, notes = class_indices(sorted(set(names)), net)
        return [index[name] for name in names], notes
    require_labels(numbers, net, origin=origin)
    return numbers, ()


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            if path.suffix == ".jsonl":
                return [json.loads(line) for line in lines if line.strip()]
            delimiter = "\t" if path.suffix == ".tsv" else ","
            return list(csv.DictReader(lines, delimiter=delimiter, strict=True))
    except (ValueError, csv.Error) as error:
        raise InputError(
            f"{path} is not a readable {path.suffix} file ({error})", "It should be UTF-8."
        ) from error


def _column(
    row: dict[str, Any], asked: str | None, usual: Sequence[str], origin: str
) -> str | None:
    if asked is not None and asked not in row:
        raise InputError(
            f"{origin} has no column {asked!r}", f"Its columns are: {', '.join(row)}."
        )
    return asked or next((name for name in usual if name in row), None)


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
    return torch.as_tensor(tokens)


def _word_start(text: str, position: int) -> int:
    """Move on to the first word that begins at a position or after it."""
    while 0 < position < len(text) and not text[position - 1].isspace():
        position += 1
    return position
