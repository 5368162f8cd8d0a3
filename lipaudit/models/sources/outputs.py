"""Inputs of a model of transformers other than text, and which output is measured.

The output:

* ``...ForImageClassification`` and ``...ForSequenceClassification``: the logits.
* Causal language models: the logits of the next token, at the last real token.
* Models with an image tower and a text tower: the projected features of the tower that `--tower`
names, as `get_image_features` and `get_text_features` return them.
* Models of sound that decode to text: the encoder's features.
* All others, mostly encoders: features, the mean of the last hidden state over the real tokens
(for sentence encoders the pooling and normalisation of their own files). A note names heads in the
file that are not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lipaudit.data.images import resize
from lipaudit.data.samples import warning
from lipaudit.errors import InputError, explain_failure
from lipaudit.models.net import NO_DECISION, LoadOptions, ModelSpec
from lipaudit.models.sources.timm import list_synsets
from lipaudit.models.sources.weights import read_json

Pooling = Callable[[Any, Tensor | None], Tensor]

CLASSIFIERS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForImageClassificationWithTeacher": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForAudioClassification": "AutoModelForAudioClassification",
}
LANGUAGE_MODELS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
}
HEADS = CLASSIFIERS | LANGUAGE_MODELS
"""Supported heads by the ending of their class name, with the auto class that loads each."""
UNDECIDED = {
    "multi_label_classification": "is a multi-label model",
    "regression": "predicts numbers, not classes",
}
"""Problem types of classifiers that make no single decision, with a description."""
TOWERS = {"image": "pixel_values", "text": "input_ids"}
"""Input of each tower."""


SWITCH = re.compile(r"pooling_mode_(.*?)(_tokens?)?")


def has_head(module: Any) -> bool:
    """Say whether a model's output comes from a head; otherwise it is features."""
    return type(module).__name__.endswith(tuple(HEADS))


def is_classifier(module: Any) -> bool:
    """Say whether a model's output is class logits."""
    return type(module).__name__.endswith(tuple(CLASSIFIERS))


def describe_classes(module: Any) -> dict[str, Any]:
    """Return the fields of a `ModelSpec` about classes: their presence, names, architecture.

    The placeholders LABEL_0, LABEL_1, ... are not names. Scores whose largest entry is not a
    decision count as features, and a note says so.
    """
    name = type(module).__name__
    classifier, problem = is_classifier(module), str(getattr(module.config, "problem_type", None))
    facts: dict[str, Any] = {"architecture": name, "classifier": classifier}
    if classifier and problem in UNDECIDED:
        text = (
            f"{name} {UNDECIDED[problem]} (problem_type in config.json), so it has no "
            "accuracy and no margins. Its outputs are measured as features"
        )
        return facts | {"classifier": False, "notes": (warning(NO_DECISION, text),)}
    known = module.config.id2label or {}  # a file may hold null
    names = [str(known.get(i, f"LABEL_{i}")) for i in range(len(known))]
    if classifier and not all(name.startswith("LABEL_") for name in names):
        facts["labels"] = tuple(names)
    return facts


def read_tower(result: Any) -> Tensor:
    """Return the projected features in the result of a tower, not normalised."""
    if isinstance(result, Tensor):
        return result
    pooled: Tensor | None = getattr(result, "pooler_output", None)
    return mean_pooling(result, None) if pooled is None else pooled


def _choose_features(module: Any, tower: str | None) -> Callable[[Any], Tensor] | None:
    """Return a function from a result without a mask to features; None for models with a head."""
    if tower is not None:
        return read_tower
    # `read` finds the logits of a head itself.
    return None if has_head(module) else lambda out: mean_pooling(out, None)


def mean_pooling(result: Any, mask: Tensor | None) -> Tensor:
    """Average the last hidden state over the real tokens, or over space for feature maps.

    Raises:
        InputError: the result has no last hidden state, or its padding is unknown.
    """
    hidden = getattr(result, "last_hidden_state", None)
    if hidden is None:
        raise InputError(
            f"a {type(result).__name__} has no last hidden state to use as features",
            "Write a py: factory that returns ModelSpec(..., read=lambda result: TENSOR).",
        )
    if hidden.ndim == 4:  # a feature map: its two equal axes are spatial
        channels_last = hidden.shape[1] == hidden.shape[2] != hidden.shape[3]
        hidden = hidden.flatten(1, 2) if channels_last else hidden.flatten(2).transpose(1, 2)
    if mask is None:
        return hidden.mean(1)
    if mask.shape[1] != hidden.shape[1]:
        raise InputError(
            f"the last hidden state has {hidden.shape[1]} tokens for texts of "
            f"{mask.shape[1]}, so padding cannot be recognised",
            "Give texts of one length, as token ids in an .npz file.",
        )
    weight = mask.to(hidden.dtype)[:, :, None]
    return (hidden * weight).sum(1) / weight.sum(1)


def choose_pooling(path: Path | None) -> Pooling:
    """Return the pooling that a directory of sentence-transformers prescribes, else the mean.

    Raises:
        InputError: the pooling is neither the mean nor the first token.
    """
    if path is None or not (path / "modules.json").is_file():
        return mean_pooling
    file = path / "1_Pooling" / "config.json"
    with explain_failure(f"the pooling in {path} cannot be read", "Copy or download it again."):
        steps = {module["type"].rpartition(".")[2] for module in read_json(path / "modules.json")}
        settings = read_json(file) if file.is_file() else {"pooling_mode": "mean"}
        # Older files have a switch for each mode.
        on = [SWITCH.fullmatch(key) for key, value in settings.items() if value]
        mode = str(settings.get("pooling_mode", "+".join(match[1] for match in on if match)))
    poolings: dict[str, Pooling] = {
        "mean": mean_pooling,
        "cls": lambda result, _mask: result.last_hidden_state[:, 0],
    }
    unknown = steps - {"Transformer", "Pooling", "Normalize"}
    if unknown or mode not in poolings:
        raise InputError(
            f"{path} pools its tokens in a way that is not supported: {unknown or mode}",
            "Remove modules.json to read the mean over tokens, or write a py: factory.",
        )
    pooling = poolings[mode]
    if "Normalize" not in steps:
        return pooling
    return lambda result, mask: F.normalize(pooling(result, mask), dim=1)


SECOND = 16_000
"""Number of audio samples in one second at the usual 16 kHz."""
FRAMES = 100
"""Number of spectrogram frames in one second, for models without a fixed length."""


def describe_sounds(module: Any) -> ModelSpec:
    """Describe the input of a model of waveforms or spectrograms.

    Raises:
        InputError: the configuration does not give their shape.
    """
    config, takes = module.config, module.main_input_name

    def size(name: str) -> int:
        value = getattr(config, name, None)
        return value if isinstance(value, int) and value > 0 else 0

    bands, positions = size("num_mel_bins"), size("max_source_positions")
    width = size("feature_projection_input_dim")
    width = width or size("input_feat_per_channel") * (size("input_channels") or 1) or bands
    shape: tuple[int, ...]
    if takes == "input_values" and hasattr(config, "frequency_stride"):  # patches of a spectrogram
        shape = config.max_length, config.num_mel_bins
    elif takes == "input_values":
        shape = (SECOND,)
    elif bands and positions:  # like Whisper: bands first, two frames per position
        shape = bands, 2 * positions
    elif width:
        shape = FRAMES, width
    else:
        raise InputError(
            f"{type(module).__name__} takes {takes}, and its configuration does not give their "
            "shape",
            "Write a py: factory that returns ModelSpec(module, (frames, bands), kind='tokens').",
        )
    whole = has_head(module) or not config.is_encoder_decoder
    call = module if whole else module.get_encoder()
    return ModelSpec(
        module,
        shape,
        kind="tokens",
        call=lambda x, _mask: call(**{takes: x}),
        read=_choose_features(module, None),
        **describe_classes(module),
    )


RAW_PIXELS = warning(
    "raw-pixels",
    "no preprocessor_config.json: pixels in [0, 1] are not normalised. If the model was "
    "trained otherwise, give --mean and --std",
)


def describe_images(
    module: Any, options: LoadOptions, path: Path | None, tower: str | None
) -> ModelSpec:
    """Describe the image input of a model; its processor is read from `path`.

    Raises:
        InputError: the processor cannot be loaded, or cuts patches.
    """
    processor: Any = None
    if path is not None and (path / "preprocessor_config.json").is_file():
        from transformers import AutoImageProcessor

        with explain_failure(
            f"the image processor in {path} cannot be loaded",
            "Install the missing library, or update transformers. Or remove "
            "preprocessor_config.json and give --mean and --std.",
        ):
            processor = AutoImageProcessor.from_pretrained(
                path, trust_remote_code=False, local_files_only=True
            )
    shape = options.image_shape(_image_shape(module, processor))
    normalisation: dict[str, Any] = {}
    if processor is not None:
        # Steps of the processor on pixels in [0, 1]: 255 x factor, then mean and std.
        # Nearly always 1: the factor is 1/255.
        scale = 255 * processor.rescale_factor if processor.do_rescale else 255.0
        for name, neutral in (("mean", 0.0), ("std", 1.0)):
            values = getattr(processor, f"image_{name}") if processor.do_normalize else (neutral,)
            normalisation[name] = tuple(value / scale for value in values)

    def prepare(image: Any) -> Tensor:
        return resize(image, shape, [lambda i: _process(processor, i).clamp(0, 1)])

    call = module if tower is None else getattr(module, f"get_{tower}_features")
    facts = describe_classes(module)
    if processor is None and not (options.mean and options.std):
        facts["notes"] = (RAW_PIXELS, *facts.get("notes", ()))
    labels = facts.get("labels", ("",))
    # A model with ImageNet's 1000 classes is recognised by the first one.
    if len(labels) == 1000 and labels[0].startswith("tench"):
        facts["aliases"] = list_synsets()
    return ModelSpec(
        module,
        shape,
        prepare=None if processor is None or options.input_size else prepare,
        call=lambda x, _mask: call(pixel_values=x),
        read=_choose_features(module, tower),
        **normalisation,
        **facts,
    )


def _image_shape(module: Any, processor: Any) -> tuple[int, int, int]:
    if processor is not None and processor.do_resize:
        from PIL import Image

        shape = tuple(_process(processor, Image.new("RGB", (256, 256))).shape)
        if len(shape) != 3:
            raise InputError(
                f"the processor of {type(module).__name__} makes patches of shape {shape}, "
                "not pixels",
                "Write a py: factory that returns a ModelSpec of kind tokens.",
            )
        return shape
    parts = ("vision_config", "backbone_config")  # the configuration of the vision part
    configs = [module.config, *(getattr(module.config, part, None) for part in parts)]

    def setting(*names: str, default: Any) -> Any:
        values = (getattr(config, name, None) for config in configs for name in names)
        return next(filter(None, values), default)

    size = setting("image_size", default=224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return setting("num_channels", "in_channels", default=3), height, width


def _process(processor: Any, image: Any) -> Tensor:
    return processor(
        image, return_tensors="pt", do_rescale=True, rescale_factor=1 / 255, do_normalize=False
    )["pixel_values"][0]
