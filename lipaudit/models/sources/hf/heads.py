"""Heads, towers and pooling of transformers: which outputs a model has, and which one is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lipaudit.data.intake import warning
from lipaudit.errors import InputError, UsageError
from lipaudit.models.net import NO_DECISION
from lipaudit.results import Note
from lipaudit.schema import read_json

Pooling = Callable[[Any, Tensor | None], Tensor]


def mean_pooling(result: Any, mask: Tensor | None) -> Tensor:
    """Average the last hidden state over its real tokens, or over space for feature maps.

    Raises:
        InputError: there is no last hidden state, or padding cannot be told apart in it.
    """
    hidden = getattr(result, "last_hidden_state", None)
    if hidden is None:
        raise InputError(
            f"a {type(result).__name__} has no last hidden state to be read as features",
            "Wrap it: a py: factory may return ModelSpec(..., read=lambda result: TENSOR).",
        )
    hidden = _as_tokens(hidden)
    if mask is None:
        return hidden.mean(1)
    if mask.shape[1] != hidden.shape[1]:
        raise InputError(
            f"the last hidden state has {hidden.shape[1]} tokens for texts of {mask.shape[1]}: "
            "which of them are padding is not known",
            "Give texts of one length, as token ids in an .npz file.",
        )
    weight = mask.to(hidden.dtype)[:, :, None]
    return (hidden * weight).sum(1) / weight.sum(1)


def _as_tokens(hidden: Tensor) -> Tensor:
    """Bring a feature map to (batch, places, channels); the two equal axes are those of space."""
    if hidden.ndim != 4:
        return hidden
    if hidden.shape[1] == hidden.shape[2] != hidden.shape[3]:
        return hidden.flatten(1, 2)
    return hidden.flatten(2).transpose(1, 2)


def first_pooling(result: Any, _mask: Tensor | None) -> Tensor:
    """Take the last hidden state of the first token."""
    return result.last_hidden_state[:, 0]


def sentence_pooling(path: Path | None) -> Pooling:
    """Return the pooling that a directory of sentence-transformers prescribes, else the mean.

    Raises:
        InputError: the directory prescribes something else than the mean or the first token.
    """
    if path is None or not (path / "modules.json").is_file():
        return mean_pooling
    steps = [_type(module) for module in _as_list(read_json(path / "modules.json"))]
    unknown = set(steps) - {"Transformer", "Pooling", "Normalize"}
    mode = _mode(path / "1_Pooling" / "config.json")
    pooling = {"mean": mean_pooling, "cls": first_pooling}.get(mode)
    if unknown or pooling is None:
        raise InputError(
            f"{path} pools its tokens in a way that is not supported: {unknown or mode}",
            "Remove modules.json to read the mean over tokens, or write a py: factory.",
        )
    return _normalise(pooling) if "Normalize" in steps else pooling


def _as_list(modules: Any) -> list[Any]:
    return modules if isinstance(modules, list) else [modules]


def _type(module: Any) -> str:
    """Name the kind of a step; one that does not say is of no kind that is supported."""
    kind = module.get("type") if isinstance(module, dict) else None
    return str(kind).rpartition(".")[2]


def _normalise(pooling: Pooling) -> Pooling:
    return lambda result, mask: F.normalize(pooling(result, mask), dim=1)


def _mode(path: Path) -> str:
    if not path.is_file():
        return "mean"
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise InputError(f"{path} holds no settings", "Copy or download it again.")
    if "pooling_mode" in settings:
        return str(settings["pooling_mode"])
    chosen = [k for k, on in settings.items() if k.startswith("pooling_mode_") and on]
    return "+".join(
        k.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for k in chosen
    )


CLASSIFIERS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForImageClassificationWithTeacher": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForAudioClassification": "AutoModelForAudioClassification",
}
LANGUAGE_MODELS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
}
HEADS = CLASSIFIERS | LANGUAGE_MODELS
"""The heads that are read, by how the names of their classes end, and what loads each."""


UNDECIDED = {
    "multi_label_classification": "is a multi-label model: several of its classes may be true",
    "regression": "predicts numbers, not classes",
}
"""Heads of classifiers whose largest logit is no decision, by their problem type."""


def has_head(module: Any) -> bool:
    """Say whether a model's output is that of a head, not features."""
    return type(module).__name__.endswith(tuple(HEADS))


def is_classifier(module: Any) -> bool:
    """Say whether a model's output is the logits of classes."""
    return type(module).__name__.endswith(tuple(CLASSIFIERS))


def decides(module: Any) -> bool:
    """Say whether a model is a classifier that takes one class of several."""
    return is_classifier(module) and _problem(module) not in UNDECIDED


def undecided_notes(module: Any) -> tuple[Note, ...]:
    """Say of a model with class scores that does not take one class, what it is."""
    if not is_classifier(module) or decides(module):
        return ()
    text = (
        f"{type(module).__name__} {UNDECIDED[_problem(module)]} (problem_type in config.json): it "
        "has no accuracy and no margins; its outputs are measured as features"
    )
    return (warning(NO_DECISION, text),)


def _problem(module: Any) -> str:
    return str(getattr(module.config, "problem_type", None))


def is_language_model(module: Any) -> bool:
    """Say whether a model's output is the logits of tokens."""
    return type(module).__name__.endswith(tuple(LANGUAGE_MODELS))


def class_names(module: Any) -> tuple[str, ...] | None:
    """Return the class names, unless they are the placeholders LABEL_0, LABEL_1, ..."""
    if not decides(module):
        return None
    known = module.config.id2label or {}  # one file's writer may leave it null
    names = [str(known.get(i, f"LABEL_{i}")) for i in range(len(known))]
    return None if all(n.startswith("LABEL_") for n in names) else tuple(names)


TAKES = {"image": "pixel_values", "text": "input_ids"}
"""What each tower takes."""


def towers(module: Any) -> tuple[str, ...]:
    """Return the towers that a model of transformers can be read by."""
    return tuple(name for name in TAKES if hasattr(module, f"get_{name}_features"))


def chosen_tower(module: Any, asked: str | None) -> str | None:
    """Return the tower to be read; None for a model that is read as a whole.

    Raises:
        UsageError: there are two and none is asked for, or not the one asked for.
    """
    own, name = towers(module), type(module).__name__
    if asked is not None and asked not in own:
        has = f"only {' and '.join(own)}" if own else "none"
        raise UsageError(f"{name} has no tower {asked!r}: it has {has}", "Leave --tower out.")
    if asked is None and len(own) > 1:
        raise UsageError(
            f"{name} has a tower for images and one for text: which one is measured?",
            "Add --tower image or --tower text.",
        )
    return asked


def tower_call(module: Any, tower: str) -> Callable[..., Any]:
    """Return the method that runs a tower alone, up to the features that are compared."""
    method: Callable[..., Any] = getattr(module, f"get_{tower}_features")
    return method


def tower_features(result: Any) -> Tensor:
    """Return the projected features of what a tower gave, not normalised."""
    if isinstance(result, Tensor):
        return result
    pooled: Tensor | None = getattr(result, "pooler_output", None)
    return mean_pooling(result, None) if pooled is None else pooled


def reads_last_position(module: Any) -> bool:
    """Say whether a text tower reads its last position, padding or not, as SigLIP's does."""
    return str(module.config.model_type).startswith("siglip")
