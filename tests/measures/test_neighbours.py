"""No figure of a text depends on the texts beside it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from lipaudit.data.batch import Share
from lipaudit.engine.execute import execute
from lipaudit.engine.prepare import Request, prepare
from lipaudit.engine.results import merge
from lipaudit.errors import InputError
from lipaudit.measures import load_measures
from lipaudit.measures.attack import AttackOptions
from lipaudit.measures.attention import AttentionOptions
from lipaudit.measures.bounds import BoundsOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.schema import dumps, loads
from lipaudit.settings import RunOptions

WORDS = ["<pad>", "<unk>", *"bcdefgh"]
LONG = " ".join("bcdefgh"[i * i % 7] for i in range(34))
TEXTS = ["b c d e f g h b c", "b", "c e", "d e", LONG]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 64, "num_hidden_layers": 1, "num_labels": 3,
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
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
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
    rows = [{"text": text, "label": i % 3} for i, text in enumerate(TEXTS)]
    data = tmp_path / "labelled.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    run = RunOptions(data=str(data), samples=len(TEXTS), device="cpu")
    request = Request(str(tmp_path), {"attack": AttackOptions(eps=["0.1"])}, run)
    if not reads:
        assert len(prepare(request).samples.batch) == len(TEXTS)
        return
    with pytest.raises(InputError, match="reads padding"):
        prepare(request)
    data.write_text("\n".join(map(json.dumps, [r for r in rows if r["text"] in ("c e", "d e")])))
    assert prepare(request).samples.batch.mask is None  # nothing is padded, nothing refused


MIXED = [" ".join("bcdefgh"[(i + j) % 7] for j in range((2, 5, 3, 2)[i % 4])) for i in range(11)]


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
    shards = [execute(prepare(request(batch_size=4, shard=f"{i}/2"))) for i in (1, 2)]
    merged = merge([loads(dumps(report)) for report in shards])
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
            yield from own.compute(net, Share(batches.first, [batch]), options)
            if len(taken) == 6:
                raise KeyboardInterrupt

    monkeypatch.setitem(load_measures(), "jacobian", replace(own, compute=parts))
    with pytest.raises(KeyboardInterrupt):
        execute(job(2))
    (section,) = execute(job(3)).sections
    assert len(taken) == len({*taken}) == len(MIXED)  # none is measured twice
    assert section.samples["ids"] == job(3).samples.batch.ids
