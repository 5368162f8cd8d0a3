"""Images and arrays: pictures of a folder and tensors of a file, as a model takes them."""

from __future__ import annotations

import base64
import gzip
import io
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from lipaudit.data import batch
from lipaudit.data.batch import DataOptions, SampleOrigin, Samples, draw_indices, make_batch
from lipaudit.errors import InputError, explain_failure

if TYPE_CHECKING:
    from lipaudit.models.net import Net

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
# Longer side of a thumbnail, in pixels.
SIDE = 64
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
    text = f"the model takes {channels} channels, and image files have 1, 3 or 4"
    advice = "Give the data as an .npz file with x of shape (samples, channels, height, width)."
    if channels not in COLOUR_MODES:
        raise InputError(text, advice)
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
            made, wanted = tuple(value.shape), tuple(shape)
            text = f"the model's own resizing makes images of shape {made}, not {wanted}"
            advice = "Give --input-size, to which images are scaled and cropped in the middle."
            if made != wanted:
                raise InputError(text, advice)
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
    with explain_images(name):
        if isinstance(source, Image.Image):
            return net.prepare(source)
        with Image.open(source) as image:
            image.load()
            return net.prepare(image)


@contextmanager
def explain_images(name: object) -> Iterator[None]:
    """Turn Pillow's exceptions and warnings, also on too many pixels, into one error.

    Raises:
        InputError: the block cannot read a picture.
    """
    advice = "Remove it, shrink it or copy it again, or leave such images out with --skip-bad."
    failure = explain_failure(f"{name} is not a readable image", advice, Exception)
    with failure, warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
        yield


def find_common_shape(path: Path) -> tuple[int, int, int] | None:
    """Return (channels, height, width) of a folder's pictures, None if they differ."""
    shapes = set()
    for file in (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES):
        with suppress(InputError), explain_images(file), Image.open(file) as image:
            shapes.add((1 if image.mode in GREY else 3, image.height, image.width))
        if len(shapes) > 1:
            return None
    return shapes.pop() if shapes else None


ARRAY_FILES = (".npz", ".safetensors")
INPUTS = ("x", "images", "inputs")
LABELS = ("y", "labels")
# Names of files in the IDX format, compressed or not.
NAME = re.compile(r"[-.]idx\d-ubyte(?:\.gz)?$")
# Number types, by the third byte of an IDX file.
KINDS = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
CHANNELS = (1, 3, 4)


def holds_arrays(path: Path) -> bool:
    """Say whether a file holds arrays, by its name."""
    return path.suffix in ARRAY_FILES or bool(NAME.search(path.name))


def load_arrays(path: Path) -> tuple[Tensor, Tensor | None]:
    """Return x (or images, inputs) and y (or labels), if present, of a file.

    The labels of the IDX file `t10k-images-idx3-ubyte.gz` are in `t10k-labels-idx1-ubyte.gz`.

    Raises:
        InputError: the file is damaged, or has no samples.
    """
    arrays, texts = dict[str, Tensor](), dict[str, str]()
    advice = "Copy it again, or save plain numbers: numpy.savez(FILE, x=..., y=...)."
    with explain_failure(f"{path} is not a readable array file", advice, Exception):
        if path.suffix == ".safetensors":
            arrays = load_file(path)
        elif path.suffix == ".npz":
            # numpy takes a file that is no archive for a pickle.
            with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
                for name, array in file.items():
                    if array.dtype.kind in "uifb":
                        arrays[name] = torch.from_numpy(array)
                    else:  # beside the numbers: a credit, or names of classes
                        texts[name] = f"{name} of {path} holds {array.dtype}"
        else:
            of_y = path.with_name(re.sub(r"idx\d", "idx1", path.name.replace("images", "labels")))
            beside = {"x": path, "y": of_y} if of_y != path else {"labels": path}
            arrays = {key: _read_idx(file) for key, file in beside.items() if file.is_file()}
    x, y = (next((arrays[n] for n in names if n in arrays), None) for names in (INPUTS, LABELS))
    for names, found in ((INPUTS, x), (LABELS, y)):
        said = next((texts[name] for name in names if name in texts), "")
        if found is None and said:
            raise InputError(said, advice)
    if x is None:
        raise InputError(
            f"{path} has no samples (arrays: {', '.join(arrays) or 'none'})",
            f"Call the inputs {' or '.join(INPUTS)} and the labels {' or '.join(LABELS)}, or give "
            "the file of images: the labels beside it are read, too.",
        )
    return x, y


def _read_idx(path: Path) -> Tensor:
    """Read one array: 0, 0, type, number of axes; then the sizes, big-endian; then the numbers."""
    advice = "Copy or download it again."
    with explain_failure(f"{path} is not a readable IDX file", advice, Exception):
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        kind, axes = np.dtype(KINDS[data[2]]), data[3]
        shape = np.frombuffer(data, ">i4", axes, 4)
        array = np.frombuffer(data, kind, offset=4 + 4 * axes).reshape(shape)
        return torch.from_numpy(array.astype(kind.newbyteorder("=")))


def draw_arrays(
    x: Tensor, y: Tensor | None, net: Net, options: DataOptions, *, origin: str
) -> Samples:
    """Draw samples from tensors.

    Images are (samples, channels, height, width) or channels last: uint8 in 0..255, mapped to the
    box of the model, or floats in that box. Float sequences are (samples, tokens, width), token
    ids are integers (samples, tokens).

    Args:
        x: the inputs.
        y: the labels, or None.
        net: the model.
        options: number of samples and seed.
        origin: name of the data in messages.

    Raises:
        InputError: the shape does not fit the model, or values are out of range; the message names
            the origin.
    """
    text = f"{origin} has no samples: its inputs are {x.dtype} of shape {tuple(x.shape)}"
    if x.ndim == 0 or len(x) == 0 or x.is_complex():
        raise InputError(text, "Give real numbers. The first axis of an array counts its samples.")
    order = draw_indices(len(x), options.samples, options.seed)
    places = [f"index {i}" for i in order]
    labels: list[int] | None = None
    if y is not None:
        text = f"{origin} has {len(x)} inputs and {y.dtype} labels of shape {tuple(y.shape)}"
        wrong = y.shape != (len(x),) or y.is_floating_point()
        if wrong:
            raise InputError(text, "Give one integer label per input.")
        labels = [int(v) for v in y[order]]
    read = _check_token_ids if net.kind == "text" else _read_values
    samples = list(read(x[order], net, origin))
    if labels is not None and net.classes:
        batch.require_classes(labels, labels, [f"{origin}: {place}" for place in places], net)
    return Samples(make_batch(samples, net, labels), origins=tuple(map(SampleOrigin, places)))


def _read_values(x: Tensor, net: Net, origin: str) -> Tensor:
    """Return images, channels first, or sequences, in the box of the model."""
    wanted, shape = tuple(net.input_shape), tuple(x.shape[1:])
    if net.kind == "image" and shape == (*wanted[1:], wanted[0]) != wanted:
        x = x.movedim(-1, 1)
    elif net.kind == "image" and wanted[0] == 1 and shape == wanted[1:]:
        x = x[:, None]  # grey images may lack the channel axis
    if tuple(x.shape[1:]) != wanted:
        raise InputError(
            f"{origin} holds samples of shape {shape}; the model takes {wanted}",
            "Resize them first (a folder of images is resized for you), or build the model for "
            "that size with --model-kwargs img_size=... or --input-size.",
        )
    x = to_box(x.float() / 255, net.box) if x.dtype == torch.uint8 else x.float()
    unlimited = not bool(x.isfinite().all())
    if unlimited:
        raise InputError(f"{origin} holds NaN or infinite values", "Remove those samples.")
    low, high = net.box or (-math.inf, math.inf)
    outside = x.min() < low or x.max() > high
    if outside:
        text = f"{origin} holds values from {x.min():.4g} to {x.max():.4g}"
        raise InputError(
            f"{text}; the model takes [{low:g}, {high:g}]",
            "Divide by 255, or save uint8. Do not normalise the pixels: lipaudit does that.",
        )
    return x


def _check_token_ids(x: Tensor, net: Net, origin: str) -> Tensor:
    most, text = net.input_shape[0], f"{origin} holds {x.dtype} of shape {tuple(x.shape)}"
    text += f"; the model takes token ids (samples, at most {most})"
    wrong = x.is_floating_point() or x.ndim != 2 or not 0 < x.shape[1] <= most
    if wrong:
        raise InputError(
            text, "Give the text itself as .txt, .csv or .jsonl, or integer token ids."
        )
    text = f"{origin} holds token ids from {x.min()} to {x.max()}"
    unknown = x.min() < 0 or (net.vocabulary is not None and x.max() >= net.vocabulary)
    text += f"; the vocabulary has {net.vocabulary}"
    if unknown:
        raise InputError(text, "Use the tokenizer of this model.")
    return x.long()


@dataclass(frozen=True)
class SampleForm:
    """A kind of samples, and the shape of one sample.

    Attributes:
        kind: image (values in [0, 1]), tokens (sequences of floats) or text (token ids).
        shape: shape of one sample.
        fits: whether the values of the data suit the kind.
    """

    kind: Literal["image", "tokens", "text"]
    shape: tuple[int, ...]
    fits: bool = field(default=True, repr=False, compare=False)

    def __str__(self) -> str:
        size = " x ".join(map(str, self.shape))
        if self.kind == "image":
            return f"an image of {size} (channels, height, width) in [0, 1]"
        return f"a sequence of {size} (tokens, width) without limits"


def list_forms(x: Tensor) -> tuple[SampleForm, ...]:
    """Return the possible readings of an array's shape; several if it is ambiguous.

    >>> list_forms(torch.zeros(5, 3, 32, 32))
    (SampleForm(kind='image', shape=(3, 32, 32)),)
    >>> list_forms(torch.zeros(5, 8, 5, 4))
    (SampleForm(kind='image', shape=(8, 5, 4)), SampleForm(kind='image', shape=(4, 8, 5)))
    >>> list_forms(torch.zeros(5, 28, 28, dtype=torch.uint8))
    (SampleForm(kind='image', shape=(1, 28, 28)),)
    >>> list_forms(torch.zeros(5, 7, 16))
    (SampleForm(kind='tokens', shape=(7, 16)), SampleForm(kind='image', shape=(1, 7, 16)))
    >>> list_forms(torch.zeros(5, 12, dtype=torch.long))
    (SampleForm(kind='text', shape=(12,)),)
    """
    shape = tuple(x.shape[1:])
    if len(shape) == 3:
        # (8, 5, 4) is 8 channels first or 4 channels last; (3, 32, 32) can only be channels first.
        last = shape[2] in CHANNELS and shape[0] not in CHANNELS
        shapes = [shape, (shape[2], *shape[:2])] if last else [shape]
        return tuple(SampleForm("image", each) for each in shapes)
    if len(shape) == 2:
        if x.dtype == torch.uint8:
            return (SampleForm("image", (1, *shape)),)
        # Values outside [0, 1] are not pixels: then the samples are sequences.
        inside = not x.is_complex() and bool(((x >= 0) & (x <= 1)).all())
        return SampleForm("tokens", shape), SampleForm("image", (1, *shape), fits=inside)
    if len(shape) == 1:
        return (SampleForm("tokens" if x.is_floating_point() else "text", shape),)
    return ()
