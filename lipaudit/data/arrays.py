"""Samples in array files: .npz, .safetensors and IDX."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from lipaudit.data import idx
from lipaudit.data.batch import Origin
from lipaudit.data.drawing import Drawn, picks, require_labels
from lipaudit.data.intake import DataOptions, Intake
from lipaudit.errors import InputError

SUFFIXES = (".npz", ".safetensors")
INPUTS = ("x", "images", "inputs")
LABELS = ("y", "labels")
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
    x, y = _named(arrays, INPUTS), _named(arrays, LABELS)
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
    return _named(_load(path), INPUTS)


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
    samples = _checked(x[order], net, origin)
    labels = None if y is None else [int(v) for v in y[order]]
    if labels is not None:
        require_labels(labels, net, origin=origin)
    named = names if len(names) == len(x) else [""] * len(x)
    places = [f"index {i}" + f", {named[i]}" * bool(named[i]) for i in order]
    return Drawn(list(samples), labels, origins=[Origin(place) for place in places])


def _load(path: Path) -> dict[str, Tensor]:
    if path.suffix not in SUFFIXES:
        return idx.read_idx(path)
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with np.load(path, allow_pickle=False) as archive:
            return {k: torch.from_numpy(v) for k, v in _numeric(archive).items()}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        raise InputError(
            f"{path} is not a readable {path.suffix} file ({error})",
            "Save plain numbers with numpy.savez(FILE, x=..., y=...).",
        ) from error


def _names(path: Path) -> list[str]:
    """Return which samples adversarial examples were made of, where a file says so."""
    if path.suffix != ".safetensors":
        return []
    with safe_open(path, "pt") as file:
        given = (file.metadata() or {}).get(MADE_OF)
    try:
        return [f"made of {name}" for name in json.loads(given or "[]")]
    except (ValueError, TypeError):
        return []


def _numeric(archive: Any) -> dict[str, Any]:
    return {k: v for k in archive.files if (v := archive[k]).dtype.kind in "uif"}


def _named(arrays: dict[str, Tensor], names: tuple[str, ...]) -> Tensor | None:
    return next((arrays[n] for n in names if n in arrays), None)


def _checked(x: Tensor, net: Intake, origin: str) -> Tensor:
    if net.kind == "text":
        return _token_ids(x, net, origin)
    x = _laid_out(x, net, origin)
    if x.dtype == torch.uint8:
        low, high = net.box or (0.0, 1.0)
        x = low + (high - low) * (x.float() / 255)
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
