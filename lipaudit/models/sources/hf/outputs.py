"""What a model of transformers takes and gives: texts, images, sound.

What the output is:

* ``...ForImageClassification`` and ``...ForSequenceClassification``: the logits.
* Causal language models: the logits of the next token, at the last real token.
* Models with a tower for images and one for text: the features of the tower asked for, with their
  projection, as `get_image_features` and `get_text_features` give them.
* Models of sound that decode to text: the encoder's features.
* Everything else, encoders above all: features, the mean of the last hidden state over the real
  tokens (for sentence encoders the pooling and normalisation their own files prescribe). Heads
  that stand in the file but are not read are named in a note.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lipaudit.data.images import resize
from lipaudit.data.intake import warning
from lipaudit.errors import InputError
from lipaudit.models.sources.hf.heads import (
    TAKES,
    chosen_tower,
    class_names,
    decides,
    has_head,
    mean_pooling,
    tower_call,
    tower_features,
    undecided_notes,
)
from lipaudit.models.sources.hf.language import text_config, text_spec
from lipaudit.models.sources.spec import LoadOptions, ModelSpec

WAVEFORM, SPECTROGRAM = "input_values", "input_features"
SECOND = 16_000
"""Samples of one second, at the rate that every one of these models was trained at."""
FRAMES = 100
"""Frames of one second, where the length of a spectrogram is free."""


def sound_shape(module: Any) -> tuple[int, ...]:
    """Return the shape of one sample: (samples,), (frames, bands) or (bands, frames).

    Raises:
        InputError: the configuration does not say.
    """
    config, takes = module.config, module.main_input_name
    bands, positions = (_positive(config, k) for k in ("num_mel_bins", "max_source_positions"))
    if takes == WAVEFORM and hasattr(config, "frequency_stride"):  # patches of a spectrogram
        return config.max_length, config.num_mel_bins
    if takes == WAVEFORM:
        return (SECOND,)
    if bands and positions:  # as Whisper: bands first, two frames to a position
        return bands, 2 * positions
    width = _positive(config, "feature_projection_input_dim") or _positive(
        config, "input_feat_per_channel"
    ) * (_positive(config, "input_channels") or 1)
    if width or bands:
        return FRAMES, width or bands
    raise InputError(
        f"{type(module).__name__} takes {takes}, of a shape that its configuration does not say",
        "Write a py: factory that returns ModelSpec(module, (frames, bands), kind='tokens').",
    )


def _positive(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else 0


FRAMES_OF_VIDEO = ("num_frames", "frames_per_clip")
RAW_PIXELS = warning(
    "raw-pixels",
    "no preprocessor_config.json: pixels in [0, 1] go in as they are; "
    "give --mean and --std if the model was trained otherwise",
)


def image_spec(
    module: Any, options: LoadOptions, path: Path | None, tower: str | None
) -> ModelSpec:
    """Say how a model is fed images, looking for its processor in `path`.

    Raises:
        InputError: it takes videos, or patches that its processor cuts.
    """
    _refuse_videos(module)
    processor = _processor(path)
    shape = options.image_shape(_image_shape(module, processor))
    mean, std = _normalisation(processor)
    known = processor is not None or (options.mean and options.std)
    call = module if tower is None else tower_call(module, tower)
    return ModelSpec(
        module,
        shape,
        mean=mean,
        std=std,
        classifier=decides(module),
        labels=class_names(module),
        aliases=_aliases(class_names(module)),
        prepare=None if options.input_size else _preparation(processor, shape),
        call=lambda x, _mask: call(pixel_values=x),
        read=features(module, tower),
        architecture=type(module).__name__,
        notes=(() if known else (RAW_PIXELS,)) + undecided_notes(module),
    )


def features(module: Any, tower: str | None) -> Callable[[Any], Tensor] | None:
    """Return how features are read of a result without a mask; None where there is a head."""
    if tower is not None:
        return tower_features
    return None if has_head(module) else lambda out: mean_pooling(out, None)


def _refuse_videos(module: Any) -> None:
    frames = next(filter(None, (getattr(module.config, k, None) for k in FRAMES_OF_VIDEO)), None)
    if frames:
        raise InputError(
            f"{type(module).__name__} takes videos of {frames} frames, and lipaudit reads images",
            "Write a py: factory that returns a ModelSpec of kind tokens.",
        )


def _processor(path: Path | None) -> Any:
    from transformers import AutoImageProcessor

    if path is None or not (path / "preprocessor_config.json").is_file():
        return None
    return AutoImageProcessor.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _image_shape(module: Any, processor: Any) -> tuple[int, int, int]:
    if processor is not None and processor.do_resize:
        from PIL import Image

        shape = tuple(_pixels(processor, Image.new("RGB", (256, 256))).shape)
        if len(shape) != 3:
            raise InputError(
                f"the processor of {type(module).__name__} makes {len(shape)}-d patches of shape "
                f"{shape} of an image, not pixels",
                "Write a py: factory that returns a ModelSpec of kind tokens.",
            )
        return shape
    size = _image_setting(module.config, ("image_size",), 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return _image_setting(module.config, ("num_channels", "in_channels"), 3), height, width


def _image_setting(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """Look a setting up, in the configuration and in that of the part that sees."""
    parts = [
        config,
        *(getattr(config, part, None) for part in ("vision_config", "backbone_config")),
    ]
    values = (getattr(part, name, None) for part in parts for name in names)
    return next((value for value in values if value), default)


def _normalisation(processor: Any) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Express the processor's steps on pixels in [0, 1]: 255 x factor, then mean and std."""
    if processor is None:
        return None, None
    scale = 255 * processor.rescale_factor if processor.do_rescale else 255.0
    mean = processor.image_mean if processor.do_normalize else (0.0,)
    std = processor.image_std if processor.do_normalize else (1.0,)
    return tuple(m / scale for m in mean), tuple(s / scale for s in std)


def _pixels(processor: Any, image: Any) -> Tensor:
    return processor(
        image, return_tensors="pt", do_rescale=True, rescale_factor=1 / 255, do_normalize=False
    )["pixel_values"][0]


def _preparation(processor: Any, shape: tuple[int, int, int]) -> Callable[[Any], Tensor] | None:
    if processor is None:
        return None
    return lambda image: resize(image, shape, [lambda i: _pixels(processor, i).clamp(0, 1)])


def _aliases(labels: tuple[str, ...] | None) -> dict[str, int]:
    """Return the synsets of a model of the 1000 classes of ImageNet, known by the first one."""
    if labels is None or len(labels) != 1000 or not labels[0].startswith("tench"):
        return {}
    from lipaudit.models.sources.timm import synsets

    return synsets()


def hf_spec(module: Any, options: LoadOptions, *, path: Path | None = None) -> ModelSpec:
    """Say how a model of transformers is fed and what is read of its output.

    Tokenizer, image processor and pooling are looked for in `path`.
    """
    for config in (module.config, text_config(module.config)):
        _complete(config)
    text_config(module.config).use_cache = False
    tower = chosen_tower(module, options.tower)
    takes = module.main_input_name if tower is None else TAKES[tower]
    if takes == "pixel_values":
        return image_spec(module, options, path, tower)
    if takes == "input_ids":
        return text_spec(module, path, tower)
    if takes in (WAVEFORM, SPECTROGRAM):
        return _sound_spec(module)
    raise InputError(
        f"{type(module).__name__} takes {takes}: neither images, text nor sound",
        "Write a py: factory that returns a ModelSpec of kind tokens.",
    )


def _complete(config: Any) -> None:
    """Add the ids that the code of transformers asks every configuration for."""
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if not hasattr(config, name):
            setattr(config, name, None)


def _sound_spec(module: Any) -> ModelSpec:
    takes = module.main_input_name
    whole = has_head(module) or not module.config.is_encoder_decoder
    call = module if whole else module.get_encoder()
    return ModelSpec(
        module,
        sound_shape(module),
        kind="tokens",
        classifier=decides(module),
        labels=class_names(module),
        notes=undecided_notes(module),
        call=lambda x, _mask: call(**{takes: x}),
        read=features(module, None),
        architecture=type(module).__name__,
    )
