"""Pairs of texts: how a tokenizer joins two, and to which of them a token belongs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """How a model reads two texts together.

    Attributes:
        tokenize: two texts -> token ids of both, cut to a number of tokens; None where it is not
            known how to tell the model which is which.
        segments: token ids -> 0 in the first text and 1 in the second, for a model that is told.
    """

    tokenize: Callable[[str, str, int], list[int]] | None = None
    segments: Callable[[Tensor], Tensor] | None = None


def pairs(module: Any, tokenizer: Any) -> Pairs:
    """Find out how a pair is joined, by joining one."""
    if tokenizer is None:
        return Pairs()

    def tokenize(first: str, second: str, most: int) -> list[int]:
        return list(tokenizer(first, second, truncation=True, max_length=most)["input_ids"])

    joined = tokenizer("a", "b")
    marked = joined.get("token_type_ids") or []
    if not _told(module) or not any(marked):
        return Pairs(tokenize)
    found = _segments(torch.tensor([joined["input_ids"]]), tokenizer.sep_token_id)
    if found[0].tolist() != list(marked):
        return Pairs()
    return Pairs(tokenize, lambda x: _segments(x, tokenizer.sep_token_id))


def _told(module: Any) -> bool:
    """Say whether a model looks at which text a token belongs to."""
    kinds = getattr(module.config, "type_vocab_size", None) or 0
    return kinds > 1 and "token_type_ids" in inspect.signature(module.forward).parameters


def _segments(x: Tensor, separator: int | None) -> Tensor:
    """1 behind the first separator, up to and with the last."""
    if separator is None:
        return torch.zeros_like(x)
    ends = (x == separator).long()
    before, left = ends.cumsum(1) - ends, ends.flip(1).cumsum(1).flip(1)
    return ((before > 0) & (left > 0)).long()
