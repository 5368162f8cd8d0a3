"""Write a model as a directory that `load_net` reads back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save

from lipaudit.models.net import LoadOptions, Net
from lipaudit.models.sources.demo import AS_TIMM, DigitsViT
from lipaudit.models.sources.huggingface import POOLING, SETTINGS, silence_transformers
from lipaudit.models.sources.weights import read_json


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
    module: Any = net.module
    if hasattr(module, "save_pretrained"):
        source = Path(module.config._name_or_path)
        beside = (*source.glob("*"), *source.glob(POOLING)) if source.is_dir() else ()
        for file in beside:
            copy = folder / file.relative_to(source)
            if file.suffix in SETTINGS and ".index." not in file.name and not copy.exists():
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(file, copy)
        with silence_transformers():
            module.save_pretrained(folder)
        return True
    weights = {name: t.detach().cpu().contiguous() for name, t in module.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(weights))  # a full disk raises OSError here
    trained, preprocess = getattr(module, "pretrained_cfg", None), net.preprocess
    if isinstance(module, DigitsViT):
        architecture, arguments = AS_TIMM
        kept: dict[str, Any] = {}
    elif trained is not None:
        architecture = str(trained.get("architecture"))
        # The arguments the model was built with: of its directory, and of the options.
        file = Path(net.name) / "config.json"
        built = read_json(file).get("model_args", {}) if file.is_file() else {}
        built |= dict((options or LoadOptions()).model_kwargs)
        arguments = {k: v for k, v in built.items() if k not in ("pretrained", "num_classes")}
        names = ("interpolation", "crop_pct", "crop_mode", "first_conv", "classifier")
        kept = {name: trained[name] for name in names if trained.get(name) is not None}
    else:
        return False
    classes = net.classes or 0
    how = {key: preprocess[key] for key in ("mean", "std") if key in preprocess}
    how |= {"input_size": list(net.input_shape), "num_classes": classes}
    config = {
        "architecture": architecture,
        "num_classes": classes,
        "model_args": arguments,
        "pretrained_cfg": kept | how,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return True
