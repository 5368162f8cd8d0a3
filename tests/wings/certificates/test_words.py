"""Certificates of near words, held to a closed form and to every replacement."""

import re
from itertools import combinations, product

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import ModelSpec
from lipaudit.attacks.rewriting import list_substitutes
from lipaudit.attacks.text import BEGINS, FIXED, Lexicon, Reader
from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, UsageError
from lipaudit.measures.texts import make_reader, read_texts
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import borrow
from lipaudit.wings.certificates.certificate import Proof, certify_ball
from tests.measures.cases import Bag, Words, in_order

TOKENS = 4


def spec_of(model):
    return ModelSpec(model.eval(), (TOKENS,), kind="text", vocabulary=len(model.embed.weight))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_mean_of_words_is_certified_exactly_where_no_k_near_words_turn_it(k):
    ids = torch.randint(1, 120, (12, TOKENS), generator=torch.Generator().manual_seed(k))
    outcomes = []
    with borrow(spec_of(Bag(120)), LoadOptions(dtype="float64"), None) as net:
        reader, weight = make_reader(net), net.module.head.weight
        worth = (net.module.embed.weight @ (weight[0] - weight[1])) / TOKENS
        for each in ids:
            sample = Batch(each[None], None, ("0",))
            texts = read_texts(reader, sample, characters=False)
            logits = net.output(sample)[0]
            label = int(logits.argmax())
            sign = 1 if label == 0 else -1
            drops = torch.zeros(TOKENS, dtype=torch.float64)
            for word, changed in list_substitutes(reader, texts.drafts[0], k):
                drop = sign * (worth[each[word]] - worth[changed[word]])
                drops[word] = max(drops[word], drop)
            left = (logits[0] - logits[1]) * sign - drops.topk(k).values.sum()
            found = certify_ball(net, sample, label, k, Proof(norm="words"), texts)
            if found.why != "broken":  # by one word, before any proof
                assert found.bound == pytest.approx(float(left), abs=1e-9)
            assert found.certified == (left > 0)
            outcomes.append(found.certified)
    assert len({*outcomes}) == 2 or k > 1


@pytest.mark.parametrize(("spread", "expected"), [(0.1, "certified"), (0.35, "broken")])
def test_no_replacements_break_what_is_certified(spread, expected):
    """Attention over words of few topics, whose embeddings are near each other."""
    model = Words()
    draw = torch.Generator().manual_seed(0)
    near = torch.randn(5, 1, 6, generator=draw) + spread * torch.randn(5, 51, 6, generator=draw)
    model.embed = nn.Embedding.from_pretrained(near.flatten(0, 1))
    ids = torch.randint(1, 255, (6, TOKENS), generator=draw)
    spec = spec_of(model)
    with borrow(spec, LoadOptions(), None) as net:
        y = net.output(Batch(ids, None, ("",) * 6)).argmax(1)
        given = {"data": (ids, y), "samples": 6, "eps": "1word,2words,4words"}
        section = lipaudit.measure(spec, "certify", **given).section("certify")
        assert section.settings["attack"] == section.settings["norm"] == "words"
        reader, verdicts = make_reader(net), set()
        for i, (x, label) in enumerate(zip(*in_order(section.samples, (ids, y)), strict=True)):
            draft = read_texts(reader, Batch(x[None], None, ("0",)), characters=False).drafts[0]
            each = [[] for _ in range(TOKENS)]
            for word, changed in list_substitutes(reader, draft, 1):
                each[word].append(changed[word])
            for k in (1, 2):
                verdict = section.samples[f"verdict@words,{k}"][i]
                verdicts.add(verdict)
                for words in combinations(range(TOKENS), k):
                    values = torch.tensor([*product(*(each[word] for word in words))])
                    texts = x.repeat(len(values), 1)
                    texts[:, list(words)] = values
                    right = net.output(Batch(texts, None, ("",) * len(texts))).argmax(1) == label
                    assert right.all() or verdict != "certified"
    assert expected in verdicts
    shares = [row.certified for row in section.rows]
    assert shares == sorted(shares, reverse=True)


class Secret(Bag):
    """A bag of words that reads the ids beside their embeddings, too."""

    def forward(self, ids, mask=None):
        return super().forward(ids, mask) * (3 + ids.sum(1, keepdim=True) % 2)


def test_a_model_that_reads_ids_beside_their_embeddings_is_refused():
    data = torch.ones(2, TOKENS, dtype=torch.long)
    with pytest.raises(InputError, match="Secret reads token ids beside their embeddings"):
        lipaudit.measure(spec_of(Secret()), "certify", data=data, samples=2, eps="1word")


@pytest.mark.parametrize(("text", "k", "known"), [("aa", 1, 1), ("aa", 2, 0), ("a a", 2, 1)])
def test_words_that_a_tokenizer_joins_when_both_change_are_not_certified(text, k, known):
    """One token for each letter, but one for "bb"."""

    def read(texts, most):
        ids, spans = [], []
        for found in re.finditer("bb|a|b", texts[0]):
            ids.append(["a", "b", "bb"].index(found[0]))
            spans.append((0, *found.span()))
        return tuple(ids), tuple(spans)

    kinds = torch.tensor([BEGINS, BEGINS, FIXED])
    lexicon = Lexicon(kinds, read=read, write=lambda i: ["a", "b", "bb"][i])
    never = lambda *_: torch.empty(0)  # noqa: E731 - the model does not run
    reader = Reader(never, never, never, torch.eye(3), lexicon, 8)
    found = list_substitutes(reader, lexicon.make_draft(read((text,), 8)[0], (text,), 8), k)
    assert found == ([(0, (1, 0)), (1, (0, 1))] if known else None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"eps": "1word", "order": "2"}, "no rule for words"),
        ({"eps": "1patch"}, "patch cannot attack text"),
    ],
)
def test_what_makes_no_sense_for_words_is_refused(options, says):
    data = torch.ones(2, TOKENS, dtype=torch.long)
    with pytest.raises(UsageError, match=says):
        lipaudit.measure(spec_of(Bag()), "certify", data=data, samples=2, **options)
