"""What a tokenizer gives a model: token ids of a text or of two, and the type of every token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lipaudit.errors import InputError

ORDINARY = -1
"""Stands for the id of every token that the tokenizer did not put around the texts."""


class Feed:
    """A tokenizer in front of a model.

    Types of tokens follow from the ids: a type belongs to a stretch between separators, of one
    text or of two, and within it to a special id. The rules are read off two examples, and checked
    on every text.

    Attributes:
        pairs: whether the types of a pair of texts follow from its ids, or the model takes none.
        rules: (of a pair, separators before, special id or `ORDINARY`) -> type; None where the
            model takes no types, or the tokenizer returns none.
    """

    def __init__(self, module: Any, tokenizer: Any, size: int) -> None:
        """Read the rules.

        Args:
            module: the model.
            tokenizer: a tokenizer of transformers.
            size: how many ids the model has an embedding for.
        """
        self.tokenizer, self.size = tokenizer, size
        self.separator: int | None = getattr(tokenizer, "sep_token_id", None)
        one, two = self._encoded("a"), self._encoded("a", "b")
        self.rules = _rules(one, self.separator, pair=False) if _takes_types(module, one) else None
        self.pairs, self.separators = True, 0
        if self.rules is not None:
            self.separators = list(two["input_ids"]).count(self.separator)
            differs = self.separators > list(one["input_ids"]).count(self.separator)
            both = _rules(two, self.separator, pair=differs)
            self.pairs = both is not None and all(
                both.get(key, kind) == kind for key, kind in self.rules.items()
            )
            self.rules |= both if both is not None and self.pairs else {}

    def one(self, text: str, most: int) -> list[int]:
        """Return the ids of a text, cut to a number of tokens."""
        return self._ids(text, most=most)

    def two(self, first: str, second: str, most: int) -> list[int]:
        """Return the ids of two texts that are read together, cut to a number of tokens."""
        return self._ids(first, second, most=most)

    def types(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the types of tokens as the model takes them; nothing where it takes none."""
        if self.rules is None:
            return {}
        ends = (x == self.separator).long() if self.separator is not None else torch.zeros_like(x)
        ends = ends if mask is None else ends * mask
        before, types = ends.cumsum(1) - ends, torch.zeros_like(x)
        pair = (ends.sum(1, keepdim=True) >= self.separators) & any(key[0] for key in self.rules)
        for (two, section, special), kind in sorted(self.rules.items(), key=lambda r: r[0][2]):
            here = (pair == two) & (before == section)
            here = here if special == ORDINARY else here & (x == special)
            types = torch.where(here, kind, types)
        return {"token_type_ids": types}

    def _encoded(self, *texts: str) -> Mapping[str, Any]:
        known = inspect.signature(self.tokenizer.__call__).parameters
        marks = (
            {"return_special_tokens_mask": True} if "return_special_tokens_mask" in known else {}
        )
        encoded: Mapping[str, Any] = self.tokenizer(*texts, **marks)
        return encoded

    def _ids(self, *texts: str, most: int) -> list[int]:
        encoded = self.tokenizer(*texts, truncation=True, max_length=most)
        ids = list(encoded["input_ids"])
        if ids and max(ids) >= self.size:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise InputError(
                f"the tokenizer has {len(self.tokenizer)} tokens and the model embeddings for "
                f"{self.size}: {texts[0][:40]!r} holds {token!r}, id {max(ids)}",
                "Use the tokenizer that the model was trained with, or enlarge its embedding "
                "(resize_token_embeddings) and train it.",
            )
        if self.rules is not None and ids:
            types = self.types(torch.tensor([ids]))["token_type_ids"][0].tolist()
            if types != list(encoded["token_type_ids"]):
                raise InputError(
                    f"the types of the tokens of {texts[0][:40]!r} do not follow from their ids",
                    "Does it hold special tokens, such as [SEP], as words? Remove them.",
                )
        return ids


def _takes_types(module: Any, encoded: Mapping[str, Any]) -> bool:
    """Say whether a tokenizer returns types of tokens, and a model looks at them."""
    sizes = getattr(module.config, "type_vocab_size", None)
    takes = "token_type_ids" in inspect.signature(module.forward).parameters
    return "token_type_ids" in encoded and takes and sizes != 1


def _rules(
    encoded: Mapping[str, Any], separator: int | None, *, pair: bool
) -> dict[tuple[bool, int, int], int] | None:
    """Read off an example which type a token has; None where one rule would give two."""
    rules: dict[tuple[bool, int, int], int] = {}
    section = 0
    ids = encoded["input_ids"]
    marks = encoded.get("special_tokens_mask") or [0] * len(ids)
    for token, kind, mark in zip(ids, encoded["token_type_ids"], marks, strict=True):
        if rules.setdefault((pair, section, token if mark else ORDINARY), kind) != kind:
            return None
        section += token == separator
    return rules
