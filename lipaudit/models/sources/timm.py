"""Models of timm: pretrained by name, a directory in timm's format, or a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from lipaudit.data.hub import (
    OFFLINE,
    Commit,
    Repository,
    explain_refusal,
    find_commit,
    is_offline,
)
from lipaudit.data.images import resize
from lipaudit.data.samples import remark, warning
from lipaudit.errors import (
    InputError,
    UsageError,
    explain_failure,
    of_machine,
    out_of_memory,
    suggestion,
)
from lipaudit.models.sources.names import timm_names
from lipaudit.models.sources.weights import (
    PREFERRED,
    State,
    find_misfit,
    list_weight_files,
    load_strictly,
    read_weights,
    strip_prefix,
)
from lipaudit.models.spec import RANDOM, LoadOptions, ModelSpec, new_classifier
from lipaudit.tables import Note

DEFAULT_NORMALISATION = warning(
    "default-normalisation",
    "mean and std are those of the architecture's pretrained weights. If this file was "
    "trained with others, give --mean and --std",
)


def is_timm(name: str) -> bool:
    """Say whether timm knows an architecture, with or without the tag of its weights."""
    import timm

    return bool(timm.is_model(name.partition(".")[0]))


def load_pretrained(name: str, options: LoadOptions) -> ModelSpec:
    """Load a registry model with timm's weights, or with random ones on request.

    Raises:
        InputError: the name is unknown, or the weights cannot be downloaded.
        UsageError: with these arguments a part of the weights would be random.
    """
    _require_known(name)
    if not options.pretrained:
        return describe_timm(_create(name, options.building), options, notes=(RANDOM,))
    module, commit = _download(name, options)
    classes, trained = module.num_classes, module.pretrained_cfg["num_classes"]
    if classes not in (0, trained):
        raise UsageError(
            f"num_classes={classes} would replace the classifier of {name} ({trained} "
            "classes) by a random one",
            "Leave num_classes out, train a new classifier with `lipaudit train --classes`, "
            "or give your own weights file with --arch.",
        )
    return replace(describe_timm(module, options), commit=commit)


def load_directory(path: Path, options: LoadOptions) -> ModelSpec:
    """Load a directory whose config.json has timm's keys (as timm's repositories on the Hub).

    Raises:
        InputError: it has no file of weights, or several without the usual name.
    """
    import timm

    if Version(timm.__version__) < Version("1.0.16"):  # the first version that loads `local-dir:`
        text = f"timm {timm.__version__} cannot read directories in timm's format"
        raise InputError(text, "pip install 'timm>=1.0.16'")
    module = _create(f"local-dir:{path}", options.building)
    if not options.pretrained:
        return describe_timm(module, options, notes=(RANDOM,))
    files = list_weight_files(file.name for file in path.iterdir())
    if len(files) != 1:
        raise InputError(
            f"{path} has no unique weights file (found: {', '.join(files) or 'none'})",
            f"Rename one of them to {PREFERRED[0]}, or give the file with --arch.",
        )
    weights = path / files[0]
    state, notes = read_weights(weights)
    return describe_timm(module, options, notes=notes + _load(module, state, weights))


def load_file(path: Path, arch: str, options: LoadOptions) -> ModelSpec:
    """Load a file of weights into an architecture of timm.

    The number of classes follows from the classifier's weights unless --model-kwargs gives it.

    Raises:
        InputError: the architecture is unknown, or the weights do not fit it.
    """
    import timm.models

    _require_known(arch)
    state, notes = read_weights(path)
    state = strip_prefix(state)  # every timm model has several parts
    config = timm.models.get_pretrained_cfg(arch)
    head = config.classifier if config is not None else None
    weight = state.get(f"{head[0] if isinstance(head, tuple) else head}.weight")
    classes = None if weight is None else weight.shape[0]
    module = _create(arch, {"num_classes": classes} | options.building)
    notes += _load(module, state, path)
    if options.mean is None or options.std is None:
        notes += (DEFAULT_NORMALISATION,)
    return describe_timm(module, options, notes=notes, known_labels=False)


def describe_timm(
    module: Any,
    options: LoadOptions,
    *,
    notes: tuple[Note, ...] = (),
    known_labels: bool = True,
) -> ModelSpec:
    """Describe the input of a timm model: size, normalisation, resizing, labels.

    If another number of classes is requested, the classifier is replaced first.
    """
    import timm.data

    if options.classes not in (None, module.num_classes):
        module.reset_classifier(options.classes)
        notes, known_labels = (*notes, new_classifier(options.classes)), False
    config = timm.data.resolve_model_data_config(module)
    shape = options.image_shape(_image_shape(module, config, options.model_kwargs))
    # The transform is built for the requested size.
    config["input_size"] = shape
    labels, aliases = _read_labels(module) if known_labels else (None, {})
    steps = timm.data.create_transform(**config, is_training=False).transforms
    before = [step for step in steps if type(step).__name__ != "Normalize"]  # `call` does it
    return ModelSpec(
        module,
        shape,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        classifier=getattr(module, "num_classes", 0) > 0,
        labels=labels,
        aliases=aliases,
        prepare=lambda image: resize(image, shape, before),
        architecture=str(module.pretrained_cfg.get("architecture", type(module).__name__)),
        preprocess={k: config[k] for k in ("interpolation", "crop_pct", "crop_mode")},
        notes=notes,
    )


def _require_known(name: str) -> None:
    if not is_timm(name):
        near = suggestion(
            name.partition(".")[0], timm_names(), "Search names with `lipaudit models PART`."
        )
        hub = f"Did you mean hf:{name}, a repository of the Hugging Face Hub?"
        raise InputError(f"timm has no model {name!r}", hub if "/" in name else near)


def _create(name: str, kwargs: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> Any:
    """Build a model, with fused attention if timm has it.

    Args:
        name: a name of timm's registry, or `local-dir:PATH`.
        kwargs: the user's arguments.
        weights: the place of timm's weights; None for random ones.
    """
    import timm
    from timm.layers import set_fused_attn, use_fused_attn

    before = use_fused_attn(), use_fused_attn(experimental=True)
    set_fused_attn(True, experimental=True)
    try:
        pretrained = weights is not None
        return timm.create_model(name, pretrained=pretrained, **(weights or {}), **kwargs)
    except (TypeError, AssertionError) as error:
        raise UsageError(
            f"timm cannot build {name} with {kwargs}: {error}", "Check --model-kwargs."
        ) from error
    except (RuntimeError, ValueError) as error:
        if weights is not None or of_machine(error):
            raise
        raise InputError(f"timm cannot build {name}: {error}", "Check the name.") from error
    finally:
        set_fused_attn(before[0], experimental=before[1])


def _download(name: str, options: LoadOptions) -> tuple[Any, Commit | None]:
    """Build a model with timm's weights; return their commit if they are on the Hub."""
    import timm.models

    config: Any = timm.models.get_pretrained_cfg(name)
    arch = name.partition(".")[0]
    random = (
        "--model-kwargs pretrained=false uses random weights (enough to check memory and time)."
    )
    if config is None or not config.has_weights:
        text = f"timm has no weights for {name}"
        raise InputError(text, f"Give your own weights file with --arch timm:{arch}. {random}")
    repository = Repository(config.hf_hub_id) if config.hf_hub_id else None
    file = f"model.safetensors of {repository.page}" if repository else config.url
    try:
        if repository is not None:
            commit = find_commit(repository, offline=options.offline)
            at = f"{repository.name}@{commit.sha}"
            overlay = {"hf_hub_id": at, "custom_load": config.custom_load}
            try:
                module = _create(name, options.building, {"pretrained_cfg_overlay": overlay})
            except UsageError:
                raise
            except Exception as error:  # every HTTP library has its own exceptions
                if out_of_memory(error):
                    raise
                raise explain_refusal(error, repository) from error
            commit.remember()
            return module, commit
        # Weights that timm stores outside the Hub.
        cached = Path(torch.hub.get_dir(), "checkpoints", config.url.rpartition("/")[2])
        if is_offline(asked=options.offline) and not cached.is_file():
            raise InputError(
                f"{config.url} is not in the local cache, and {OFFLINE}",
                "Run the command once with a connection.",
            )
        with (
            explain_failure(f"{config.url} cannot be fetched", "Check the network."),
            redirect_stdout(sys.stderr),  # torch.hub prints its downloads to stderr
        ):
            return _create(name, options.building, {}), None
    except InputError as error:
        raise InputError(
            f"the pretrained weights of {name} cannot be loaded: {error.message}",
            f"{error.advice} Or give a weights file ({file}) with --arch timm:{arch}. {random}",
        ) from error


def _load(module: Any, state: State, path: Path) -> tuple[Note, ...]:
    """Load strictly; weights in another layout are converted by timm."""
    convert = getattr(sys.modules[type(module).__module__], "checkpoint_filter_fn", None)
    if not find_misfit(module, state) or convert is None:
        load_strictly(module, state, origin=str(path))
        return ()
    try:
        converted = convert(dict(state), module)
    except (KeyError, RuntimeError, ValueError, AttributeError, IndexError, TypeError) as error:
        if of_machine(error):
            raise
        converted = state
    load_strictly(module, converted, origin=str(path))
    return (remark("converted", "timm converted the weights from another layout or size"),)


def _image_shape(
    module: Any, config: dict[str, Any], kwargs: Mapping[str, Any]
) -> tuple[int, int, int]:
    """Read channels and size off the built model: --model-kwargs may have changed them."""
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    size = size or kwargs.get("img_size") or config["input_size"][1:]
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = config["input_size"][0]
    conv = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    if conv is None or conv.in_channels == channels:
        return channels, height, width
    # Try an image: a stem may rearrange the pixels before its first convolution.
    like = next(module.parameters())
    try:
        with torch.no_grad():
            module.eval()(like.new_zeros(1, channels, height, width))
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        if of_machine(error):
            raise
        return conv.in_channels, height, width
    return channels, height, width


def _read_labels(module: Any) -> tuple[tuple[str, ...] | None, dict[str, int]]:
    """Return class names and aliases (ImageNet synsets) known to timm."""
    import timm.data

    names = module.pretrained_cfg.get("label_names")
    descriptions = module.pretrained_cfg.get("label_descriptions")
    if names and len(names) == module.num_classes:
        shown = tuple(str((descriptions or {}).get(n, n)) for n in names)
        return shown, {str(n): i for i, n in enumerate(names)}
    subset = timm.data.infer_imagenet_subset(module)
    if not subset:
        return None, {}
    info = timm.data.ImageNetInfo(subset)
    labels = tuple(info.index_to_description(i) for i in range(info.num_classes()))
    return labels, list_synsets(subset)


def list_synsets(subset: str = "imagenet-1k") -> dict[str, int]:
    """Return the WordNet names of ImageNet's classes, which its folders use."""
    import timm.data

    return {name: i for i, name in enumerate(timm.data.ImageNetInfo(subset).label_names())}
