"""Text: tokens of texts and pairs, and plain files cut into windows."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipaudit.data.batch import SampleOrigin
from lipaudit.data.samples import DataOptions, Samples, make_samples, remark, warning
from lipaudit.errors import InputError, UsageError
from lipaudit.tables import Note

if TYPE_CHECKING:
    from lipaudit.models.net import Net

LETTERS_PER_TOKEN = 16
SHOWN = 120
"""Number of characters of a text that identify it in messages."""


def shorten(texts: Sequence[str]) -> str:
    """Return the beginning of a text, or of a pair, on one line."""
    line = " ".join(" | ".join(texts).split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def note_pairs(net: Net, columns: Sequence[str]) -> tuple[Note, ...]:
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
    x = [encode((part,), net, limit, origin) for _, part in parts]
    origins = [SampleOrigin(f"character {start + 1}", shorten((part,))) for start, part in parts]
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


def encode(texts: tuple[str, ...], net: Net, limit: int, origin: str) -> Tensor:
    """Return the token ids of a text, or of a pair that the model reads together.

    Raises:
        InputError: the model has no tokenizer for this, or the text has no tokens.
    """
    if net.tokenize is None or (len(texts) > 1 and net.tokenize_pair is None):
        what = "a pair of texts" if len(texts) > 1 else "text"
        raise InputError(
            f"{origin} holds {what}, and the model has no tokenizer for it",
            "Put tokenizer.json beside config.json, read one column with --text-column, or give "
            "token ids as an .npz file.",
        )
    pair = net.tokenize_pair
    tokens = (
        pair(texts[0], texts[1], limit)
        if pair and len(texts) > 1
        else net.tokenize(texts[0], limit)
    )
    if not tokens:
        raise InputError(
            f"{origin}: {texts[0][:40]!r} has no tokens",
            "Remove empty texts, or leave them out with --skip-bad.",
        )
    return torch.as_tensor(tokens, dtype=torch.int64)
