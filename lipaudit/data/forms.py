"""What a sample of a data set is, where the model does not say what it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """A kind of samples and the shape of one, as a model takes it.

    Attributes:
        kind: images have values in [0, 1], tokens are sequences of any floats, text token ids.
        shape: of one sample.
        fits: whether the values of the data are such.
    """

    kind: Literal["image", "tokens", "text"]
    shape: tuple[int, ...]
    fits: bool = field(default=True, repr=False, compare=False)

    def __str__(self) -> str:
        size = " x ".join(map(str, self.shape))
        if self.kind == "image":
            return f"an image of {size} (channels, height, width) in [0, 1]"
        return f"a sequence of {size} (tokens, width) without limits"


def forms_of_data(spec: str | None) -> tuple[Form, ...]:
    """Return what the samples can be that a --data argument names; nothing if it does not say.

    Arrays have a shape; so has a folder of images that are all of one size.

    Raises:
        InputError: the file is damaged.
    """
    if spec in ("demo", "demo:train"):
        return (Form("image", (1, 8, 8)),)
    path = Path(spec or "")
    if spec and path.is_dir():
        return _forms_of_folder(path)
    x = inputs_of(path) if holds_arrays(path) and path.is_file() else None
    return () if x is None else forms_of(x)


def forms_of(x: Tensor) -> tuple[Form, ...]:
    """Return what the samples of an array can be by their shape: more than one if it is ambiguous.

    >>> forms_of(torch.zeros(5, 3, 32, 32))
    (Form(kind='image', shape=(3, 32, 32)),)
    >>> forms_of(torch.zeros(5, 8, 5, 4))
    (Form(kind='image', shape=(8, 5, 4)), Form(kind='image', shape=(4, 8, 5)))
    >>> forms_of(torch.zeros(5, 28, 28, dtype=torch.uint8))
    (Form(kind='image', shape=(1, 28, 28)),)
    >>> forms_of(torch.zeros(5, 7, 16))
    (Form(kind='tokens', shape=(7, 16)), Form(kind='image', shape=(1, 7, 16)))
    >>> forms_of(torch.zeros(5, 12, dtype=torch.long))
    (Form(kind='text', shape=(12,)),)
    """
    shape = tuple(x.shape[1:])
    if len(shape) == 3:
        last = shape[2] in CHANNELS and shape[0] not in CHANNELS
        first = Form("image", shape)
        return (first, Form("image", (shape[2], *shape[:2]))) if last else (first,)
    if len(shape) == 2:
        if x.dtype == torch.uint8:
            return (Form("image", (1, *shape)),)
        inside = not x.is_complex() and bool(((x >= 0) & (x <= 1)).all())
        return Form("tokens", shape), Form("image", (1, *shape), fits=inside)
    if len(shape) == 1:
        return (Form("tokens" if x.is_floating_point() else "text", shape),)
    return ()


def _forms_of_folder(path: Path) -> tuple[Form, ...]:
    forms = set()
    for file in (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES):
        try:
            with refuse_images(file), Image.open(file) as image:
                forms.add((image.size, image.mode in GREY))
        except InputError:
            continue
        if len(forms) > 1:
            return ()
    if not forms:
        return ()
    ((width, height), grey) = forms.pop()
    return (Form("image", (1 if grey else 3, height, width)),)
