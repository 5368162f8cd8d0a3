"""Adapters of peft, such as LoRA: merged into their base model on loading.

The merged weights W + s B A replace those of the base, as peft's `merge_and_unload` computes them.
So the model keeps the modules of its base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lipaudit.errors import InputError, explain_failure
from lipaudit.models.net import LoadOptions, ModelSpec
from lipaudit.models.sources.weight_files import find_misfit, read_json
from lipaudit.tables import Note

CONFIG = "adapter_config.json"
MERGE = (
    "merge it into its model first: AutoPeftModel.from_pretrained(FOLDER).merge_and_unload()"
    ".save_pretrained(NEW)."
)
# Loads a MODEL: (name, options) -> its source and description.
LoadBase = Callable[[str, LoadOptions], tuple[str, ModelSpec]]


def load_adapter(path: Path, options: LoadOptions, load: LoadBase) -> tuple[str, ModelSpec]:
    """Load the base model of an adapter, and merge the adapter into its weights.

    Args:
        path: the folder of the adapter.
        options: the options of the model.
        load: loads a MODEL argument; returns its source ("hf", "timm", ...) and its description.

    Returns:
        The source and the description of the base model, with the merged weights.

    Raises:
        InputError: peft is missing, the base is unknown, the kind of adapter has no weights to
            merge, or its weights do not fit the base.
    """
    config = read_json(path / CONFIG)
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not name:
        raise InputError(
            f"{path / CONFIG} names no base model",
            f"Write its folder or hf name into base_model_name_or_path, or {MERGE}",
        )
    peft = _import_peft(path)
    if options.device_map is not None:
        raise InputError(
            f"{path} holds an adapter, and --device-map places the weights of whole models only",
            f"Leave it out, or {MERGE}",
        )
    state = _read_state(path, peft)
    base = _find_base(str(name), config.get("revision"), path)
    # Merging adds an update to the base weights. In half precision the sum would be rounded, and
    # the result would be another model. So the base is converted to float32 on loading.
    options = replace(options, weights="converted")
    classes = _count_classes(config, state)
    # The adapter may hold a new classifier. The base then gets a classifier of the same size, so
    # that the adapter's classifier can be merged.
    if options.classes is None and classes:
        options = replace(options, classes=classes)
    source, spec = load(base, options)
    if source != "hf":
        raise InputError(
            f"the base model {name} of {path} is not one of transformers",
            f"Correct base_model_name_or_path, or {MERGE}",
        )
    _merge(spec.module, path, state, peft)
    note = Note.info(
        "adapter", f"the adapter of {path.name} was merged into its base model {name}"
    )
    # If the adapter has replaced the classifier, the note that it is random is out of date.
    kept = [each for each in spec.notes if not classes or each.code != "new-classifier"]
    return source, replace(spec, notes=(note, *kept))


def _import_peft(path: Path) -> Any:
    """Import and return the library that reads the adapter in a folder.

    Raises:
        InputError: peft is not installed.
    """
    with explain_failure(
        f"{path} holds an adapter, such as LoRA, which needs the library `peft`",
        f"pip install peft. Or {MERGE}",
        ImportError,
    ):
        import peft
    return peft


def _read_state(path: Path, peft: Any) -> Mapping[str, Tensor]:
    """Read the weights of an adapter; pickled files may hold tensors only."""
    with explain_failure(
        f"the weights of the adapter {path} cannot be read",
        "The folder needs adapter_model.safetensors. Copy or download it again.",
    ):
        if not any((path / f"adapter_model.{end}").is_file() for end in ("safetensors", "bin")):
            raise FileNotFoundError("adapter_model.safetensors")
        return peft.utils.load_peft_weights(str(path), device="cpu")


def _find_base(name: str, revision: str | None, path: Path) -> str:
    """Return the MODEL argument of a base model: a folder, or a repository of the Hub.

    A folder may be relative to the working directory or to the adapter at `path`.

    Raises:
        InputError: the name is that of the adapter's own folder.
    """
    for folder in (Path(name), path / name):
        if folder.resolve() == path.resolve():
            raise InputError(
                f"{path / CONFIG} names its own folder as the base model",
                "Write the folder of the whole model into base_model_name_or_path.",
            )
        if folder.is_dir():
            return str(folder)
    return f"hf:{name}@{revision}" if revision else f"hf:{name}"


def _count_classes(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> int | None:
    """Return the number of classes of an adapter's new classifier; None without a classifier."""
    if config.get("task_type") != "SEQ_CLS":
        return None
    # How models of transformers name the last layer of a classifier.
    names = ("score.weight", "classifier.weight", "out_proj.weight")
    heads = [value for key, value in state.items() if key.endswith(names)]
    return len(heads[-1]) if heads else None  # one row per class


def _merge(module: Any, path: Path, state: Mapping[str, Tensor], peft: Any) -> None:
    """Merge the weights of an adapter into its base model, in place.

    Args:
        module: the base model.
        path: the folder of the adapter.
        state: the adapter's weights by name.
        peft: the library.

    Raises:
        InputError: this kind of adapter cannot be merged, or names or shapes differ.
    """
    with explain_failure(
        f"peft cannot apply the adapter {path} to {type(module).__name__}",
        f"Update peft, or {MERGE}",
    ):
        config = peft.PeftConfig.from_pretrained(str(path))
        if config.is_prompt_learning:  # adds tokens to the input, and leaves the weights alone
            raise InputError(
                f"{path} holds a prompt ({config.peft_type}), and no change of weights",
                "Measure its base model.",
            )
        wrapped = peft.PeftModel(module, config)
        # Names are compared here, because peft skips missing and surplus names without an error.
        expected = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    misfit = find_misfit(expected, state)
    if misfit:
        raise InputError(
            f"the adapter {path} does not fit {type(module).__name__}: {misfit}",
            "Check base_model_name_or_path in adapter_config.json.",
        )
    peft.set_peft_model_state_dict(wrapped, dict(state))
    wrapped.merge_and_unload(safe_merge=True)
