"""Typing errors: letters swapped, left out, put in or replaced, and the word tokenized anew.

The kinds of error are those of Gao et al., 2018 (DeepWordBug, arXiv 1801.04354) and TextBugger (Li
et al., 2019, arXiv 1812.05271); which of them is made is decided by evaluating them.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice, zip_longest

from jaxtyping import Float
from torch import Tensor

from lipaudit.attacks.text.rewrite import Draft, Lexicon, TextOracle, search
from lipaudit.attacks.turn import Turn
from lipaudit.errors import UsageError


def rewrite(
    oracle: TextOracle, drafts: list[Draft], y: Tensor, budget: int, turn: Turn
) -> list[Draft]:
    """Make at most `budget` typing errors in each text; deterministic.

    A step tries `queries` errors, drawn evenly from the words in the order in which the margin
    depends on them (the length of its slope, over the word's tokens). A single letter is left
    alone.

    Raises:
        UsageError: the model came without a tokenizer that can spell.
    """
    reader, queries = oracle.reader, turn.attack.queries
    lexicon = reader.lexicon
    if lexicon.read is None or lexicon.encode is None:
        raise UsageError(
            "characters needs a tokenizer that spells its tokens, and the model has none",
            "put the tokenizer's files beside config.json, or leave characters out",
        )
    typist = _Typist(lexicon)

    def propose(draft: Draft, slope: Tensor) -> Sequence[Draft]:
        errors = filter(reader.read, typist.errors(draft, slope))
        return list(islice(errors, queries))

    return search(oracle, drafts, y, budget, propose)


class _Typist:
    """Types words with an error, and remembers how they are tokenized."""

    def __init__(self, lexicon: Lexicon) -> None:
        assert lexicon.encode is not None
        encode = lexicon.encode
        self.lexicon = lexicon
        self.encode = cache(lambda text: tuple(encode(text)))

    def errors(self, draft: Draft, slope: Float[Tensor, "tokens width"]) -> Iterator[Draft]:
        """Yield the text with each error that can be made, words taking turns."""
        if draft.source is None:
            return
        texts, source = dict(draft.spelled), draft.source
        order = [i for i in _by_slope(draft, slope) if not self.lexicon.fixed(draft.words[i])]
        words = [(i, texts.get(i) or source.word(i)) for i in order]
        words = [(i, text) for i, text in words if len(text) > 1]
        letters = _letters("".join(text for _, text in words))
        lists = [[(i, error) for error in _errors(text, letters)] for i, text in words]
        for turn in zip_longest(*lists):
            for i, error in filter(None, turn):
                yield draft.with_word(i, self.encode(source.space(i) + error), error)


def _by_slope(draft: Draft, slope: Tensor) -> list[int]:
    """Return the words, the margin's steepest first."""
    lengths = iter(slope.norm(dim=1).tolist())
    steep = [sum(islice(lengths, len(word))) for word in draft.words]
    return sorted(range(len(steep)), key=lambda i: -steep[i])


def _letters(text: str) -> list[str]:
    """Return the letters to type: those of the text, and all of the Latin ones if it has any."""
    own = {letter for letter in text.lower() if letter.isalnum()}
    latin = set(string.ascii_lowercase)
    return sorted(own | latin if own & latin else own)


def _errors(word: str, letters: Sequence[str]) -> list[str]:
    """Return every word that one error makes of this one, in an order of its own.

    The order mixes kinds and places, and is the same on every machine: it comes from the word.
    """
    cuts = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    errors = {a + b[1] + b[0] + b[2:] for a, b in cuts if len(b) > 1}
    errors |= {a + b[1:] for a, b in cuts if b}
    errors |= {a + c + b[1:] for a, b in cuts if b for c in letters}
    errors |= {a + c + b for a, b in cuts for c in letters}
    order = sorted(errors - {word})
    random.Random(word).shuffle(order)
    return order
