"""One feature vector per sample: what sentence encoders make of their token features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lipaudit.errors import InputError
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
    steps = [_type(module) for module in _listed(read_json(path / "modules.json"))]
    unknown = set(steps) - {"Transformer", "Pooling", "Normalize"}
    mode = _mode(path / "1_Pooling" / "config.json")
    pooling = {"mean": mean_pooling, "cls": first_pooling}.get(mode)
    if unknown or pooling is None:
        raise InputError(
            f"{path} pools its tokens in a way that is not supported: {unknown or mode}",
            "Remove modules.json to read the mean over tokens, or write a py: factory.",
        )
    return _normalised(pooling) if "Normalize" in steps else pooling


def _listed(modules: Any) -> list[Any]:
    return modules if isinstance(modules, list) else [modules]


def _type(module: Any) -> str:
    """Name the kind of a step; one that does not say is of no kind that is supported."""
    kind = module.get("type") if isinstance(module, dict) else None
    return str(kind).rpartition(".")[2]


def _normalised(pooling: Pooling) -> Pooling:
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
