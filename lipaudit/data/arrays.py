"""Samples in array files: .npz, .safetensors and IDX."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lipaudit.data import idx
from lipaudit.data.batch import Origin
from lipaudit.data.damage import DEFLATED, claimed_size, refuse_damage
from lipaudit.data.drawing import Drawn, picks, require_labels
from lipaudit.data.images import to_box
from lipaudit.data.intake import DataOptions, Intake
from lipaudit.errors import InputError

SUFFIXES = (".npz", ".safetensors")
INPUTS = ("x", "images", "inputs")
LABELS = ("y", "labels")
HEADER = 1 << 16
"""Bytes that hold the header of every array of numbers."""
MADE_OF = "made_of"
"""Key of the metadata of a file of adversarial examples: the ids of the samples, as JSON."""


def holds_arrays(path: Path) -> bool:
    """Tell by its name whether a file is one of arrays."""
    return path.suffix in SUFFIXES or bool(idx.NAME.search(path.name))


def read_arrays(path: Path, net: Intake, options: DataOptions) -> Drawn:
    """Read x (or images, inputs) and, where there are any, y (or labels).

    Images are (samples, channels, height, width) or channels last, uint8 in 0..255, which is
    mapped to the box of the model, or floats in that box; float sequences (samples, tokens,
    width); token ids integers (samples, tokens).

    Raises:
        InputError: damaged, of another shape than the model takes, or values out of range.
    """
    arrays = _load(path)
    x, y = _find_array(arrays, INPUTS), _find_array(arrays, LABELS)
    if x is None or len(x) == 0:
        raise InputError(
            f"{path} has no samples (arrays: {', '.join(arrays) or 'none'})",
            f"Name the inputs {' or '.join(INPUTS)}, the labels {' or '.join(LABELS)}.",
        )
    return draw_arrays(x, y, net, options, origin=str(path), names=_names(path))


def inputs_of(path: Path) -> Tensor | None:
    """Return the inputs of a file of arrays, None where it names none.

    Raises:
        InputError: it is damaged.
    """
    return _find_array(_load(path), INPUTS)


def draw_arrays(
    x: Tensor,
    y: Tensor | None,
    net: Intake,
    options: DataOptions,
    *,
    origin: str,
    names: Sequence[str] = (),
) -> Drawn:
    """Draw samples from tensors, in the forms that `read_arrays` takes.

    Args:
        x: the inputs.
        y: the labels, or None.
        net: the model.
        options: how many, and by which seed.
        origin: what messages call them.
        names: what the file calls each of them; empty: nothing.

    Raises:
        InputError: of another shape than the model takes, or values out of range; it says of
            what origin.
    """
    if x.ndim == 0 or len(x) == 0:
        raise InputError(f"{origin} has no samples", "The first axis of an array counts them.")
    if x.is_complex():
        raise InputError(f"{origin} holds {x.dtype}", "A model takes real numbers.")
    if y is not None and (y.shape != (len(x),) or y.is_floating_point()):
        raise InputError(
            f"{origin} has {len(x)} inputs and {y.dtype} labels of shape {tuple(y.shape)}",
            "Labels are one integer per input.",
        )
    order = picks(len(x), options.samples, options.seed)
    samples = _check_shape(x[order], net, origin)
    labels = None if y is None else [int(v) for v in y[order]]
    if labels is not None:
        require_labels(labels, net, origin=origin)
    named = names if len(names) == len(x) else [""] * len(x)
    places = [f"index {i}" + f", {named[i]}" * bool(named[i]) for i in order]
    return Drawn(list(samples), labels, origins=[Origin(place) for place in places])


def _load(path: Path) -> dict[str, Tensor]:
    if path.suffix not in SUFFIXES:
        return idx.read_idx(path)
    advice = "Save plain numbers with numpy.savez(FILE, x=..., y=...)."
    with refuse_damage(path, f"{path.suffix} file", advice):
        return dict(load_file(path)) if path.suffix == ".safetensors" else _read_npz(path)


def _read_npz(path: Path) -> dict[str, Tensor]:
    with zipfile.ZipFile(path) as archive:
        entries = [each for each in archive.infolist() if each.filename.endswith(".npy")]
        arrays = {each.filename[:-4]: _read_entry(archive, each) for each in entries}
    return {name: torch.from_numpy(a) for name, a in arrays.items() if a is not None}


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray | None:
    """Read an array of numbers once its size is known to fit; None if it holds no numbers.

    Raises:
        ValueError: the array claims more than the file holds, or it holds Python objects.
    """
    with archive.open(entry) as file:
        start = io.BytesIO(file.read(HEADER))
    read_header = {1: npy.read_array_header_1_0, 2: npy.read_array_header_2_0}
    shape, _, kind = read_header[npy.read_magic(start)[0]](start)
    if kind.hasobject:
        raise ValueError(f"{entry.filename} holds Python objects")
    if kind.kind not in "uif":
        return None
    stored = min(entry.compress_size, Path(str(archive.filename)).stat().st_size)
    packed = 1 if entry.compress_type == zipfile.ZIP_STORED else DEFLATED
    claimed_size(shape, kind.itemsize, min(entry.file_size, packed * stored))
    with archive.open(entry) as file:
        return npy.read_array(file, allow_pickle=False)


def _names(path: Path) -> list[str]:
    """Return which samples adversarial examples were made of, where a file says so."""
    if path.suffix != ".safetensors":
        return []
    with safe_open(path, "pt") as file:
        given = (file.metadata() or {}).get(MADE_OF)
    try:
        return [f"made of {name}" for name in json.loads(given or "[]")]
    except (ValueError, TypeError, RecursionError):
        return []


def _find_array(arrays: dict[str, Tensor], names: tuple[str, ...]) -> Tensor | None:
    return next((arrays[n] for n in names if n in arrays), None)


def _check_shape(x: Tensor, net: Intake, origin: str) -> Tensor:
    if net.kind == "text":
        return _token_ids(x, net, origin)
    x = _laid_out(x, net, origin)
    if x.dtype == torch.uint8:
        x = to_box(x.float() / 255, net.box)
    x = x.float()
    if not bool(torch.isfinite(x).all()):
        raise InputError(f"{origin} holds NaN or infinite values", "Remove those samples.")
    if net.box is not None and (x.min() < net.box[0] or x.max() > net.box[1]):
        low, high = net.box
        raise InputError(
            f"{origin} holds values from {x.min():.4g} to {x.max():.4g}; the model takes "
            f"[{low:g}, {high:g}]",
            "Divide by 255, or save uint8; give pixels as they are, without normalisation.",
        )
    return x


def _laid_out(x: Tensor, net: Intake, origin: str) -> Tensor:
    """Bring images to channels first; a grey image may come without its channel."""
    wanted, shape = tuple(net.sample_shape), tuple(x.shape[1:])
    if shape == wanted:
        return x
    if net.kind == "image" and shape == (*wanted[1:], wanted[0]):
        return x.movedim(-1, 1)
    if net.kind == "image" and wanted[0] == 1 and shape == wanted[1:]:
        return x[:, None]
    raise InputError(
        f"{origin} holds samples of shape {shape}; the model takes {wanted}",
        "Resize them first (a folder of images is resized for you), or build the model for "
        "that size with --model-kwargs img_size=... or --input-size.",
    )


def _token_ids(x: Tensor, net: Intake, origin: str) -> Tensor:
    if x.is_floating_point() or x.ndim != 2 or x.shape[1] > net.sample_shape[0]:
        raise InputError(
            f"{origin} holds {x.dtype} of shape {tuple(x.shape)}; the model takes token ids "
            f"(samples, at most {net.sample_shape[0]})",
            "Give the text itself as .txt, .csv or .jsonl, or integer token ids.",
        )
    if x.min() < 0 or (net.vocabulary is not None and x.max() >= net.vocabulary):
        raise InputError(
            f"{origin} holds token ids from {x.min()} to {x.max()}; the vocabulary has "
            f"{net.vocabulary}",
            "Use the tokenizer of this model.",
        )
    return x.long()
