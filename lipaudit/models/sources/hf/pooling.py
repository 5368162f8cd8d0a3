"""One feature vector per sample: what sentence encoders make of their token features."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lipaudit.errors import InputError

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
    steps = [
        str(m["type"]).rpartition(".")[2] for m in json.loads((path / "modules.json").read_text())
    ]
    unknown = set(steps) - {"Transformer", "Pooling", "Normalize"}
    mode = _mode(path / "1_Pooling" / "config.json")
    pooling = {"mean": mean_pooling, "cls": first_pooling}.get(mode)
    if unknown or pooling is None:
        raise InputError(
            f"{path} pools its tokens in a way that is not supported: {unknown or mode}",
            "Remove modules.json to read the mean over tokens, or write a py: factory.",
        )
    return _normalised(pooling) if "Normalize" in steps else pooling


def _normalised(pooling: Pooling) -> Pooling:
    return lambda result, mask: F.normalize(pooling(result, mask), dim=1)


def _mode(path: Path) -> str:
    if not path.is_file():
        return "mean"
    settings = json.loads(path.read_text())
    if "pooling_mode" in settings:
        return str(settings["pooling_mode"])
    chosen = [k for k, on in settings.items() if k.startswith("pooling_mode_") and on]
    return "+".join(
        k.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for k in chosen
    )
