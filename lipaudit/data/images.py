"""Arrays of a file or in memory as a model takes them, and thumbnails of images."""

from __future__ import annotations

import base64
import gzip
import io
import math
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from lipaudit.data import batch
from lipaudit.data.batch import DataOptions, SampleOrigin, Samples, Taker, draw_indices, make_batch
from lipaudit.errors import InputError, explain_failure

# Longer side of a thumbnail, in pixels.
SIDE = 64


def thumbnail(pixels: Tensor, box: tuple[float, float] | None = None) -> str:
    """Return pixels (channels, height, width) of a box, or of [0, 1], as a PNG file in base64.

    The longer side is at most `SIDE`; with more than three channels the first one is shown.
    """
    low, high = box or (0.0, 1.0)
    shown = pixels if len(pixels) in (1, 3) else pixels[:1]
    shown = shown.sub(low).div(high - low)
    shown = shown.detach().cpu().float().clamp(0, 1)
    # Bytes, as in a picture file.
    array = (shown * 255).round().to(torch.uint8).numpy()
    planes = array[0]
    if len(array) > 1:
        planes = array.transpose(1, 2, 0)
    image = Image.fromarray(planes)
    image.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def to_box(pixels: Tensor, box: tuple[float, float] | None) -> Tensor:
    """Map pixels in [0, 1] to the box of a model."""
    low, high = box or (0.0, 1.0)
    return low + (high - low) * pixels


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
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        kind = np.dtype(KINDS[data[2]])
        axes = data[3]
        shape = np.frombuffer(data, ">i4", count=axes, offset=4)
        values = np.frombuffer(data, kind, offset=4 + 4 * axes)
        native = values.astype(kind.newbyteorder("="))
        return torch.from_numpy(native.reshape(shape))


def draw_arrays(
    x: Tensor, y: Tensor | None, net: Taker, options: DataOptions, *, origin: str
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
    if x.ndim == 0 or len(x) == 0 or x.is_complex():
        raise InputError(
            f"{origin} has no samples: its inputs are {x.dtype} of shape {tuple(x.shape)}",
            "Give real numbers. The first axis of an array counts its samples.",
        )
    if y is not None and (y.shape != (len(x),) or y.is_floating_point()):
        raise InputError(
            f"{origin} has {len(x)} inputs and {y.dtype} labels of shape {tuple(y.shape)}",
            "Give one integer label per input.",
        )
    order = draw_indices(len(x), options.samples, options.seed)
    chosen = x[order]
    read = _check_token_ids if net.kind == "text" else _read_values
    samples = list(read(chosen, net, origin))
    places = [f"index {i}" for i in order]
    labels = None
    if y is not None:
        labels = [int(label) for label in y[order]]
        if net.classes:
            full = [f"{origin}: {place}" for place in places]
            batch.require_classes(labels, labels, full, net)
    return Samples(
        make_batch(samples, net, labels),
        origins=tuple(map(SampleOrigin, places)),
        steps=tuple(_list_steps(chosen, net)),
    )


def _list_steps(x: Tensor, net: Taker) -> Iterator[str]:
    """Yield what an array is, and what is done to its values."""
    kind = str(x.dtype).removeprefix("torch.")
    yield f"{kind} array of shape {tuple(x.shape[1:])}"
    if net.kind == "image":
        values = x.float()
        yield f"values of all samples: {values.min():.4g} to {values.max():.4g}"
        yield "divided by 255" if x.dtype == torch.uint8 else "values not changed"


def _read_values(x: Tensor, net: Taker, origin: str) -> Tensor:
    """Return images, channels first, or sequences, in the box of the model."""
    wanted = tuple(net.input_shape)
    shape = tuple(x.shape[1:])
    if net.kind == "image":
        channels, *size = wanted
        if shape != wanted and shape == (*size, channels):
            x = x.movedim(-1, 1)
        elif channels == 1 and shape == tuple(size):
            x = x[:, None]  # grey images may lack the channel axis
    if tuple(x.shape[1:]) != wanted:
        raise InputError(
            f"{origin} holds samples of shape {shape}; the model takes {wanted}",
            "Resize them first (a folder of images is resized for you), or build the model for "
            "that size with --model-kwargs img_size=... or --input-size.",
        )
    if x.dtype == torch.uint8:
        x = to_box(x.float() / 255, net.box)
    x = x.float()
    if not bool(x.isfinite().all()):
        raise InputError(f"{origin} holds NaN or infinite values", "Remove those samples.")
    low, high = net.box or (-math.inf, math.inf)
    least, most = x.min(), x.max()
    if least < low or most > high:
        raise InputError(
            f"{origin} holds values from {least:.4g} to {most:.4g}; the model takes "
            f"[{low:g}, {high:g}]",
            "Divide by 255, or save uint8. Do not normalise the pixels: lipaudit does that.",
        )
    return x


def _check_token_ids(x: Tensor, net: Taker, origin: str) -> Tensor:
    longest = net.input_shape[0]
    if x.is_floating_point() or x.ndim != 2 or not 0 < x.shape[1] <= longest:
        raise InputError(
            f"{origin} holds {x.dtype} of shape {tuple(x.shape)}; the model takes token ids "
            f"(samples, at most {longest})",
            "Give the text itself as .txt, .csv or .jsonl, or integer token ids.",
        )
    least, most = x.min(), x.max()
    if least < 0 or (net.vocabulary is not None and most >= net.vocabulary):
        raise InputError(
            f"{origin} holds token ids from {least} to {most}; the vocabulary has "
            f"{net.vocabulary}",
            "Use the tokenizer of this model.",
        )
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
        first, *_, last = shape
        as_given = SampleForm("image", shape)
        # (8, 5, 4) is 8 channels first or 4 channels last; (3, 32, 32) can only be channels first.
        if last in CHANNELS and first not in CHANNELS:
            return as_given, SampleForm("image", (last, *shape[:2]))
        return (as_given,)
    if len(shape) == 2:
        grey = (1, *shape)
        if x.dtype == torch.uint8:
            return (SampleForm("image", grey),)
        # Values outside [0, 1] are not pixels: then the samples are sequences.
        inside = not x.is_complex() and bool(((x >= 0) & (x <= 1)).all())
        return SampleForm("tokens", shape), SampleForm("image", grey, fits=inside)
    if len(shape) == 1 and x.is_floating_point():
        return (SampleForm("tokens", shape),)
    if len(shape) == 1:
        return (SampleForm("text", shape),)
    return ()
