"""Texts as attacks see them: words, their characters, and how a model reads them.

A text is a row of token ids, split into words. Attacks never change token ids that belong to no
word (special tokens, punctuation, padding). If the characters of a text are known, a change is
made in the characters, and the model reads the changed characters. `rewriting` has the attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lipaudit.attacks.balls import blame_attack
from lipaudit.attacks.oracle import Meter, Turn, list_pieces, margins, pull
from lipaudit.tables.columns import group_values

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from lipaudit.attacks.balls import Labels, Logits

    Slope = Float[Tensor, "tokens width"]

# Kinds of token ids: fixed (never changed or inserted), first token of a word, later token of a
# word.
FIXED, BEGINS, GOES_ON = 0, 1, 2

Ids = tuple[int, ...]
# Position of a token: index of the text in a pair, first character, and one past the last.
Span = tuple[int, int, int]
# Span of a special token that the tokenizer adds.
NOWHERE: Span = (0, 0, 0)


@dataclass(frozen=True)
class Continuations:
    """What a language model scores behind a prompt; attacks never change it.

    Attributes:
        texts: the continuations.
        tail: their token ids, as packed behind the prompt's (see `data.continuations.pack`).
        room: largest number of tokens of the prompt; a longer one loses its beginning.
        pack: prompt -> packed ids of the prompt and its continuations; empty if one of them has
            no tokens.
    """

    texts: tuple[str, ...]
    tail: Ids
    room: int
    pack: Callable[[str], Ids]


@dataclass(frozen=True)
class Source:
    """The characters that a text was tokenized from.

    Attributes:
        texts: the text, or the two of a pair.
        spans: per word, the positions of its tokens without the space around them.
        most: number of tokens after which the tokenizer cuts; one more than the model takes if the
            text was not cut.
        continuations: what follows the text, if it is a prompt.
    """

    texts: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]
    most: int
    continuations: Continuations | None = None

    def word(self, i: int) -> str:
        """Return the characters of a word."""
        piece, start, end = self.span(i)
        return self.texts[piece][start:end]

    def span(self, i: int) -> Span:
        """Return the position of a word in the characters.

        The position is (index of the text in a pair, first character, one past the last one).
        """
        tokens = self.spans[i]
        piece, start, _ = tokens[0]
        _, _, end = tokens[-1]
        return piece, start, end

    def replace_words(self, words: Iterable[tuple[int, str]]) -> tuple[str, ...]:
        """Return the texts with other characters for some words.

        Args:
            words: for each of these words its number and its new characters.
        """
        texts = list(self.texts)
        # From the last word to the first: a replacement moves only the characters behind the word.
        for i, new in sorted(words, reverse=True):
            piece, start, end = self.span(i)
            text = texts[piece]
            texts[piece] = text[:start] + new + text[end:]
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
        reserved: ids that no suffix may have: special and added tokens.
        tokens: the spelling of every token id with the vocabulary's marks, if known.
        marked: whether the vocabulary marks the beginnings of words; without marks, adjacent
            tokens form a word.
    """

    kinds: Int[Tensor, " vocabulary"]
    spell: Callable[[Sequence[int]], str] | None = None
    encode: Callable[[str], list[int]] | None = None
    special: frozenset[int] = frozenset()
    reserved: frozenset[int] = frozenset()
    tokens: Sequence[str] = ()
    read: Callable[[tuple[str, ...], int], tuple[Ids, tuple[Span, ...]]] | None = None
    write: Callable[[int], str] = str
    marked: bool = True

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Write token ids as one text, or as two if special ids divide them into a pair of texts.

        Special ids at the beginning and at the end, and several in a row, divide nothing. More
        than two pieces are written as one text.
        """
        pieces: list[list[int]] = []
        special_before = True  # the first id begins a piece
        for token in ids:
            is_special = token in self.special
            if special_before and not is_special:
                pieces.append([])
            if not is_special:
                pieces[-1].append(token)
            special_before = is_special
        if len(pieces) != 2:
            return [self.text(ids)]
        return [self.text(piece) for piece in pieces]

    def text(self, ids: Sequence[int]) -> str:
        """Write token ids as text, or as numbers without a tokenizer."""
        if self.spell is None:
            return " ".join(map(str, ids))
        return self.spell(ids).strip()

    def make_draft(self, ids: Sequence[int], texts: tuple[str, ...], most: int) -> Draft:
        """Return a text as a draft, which attacks change: split into words.

        The draft knows the characters of its words if the tokenizer, applied to the characters,
        returns these ids. Otherwise the draft has the ids alone.

        Args:
            ids: the token ids.
            texts: the text, or the two of a pair; empty: the texts that the ids spell.
            most: largest number of tokens of the model.
        """
        if self.read is None:  # no tokenizer says which characters each token has
            return Draft(self.split_words(ids))
        texts = texts or tuple(self.texts(ids))
        # Find the limit on the number of tokens with which the tokenizer returns these ids. First
        # try the whole text: it has at most `most` tokens, so the limit `most + 1` cuts nothing.
        # Then try a text that was cut, to the number of its ids.
        for limit in (most + 1, len(ids)):
            tokens, spans = self.read(texts, limit)  # ids, and the characters of each token
            if tokens != tuple(ids):
                continue
            words = self.split_words(ids, spans)
            # Divide the spans as the ids are divided: a word of two tokens gets the next two.
            unused_spans = iter(spans)
            spans_of_words = tuple(tuple(islice(unused_spans, len(word))) for word in words)
            return Draft(words, source=Source(texts, spans_of_words, most=limit))
        return Draft(self.split_words(ids))

    def name(self, token: int) -> str:
        """Write one token id for people: as text, or else in the vocabulary's spelling."""
        text = ""
        if self.spell is not None:
            text = self.spell([token]).strip()
        if text and "\ufffd" not in text:  # the sign for bytes that are no whole character
            return text
        if token < len(self.tokens):
            return self.tokens[token]
        return str(token)

    def split_words(self, ids: Sequence[int], spans: Sequence[Span] = ()) -> tuple[Ids, ...]:
        """Split a text into words, each a tuple of ids; every fixed id is a word of its own.

        The vocabulary has the kind of each token: FIXED (such as punctuation), BEGINS (the first
        token of a word) or GOES_ON (a later token). A token that goes on belongs to the word
        before it. With known spans, there must also be no gap between the two tokens.

        Args:
            ids: the token ids.
            spans: where each token is in the characters: (index of the text in a pair, first
                character, one past the last one); empty if unknown.
        """
        words: list[list[int]] = []
        kinds = self.kinds[list(ids)].tolist()
        # The kind of a token that may belong to the word before it. A vocabulary that does not
        # mark the beginnings of words calls every token BEGINS: then gaps between spans alone
        # divide words.
        unmarked = bool(spans) and not self.marked
        continuing = BEGINS if unmarked else GOES_ON
        spans = spans or [NOWHERE] * len(ids)  # equal spans, without gaps
        kind_before = FIXED
        text_before = end_before = 0
        for token, kind, (text, start, end) in zip(ids, kinds, spans, strict=True):
            adjacent = text == text_before and start <= end_before
            if kind == continuing and kind_before != FIXED and adjacent:
                words[-1].append(token)
            else:
                words.append([token])
            kind_before = kind
            text_before = text
            end_before = end
        return tuple(tuple(word) for word in words)

    def is_fixed(self, word: Sequence[int]) -> bool:
        """Say whether a word is a fixed id, such as punctuation, which must not change."""
        return int(self.kinds[word[0]]) == FIXED


@dataclass(frozen=True)
class Suffix:
    """Tokens that an attack adds to a text.

    Attributes:
        ids: the tokens.
        token: number of the text's tokens before them.
        place: index of the text in a pair, and of the character before which they are inserted.
        text: their characters.
    """

    ids: Ids
    token: int
    place: tuple[int, int]
    text: str = ""

    def insert(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        """Return a text, or the two of a pair, with the characters of the suffix inserted."""
        piece, character = self.place  # which text of a pair, and before which character
        text = texts[piece]
        longer = text[:character] + self.text + text[character:]
        return (*texts[:piece], longer, *texts[piece + 1 :])


@dataclass(frozen=True)
class Draft:
    """A text as words, with the changes made to it.

    Attributes:
        words: token ids of each word (or fixed piece), in order.
        changed: for each change, the number of its word.
        spelled: number and characters of each changed word.
        source: the characters of the unchanged text, if known.
        tried: number of single changes that a search evaluated, over all its steps.
        possible: number of single changes that there were.
        suffix: the tokens added to the unchanged words.
    """

    words: tuple[Ids, ...]
    changed: tuple[int, ...] = ()
    spelled: tuple[tuple[int, str], ...] = ()
    source: Source | None = None
    tried: int = 0
    possible: int = 0
    suffix: Suffix | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the characters of the text, or of the two of a pair; empty if unknown."""
        if self.source is None:
            return ()
        if self.suffix is not None:
            return self.suffix.insert(self.source.texts)
        return self.source.replace_words(self.spelled)

    @property
    def ids(self) -> Ids:
        """Return the token ids of all words and of the suffix, in the order of the text.

        Changed words were tokenized alone: the tokenizer may read the whole text as other ids.
        """
        ids = tuple(token for word in self.words for token in word)
        if self.suffix is None:
            return ids
        before = self.suffix.token  # how many tokens of the text stand before the suffix
        return ids[:before] + self.suffix.ids + ids[before:]

    @property
    def input_ids(self) -> Ids:
        """Return the ids that the model reads: the text, or a prompt with its continuations."""
        continuations = self._continuations
        if continuations is None:
            return self.ids
        # A long prompt loses its beginning: `room` tokens before the continuations remain.
        return self.ids[-continuations.room :] + continuations.tail

    @property
    def changes(self) -> int:
        """Return the number of changes: changed words or characters, or the tokens of a suffix."""
        if self.suffix is None:
            return len(self.changed)
        return len(self.suffix.ids)

    @property
    def _continuations(self) -> Continuations | None:
        return None if self.source is None else self.source.continuations

    def align(self, slope: Tensor) -> Slope:
        """Return the gradient of each token of `ids`, (tokens, width), from those of the inputs.

        The two differ for prompts. The model does not read the beginning of a long prompt, which
        gets gradient 0. The continuations behind the prompt are inputs, but no tokens of the text.
        """
        continuations = self._continuations
        if continuations is None:
            return slope
        tokens = len(self.ids)
        inputs = min(tokens, continuations.room)
        zeros = slope.new_zeros(tokens - inputs, slope.shape[1])
        return torch.cat([zeros, slope[:inputs]])

    def with_word(self, i: int, word: Ids, spelled: str | None = None) -> Draft:
        """Return the text with one word replaced, which counts as one more change.

        Args:
            i: number of the word.
            word: its new token ids.
            spelled: its new characters, if known.
        """
        words = list(self.words)
        words[i] = word
        # If the word was changed before, its earlier spelling is dropped.
        respelled = [(number, text) for number, text in self.spelled if number != i]
        if spelled is not None:
            respelled.append((i, spelled))
        return Draft(
            words=tuple(words),
            changed=(*self.changed, i),
            spelled=tuple(respelled),
            source=self.source,
        )


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
        tokenize: (prompt, most tokens) -> ids, if the model scores continuations of prompts.
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
    tokenize: Callable[[str, int], list[int]] | None = None

    def read(self, draft: Draft, *, cut: bool = False) -> Ids:
        """Return the ids of a text, tokenized from its characters if these are known.

        The result is empty if the model cannot read the text: it is too long, or has an unknown
        token. With `cut`, the tokenizer cuts a long text to the length that the model takes.
        Without `cut`, the tokenizer has the limit of the unchanged text (`source.most`).
        """
        if draft.source is None or self.lexicon.read is None:
            return draft.ids
        # A prompt is packed with its continuations: texts behind it that the model scores.
        continuations = draft.source.continuations
        if continuations is not None:
            return continuations.pack(*draft.texts)
        most = self.most if cut else draft.source.most
        ids, _ = self.lexicon.read(draft.texts, most)
        if not 0 < len(ids) <= self.most:
            return ()
        if max(ids) >= len(self.lexicon.kinds):  # a token that the model does not know
            return ()
        return ids

    def pad(self, texts: Sequence[Ids]) -> tuple[Tensor, Tensor | None]:
        """Return texts as one tensor of ids (texts, tokens), with a mask if any is padded."""
        rows = [torch.tensor(ids, dtype=torch.int64) for ids in texts]
        x = pad_sequence(rows, batch_first=True, padding_value=self.pad_id)
        x = x.to(self.table.device)
        lengths = torch.tensor([len(ids) for ids in texts])
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        if mask.all():
            return x, None
        return x, mask.to(x.device)


@dataclass(frozen=True)
class TextOracle:
    """The model on texts, in pieces that fit the device, with a count of passes.

    Attributes:
        reader: how the model reads texts.
        batch_size: the device batch size.
        meter: counts the passes.
        target: the class that attacks aim at; None: any class but the label.
    """

    reader: Reader
    batch_size: int
    meter: Meter = field(default_factory=Meter)
    target: int | None = None

    @torch.no_grad()
    def __call__(self, texts: Sequence[Ids]) -> Logits:
        """Return the logits of texts, from their token ids."""
        self.meter.pass_forward(len(texts))
        # By the text's position: batches may group texts of one length.
        logits: dict[int, Tensor] = {}
        for rows in self._pieces(texts):
            ids, mask = self.reader.pad([texts[i] for i in rows])
            output = self.reader.output(ids, mask)
            logits |= zip(rows, output, strict=True)
        in_order = [logits[i] for i in range(len(texts))]
        return torch.stack(in_order)

    def measure_leads(self, logits: Logits, y: Labels) -> Float[Tensor, " texts"]:
        """Return the lead of each text, which attacks lower until it is negative.

        Without a target class, the lead is the logit of the label minus the largest other logit.
        With a target class, the lead is the largest other logit minus the logit of the target.
        """
        if self.target is None:
            return margins(logits, y)
        return -margins(logits, torch.full_like(y, self.target))

    def score(self, texts: Sequence[Ids], y: Labels) -> list[float]:
        """Return the lead of each text (see `measure_leads`), from its token ids."""
        leads: list[float] = self.measure_leads(self(texts), y).tolist()
        return leads

    def score_changes(
        self, changed: Mapping[int, Sequence[Ids]], y: Labels
    ) -> dict[int, list[float]]:
        """Return the leads of several changed texts of each text, evaluated together.

        The lead of a text is the logit of its label minus the largest other logit; with a target
        class see `measure_leads`.

        Args:
            changed: token ids of the changed texts, by the position of the unchanged text.
            y: labels of the unchanged texts.
        """
        texts = list(chain.from_iterable(changed.values()))
        if not texts:
            return dict.fromkeys(changed, [])
        # For each changed text the position of its unchanged text.
        originals = [i for i, group in changed.items() for _ in group]
        # The leads in the same order, divided among the unchanged texts.
        leads = iter(self.score(texts, y[originals]))
        return {i: list(islice(leads, len(group))) for i, group in changed.items()}

    def slopes(self, texts: Sequence[Ids], y: Labels) -> list[Slope]:
        """Return the gradient of each text's lead with respect to its token embeddings.

        The lead is the logit of the label minus the largest other logit; with a target class see
        `measure_leads`.

        A changed text may have more tokens than the model takes: each changed word was tokenized
        alone, which may give more tokens than the tokenizer makes of the whole text. The tokens
        before the last one are then left out, and get gradient 0. The last one stays, because
        some models need their end token.
        """
        shortened = [self._shorten(ids) for ids in texts]
        self.meter.pass_forward(len(texts))
        self.meter.backwards += len(texts)
        slopes = {}  # by the text's position
        for rows in self._pieces(shortened):
            ids, mask = self.reader.pad([shortened[i] for i in rows])
            with torch.enable_grad():
                embeddings = self.reader.point(ids, mask).requires_grad_()
                logits = self.reader.forward(embeddings, ids, mask)
                total = self.measure_leads(logits, y[rows]).sum()
            gradients = pull((embeddings, total), torch.ones_like(total))
            for i, gradient in zip(rows, gradients, strict=True):
                slope = gradient[: len(shortened[i])]  # without padding
                missing = len(texts[i]) - len(shortened[i])
                zeros = slope.new_zeros(missing, slope.shape[1])
                # The tokens that were left out stand before the last one.
                slopes[i] = torch.cat([slope[:-1], zeros, slope[-1:]])
        return [slopes[i] for i in range(len(texts))]

    def _shorten(self, ids: Ids) -> Ids:
        """Return a text cut to what the model takes. The last token stays: some models need it."""
        most = self.reader.most
        if len(ids) <= most:
            return ids
        return (*ids[: most - 1], ids[-1])

    def _pieces(self, texts: Sequence[Ids]) -> list[list[int]]:
        """Return the positions of the texts of each batch.

        Most models do not read padding, so any texts can share a batch. A model that reads padding
        gets only texts of one length together.
        """
        by_length = {0: list(range(len(texts)))}  # one group, as if of one length
        if self.reader.reads_padding:
            by_length = group_values((len(ids), i) for i, ids in enumerate(texts))
        pieces = []
        for length in sorted(by_length):
            rows = by_length[length]
            for chunk in list_pieces(len(rows), self.batch_size):
                pieces.append(rows[chunk])
        return pieces


# (oracle, drafts, y, budget, turn) -> drafts, as `AttackKind` describes it.
RewriteFunction = Callable[[TextOracle, list[Draft], Tensor, int, Turn], list[Draft]]


def check_drafts(
    after: Sequence[Draft], before: Sequence[Draft], lexicon: Lexicon, budget: int, attack: str
) -> None:
    """Check that the result of an attack respects the budget and changes only words.

    Args:
        after: the changed texts, which also say what they changed.
        before: the unchanged texts.
        lexicon: the vocabulary.
        budget: largest number of changes of a text.
        attack: name of the attack, for messages.

    Raises:
        EvaluationError: the result breaks these rules.
    """
    for new, old in zip(after, before, strict=True):
        if new.suffix is not None:
            if new.changed or new.words != old.words:
                raise blame_attack(attack, "changed words beside the suffix")
            if not lexicon.reserved.isdisjoint(new.suffix.ids):
                raise blame_attack(attack, "added a special token")
        # The numbers of the words that the draft reports as changed; no other word may differ.
        changed = set(new.changed)
        unreported = len(new.words) != len(old.words)
        for i, (word, original) in enumerate(zip(new.words, old.words, strict=False)):
            if word != original and (i not in changed or lexicon.is_fixed(original)):
                unreported = True
        if unreported:
            text = "changed something that is not a word, or did not report the change"
            raise blame_attack(attack, text)
        respelled = {i for i, _ in new.spelled}
        if old.source is not new.source or respelled - changed:
            raise blame_attack(attack, "changed characters and did not report it")
        if new.changes > budget:
            text = f"made {new.changes} changes, but only {budget} are allowed"
            raise blame_attack(attack, text)
