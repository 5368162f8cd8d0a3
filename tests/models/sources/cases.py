"""Small models of transformers in directories, and what loading refuses."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lipaudit import measure
from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, LipauditError
from lipaudit.models.sources.loader import LoadOptions, load_net
from tests.nets import TEXT

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "keeper", "wrote", "what", "he", "saw"]
SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 20,
}  # fmt: skip
PIXELS = {k: v for k, v in SMALL.items() if k.startswith(("hidden", "num", "inter"))}
PIXELS |= {"image_size": 8, "patch_size": 4}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
BART = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "max_position_embeddings": 24, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "num_labels": 3,
}  # fmt: skip
IDS = torch.tensor([[2, 4, 5, 6, 3], [2, 7, 3, 0, 0]])
MASK = IDS != 0
BATCH = Batch(IDS, None, ("a", "b"), MASK)


class Payload:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return (print, ("this code ran",))


def refused(spec, kind=InputError, **options) -> str:
    """Return what an error says, once it is the right one and says what to do."""
    with pytest.raises(LipauditError) as caught:
        load_net(str(spec), LoadOptions(**options))
    assert type(caught.value) is kind
    assert caught.value.exit_code == kind.exit_code
    assert caught.value.advice
    return f"{caught.value.message} | {caught.value.advice}"


def save(module, path, *, tokenizer=True):
    """Save a model as transformers does, with a tokenizer of a few words."""
    module.save_pretrained(path)
    if tokenizer:
        words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
            sep_token="[SEP]", model_max_length=16,
        ).save_pretrained(path)  # fmt: skip
    return str(path)


def build(kind, **settings):
    """Build a model of transformers with the same random weights each time."""
    torch.manual_seed(0)
    config = getattr(transformers, kind).config_class(**settings)
    return getattr(transformers, kind)(config).eval()


def bert(**settings):
    return build("BertForSequenceClassification", **SMALL | {"num_labels": 3} | settings)


def vit(**settings):
    return build("ViTForImageClassification", **PIXELS | {"num_labels": 3} | settings)


def numbered(x):
    return Batch(x, None, tuple(map(str, range(len(x)))))


def change(path, edit, file="model.safetensors"):
    """Edit the weights of a directory; an edit may return others."""
    weights = load_file(path / file)
    edited = edit(weights)
    weights = edited if isinstance(edited, dict) else weights
    save_file(weights, path / file, metadata={"format": "pt"})


def configure(path, file="config.json", **fields):
    """Set fields of a configuration."""
    known = json.loads((path / file).read_text()) if (path / file).is_file() else {}
    (path / file).write_text(json.dumps(known | fields))


def cut(path):
    """Leave the first half of a file."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def qwen(path, dtype="float32", **extra):
    sizes = TEXT | {"vocab_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 2}
    build("Qwen2ForCausalLM", **sizes | extra).to(getattr(torch, dtype)).save_pretrained(path)
    return str(path)


def classifier(path, dtype="float32"):
    """Save a classifier of texts, with attention that is not uniform, in a precision."""
    sizes = TEXT | {"vocab_size": 64, "num_hidden_layers": 3, "num_labels": 3}
    module = build("BertForSequenceClassification", **sizes, initializer_range=0.5)
    module.to(getattr(torch, dtype)).save_pretrained(path)
    return str(path)


def texts(path):
    """Save two texts of token ids with their labels."""
    ids = torch.randint(4, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    np.savez(path / "ids.npz", x=ids.numpy(), y=np.array([0, 1]))
    return str(path / "ids.npz")


KEPT = ("device-map", "half-precision", "stored-weights")
"""Codes of notes on how weights are kept."""


def figures(model, name, **options):
    """Return a report but for times and how weights are kept, and the codes of its notes."""
    report = measure(model, name, **({"samples": 2} | options)).model_dump(mode="json")
    for key in ("created", "device_map"):
        report["run"].pop(key)
    codes = [note["code"] for section in report["sections"] for note in section["notes"]]
    for section in report["sections"]:
        section["notes"] = [n for n in section["notes"] if n["code"] not in KEPT]
        for row in section["rows"]:
            row.pop("seconds", None)
    return report, codes
