"""Attacks that change texts: against every change there is, and what they must leave alone."""

from dataclasses import replace

import pytest
import torch

from lipaudit.attacks.evaluate import Chunk, Texts, evaluate_chunk
from lipaudit.attacks.kinds import Attack, Trial
from lipaudit.attacks.oracle import ByRow, margins
from lipaudit.attacks.rewriting import neighbours
from lipaudit.attacks.text import (
    BEGINS,
    FIXED,
    GOES_ON,
    Draft,
    Lexicon,
    Reader,
    TextOracle,
    check_drafts,
)
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.tables.trials import parse_radius
from tests.attacks.text_folders import list_typing_errors

PAD, START, END, UNKNOWN = 0, 1, 2, 3
LETTERS = "αβγδ"
FIRST, FURTHER = 4, 4 + len(LETTERS)
VOCABULARY = FURTHER + len(LETTERS)
"""Four ids that are no words, then each letter where it begins a word and where it goes on."""
KINDS = [FIXED] * 4 + [BEGINS] * len(LETTERS) + [GOES_ON] * len(LETTERS)
ALL = 10**6


def encode(text: str) -> list[int]:
    ids = [LETTERS.index(letter) for letter in text.strip()]
    return [FIRST + ids[0], *(FURTHER + i for i in ids[1:])] if ids else []


def spell(ids) -> str:
    return "".join(LETTERS[(i - FIRST) % len(LETTERS)] for i in ids if i >= FIRST)


def read(texts, most):
    """Tokenize a text as the model's tokenizer does, and say where each token stands."""
    ids, spans = [START], [(0, 0, 0)]
    for place, letter in enumerate(texts[0]):
        if letter != " ":
            begins = place == 0 or texts[0][place - 1] == " "
            ids.append(LETTERS.index(letter) + (FIRST if begins else FURTHER))
            spans.append((0, place, place + 1))
    ids, spans = [*ids[: most - 1], END], [*spans[: most - 1], (0, 0, 0)]
    return tuple(ids), tuple(spans)


def text(words: str) -> tuple[int, ...]:
    return (START, *(i for word in words.split() for i in encode(word)), END)


class Model:
    """Three classes from a sum over tokens that knows their places, and every tensor it read."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCABULARY, 6, generator=draw, dtype=torch.float64)
        self.place = torch.randn(40, 6, generator=draw, dtype=torch.float64)
        self.head = torch.randn(6, 3, generator=draw, dtype=torch.float64)
        self.read: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def forward(self, z, _ids, mask):
        each = torch.tanh(z + self.place[: z.shape[1]])
        return (each if mask is None else each * mask[..., None]).sum(1) @ self.head

    def output(self, ids, mask):
        self.read.append((ids, mask))
        return self.forward(self.table[ids], ids, mask)

    def reader(self, most: int = 40) -> Reader:
        return Reader(
            self.output,
            lambda ids, _mask: self.table[ids],
            self.forward,
            self.table,
            Lexicon(
                torch.tensor(KINDS), spell, encode, read=read, write=lambda token: spell([token])
            ),
            most,
            PAD,
        )


LONGER = ["αβ γα βγ", "δδ γβ αγ", "βα βα", "γδ αδ"]
TEXTS = ["αβ γ", "δ δαβ γγ", "β", "γα αδβ α βββ", "δγ", "", "αα β"]


def attacked(name, budget, *, model=None, batch_size=64, queries=ALL, texts=TEXTS, most=40):
    """Attack texts that the model gets right: labels are what it says; the last one is wrong."""
    reader = (model or Model()).reader(most)
    ids, mask = reader.pad([text(words) for words in texts])
    y = reader.output(ids, mask).argmax(1)
    y[-1] = (y[-1] + 1) % 3
    drafts = [reader.lexicon.make_draft(text(words), (words,), most) for words in texts]
    chunk = Chunk(0, reader.table[ids], y, mask, Texts(reader, drafts))
    f = ByRow(lambda z, rows: reader.forward(z, None, None if mask is None else mask[rows]))
    trial = Trial(name, name, parse_radius(str(budget)), (Attack(name, queries=queries),))
    clean, outcome = evaluate_chunk(f, chunk, [trial], box=None, batch_size=batch_size)
    assert clean.robust.tolist() == [True] * (len(texts) - 1) + [False]
    return reader, chunk, outcome


def margin(reader, ids, label) -> float:
    x, mask = reader.pad([ids])
    return float(margins(reader.output(x, mask), torch.as_tensor([label]))[0])


def substitutions(ids):
    """Yield every text that has a word of one token replaced by another one."""
    words = Lexicon(torch.tensor(KINDS)).split_words(ids)
    for place, old in enumerate(words):
        for new in range(FIRST, FURTHER):
            if len(old) == 1 and KINDS[old[0]] == BEGINS and new != old[0]:
                changed = (*words[:place], (new,), *words[place + 1 :])
                yield tuple(i for each in changed for i in each)


def errors(ids):
    """Yield every text with a typing error in a word of two letters or more."""
    words = Lexicon(torch.tensor(KINDS)).split_words(ids)
    letters = "".join({spell(word) for word in words if len(word) > 1})
    for place, word in enumerate(words):
        old = spell(word)
        for new in list_typing_errors(old, letters) - {old} if len(word) > 1 else ():
            changed = (*words[:place], tuple(encode(new)), *words[place + 1 :])
            yield tuple(i for each in changed for i in each)


@pytest.mark.parametrize(("name", "every"), [("words", substitutions), ("characters", errors)])
def test_one_change_is_the_worst_of_all(name, every):
    reader, chunk, outcome = attacked(name, 1)
    broken = 0
    for i, words in enumerate(TEXTS[:-1]):
        before = margin(reader, text(words), chunk.y[i])
        lowest = min([margin(reader, ids, chunk.y[i]) for ids in every(text(words))] or [before])
        after = margin(reader, outcome.drafts[i].ids, chunk.y[i])
        assert after == pytest.approx(min(lowest, before), abs=1e-9)
        assert bool(outcome.robust[i]) == (min(lowest, before) >= 0)
        broken += lowest < 0
    assert 0 < broken < len(TEXTS) - 1  # the test sees texts of both kinds


@pytest.mark.parametrize("name", ["words", "characters"])
def test_the_budget_is_kept_and_more_of_it_breaks_no_fewer(name):
    stands = []
    for budget in (0, 1, 2, 4):
        _, _, outcome = attacked(name, budget)
        changes = [len(draft.changed) for draft in outcome.drafts]
        assert max(changes) <= budget
        assert outcome.distance.tolist() == changes
        stands.append(outcome.robust)
    assert stands[0].tolist() == [True] * (len(TEXTS) - 1) + [False]
    for fewer, more in zip(stands, stands[1:], strict=False):
        assert bool((more <= fewer).all())
    assert int(stands[-1].sum()) < int(stands[0].sum())


@pytest.mark.parametrize("name", ["words", "characters"])
def test_what_is_no_word_stays_and_padding_is_masked(name):
    model = Model()
    _, chunk, outcome = attacked(name, 4, model=model)
    for old, new in zip(chunk.texts.drafts, outcome.drafts, strict=True):
        fixed = [i for i in old.ids if KINDS[i] == FIXED]
        assert [i for i in new.ids if KINDS[i] == FIXED] == fixed
        assert (new.ids[0], new.ids[-1]) == (START, END)
        if name == "words":
            assert [KINDS[i] for i in new.ids] == [KINDS[i] for i in old.ids]
    empty = TEXTS.index("")
    assert outcome.drafts[empty].words == ((START,), (END,))
    assert outcome.drafts[empty].texts == ("",)
    assert bool(outcome.robust[empty])
    for ids, mask in model.read:
        hidden = torch.zeros_like(ids, dtype=torch.bool) if mask is None else ~mask
        assert torch.equal(hidden, ids == PAD)


@pytest.mark.parametrize("name", ["words", "characters"])
@pytest.mark.parametrize("queries", [5, ALL])
def test_neither_the_device_batch_nor_neighbours_change_a_text(name, queries):
    (_, _, first), (_, _, second) = (
        attacked(name, 2, batch_size=size, queries=queries) for size in (64, 1)
    )
    assert first.drafts == second.drafts
    assert (first.forwards, first.backwards) == (second.forwards, second.backwards)
    _, _, alone = attacked(name, 2, queries=queries, texts=[TEXTS[3], TEXTS[-1]])
    assert alone.drafts[0] == first.drafts[3]


def test_queries_bound_the_evaluations():
    _, _, outcome = attacked("words", 1, queries=2)
    standing = len(TEXTS) - 1  # evaluated before, with a slope, at two changes, and at the end
    changeable = sum(1 in map(len, words.split()) for words in TEXTS[:-1])
    assert outcome.forwards == 3 * standing + 2 * changeable


def test_a_text_never_grows_beyond_what_the_model_takes():
    most = max(len(text(words)) for words in LONGER)
    (_, _, free), (_, _, kept) = (
        attacked("characters", 4, texts=LONGER, most=n) for n in (40, most)
    )
    assert max(len(draft.ids) for draft in kept.drafts) <= most
    assert max(len(draft.ids) for draft in free.drafts) > most


@pytest.mark.parametrize("batch_size", [64, 1])
def test_slopes_are_those_of_each_text_alone(batch_size):
    reader, chunk, _ = attacked("words", 1)
    ids = [draft.ids for draft in chunk.texts.drafts]
    slopes = TextOracle(reader, batch_size).slopes(ids, chunk.y)
    for one, label, slope in zip(ids, chunk.y, slopes, strict=True):
        z = reader.table[list(one)][None].requires_grad_()
        margins(reader.forward(z, None, None), label[None]).sum().backward()
        torch.testing.assert_close(slope, z.grad[0])


def test_neighbours_are_the_nearest_by_cosine():
    reader = Model().reader()
    near = neighbours(reader, range(VOCABULARY))
    assert set(near) == {i for i, kind in enumerate(KINDS) if kind != FIXED}
    for token, others in near.items():
        same = [i for i, k in enumerate(KINDS) if k == KINDS[token] and i != token]
        cosine = torch.cosine_similarity(reader.table[token][None], reader.table)
        assert others.tolist() == sorted(same, key=lambda i: -float(cosine[i]))


def test_a_word_is_typed_whatever_its_tokens_spell_and_none_without_spelling():
    """The characters are the user's: what tokens decode to plays no part."""
    _, chunk, _ = attacked("words", 1)
    reader = chunk.texts.reader
    mute = replace(reader.lexicon, spell=lambda ids: "")
    for words in TEXTS:
        known = mute.make_draft(text(words), (words,), 40)
        assert known.texts == (words,)
        assert [known.source.word(i) for i in range(1, len(known.words) - 1)] == words.split()
    none = replace(reader, lexicon=Lexicon(torch.tensor(KINDS)))
    chunk = replace(chunk, texts=replace(chunk.texts, reader=none))
    trial = Trial("characters", "characters", parse_radius("1"), (Attack("characters"),))
    f = ByRow(lambda z, rows: none.forward(z, None, chunk.mask[rows]))
    with pytest.raises(UsageError, match="needs a tokenizer"):
        list(evaluate_chunk(f, chunk, [trial], box=None))


@pytest.mark.parametrize(
    ("words", "changed", "message"),
    [
        (((START,), (FIRST + 1,), (END,)), (), "did not report"),
        (((UNKNOWN,), (FIRST,), (END,)), (0,), "that is not a word"),
        (((START,), (END,)), (), "that is not a word"),
        (((START,), (FIRST + 1,), (END,)), (1, 1), "made 2 changes, but only 1 are allowed"),
    ],
)
def test_an_attack_that_cheats_is_found_out(words, changed, message):
    old, lexicon = Draft(((START,), (FIRST,), (END,))), Lexicon(torch.tensor(KINDS))
    with pytest.raises(EvaluationError, match=message):
        check_drafts([Draft(words, changed)], [old], lexicon, 1, "cheat")
    check_drafts([old], [old], lexicon, 1, "honest")


def test_the_steepest_change_is_tried_first():
    """With one query a step is the first-order choice, here from a gradient taken by hand."""
    reader, chunk, outcome = attacked("words", 1, queries=1)
    for i, words in enumerate(TEXTS[:-1]):
        ids = text(words)
        z = reader.table[list(ids)][None].requires_grad_()
        margins(reader.forward(z, None, None), chunk.y[i : i + 1]).sum().backward()
        every = list(substitutions(ids))
        step = [float(((reader.table[list(n)] - z.detach()[0]) * z.grad[0]).sum()) for n in every]
        first = [every[step.index(min(step))]] if every else []
        lower = [
            n for n in first if margin(reader, n, chunk.y[i]) < margin(reader, ids, chunk.y[i])
        ]
        assert outcome.drafts[i].ids == (lower[0] if lower else ids)
