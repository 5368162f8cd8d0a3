"""Samples in array files: .npz, .safetensors and IDX."""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from lipaudit.data.batch import SampleOrigin
from lipaudit.data.images import to_box
from lipaudit.data.labels import require_labels
from lipaudit.data.samples import (
    DataOptions,
    Samples,
    draw_indices,
    make_samples,
    refuse_damage,
)
from lipaudit.errors import InputError

if TYPE_CHECKING:
    from lipaudit.models.net import Net

SUFFIXES = (".npz", ".safetensors")
INPUTS = ("x", "images", "inputs")
LABELS = ("y", "labels")
NAME = re.compile(r"[-.]idx\d-ubyte(?:\.gz)?$")
"""Names of files in the IDX format, compressed or not."""
KINDS = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""Number types, by the third byte of an IDX file."""
CHANNELS = (1, 3, 4)


def holds_arrays(path: Path) -> bool:
    """Say whether a file holds arrays, by its name."""
    return path.suffix in SUFFIXES or bool(NAME.search(path.name))


def read_arrays(path: Path, net: Net, options: DataOptions) -> Samples:
    """Read x (or images, inputs) and y (or labels), if present.

    Images are (samples, channels, height, width) or channels last: uint8 in 0..255, mapped to the
    box of the model, or floats in that box. Float sequences are (samples, tokens, width), token
    ids are integers (samples, tokens).

    Raises:
        InputError: the file is damaged, the shape does not fit the model, or values are out of
            range.
    """
    arrays = load_arrays(path)
    x, y = find_array(arrays, INPUTS), find_array(arrays, LABELS)
    if x is None:
        raise InputError(
            f"{path} has no samples (arrays: {', '.join(arrays) or 'none'})",
            f"Call the inputs {' or '.join(INPUTS)} and the labels {' or '.join(LABELS)}.",
        )
    return draw_arrays(x, y, net, options, origin=str(path))


def draw_arrays(
    x: Tensor,
    y: Tensor | None,
    net: Net,
    options: DataOptions,
    *,
    origin: str,
) -> Samples:
    """Draw samples from tensors, in the layouts of `read_arrays`.

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
    if x.ndim == 0 or len(x) == 0:
        raise InputError(
            f"{origin} has no samples: its inputs have shape {tuple(x.shape)}",
            "The first axis of an array counts its samples.",
        )
    if x.is_complex():
        raise InputError(f"{origin} holds {x.dtype}", "Save real numbers.")
    if y is not None and (y.shape != (len(x),) or y.is_floating_point()):
        raise InputError(
            f"{origin} has {len(x)} inputs and {y.dtype} labels of shape {tuple(y.shape)}",
            "Give one integer label per input.",
        )
    order = draw_indices(len(x), options.samples, options.seed)
    read = _check_token_ids if net.kind == "text" else _read_values
    samples = read(x[order], net, origin)
    labels = None if y is None else [int(v) for v in y[order]]
    if labels is not None:
        require_labels({str(v): v for v in labels}, net, f"{origin}: ")
    origins = [SampleOrigin(f"index {i}") for i in order]
    return make_samples(list(samples), net, labels, origins=origins)


def load_arrays(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a file by name.

    Raises:
        InputError: the file is damaged.
    """
    if path.suffix not in SUFFIXES:
        return read_idx(path)
    advice = "Save plain numbers with numpy.savez(FILE, x=..., y=...)."
    with refuse_damage(path, f"{path.suffix} file", advice):
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        # Texts beside the numbers (such as a credit) are skipped.
        return {name: torch.from_numpy(a) for name, a in arrays.items() if a.dtype.kind in "uif"}


def find_array(arrays: dict[str, Tensor], names: tuple[str, ...]) -> Tensor | None:
    """Return the array that has one of the usual names."""
    return next((arrays[n] for n in names if n in arrays), None)


def _read_values(x: Tensor, net: Net, origin: str) -> Tensor:
    """Return images, channels first, or sequences, in the box of the model."""
    wanted, shape = tuple(net.input_shape), tuple(x.shape[1:])
    if net.kind == "image" and shape == (*wanted[1:], wanted[0]) != wanted:
        x = x.movedim(-1, 1)
    elif net.kind == "image" and wanted[0] == 1 and shape == wanted[1:]:
        x = x[:, None]  # grey images may lack the channel axis
    elif shape != wanted:
        raise InputError(
            f"{origin} holds samples of shape {shape}; the model takes {wanted}",
            "Resize them first (a folder of images is resized for you), or build the model for "
            "that size with --model-kwargs img_size=... or --input-size.",
        )
    x = to_box(x.float() / 255, net.box) if x.dtype == torch.uint8 else x.float()
    if not bool(torch.isfinite(x).all()):
        raise InputError(f"{origin} holds NaN or infinite values", "Remove those samples.")
    if net.box is not None and (x.min() < net.box[0] or x.max() > net.box[1]):
        low, high = net.box
        raise InputError(
            f"{origin} holds values from {x.min():.4g} to {x.max():.4g}; the model takes "
            f"[{low:g}, {high:g}]",
            "Divide by 255, or save uint8. Do not normalise the pixels: lipaudit does that.",
        )
    return x


def _check_token_ids(x: Tensor, net: Net, origin: str) -> Tensor:
    if x.is_floating_point() or x.ndim != 2 or x.shape[1] > net.input_shape[0]:
        raise InputError(
            f"{origin} holds {x.dtype} of shape {tuple(x.shape)}; the model takes token ids "
            f"(samples, at most {net.input_shape[0]})",
            "Give the text itself as .txt, .csv or .jsonl, or integer token ids.",
        )
    if x.min() < 0 or (net.vocabulary is not None and x.max() >= net.vocabulary):
        raise InputError(
            f"{origin} holds token ids from {x.min()} to {x.max()}; the vocabulary has "
            f"{net.vocabulary}",
            "Use the tokenizer of this model.",
        )
    return x.long()


def read_idx(path: Path) -> dict[str, Tensor]:
    """Read a file of inputs as x and the file of labels beside it, if any, as y.

    The labels of `t10k-images-idx3-ubyte.gz` are in `t10k-labels-idx1-ubyte.gz`.

    Raises:
        InputError: a file is damaged, or the named file holds labels.
    """
    arrays = {"x": _read_idx_array(path)}
    if arrays["x"].ndim == 1:
        raise InputError(
            f"{path} holds one number per sample (labels), not inputs",
            "Give the file of images; the labels beside it are read too.",
        )
    labels = path.with_name(re.sub(r"idx\d", "idx1", path.name.replace("images", "labels")))
    if labels != path and labels.is_file():
        arrays["y"] = _read_idx_array(labels)
    return arrays


def _read_idx_array(path: Path) -> Tensor:
    """Read one array: 0, 0, type, number of axes; then the sizes, big-endian; then the numbers."""
    with refuse_damage(path, "IDX file", "Copy or download it again."):
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        kind, axes = np.dtype(KINDS[data[2]]), data[3]
        shape = np.frombuffer(data, ">i4", axes, 4)
        array = np.frombuffer(data, kind, offset=4 + 4 * axes).reshape(shape)
        return torch.from_numpy(array.astype(kind.newbyteorder("=")))


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
