"""Texts as token ids: windows of a plain file, and the encoding of one text or a pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipaudit.data.batch import DataOptions, SampleOrigin, Samples, make_batch
from lipaudit.errors import InputError, UsageError, explain_failure
from lipaudit.tables import Note, Notes

if TYPE_CHECKING:
    from lipaudit.models.net import Net

# More characters than a token usually has: a window of a text has enough of them.
LETTERS_PER_TOKEN = 16
# Number of characters of a text that identify it in messages.
SHOWN = 120


def shorten(texts: Sequence[str]) -> str:
    """Return the beginning of a text, or of a pair of texts, on one line."""
    words = " | ".join(texts).split()
    line = " ".join(words)
    if len(line) <= SHOWN:
        return line
    return f"{line[:SHOWN]}..."


def is_empty(value: object) -> bool:
    """Return whether a field has no text: None, blanks, or the NaN that pandas writes."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or not str(value).strip()


def read_text(path: Path, net: Net, options: DataOptions) -> Samples:
    """Read a plain text file as samples: windows of the text, evenly spread (`cut_windows`)."""
    with explain_failure(f"{path} is not a readable text file", "Save it as UTF-8.", Exception):
        text = path.read_text("utf-8-sig")  # without the byte order mark of Windows
    if not text.strip():
        raise InputError(f"{path} is empty", "Give a file with some text.")
    x, origins, notes = cut_windows(text, net, options, origin=str(path))
    remark = (
        f"{path} is read as one long text and cut into {len(x)} windows. For one sample per "
        "line, give a .jsonl, or a .csv with the header `text`"
    )
    notes += (Note.info("one-stream", remark),)
    return Samples(make_batch(x, net), notes, origins=tuple(origins))


def cut_windows(
    text: str, net: Net, options: DataOptions, *, origin: str, after: str = ""
) -> tuple[list[Tensor], list[SampleOrigin], Notes]:
    """Return up to as many windows of a text as samples are requested, evenly spread, as ids.

    The text is cut into equal parts. A window begins with the first word that begins in a part,
    and has up to `max_tokens` tokens, special ones included. Parts whose first word is the
    same give one window.

    Args:
        text: the text.
        net: the model, with a tokenizer.
        options: number of samples, and largest number of tokens of a sample.
        origin: name of the data in messages.
        after: a text to append, so that the last windows are as long as the other windows.

    Returns:
        The ids of each window, its place in the text, and notes.
    """
    limit, notes = limit_tokens(net, options)
    # The parts cover the whole text equally, from its beginning to its end.
    starts = [round(i * len(text) / options.samples) for i in range(options.samples)]
    text += after
    x = []
    origins = []
    begun = set[int]()  # where windows begin
    for start in starts:
        # Inside a word: go on to the beginning of the next word.
        while 0 < start < len(text) and not text[start - 1].isspace():
            start += 1
        if start in begun:  # the same window again would count as a further sample
            continue
        begun.add(start)
        # Tokenizers are slow: they get more letters than `limit` tokens need, not the whole text.
        window = text[start : start + LETTERS_PER_TOKEN * limit]
        if is_empty(window):
            continue
        x.append(encode((window,), net, limit, origin))
        origins.append(SampleOrigin(f"character {start + 1}", shorten((window,))))
    return x, origins, notes


def limit_tokens(net: Net, options: DataOptions) -> tuple[int, Notes]:
    """Return the largest number of tokens of a sample, and notes.

    The number is --max-tokens or the limit of the model, whichever is smaller. A note warns if the
    limit of the model is smaller than a number given by the user.
    """
    requested = options.max_tokens
    limit = net.input_shape[0]
    if requested < 1:
        raise UsageError(f"--max-tokens {requested} leaves nothing", "Give at least 1.")
    if requested <= limit:
        return requested, ()
    if requested == DataOptions.max_tokens:  # the default needs no note
        return limit, ()
    text = f"the model takes at most {limit} tokens, not {requested}"
    return limit, (Note.warn("max-tokens", text),)


def note_cut(are_cut: Sequence[bool], how: str) -> Notes:
    """Return a warning about texts that were cut to a number of tokens; no notes without any.

    Args:
        are_cut: whether each text was cut.
        how: the end of the sentence "3 of 10 ...", such as "texts were cut to 128 tokens".
    """
    cut = sum(are_cut)
    if not cut:
        return ()
    text = f"{cut} of {len(are_cut)} {how} (--max-tokens)"
    return (Note.warn("text-cut", text),)


def encode(texts: tuple[str, ...], net: Net, limit: int, origin: str) -> Tensor:
    """Return the token ids of a text, or of a pair that the model reads together.

    Args:
        texts: the text, or the two texts of a pair.
        net: the model, with its tokenizer.
        limit: largest number of tokens.
        origin: name of the data in messages.

    Raises:
        InputError: the model has no tokenizer for this, or the text has no tokens.
    """
    first, *others = texts
    if not others and net.tokenize is not None:
        tokens = net.tokenize(first, limit)
    elif len(others) == 1 and net.tokenize_pair is not None:
        tokens = net.tokenize_pair(first, others[0], limit)
    else:
        what = "a pair of texts" if others else "text"
        raise InputError(
            f"{origin} holds {what}, and the model has no tokenizer for it",
            "Put tokenizer.json beside config.json, read one column with --text-column, or give "
            "token ids as an .npz file.",
        )
    if not tokens:
        raise InputError(
            f"{origin}: {first[:40]!r} has no tokens",
            "Remove empty texts, or leave them out with --skip-bad.",
        )
    return torch.as_tensor(tokens, dtype=torch.int64)
