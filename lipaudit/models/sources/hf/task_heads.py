"""Which heads of transformers are read, by how their classes are named."""

from __future__ import annotations

from typing import Any

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


def has_head(module: Any) -> bool:
    """Say whether a model's output is that of a head, not features."""
    return type(module).__name__.endswith(tuple(HEADS))


def is_classifier(module: Any) -> bool:
    """Say whether a model's output is the logits of classes."""
    return type(module).__name__.endswith(tuple(CLASSIFIERS))


def is_language_model(module: Any) -> bool:
    """Say whether a model's output is the logits of tokens."""
    return type(module).__name__.endswith(tuple(LANGUAGE_MODELS))


def class_names(module: Any) -> tuple[str, ...] | None:
    """Return the class names, unless they are the placeholders LABEL_0, LABEL_1, ..."""
    if not is_classifier(module):
        return None
    known = module.config.id2label or {}  # one file's writer may leave it null
    names = [str(known.get(i, f"LABEL_{i}")) for i in range(len(known))]
    return None if all(n.startswith("LABEL_") for n in names) else tuple(names)
