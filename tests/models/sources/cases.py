"""Small models of transformers in directories, and what loading refuses."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, LipauditError
from lipaudit.models.sources.loader import LoadOptions, load_net

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "keeper", "wrote", "what", "he", "saw"]
SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 20,
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
    sizes = {k: v for k, v in SMALL.items() if k.startswith(("hidden", "num", "inter"))}
    sizes |= {"image_size": 8, "patch_size": 4, "num_labels": 3}
    return build("ViTForImageClassification", **sizes | settings)


def gpt2(kind="GPT2LMHeadModel", **settings):
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20}
    return build(kind, **sizes, bos_token_id=1, eos_token_id=1, **settings)


def change(path, edit, file="model.safetensors"):
    """Edit the weights of a directory."""
    weights = load_file(path / file)
    weights = edit(weights) or weights
    save_file(weights, path / file, metadata={"format": "pt"})
