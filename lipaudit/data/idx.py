"""Arrays in the IDX format, in which MNIST and its kin are handed out."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lipaudit.data.damage import DEFLATED, claimed_size, refuse_damage
from lipaudit.errors import InputError

NAME = re.compile(r"[-.]idx\d-ubyte(?:\.gz)?$")
"""How a file in this format is called, compressed or not."""
KINDS = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""Types of numbers by the third byte of a file."""


def read_idx(path: Path) -> dict[str, Tensor]:
    """Read a file of inputs as x and, where one lies beside it, the file of labels as y.

    The labels of `t10k-images-idx3-ubyte.gz` are those of `t10k-labels-idx1-ubyte.gz`.

    Raises:
        InputError: a file is damaged, or one of labels was named.
    """
    x = _array(path)
    if x.ndim == 1:
        raise InputError(
            f"{path} holds a number for each sample, not inputs",
            "Name the file of images; the labels beside it are read with it.",
        )
    name = re.sub(r"idx\d", "idx1", path.name.replace("images", "labels"))
    labels = path.with_name(name)
    return {"x": x} | ({"y": _array(labels)} if name != path.name and labels.is_file() else {})


def _array(path: Path) -> Tensor:
    """Read one array: 0, 0, type, number of axes; the size of each, big-endian; the numbers."""
    with refuse_damage(path, "IDX file", "Copy or download it again."), path.open("rb") as file:
        packed = file.peek(2)[:2] == b"\x1f\x8b"
        data = gzip.GzipFile(fileobj=file) if packed else file
        _, _, code, axes = data.read(4)
        kind, shape = np.dtype(KINDS[code]), np.frombuffer(data.read(4 * axes), ">i4", axes)
        most = path.stat().st_size * (DEFLATED if packed else 1)
        values = data.read(claimed_size(shape.tolist(), kind.itemsize, most) + 1)
        array = np.frombuffer(values, kind).reshape(shape)
        return torch.from_numpy(array.astype(kind.newbyteorder("=")))
