"""The MODEL argument: find its source, and load the `Net`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from lipaudit.data.hub import hub_access
from lipaudit.errors import InputError, UsageError, neighbours, require_versions, similar
from lipaudit.models.net import LoadOptions as LoadOptions
from lipaudit.models.net import ModelSpec as ModelSpec
from lipaudit.models.net import Net
from lipaudit.models.precision import seed_device
from lipaudit.models.sources import huggingface, own, timm
from lipaudit.models.sources.assembly import assemble
from lipaudit.models.sources.demo import load_demo
from lipaudit.models.sources.names import FORMS, similar_models
from lipaudit.models.sources.offload import find_device
from lipaudit.models.sources.weights import SUFFIXES, read_json

SEED = 0
"""Seed of random weights, so that they are always the same."""
TAKES = {
    "demo": (),
    "timm": ("model_kwargs", "classes"),
    "file": ("arch", "model_kwargs", "classes"),
    "hf": ("model_kwargs", "tower", "classes", "weights"),
    "py": ("model_kwargs", "tower", "weights"),
}
"""Options that a source of models reads, beside those that `assemble` reads for all."""
CHECKED = ("arch", "model_kwargs", "tower", "classes", "weights")


def load_net(name: str, options: LoadOptions | None = None) -> Net:
    """Load the model that a MODEL argument names.

    Forms of a MODEL: `demo[:NAME]`; `timm:NAME`; `hf:ORG/NAME[@REVISION]` (`hf-hub:` is the same);
    a directory with config.json in the format of timm or transformers; a file of weights with
    `arch`; `py:FILE_OR_MODULE:FACTORY`. Only `py:` runs code. Missing and surplus tensors are
    errors. Random weights need `model_kwargs={"pretrained": False}` and give a warning.

    The module is returned in eval mode with frozen parameters. The global random state does not
    change.

    Raises:
        UsageError: the options do not fit (a file of weights without `arch`).
        InputError: the model is missing, damaged or not supported.
    """
    require_versions()
    options = options or LoadOptions()
    # Random weights are the same each time; the caller's random state is restored.
    with seed_device(SEED, find_device(options.device)), hub_access(offline=options.offline):
        source, spec = _load_spec(name, options)
        for option in CHECKED:
            given = getattr(options, option) != getattr(LoadOptions(), option)
            if given and option not in TAKES[source]:
                raise UsageError(
                    f"{name} does not take --{option.replace('_', '-')}",
                    "Leave it out. In a gate it comes from the baseline: check that this is of "
                    "the same model.",
                )
        return assemble(spec, options, name=name, source=source)


def _load_spec(model: str, options: LoadOptions) -> tuple[str, ModelSpec]:
    """Return the source of a MODEL argument, and the model with its description."""
    prefix, colon, name = model.partition(":")
    if model == "demo" or (colon and prefix == "demo"):
        return "demo", load_demo(name or "standard")
    if colon and prefix == "timm":
        return prefix, timm.load_pretrained(name, options)
    if colon and prefix == "py":
        return prefix, own.load_factory(name, options)
    if colon and prefix in ("hf", "hf-hub"):
        folder, commit = huggingface.fetch_repository(name, options)
        source, spec = _load_directory(folder, options)
        return source, replace(spec, commit=commit)
    path = Path(model)
    if model and path.is_dir():
        return _load_directory(path, options)
    if path.is_file() and path.suffix in SUFFIXES:
        if options.arch is None:
            raise UsageError(
                f"{path} holds only weights, and the architecture is unknown",
                "Add --arch timm:NAME (and --model-kwargs where it differs), or --arch "
                "py:FILE:FACTORY with your own factory.",
            )
        load_file = own.load_file if options.arch.startswith("py:") else timm.load_file
        return "file", load_file(path, options.arch, options)
    if path.is_file():
        raise InputError(
            f"{path} is not a file of weights for PyTorch",
            f"Give a file that ends in {', '.join(SUFFIXES)}, which has gradients (ONNX and GGUF "
            f"have none), or a Python function that returns the model: py:{path}:FUNCTION.",
        )
    close = [f"py:{model}"] if ".py:" in model else []
    close += similar(model, neighbours(path)) + similar_models(model)
    if path.suffix not in SUFFIXES and re.fullmatch(r"\w[\w.-]*[/-][\w.-]+", model):
        close.append(f"hf:{model}")
    hint = f"Did you mean {' or '.join(close[:3])}? " if close else ""
    raise InputError(
        f"no model {model!r}: there is no such file or directory",
        f"{hint}MODEL is one of: {FORMS}.",
    )


def _load_directory(path: Path, options: LoadOptions) -> tuple[str, ModelSpec]:
    """Load a directory in the format of timm or transformers, by the keys of its config.json."""
    if (path / "adapter_config.json").is_file():
        raise InputError(
            f"{path} holds an adapter, such as LoRA, and no whole model",
            "Merge it into its model first, with the library peft: "
            "AutoPeftModel.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW).",
        )
    file = path / "config.json"
    if not file.is_file():
        raise InputError(
            f"{path} has no config.json",
            "Give its weights file with --arch timm:NAME, or add the config.json.",
        )
    config = read_json(file)
    if isinstance(config, dict) and "model_type" in config:
        return "hf", huggingface.load_directory(path, options)
    if isinstance(config, dict) and config.keys() & {"architecture", "pretrained_cfg"}:
        return "timm", timm.load_directory(path, options)
    raise InputError(
        f"{file} names neither a timm architecture nor a transformers model_type",
        "Give the weights file with --arch timm:NAME.",
    )
