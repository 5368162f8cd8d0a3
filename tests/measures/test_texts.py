"""Gradients, maps and attacks by token, and that no text depends on those beside it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import lipaudit
from lipaudit.attacks.text import Lexicon
from lipaudit.data.batch import Batch, ProcessBatches
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.engine.execute import execute, run_shard
from lipaudit.engine.prepare import Request, prepare
from lipaudit.engine.shards import merge
from lipaudit.errors import InputError
from lipaudit.measures import drawings, load_measures
from lipaudit.measures.attack import AttackOptions
from lipaudit.measures.attention import AttentionOptions
from lipaudit.measures.bounds import BoundsOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.settings import RunOptions
from lipaudit.tables.weakest import find_worst
from tests.measures.cases import run_measure
from tests.nets import own_net

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very", "##s"]
TEXTS = ["a good film", "very very bad films", "bad", "a film a very good film", "films"]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module", params=[3, 0], ids=["classes", "features"])
def bert(request, tmp_path_factory):
    """Directory, net and texts of a saved model; without classes it is an encoder."""
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
    net = load_net(str(folder), LoadOptions(dtype="float64", device="cpu"))
    return folder, net, load_data(str(folder / "t.jsonl"), net, DataOptions(samples=5)).batch


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
    _, net, batch = bert
    classes = net.classes or 0
    assert batch.mask is not None
    (section,) = run_measure("jacobian", net, *batch.split(2), tol=1e-10, within=1e-8)
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


def net_of(x, layer):
    return own_net(nn.Sequential(nn.Flatten(), layer), tuple(x.shape[1:]), "float64")


@pytest.mark.parametrize("outputs", [1, 5, 40])
def test_tokens_that_are_no_text_go_by_their_position(outputs):
    x = torch.randn(3, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer = nn.Linear(36, outputs)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(2))
    batch = Batch(x, None, ("0" * 12, "1" * 12, "2" * 12))
    net = net_of(x, layer)
    (section,) = run_measure("jacobian", net, batch, tol=1e-10, within=1e-8)
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
    x = torch.ones(1, 6, dtype=torch.float64)  # a waveform has no tokens
    net, batch = net_of(x, nn.Linear(6, 2)), Batch(x, None, ("a",))
    assert drawings.describe_gradients(net, batch, x, "margin") == {}


def test_a_token_is_written_as_text_where_that_shows_anything():
    spelled = {0: "", 1: " the", 2: "\n", 3: "\ufffd"}
    kept = ("<s>", "\u0120the", "\u010a", "\u00c3")
    lexicon = Lexicon(torch.zeros(4).long(), lambda ids: spelled[ids[0]], tokens=kept)
    assert [lexicon.name(i) for i in range(4)] == ["<s>", "the", "\u010a", "\u00c3"]
    assert Lexicon(torch.zeros(4).long()).name(3) == "3"


def test_a_map_of_a_text_has_its_tokens(bert):
    _, net, batch = bert
    written = {
        name: tuple(WORDS[i] for i in x[mask].tolist())
        for name, x, mask in zip(batch.ids, batch.x, batch.mask, strict=True)
    }
    longest = max(map(len, written.values()))
    assert len(written[batch.ids[0]]) < longest  # so that its row is padded
    (section,) = run_measure("attention", net, batch, map="1.1")
    ((name, whose),) = section.attended.items()
    assert name == "map@1.1"
    assert (whose.sample, whose.tokens) == (batch.ids[0], written[batch.ids[0]])


@pytest.mark.parametrize("bert", [3], indirect=True)
@pytest.mark.parametrize(("attack", "eps"), [("pgd", "1"), ("words", "3words")])
def test_what_an_attack_made_of_a_text_has_its_classes_and_scores(bert, attack, eps):
    _, net, batch = bert
    names = ("down", "so-so", "up")
    net = replace(net, labels=names)
    own = torch.stack([scores_of(net, x[m]) for x, m in zip(batch.x, batch.mask, strict=True)])
    batch = replace(batch, y=own.argmax(1))  # all are right, so that some can be broken
    (section,) = run_measure("attack", net, batch, attack=attack, eps=(eps,), batch_size=2)
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


LETTERS = ["<pad>", "<unk>", *"bcdefgh"]
LONG = " ".join("bcdefgh"[i * i % 7] for i in range(34))
APART = ["b c d e f g h b c", "b", "c e", "d e", LONG]
SMALL = {
    "vocab_size": len(LETTERS), "hidden_size": 64, "num_hidden_layers": 1, "num_labels": 3,
    "num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 40,
    "pad_token_id": 0,
}  # fmt: skip
OPTIONS = {
    "bounds": BoundsOptions(concat=True),
    "attention": AttentionOptions(),
    "jacobian": JacobianOptions(per_layer=True),
}


def save_classifier(folder, kind: str, **settings) -> transformers.PreTrainedModel:
    """Save a small classifier with a tokenizer of one id per word, and return it."""
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(LETTERS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SMALL | settings)
        module = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    module.save_pretrained(folder)
    return module


def write_texts(path, texts) -> str:
    """Write a table of texts, and return where."""
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path)


@pytest.mark.parametrize("kind", ["ConvBert", "Bert"])
def test_an_attack_refuses_a_model_that_reads_padding(tmp_path, kind):
    module = save_classifier(tmp_path, kind)
    ids = torch.tensor([[2, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    with torch.no_grad():
        alone = module(ids).logits
        padded = module(torch.nn.functional.pad(ids, (0, 2)), attention_mask=mask).logits
    reads = not torch.allclose(alone, padded, atol=1e-3)
    assert reads == (kind == "ConvBert")  # says plain transformers
    rows = [{"text": text, "label": i % 3} for i, text in enumerate(APART)]
    data = tmp_path / "labelled.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    run = RunOptions(data=str(data), samples=len(APART), device="cpu")
    request = Request(str(tmp_path), {"attack": AttackOptions(eps=["0.1"])}, run)
    if not reads:
        assert len(prepare(request).samples.batch) == len(APART)
        return
    with pytest.raises(InputError, match="reads padding"):
        prepare(request)
    data.write_text("\n".join(map(json.dumps, [r for r in rows if r["text"] in ("c e", "d e")])))
    assert prepare(request).samples.batch.mask is None  # nothing is padded, nothing refused


MIXED = [" ".join("bcdefgh"[(i + j) % 7] for j in range((2, 5, 3, 2)[i % 4])) for i in range(11)]


def test_a_report_keeps_the_tokens_of_its_worst_samples(tmp_path):
    save_classifier(tmp_path / "model", "Bert")
    data = write_texts(tmp_path / "mixed.jsonl", MIXED)
    model = str(tmp_path / "model")
    report = lipaudit.measure(model, "jacobian", data=data, samples=len(MIXED))
    assert list(report.section("jacobian").gradients) == find_worst(report)
    assert len(find_worst(report)) == 10 < len(report.section("jacobian").ids)


@pytest.mark.parametrize(
    ("kind", "name"), [("Bert", "bounds"), ("Llama", "attention"), ("Llama", "jacobian")]
)
def test_texts_of_one_length_fill_batches_and_keep_their_order(tmp_path, kind, name):
    """And what is measured of a text is the same alone, in a batch, and in a shard."""
    save_classifier(tmp_path / "model", kind, hidden_size=16, intermediate_size=24)
    data = write_texts(tmp_path / "mixed.jsonl", MIXED)

    def request(**more) -> Request:
        run = RunOptions(data=data, samples=len(MIXED), dtype="float64", device="cpu", **more)
        return Request(str(tmp_path / "model"), {name: OPTIONS[name]}, run)

    job = prepare(request(batch_size=4))
    _, batches = job.batches(name)
    alike = job.samples.batch.mask.sum(1).bincount()
    assert len(batches) == sum(-(-count // 4) for count in alike.tolist())  # as few as can be
    assert all(batch.mask is None for batch in batches)
    together, alone = execute(job), execute(prepare(request(batch_size=1)))
    for i in (1, 2):
        run_shard(prepare(request(batch_size=4, shard=f"{i}/2", parts=tmp_path / "run")))
    merged = merge(tmp_path / "run")
    for kept, section in zip(together.sections, merged.sections, strict=True):
        # Shards know the notes of their own batches alone: rows and samples are compared.
        assert (kept.rows, kept.samples) == (section.rows, section.samples)
        for what, array in kept.arrays.items():
            np.testing.assert_array_equal(array.data, section.arrays[what].data, what)
    for kept, section in zip(together.sections, alone.sections, strict=True):
        assert kept.samples["ids"] == section.samples["ids"] == job.samples.batch.ids
        for what in kept.samples.keys() - {"ids"}:
            assert kept.samples[what] == pytest.approx(section.samples[what], rel=1e-9), what
        for ours, truth in zip(kept.rows, section.rows, strict=True):
            for what, value in truth.items():
                number = isinstance(value, float)  # bounds are computed up to a tolerance
                wanted = pytest.approx(value, rel=1e-7, nan_ok=True) if number else value
                assert ours[what] == wanted, what


def test_a_run_goes_on_with_batches_of_another_size(tmp_path, monkeypatch):
    save_classifier(tmp_path / "model", "Bert")
    data = write_texts(tmp_path / "mixed.jsonl", MIXED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def job(size: int):
        run = RunOptions(data=data, samples=len(MIXED), device="cpu", batch_size=size, resume=True)
        return prepare(Request(str(tmp_path / "model"), {"jacobian": JacobianOptions()}, run))

    own, taken = load_measures()["jacobian"], list[str]()

    def parts(net, batches, options):
        for batch in batches:
            taken.extend(batch.ids)
            yield from own.compute(net, ProcessBatches(batches.first, [batch]), options)
            if len(taken) == 6:
                raise KeyboardInterrupt

    monkeypatch.setitem(load_measures(), "jacobian", replace(own, compute=parts))
    with pytest.raises(KeyboardInterrupt):
        execute(job(2))
    (section,) = execute(job(3)).sections
    assert len(taken) == len({*taken}) == len(MIXED)  # none is measured twice
    assert section.samples["ids"] == job(3).samples.batch.ids
