"""How models of transformers are called and read.

What the output is:

* ``...ForImageClassification`` and ``...ForSequenceClassification``: the logits.
* Causal language models: the logits of the next token, at the last real token.
* Everything else, encoders above all: features, the mean of the last hidden state over the real
  tokens (for sentence encoders the pooling and normalisation their own files prescribe). Heads
  that stand in the file but are not read are named in a note.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.data.images import resized
from lipaudit.data.intake import warning
from lipaudit.errors import InputError
from lipaudit.models.pooling import Pooling, mean_pooling, sentence_pooling
from lipaudit.models.spec import LoadOptions, ModelSpec

CLASSIFIERS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForImageClassificationWithTeacher": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
LANGUAGE_MODELS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
}
HEADS = CLASSIFIERS | LANGUAGE_MODELS
"""The heads that are read, by how the names of their classes end, and what loads each."""

MOST_TOKENS = 512
RAW_PIXELS = warning(
    "raw-pixels",
    "no preprocessor_config.json: pixels in [0, 1] go in as they are; "
    "give --mean and --std if the model was trained otherwise",
)


def describe(module: Any, options: LoadOptions, *, path: Path | None = None) -> ModelSpec:
    """Say how a model of transformers is fed and what is read of its output.

    Tokenizer, image processor and pooling are looked for in `path`.
    """
    module.config.get_text_config().use_cache = False
    if module.main_input_name == "pixel_values":
        return _image_spec(module, options, path)
    if module.main_input_name == "input_ids":
        return _text_spec(module, path)
    raise InputError(
        f"{type(module).__name__} takes {module.main_input_name}: neither images nor text",
        "Write a py: factory that returns a ModelSpec of kind tokens.",
    )


def _image_spec(module: Any, options: LoadOptions, path: Path | None) -> ModelSpec:
    processor = _processor(path)
    shape = options.image_shape(_image_shape(module.config, processor))
    mean, std = _normalisation(processor)
    known = processor is not None or (options.mean and options.std)
    return ModelSpec(
        module,
        shape,
        mean=mean,
        std=std,
        classifier=_is_classifier(module),
        labels=_labels(module),
        aliases=_aliases(_labels(module)),
        prepare=None if options.input_size else _preparation(processor, shape),
        call=lambda x, _mask: module(pixel_values=x),
        read=None if has_head(module) else lambda out: mean_pooling(out, None),
        architecture=type(module).__name__,
        notes=() if known else (RAW_PIXELS,),
    )


def _processor(path: Path | None) -> Any:
    from transformers import AutoImageProcessor

    if path is None or not (path / "preprocessor_config.json").is_file():
        return None
    return AutoImageProcessor.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _image_shape(config: Any, processor: Any) -> tuple[int, int, int]:
    if processor is not None and processor.do_resize:
        from PIL import Image

        blank = Image.new("RGB", (256, 256))
        return tuple(_pixels(processor, blank).shape)  # type: ignore[return-value]
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return getattr(config, "num_channels", 3), height, width


def _normalisation(processor: Any) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Express the processor's steps on pixels in [0, 1]: 255 x factor, then mean and std."""
    if processor is None:
        return None, None
    scale = 255 * processor.rescale_factor if processor.do_rescale else 255.0
    mean = processor.image_mean if processor.do_normalize else (0.0,)
    std = processor.image_std if processor.do_normalize else (1.0,)
    return tuple(m / scale for m in mean), tuple(s / scale for s in std)


def _pixels(processor: Any, image: Any) -> Tensor:
    return processor(
        image, return_tensors="pt", do_rescale=True, rescale_factor=1 / 255, do_normalize=False
    )["pixel_values"][0]


def _preparation(processor: Any, shape: tuple[int, int, int]) -> Callable[[Any], Tensor] | None:
    if processor is None:
        return None
    return lambda image: resized(image, shape, [lambda i: _pixels(processor, i).clamp(0, 1)])


def _labels(module: Any) -> tuple[str, ...] | None:
    """Return the class names, unless they are the placeholders LABEL_0, LABEL_1, ..."""
    if not _is_classifier(module):
        return None
    names = [str(module.config.id2label[i]) for i in range(module.config.num_labels)]
    return None if all(n.startswith("LABEL_") for n in names) else tuple(names)


def _aliases(labels: tuple[str, ...] | None) -> dict[str, int]:
    """Return the synsets of a model of the 1000 classes of ImageNet, known by the first one."""
    if labels is None or len(labels) != 1000 or not labels[0].startswith("tench"):
        return {}
    from lipaudit.models.timm import synsets

    return synsets()


def _text_spec(module: Any, path: Path | None) -> ModelSpec:
    config = module.config.get_text_config()
    tokenizer = _tokenizer(path)
    pad = _pad_id(module, tokenizer)
    call, read = _text_output(module, sentence_pooling(path))
    return ModelSpec(
        module,
        (_most_tokens(module, config, tokenizer),),
        kind="text",
        classifier=_is_classifier(module),
        labels=_labels(module),
        vocabulary=config.vocab_size,
        tokenize=None if tokenizer is None else _tokenize(tokenizer),
        pad_id=pad,
        call=call,
        read=read,
        architecture=type(module).__name__,
    )


def _tokenizer(path: Path | None) -> Any:
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")
    if path is None or not any((path / f).is_file() for f in files):
        return None
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _tokenize(tokenizer: Any) -> Callable[[str, int], list[int]]:
    return lambda text, most: tokenizer(text, truncation=True, max_length=most)["input_ids"]


def _pad_id(module: Any, tokenizer: Any) -> int:
    """Return the padding id, and tell the model: classifiers on decoders look for it."""
    config = module.config.get_text_config()
    ends = config.eos_token_id
    known = (
        getattr(tokenizer, "pad_token_id", None),
        config.pad_token_id,
        ends[0] if isinstance(ends, list) else ends,
        0,
    )
    config.pad_token_id = next(i for i in known if i is not None)
    return config.pad_token_id


def _most_tokens(module: Any, config: Any, tokenizer: Any) -> int:
    """Return how many tokens the model takes; tokenizers without a limit say 1e30."""
    limits = [getattr(tokenizer, "model_max_length", None), getattr(config, "n_positions", None)]
    limits += [getattr(config, "max_position_embeddings", None)]
    limits += _behind_padding(module)
    return min((int(n) for n in limits if n and 0 < n < 10**6), default=MOST_TOKENS)


def _behind_padding(module: Any) -> list[int]:
    """Return the room in tables of positions that begin behind the padding id, as RoBERTa's do."""
    tables = [m for n, m in module.named_modules() if n.endswith("position_embeddings")]
    return [
        t.num_embeddings - 1 - t.padding_idx
        for t in tables
        if isinstance(t, nn.Embedding) and t.padding_idx is not None
    ]


def _text_output(module: Any, pooling: Pooling) -> tuple[Any, Any]:
    """Return `call` and `read` by kind of model; `call` passes the mask on to `read`."""
    decoder = _decoder_inputs(module)

    def call(x: Tensor, mask: Tensor | None) -> Any:
        attention = None if mask is None else mask.long()
        return module(input_ids=x, attention_mask=attention, **decoder(x, attention)), mask

    if not has_head(module):
        return call, lambda out: pooling(*out)
    if _is_classifier(module):
        return call, lambda out: out[0].logits
    return call, lambda out: _next_token(out[0].logits, out[1])


def _decoder_inputs(module: Any) -> Callable[[Tensor, Tensor | None], dict[str, Any]]:
    """An encoder-decoder without a head reads the same text, one token later."""
    if not module.config.is_encoder_decoder or has_head(module):
        return lambda x, mask: {}
    start = getattr(module.config, "decoder_start_token_id", None) or module.config.pad_token_id

    def inputs(x: Tensor, mask: Tensor | None) -> dict[str, Any]:
        shifted = torch.cat([torch.full_like(x[:, :1], start), x[:, :-1]], 1)
        return {"decoder_input_ids": shifted, "decoder_attention_mask": mask}

    return inputs


def _next_token(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return logits[:, -1]
    return logits[torch.arange(len(logits), device=logits.device), mask.long().sum(1) - 1]


def has_head(module: Any) -> bool:
    """Say whether a model's output is that of a head, not features."""
    return type(module).__name__.endswith(tuple(HEADS))


def _is_classifier(module: Any) -> bool:
    return type(module).__name__.endswith(tuple(CLASSIFIERS))
