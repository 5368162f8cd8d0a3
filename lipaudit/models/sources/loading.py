"""The MODEL argument: find its source, and load the `Net`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from lipaudit.data.hub import hub_access
from lipaudit.data.samples import remark
from lipaudit.errors import InputError, UsageError, neighbours, require_versions, suggestion
from lipaudit.models.net import Net
from lipaudit.models.precision import seed_device
from lipaudit.models.sources import huggingface, own, timm
from lipaudit.models.sources.assembly import assemble
from lipaudit.models.sources.demo import load_demo
from lipaudit.models.sources.names import DEMOS, FORMS, similar_models
from lipaudit.models.sources.offload import find_device
from lipaudit.models.sources.weights import SUFFIXES, read_json
from lipaudit.models.spec import LoadOptions as LoadOptions
from lipaudit.models.spec import ModelSpec as ModelSpec

SEED = 0
"""Seed of random weights, so that they are always the same."""
CONVERTED = (".gguf", ".onnx", ".tflite", ".mlmodel", ".engine")
"""File formats of converted checkpoints that run without PyTorch (and have no gradients)."""


def load_net(spec: str, options: LoadOptions | None = None) -> Net:
    """Load the model that a MODEL argument names.

    Forms of a MODEL: `demo[:NAME]`; `timm:NAME`; `hf:ORG/NAME[@REVISION]` (`hf-hub:` is the same);
    a directory with config.json in the format of timm or transformers; a file of weights with
    `arch`; `py:FILE_OR_MODULE:FACTORY`. A bare name is searched among demos, paths, timm's models
    and the Hub, in that order; a note says where it was found. Only `py:` runs code. Missing and
    surplus tensors are errors. Random weights need `model_kwargs={"pretrained": False}` and give a
    warning.

    The module is returned in eval mode with frozen parameters. The global random state does not
    change.

    Raises:
        UsageError: the options do not fit (a file of weights without `arch`).
        InputError: the model is missing, damaged or not supported.
    """
    require_versions()
    options = options or LoadOptions()
    place = find_device(options.device)
    # Random weights are the same each time; the caller's random state is restored.
    with seed_device(SEED, place):
        source, model = _load(spec, options)
        # Options that this source does not use are refused.
        if options.arch is not None and source != "file":
            raise UsageError(
                f"--arch is only for weights files; {spec} already names its architecture",
                "Drop it.",
            )
        if options.model_kwargs and source == "demo":
            raise UsageError(
                f"{spec} does not take {', '.join(options.model_kwargs)}",
                "Leave --model-kwargs out. In a gate they come from the baseline: check that it "
                "is of this model.",
            )
        if options.tower is not None and source not in ("hf", "py"):
            raise UsageError(f"{spec} has no separate image and text towers", "Leave --tower out.")
        if options.classes is not None and source in ("demo", "py"):
            raise UsageError(f"{spec} has a fixed number of classes", "Leave --classes out.")
        if options.weights == "stored" and source not in ("hf", "py"):
            raise UsageError(
                "--weights stored works only for transformers models and py: factories",
                "Leave it out.",
            )
        return assemble(model, options, name=spec, source=source)


def _load(spec: str, options: LoadOptions) -> tuple[str, ModelSpec]:
    """Return the source of a MODEL argument, and the model."""
    prefix, colon, name = spec.partition(":")
    if prefix == "timm" and name.startswith(("hf_hub:", "hf-hub:")):  # the spelling of timm
        prefix, name = "hf", name.partition(":")[2]
    if prefix == "timm" and name.startswith("local-dir:"):
        return _load_directory(Path(name.partition(":")[2]), options)
    if spec == "demo" or (colon and prefix == "demo"):
        return "demo", load_demo(name or "standard")
    if colon and prefix == "timm":
        with hub_access(offline=options.offline):
            return prefix, timm.load_pretrained(name, options)
    if colon and prefix == "py":
        return prefix, own.load_factory(name, options)
    if colon and prefix.endswith(".py") and Path(prefix).is_file():
        raise InputError(f"no model {spec!r}", f"Did you mean py:{spec}?")
    if colon and prefix in ("hf", "hf-hub"):
        repository, _, revision = name.partition("@")
        if repository.count("/") > 1 or not repository:
            raise UsageError(
                f"{name!r} is not a repository name of the Hub", "Write hf:ORG/NAME[@REVISION]."
            )
        path, commit = huggingface.fetch_repository(repository, revision, options)
        source, model = _load_directory(path, options)
        return source, replace(model, commit=commit)
    return _load_bare(spec, options)


def _load_bare(name: str, options: LoadOptions) -> tuple[str, ModelSpec]:
    """Load a name without a prefix, and note which source was found."""
    path = Path(name)

    if name in DEMOS:
        meant, what = f"demo:{name}", "demo checkpoint"
    elif name and path.is_dir():
        return _load_directory(path, options)
    elif path.is_file():
        if path.suffix not in SUFFIXES:
            raise InputError(f"{path} is not a file of weights", _suggest_checkpoint(path))
        if options.arch is None:
            raise UsageError(
                f"{path} holds only weights, and the architecture is unknown",
                "Add --arch timm:NAME (and --model-kwargs where it differs), or --arch "
                "py:FILE:FACTORY with your own factory.",
            )
        if options.arch.startswith("py:"):
            return "file", own.load_file(path, options.arch.removeprefix("py:"), options)
        return "file", timm.load_file(path, options.arch.removeprefix("timm:"), options)
    elif path.suffix in SUFFIXES or name.startswith((".", "/", "~")):
        advice = suggestion(name, neighbours(path), "Check the path.")
        raise InputError(f"there is no file or directory {name}", advice)
    elif timm.is_timm(name):
        meant, what = f"timm:{name}", "timm model"
    elif name.count("/") == 1:
        meant, what = f"hf:{name}", "Hugging Face repository"
    else:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        families = "|".join(map(re.escape, CONFIG_MAPPING_NAMES))
        family = re.match(rf"({families})([-.0-9]|$)", name.casefold())
        # Repositories of transformers without an owner have no `_` in their name.
        close = [f"hf:{name}"] if family and "_" not in name else []
        close += similar_models(name)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise InputError(f"no model {name!r}", f"{hint}MODEL is one of: {FORMS}.")
    try:
        source, model = _load(meant, options)
    except InputError as error:
        if not meant.startswith("hf:"):
            raise
        message = f"there is no file or directory {name}; as a repository, {error.message}"
        raise InputError(message, error.advice) from error
    note = remark("resolved", f"{name!r} was read as the {what} {meant}")
    return source, replace(model, notes=(note, *model.notes))


def _load_directory(path: Path, options: LoadOptions) -> tuple[str, ModelSpec]:
    """Load a directory in the format of timm or transformers, by the keys of its config.json."""
    if huggingface.is_adapter(path):
        return "hf", huggingface.load_adapter(path, options)
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"{path} has no config.json", _suggest_checkpoint(path))
    config = read_json(file)
    if isinstance(config, dict) and "model_type" in config:
        return "hf", huggingface.load_directory(path, options)
    if isinstance(config, dict) and config.keys() & {"architecture", "pretrained_cfg"}:
        return "timm", timm.load_directory(path, options)
    raise InputError(
        f"{file} names neither a timm architecture nor a transformers model_type",
        "Give the weights file with --arch timm:NAME.",
    )


def _suggest_checkpoint(path: Path) -> str:
    """Suggest what to pass in place of a path without weights for PyTorch."""
    files = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
    if path.suffix == ".py":
        return f"A function in it that returns the model is py:{path}:FUNCTION."
    if converted := next((file for file in files if file.suffix in CONVERTED), None):
        return (
            f"{converted.name} was converted to a format without gradients. Give the original "
            "checkpoint."
        )
    if path.is_dir():
        return "Give its weights file with --arch timm:NAME, or add the config.json."
    return f"Give a file that ends in {', '.join(SUFFIXES)}."
