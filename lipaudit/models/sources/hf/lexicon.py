"""What a tokenizer tells of its token ids: which are words, how they are spelled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from lipaudit.attacks.text.rewrite import BEGINS, FIXED, GOES_ON, NOWHERE, Lexicon, Span

READINGS = 2**14
"""Texts of which the token ids are remembered."""
GOES_ON_MARK = "##"
"""WordPiece writes it before what goes on with a word."""
BEGINS_MARKS = ("\u0120", "\u2581")
"""Byte-level BPE and SentencePiece write one of them before what begins a word."""


def lexicon(tokenizer: Any, vocabulary: int) -> Lexicon:
    """Read the vocabulary of a tokenizer of transformers that says where its tokens stand.

    Special ids, ids that the tokenizer does not know, and what has no letter or digit (signs,
    single bytes) are fixed. In a vocabulary without marks every id is a word. Spelled texts have
    no special tokens but that of unknown words.
    """
    count = min(vocabulary, len(tokenizer))
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(range(count)))]
    mark = _mark(tokenizer)
    kinds = [_kind(token, mark) for token in tokens]
    for special in (*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder):
        if special < count:
            kinds[special] = FIXED
    kinds += [FIXED] * (vocabulary - count)
    special = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def spell(ids: Sequence[int]) -> str:
        shown = [token for token in ids if token not in special]
        return str(tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    @lru_cache(maxsize=READINGS)
    def read(texts: tuple[str, ...], most: int) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        encoded = tokenizer(*texts, truncation=True, max_length=most, return_offsets_mapping=True)
        stands = zip(encoded.sequence_ids(0), encoded["offset_mapping"], strict=True)
        spans = [_bare(texts, piece, *span) for piece, span in stands]
        return tuple(encoded["input_ids"]), tuple(spans)

    def write(token: int) -> str:
        text = tokens[token].removeprefix(mark) if mark and mark not in BEGINS_MARKS else ""
        text = text or spell([token]).strip()
        return "" if "\ufffd" in text else text

    return Lexicon(
        torch.tensor(kinds),
        spell,
        lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        special,
        tokens,
        read,
        write,
    )


def _bare(texts: Sequence[str], piece: int | None, start: int, end: int) -> Span:
    """Return the span of a token without the space around it."""
    if piece is None:
        return NOWHERE
    token = texts[piece][start:end]
    left = start + len(token) - len(token.lstrip())
    return piece, left, max(left, start + len(token.rstrip()))


def _mark(tokenizer: Any) -> str | None:
    """Return the mark of a tokenizer's kind: WordPiece, byte-level BPE, SentencePiece or none."""
    kind = json.loads(tokenizer.backend_tokenizer.to_str())
    if kind["model"].get("type") == "WordPiece":
        return str(kind["model"].get("continuing_subword_prefix") or GOES_ON_MARK)
    decoder = json.dumps(kind.get("decoder"), ensure_ascii=False)
    byte_level, sentence_piece = BEGINS_MARKS
    if "ByteLevel" in decoder:
        return byte_level
    return sentence_piece if sentence_piece in decoder else None


def _kind(token: str, mark: str | None) -> int:
    plain = token.removeprefix(mark or "")
    reserved = plain.startswith(("[", "<")) and plain.endswith(("]", ">"))  # [unused1], <0x0A>
    if reserved or not any(letter.isalnum() for letter in plain):
        return FIXED
    if mark is None or token.startswith(mark) == (mark in BEGINS_MARKS):
        return BEGINS
    return GOES_ON
