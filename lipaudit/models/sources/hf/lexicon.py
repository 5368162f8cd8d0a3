"""What a tokenizer tells of its token ids: which are words, how they are spelled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from lipaudit.attacks.text.rewrite import BEGINS, FIXED, GOES_ON, Lexicon

GOES_ON_MARK = "##"
"""WordPiece writes it before what goes on with a word."""
BEGINS_MARKS = ("\u0120", "\u2581")
"""Byte-level BPE and SentencePiece write one of them before what begins a word."""


def lexicon(tokenizer: Any, vocabulary: int) -> Lexicon:
    """Read the vocabulary of a tokenizer of transformers.

    Special ids, ids that the tokenizer does not know, and what has no letter or digit (signs,
    single bytes) are fixed. In a vocabulary without marks every id is a word. Spelled texts have
    no special tokens but that of unknown words.
    """
    count = min(vocabulary, len(tokenizer))
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(range(count)))]
    kinds = [_kind(token, mark) for mark in [_mark(tokenizer, tokens)] for token in tokens]
    for special in (*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder):
        if special < count:
            kinds[special] = FIXED
    kinds += [FIXED] * (vocabulary - count)
    special = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def spell(ids: Sequence[int]) -> str:
        shown = [token for token in ids if token not in special]
        return str(tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    return Lexicon(
        torch.tensor(kinds),
        spell,
        lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        special,
        tokens,
    )


def _mark(tokenizer: Any, tokens: list[str]) -> str | None:
    """Return the mark of a tokenizer's kind: WordPiece, byte-level BPE, SentencePiece or none.

    Entries are looked at only where a tokenizer does not say its kind: a byte-level vocabulary may
    hold `####`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        kind = json.loads(backend.to_str())
        if kind["model"].get("type") == "WordPiece":
            return str(kind["model"].get("continuing_subword_prefix") or GOES_ON_MARK)
        decoder = json.dumps(kind.get("decoder"), ensure_ascii=False)
        byte_level, sentence_piece = BEGINS_MARKS
        if "ByteLevel" in decoder:
            return byte_level
        return sentence_piece if sentence_piece in decoder else None
    for mark in (GOES_ON_MARK, *BEGINS_MARKS):
        if any(token.startswith(mark) and len(token) > len(mark) for token in tokens):
            return mark
    return None


def _kind(token: str, mark: str | None) -> int:
    plain = token.removeprefix(mark or "")
    reserved = plain.startswith(("[", "<")) and plain.endswith(("]", ">"))  # [unused1], <0x0A>
    if reserved or not any(letter.isalnum() for letter in plain):
        return FIXED
    if mark is None or token.startswith(mark) == (mark in BEGINS_MARKS):
        return BEGINS
    return GOES_ON
