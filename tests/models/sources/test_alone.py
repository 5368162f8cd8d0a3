"""A text in a batch is read as plain transformers reads it alone, from its characters."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.sources.loading import LoadOptions, load_net

WORDS = ["a", "<pad>", "<end>", "<cls>", "<unk>", "b", "c", "d"]
TEXTS = ["b c d a", "b", "c a", "d d c b a b", "a"]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_labels": 3,
    "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 20,
}  # fmt: skip
GPT2 = {"vocab_size": len(WORDS), "n_embd": 16, "n_layer": 1, "n_head": 2, "num_labels": 3}
XLNET = {"vocab_size": len(WORDS), "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24}
NO_PAD = {"pad_token_id": None, "bos_token_id": 3, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("kind", "settings", "template", "tokens"),
    [
        ("Llama", SIZES | NO_PAD, "$A:0 <end>:0", {"eos_token": "<end>"}),
        ("Llama", SIZES | NO_PAD, "$A:0 <end>:0", {"pad_token": "<end>"}),
        ("Llama", SIZES | NO_PAD | {"pad_token_id": 0}, "$A:0", {"pad_token": "<pad>"}),
        ("GPT2", GPT2 | NO_PAD, "$A:0", {}),
        ("GPT2", GPT2 | NO_PAD | {"pad_token_id": 2}, "$A:0 <end>:0", {"pad_token": "<end>"}),
        ("Bert", SIZES | {"pad_token_id": 1}, "<cls>:1 $A:1 <end>:1", {"pad_token": "<pad>"}),
        ("XLNet", XLNET | NO_PAD, "$A:0 <end>:0 <cls>:2", {"pad_token": "<pad>"}),
    ],
)
def test_padding_types_and_ends_are_those_of_the_text_alone(
    tmp_path, kind, settings, template, tokens
):
    own = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<end>", 2), ("<cls>", 3)]
    own.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B:1", special_tokens=special
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **tokens,
    )
    tokenizer.save_pretrained(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**settings)
        module = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
        for weight in module.parameters():  # a wrong type or position must show
            torch.nn.init.normal_(weight, std=0.3)
    module.save_pretrained(tmp_path)
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
    net = load_net(str(tmp_path))
    samples = load_data(str(tmp_path / "t.jsonl"), net, DataOptions(samples=len(TEXTS)))
    logits = net.output(samples.batch)
    takes = {"input_ids", "attention_mask", *(() if kind == "Llama" else ("token_type_ids",))}
    for i, origin in enumerate(samples.origins):
        given = tokenizer(origin.text, return_tensors="pt")
        with torch.no_grad():
            truth = module(**{k: v for k, v in given.items() if k in takes}).logits
        torch.testing.assert_close(logits[i : i + 1], truth, rtol=1e-4, atol=1e-5)


def test_a_start_id_of_0_is_no_missing_one(tmp_path):
    """The decoder of a T5 without a head starts with id 0, not with the padding id."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=9, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
            decoder_start_token_id=0, pad_token_id=1,
        )  # fmt: skip
        module = transformers.T5Model(config).eval()
        torch.nn.init.normal_(module.shared.weight)
    module.save_pretrained(tmp_path)
    net = load_net(str(tmp_path), LoadOptions(device="cpu"))
    ids = torch.tensor([[5, 3, 8, 4]])
    hidden = {}
    for start in (0, 1):
        shifted = torch.tensor([[start, 5, 3, 8]])
        with torch.no_grad():
            hidden[start] = module(input_ids=ids, decoder_input_ids=shifted)[0].mean(1)
    found = net.output(Batch(ids, None, ("a" * 16,)))
    torch.testing.assert_close(found, hidden[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(hidden[0], hidden[1], atol=1e-3)
