"""Outputs of models of transformers: classes, next tokens or features.

The measured output:

* ``...ForImageClassification`` and ``...ForSequenceClassification``: the logits.
* Causal language models: the logits of the next token, at the last real token.
* Models with an image tower and a text tower: the projected features of the tower that `--tower`
names, as `get_image_features` and `get_text_features` return them.
* Models of sound that decode to text: the encoder's features.
* All others, mostly encoders: features, the mean of the last hidden state over the real tokens
(for sentence encoders the pooling and normalisation of their own files). A note names heads in the
file that are not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.errors import InputError, explain_failure, join_few
from lipaudit.models.net import NO_DECISION, UNUSED_NAMES, Read
from lipaudit.models.sources.weight_files import read_json
from lipaudit.tables import Note

# (result, mask) -> features of each text.
Pooling = Callable[[Any, Tensor | None], Tensor]

# Supported classifiers by the ending of their class name, with the auto class that loads each.
CLASSIFIERS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForImageClassificationWithTeacher": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForAudioClassification": "AutoModelForAudioClassification",
}
LANGUAGE_MODELS = {"ForCausalLM": "AutoModelForCausalLM", "LMHeadModel": "AutoModelForCausalLM"}
# Supported heads by the ending of their class name, with the auto class that loads each.
HEADS = CLASSIFIERS | LANGUAGE_MODELS
# Problem types of classifiers that make no single decision, with a description.
UNDECIDED = {
    "multi_label_classification": "is a multi-label model",
    "regression": "predicts numbers, not classes",
}
# A setting of sentence-transformers, such as pooling_mode_mean_tokens.
SWITCH = re.compile(r"pooling_mode_(.*?)(_tokens?)?")


def has_head(module: Any) -> bool:
    """Say whether a model's output comes from a head; otherwise it is features."""
    return type(module).__name__.endswith(tuple(HEADS))


def is_classifier(module: Any) -> bool:
    """Say whether a model's output is class logits."""
    return type(module).__name__.endswith(tuple(CLASSIFIERS))


def describe_classes(module: Any) -> dict[str, Any]:
    """Return the fields of a `ModelSpec` about classes: whether there are any, and their names.

    The placeholders LABEL_0, LABEL_1, ... are not names. Names of other numbers than 0, 1, ...
    are not used. The outputs of multi-label models and of regressions do not decide for one
    class: they count as features. A note says so in both cases.
    """
    name = type(module).__name__
    has_classes = is_classifier(module)
    problem = str(getattr(module.config, "problem_type", None))
    facts = {"architecture": name, "classifier": has_classes}
    if has_classes and problem in UNDECIDED:
        return facts | {
            "classifier": False,
            "notes": (
                Note.warn(
                    NO_DECISION,
                    f"{name} {UNDECIDED[problem]} (problem_type in config.json), so it has no "
                    "accuracy and no margins. Its outputs are measured as features",
                ),
            ),
        }
    labels = module.config.id2label or {}  # a file may hold null
    count = len(labels)
    if not has_classes or not count:
        return facts
    if set(labels) != {*range(count)}:
        numbers = sorted(labels, key=str)  # a module's own configuration may mix types
        text = (
            f"id2label in config.json names the classes {join_few(numbers)}, but the "
            f"classes are 0 to {count - 1}: these names are not used. Correct them, or give "
            "--class-names"
        )
        return facts | {"notes": (Note.warn(UNUSED_NAMES, text),)}
    names = tuple(str(labels[i]) for i in range(count))
    if names != tuple(f"LABEL_{i}" for i in range(count)):
        facts["labels"] = names
    return facts


def mean_pooling(result: Any, mask: Tensor | None) -> Tensor:
    """Average the last hidden state over the real tokens, or over space for feature maps.

    Raises:
        InputError: the result has no last hidden state, or its padding is unknown.
    """
    hidden = getattr(result, "last_hidden_state", None)
    if hidden is None:
        raise InputError(
            f"a {type(result).__name__} has no last hidden state to use as features",
            "Name the class as transformers does (...ForSequenceClassification), or write a py: "
            "factory that returns ModelSpec(..., read=lambda result: TENSOR).",
        )
    # The hidden state of tokens is (samples, tokens, width). A feature map has four axes, and its
    # pixels become tokens. Two axes of equal length are taken for the spatial ones.
    if hidden.ndim == 4:
        channels_last = hidden.shape[1] == hidden.shape[2] != hidden.shape[3]
        if channels_last:
            hidden = hidden.flatten(1, 2)
        else:
            hidden = hidden.flatten(2).transpose(1, 2)
    if mask is None:
        return hidden.mean(1)
    if mask.shape[1] != hidden.shape[1]:
        raise InputError(
            f"the last hidden state has {hidden.shape[1]} tokens for texts of {mask.shape[1]}, so "
            "padding cannot be recognised",
            "Give texts of one length, as token ids in an .npz file.",
        )
    weight = mask.to(hidden.dtype)[:, :, None]
    return (hidden * weight).sum(1) / weight.sum(1)


def _read_next_token(result: Any, mask: Tensor | None) -> Tensor:
    """Return the logits of the token after each text, (samples, vocabulary)."""
    logits = result.logits
    if mask is None:
        return logits[:, -1]
    # Texts are padded behind their last tokens, so the last token has the position length - 1.
    samples = torch.arange(len(logits), device=logits.device)
    return logits[samples, mask.long().sum(1) - 1]


def read_tower(result: Any, mask: Tensor | None) -> Tensor:
    """Return the projected features in the result of a tower, not normalised.

    These are `pooler_output` of `get_image_features` and `get_text_features`. If a result has no
    `pooler_output`, the features are the mean of the last hidden state over the real tokens.
    """
    pooled = getattr(result, "pooler_output", None)
    if pooled is None:
        return mean_pooling(result, mask)
    return pooled


def select_tower(module: Any, tower: str | None) -> Callable[..., Any]:
    """Return the function that runs a model, or (for image-text models) one of its two towers.

    Args:
        module: the model.
        tower: "image" or "text"; None for a model without towers.
    """
    if tower is None:
        return module
    return getattr(module, f"get_{tower}_features")


def choose_output(module: Any, tower: str | None, pooling: Pooling = mean_pooling) -> Read:
    """Return the function from (result, mask) to the measured output.

    Args:
        module: the model.
        tower: the measured tower (image or text) of a model with two towers; None for others.
        pooling: makes the features of a model without a head: (result, mask) -> features.
    """
    read = pooling
    if tower is not None:
        read = read_tower
    elif is_classifier(module):
        read = _read_classes
    elif has_head(module):
        read = _read_next_token
    return lambda result_and_mask: read(*result_and_mask)


def _read_classes(result: Any, mask: Tensor | None) -> Tensor:
    """Return the logits of the classes.

    If the configuration asks for tuples (`return_dict`), the logits are the first item.
    """
    if hasattr(result, "logits"):
        return result.logits
    return result[0]


def _read_pooling_mode(file: Path) -> str:
    """Return how sentence-transformers pools tokens, from its file: "mean", "cls", "mean+max".

    Older files have a switch for each mode in place of `pooling_mode`, such as
    "pooling_mode_mean_tokens": true for the mode "mean". Several modes may be on.
    """
    settings = read_json(file)
    modes = []
    for key, value in settings.items():
        switch = SWITCH.fullmatch(key)
        if switch and value:
            modes.append(switch[1])
    return str(settings.get("pooling_mode", "+".join(modes)))


def choose_pooling(path: Path | None) -> Pooling:
    """Return the pooling that a directory of sentence-transformers prescribes, else the mean.

    Raises:
        InputError: the pooling is neither the mean nor the first token.
    """
    if path is None or not (path / "modules.json").is_file():
        return mean_pooling
    file = path / "1_Pooling" / "config.json"
    with explain_failure(f"the pooling in {path} cannot be read", "Copy or download it again."):
        modules = read_json(path / "modules.json")
        # Class names of the steps behind each other: Transformer, Pooling, perhaps Normalize.
        steps = {module["type"].rpartition(".")[2] for module in modules}
        mode = _read_pooling_mode(file) if file.is_file() else "mean"
    poolings: dict[str, Pooling] = {
        "mean": mean_pooling,
        "cls": lambda result, _mask: result.last_hidden_state[:, 0],
    }
    unknown = steps - {"Transformer", "Pooling", "Normalize"}
    if unknown or mode not in poolings:
        raise InputError(
            f"{path} pools its tokens in a way that is not supported: {unknown or mode}",
            "Remove modules.json to read the mean over tokens, or write a py: factory.",
        )
    pooling = poolings[mode]
    if "Normalize" not in steps:
        return pooling
    return lambda result, mask: F.normalize(pooling(result, mask), dim=1)
