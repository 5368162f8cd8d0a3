"""Gradients and attention maps by token, against autograd and the models themselves."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from lipaudit.attacks.text import Lexicon
from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.engine.execute import execute
from lipaudit.engine.prepare import Request, prepare
from lipaudit.measures import attack as attacked
from lipaudit.measures import attention as by_head
from lipaudit.measures import drawings
from lipaudit.measures.attack import AttackOptions
from lipaudit.measures.attention import AttentionOptions
from lipaudit.measures.jacobian import JacobianOptions, measure, summarise
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.settings import RunOptions
from lipaudit.tables.summary import worst
from tests.nets import own_net

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very", "##s"]
TEXTS = ["a good film", "very very bad films", "bad", "a film a very good film", "films"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module", params=[3, 0], ids=["classes", "features"])
def bert(request, tmp_path_factory):
    """A saved model and its directory; without classes it is an encoder."""
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            **SIZES, initializer_range=0.3, num_labels=request.param or 2
        )
        named = "BertForSequenceClassification" if request.param else "BertModel"
        getattr(transformers, named)(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    lines = [json.dumps({"text": t, "label": i % 3}) for i, t in enumerate(TEXTS)]
    (folder / "t.jsonl").write_text("\n".join(lines))
    return folder, request.param


def dense(module, net, ids):
    """The output at one text, and its Jacobian in the embeddings (outputs, tokens, width)."""
    table = module.get_input_embeddings()
    position = torch.tensor(ids)[None]

    def f(z):
        with net.replace_embedding(z):
            return net.read(net.call(position, None))[0]

    z = table(position).detach()
    return f(z).detach(), torch.autograd.functional.jacobian(f, z)[:, 0]


def test_shares_are_those_of_the_dense_gradient(bert):
    folder, classes = bert
    net = load_net(str(folder), LoadOptions(dtype="float64", device="cpu"))
    batch = load_data(str(folder / "t.jsonl"), net, DataOptions(samples=5)).batch
    assert batch.mask is not None
    options = JacobianOptions(tol=1e-10, within=1e-8)
    section = summarise(list(measure(net, batch.split(2), options)), options)[0]
    assert section.gradients.keys() == set(batch.ids)
    for name, x, mask in zip(batch.ids, batch.x, batch.mask, strict=True):
        kept, ids = section.gradients[name], x[mask].tolist()
        output, jacobian = dense(net.module, net, ids)
        if classes:
            y = int(batch.y[batch.ids.index(name)])
            rival = max((c for c in range(classes) if c != y), key=lambda c: output[c])
            direction = jacobian[y] - jacobian[rival]
        else:
            direction = torch.linalg.svd(jacobian.flatten(1))[2][0].view_as(jacobian[0])
        squares = direction.square().sum(1)
        np.testing.assert_allclose(kept.shares, squares / squares.sum(), rtol=3e-5, atol=1e-6)
        assert kept.of == ("margin" if classes else "direction")
        assert kept.tokens == tuple(WORDS[i] for i in ids)


def test_a_report_keeps_the_tokens_of_its_worst_samples(bert, monkeypatch):
    folder, _ = bert
    monkeypatch.setattr("lipaudit.engine.results.worst", lambda report: worst(report, 2))
    run = RunOptions(data=str(folder / "t.jsonl"), samples=5)
    report = execute(prepare(Request(str(folder), {"jacobian": JacobianOptions()}, run)))
    section = report.section("jacobian")
    assert list(section.gradients) == worst(report, 2)
    assert len(section.samples["ids"]) == 5


def net_of(x, layer):
    return own_net(nn.Sequential(nn.Flatten(), layer), tuple(x.shape[1:]), "float64")


@pytest.mark.parametrize("outputs", [1, 5, 40])
def test_tokens_that_are_no_text_go_by_their_position(outputs):
    x = torch.randn(3, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer = nn.Linear(36, outputs)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(2))
    batch = Batch(x, None, ("0" * 12, "1" * 12, "2" * 12))
    net = net_of(x, layer)
    options = JacobianOptions(tol=1e-10, within=1e-8)
    section = summarise(list(measure(net, [batch], options)), options)[0]
    weight = layer.weight.detach()
    for name, f in zip(batch.ids, net.output(batch).detach(), strict=True):
        kept = section.gradients[name]
        if kept.of == "margin":
            best, second = f.topk(2).indices
            direction = weight[best] - weight[second]
        else:
            direction = torch.linalg.svd(weight)[2][0]
        squares = direction.view(4, 9).square().sum(1)
        np.testing.assert_allclose(kept.shares, squares / squares.sum(), rtol=3e-5, atol=1e-6)
        assert kept.tokens == ("0", "1", "2", "3")
        assert kept.of == ("margin" if outputs > 1 else "direction")


def test_padding_has_no_share_and_no_size_matters():
    batch = Batch(torch.zeros(2, 3, dtype=torch.int64), None, ("a", "b"),
                  torch.tensor([[True, True, False], [True, True, True]]))  # fmt: skip
    gradient = torch.tensor([[[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]], [[1.0, 1.0]] * 3])
    for scale in (1.0, 1e-200, 1e200):
        first, second = drawings.share_squares(batch, gradient.double() * scale)
        assert first == pytest.approx((0.36, 0.64))
        assert second == pytest.approx((1 / 3,) * 3)
    assert drawings.share_squares(batch, gradient * 0) == [(), ()]
    net = net_of(torch.zeros(1, 3, 2), nn.Linear(6, 2))
    assert drawings.describe_gradients(net, batch, gradient * 0, "margin") == {}


def test_a_waveform_has_no_tokens():
    x = torch.ones(1, 6, dtype=torch.float64)
    net, batch = net_of(x, nn.Linear(6, 2)), Batch(x, None, ("a",))
    assert drawings.describe_gradients(net, batch, x, "margin") == {}


def test_a_token_is_written_as_text_where_that_shows_anything():
    spelled = {0: "", 1: " the", 2: "\n", 3: "\ufffd"}
    kept = ("<s>", "\u0120the", "\u010a", "\u00c3")
    lexicon = Lexicon(torch.zeros(4).long(), lambda ids: spelled[ids[0]], tokens=kept)
    assert [lexicon.name(i) for i in range(4)] == ["<s>", "the", "\u010a", "\u00c3"]
    assert Lexicon(torch.zeros(4).long()).name(3) == "3"


def test_a_map_of_a_text_has_its_tokens(bert):
    folder, _ = bert
    net = load_net(str(folder), LoadOptions(device="cpu"))
    batch = load_data(str(folder / "t.jsonl"), net, DataOptions(samples=5)).batch
    written = {
        name: tuple(WORDS[i] for i in x[mask].tolist())
        for name, x, mask in zip(batch.ids, batch.x, batch.mask, strict=True)
    }
    longest = max(map(len, written.values()))
    assert len(written[batch.ids[0]]) < longest  # so that its row is padded
    options = AttentionOptions(map="1.1")
    section = by_head.summarise(list(by_head.measure(net, [batch], options)), options)[0]
    ((name, whose),) = section.attended.items()
    assert name == "map@1.1"
    assert (whose.sample, whose.tokens) == (batch.ids[0], written[batch.ids[0]])


@pytest.mark.parametrize("bert", [3], indirect=True)
@pytest.mark.parametrize(("attack", "eps"), [("pgd", "1"), ("words", "3words")])
def test_what_an_attack_made_of_a_text_has_its_classes_and_scores(bert, attack, eps):
    folder, _ = bert
    net = load_net(str(folder), LoadOptions(device="cpu"))
    names = ("down", "so-so", "up")
    net = replace(net, labels=names)
    batch = load_data(str(folder / "t.jsonl"), net, DataOptions(samples=5)).batch
    own = torch.stack([scores_of(net, x[m]) for x, m in zip(batch.x, batch.mask, strict=True)])
    batch = replace(batch, y=own.argmax(1))  # all are right, so that some can be broken
    options = AttackOptions(attack=attack, eps=(eps,), batch_size=2)
    section = attacked.summarise(list(attacked.measure(net, [batch], options)), options)[0]
    fallen = {n for n, r in zip(batch.ids, section.samples[f"robust@{section.rows[0].key}"],
                                strict=True) if not r}  # fmt: skip
    assert section.examples.keys() == fallen
    assert fallen
    assert section.classes == {int(y): names[y] for y in own.argmax(1)}
    for name, example in section.examples.items():
        i = batch.ids.index(name)
        true, said = map(names.index, example.classes)
        assert true == own[i].argmax() != said
        assert example.before == pytest.approx(own[i, [true, said]].tolist(), abs=2e-4)
        assert example.after[1] > example.after[0]
        assert example.image == ""
        assert bool(example.text) == (attack == "words")
        if example.text:
            again = scores_of(net, torch.tensor(net.tokenize(example.text, 32)))
            assert example.after == pytest.approx(again[[true, said]].tolist(), abs=2e-4)


def scores_of(net, ids):
    with torch.no_grad():
        return net.module(ids[None]).logits.softmax(1)[0]
