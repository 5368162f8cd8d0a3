"""What a sample of a data set is, where the model does not say what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from lipaudit.data.arrays import holds_arrays, inputs_of
from lipaudit.data.images import SUFFIXES, refuse_images
from lipaudit.errors import InputError

CHANNELS = (1, 3, 4)
GREY = frozenset({"1", "L", "I", "F", "I;16"})


@dataclass(frozen=True)
class Form:
    """A kind of samples and the shape of one, as a model takes it."""

    kind: Literal["image", "tokens", "text"]
    shape: tuple[int, ...]


def form_of_data(spec: str | None) -> Form | None:
    """Return what the samples are that a --data argument names, None where it does not say.

    Arrays have a shape; so has a folder of images that are all of one size.

    Raises:
        InputError: the file is damaged.
    """
    if spec in ("demo", "demo:train"):
        return Form("image", (1, 8, 8))
    path = Path(spec or "")
    if spec and path.is_dir():
        return _form_of_folder(path)
    if holds_arrays(path) and path.is_file():
        x = inputs_of(path)
        return None if x is None else form_of(x)
    return None


def form_of(x: Tensor) -> Form | None:
    """Return what the samples of an array are, None where its shape does not say.

    >>> form_of(torch.zeros(5, 32, 32, 3))
    Form(kind='image', shape=(3, 32, 32))
    >>> form_of(torch.zeros(5, 28, 28, dtype=torch.uint8))
    Form(kind='image', shape=(1, 28, 28))
    >>> form_of(torch.zeros(5, 7, 16))
    Form(kind='tokens', shape=(7, 16))
    >>> form_of(torch.zeros(5, 12, dtype=torch.long))
    Form(kind='text', shape=(12,))
    """
    shape = tuple(x.shape[1:])
    if len(shape) == 3:
        last = shape[2] in CHANNELS and shape[0] not in CHANNELS
        return Form("image", (shape[2], *shape[:2]) if last else shape)
    if len(shape) == 2:
        return Form("image", (1, *shape)) if x.dtype == torch.uint8 else Form("tokens", shape)
    if len(shape) == 1:
        return Form("tokens" if x.is_floating_point() else "text", shape)
    return None


def _form_of_folder(path: Path) -> Form | None:
    forms = set()
    for file in (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES):
        try:
            with refuse_images(file), Image.open(file) as image:
                forms.add((image.size, image.mode in GREY))
        except InputError:
            continue
        if len(forms) > 1:
            return None
    if not forms:
        return None
    ((width, height), grey) = forms.pop()
    return Form("image", (1 if grey else 3, height, width))
