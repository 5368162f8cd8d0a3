"""Images from folders, and the conversion of pictures to the pixels of a model."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lipaudit.data.samples import refuse_damage
from lipaudit.errors import InputError

if TYPE_CHECKING:
    from lipaudit.models.net import Net

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
SIDE = 64
"""Longer side of a thumbnail, in pixels."""
GREY = frozenset({"1", "L", "I", "F", "I;16"})
COLOUR_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def resize(
    image: Image.Image, shape: Sequence[int], steps: Sequence[Callable[[Any], Any]] = ()
) -> Tensor:
    """Return the pixels of a picture in [0, 1], in the shape (channels, height, width).

    A picture of this size is not changed. Others go through `steps` (the model's resizing, which
    ends in a tensor); without steps they are scaled to cover the size and cropped in the middle.

    Raises:
        InputError: pictures cannot have that many channels.
        ValueError: the picture is so narrow that scaling would give too many pixels.
    """
    channels, height, width = shape
    if channels not in COLOUR_MODES:
        raise InputError(
            f"the model takes {channels} channels, and image files have 1, 3 or 4",
            "Give the data as an .npz file with x of shape (samples, channels, height, width).",
        )
    if image.mode.startswith("I"):  # 16-bit greys, which Pillow would clip at 255
        image = Image.fromarray((np.asarray(image) / 257).round().clip(0, 255).astype(np.uint8))
    image = image.convert(COLOUR_MODES[channels])
    if image.size != (width, height):
        # A strip one pixel wide would be scaled to cover a square: refuse it as a bomb.
        scale = max(width / image.width, height / image.height)
        if image.width * image.height * scale**2 > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise ValueError(f"{image.width}x{image.height} pixels are too narrow to be scaled")
        if steps:
            value: Any = image
            for step in steps:
                value = step(value)
            if tuple(value.shape) != tuple(shape):
                raise InputError(
                    f"the model's own resizing makes images of shape {tuple(value.shape)}, not "
                    f"{tuple(shape)}",
                    "Give --input-size. Images are then scaled to that size and cropped in the "
                    "middle.",
                )
            return value
        wide, high = max(width, round(image.width * scale)), round(image.height * scale)
        image = image.resize((wide, max(height, high)), Image.Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    array = np.asarray(image, dtype=np.float32) / 255
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def thumbnail(pixels: Tensor, box: tuple[float, float] | None = None) -> str:
    """Return pixels (channels, height, width) of a box, or of [0, 1], as a PNG file in base64.

    The longer side is at most `SIDE`; with more than three channels the first one is shown.
    """
    low, high = box or (0.0, 1.0)
    shown = (pixels if len(pixels) in (1, 3) else pixels[:1]).sub(low).div(high - low)
    # Bytes, as in a picture file.
    array = (shown.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    image = Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0))
    image.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def to_box(pixels: Tensor, box: tuple[float, float] | None) -> Tensor:
    """Map pixels in [0, 1] to the box of a model."""
    low, high = box or (0.0, 1.0)
    return low + (high - low) * pixels


def read_image(source: Path | Image.Image, name: str, net: Net) -> Tensor:
    """Read one picture, from a file or as decoded by a data set, as pixels in [0, 1].

    Raises:
        InputError: the picture is damaged; the message names it.
    """
    assert net.prepare is not None
    with refuse_images(name):
        if isinstance(source, Image.Image):
            return net.prepare(source)
        with Image.open(source) as image:
            image.load()
            return net.prepare(image)


@contextmanager
def refuse_images(name: object) -> Iterator[None]:
    """Turn Pillow's exceptions and warnings, also on too many pixels, into one error.

    Raises:
        InputError: the block cannot read a picture.
    """
    advice = "Remove it, shrink it or copy it again, or leave such images out with --skip-bad."
    with refuse_damage(name, "image", advice), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def find_common_shape(path: Path) -> tuple[int, int, int] | None:
    """Return (channels, height, width) of a folder's pictures, None if they differ."""
    shapes = set()
    for file in (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES):
        with suppress(InputError), refuse_images(file), Image.open(file) as image:
            shapes.add((1 if image.mode in GREY else 3, image.height, image.width))
        if len(shapes) > 1:
            return None
    return shapes.pop() if shapes else None


def list_images(path: Path) -> tuple[list[Path], list[str]]:
    """Return the pictures, and the class of each if they are in sub-folders."""

    def pictures(folder: Path) -> list[Path]:
        return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)

    flat = pictures(path)
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    nested = [(p, folder.name) for folder in folders for p in pictures(folder)]
    if flat and nested:
        raise InputError(
            f"{path} holds images both beside and inside sub-folders",
            "Use one sub-folder per class, or none.",
        )
    if not flat and not nested:
        raise InputError(
            f"{path} holds no images",
            f"Give a folder with {', '.join(SUFFIXES[:4])} ... files, or with one sub-folder "
            "per class.",
        )
    return (flat, []) if flat else ([p for p, _ in nested], [name for _, name in nested])
