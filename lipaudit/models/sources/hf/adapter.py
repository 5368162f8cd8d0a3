"""Adapters of the library peft (LoRA and its kin), merged into the model they were trained on."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from lipaudit.errors import InputError, of_machine, out_of_memory
from lipaudit.models.sources.weights import few, weight_files

SETTINGS = "adapter_config.json"
PREFIX = "base_model.model."
"""What peft writes before the names of the base model's own modules."""
HEAD = re.compile(re.escape(PREFIX) + r"(classifier|score)\.(\w+\.)?weight")
"""The weights of a classifier that was trained along with an adapter."""


def is_adapter(folder: Path) -> bool:
    """Say whether a directory holds an adapter and no model."""
    names = {file.name for file in folder.iterdir()}
    stored = weight_files(names) or ["" if "config.json" in names else "adapter"]
    return SETTINGS in names and stored[0].startswith("adapter")


def base_of(folder: Path) -> tuple[str, str | None]:
    """Return the base model of an adapter, a directory or a repository, and its revision.

    Raises:
        InputError: the adapter names none, or peft is not installed.
    """
    _peft(folder)
    try:
        settings = json.loads((folder / SETTINGS).read_text())
        base, revision = settings["base_model_name_or_path"], settings.get("revision")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / SETTINGS} names no base model ({type(error).__name__}: {error})",
            "Write base_model_name_or_path into it: a directory, or ORG/NAME of the Hub.",
        ) from error
    return str(base), revision


def classes_of(folder: Path) -> int | None:
    """Return the number of classes of the classifier that an adapter brings; None without one."""
    stored = _read_weights(folder)
    heads = sorted(name for name in stored if HEAD.fullmatch(name))
    return len(stored[heads[-1]]) if heads else None


def merge_adapter(module: Any, folder: Path, *, random: Iterable[str]) -> Any:
    """Merge an adapter into its base model: the same outputs, without any module of peft's.

    Args:
        module: the base model.
        folder: the adapter.
        random: tensors of the base model that its own weights did not set.

    Raises:
        InputError: it does not fit, cannot be merged, or leaves something random.
    """
    peft, stored = _peft(folder), _read_weights(folder)
    left = [name for name in random if PREFIX + name not in stored]
    if left:
        raise InputError(
            f"neither the adapter in {folder} nor its base model has weights for {few(left)}",
            "A part of the model would be random. Save the adapter with its classifier "
            "(modules_to_save in peft).",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is missing: it is refused below
            model = peft.PeftModel.from_pretrained(module, str(folder))
        # left to itself, it asks the Hub whether the vocabulary was changed
        own = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        if of_machine(error):
            raise
        raise InputError(
            f"the adapter in {folder} does not fit {type(module).__name__} "
            f"({str(error).strip().partition(chr(10))[0]})",
            "Check base_model_name_or_path in its adapter_config.json.",
        ) from error
    missing, surplus = own.keys() - stored.keys(), stored.keys() - own.keys()
    if strange := sorted(missing | (surplus - set(model.state_dict()))):
        raise InputError(
            f"the adapter in {folder} does not fit {type(module).__name__}: {few(strange)}",
            "Check base_model_name_or_path in its adapter_config.json.",
        )
    if not hasattr(model.base_model, "merge_and_unload"):
        kind = getattr(model.peft_config["default"].peft_type, "value", "this kind")
        raise InputError(
            f"an adapter of kind {kind} cannot be merged into the weights of its base model",
            "Write a py: factory that returns the model with its adapter.",
        )
    return model.merge_and_unload(safe_merge=True)


def _peft(folder: Path) -> Any:
    try:
        import peft
    except ImportError as error:
        raise InputError(
            f"{folder} holds an adapter, and the library `peft`, which merges it into its base "
            "model, is not installed",
            "pip install 'lipaudit[peft]'",
        ) from error
    return peft


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of an adapter.

    Raises:
        InputError: there are none, or they are damaged.
    """
    try:
        stored: dict[str, Tensor] = _peft(folder).load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # safetensors and pickle have exceptions of their own
        if isinstance(error, InputError) or out_of_memory(error):
            raise
        raise InputError(
            f"the weights of the adapter in {folder} cannot be read "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})",
            "Copy or download them again: adapter_model.safetensors.",
        ) from error
    return stored
