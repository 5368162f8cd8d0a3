"""Write the weights of a model, with a configuration from which it can be loaded again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from lipaudit.models.net import LoadOptions, Net
from lipaudit.models.sources.huggingface import POOLING, SETTINGS, silence_transformers
from lipaudit.models.sources.timm import AS_TIMM, RESIZING, DigitsViT
from lipaudit.models.sources.weight_files import read_json


def save_net(net: Net, folder: Path, options: LoadOptions | None = None) -> bool:
    """Write the weights of a model and, if its library has a format for it, its configuration.

    Models of transformers are written in their format, with all other files of their directory
    (tokenizer, pooling). Models of timm and the demos are written in timm's format, with their
    normalisation.

    Args:
        net: the model.
        folder: created if missing.
        options: the options the model was loaded with.

    Returns:
        True if the folder is a MODEL argument, False if it holds weights only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    module = net.module
    if hasattr(module, "save_pretrained"):
        _save_transformers(module, folder)
        return True
    # Copies, because the format refuses tensors that share memory, such as tied weights.
    weights = {
        name: t.cpu().clone(memory_format=torch.contiguous_format)
        for name, t in module.state_dict().items()
    }
    (folder / "model.safetensors").write_bytes(save(weights))  # a full disk raises OSError here
    # Models of timm keep facts about their trained weights: classes, normalisation, resizing.
    pretrained_cfg = getattr(module, "pretrained_cfg", None)
    facts = {}
    if isinstance(module, DigitsViT):  # a demo: timm has an equal architecture
        architecture, arguments = AS_TIMM
    elif pretrained_cfg is not None:
        architecture = str(pretrained_cfg.get("architecture"))
        arguments = _read_arguments(net, options or LoadOptions())
        for name in (*RESIZING, "first_conv", "classifier"):
            if pretrained_cfg.get(name) is not None:
                facts[name] = pretrained_cfg[name]
    else:  # no library has a format for this model
        return False
    for name in ("mean", "std"):
        if name in net.preprocess:
            facts[name] = net.preprocess[name]
    classes = net.classes or 0
    facts |= {"input_size": list(net.input_shape), "num_classes": classes}
    config = {
        "architecture": architecture,
        "num_classes": classes,
        "model_args": arguments,
        "pretrained_cfg": facts,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return True


def _read_arguments(net: Net, options: LoadOptions) -> dict[str, Any]:
    """Return the arguments with which a model of timm was built, such as `img_size`.

    They come from the config.json of its directory and from --model-kwargs. The number of classes
    is left out, because it may have changed.
    """
    config_file = Path(net.name) / "config.json"
    arguments = {}
    if config_file.is_file():
        arguments = read_json(config_file).get("model_args", {})
    arguments |= options.model_kwargs
    return {k: v for k, v in arguments.items() if k not in ("pretrained", "num_classes")}


def _save_transformers(module: Any, folder: Path) -> None:
    """Write a model of transformers, with the tokenizer and other settings of its directory."""
    name = module.config._name_or_path  # empty if the model was not loaded from a directory
    source = Path(name)
    files = (*source.glob("*"), *source.glob(POOLING)) if name and source.is_dir() else ()
    for file in files:
        copy = folder / file.relative_to(source)
        # Not the index of sharded weights, which `save_pretrained` writes.
        if file.suffix in SETTINGS and ".index." not in file.name and not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(file, copy)
    with silence_transformers():
        module.save_pretrained(folder)
