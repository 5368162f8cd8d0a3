"""Inputs of models of transformers: images and sound; texts are in `text_models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipaudit.data.image_files import Resizing
from lipaudit.errors import InputError, UsageError, explain_failure, is_machine_error
from lipaudit.models.net import LoadOptions, ModelSpec
from lipaudit.models.sources.classifiers import make_zero_shot
from lipaudit.models.sources.text_models import describe_texts, find_text_config
from lipaudit.models.sources.timm import list_synsets
from lipaudit.models.sources.transformer_outputs import (
    choose_output,
    describe_classes,
    has_head,
    select_tower,
)
from lipaudit.tables import Note

# Input of each tower.
TOWERS = {"image": "pixel_values", "text": "input_ids"}


def describe_transformers(
    module: Any, options: LoadOptions, *, path: Path | None = None
) -> ModelSpec:
    """Describe the input of a model of transformers, and the output that is measured.

    Tokenizer, image processor and pooling are read from `path`.

    Raises:
        InputError: the model takes other inputs than images, text or sound.
        UsageError: a model with two towers needs the option `tower`, or lacks that tower.
    """
    _complete_settings(module.config)
    tower = options.tower
    name = type(module).__name__
    if options.class_names:  # --classes: a zero-shot classifier of images
        _require_image_text(module, options)
        spec = describe_images(module, options, path, "image")
        return make_zero_shot(module, spec, options.prompts, path)
    _require_tower(module, tower)
    input_name = module.main_input_name
    if tower is not None:
        input_name = TOWERS[tower]
    if input_name == "pixel_values":
        return describe_images(module, options, path, tower)
    if input_name == "input_ids":
        return describe_texts(module, path, tower)
    if input_name in ("input_values", "input_features"):
        return describe_sounds(module)
    raise InputError(
        f"{name} takes {input_name}: neither images, text nor sound",
        "Write a py: factory that returns a ModelSpec of kind tokens.",
    )


def _complete_settings(config: Any) -> None:
    """Set special ids that a configuration lacks to None, and switch the cache of tokens off.

    The code of transformers reads these ids in every model.
    """
    text_config = find_text_config(config)
    for part in (config, text_config):
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if not hasattr(part, key):
                setattr(part, key, None)
    text_config.use_cache = False  # it is for passes over texts one token at a time


def _require_image_text(module: Any, options: LoadOptions) -> None:
    """Raise UsageError if --classes cannot make a classifier of a model."""
    for part in ("get_image_features", "get_text_features", "logit_scale"):
        if not hasattr(module, part):
            raise UsageError(
                f"{type(module).__name__} is no image-text model, so --classes cannot make a "
                "classifier of it",
                "Leave --classes out.",
            )
    if options.tower:
        raise UsageError(
            "--tower measures features, and --classes a classifier", "Leave one of them out."
        )


def _require_tower(module: Any, tower: str | None) -> None:
    """Raise UsageError if a model lacks the chosen tower, or has two and none was chosen."""
    name = type(module).__name__
    towers = [kind for kind in TOWERS if hasattr(module, f"get_{kind}_features")]
    if tower is None and len(towers) > 1:
        raise UsageError(
            f"{name} has an image tower and a text tower, and none was chosen",
            "Add --tower image, --tower text, or --classes NAMES.txt for a zero-shot classifier.",
        )
    if tower is not None and tower not in towers:
        known_towers = "none"
        if towers:
            known_towers = f"only {' and '.join(towers)}"
        raise UsageError(
            f"{name} has no tower {tower!r}: it has {known_towers}", "Leave --tower out."
        )


# Number of audio samples in one second at the usual 16 kHz.
SECOND = 16_000
# Number of spectrogram frames in one second, for models without a fixed length.
FRAMES = 100


def describe_sounds(module: Any) -> ModelSpec:
    """Describe the input of a model of waveforms or spectrograms.

    Raises:
        InputError: the configuration does not give the shape of a waveform or spectrogram.
    """
    config = module.config
    input_name = module.main_input_name
    shape = _find_sound_shape(config, input_name)
    if 0 in shape:
        raise InputError(
            f"{type(module).__name__} takes {input_name}, and its configuration does not give "
            "their shape",
            "Write a py: factory that returns ModelSpec(module, (frames, bands), kind='tokens').",
        )
    call = module
    # Without a head, the output is the features of the encoder: a decoder would need a text.
    if config.is_encoder_decoder and not has_head(module):
        call = module.get_encoder()
    return ModelSpec(
        module,
        shape,
        kind="tokens",
        # The module gets no mask. The mask is returned beside the result, because `read` needs it
        # to average features over the real tokens.
        call=lambda x, mask: (call(**{input_name: x}), mask),
        read=choose_output(module, tower=None),
        **describe_classes(module),
    )


def _find_sound_shape(config: Any, input_name: str) -> tuple[int, ...]:
    """Return the shape of one sound: (samples,) of a waveform, or that of a spectrogram.

    If a model takes sounds of any length, the length is one second: `SECOND` audio samples, or
    `FRAMES` frames of a spectrogram. A size that the configuration does not give is 0.
    """

    def read_size(name: str) -> int:
        """Return a positive number from the configuration; 0 if there is none of this name."""
        value = getattr(config, name, None)
        return value if isinstance(value, int) and value > 0 else 0

    if input_name == "input_values":
        # The Audio Spectrogram Transformer (AST): frames and bands of a spectrogram.
        if hasattr(config, "frequency_stride"):
            return config.max_length, config.num_mel_bins
        return (SECOND,)  # a waveform
    bands = read_size("num_mel_bins")
    positions = read_size("max_source_positions")
    if bands and positions:  # like Whisper: bands first, two frames per position
        return bands, 2 * positions
    # A spectrogram of any length. The width of a frame has several names.
    channels = read_size("input_channels") or 1
    width = (
        read_size("feature_projection_input_dim")
        or read_size("input_feat_per_channel") * channels
        or bands
    )
    return FRAMES, width


# Setting of a processor whose model takes blue, green, red, such as that of MobileViT.
FLIPS = "do_flip_channel_order"
# A colour with three different channels, of 255.
COLOUR = (51, 102, 204)
# Largest difference of this colour after two ways to normalise it, for pixels in [0, 1].
DIFFERS = 0.02
RAW_PIXELS = Note.warn(
    "raw-pixels",
    "no preprocessor_config.json: pixels in [0, 1] are not normalised. If the model was "
    "trained otherwise, give --mean and --std",
)


def describe_images(
    module: Any, options: LoadOptions, path: Path | None, tower: str | None
) -> ModelSpec:
    """Describe the image input and the labels of a model of transformers.

    Args:
        module: the model.
        options: the user's options.
        path: the model's directory, which may hold an image processor; None: no directory.
        tower: "image" for the image tower of an image-text model; None for other models.

    Raises:
        InputError: the processor cannot be loaded, or returns patches in place of an image.
    """
    processor = _load_image_processor(path)
    shape = options.image_shape(_find_image_shape(module, processor))
    steps = {}  # what `Resizing` applies to a picture, by the names that the report shows
    # The processor resizes images to its own size, so it is not used with --input-size. After
    # bicubic resizing, pixels may lie outside of [0, 1]: clamp them.
    if processor is not None and not options.input_size:
        steps[type(processor).__name__] = lambda image: _process(processor, image).clamp(0, 1)
    run = select_tower(module, tower)
    normalisation = _read_normalisation(processor)
    # With all three options, neither size nor colours of the processor are used.
    if processor is not None and not (options.input_size and options.mean and options.std):
        _require_known_colours(processor, normalisation, only_middle=bool(options.input_size))
    facts = describe_classes(module)
    if options.class_names:
        facts |= {"classifier": True, "labels": options.class_names}
    # Without a normalisation, the model gets pixels in [0, 1]: a note says so.
    if processor is None and not (options.mean and options.std):
        facts["notes"] = (RAW_PIXELS, *facts.get("notes", ()))
    labels = facts.get("labels", ("",))
    # 1000 classes, the first of which is "tench", are ImageNet's: their WordNet ids (n01440764,
    # ...), which folders of images often have as names, then also name the classes.
    if len(labels) == 1000 and labels[0].startswith("tench"):
        facts["aliases"] = list_synsets()
    has_blue_first = getattr(processor, FLIPS, False)

    def call(x: Tensor, mask: Tensor | None) -> Any:
        """Run the model on normalised images, whose channels are red, green, blue."""
        if has_blue_first:
            x = x.flip(1)
        return run(pixel_values=x), mask

    return ModelSpec(
        module,
        shape,
        prepare=Resizing(shape, steps),
        call=call,
        read=choose_output(module, tower),
        **normalisation,
        **facts,
    )


def _load_image_processor(path: Path | None) -> Any:
    """Load the image processor of transformers from a model's directory; None if it has none.

    Raises:
        InputError: the processor cannot be loaded.
    """
    if path is None or not (path / "preprocessor_config.json").is_file():
        return None
    from transformers import AutoImageProcessor

    with explain_failure(
        f"the image processor in {path} cannot be loaded",
        "Install the missing library, or update transformers. Or remove "
        "preprocessor_config.json and give --mean and --std.",
    ):
        return AutoImageProcessor.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )


def _read_normalisation(processor: Any) -> dict[str, Any]:
    """Return the mean and std of an image processor for pixels in [0, 1]; nothing without one.

    For a pixel x in [0, 1] the processor computes (255 f x - mean) / std, where f is its
    `rescale_factor`, nearly always 1/255. Mean and std divided by 255 f give the same value for x.
    """
    if processor is None:
        return {}
    scale = 255.0
    if processor.do_rescale:
        scale = 255 * processor.rescale_factor
    mean: Any = 0.0
    std: Any = 1.0
    if processor.do_normalize:  # a number for each channel, or one number for all
        mean = processor.image_mean
        std = processor.image_std
    return {
        "mean": tuple((np.ravel(mean) / scale).tolist()),
        "std": tuple((np.ravel(std) / scale).tolist()),
    }


def _find_image_shape(module: Any, processor: Any) -> tuple[int, ...]:
    """Return (channels, height, width) of the images that a model takes.

    This is the shape of a picture after the processor's resizing. Without resizing, the shape is
    read from the configuration.
    """
    if processor is not None and processor.do_resize:
        from PIL import Image

        # The processor resizes every picture to the same size: process one to find it.
        shape = tuple(_process(processor, Image.new("RGB", (256, 256))).shape)
        if len(shape) != 3:
            raise InputError(
                f"the processor of {type(module).__name__} makes patches of shape {shape}, not "
                "pixels",
                "Write a py: factory that returns a ModelSpec of kind tokens.",
            )
        return shape
    configs = [module.config]
    for part in ("vision_config", "backbone_config"):  # the configuration of the vision part
        configs.append(getattr(module.config, part, None))

    def find_setting(*names: str, default: Any) -> Any:
        """Return the first nonzero setting of one of these names in the configurations."""
        values = (getattr(config, name, None) for config in configs for name in names)
        return next(filter(None, values), default)

    size = find_setting("image_size", default=224)
    if not isinstance(size, (tuple, list)):
        size = (size, size)
    height, width = size
    return find_setting("num_channels", "in_channels", default=3), height, width


def _process(processor: Any, image: Any) -> Tensor:
    """Return the pixels of an image after the processor's resizing, in [0, 1], not normalised.

    Channels are red, green, blue, also for a model that takes them in the opposite order.
    """
    settings: dict[str, Any] = {"do_rescale": True, "rescale_factor": 1 / 255}
    if getattr(processor, FLIPS, False):
        settings[FLIPS] = False
    pixels = processor(image, return_tensors="pt", do_normalize=False, **settings)["pixel_values"]
    return pixels[0]


def _require_known_colours(
    processor: Any, normalisation: dict[str, Any], *, only_middle: bool
) -> None:
    """Refuse a processor whose result is not (x - mean) / std of the colours x of an image.

    EfficientNet's divides by std twice, for example, and that of SAM adds a border after this
    step. An image of one colour is enough to tell. It is no square: some processors pad it to one.
    Processors of other than RGB images, and those that need more than an image, are not checked.

    Args:
        processor: the image processor.
        normalisation: its mean and std, from `_read_normalisation`.
        only_middle: compare only the pixel in the middle, because the processor's size and border
            are not used (--input-size).

    Raises:
        InputError: the processor changes the colours in another way.
    """
    from PIL import Image

    mean, std = (torch.tensor(normalisation[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
    if not {len(mean), len(std)} <= {1, len(COLOUR)}:  # such as four channels
        return
    image = Image.new("RGB", (256, 192), COLOUR)
    try:
        result = processor(image, return_tensors="pt")["pixel_values"][0]
        pixels = _process(processor, image)
    except Exception as error:  # it needs boxes, for example, or returns no `pixel_values`
        if is_machine_error(error):
            raise
        return
    if pixels.shape[:-2] != (len(COLOUR),):  # not three channels
        return
    # The pixel in the middle, (channels,): at the border there may be padding.
    row = pixels.shape[1] // 2
    column = pixels.shape[2] // 2
    middle = pixels[:, row, column]
    if getattr(processor, FLIPS, False):
        result = result.flip(0)
    if only_middle:
        result = result[:, row, column, None, None]
        pixels = middle[:, None, None]
    is_kept = torch.allclose(middle, torch.tensor(COLOUR) / 255, rtol=0, atol=DIFFERS)
    if not is_kept or not torch.allclose(result * std, pixels - mean, rtol=0, atol=DIFFERS):
        raise InputError(
            f"{type(processor).__name__} changes colours in another way than (x - mean) / std, "
            "or pads images after this step",
            "Write a py: factory that returns a ModelSpec with its own `call`, or give "
            "--input-size, --mean and --std.",
        )
