"""Text: tables with a text column, and plain files cut into windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipaudit.data.batch import Origin
from lipaudit.data.drawing import Drawn, class_numbers, draw, left_out
from lipaudit.data.intake import DataOptions, Intake, remark, warning
from lipaudit.data.tables import (
    Row,
    all_columns,
    complete,
    label_column,
    read_rows,
    text_columns,
)
from lipaudit.errors import InputError, UsageError
from lipaudit.results import Note

Text = str | tuple[str, str]
"""A text, or a pair of texts that the model reads together."""
LETTERS_PER_TOKEN = 16
SHOWN = 120
"""Letters of a text by which it is found again."""


def read_table(path: Path, net: Intake, options: DataOptions) -> Drawn:
    """Read a table: a column of texts, or two of pairs of texts, perhaps one of labels.

    Labels are class names of the model, or its numbers.

    Raises:
        InputError: damaged, empty, a column missing, or labels the model does not have.
    """
    origin = str(path)
    table = read_rows(path, options)
    options = table.options
    rows, notes = sound_rows(table.rows, options, origin)
    notes = table.notes + notes
    columns = all_columns(rows)
    text = text_columns(columns, options, origin=origin)
    label = label_column(columns, options, origin=origin)
    needed = None if net.classes is None else label
    rows, more = sound_rows([complete(row, text, needed) for row in rows], options, origin)
    reader = _Reader(net, options, origin)
    texts = [row_text(row.values, text) for row in rows]
    drawn, skipped = draw(
        len(rows), options, lambda i: reader.tokens(texts[i], rows[i].place), what="texts"
    )
    notes += more + skipped + reader.notes() + _note_pairs(net, text)
    x = [tokens for _, tokens in drawn]
    origins = [Origin(rows[i].name, beginning(texts[i])) for i, _ in drawn]
    shown = [texts[i] for i, _ in drawn]
    if label is None or net.classes is None:
        named = unused_labels(label, origin) or unnamed_labels(columns, text, net, origin)
        return Drawn(x, None, notes + named, origins=origins, texts=shown, limit=reader.limit)
    values, places = [row.values[label] for row in rows], [row.place for row in rows]
    numbers, matched = class_numbers(values, net, places, origin=origin)
    y = [numbers[i] for i, _ in drawn]
    return Drawn(x, y, notes + matched, origins=origins, texts=shown, limit=reader.limit)


def row_text(values: Mapping[str, Any], columns: Sequence[str]) -> Text:
    """Return the text of a row: of one column, or of the two of a pair."""
    first, *second = (str(values[name]) for name in columns)
    return (first, second[0]) if second else first


def beginning(text: Text) -> str:
    """Return how a text, or a pair of them, begins, on one line."""
    whole = text if isinstance(text, str) else " | ".join(text)
    line = " ".join(whole.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def unused_labels(column: str | None, origin: str) -> tuple[Note, ...]:
    """Say that labels are there, and that the model has no classes for them."""
    if column is None:
        return ()
    text = f"the labels of {origin} ({column}) are unused: the model has no classes"
    return (remark("labels-unused", text),)


def unnamed_labels(
    columns: Sequence[str], text: Sequence[str], net: Intake, origin: str
) -> tuple[Note, ...]:
    """Name the columns of which one may hold the labels that a classifier has none of."""
    others = ", ".join(name for name in columns if name not in text)
    if net.classes is None or not others:
        return ()
    said = f"{origin} has no column called label: --label-column names one ({others})"
    return (remark("no-label-column", said),)


def sound_rows(
    rows: Sequence[Row], options: DataOptions, origin: str
) -> tuple[list[Row], tuple[Note, ...]]:
    """Return the rows that can be read; the others are refused, or left out if that was asked.

    Raises:
        InputError: one cannot be read; with `skip_bad`, none can.
    """
    faulty = [f"{row.place} {row.fault}" for row in rows if row.fault]
    if faulty and not options.skip_bad:
        raise InputError(
            f"{origin}: {faulty[0]}", "Mend it, or leave such rows out with --skip-bad."
        )
    sound = [row for row in rows if not row.fault]
    if not sound:
        raise InputError(f"{origin}: no row can be read ({faulty[0]})", "Mend the file.")
    return sound, left_out(faulty, "rows")


def _note_pairs(net: Intake, columns: Sequence[str]) -> tuple[Note, ...]:
    """Say that a tokenizer puts nothing between the two texts of a pair, if it does not."""
    if len(columns) < 2 or net.tokenize is None or net.tokenize_pair is None:
        return ()
    alone = [net.tokenize(text, SHOWN) for text in "ab"]
    joined = [net.tokenize_pair("a", text, SHOWN) for text in "bc"]
    ending = len(commonprefix([ids[::-1] for ids in alone]))
    if len(commonprefix(joined)) > len(alone[0]) - ending:
        return ()
    text = (
        "the tokenizer joins the two texts of a pair without a separator: the model sees one "
        f"text, {' directly followed by '.join(columns)}"
    )
    return (warning("pairs-unseparated", text),)


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
    x, origins, more = windows(text, net, options, origin=str(path))
    said = (
        f"{path} is read as one stream of text, cut into {len(x)} windows; for a sample per line "
        "give a .csv with the line of names `text` first, or a .jsonl"
    )
    return Drawn(x, None, (*notes, *more, remark("one-stream", said)), origins=origins)


def windows(
    text: str, net: Intake, options: DataOptions, *, origin: str, after: str = ""
) -> tuple[list[Tensor], list[Origin], tuple[Note, ...]]:
    """Return as many windows as samples are asked for, spread evenly over a text, and their place.

    The text is cut into equal parts; a sample is the first `max_tokens` tokens from the first word
    that begins in a part, special tokens included. The last ones may be shorter, unless some text
    comes `after`.
    """
    limit, notes = most_tokens(net, options)
    starts = [round(i * len(text) / options.samples) for i in range(options.samples)]
    text += after
    begins = [_word_start(text, start) for start in starts]
    cut = [(start, text[start : start + LETTERS_PER_TOKEN * limit]) for start in begins]
    parts = [(start, part) for start, part in cut if part.strip()]
    x = [_tokens(part, net, limit, origin) for _, part in parts]
    return x, [Origin(f"character {start + 1}", beginning(part)) for start, part in parts], notes


def tokenize(
    texts: Sequence[Text],
    net: Intake,
    options: DataOptions,
    places: Sequence[str],
    *,
    origin: str,
) -> tuple[list[Tensor], tuple[Note, ...]]:
    """Tokenize texts, or pairs of texts, and say how many were cut."""
    reader = _Reader(net, options, origin)
    tokens = [reader.tokens(text, place) for text, place in zip(texts, places, strict=True)]
    return tokens, reader.notes()


class _Reader:
    """Turns texts to token ids of at most as many as there may be, and counts those it cuts."""

    def __init__(self, net: Intake, options: DataOptions, origin: str) -> None:
        self.net, self.origin = net, origin
        self.limit, self.limited = most_tokens(net, options)
        self.read = self.cut = 0

    def tokens(self, text: Text, place: str = "") -> Tensor:
        origin = f"{self.origin}: {place}" if place else self.origin
        # one token more than allowed tells a text that was cut from one that just fits
        tokens = _tokens(text, self.net, self.limit + 1, origin)
        self.read += 1
        if len(tokens) <= self.limit:
            return tokens
        self.cut += 1
        return _tokens(text, self.net, self.limit, origin)

    def notes(self) -> tuple[Note, ...]:
        if not self.cut:
            return self.limited
        text = f"{self.cut} of {self.read} texts were cut to {self.limit} tokens (--max-tokens)"
        return (*self.limited, warning("text-cut", text))


def most_tokens(net: Intake, options: DataOptions) -> tuple[int, tuple[Note, ...]]:
    """Return the most tokens of a sample: what was asked for, or what the model can take."""
    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens {options.max_tokens} leaves nothing", "Give at least 1.")
    most = net.sample_shape[0]
    if options.max_tokens <= most or options.max_tokens == DataOptions.max_tokens:
        return min(options.max_tokens, most), ()
    text = f"the model takes at most {most} tokens, not {options.max_tokens}"
    return most, (warning("max-tokens", text),)


def _tokens(text: Text, net: Intake, limit: int, origin: str) -> Tensor:
    if net.tokenize is None:
        raise InputError(
            f"{origin} holds text, and the model came without a tokenizer",
            "Put tokenizer.json beside config.json, or give token ids as an .npz file.",
        )
    if isinstance(text, str):
        tokens = net.tokenize(text, limit)
    elif net.tokenize_pair is None:
        raise InputError(
            f"{origin} holds pairs of texts, and how the model joins two is not known",
            "Read one of them alone with --text-column, or give token ids as an .npz file.",
        )
    else:
        tokens = net.tokenize_pair(*text, limit)
    if not tokens:
        shown = text if isinstance(text, str) else text[0]
        raise InputError(
            f"{origin}: {shown[:40]!r} has no tokens",
            "Remove empty texts, or leave them out with --skip-bad.",
        )
    return torch.as_tensor(tokens, dtype=torch.int64)


def _word_start(text: str, position: int) -> int:
    """Move on to the first word that begins at a position or after it."""
    while 0 < position < len(text) and not text[position - 1].isspace():
        position += 1
    return position
