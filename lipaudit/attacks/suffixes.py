"""Attacks that add a suffix of tokens to a text: by the gradient, and at random.

*suffix* is the greedy coordinate gradient of Zou et al., 2023 (arXiv 2307.15043), for each text
alone. A step takes the gradient of the lead at the one-hot of each token of the suffix, slope .
e(token). It tries the tokens that lower the lead most to first order, in turn with random ones,
because a gradient may be flat. The best of them is the next suffix. The suffix grows by one token
a step until it has all of them. No suffix is tried twice, so the search for one token ends when
all tokens were tried.

*random* tries as many suffixes of random tokens as cost the same: its difference from *suffix* is
what gradients add.

A suffix counts only if the changed text, read again, has the tokens of the text and those of the
suffix. Tokens that the tokenizer joins otherwise make no suffix, nor do special and added tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipaudit.attacks.oracle import Turn
from lipaudit.attacks.text import Draft, Ids, Reader, Suffix, TextOracle

if TYPE_CHECKING:
    from lipaudit.attacks.text import Slope

# Number of tokens beside the suffix that show how a tokenizer spells its blanks.
ANCHOR = 4
# Largest number of random tokens that are drawn for one place of a suffix.
DRAWS = 100


@dataclass(frozen=True)
class _Place:
    """The place of a suffix in a text.

    Attributes:
        before: whether the suffix stands before the text.
        token: number of the text's tokens before the suffix.
        character: index of the text in a pair, and of the character before which it is inserted.
        beside: the nearest tokens of the text.
    """

    before: bool
    token: int
    character: tuple[int, int]
    beside: Ids

    def spell(self, ids: Ids, reader: Reader) -> Iterator[str]:
        """Yield possible spellings of a suffix: with the tokens' own blanks, and with one blank.

        A tokenizer drops the blank of a token that is spelled alone. So the suffix is spelled
        together with the nearest tokens of the text (`beside`), which are then cut off.
        """
        spell = reader.lexicon.spell
        assert spell is not None
        neighbours = spell(self.beside)
        if self.before:
            text = spell(ids + self.beside).removesuffix(neighbours)
            yield text
            yield f"{text.strip()} "
        else:
            text = spell(self.beside + ids).removeprefix(neighbours)
            yield text
            yield f" {text.strip()}"


def _find_place(draft: Draft, *, before: bool) -> _Place | None:
    """Return the place of a suffix: before the first token of a text, or behind the last token.

    Tokens without characters, such as special tokens, do not count. The result is None if the
    characters of the text are unknown, or if no token has characters.
    """
    if draft.source is None:
        return None
    # The span of each token is (index of the text in a pair, first character, one past the last
    # character). The source has a list of spans for every word.
    spans = list(chain.from_iterable(draft.source.spans))
    # Special tokens and blanks have no characters.
    tokens = [i for i, (_, start, end) in enumerate(spans) if end > start]
    if not tokens:
        return None
    # `token` and `character` are the numbers of tokens and of characters in front of the suffix.
    # `beside` has the ANCHOR nearest tokens: the suffix is later spelled together with them.
    if before:  # the suffix is inserted where the first token starts
        token = tokens[0]
        piece, character, _ = spans[token]
        beside = draft.ids[token : token + ANCHOR]
    else:  # where the last token ends
        token = tokens[-1] + 1
        piece, _, character = spans[token - 1]
        beside = draft.ids[max(0, token - ANCHOR) : token]
    return _Place(before, token, character=(piece, character), beside=beside)


@dataclass(eq=False)
class _Search:
    """The search for a suffix of one text.

    Attributes:
        reader: how the model reads texts.
        draft: the text.
        place: the place of its suffix.
        tokens: the tokens that a suffix may have.
        max_tokens: largest number of tokens of the suffix.
        rng: source of random numbers of this text.
        best: the text with the lowest lead; the text itself before the first suffix.
        lowest: that lead; negative if the attack succeeded.
        current: the suffix that the next step changes.
        lead: the lead with that suffix.
        seen: suffixes that `make_drafts` took: tried, or read as other tokens by the tokenizer.
        tried: number of suffixes that were tried.
        ended: whether no other suffix can be tried.
    """

    reader: Reader
    draft: Draft
    place: _Place
    tokens: Tensor
    max_tokens: int
    rng: random.Random
    best: Draft
    lowest: float
    current: Ids = ()
    lead: float = math.inf
    seen: set[Ids] = field(default_factory=set)
    tried: int = 0
    ended: bool = False

    @property
    def is_open(self) -> bool:
        """Say whether the text is not broken, and other suffixes can be tried."""
        return self.lowest >= 0 and not self.ended

    def finish(self) -> Draft:
        """Return the text with the best suffix found, and with the number of tried suffixes.

        A suffix that the search has proposed is seen. It is tried if the tokenizer reads the
        longer text as the same tokens, else it is impossible. For a suffix of a single token, the
        possible suffixes can be counted, too: those tried, and all tokens not seen.
        """
        if self.max_tokens > 1:
            return replace(self.best, tried=self.tried)
        unseen = len(self.tokens) - len(self.seen)
        return replace(self.best, tried=self.tried, possible=self.tried + unseen)

    def add(self, ids: Ids, text: str = "") -> Draft:
        """Return the text with a suffix."""
        suffix = Suffix(ids, token=self.place.token, place=self.place.character, text=text)
        return replace(self.draft, suffix=suffix)

    def write(self, ids: Ids) -> Draft | None:
        """Return the text with a suffix of these tokens, spelled in characters.

        None if the tokenizer reads the longer text as other tokens.
        """
        for text in self.place.spell(ids, self.reader):
            changed = self.add(ids, text)
            if self.reader.read(changed) == changed.input_ids:
                return changed
        return None

    def make_drafts(self, suffixes: Iterator[Ids], most: int) -> list[Draft]:
        """Return at most `most` texts with new suffixes: those that were not seen before.

        The suffixes are added to `seen`. If no text is left, the search ends.
        """
        drafts = []
        for ids in suffixes:
            if ids in self.seen:
                continue
            self.seen.add(ids)
            changed = self.write(ids)
            if changed is not None:  # None: the tokenizer reads the text as other tokens
                drafts.append(changed)
            if len(drafts) == most:
                break
        self.ended = not drafts
        return drafts

    def grow(self) -> Draft:
        """Return the text with the suffix that the next step changes.

        A suffix below its full length first gets a random token; `propose` then changes only this
        token. A suffix of full length stays, and any of its tokens may change.
        """
        if len(self.current) < self.max_tokens:
            # The search keeps the suffix with the lowest lead (logit of the label minus the
            # largest other logit). From infinity, the best longer suffix replaces the current
            # one in any case, even if its lead is higher.
            self.lead = math.inf
            return self.add((*self.current, self._draw_token()))
        return self.add(self.current)

    def propose(self, draft: Draft, slope: Slope) -> Iterator[Ids]:
        """Yield suffixes with one changed token: the most promising one and a random one in turn.

        The attack lowers the lead of a text: the logit of the label minus the largest other logit
        (with a target class see `measure_leads`). The most promising suffix lowers it most, to
        first order. Every suffix comes twice, once in each of the two orders: the caller,
        `make_drafts`, skips suffixes that it has seen.

        Args:
            draft: the text with the suffix of `grow`.
            slope: gradient of the lead in the embedding of each token of the draft, (tokens,
                width).
        """
        assert draft.suffix is not None
        ids = draft.suffix.ids
        first = 0  # the first position of the suffix that changes
        if len(ids) > len(self.current):  # a new token was added: only that one changes
            first = len(ids) - 1
        start = self.place.token + first
        end = self.place.token + len(ids)
        slopes = slope[start:end]  # (positions, width)
        # Embeddings e of the tokens in the suffix now, and of all tokens that it may have.
        embeddings = self.reader.table[list(ids[first:])]
        table = self.reader.table[self.tokens.to(embeddings.device)]
        # To first order, another token at a position changes the lead by
        # slope . e(token) - slope . e(token now), (positions, tokens).
        now = (slopes * embeddings).sum(1, keepdim=True)
        lead_changes = slopes @ table.T - now
        # A pair (position, token) has the number position * len(tokens) + token. The pair with
        # the lowest change comes first.
        by_gradient = lead_changes.flatten().argsort(stable=True).cpu()
        at_random = self._shuffle(len(by_gradient))
        in_turn = torch.stack([by_gradient, at_random], 1).flatten()
        for index in in_turn.tolist():
            row, token = divmod(index, len(self.tokens))
            position = first + row
            yield (*ids[:position], int(self.tokens[token]), *ids[position + 1 :])

    def draw(self) -> Iterator[Ids]:
        """Yield random suffixes of `max_tokens` tokens that the tokenizer reads as these tokens.

        `make_drafts` reads from this generator until it has enough texts, and adds each suffix to
        `seen`. A suffix that is seen already, or too short, is a failure. After DRAWS failures in
        all, new suffixes are too rare, and the generator ends.
        """
        if self.max_tokens == 1:  # every token once
            for token in self._shuffle(len(self.tokens)):
                yield (int(self.tokens[token]),)
            return
        failures = 0
        while failures < DRAWS:
            ids: Ids = ()
            # Add one random token at a time. A token that the tokenizer would join with the others
            # is left out, and another one is drawn.
            for _ in range(DRAWS * self.max_tokens):
                longer = (*ids, self._draw_token())
                if self.write(longer) is not None:
                    ids = longer
                if len(ids) == self.max_tokens:
                    break
            if len(ids) == self.max_tokens and ids not in self.seen:
                yield ids
            else:
                failures += 1

    def note_leads(self, drafts: Sequence[Draft], leads: Sequence[float]) -> None:
        """Record the leads of texts with suffixes: the lowest of this step, and of all steps.

        A lead is the logit of the label minus the largest other logit: the lower, the better for
        the attack. The next step changes the suffix with the lowest lead of this step.
        """
        self.tried += len(drafts)
        for draft, lead in zip(drafts, leads, strict=True):
            assert draft.suffix is not None
            if lead < self.lead:
                self.current = draft.suffix.ids
                self.lead = lead
            if lead < self.lowest:
                self.best = draft
                self.lowest = lead

    def _draw_token(self) -> int:
        return int(self.tokens[self.rng.randrange(len(self.tokens))])

    def _shuffle(self, count: int) -> Tensor:
        """Return the numbers below a count in random order."""
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        return torch.randperm(count, generator=generator)


def search_suffix(
    oracle: TextOracle, drafts: list[Draft], y: Tensor, budget: int, turn: Turn
) -> list[Draft]:
    """Add a suffix of at most `budget` tokens to each text, by greedy coordinate gradient (GCG).

    The lead of a text is the logit of the label minus the largest other logit; with a target class
    see `measure_leads`. A negative lead means that the attack succeeded. A step takes the gradient
    of the lead by the embeddings of the suffix, and tries new suffixes of each text that is not
    broken yet.

    Args:
        oracle: the model.
        drafts: the texts.
        y: the labels of the texts.
        budget: largest number of tokens of a suffix.
        turn: this run of the attack: its random numbers, and its settings. `turn.attack.steps` is
            the number of steps, `turn.attack.queries` the number of suffixes per text and step.
    """
    searches = _begin_searches(oracle, drafts, y, budget, turn)
    for _ in range(turn.attack.steps):
        # The texts that are not broken yet and have suffixes to try.
        positions = [i for i, search in searches.items() if search.is_open]
        if not positions:
            break
        longer = [searches[i].grow() for i in positions]
        slopes = oracle.slopes([draft.input_ids for draft in longer], y[positions])
        changed = {}
        for i, draft, slope in zip(positions, longer, slopes, strict=True):
            proposed = searches[i].propose(draft, draft.align(slope))
            changed[i] = searches[i].make_drafts(proposed, most=turn.attack.queries)
        _try_suffixes(oracle, y, searches, changed)
    return _list_best(drafts, searches)


def draw_suffix(
    oracle: TextOracle, drafts: list[Draft], y: Tensor, budget: int, turn: Turn
) -> list[Draft]:
    """Add `budget` random tokens to each text, and keep the suffix with the lowest lead.

    The lead of a text is the logit of the label minus the largest other logit; with a target class
    see `measure_leads`. An attack succeeds at a negative lead. A text gets as many suffixes as
    `search_suffix` takes forward passes, where a gradient counts as three. So the two attacks can
    be compared at equal cost.
    """
    searches = _begin_searches(oracle, drafts, y, budget, turn)
    queries = turn.attack.queries + 3  # the suffixes and the gradient of a step
    for _ in range(turn.attack.steps):
        changed = {}
        for i, search in searches.items():
            if search.is_open:
                changed[i] = search.make_drafts(search.draw(), most=queries)
        _try_suffixes(oracle, y, searches, changed)
    return _list_best(drafts, searches)


def _begin_searches(
    oracle: TextOracle, drafts: Sequence[Draft], y: Tensor, budget: int, turn: Turn
) -> dict[int, _Search]:
    """Return a search for each text that can have a suffix, by the position of the text.

    Args:
        oracle: the model.
        drafts: the unchanged texts.
        y: their labels.
        budget: largest number of tokens of a suffix.
        turn: settings and random numbers of this run.
    """
    reader = oracle.reader
    tokens = _list_tokens(reader)
    # The lead of a text is the logit of its label minus the largest other logit.
    leads = oracle.score([reader.read(draft) for draft in drafts], y)
    seed = turn.generator.initial_seed()
    searches = {}
    for i, (draft, lead) in enumerate(zip(drafts, leads, strict=True)):
        place = _find_place(draft, before=turn.attack.place == "before")
        if place is None or not len(tokens):
            continue
        # Each text has a seed of its own, so its suffixes do not depend on the other texts.
        rng = random.Random(f"{seed}/{int(turn.rows[i])}")
        searches[i] = _Search(
            reader=reader,
            draft=draft,
            place=place,
            tokens=tokens,
            max_tokens=budget,
            rng=rng,
            # Until a suffix was tried, the best text is the unchanged one.
            best=draft,
            lowest=lead,
        )
    return searches


def _list_tokens(reader: Reader) -> Tensor:
    """Return the ids that a suffix may have: with a spelling and an embedding, and not special."""
    reserved = reader.lexicon.reserved
    count = min(len(reader.lexicon.tokens), len(reader.table))
    return torch.tensor([i for i in range(count) if i not in reserved])


def _try_suffixes(
    oracle: TextOracle,
    y: Tensor,
    searches: dict[int, _Search],
    changed: dict[int, list[Draft]],
) -> None:
    """Evaluate the changed texts of all searches in one batch, and record their leads.

    The lead of a text is the logit of its label minus the largest other logit.

    Args:
        oracle: the model.
        y: labels of the unchanged texts.
        searches: by the position of the unchanged text.
        changed: texts with suffixes, by the position of the unchanged text.
    """
    ids = {}
    for i, drafts in changed.items():
        ids[i] = [draft.input_ids for draft in drafts]
    leads = oracle.score_changes(ids, y)
    for i, drafts in changed.items():
        searches[i].note_leads(drafts, leads[i])


def _list_best(drafts: Sequence[Draft], searches: dict[int, _Search]) -> list[Draft]:
    """Return the best text of each search; texts without a search stay as they are."""
    best = list(drafts)
    for i, search in searches.items():
        best[i] = search.finish()
    return best
