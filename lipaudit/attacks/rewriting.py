"""Attacks on words and characters: a greedy search among the single changes of a text.

*Words* are replaced by near words: words of the vocabulary whose embeddings are the nearest. The
first-order choice of substitutes follows HotFlip (Ebrahimi et al., 2018, arXiv 1712.06751). The 50
nearest neighbours among word embeddings follow Alzantot et al., 2018 (arXiv 1804.07998) and
TextFooler (Jin et al., 2020, arXiv 1907.11932), which use other embeddings and check meaning and
grammar; we check neither. A word of several tokens has no near words: nothing says which rows of
tokens are words.

*Characters* get typing errors: letters are swapped, removed, inserted or replaced, and the word is
tokenized again. The kinds of errors follow Gao et al., 2018 (DeepWordBug, arXiv 1801.04354)
and TextBugger (Li et al., 2019, arXiv 1812.05271).

A step of the search tries all single changes if these are few. Among more it takes turns between
three orders, so that it does not depend on a gradient that may be flat: that of the attack (the
gradient), evenly over the places, and the places by one exact evaluation each, as TextFooler ranks
words by their deletion.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations, islice, pairwise, product, zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lipaudit.attacks.kinds import TYPING
from lipaudit.attacks.oracle import Turn, list_pieces
from lipaudit.attacks.text import BEGINS, FIXED, Draft, Ids, Lexicon, Reader, Span, TextOracle
from lipaudit.errors import UsageError
from lipaudit.tables.columns import group_values

if TYPE_CHECKING:
    from lipaudit.attacks.text import Slope

# Margins are compared to this many decimal places; further digits are rounding noise.
DIGITS = 5


@dataclass(frozen=True, eq=False)
class Change:
    """A single change of a text.

    Attributes:
        word: the number of the word that it changes.
        make: returns the changed text; None if the result is no word.
    """

    word: int
    make: Callable[[], Draft | None]


class ChangedText(NamedTuple):
    """A text with one word changed.

    Attributes:
        word: the number of the word.
        ids: the token ids of the changed text, as the model reads it.
        draft: the changed text.
    """

    word: int
    ids: Ids
    draft: Draft


# (text, gradient of its margin) -> all single changes, the most promising first.
Propose = Callable[[Draft, Tensor], Sequence[Change]]


@dataclass(eq=False)
class _Step:
    """One step of the search on one text.

    Attributes:
        position: position of the text in the batch.
        changes: all single changes, the most promising first.
        queries: largest number of changes to try.
        read: returns the token ids of a changed text; empty if the model cannot read it.
        best: the changed text with the lowest margin; the text itself before the first.
        lowest: that margin.
        tried: number of changes evaluated.
        lowest_of_word: the lowest margin of the changes of each word.
        untried: the changes that `choose_first` left out.
    """

    position: int
    changes: Sequence[Change]
    queries: int
    read: Callable[[Draft], Ids]
    best: Draft
    lowest: float = math.inf
    tried: int = 0
    lowest_of_word: dict[int, float] = field(default_factory=dict)
    untried: Sequence[Change] = ()

    @property
    def possible(self) -> int:
        """Return the number of possible single changes of the text.

        Some changes make a text that the model cannot read. If all changes were tried, such
        changes are known and not counted. Otherwise all changes count.
        """
        if self.untried:
            return len(self.changes)
        return self.tried  # all changes that the model can read

    def choose_first(self) -> list[ChangedText]:
        """Return the changed texts to try first.

        If there are few changes, these are all changes. Otherwise each word gets its most
        promising change: the resulting margins tell `choose_others` which words matter. All other
        changes are stored in `untried`.
        """
        if len(self.changes) <= self.queries:
            return self._make_texts(self.changes, most=self.queries)
        # `changes` begins with the most promising change: the first of a word is its best one.
        first_of_word: dict[int, Change] = {}
        for change in self.changes:
            first_of_word.setdefault(change.word, change)
        # At most half of the queries: the second half is for `choose_others`.
        half = max(1, self.queries // 2)
        chosen = list(first_of_word.values())[:half]
        chosen_set = set(chosen)
        self.untried = [change for change in self.changes if change not in chosen_set]
        return self._make_texts(chosen, most=half)

    def choose_others(self) -> list[ChangedText]:
        """Return the changed texts to try next, up to the number of queries.

        Three orders take turns: by the gradient; by word, with the word first whose change had the
        lowest margin; and evenly, with one change of every word in turn.
        """

        def rank(change: Change) -> float:
            """Return the lowest margin that a change of the same word has reached so far."""
            return self.lowest_of_word.get(change.word, math.inf)

        of_words = group_values((change.word, change) for change in self.untried)
        evenly = take_turns(of_words.values())
        by_word = sorted(self.untried, key=rank)
        # `untried` is in the order of the gradient. Each of the three orders has all changes: a
        # dict drops the repeats.
        ordered = dict.fromkeys(take_turns([self.untried, by_word, evenly]))
        return self._make_texts(ordered, most=self.queries - self.tried)

    def _make_texts(self, changes: Iterable[Change], most: int) -> list[ChangedText]:
        """Return the texts that changes make, at most `most` texts.

        A change is left out if the result is not a word, or not a text that the model can read.
        """
        texts: list[ChangedText] = []
        for change in changes:
            if len(texts) == most:
                break
            draft = change.make()
            if draft is None:
                continue
            ids = self.read(draft)
            if ids:
                texts.append(ChangedText(change.word, ids, draft))
        return texts

    def note_margins(self, texts: Sequence[ChangedText], margins: Sequence[float]) -> None:
        """Record the margins of changed texts, and the text with the lowest one.

        If margins are equal up to rounding, the first text counts.
        """
        self.tried += len(texts)
        for text, margin in zip(texts, margins, strict=True):
            lowest_of_word = self.lowest_of_word.get(text.word, math.inf)
            self.lowest_of_word[text.word] = min(margin, lowest_of_word)
            if round(margin, DIGITS) < round(self.lowest, DIGITS):
                self.lowest = margin
                self.best = text.draft


def take_turns(lists: Iterable[Iterable[Change]]) -> Iterator[Change]:
    """Yield the first change of each list, then the second change of each list, and so on."""
    for row in zip_longest(*lists):
        for change in row:
            if change is not None:  # None: this list has ended
                yield change


def search(
    oracle: TextOracle,
    drafts: Sequence[Draft],
    y: Tensor,
    budget: int,
    propose: Propose,
    queries: int,
) -> list[Draft]:
    """Return the texts after a greedy search: each step makes the change with the lowest margin.

    The margin is the logit of the label minus the largest other logit; with a target class see
    `measure_leads`. The attack on a text succeeds at a negative margin, and the search of the text
    ends. The search also ends if no change lowers the margin. With a larger budget, the first
    changes stay the same. Each draft counts the possible changes and the tried changes.

    Args:
        oracle: the model.
        drafts: the texts.
        y: the labels of the texts.
        budget: largest number of changes of a text.
        propose: a function: (text, gradient of the margin by the token embeddings) -> all single
            changes of the text, the most promising first.
        queries: largest number of single changes tried in a step.
    """
    best = list(drafts)
    read = oracle.reader.read
    margins = oracle.score([read(draft) for draft in best], y)
    robust = [i for i, margin in enumerate(margins) if margin >= 0]
    for _ in range(budget):
        if not robust:
            break
        # For each text the gradient of the margin by the token embeddings, (tokens, width).
        slopes = oracle.slopes([best[i].input_ids for i in robust], y[robust])
        steps = []
        for i, slope in zip(robust, slopes, strict=True):
            changes = propose(best[i], best[i].align(slope))
            steps.append(
                _Step(position=i, changes=changes, queries=queries, read=read, best=best[i])
            )
        # All changes if these are few; otherwise one of each word, then those that look best.
        _try_changes(oracle, y, [(step, step.choose_first()) for step in steps])
        _try_changes(oracle, y, [(step, step.choose_others()) for step in steps if step.untried])
        # Replace in `best` and `margins` the texts that a change improved.
        robust = _keep_best(steps, best, margins)
    return best


def _keep_best(steps: Sequence[_Step], best: list[Draft], margins: list[float]) -> list[int]:
    """Make the best change of each step if it lowers the margin; return the texts to attack next.

    A text is attacked next if its margin fell, and is not negative yet.

    Args:
        steps: the changes that were tried on some of the texts, with their margins.
        best: the texts so far, replaced by the changed ones.
        margins: their margins, replaced likewise.
    """
    robust = []
    for step in steps:
        i = step.position
        # Counts of tried and possible changes add up over the steps.
        tried = best[i].tried + step.tried
        possible = best[i].possible + step.possible
        if step.lowest < margins[i]:
            best[i] = step.best
            margins[i] = step.lowest
            if step.lowest >= 0:
                robust.append(i)
        best[i] = replace(best[i], tried=tried, possible=possible)
    return robust


def _try_changes(
    oracle: TextOracle, y: Tensor, changed: Sequence[tuple[_Step, Sequence[ChangedText]]]
) -> None:
    """Evaluate the changed texts of several steps in one batch, and record their margins.

    Args:
        oracle: the model.
        y: the labels of the unchanged texts.
        changed: steps, each of one text, with the changed texts.
    """
    ids = {}
    for step, texts in changed:
        ids[step.position] = [text.ids for text in texts]
    margins = oracle.score_changes(ids, y)
    for step, texts in changed:
        step.note_margins(texts, margins[step.position])


# Words


# Number of substitutes considered for a word.
NEIGHBOURS = 50
# Number of tokens whose neighbours are searched at a time.
BLOCK = 256
# Largest number of combinations of adjacent words that are read one by one; two words have 2,500.
COMBINATIONS = 10_000


def rewrite_words(
    oracle: TextOracle, drafts: list[Draft], y: Tensor, budget: int, turn: Turn
) -> list[Draft]:
    """Replace at most `budget` words of each text by words with similar embeddings.

    A step tries up to `turn.attack.queries` substitutions in words that are not changed yet. To
    first order, a substitution changes the margin (logit of the label minus the largest other
    logit) by slope . (e(substitute) - e(word)), with embeddings e and the gradient `slope` of the
    margin. The lowest values are tried first, without randomness.
    """
    reader = oracle.reader
    near = neighbours(reader, {token for text in drafts for token in text.ids})

    def propose(draft: Draft, slope: Slope) -> Sequence[Change]:
        """Return every substitute of every word; first those that lower the margin most.

        `slope` is the gradient of the margin by the embedding of each token, (tokens, width).
        """
        margin_changes = []
        changes = []
        position = 0  # the position of the first token of the word
        for i, word in enumerate(draft.words):
            substitutes = find_substitutes(near, draft, i, reader.lexicon)
            if substitutes:  # the word is then a single token, word[0]
                # To first order, slope . (e(substitute) - e(word)); `table` has the embeddings e.
                step = reader.table[substitutes] - reader.table[word[0]]
                margin_changes.append(step @ slope[position])
                for new in substitutes:
                    make = partial(_replace_word, draft, i, new, reader.lexicon)
                    changes.append(Change(word=i, make=make))
            position += len(word)
        if not changes:
            return []
        order = torch.cat(margin_changes).argsort(stable=True)
        return [changes[k] for k in order.tolist()]

    return search(oracle, drafts, y, budget, propose, turn.attack.queries)


def find_substitutes(near: dict[int, Tensor], draft: Draft, i: int, lexicon: Lexicon) -> list[int]:
    """Return the token ids of words that may replace word i of a text.

    The list is empty if the word was changed before, or is not a single token that begins words.

    Args:
        near: token id -> ids with similar embeddings, from `neighbours`.
        draft: the text.
        i: number of the word.
        lexicon: the vocabulary.
    """
    word = draft.words[i]
    if i in draft.changed or len(word) > 1 or int(lexicon.kinds[word[0]]) != BEGINS:
        return []
    substitutes: list[int] = near[word[0]].tolist()
    return substitutes


def neighbours(reader: Reader, tokens: Iterable[int]) -> dict[int, Tensor]:
    """Return for each token the ids with the most similar embeddings, by cosine.

    A neighbour has the same kind as its token: first tokens of words have first tokens as
    neighbours. Fixed tokens, such as punctuation, have no neighbours. The reader caches results.
    """
    kinds = reader.lexicon.kinds
    table = reader.table[: len(kinds)]
    words = {token for token in tokens if int(kinds[token]) != FIXED}
    unknown = sorted(words - reader.near.keys())
    tiny = torch.finfo(table.dtype).tiny
    lengths = table.norm(dim=1).clamp_min(tiny)
    kind_of_id = kinds.to(table.device)
    ids_of_kind = kinds.bincount(minlength=FIXED + 1).tolist()
    count = min(NEIGHBOURS, len(kinds))
    for chunk in list_pieces(len(unknown), BLOCK):
        block = unknown[chunk]
        ids = torch.tensor(block, device=table.device)
        # The cosine times the length of the row's own embedding: a factor of the whole row, which
        # does not change its order. (block, vocabulary)
        cosine = table[ids] @ table.T / lengths
        other_kind = kind_of_id[ids][:, None] != kind_of_id
        cosine[other_kind] = -torch.inf
        cosine.scatter_(1, ids[:, None], -torch.inf)  # no word is its own neighbour
        nearest = cosine.topk(count, dim=1).indices
        for token, neighbour_ids in zip(block, nearest, strict=True):
            # If the kind has few ids, the last entries are ids of other kinds, with cosine -inf.
            available = ids_of_kind[int(kinds[token])] - 1
            reader.near[token] = neighbour_ids[:available]
    return reader.near


def list_substitutes(reader: Reader, draft: Draft, k: int) -> list[tuple[int, Ids]] | None:
    """Return (word, token ids of the text) for every substitution that `rewrite_words` may try.

    The list serves to bound the output over all combinations of up to k substitutions, as long as
    each substitution changes only the tokens of its own word. So the result is None if a
    substitution changes the number of tokens or tokens of another word, or if the tokenizer reads
    several substitutions together differently than one by one.
    """
    ids_before = reader.read(draft)
    word_of_token = [i for i, word in enumerate(draft.words) for _ in word]
    substitutions = []
    for text in _replace_each_word(reader, draft):
        if len(text.ids) != len(ids_before):
            return None
        # The numbers of the words with a token that changed.
        pairs = zip(word_of_token, text.ids, ids_before, strict=True)
        changed_words = {word for word, new_id, old_id in pairs if new_id != old_id}
        if changed_words - {text.word}:
            return None
        if changed_words:
            substitutions.append(text)
    # A tokenizer may join words that touch, with no character between them. So read every
    # combination of substitutions in a chain of such words, too. With more than COMBINATIONS of
    # them, the answer is unknown, which counts as None.
    # Without characters no tokenizer reads the text, and no words touch.
    spans = draft.source.spans if draft.source else ()
    for number, together in enumerate(_combine(substitutions, _chain(spans), k)):
        if number == COMBINATIONS or not _reads_alike(reader, draft, together, word_of_token):
            return None
    return [(text.word, text.ids) for text in substitutions]


def _replace_each_word(reader: Reader, draft: Draft) -> Iterator[ChangedText]:
    """Yield a text with every substitute of every word, one at a time, as the model reads it."""
    near = neighbours(reader, draft.ids)
    for i in range(len(draft.words)):
        for new in find_substitutes(near, draft, i, reader.lexicon):
            changed = _replace_word(draft, i, new, reader.lexicon)
            if changed is not None:
                yield ChangedText(word=i, ids=reader.read(changed), draft=changed)


def _reads_alike(
    reader: Reader,
    draft: Draft,
    changes: Sequence[ChangedText],
    word_of_token: Sequence[int],
) -> bool:
    """Say whether the tokenizer reads several changes together as the tokens of each change alone.

    Args:
        reader: how the model reads texts.
        draft: the unchanged text.
        changes: one substitution each for several words.
        word_of_token: number of the word of each token.
    """
    expected = list(reader.read(draft))
    spelled: list[tuple[int, str]] = []
    for change in changes:
        spelled.extend(change.draft.spelled)
        for position, word in enumerate(word_of_token):
            if word == change.word:
                expected[position] = change.ids[position]
    return reader.read(replace(draft, spelled=tuple(spelled))) == tuple(expected)


def _chain(spans: Sequence[Sequence[Span]]) -> list[list[int]]:
    """Return chains of words that touch, with no character between them, by number of the word.

    A tokenizer may read such words as one word. `spans` has for each word the positions of its
    tokens: (index of the text in a pair, first character, one past the last character).
    """
    chains = [[0]]
    for i, (before, after) in enumerate(pairwise(spans), 1):
        piece_before, _, end_before = before[-1]
        piece, start, _ = after[0]
        if piece != piece_before or start > end_before:
            chains.append([])
        chains[-1].append(i)
    return chains


def _combine(
    substitutions: Sequence[ChangedText], chains: Sequence[Sequence[int]], k: int
) -> Iterator[tuple[ChangedText, ...]]:
    """Yield every combination of substitutions in two to k words of a chain, one for each word.

    Args:
        substitutions: the texts with one word replaced.
        chains: groups of words that touch, from `_chain`.
        k: largest number of words.
    """
    for chain in chains:
        of_words = group_values((text.word, text) for text in substitutions if text.word in chain)
        most = min(k, len(of_words))
        for size in range(2, most + 1):
            for words in combinations(of_words.values(), size):
                yield from product(*words)


def _replace_word(draft: Draft, i: int, token: int, lexicon: Lexicon) -> Draft | None:
    """Replace word i, which is one token, by another token; None if the result is not a word.

    The lexicon, the vocabulary of the model, writes the new token in characters.
    """
    if draft.source is None:  # the characters are unknown: replace the token only
        return draft.with_word(i, (token,))
    new = lexicon.write(token)
    old = draft.source.word(i)
    # Not a word: empty, with a blank inside, or without a difference in characters.
    if len(new.split()) != 1 or len(old.split()) != 1 or new == old:
        return None
    return draft.with_word(i, (token,), new)


# Characters


def rewrite_characters(
    oracle: TextOracle, drafts: list[Draft], y: Tensor, budget: int, turn: Turn
) -> list[Draft]:
    """Make at most `budget` typing errors in each text, each where it lowers the margin most.

    The margin is the logit of the label minus the largest other logit. A step tries up to
    `turn.attack.queries` errors. Words take turns, beginning with the word on which the margin
    depends most: its tokens have the largest sum of gradient norms. The errors of a word have a
    fixed order, so the search is not random. Words of a single letter are not changed.

    Raises:
        UsageError: the model has no tokenizer that can spell.
    """
    lexicon = oracle.reader.lexicon
    tokenize = lexicon.encode
    if lexicon.read is None or tokenize is None:
        text = "the attack characters needs a tokenizer that spells tokens; this model has none"
        advice = "Put the tokenizer's files beside config.json, or leave characters out."
        raise UsageError(text, advice)
    encode = cache(lambda text: tuple(tokenize(text)))

    def propose(draft: Draft, slope: Slope) -> Sequence[Change]:
        """Return every possible error; words take turns, the word of steepest gradient first.

        `slope` is the gradient of the margin by the embedding of each token, (tokens, width).
        """
        # For each word the sum of the gradient norms of its tokens. The tokens of all words follow
        # one another: each word takes the next len(word) norms.
        norms = iter(slope.norm(dim=1).tolist())
        steepness = [sum(islice(norms, len(word))) for word in draft.words]
        words, letters = spell_words(draft, lexicon)
        of_words = []
        for i in sorted(words, key=lambda i: -steepness[i]):
            changes = []
            for spelling in _list_misspellings(words[i], letters):
                make = partial(_respell, draft, i, spelling, encode)
                changes.append(Change(word=i, make=make))
            of_words.append(changes)
        return list(take_turns(of_words))

    return search(oracle, drafts, y, budget, propose, turn.attack.queries)


def _respell(draft: Draft, i: int, spelling: str, encode: Callable[[str], Ids]) -> Draft:
    """Return the text with another spelling of word i.

    Args:
        draft: the text.
        i: number of the word.
        spelling: its new characters.
        encode: tokenizes a piece of text. The word is tokenized with the space before it, because
            tokens of many vocabularies begin with this space.
    """
    assert draft.source is not None
    piece, start, _ = draft.source.span(i)
    first = max(start - 1, 0)
    before = draft.source.texts[piece][first:start]
    space = before if before.isspace() else ""
    return draft.with_word(i, encode(space + spelling), spelling)


def spell_words(draft: Draft, lexicon: Lexicon) -> tuple[dict[int, str], list[str]]:
    """Return the words of a text that can have a typing error, and the letters to make it with.

    The words are listed by number, and have at least two characters. If the characters of the text
    are unknown, there are no words and no letters.
    """
    source = draft.source
    if source is None:
        return {}, []
    respelled = dict(draft.spelled)  # the spelling of each changed word, by number
    words = {}
    for i, word in enumerate(draft.words):
        if lexicon.is_fixed(word):
            continue
        text = respelled.get(i) or source.word(i)  # as an earlier change spelled it, or unchanged
        if len(text) > 1:
            words[i] = text
    # The letters of the text; if one of them is Latin, all Latin letters.
    letters = {letter for text in words.values() for letter in text.lower() if letter.isalnum()}
    if not letters.isdisjoint(string.ascii_lowercase):
        letters.update(string.ascii_lowercase)
    return words, sorted(letters)


def list_errors(word: str, letters: Sequence[str]) -> dict[str, set[str]]:
    """Return every spelling of a word with one typing error, by kind of error.

    The kinds: two letters are swapped, one is removed, inserted, or replaced by one of `letters`.
    """
    errors: dict[str, set[str]] = {kind: set() for kind in TYPING}
    for i in range(len(word) + 1):
        before, after = word[:i], word[i:]
        if len(after) > 1:
            errors["swap"].add(before + after[1] + after[0] + after[2:])
        if after:
            errors["remove"].add(before + after[1:])
        for letter in letters:
            errors["insert"].add(before + letter + after)
            if after:
                errors["replace"].add(before + letter + after[1:])
    return errors


def _list_misspellings(word: str, letters: Sequence[str]) -> list[str]:
    """Return every spelling of a word with one typing error, shuffled with the word as seed.

    The order mixes kinds and places of errors, and is the same on every machine.
    """
    errors: set[str] = set().union(*list_errors(word, letters).values())
    # The order of a set differs between processes: sort, then mix by the word.
    misspellings = sorted(errors - {word})
    random.Random(word).shuffle(misspellings)
    return misspellings
