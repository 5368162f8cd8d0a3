"""Changing texts a little: what a text is made of, how the model reads it, and a greedy search.

A text is a row of token ids, cut into words. Token ids that belong to no word (special ones,
punctuation, padding) stay where they are, whatever an attack does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lipaudit.attacks.oracle import Meter, margins, pull
from lipaudit.attacks.turn import Turn
from lipaudit.errors import EvaluationError

FIXED, BEGINS, GOES_ON = 0, 1, 2
"""What a token id is: never changed nor put in, the first of a word, or a further one of it."""
DIGITS = 5
"""Decimal places of a margin that decide between two changes; what is behind them is rounding."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Lexicon:
    """What is known of a vocabulary.

    Attributes:
        kinds: FIXED, BEGINS or GOES_ON for every token id.
        spell: ids -> text; None where there is no tokenizer that could.
        encode: a piece of text -> ids without special ones; None likewise.
        special: ids that stand around texts, and between two that are read as a pair.
        tokens: how the vocabulary writes every token id, marks of its own included; or nothing.
    """

    kinds: Int[Tensor, " vocabulary"]
    spell: Callable[[Sequence[int]], str] | None = None
    encode: Callable[[str], list[int]] | None = None
    special: frozenset[int] = frozenset()
    tokens: Sequence[str] = ()

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Write token ids as a text, or as the two of a pair."""
        runs = groupby(ids, key=self.special.__contains__)
        pieces = [self.text(list(run)) for outside, run in runs if not outside]
        return pieces if len(pieces) == 2 else [self.text(ids)]

    def text(self, ids: Sequence[int]) -> str:
        """Write token ids as text, or as numbers where they cannot be spelled."""
        return " ".join(map(str, ids)) if self.spell is None else self.spell(ids).strip()

    def read_again(self, ids: Sequence[int]) -> Ids:
        """Return the ids of a text, or of a pair, tokenized from its characters."""
        if self.spell is None or self.encode is None:
            return tuple(ids)
        runs = ((special, list(run)) for special, run in groupby(ids, self.special.__contains__))
        pieces = [run if special else self.encode(self.spell(run)) for special, run in runs]
        return tuple(token for piece in pieces for token in piece)

    def name(self, token: int) -> str:
        """Write one token id for people: as text, or where that shows nothing, as it is kept."""
        kept = self.tokens[token] if token < len(self.tokens) else str(token)
        spelled = "" if self.spell is None else self.spell([token]).strip()
        return kept if not spelled or "\ufffd" in spelled else spelled

    def words(self, ids: Sequence[int]) -> tuple[Ids, ...]:
        """Cut a text into words; every fixed id is a piece of its own."""
        words: list[list[int]] = []
        before = FIXED
        for token, kind in zip(ids, self.kinds[list(ids)].tolist(), strict=True):
            if kind == GOES_ON and before != FIXED:
                words[-1].append(token)
            else:
                words.append([token])
            before = kind
        return tuple(map(tuple, words))

    def fixed(self, word: Sequence[int]) -> bool:
        """Tell whether a piece of a text is no word, and to be left alone."""
        return int(self.kinds[word[0]]) == FIXED


@dataclass(frozen=True)
class Draft:
    """A text, word by word, and what was changed of it.

    Attributes:
        words: token ids of each word (or fixed piece), in order.
        changed: which word each change was made to.
        spelled: words as they are written now, where that was changed.
    """

    words: tuple[Ids, ...]
    changed: tuple[int, ...] = ()
    spelled: tuple[tuple[int, str], ...] = ()

    @property
    def ids(self) -> Ids:
        """The text as token ids."""
        return tuple(token for word in self.words for token in word)

    def with_word(self, i: int, word: Ids, spelled: str | None = None) -> Draft:
        """Return the text with another word in place of one: one change more."""
        words = (*self.words[:i], word, *self.words[i + 1 :])
        kept = tuple(pair for pair in self.spelled if pair[0] != i)
        written = kept if spelled is None else (*kept, (i, spelled))
        return Draft(words, (*self.changed, i), written)


@dataclass(frozen=True)
class Reader:
    """How a model reads texts.

    Attributes:
        output: (ids, mask) -> logits, the mask being None where nothing is padded.
        point: (ids, mask) -> embeddings (batch, tokens, width).
        forward: (embeddings, ids, mask) -> logits, differentiable in the embeddings.
        table: the embedding of every token id.
        lexicon: what is known of the ids.
        most: the longest text that the model takes, in tokens.
        pad_id: the id that fills shorter texts.
        near: the neighbours of token ids, as they are asked for.
    """

    output: Callable[[Tensor, Tensor | None], Tensor]
    point: Callable[[Tensor, Tensor | None], Tensor]
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    table: Float[Tensor, "vocabulary width"]
    lexicon: Lexicon
    most: int
    pad_id: int = 0
    near: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def padded(self, texts: Sequence[Ids]) -> tuple[Tensor, Tensor | None]:
        """Return texts as one tensor of ids, and their mask if any is padded."""
        rows = [torch.tensor(ids, dtype=torch.int64) for ids in texts]
        x = pad_sequence(rows, batch_first=True, padding_value=self.pad_id)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        device = self.table.device
        return x.to(device), None if bool(mask.all()) else mask.to(device)


@dataclass(frozen=True)
class TextOracle:
    """The model on texts, in pieces that fit the device, counted.

    Attributes:
        reader: how the model reads texts.
        batch_size: the device batch size.
        meter: where passes are counted.
    """

    reader: Reader
    batch_size: int
    meter: Meter = field(default_factory=Meter)

    @torch.no_grad()
    def __call__(self, texts: Sequence[Ids]) -> Float[Tensor, "texts classes"]:
        """Return the logits of texts, from their token ids."""
        self.meter.forwards += len(texts)
        pieces = [self.reader.output(*self.reader.padded(part)) for part in self._pieces(texts)]
        return torch.cat(pieces)

    def slopes(
        self, texts: Sequence[Ids], y: Int[Tensor, " texts"]
    ) -> list[Float[Tensor, "tokens width"]]:
        """Return the gradient of each text's margin in the embeddings of its tokens."""
        self.meter.forwards += len(texts)
        self.meter.backwards += len(texts)
        slopes: list[Tensor] = []
        for part in self._pieces(texts):
            labels = y[len(slopes) : len(slopes) + len(part)]
            ids, mask = self.reader.padded(part)
            with torch.enable_grad():
                z = self.reader.point(ids, mask).requires_grad_()
                total = margins(self.reader.forward(z, ids, mask), labels).sum()
            gradient = pull((z, total), torch.ones_like(total))
            slopes += [row[: len(text)] for row, text in zip(gradient, part, strict=True)]
        return slopes

    def _pieces(self, texts: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
        return (texts[i : i + self.batch_size] for i in range(0, len(texts), self.batch_size))


Propose = Callable[[Draft, Tensor], Sequence[Draft]]
"""(a text, the slopes of its margin) -> the texts one change further that are to be tried."""


def search(
    oracle: TextOracle, drafts: Sequence[Draft], y: Tensor, budget: int, propose: Propose
) -> list[Draft]:
    """Change texts one by one, each time as the margin falls most, until it is negative.

    Every proposal is evaluated as it stands. Greedy: k changes are the first k of k + 1. A text
    that no proposal brings nearer to another class keeps what it has.
    """
    best = list(drafts)
    margin = margins(oracle([draft.ids for draft in best]), y).tolist()
    going = [i for i, value in enumerate(margin) if value >= 0]
    for _ in range(budget):
        slopes = oracle.slopes([best[i].ids for i in going], y[going]) if going else []
        tried = [list(propose(best[i], slope)) for i, slope in zip(going, slopes, strict=True)]
        going = [i for i, drafts in zip(going, tried, strict=True) if drafts]
        tried = [drafts for drafts in tried if drafts]
        if not going:
            break
        labels = y[going].repeat_interleave(torch.tensor([len(t) for t in tried], device=y.device))
        values = margins(oracle([d.ids for t in tried for d in t]), labels).tolist()
        for i, texts in zip(tuple(going), tried, strict=True):
            own, values = values[: len(texts)], values[len(texts) :]
            lowest = min(range(len(own)), key=lambda j: round(own[j], DIGITS))
            if own[lowest] >= margin[i] or own[lowest] < 0:
                going.remove(i)
            if own[lowest] < margin[i]:
                best[i], margin[i] = texts[lowest], own[lowest]
    return best


RewriteFunction = Callable[[TextOracle, list[Draft], Tensor, int, Turn], list[Draft]]
"""(oracle, drafts, y, budget, turn) -> drafts, as `AttackKind` describes it."""


def within(
    after: Sequence[Draft], before: Sequence[Draft], lexicon: Lexicon, budget: int, attack: str
) -> None:
    """Check that what an attack returned keeps to the budget, and leaves alone what is no word.

    Raises:
        EvaluationError: it does not.
    """
    for new, old in zip(after, before, strict=True):
        same = len(new.words) == len(old.words)
        differing = [i for i, word in enumerate(old.words) if same and new.words[i] != word]
        strange = set(differing) - set(new.changed)
        if not same or strange or any(lexicon.fixed(old.words[i]) for i in differing):
            raise EvaluationError(
                f"the attack {attack} changed what is no word, or did not say what it changed",
                "this is a fault of the attack: leave it out of --attack",
            )
        if len(new.changed) > budget:
            raise EvaluationError(
                f"the attack {attack} made {len(new.changed)} changes, {budget} were allowed",
                "this is a fault of the attack: leave it out of --attack",
            )
