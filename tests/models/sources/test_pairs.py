"""Pairs of texts: the model must be fed what its own tokenizer would feed it."""

import json

import pytest
import torch
import transformers

from lipaudit.data.batch import draw_indices
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError
from lipaudit.models.sources.loader import load_net
from tests.models.sources.cases import SMALL, build

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very"]
KINDS = {"Bert": SMALL, "DistilBert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}}
TEXTS = [("a good film", "very bad"), ("bad", "a very very good film"), ("film", "film")]


def load(folder, kind, tokenizer="Bert"):
    """Save a model and its tokenizer; return its net, the model and the tokenizer."""
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    own = getattr(transformers, f"{tokenizer}TokenizerFast")(str(folder / "vocab.txt"))
    own.save_pretrained(folder)
    sizes = KINDS[kind] | {"vocab_size": len(WORDS), "num_labels": 3}
    module = build(f"{kind}ForSequenceClassification", **sizes, initializer_range=0.5)
    module.save_pretrained(folder)
    return load_net(str(folder)), module, own


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_fed_as_the_tokenizer_feeds_them(tmp_path, kind):
    net, module, own = load(tmp_path, kind, kind)
    lines = [json.dumps({"premise": a, "hypothesis": b}) for a, b in TEXTS]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    logits = net.output(load_data(str(tmp_path / "t.jsonl"), net, DataOptions(samples=3)).batch)
    inputs = (own(*TEXTS[j], return_tensors="pt") for j in draw_indices(3, 3, 0))
    truth = torch.cat([module(**each).logits for each in inputs])
    torch.testing.assert_close(logits, truth, rtol=1e-5, atol=1e-6)


def test_types_that_do_not_follow_from_the_ids_are_refused(tmp_path):
    net, *_ = load(tmp_path, "Bert")
    with pytest.raises(InputError, match=r"token types of 'a \[SEP\] film' do not follow"):
        net.tokenize_pair("a [SEP] film", "bad", 9)


@pytest.mark.parametrize("kind", KINDS)
def test_single_texts_are_fed_as_before(tmp_path, kind):
    """To the last bit: padding behind the only end belongs to no second text."""
    net, _, own = load(tmp_path, kind)
    ids = torch.tensor([own("a good film")["input_ids"] + [0, 0]])
    mask = ids > 0
    assert torch.equal(net.read(net.call(ids, None)), net.module(ids).logits)
    assert torch.equal(net.read(net.call(ids, mask)), net.module(ids, mask.long()).logits)
