"""No figure of a text depends on the texts beside it."""

import json

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from lipaudit.engine.observer import Observer
from lipaudit.engine.prepare import Request, prepare
from lipaudit.engine.task import Task
from lipaudit.errors import InputError
from lipaudit.settings import (
    AttackOptions,
    AttentionOptions,
    BoundsOptions,
    JacobianOptions,
    RunOptions,
)

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
        config = getattr(transformers, f"{kind}Config")(**SIZES, **settings)
        module = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    module.save_pretrained(folder)
    return module


def write_texts(path, texts) -> str:
    """Write a table of texts, and return where."""
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path)


def figures(folder, data: str, name: str) -> dict[str, dict[str, np.ndarray]]:
    """Return every figure of every sample, as a run computes it, by the ids of the samples."""
    run = RunOptions(data=data, samples=len(TEXTS), dtype="float64", device="cpu")
    job = prepare(Request(str(folder), {name: OPTIONS[name]}, run))
    task = Task(job, name, job.request.measures[name], Observer())
    found = {}
    for part in task.measured(task.batches):
        for i, sample in enumerate(part.ids):
            found[sample] = {n: v[i] for n, v in part.values.items() if len(v) == len(part.ids)}
    return found


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_every_figure_of_a_text_in_a_batch_is_that_of_the_text_alone(tmp_path, kind, name):
    save_classifier(tmp_path, kind)
    together = figures(tmp_path, write_texts(tmp_path / "all.jsonl", TEXTS), name)
    assert len(together) == len(TEXTS)
    for text in TEXTS[1:5:3] + TEXTS[:1]:
        ((sample, alone),) = figures(
            tmp_path, write_texts(tmp_path / "one.jsonl", [text]), name
        ).items()
        assert together[sample].keys() == alone.keys()
        for what, value in alone.items():
            beside = together[sample][what]
            np.testing.assert_allclose(beside, value, rtol=1e-9, atol=1e-12, err_msg=what)


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
