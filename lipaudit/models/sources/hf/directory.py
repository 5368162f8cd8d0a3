"""Models of transformers: a directory with config.json, loaded completely or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipaudit.data.hub import hub_bars
from lipaudit.data.intake import remark
from lipaudit.errors import InputError, UsageError, out_of_memory
from lipaudit.models.sources.hf.adapter import classes_of, merge_adapter
from lipaudit.models.sources.hf.heads import CLASSIFIERS, HEADS, has_head
from lipaudit.models.sources.hf.language import text_config
from lipaudit.models.sources.hf.outputs import hf_spec
from lipaudit.models.sources.spec import RANDOM, LoadOptions, ModelSpec, new_classifier
from lipaudit.models.sources.weights import few, half_precision, weight_files
from lipaudit.results import Note

FEATURES = "AutoModel"
ENCODER = "AutoModelForTextEncoding"
SEQUENCES = "AutoModelForSequenceClassification"
SOUNDS = "AutoModelForAudioClassification"
POOLER, MASK = "pooler", "mask_token"
HALF_NAMES = {"F16": torch.float16, "BF16": torch.bfloat16}


def from_directory(path: Path, options: LoadOptions, adapter: Path | None = None) -> ModelSpec:
    """Load a directory in the format of transformers.

    Args:
        path: the directory.
        options: what the user says of it.
        adapter: a directory of peft's, to be merged into the model.

    Raises:
        InputError: unsupported or incomplete; the message names the tensors that do not fit.
        UsageError: other classes than those of the adapter are asked for.
    """
    with quiet():
        config = _config(path, options)
        trained = None if adapter is None else classes_of(adapter)
        if adapter is not None and options.classes not in (None, trained):
            raise UsageError("an adapter has classes of its own, or none", "Leave --classes out.")
        auto, added = _with_classes(config, trained or options.classes)
        kwargs = dict(options.model_kwargs)
        notes: tuple[Note, ...] = (RANDOM,)
        if not kwargs.pop("pretrained", True):
            module = _random(_loader(auto, config), config)
        else:
            kinds = _list_dtypes(path)
            kept = options.weights == "stored" or options.device_map is not None
            alone = kept and adapter is None and len(kinds) == 1
            dtype = HALF_NAMES.get(min(kinds), torch.float32) if alone else torch.float32
            loader = _loader(auto, config)
            module, random, notes = _load_trained(
                loader, path, config, new=bool(added), dtype=dtype
            )
            if dtype == torch.float32:
                notes += half_precision(HALF_NAMES[k] for k in kinds if k in HALF_NAMES)
            else:
                _take_buffers(module, loader, config)
            if adapter is not None:
                module, added = merge_adapter(module, adapter, random=random), ()
        spec = hf_spec(module, options, path=path)
    return replace(spec, notes=added + notes + spec.notes)


def _config(path: Path, options: LoadOptions) -> Any:
    from transformers import AutoConfig

    overrides = {k: v for k, v in options.model_kwargs.items() if k != "pretrained"}
    if options.dtype == "float64":  # grouped products of experts take no double precision
        overrides = {"experts_implementation": "eager"} | overrides
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
    if name.endswith("EncoderModel"):
        return ENCODER
    named = [auto for head, auto in HEADS.items() if name.endswith(head)]
    if named == [SEQUENCES] and not _knows(SEQUENCES, config):
        named = [SOUNDS]  # Wav2Vec2ForSequenceClassification is a classifier of sounds
    return named[0] if named else FEATURES


def _knows(auto: str, config: Any) -> bool:
    import transformers

    return type(config) in getattr(transformers, auto)._model_mapping


def _loader(auto: str, config: Any) -> Any:
    """Return what loads a model: the class the checkpoint names where no Auto class knows it."""
    import transformers

    own = getattr(transformers, (config.architectures or [""])[0], None)
    if not _knows(auto, config) and isinstance(own, type):
        return own
    return getattr(transformers, auto)


def _with_classes(config: Any, classes: int | None) -> tuple[str, tuple[Note, ...]]:
    """Return what loads the model, as a classifier of so many classes where that is asked for."""
    auto = _auto_class(config)
    own = len(config.id2label or ()) if auto in CLASSIFIERS.values() else None
    if classes in (None, own):
        return auto, ()
    config.id2label = {i: f"LABEL_{i}" for i in range(classes)}
    config.label2id = {label: i for i, label in config.id2label.items()}
    if own is None:
        known = (auto for auto in CLASSIFIERS.values() if _knows(auto, config))
        auto = next(known, SEQUENCES)
    return auto, (new_classifier(classes),)


def _load_trained(
    auto: Any, path: Path, config: Any, *, new: bool, dtype: torch.dtype
) -> tuple[Any, list[str], tuple[Note, ...]]:
    """Load the weights, and refuse any part that would be random, but for a new classifier.

    Returns:
        the model, the tensors of its new classifier, and remarks.
    """
    try:
        module, report = _from_pretrained(auto, path, config, dtype)
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        if out_of_memory(error):
            raise
        raise InputError(
            f"transformers cannot load {path} ({_first_line(error)})",
            "Check that the directory is complete: config.json and its weights.",
        ) from error
    except Exception as error:  # safetensors and pickle have exceptions of their own
        if out_of_memory(error):
            raise
        raise InputError(
            f"the weights in {path} cannot be read ({type(error).__name__}: {_first_line(error)})",
            "Copy or download them again; pickled files may hold tensors only.",
        ) from error
    notes = _require_complete(module, _backbone(module, report) if new else report, path)
    if not new and any(_part_of(key, POOLER) for key in report["missing_keys"]):
        module.pooler = None  # random, and not read
    shapes = [str(m[0]) for m in report.get("mismatched_keys", ())]
    return module, [*report["missing_keys"], *shapes] if new else [], notes


def _from_pretrained(
    auto: Any, path: Path, config: Any, dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    return _with_attention(
        config,
        lambda attention: auto.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are named, and refused
            trust_remote_code=False,
            local_files_only=True,
        ),
    )


def _random(auto: Any, config: Any) -> Any:
    build = auto.from_config if hasattr(auto, "from_config") else auto._from_config
    return _with_attention(
        config,
        lambda attention: build(config, attn_implementation=attention, dtype=torch.float32),
    )


def _with_attention(config: Any, build: Callable[[str], Any]) -> Any:
    """Build with fused attention, or eager where a model has no other or caps its logits."""
    if getattr(text_config(config), "attn_logit_softcapping", None):
        return build("eager")
    try:
        return build("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return build("eager")


def _require_complete(module: Any, report: dict[str, Any], path: Path) -> tuple[Note, ...]:
    """Refuse missing and surplus weights; heads of a model read for its features may be left."""
    features = not has_head(module)
    missing = sorted(k for k in report["missing_keys"] if not (features and _part_of(k, POOLER)))
    surplus = sorted(report["unexpected_keys"])
    unused = [k for k in surplus if features and _unread(module, k)]
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


def _backbone(module: Any, report: dict[str, Any]) -> dict[str, Any]:
    """Return what a report says of the weights below the classifier and its pooler."""

    def below(key: str) -> bool:
        return _inside(module.base_model, key) and not _part_of(key, POOLER)

    return {
        "missing_keys": [key for key in report["missing_keys"] if below(key)],
        "unexpected_keys": [key for key in report["unexpected_keys"] if below(key)],
        "mismatched_keys": [m for m in report.get("mismatched_keys", ()) if below(str(m[0]))],
    }


def _unread(module: Any, key: str) -> bool:
    """Say whether a surplus tensor belongs to what features never meet: heads, pooler, mask."""
    return _part_of(key, POOLER, MASK) or not _inside(module, key)


def _part_of(key: str, *parts: str) -> bool:
    return not set(parts).isdisjoint(key.split("."))


def _inside(module: Any, key: str) -> bool:
    """Say whether a key belongs to the backbone, in either way of naming it."""
    own = {name for name, _ in module.named_children()}
    prefix = module.base_model_prefix
    return key.split(".")[0] in own or bool(prefix and key.startswith(f"{prefix}."))


def _take_buffers(module: Any, auto: Any, config: Any) -> None:
    """Give a model that was loaded in half precision the constants of one in float32.

    They are no weights: the model computes them when it is built, in the type it is built in.
    """
    with _without_weights():
        built = dict(_random(auto, config).named_modules())
    for name, part in module.named_modules():
        for key in part._non_persistent_buffers_set & set(
            getattr(built.get(name), "_buffers", ())
        ):
            part._buffers[key] = built[name]._buffers[key]


@contextmanager
def _without_weights() -> Iterator[None]:
    """Give the parameters of what is built meanwhile no values, and no memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, p: nn.Parameter | None) -> None:
        given = None if p is None else nn.Parameter(p.detach().to("meta"), p.requires_grad)
        register(module, name, given)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _list_dtypes(path: Path) -> set[str]:
    """Return in which types the safetensors of a directory hold their floating-point weights.

    None of those that cannot be read: loading says what is wrong with them.
    """
    from safetensors import SafetensorError, safe_open

    kinds: set[str] = set()
    files = weight_files(file.name for file in path.iterdir())
    for file in (path / name for name in files if name.endswith(".safetensors")):
        with suppress(SafetensorError, OSError), safe_open(file, "pt") as stored:
            kinds |= {stored.get_slice(k).get_dtype() for k in stored.keys()}  # noqa: SIM118
    return {kind for kind in kinds if "F" in kind}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the tables and bars of transformers while the block runs."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    bars = logging.is_progress_bar_enabled()
    with hub_bars():
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
