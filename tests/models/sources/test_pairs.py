"""Pairs of texts: the model must be fed what its own tokenizer would feed it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lipaudit.data.batch import draw_indices
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError
from lipaudit.models.sources.loader import load_net

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very"]
SIZES = {"vocab_size": len(WORDS), "num_labels": 3, "max_position_embeddings": 32}
TEXTS = [
    ("a good film", "very bad"),
    ("bad", "a very very good film"),
    ("film", "film"),
]


def _bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        **SIZES, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertForSequenceClassification(config)
    # Small by default: a wrong segment must show.
    torch.nn.init.normal_(model.bert.embeddings.token_type_embeddings.weight)
    return model


def _distilbert() -> torch.nn.Module:
    config = transformers.DistilBertConfig(**SIZES, dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    return transformers.DistilBertForSequenceClassification(config)


def _saved(folder: Path, module: torch.nn.Module, tokenizer: str) -> Any:
    """Write a model and its tokenizer; return the tokenizer."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    own = getattr(transformers, tokenizer)(str(folder / "vocab.txt"))
    own.save_pretrained(folder)
    module.save_pretrained(folder)
    return own


@pytest.mark.parametrize(
    ("model", "tokenizer"),
    [(_bert, "BertTokenizerFast"), (_distilbert, "DistilBertTokenizerFast")],
)
def test_pairs_are_fed_as_the_tokenizer_feeds_them(tmp_path, model, tokenizer):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = model().eval()
    own = _saved(tmp_path / "model", module, tokenizer)
    net = load_net(str(tmp_path / "model"))
    lines = [json.dumps({"premise": a, "hypothesis": b}) for a, b in TEXTS]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    batch = load_data(str(tmp_path / "t.jsonl"), net, DataOptions(samples=3)).batch
    logits = net.output(batch)
    for i, j in enumerate(draw_indices(3, 3, 0)):
        with torch.no_grad():
            truth = module(**own(*TEXTS[j], return_tensors="pt")).logits
        torch.testing.assert_close(logits[i : i + 1], truth, rtol=1e-5, atol=1e-6)


def test_types_that_do_not_follow_from_the_ids_are_refused(tmp_path):
    _saved(tmp_path / "model", _bert().eval(), "BertTokenizerFast")
    net = load_net(str(tmp_path / "model"))
    with pytest.raises(InputError, match=r"token types of 'a \[SEP\] film' do not follow"):
        net.tokenize_pair("a [SEP] film", "bad", 9)


@pytest.mark.parametrize("model", [_bert, _distilbert])
def test_single_texts_are_fed_as_before(tmp_path, model):
    """To the last bit: padding behind the only end belongs to no second text."""
    own = _saved(tmp_path / "model", model(), "BertTokenizerFast")
    net = load_net(str(tmp_path / "model"))
    ids = torch.tensor([own("a good film")["input_ids"] + [0, 0]])
    assert torch.equal(net.read(net.call(ids, None)), net.module(ids).logits)
    mask = ids > 0
    assert torch.equal(net.read(net.call(ids, mask)), net.module(ids, mask.long()).logits)
