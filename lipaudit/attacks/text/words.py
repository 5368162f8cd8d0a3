"""Words in place of words: near ones by the model's own embeddings, the steepest tried first.

The first-order choice of substitutes is that of HotFlip (Ebrahimi et al., 2018, arXiv 1712.06751);
that substitutes are nearest neighbours among word embeddings, and at most 50, that of Alzantot et
al., 2018 (arXiv 1804.07998) and TextFooler (Jin et al., 2020, arXiv 1907.11932), who take other
embeddings and check meaning and grammar. Nothing of the kind is checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.attacks.text.rewrite import FIXED, Draft, Lexicon, Reader, TextOracle, search
from lipaudit.attacks.turn import Turn

NEIGHBOURS = 50
"""How many substitutes a token has."""
BLOCK = 256
"""Tokens whose neighbours are looked for at a time."""


def rewrite(
    oracle: TextOracle, drafts: list[Draft], y: Tensor, budget: int, turn: Turn
) -> list[Draft]:
    """Replace at most `budget` words of each text, one token each; nothing about it is random.

    A step tries the `queries` substitutions, of words that were not changed yet, that lower the
    margin most to first order: slope . (e(substitute) - e(token)). Each is evaluated as it is.
    """
    reader, queries = oracle.reader, turn.attack.queries
    near = neighbours(reader, (token for draft in drafts for token in draft.ids))

    def propose(draft: Draft, slope: Tensor) -> Sequence[Draft]:
        return _steepest(reader, draft, slope, near, queries)

    return search(oracle, drafts, y, budget, propose)


def neighbours(reader: Reader, tokens: Iterable[int]) -> dict[int, Tensor]:
    """Return the nearest token ids of the same kind, by the cosine of their embeddings.

    A word begins with what begins words; what is fixed is no neighbour, and has none. They are
    looked for once, and kept by the reader.
    """
    kinds, table = reader.lexicon.kinds, reader.table
    own = sorted({t for t in tokens if int(kinds[t]) != FIXED} - reader.near.keys())
    lengths = table[: len(kinds)].norm(dim=1).clamp_min(torch.finfo(table.dtype).tiny)
    there, alike = kinds.to(table.device), kinds.bincount(minlength=FIXED + 1).tolist()
    for start in range(0, len(own), BLOCK):
        ids = torch.tensor(own[start : start + BLOCK], device=table.device)
        cosine = table[ids] @ table[: len(kinds)].T / lengths  # but for a factor of each row
        cosine[there[ids][:, None] != there] = -torch.inf
        cosine.scatter_(1, ids[:, None], -torch.inf)
        nearest = cosine.topk(min(NEIGHBOURS, len(kinds)), dim=1).indices
        for token, index in zip(own[start:], nearest, strict=False):
            reader.near[token] = index[: alike[int(kinds[token])] - 1]
    return reader.near


def _steepest(
    reader: Reader,
    draft: Draft,
    slope: Float[Tensor, "tokens width"],
    near: dict[int, Tensor],
    queries: int,
) -> list[Draft]:
    """Return the texts with one more word replaced whose margin falls most to first order."""
    places = [(i, j) for i, word in enumerate(draft.words) for j in range(len(word))]
    tokens, rises, where, what = draft.ids, [], [], []
    for position, (i, j) in enumerate(places):
        others = near.get(tokens[position])
        if others is None or i in draft.changed or not len(others):
            continue
        step = reader.table[others] - reader.table[tokens[position]]
        rises.append(step @ slope[position])
        where += [(i, j)] * len(others)
        what.append(others)
    if not rises:
        return []
    order = torch.cat(rises).argsort(stable=True)
    substitutes = torch.cat(what)[order].tolist()
    chosen = zip([where[k] for k in order.tolist()], substitutes, strict=True)
    drafts = (_replaced(draft, i, j, new, reader.lexicon) for (i, j), new in chosen)
    return list(islice(filter(None, drafts), queries))


def _replaced(draft: Draft, i: int, j: int, token: int, lexicon: Lexicon) -> Draft | None:
    """Put a token in place of another; None where no characters of a word say that."""
    word = (*draft.words[i][:j], token, *draft.words[i][j + 1 :])
    if draft.source is None:
        return draft.with_word(i, word)
    text = draft.source.replaced(i, j, lexicon.write(token))
    return draft.with_word(i, word, text) if text not in ("", draft.source.word(i)) else None
