"""Text: tables with a text column, and plain files cut into windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipaudit.data.batch import SampleOrigin
from lipaudit.data.samples import (
    DataOptions,
    Samples,
    draw,
    make_samples,
    match_labels,
    note_left_out,
    remark,
    warning,
)
from lipaudit.data.tables import (
    TableRow,
    check_row,
    choose_label_column,
    choose_text_columns,
    list_columns,
    read_rows,
)
from lipaudit.errors import InputError, UsageError
from lipaudit.tables import Note

if TYPE_CHECKING:
    from lipaudit.models.net import Net

Text = str | tuple[str, str]
"""A text, or a pair of texts that the model reads together."""
LETTERS_PER_TOKEN = 16
SHOWN = 120
"""Number of characters of a text that identify it in messages."""


def read_table(path: Path, net: Net, options: DataOptions) -> Samples:
    """Read a table with a column of texts (or two of pairs) and optionally one of labels.

    Labels are class names or class numbers of the model.

    Raises:
        InputError: the table is damaged or empty, lacks a column, or has labels unknown to the
            model.
    """
    origin = str(path)
    rows, notes = leave_out_faulty(read_rows(path), options, origin)
    columns = list_columns(rows)
    text = choose_text_columns(columns, options, origin=origin)
    label = choose_label_column(columns, options, origin=origin)
    needed = None if net.classes is None else label
    rows, more = leave_out_faulty([check_row(row, text, needed) for row in rows], options, origin)
    labels: list[int] | None = None
    remarks: tuple[Note, ...] = ()
    others = ", ".join(name for name in columns if name not in text)
    if needed is not None:
        values, places = [row.values[needed] for row in rows], [row.place for row in rows]
        labels, remarks = match_labels(values, net, places, origin=origin)
    elif label is not None:
        said = f"the labels of {origin} ({label}) are not used: the model has no classes"
        remarks = (remark("labels-unused", said),)
    elif net.classes is not None and others:
        said = f"{origin} has no column called label: --label-column names one ({others})"
        remarks = (remark("no-label-column", said),)
    samples = draw_texts(rows, text, labels, net, options, origin=origin)
    return replace(samples, notes=notes + more + samples.notes + remarks)


def draw_texts(
    rows: Sequence[TableRow],
    columns: Sequence[str],
    labels: Sequence[int] | None,
    net: Net,
    options: DataOptions,
    *,
    origin: str,
) -> Samples:
    """Draw texts, or pairs of texts, from the rows of a table.

    Args:
        rows: all rows.
        columns: the text column, or the two columns of pairs.
        labels: labels of all rows, or None.
        net: the model.
        options: number of samples, seed and largest length.
        origin: name of the table in messages.

    Raises:
        InputError: one cannot be read; with `skip_bad`, none can.
    """
    limit, notes = limit_tokens(net, options)

    def read(i: int) -> tuple[TableRow, Text, Tensor]:
        row = check_row(rows[i], columns)
        require_sound(row, origin)
        text = join_row(row.values, columns)
        # One token more than allowed distinguishes a text that is cut from one that just fits.
        return row, text, _encode(text, net, limit + 1, f"{origin}: {row.place}")

    drawn, skipped = draw(len(rows), options, read, what="texts")
    chosen, texts, tokens = zip(*(sample for _, sample in drawn), strict=True)
    x = [
        _encode(t, net, limit, origin) if len(ids) > limit else ids
        for t, ids in zip(texts, tokens, strict=True)
    ]
    if cut := sum(len(ids) > limit for ids in tokens):
        text = f"{cut} of {len(drawn)} texts were cut to {limit} tokens (--max-tokens)"
        notes += (warning("text-cut", text),)
    return make_samples(
        x,
        net,
        None if labels is None else [labels[i] for i, _ in drawn],
        texts=texts,
        limit=limit,
        notes=skipped + notes + _note_pairs(net, columns),
        origins=[SampleOrigin(row.name, shorten(t)) for row, t in zip(chosen, texts, strict=True)],
    )


def join_row(values: Mapping[str, Any], columns: Sequence[str]) -> Text:
    """Return the text of a row, or its two texts."""
    first, *second = (str(values[name]) for name in columns)
    return (first, second[0]) if second else first


def shorten(text: Text) -> str:
    """Return the beginning of a text, or of a pair, on one line."""
    whole = text if isinstance(text, str) else " | ".join(text)
    line = " ".join(whole.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def require_sound(row: TableRow, origin: str) -> None:
    """Refuse a row that cannot be read.

    Raises:
        InputError: the message gives place and fault.
    """
    if row.fault:
        raise InputError(
            f"{origin}: {row.place} {row.fault}",
            "Correct it, or leave such rows out with --skip-bad.",
        )


def leave_out_faulty(
    rows: Sequence[TableRow], options: DataOptions, origin: str
) -> tuple[list[TableRow], tuple[Note, ...]]:
    """Return the readable rows; refuse the others, or with `skip_bad` leave them out.

    Raises:
        InputError: one cannot be read; with `skip_bad`, none can.
    """
    for row in rows if not options.skip_bad else ():
        require_sound(row, origin)
    faults = [f"{row.place} {row.fault}" for row in rows if row.fault]
    if len(faults) == len(rows):
        raise InputError(f"{origin}: no row can be read ({faults[0]})", "Correct the file.")
    return [row for row in rows if not row.fault], note_left_out(faults, "rows")


def _note_pairs(net: Net, columns: Sequence[str]) -> tuple[Note, ...]:
    """Note if a tokenizer puts nothing between the two texts of a pair."""
    if len(columns) < 2 or net.tokenize is None or net.tokenize_pair is None:
        return ()
    # Pairs that begin alike share ids up to the separator; without one, only up to the text.
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


def read_text(path: Path, net: Net, options: DataOptions) -> Samples:
    """Cut a plain file into equal parts and use the beginning of each (see `cut_windows`)."""
    notes: tuple[Note, ...] = ()
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        text = path.read_text("latin-1")
        notes = (remark("latin-1", f"{path} is not UTF-8 and was read as Latin-1"),)
    if not text.strip():
        raise InputError(f"{path} is empty", "Give a file with some text.")
    x, origins, more = cut_windows(text, net, options, origin=str(path))
    said = (
        f"{path} is read as one long text and cut into {len(x)} windows. For one sample per "
        "line, give a .jsonl, or a .csv with the header `text`"
    )
    said_of_all = (*notes, *more, remark("one-stream", said))
    return make_samples(x, net, notes=said_of_all, origins=origins)


def cut_windows(
    text: str, net: Net, options: DataOptions, *, origin: str, after: str = ""
) -> tuple[list[Tensor], list[SampleOrigin], tuple[Note, ...]]:
    """Return windows of a text, evenly spread, as many as samples are requested, with places.

    The text is cut into equal parts. A sample is the first `max_tokens` tokens from the first word
    that begins in a part, special tokens included. The last samples may be shorter, unless `after`
    adds more text.
    """
    limit, notes = limit_tokens(net, options)
    # Equal parts of the whole text: its end is as likely as its beginning.
    starts = [round(i * len(text) / options.samples) for i in range(options.samples)]
    text += after
    parts = []
    for start in starts:
        while 0 < start < len(text) and not text[start - 1].isspace():
            start += 1
        part = text[start : start + LETTERS_PER_TOKEN * limit]
        if part.strip():
            parts.append((start, part))
    x = [_encode(part, net, limit, origin) for _, part in parts]
    origins = [SampleOrigin(f"character {start + 1}", shorten(part)) for start, part in parts]
    return x, origins, notes


def limit_tokens(net: Net, options: DataOptions) -> tuple[int, tuple[Note, ...]]:
    """Return the largest number of tokens of a sample: the option's, or the model's limit."""
    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens {options.max_tokens} leaves nothing", "Give at least 1.")
    most = net.input_shape[0]
    if options.max_tokens <= most or options.max_tokens == DataOptions.max_tokens:
        return min(options.max_tokens, most), ()
    text = f"the model takes at most {most} tokens, not {options.max_tokens}"
    return most, (warning("max-tokens", text),)


def _encode(text: Text, net: Net, limit: int, origin: str) -> Tensor:
    if net.tokenize is None:
        raise InputError(
            f"{origin} holds text, and the model has no tokenizer",
            "Put tokenizer.json beside config.json, or give token ids as an .npz file.",
        )
    if isinstance(text, str):
        tokens = net.tokenize(text, limit)
    elif net.tokenize_pair is None:
        raise InputError(
            f"{origin} holds pairs of texts, and the model has no tokenizer that joins two texts",
            "Read one column with --text-column, or give token ids as an .npz file.",
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
