"""Models of transformers: a directory with config.json, read by the class its configuration names.

What the output is:

* ``...ForImageClassification`` and ``...ForSequenceClassification``: the logits.
* Causal language models: the logits of the next token, at the last real token.
* Everything else, encoders above all: features, the mean of the last hidden state over the real
  tokens (for sentence encoders the pooling and normalisation their own files prescribe). Heads
  that stand in the file but are not read are named in a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.data.images import resized
from lipaudit.data.intake import remark, warning
from lipaudit.errors import InputError
from lipaudit.models.files import few, half_precision
from lipaudit.models.pooling import Pooling, mean_pooling, sentence_pooling
from lipaudit.models.spec import LoadOptions, ModelSpec
from lipaudit.models.timm import RANDOM
from lipaudit.results import Note

HEADS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForImageClassificationWithTeacher": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
}
FEATURES = "AutoModel"
UNREAD = ("pooler",)
MOST_TOKENS = 512
HALF_NAMES = {"F16": torch.float16, "BF16": torch.bfloat16}
RAW_PIXELS = warning(
    "raw-pixels",
    "no preprocessor_config.json: pixels in [0, 1] go in as they are; "
    "give --mean and --std if the model was trained otherwise",
)


def from_directory(path: Path, options: LoadOptions) -> ModelSpec:
    """Load a directory in the format of transformers.

    Raises:
        InputError: unsupported or incomplete; the message names the tensors that do not fit.
    """
    import transformers

    with _quiet():
        config = _config(path, options)
        auto = _auto_class(config)
        kwargs = dict(options.model_kwargs)
        notes: tuple[Note, ...] = (RANDOM,)
        if not kwargs.pop("pretrained", True):
            module = _random(getattr(transformers, auto), config)
        else:
            module, notes = _trained(getattr(transformers, auto), path, config)
            notes += _stored_half(path)
        spec = describe(module, options, path=path)
    return replace(spec, notes=notes + spec.notes)


def describe(module: Any, options: LoadOptions, *, path: Path | None = None) -> ModelSpec:
    """Say how a model of transformers is fed and what is read of its output.

    Tokenizer, image processor and pooling are looked for in `path`.
    """
    module.config.get_text_config().use_cache = False
    if module.main_input_name == "pixel_values":
        return _image_spec(module, options, path)
    return _text_spec(module, path)


def _config(path: Path, options: LoadOptions) -> Any:
    from transformers import AutoConfig

    overrides = {k: v for k, v in options.model_kwargs.items() if k != "pretrained"}
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **overrides)
    except (ValueError, KeyError, OSError) as error:
        raise InputError(
            f"{path} is no model that transformers knows ({_first_line(error)})",
            "Models that bring code of their own are not run. Write a py: factory for them, or "
            "update transformers if the model is newer.",
        ) from error


def _auto_class(config: Any) -> str:
    """Choose by what the checkpoint says it is; no head is ever made up."""
    name = (config.architectures or [""])[0]
    return next((auto for head, auto in HEADS.items() if name.endswith(head)), FEATURES)


def _attention(config: Any) -> str:
    """Choose the implementation: only eager attention computes a soft cap."""
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if cap else "sdpa"


def _trained(auto: Any, path: Path, config: Any) -> tuple[nn.Module, tuple[Note, ...]]:
    """Load the weights, and refuse any part that would be random."""
    try:
        module, report = _from_pretrained(auto, path, config)
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        raise InputError(
            f"transformers cannot load {path} ({_first_line(error)})",
            "Check that the directory is complete: config.json and its weights.",
        ) from error
    except Exception as error:  # safetensors and pickle have exceptions of their own
        raise InputError(
            f"the weights in {path} cannot be read ({type(error).__name__}: {_first_line(error)})",
            "Copy or download them again; pickled files may hold tensors only.",
        ) from error
    return module, _require_complete(module, report, path)


def _from_pretrained(auto: Any, path: Path, config: Any) -> tuple[nn.Module, dict[str, Any]]:
    def load(attention: str) -> Any:
        return auto.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention,
            output_loading_info=True,
            trust_remote_code=False,
            local_files_only=True,
        )

    try:
        return load(_attention(config))
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return load("eager")


def _random(auto: Any, config: Any) -> nn.Module:
    try:
        return auto.from_config(
            config, attn_implementation=_attention(config), dtype=torch.float32
        )
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return auto.from_config(config, attn_implementation="eager", dtype=torch.float32)


def _require_complete(module: Any, report: dict[str, Any], path: Path) -> tuple[Note, ...]:
    """Refuse missing and surplus weights; heads of a model read for its features may be left."""
    features = not _is_head(module)
    missing = sorted(k for k in report["missing_keys"] if not (features and _unread(k)))
    surplus = sorted(report["unexpected_keys"])
    unused = [k for k in surplus if features and (_unread(k) or not _inside(module, k))]
    surplus = [k for k in surplus if k not in unused]
    shapes = [str(m[0]) for m in report.get("mismatched_keys", ())]
    wrong = {"missing": missing, "surplus": surplus, "of another shape": shapes}
    if any(wrong.values()):
        text = "; ".join(f"{few(keys)} {kind}" for kind, keys in wrong.items() if keys)
        raise InputError(
            f"the weights in {path} do not fit {type(module).__name__}: {text}",
            "A part of the model would be random. Check `architectures` in config.json and that "
            "the fine-tuned head was saved.",
        )
    text = f"not read: {few(unused)} (the output is features)"
    return (remark("features", text),) if unused else ()


def _is_head(module: Any) -> bool:
    return any(type(module).__name__.endswith(head) for head in HEADS)


def _unread(key: str) -> bool:
    return any(part in UNREAD for part in key.split("."))


def _inside(module: Any, key: str) -> bool:
    """Say whether a key belongs to the backbone, in either way of naming it."""
    own = {name for name, _ in module.named_children()}
    prefix = module.base_model_prefix
    return key.split(".")[0] in own or bool(prefix and key.startswith(f"{prefix}."))


def _stored_half(path: Path) -> tuple[Note, ...]:
    from safetensors import safe_open

    kinds = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            kinds |= {stored.get_slice(k).get_dtype() for k in stored.keys()}  # noqa: SIM118
    return half_precision(HALF_NAMES[k] for k in kinds if k in HALF_NAMES)


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
        classifier=_is_head(module),
        labels=_labels(module),
        prepare=_preparation(processor, shape),
        call=lambda x, _mask: module(pixel_values=x),
        read=None if _is_head(module) else lambda out: mean_pooling(out, None),
        architecture=type(module).__name__,
        notes=() if known else (RAW_PIXELS,),
    )


def _processor(path: Path | None) -> Any:
    from transformers import AutoImageProcessor

    if path is None or not (path / "preprocessor_config.json").is_file():
        return None
    return AutoImageProcessor.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _image_shape(config: Any, processor: Any) -> tuple[int, int, int]:
    if processor is not None:
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
    if not _is_head(module) or not hasattr(module.config, "id2label"):
        return None
    names = [str(module.config.id2label[i]) for i in range(module.config.num_labels)]
    return None if all(n.startswith("LABEL_") for n in names) else tuple(names)


def _text_spec(module: Any, path: Path | None) -> ModelSpec:
    config = module.config.get_text_config()
    tokenizer = _tokenizer(path)
    pad = _pad_id(module, tokenizer)
    call, read = _text_output(module, sentence_pooling(path))
    return ModelSpec(
        module,
        (_most_tokens(config, tokenizer),),
        kind="text",
        classifier=hasattr(module.config, "id2label") and "Sequence" in type(module).__name__,
        labels=_labels(module) if "Sequence" in type(module).__name__ else None,
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


def _most_tokens(config: Any, tokenizer: Any) -> int:
    """Return how many tokens the model takes; tokenizers without a limit say 1e30."""
    limits = [getattr(tokenizer, "model_max_length", None)]
    limits += [getattr(config, n, None) for n in ("max_position_embeddings", "n_positions")]
    known = [int(n) for n in limits if n and 0 < n < 10**6]
    return min(known, default=MOST_TOKENS)


def _text_output(module: Any, pooling: Pooling) -> tuple[Any, Any]:
    """Return `call` and `read` by kind of model; `call` passes the mask on to `read`."""
    decoder = _decoder_inputs(module)

    def call(x: Tensor, mask: Tensor | None) -> Any:
        attention = None if mask is None else mask.long()
        return module(input_ids=x, attention_mask=attention, **decoder(x, attention)), mask

    if not _is_head(module):
        return call, lambda out: pooling(*out)
    if "Sequence" in type(module).__name__:
        return call, lambda out: out[0].logits
    return call, lambda out: _next_token(out[0].logits, out[1])


def _decoder_inputs(module: Any) -> Callable[[Tensor, Tensor | None], dict[str, Any]]:
    """An encoder-decoder without a head reads the same text, one token later."""
    if not module.config.is_encoder_decoder or _is_head(module):
        return lambda x, mask: {}
    start = module.config.decoder_start_token_id or 0

    def inputs(x: Tensor, mask: Tensor | None) -> dict[str, Any]:
        shifted = torch.cat([torch.full_like(x[:, :1], start), x[:, :-1]], 1)
        return {"decoder_input_ids": shifted, "decoder_attention_mask": mask}

    return inputs


def _next_token(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return logits[:, -1]
    return logits[torch.arange(len(logits), device=logits.device), mask.long().sum(1) - 1]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tables and bars of transformers while the block runs."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
