"""Attacks on words and characters: the parts of a text, its reading by a model, a greedy search.

A text is a row of token ids, split into words. Attacks never change token ids that belong to no
word (special tokens, punctuation, padding). If the characters of a text are known, a change is
made in the characters, and the model reads the changed characters.

*Words* are replaced by near ones. The first-order choice of substitutes follows HotFlip (Ebrahimi
et al., 2018, arXiv 1712.06751). The 50 nearest neighbours among word embeddings follow Alzantot et
al., 2018 (arXiv 1804.07998) and TextFooler (Jin et al., 2020, arXiv 1907.11932), which use other
embeddings and check meaning and grammar; we check neither.

*Characters* get typing errors: letters are swapped, removed, inserted or replaced, and the word is
tokenized again. The kinds of errors follow Gao et al., 2018 (DeepWordBug, arXiv 1801.04354)
and TextBugger (Li et al., 2019, arXiv 1812.05271).
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, groupby, islice, pairwise, product, zip_longest

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lipaudit.attacks.balls import blame_attack
from lipaudit.attacks.oracle import Meter, Turn, margins, pull
from lipaudit.errors import UsageError

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
    """

    words: tuple[Ids, ...]
    changed: tuple[int, ...] = ()
    spelled: tuple[tuple[int, str], ...] = ()
    source: Source | None = None

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


# (text, gradient of its margin) -> candidate texts with one more change.
Propose = Callable[[Draft, Tensor], Sequence[Draft]]


def search(
    oracle: TextOracle, drafts: Sequence[Draft], y: Tensor, budget: int, propose: Propose
) -> list[Draft]:
    """Change texts one by one, each time by the change that lowers the margin most.

    The search ends when the margin is negative. Every proposal is evaluated from its characters,
    if known. The search is greedy: k changes are the first k of k + 1. If no proposal lowers the
    margin, the text keeps its changes so far.
    """
    best = list(drafts)
    read = oracle.reader.read
    margin = margins(oracle([read(draft) for draft in best]), y).tolist()
    going = [i for i, value in enumerate(margin) if value >= 0]
    for _ in range(budget):
        slopes = oracle.slopes([best[i].ids for i in going], y[going]) if going else []
        tried = [propose(best[i], slope) for i, slope in zip(going, slopes, strict=True)]
        tried = [[draft for draft in drafts if read(draft)] for drafts in tried]
        going = [i for i, drafts in zip(going, tried, strict=True) if drafts]
        tried = [drafts for drafts in tried if drafts]
        if not going:
            break
        labels = y[going].repeat_interleave(torch.tensor([len(t) for t in tried], device=y.device))
        values = margins(oracle([read(d) for t in tried for d in t]), labels).tolist()
        for i, texts in zip(tuple(going), tried, strict=True):
            own, values = values[: len(texts)], values[len(texts) :]
            lowest = min(range(len(own)), key=lambda j: round(own[j], DIGITS))
            # Done: nothing lowers the margin any more, or the text is misclassified.
            if own[lowest] >= margin[i] or own[lowest] < 0:
                going.remove(i)
            if own[lowest] < margin[i]:
                best[i], margin[i] = texts[lowest], own[lowest]
    return best


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


# Number of substitutes considered for a token.
NEIGHBOURS = 50
# Number of tokens whose neighbours are searched at a time.
BLOCK = 256
# Largest number of combinations of adjacent words that are read one by one; two words have 2,500.
COMBINATIONS = 10_000


def rewrite_words(
    oracle: TextOracle, drafts: list[Draft], y: Tensor, budget: int, turn: Turn
) -> list[Draft]:
    """Replace at most `budget` words of each text, one token each; the search is not random.

    A step tries `queries` substitutions in words not changed yet: those that lower the margin most
    to first order, slope . (e(substitute) - e(token)). Each one is then evaluated exactly.
    """
    reader, queries = oracle.reader, turn.attack.queries
    near = neighbours(reader, (token for draft in drafts for token in draft.ids))

    def propose(draft: Draft, slope: Float[Tensor, "tokens width"]) -> Sequence[Draft]:
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
        changed = (_replace_token(draft, i, j, new, reader.lexicon) for (i, j), new in chosen)
        return list(islice(filter(None, changed), queries))

    return search(oracle, drafts, y, budget, propose)


def neighbours(reader: Reader, tokens: Iterable[int]) -> dict[int, Tensor]:
    """Return the nearest token ids of the same kind, by the cosine of their embeddings.

    First tokens of words have first tokens as neighbours; fixed tokens have none. The reader
    caches the neighbours.
    """
    kinds, table = reader.lexicon.kinds, reader.table
    own = sorted({t for t in tokens if int(kinds[t]) != FIXED} - reader.near.keys())
    lengths = table[: len(kinds)].norm(dim=1).clamp_min(torch.finfo(table.dtype).tiny)
    there, alike = kinds.to(table.device), kinds.bincount(minlength=FIXED + 1).tolist()
    for start in range(0, len(own), BLOCK):
        ids = torch.tensor(own[start : start + BLOCK], device=table.device)
        cosine = table[ids] @ table[: len(kinds)].T / lengths  # up to a factor of each row
        cosine[there[ids][:, None] != there] = -torch.inf
        cosine.scatter_(1, ids[:, None], -torch.inf)
        nearest = cosine.topk(min(NEIGHBOURS, len(kinds)), dim=1).indices
        for token, index in zip(own[start:], nearest, strict=False):
            reader.near[token] = index[: alike[int(kinds[token])] - 1]
    return reader.near


def list_substitutes(reader: Reader, draft: Draft, k: int) -> list[tuple[int, Ids]] | None:
    """Return the word and the text's token ids of every change that `rewrite_words` may try first.

    None if one of them changes the number of tokens, or tokens of another word, or if up to k of
    them together are read in another way than one by one.
    """
    near, before = neighbours(reader, draft.ids), reader.read(draft)
    found: list[tuple[int, Ids, Draft]] = []
    word_of = [i for i, word in enumerate(draft.words) for _ in word]
    for i, word in enumerate(draft.words):
        for j, token in enumerate(word):
            for new in near[token].tolist() if token in near else ():
                changed = _replace_token(draft, i, j, new, reader.lexicon)
                ids = reader.read(changed) if changed else before
                if len(ids) != len(before):
                    return None
                moved = {w for w, a, b in zip(word_of, ids, before, strict=True) if a != b}
                if moved - {i}:
                    return None
                found += [(i, ids, changed)] if moved and changed else []
    chains = _chain(draft.source.spans) if draft.source else []
    several = (each for chain in chains for each in _combine(found, chain, k))
    for number, changes in enumerate(several):
        spelled = tuple(pair for _, _, changed in changes for pair in changed.spelled)
        own = {i: ids for i, ids, _ in changes}
        alone = tuple(own.get(w, before)[at] for at, w in enumerate(word_of))
        if number == COMBINATIONS or reader.read(replace(draft, spelled=spelled)) != alone:
            return None
    return [(i, ids) for i, ids, _ in found]


def _chain(spans: Sequence[Sequence[Span]]) -> list[list[int]]:
    """Group words with nothing between them, by number: a tokenizer may read these as one."""
    chains = [[0]]
    for i, (before, after) in enumerate(pairwise(spans), 1):
        (piece, _, end), (other, start, _) = before[-1], after[0]
        chains += [[]] if piece != other or start > end else []
        chains[-1].append(i)
    return chains


def _combine(
    found: Sequence[tuple[int, Ids, Draft]], chain: Sequence[int], k: int
) -> Iterator[tuple[tuple[int, Ids, Draft], ...]]:
    """Yield the changes of two to k words of a chain at once."""
    each = [[change for change in found if change[0] == i] for i in chain]
    each = [changes for changes in each if changes]
    for size in range(2, min(k, len(each)) + 1):
        for chosen in combinations(each, size):
            yield from product(*chosen)


def _replace_token(draft: Draft, i: int, j: int, token: int, lexicon: Lexicon) -> Draft | None:
    """Replace token j of word i; None if the result is not a word."""
    word, source = (*draft.words[i][:j], token, *draft.words[i][j + 1 :]), draft.source
    if source is None:
        return draft.with_word(i, word)
    new, spans = lexicon.write(token), source.spans[i]
    (piece, first, _), (_, start, end), last = spans[0], spans[j], spans[-1][2]
    text, others = source.texts[piece], spans[:j] + spans[j + 1 :]
    alone = all(end <= other[1] or other[2] <= start for other in others)
    if not alone or len(new.split()) != 1 or len(text[start:end].split()) != 1:
        return None
    spelled = text[first:start] + new + text[end:last]
    return None if spelled == source.word(i) else draft.with_word(i, word, spelled)


def rewrite_characters(
    oracle: TextOracle, drafts: list[Draft], y: Tensor, budget: int, turn: Turn
) -> list[Draft]:
    """Make at most `budget` typing errors in each text; the search is not random.

    A step tries `queries` errors, spread evenly over the words, beginning with the words on which
    the margin depends most (the norm of its gradient over the word's tokens). Words of a single
    letter are not changed.

    Raises:
        UsageError: the model has no tokenizer that can spell.
    """
    reader, queries = oracle.reader, turn.attack.queries
    lexicon, tokenize = reader.lexicon, reader.lexicon.encode
    if lexicon.read is None or tokenize is None:
        text = "the attack characters needs a tokenizer that spells tokens; this model has none"
        advice = "Put the tokenizer's files beside config.json, or leave characters out."
        raise UsageError(text, advice)
    encode = cache(lambda text: tuple(tokenize(text)))

    def list_errors(draft: Draft, slope: Float[Tensor, "tokens width"]) -> Iterator[Draft]:
        """Yield the text with each possible error, words taking turns."""
        source = draft.source
        if source is None:
            return
        lengths = iter(slope.norm(dim=1).tolist())
        steep = [sum(islice(lengths, len(word))) for word in draft.words]
        known, letters = _spell_words(draft, lexicon)
        words = [(i, known[i]) for i in sorted(known, key=lambda i: -steep[i])]
        lists = [[(i, error) for error in _errors(text, letters)] for i, text in words]
        for turn in zip_longest(*lists):
            for i, error in filter(None, turn):
                piece, start, _ = source.spans[i][0]
                before = source.texts[piece][max(start - 1, 0) : start]
                space = before if before.isspace() else ""
                yield draft.with_word(i, encode(space + error), error)

    def propose(draft: Draft, slope: Tensor) -> Sequence[Draft]:
        return list(islice(filter(reader.read, list_errors(draft, slope)), queries))

    return search(oracle, drafts, y, budget, propose)


def _spell_words(draft: Draft, lexicon: Lexicon) -> tuple[dict[int, str], list[str]]:
    """Return the words in which errors are possible, by number, and the letters to insert."""
    source, known = draft.source, dict(draft.spelled)
    some = [i for i, word in enumerate(draft.words) if source and not lexicon.is_fixed(word)]
    spelled = {i: known.get(i) or source.word(i) for i in some if source}
    words = {i: text for i, text in spelled.items() if len(text) > 1}
    # The text's own letters, and all Latin ones if it has any.
    letters = {c for text in words.values() for c in text.lower() if c.isalnum()}
    latin = set(string.ascii_lowercase)
    return words, sorted(letters | (latin if letters & latin else set()))


def mistype(draft: Draft, draw: random.Random, lexicon: Lexicon, kind: str, count: int) -> Draft:
    """Return a text with random typing errors of one kind.

    The word of an error is drawn by its length, and the error among all of its kind there.

    Args:
        draft: the text, with its characters.
        draw: source of random numbers.
        lexicon: the vocabulary.
        kind: one of `kinds.TYPING`.
        count: number of errors; fewer if the text has no room for them.
    """
    for _ in range(count):
        words, letters = _spell_words(draft, lexicon)
        kinds = {i: _list_errors(text, letters)[kind] - {text} for i, text in words.items()}
        if possible := [i for i in words if kinds[i]]:
            i = draw.choices(possible, [len(words[i]) for i in possible])[0]
            draft = draft.with_word(i, draft.words[i], draw.choice(sorted(kinds[i])))
    return draft


def _list_errors(word: str, letters: Sequence[str]) -> dict[str, set[str]]:
    """Return every word with one error, by kind of error."""
    cuts = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    return {
        "swap": {a + b[1] + b[0] + b[2:] for a, b in cuts if len(b) > 1},
        "remove": {a + b[1:] for a, b in cuts if b},
        "replace": {a + c + b[1:] for a, b in cuts if b for c in letters},
        "insert": {a + c + b for a, b in cuts for c in letters},
    }


def _errors(word: str, letters: Sequence[str]) -> list[str]:
    """Return every word with one error, in an order derived from the word.

    The order mixes kinds and places of errors, and is the same on every machine.
    """
    # The order of a set differs between processes: sort, then mix by the word.
    order = sorted(set[str]().union(*_list_errors(word, letters).values()) - {word})
    random.Random(word).shuffle(order)
    return order
