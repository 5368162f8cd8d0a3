"""Certificates of near words, held to a closed form and to every replacement."""

from itertools import combinations, product

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import ModelSpec
from lipaudit.attacks.text import list_substitutes
from lipaudit.data.batch import Batch
from lipaudit.errors import UsageError
from lipaudit.measures.texts import make_reader, read_texts
from lipaudit.models.certificate import Proof, certificate
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import borrow
from tests.measures.test_certify import SHAPE, Small, Words, in_order, samples

TOKENS = 4


class Bag(nn.Module):
    """The mean of embeddings: what k words can do is known in closed form."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(120, 5), nn.Linear(5, 2)

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        mask = torch.ones_like(ids) if mask is None else mask
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def spec_of(model, count=120):
    return ModelSpec(model.eval(), (TOKENS,), kind="text", vocabulary=count)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_mean_of_words_is_certified_exactly_where_no_k_near_words_turn_it(k):
    ids = torch.randint(1, 120, (12, TOKENS), generator=torch.Generator().manual_seed(k))
    outcomes = []
    with borrow(spec_of(Bag()), LoadOptions(dtype="float64"), None) as net:
        reader, weight = make_reader(net), net.module.head.weight
        worth = (net.module.embed.weight @ (weight[0] - weight[1])) / TOKENS
        for each in ids:
            sample = Batch(each[None], None, ("0",))
            texts = read_texts(reader, sample, characters=False)
            logits = net.output(sample)[0]
            label = int(logits.argmax())
            sign = 1 if label == 0 else -1
            drops = torch.zeros(TOKENS, dtype=torch.float64)
            for word, changed in list_substitutes(reader, texts.drafts[0]):
                drop = sign * (worth[each[word]] - worth[changed[word]])
                drops[word] = max(drops[word], drop)
            left = (logits[0] - logits[1]) * sign - drops.topk(k).values.sum()
            found = certificate(net, sample, label, k, Proof(norm="words"), texts)
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
    spec = spec_of(model, 255)
    with borrow(spec, LoadOptions(), None) as net:
        y = net.output(Batch(ids, None, ("",) * 6)).argmax(1)
        given = {"data": (ids, y), "samples": 6, "eps": "1word,2words,4words"}
        section = lipaudit.measure(spec, "certify", **given).section("certify")
        assert section.settings["attack"] == section.settings["norm"] == "words"
        reader, verdicts = make_reader(net), set()
        for i, (x, label) in enumerate(zip(*in_order(section.samples, (ids, y)), strict=True)):
            draft = read_texts(reader, Batch(x[None], None, ("0",)), characters=False).drafts[0]
            each = [[] for _ in range(TOKENS)]
            for word, changed in list_substitutes(reader, draft):
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"eps": "1word", "order": "2"}, "no rule for words"),
        ({"eps": "1word", "radius": True}, "--radius needs a ball"),
        ({"eps": "1word", "attack": "pgd"}, "pgd cannot change words"),
        ({"eps": "1patch"}, "patch cannot attack text"),
        ({"eps": "1word,0.1"}, "units of --eps differ"),
        ({"eps": "1character"}, "not for changed characters"),
    ],
)
def test_what_makes_no_sense_for_words_is_refused(options, says):
    data = torch.ones(2, TOKENS, dtype=torch.long)
    with pytest.raises(UsageError, match=says):
        lipaudit.measure(spec_of(Bag()), "certify", data=data, samples=2, **options)


def test_images_have_no_words():
    given = {"data": samples(Small(), 2), "input_shape": SHAPE, "samples": 2}
    with pytest.raises(UsageError, match="words cannot attack images"):
        lipaudit.measure(Small(), "certify", eps="1word", **given)
