"""Texts as attacks see them: words, their characters, and how a model reads them.

A text is a row of token ids, split into words. Attacks never change token ids that belong to no
word (special tokens, punctuation, padding). If the characters of a text are known, a change is
made in the characters, and the model reads the changed characters. `rewriting` has the attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lipaudit.attacks.balls import blame_attack
from lipaudit.attacks.oracle import Meter, Turn, margins, pull

# Kinds of token ids: fixed (never changed or inserted), first token of a word, later token of a
# word.
FIXED, BEGINS, GOES_ON = 0, 1, 2
# Margins are compared to this many decimal places; further digits are rounding noise.
DIGITS = 5

Ids = tuple[int, ...]
# Position of a token: index of the text in a pair, first character, and one past the last.
Span = tuple[int, int, int]
# Span of a special token that the tokenizer adds.
NOWHERE: Span = (0, 0, 0)


@dataclass(frozen=True)
class Source:
    """The characters that a text was tokenized from.

    Attributes:
        texts: the text, or the two of a pair.
        spans: per word, the positions of its tokens without the space around them.
        most: number of tokens after which the tokenizer cuts; one more than the model takes if the
            text was not cut.
    """

    texts: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]
    most: int

    def word(self, i: int) -> str:
        """Return the characters of a word."""
        piece, start, _ = self.spans[i][0]
        return self.texts[piece][start : self.spans[i][-1][2]]

    def cut(self, words: Iterable[tuple[int, str]]) -> tuple[str, ...]:
        """Return the texts with other characters for some words; all else stays."""
        texts = list(self.texts)
        for i, new in sorted(words, reverse=True):
            piece, start, _ = self.spans[i][0]
            texts[piece] = texts[piece][:start] + new + texts[piece][self.spans[i][-1][2] :]
        return tuple(texts)


@dataclass(frozen=True)
class Lexicon:
    """The vocabulary of a model.

    Attributes:
        kinds: FIXED, BEGINS or GOES_ON for every token id.
        spell: ids -> text; None without a tokenizer.
        encode: a piece of text -> ids without special tokens; None without a tokenizer.
        read: (a text or a pair, largest number of tokens) -> ids and the span of each token.
        write: id -> the characters that it adds to a word; None if they are not whole characters.
        special: ids around texts, and between the texts of a pair.
        tokens: the spelling of every token id with the vocabulary's marks, if known.
        marked: whether the vocabulary marks the beginnings of words; without marks, adjacent
            tokens form a word.
    """

    kinds: Int[Tensor, " vocabulary"]
    spell: Callable[[Sequence[int]], str] | None = None
    encode: Callable[[str], list[int]] | None = None
    special: frozenset[int] = frozenset()
    tokens: Sequence[str] = ()
    read: Callable[[tuple[str, ...], int], tuple[Ids, tuple[Span, ...]]] | None = None
    write: Callable[[int], str] = str
    marked: bool = True

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Write token ids as a text, or as a pair of texts."""
        runs = groupby(ids, key=self.special.__contains__)
        pieces = [self.text(list(run)) for outside, run in runs if not outside]
        return pieces if len(pieces) == 2 else [self.text(ids)]

    def text(self, ids: Sequence[int]) -> str:
        """Write token ids as text, or as numbers without a tokenizer."""
        return " ".join(map(str, ids)) if self.spell is None else self.spell(ids).strip()

    def draft(self, ids: Sequence[int], texts: tuple[str, ...], most: int) -> Draft:
        """Split a text into words, with the span of each in the characters if it can be found.

        Args:
            ids: the token ids.
            texts: the text, or the two of a pair; empty: the texts that the ids spell.
            most: largest number of tokens of the model.
        """
        written = texts or tuple(self.texts(ids))
        for limit in (most + 1, len(ids)):
            tokens, spans = self.read(written, limit) if self.read else ((), ())
            if tokens == tuple(ids):
                words, each = self.words(ids, spans), iter(spans)
                places = tuple(tuple(islice(each, len(word))) for word in words)
                return Draft(words, source=Source(written, places, limit))
        return Draft(self.words(ids))

    def name(self, token: int) -> str:
        """Write one token id for people: as text, or else in the vocabulary's spelling."""
        kept = self.tokens[token] if token < len(self.tokens) else str(token)
        spelled = "" if self.spell is None else self.spell([token]).strip()
        return kept if not spelled or "\ufffd" in spelled else spelled

    def words(self, ids: Sequence[int], spans: Sequence[Span] = ()) -> tuple[Ids, ...]:
        """Split a text into words; every fixed id is a separate piece.

        If the spans are known, a word ends at the first gap.
        """
        words: list[list[int]] = []
        before, end = FIXED, NOWHERE
        kinds = self.kinds[list(ids)].tolist()
        further = GOES_ON if self.marked or not spans else BEGINS
        for token, kind, span in zip(ids, kinds, spans or [NOWHERE] * len(ids), strict=True):
            if kind == further and before != FIXED and span[0] == end[0] and span[1] <= end[2]:
                words[-1].append(token)
            else:
                words.append([token])
            before, end = kind, span
        return tuple(map(tuple, words))

    def is_fixed(self, word: Sequence[int]) -> bool:
        """Say whether a piece of a text is not a word, and must not change."""
        return int(self.kinds[word[0]]) == FIXED


@dataclass(frozen=True)
class Draft:
    """A text as words, with the changes made to it.

    Attributes:
        words: token ids of each word (or fixed piece), in order.
        changed: the word of each change.
        spelled: the changed words as characters.
        source: the characters of the unchanged text, if known.
        tried: number of single changes that a search evaluated, over all its steps.
        possible: number of single changes that there were.
    """

    words: tuple[Ids, ...]
    changed: tuple[int, ...] = ()
    spelled: tuple[tuple[int, str], ...] = ()
    source: Source | None = None
    tried: int = 0
    possible: int = 0

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the characters of the text, or of the two of a pair; empty if unknown."""
        return () if self.source is None else self.source.cut(self.spelled)

    @property
    def ids(self) -> Ids:
        """Return the text as token ids, each word tokenized alone."""
        return tuple(token for word in self.words for token in word)

    def with_word(self, i: int, word: Ids, spelled: str | None = None) -> Draft:
        """Return the text with one word replaced: one more change."""
        words = (*self.words[:i], word, *self.words[i + 1 :])
        kept = tuple(pair for pair in self.spelled if pair[0] != i)
        written = kept if spelled is None else (*kept, (i, spelled))
        return Draft(words, (*self.changed, i), written, self.source)


@dataclass(frozen=True)
class Reader:
    """How a model reads texts.

    Attributes:
        output: (ids, mask) -> logits; the mask is None without padding.
        point: (ids, mask) -> embeddings (batch, tokens, width).
        forward: (embeddings, ids, mask) -> logits, differentiable in the embeddings.
        table: the embedding of every token id.
        lexicon: the vocabulary.
        most: largest number of tokens of the model.
        pad_id: the id that fills shorter texts.
        near: cache of the neighbours of token ids.
        reads_padding: whether the model reads padding; batches then have texts of one length only.
    """

    output: Callable[[Tensor, Tensor | None], Tensor]
    point: Callable[[Tensor, Tensor | None], Tensor]
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    table: Float[Tensor, "vocabulary width"]
    lexicon: Lexicon
    most: int
    pad_id: int = 0
    near: dict[int, Tensor] = field(default_factory=dict, compare=False)
    reads_padding: bool = False

    def read(self, draft: Draft, *, cut: bool = False) -> Ids:
        """Return the ids of a text, from its characters; empty if it is too long for the model.

        With `cut`, the tokenizer cuts it to what the model takes.
        """
        if draft.source is None or self.lexicon.read is None:
            return draft.ids
        ids, _ = self.lexicon.read(draft.texts, self.most if cut else draft.source.most)
        fits = 0 < len(ids) <= self.most and max(ids) < len(self.lexicon.kinds)
        return ids if fits else ()

    def pad(self, texts: Sequence[Ids]) -> tuple[Tensor, Tensor | None]:
        """Return texts as one tensor of ids, with a mask if any is padded."""
        rows = [torch.tensor(ids, dtype=torch.int64) for ids in texts]
        x = pad_sequence(rows, batch_first=True, padding_value=self.pad_id)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        device = self.table.device
        return x.to(device), None if bool(mask.all()) else mask.to(device)


@dataclass(frozen=True)
class TextOracle:
    """The model on texts, in pieces that fit the device, with a count of passes.

    Attributes:
        reader: how the model reads texts.
        batch_size: the device batch size.
        meter: counts the passes.
    """

    reader: Reader
    batch_size: int
    meter: Meter = field(default_factory=Meter)

    @torch.no_grad()
    def __call__(self, texts: Sequence[Ids]) -> Float[Tensor, "texts classes"]:
        """Return the logits of texts, from their token ids."""
        self.meter.forwards += len(texts)
        logits: dict[int, Tensor] = {}
        for rows in self._pieces(texts):
            batch = self.reader.pad([texts[i] for i in rows])
            logits |= zip(rows, self.reader.output(*batch), strict=True)
        return torch.stack([logits[i] for i in range(len(texts))])

    def slopes(
        self, texts: Sequence[Ids], y: Int[Tensor, " texts"]
    ) -> list[Float[Tensor, "tokens width"]]:
        """Return the gradient of each text's margin with respect to its token embeddings.

        Words tokenized alone may have more tokens than the model takes; tokens before the last one
        are then left out, without gradient.
        """
        whole, most = [len(ids) for ids in texts], self.reader.most
        texts = [ids if len(ids) <= most else (*ids[: most - 1], ids[-1]) for ids in texts]
        self.meter.forwards += len(texts)
        self.meter.backwards += len(texts)
        slopes: dict[int, Tensor] = {}
        for rows in self._pieces(texts):
            ids, mask = self.reader.pad([texts[i] for i in rows])
            with torch.enable_grad():
                z = self.reader.point(ids, mask).requires_grad_()
                total = margins(self.reader.forward(z, ids, mask), y[rows]).sum()
            gradient = pull((z, total), torch.ones_like(total))
            for i, slope in zip(rows, gradient, strict=True):
                own, left = slope[: len(texts[i])], whole[i] - len(texts[i])
                slopes[i] = torch.cat([own[:-1], own.new_zeros(left, own.shape[1]), own[-1:]])
        return [slopes[i] for i in range(len(texts))]

    def _pieces(self, texts: Sequence[Ids]) -> list[list[int]]:
        """Yield groups of texts to evaluate together: of one length if the model reads padding."""
        length = (lambda i: len(texts[i])) if self.reader.reads_padding else (lambda _: 0)
        runs = [[*run] for _, run in groupby(sorted(range(len(texts)), key=length), key=length)]
        size = self.batch_size
        return [run[i : i + size] for run in runs for i in range(0, len(run), size)]


# (oracle, drafts, y, budget, turn) -> drafts, as `AttackKind` describes it.
RewriteFunction = Callable[[TextOracle, list[Draft], Tensor, int, Turn], list[Draft]]


def check_drafts(
    after: Sequence[Draft], before: Sequence[Draft], lexicon: Lexicon, budget: int, attack: str
) -> None:
    """Check that the result of an attack respects the budget and changes only words.

    Raises:
        EvaluationError: the result breaks these rules.
    """
    for new, old in zip(after, before, strict=True):
        same = len(new.words) == len(old.words)
        differing = {i for i, word in enumerate(old.words) if same and new.words[i] != word}
        silent = differing - set(new.changed)
        if not same or silent or any(lexicon.is_fixed(old.words[i]) for i in differing):
            text = "changed something that is not a word, or did not report the change"
            raise blame_attack(attack, text)
        if old.source is not new.source or {i for i, _ in new.spelled} - set(new.changed):
            raise blame_attack(attack, "changed characters and did not report it")
        if len(new.changed) > budget:
            text = f"made {len(new.changed)} changes, but only {budget} are allowed"
            raise blame_attack(attack, text)
