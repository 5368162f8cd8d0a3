"""Models of timm: pretrained by name, a directory in timm's format, or a file; and the demos.

They were trained on the 1437 training images of scikit-learn's `load_digits` (8x8 pixels; "Optical
Recognition of Handwritten Digits", UCI machine learning repository, credit E. Alpaydin and
C. Kaynak, CC BY 4.0) by `benchmarks.shared.demos`. The 360 images held out are the data set
`demo`. Parameters carry timm's names: timm's VisionTransformer loads the same files.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.data.hub import Repository, explain_refusals, find_commit
from lipaudit.data.image_files import Resizing
from lipaudit.errors import InputError, UsageError, is_machine_error, suggestion
from lipaudit.models.net import RANDOM, LoadOptions, ModelSpec, new_classifier
from lipaudit.models.sources import DEMOS, timm_names
from lipaudit.models.sources.imports import import_library
from lipaudit.models.sources.weight_files import (
    PREFERRED,
    State,
    find_misfit,
    list_weight_files,
    load_strictly,
    match_names,
    read_weights,
    strip_prefix,
)
from lipaudit.tables import Note, Notes

# Facts on the steps by which a model of timm resizes images.
RESIZING = ("interpolation", "crop_pct", "crop_mode")
DEFAULT_NORMALISATION = Note.warn(
    "default-normalisation",
    "mean and std are those of the architecture's pretrained weights. If this file was "
    "trained with others, give --mean and --std",
)


def load_pretrained(name: str, options: LoadOptions) -> ModelSpec:
    """Load a model of timm's registry with timm's weights, or with random weights on request.

    Raises:
        InputError: the name is unknown, or the weights cannot be downloaded.
        UsageError: with these arguments a part of the weights would be random.
    """
    _require_known(name)
    import timm.models

    if not options.pretrained:
        return describe_timm(_create(name, options.building), options, notes=(RANDOM,))
    config = timm.models.get_pretrained_cfg(name)
    hub_id = getattr(config, "hf_hub_id", None)
    advice = _advise_on_download(name, hub_id, url=getattr(config, "url", None))
    if not hub_id:
        raise InputError(f"the Hub has no weights of timm for {name}", advice)
    repository = Repository(hub_id)
    try:
        with explain_refusals(repository):
            commit = find_commit(repository, offline=options.offline)
            # The weights of exactly this commit. `custom_load` says how timm reads their file:
            # another source would reset it.
            source = {"hf_hub_id": f"{hub_id}@{commit.sha}", "custom_load": config.custom_load}
            module = _create(
                name, options.building, pretrained=True, pretrained_cfg_overlay=source
            )
    except InputError as error:
        raise InputError(
            f"the pretrained weights of {name} cannot be loaded: {error.message}",
            f"{error.advice} Or {advice}",
        ) from error
    commit.record_revision()
    _require_trained_classifier(module, name)
    return replace(describe_timm(module, options), commit=commit)


def _advise_on_download(name: str, hub_id: str | None, url: str | None) -> str:
    """Return what to do if the pretrained weights of a model cannot be downloaded.

    Args:
        name: the model in timm.
        hub_id: the repository of the Hub that has its weights, if any.
        url: another address of the weights, if any.
    """
    advice = f"give a weights file with --arch timm:{name.partition('.')[0]}"
    if hub_id:
        advice += f" (of {hub_id})"
    elif url:
        advice += f" ({url})"
    return (
        f"{advice}. --model-kwargs pretrained=false uses random weights (to check memory and "
        "time)."
    )


def _require_trained_classifier(module: Any, name: str) -> None:
    """Refuse a pretrained model that was loaded with another number of classes than its weights.

    timm then makes a new classifier with random weights.
    """
    classes = module.num_classes
    trained_classes = module.pretrained_cfg["num_classes"]
    if classes not in (0, trained_classes):  # 0: features, without a classifier
        raise UsageError(
            f"num_classes={classes} would replace the classifier of {name} ({trained_classes} "
            "classes) by a random one",
            "Leave num_classes out, train a new classifier with `lipaudit train --classes`, or "
            "give your own weights file with --arch.",
        )


def load_directory(path: Path, options: LoadOptions) -> ModelSpec:
    """Load a directory whose config.json has timm's keys (as timm's repositories on the Hub).

    Raises:
        InputError: the directory has no file of weights, or several without a usual name.
    """
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
    arch = arch.removeprefix("timm:")
    _require_known(arch)
    import timm.models

    state, notes = read_weights(path)
    # Remove a prefix such as `module.` from all names. No model of timm has a single submodule,
    # whose name would look like such a prefix.
    state = strip_prefix(state)
    classes = _count_classes(state, timm.models.get_pretrained_cfg(arch))
    module = _create(arch, {"num_classes": classes} | options.building)
    matched, left_out = match_names(state, module)
    # Weights beside the model, such as weights of a loss, are left out only if all others fit.
    if left_out and not find_misfit(module.state_dict(keep_vars=True), matched):
        state = matched
        notes += left_out
    notes += _load(module, state, path)
    if options.mean is None or options.std is None:
        notes += (DEFAULT_NORMALISATION,)
    return describe_timm(module, options, notes=notes, knows_weights=False)


def _count_classes(state: State, config: Any) -> int | None:
    """Return the number of classes of stored weights; None if they have no classifier.

    Args:
        state: the weights by name.
        config: timm's configuration of the architecture, which names the classifier.
    """
    classifier = getattr(config, "classifier", None)  # such as "head"
    if isinstance(classifier, tuple):  # the model has a second classifier, for distillation
        classifier = classifier[0]
    for key, weight in state.items():
        # In a training checkpoint, names may have a prefix, as in `model.head.weight`.
        if f".{key}".endswith(f".{classifier}.weight"):
            return len(weight)  # a row per class
    return None


def describe_timm(
    module: Any, options: LoadOptions, *, notes: Notes = (), knows_weights: bool = True
) -> ModelSpec:
    """Describe the input of a timm model: size, normalisation, resizing, labels.

    If another number of classes is requested, the classifier is replaced first.

    Args:
        module: the model.
        options: the user's options.
        notes: remarks on loading.
        knows_weights: whether the configuration of the model belongs to its weights. Otherwise
            labels are left out, and a note says where the resizing comes from.
    """
    import timm.data

    has_labels = knows_weights
    if options.classes not in (None, module.num_classes):
        module.reset_classifier(options.classes)
        notes = (*notes, new_classifier(options.classes))
        has_labels = False
    config = timm.data.resolve_model_data_config(module)
    shape = options.image_shape(_find_shape(module, options.model_kwargs, config["input_size"]))
    # The transform is built for the requested size.
    config["input_size"] = shape
    labels = None
    aliases: dict[str, int] = {}
    if has_labels:
        labels, aliases = _read_labels(module)
    steps = {
        type(step).__name__: step
        for step in timm.data.create_transform(**config, is_training=False).transforms
    }
    steps.pop("Normalize", None)  # normalisation is a part of the call of the model
    architecture = str(module.pretrained_cfg.get("architecture", type(module).__name__))
    # If the weights are unknown, the crop is a guess: it belongs to other weights of this
    # architecture. A note then names the architecture.
    guess = ""
    if not knows_weights and config["crop_pct"] != 1:
        guess = architecture
    return ModelSpec(
        module,
        shape,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        classifier=getattr(module, "num_classes", 0) > 0,
        labels=labels,
        aliases=aliases,
        prepare=Resizing(shape, steps, guess=guess),
        architecture=architecture,
        preprocess={k: config[k] for k in RESIZING},
        notes=notes,
    )


def _find_shape(
    module: Any, arguments: Mapping[str, Any], default: Sequence[int]
) -> tuple[int, int, int]:
    """Return (channels, height, width) of the images that a model of timm was built for.

    Args:
        module: the model.
        arguments: --model-kwargs, which may have changed the shape.
        default: the shape in the configuration of the model's weights.
    """
    from timm.layers import to_2tuple

    # Read the channels from a convolution only in a patch embedding. In other models, the first
    # convolution may take rearranged pixels, with another number of channels.
    patches = getattr(module, "patch_embed", None)
    size = getattr(patches, "img_size", None) or arguments.get("img_size") or default[1:]
    height, width = to_2tuple(size)
    channels = arguments.get("in_chans") or default[0]
    if isinstance(patches, nn.Module):
        for part in patches.modules():
            if isinstance(part, nn.Conv2d):  # the first convolution; later ones take features
                channels = part.in_channels
                break
    return channels, height, width


def _require_known(name: str) -> None:
    """Refuse a name that timm does not have."""
    import_library("timm")
    import timm

    architecture = name.partition(".")[0]
    if timm.is_model(architecture):
        return
    if "/" in name:
        advice = f"Did you mean hf:{name}, a repository of the Hugging Face Hub?"
    else:
        advice = suggestion(
            architecture, timm_names(), "Search names with `lipaudit models PART`."
        )
    raise InputError(f"timm has no model {name!r}", advice)


def _create(name: str, kwargs: Mapping[str, Any], **weights: Any) -> Any:
    """Build a model of timm, with `scaled_dot_product_attention` if timm offers a choice.

    Args:
        name: a name of timm's registry, or `local-dir:PATH`.
        kwargs: the user's arguments.
        weights: arguments that say whether and where timm loads weights; by default, weights are
            random.
    """
    import_library("timm")
    import timm
    from timm.layers import set_fused_attn, use_fused_attn

    # Two global settings of timm, which are restored at the end.
    is_fused = use_fused_attn()
    is_experimental = use_fused_attn(experimental=True)
    set_fused_attn(True, experimental=True)
    try:
        return timm.create_model(name, **{"pretrained": False} | weights, **kwargs)
    except (TypeError, AssertionError) as error:
        raise UsageError(
            f"timm cannot build {name} with {kwargs}: {error}", "Check --model-kwargs."
        ) from error
    except (RuntimeError, ValueError) as error:
        # While weights are loaded, the caller explains errors.
        if weights or is_machine_error(error):
            raise
        raise InputError(f"timm cannot build {name}: {error}", "Check the name.") from error
    finally:
        set_fused_attn(is_fused, experimental=is_experimental)


def _load(module: Any, state: State, path: Path) -> Notes:
    """Load weights into a model; return a note if timm had to convert the weights first.

    Every weight must fit. If some do not, timm's own function for the model's class converts
    weights of other layouts and sizes, such as weights of the authors' code.
    """
    notes: Notes = ()
    convert = getattr(sys.modules[type(module).__module__], "checkpoint_filter_fn", None)
    if convert is not None and find_misfit(module.state_dict(keep_vars=True), state):
        # If the conversion fails, loading raises the error that names the weights.
        with suppress(KeyError, RuntimeError, ValueError, AttributeError, IndexError, TypeError):
            state = convert(dict(state), module)
        notes = (Note.info("converted", "timm converted the weights from another layout or size"),)
    load_strictly(module, state, path)
    return notes


def _read_labels(module: Any) -> tuple[tuple[str, ...] | None, dict[str, int]]:
    """Return the class names of a model, None if timm has none, and other names with their class.

    Other names are ImageNet synsets: {"n01440764": 0, ...}, where class 0 is tench.
    """
    import timm.data

    names = module.pretrained_cfg.get("label_names")
    descriptions = module.pretrained_cfg.get("label_descriptions") or {}
    if names and len(names) == module.num_classes:
        labels = tuple(str(descriptions.get(name, name)) for name in names)
        return labels, {str(name): i for i, name in enumerate(names)}
    subset = timm.data.infer_imagenet_subset(module)
    if not subset:
        return None, {}
    return tuple(timm.data.ImageNetInfo(subset).label_descriptions()), list_synsets(subset)


def list_synsets(subset: str = "imagenet-1k") -> dict[str, int]:
    """Return the WordNet names of ImageNet's classes with the class indices.

    The folders of the data set have these names.
    """
    import timm.data

    return {name: i for i, name in enumerate(timm.data.ImageNetInfo(subset).label_names())}


WIDTH = 48
HIDDEN = 96
DEPTH = 3
HEADS = 4
PATCH = 2
SIZE = 8
CLASSES = 10
MEAN = 0.5
STD = 0.5
# The architecture of timm that the demos are, with its arguments.
AS_TIMM = (
    "vit_tiny_patch16_224",
    {
        "img_size": SIZE,
        "patch_size": PATCH,
        "in_chans": 1,
        "num_classes": CLASSES,
        "embed_dim": WIDTH,
        "depth": DEPTH,
        "num_heads": HEADS,
        "mlp_ratio": HIDDEN / WIDTH,
    },
)


class Attention(nn.Module):
    """Multi-head self-attention with one fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        """Create the layers, with random weights."""
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        # Named as in timm (mlp.fc1.weight), so that timm can load the weights, too.
        parts = OrderedDict[str, nn.Module](
            fc1=nn.Linear(WIDTH, HIDDEN), act=nn.GELU(), fc2=nn.Linear(HIDDEN, WIDTH)
        )
        self.mlp = nn.Sequential(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """Cut an image into patches and embed each."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(1, WIDTH, PATCH, PATCH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 1, height, width) to (batch, patches, width)."""
        return self.proj(x).flatten(2).transpose(1, 2)


class DigitsViT(nn.Module):
    """A vision transformer for 8x8 digits: 17 tokens, 58,570 parameters, class token read out.

    Square images of other sizes work, too, with interpolated position embeddings.
    """

    def __init__(self) -> None:
        """Create the layers, with random weights and the names of timm's VisionTransformer."""
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(EncoderBlock() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8), normalised, to logits (batch, 10)."""
        patches = self.patch_embed(x)
        class_token = self.cls_token.expand(len(x), -1, -1)
        tokens = torch.cat([class_token, patches], 1) + self._make_positions(patches.shape[1])
        states = self.norm(self.blocks(tokens))
        return self.head(states[:, 0])

    def _make_positions(self, patches: int) -> Tensor:
        """Return the position embeddings of an image with this number of patches.

        The shape is (1, 1 + patches, width), with the class token first. For another size of image
        than in training, the embeddings are interpolated on the grid of patches.
        """
        positions = self.pos_embed
        if patches + 1 == positions.shape[1]:
            return positions
        old_side = SIZE // PATCH
        side = math.isqrt(patches)
        # The embeddings of the patches as an image, (1, width, side, side).
        grid = positions[:, 1:].mT.reshape(1, WIDTH, old_side, old_side)
        grid = F.interpolate(grid, (side, side), mode="bicubic", antialias=True)
        return torch.cat([positions[:, :1], grid.flatten(2).mT], 1)


def load_demo(name: str = "standard") -> ModelSpec:
    """Load a shipped checkpoint.

    Raises:
        InputError: no demo has this name.
    """
    if name not in DEMOS:
        raise InputError(f"there is no demo {name!r}", suggestion(name, DEMOS))
    module = DigitsViT()
    with as_file(files("lipaudit.models") / "assets" / f"demo_{name}.safetensors") as path:
        weights, _notes = read_weights(path)
        module.load_state_dict(weights)
    return ModelSpec(
        module,
        (1, SIZE, SIZE),
        mean=(MEAN,),
        std=(STD,),
        labels=tuple("0123456789"),
        entry=module.patch_embed,
        architecture=f"DigitsViT ({DEMOS[name]})",
    )
