"""Read linear maps: sums over products of entries of two tensors, by any function of torch.

A model applies W by a linear layer, a product of matrices, einsum, tensordot or a 1x1 convolution.
`READERS` reads the arguments of each as a `Contraction`, whose axes have letters as in einsum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.models.attention import calls
from lipaudit.models.attention.calls import Linear

LARGEST = 2**24
"""Largest number of entries of a block matrix."""


class Contraction(NamedTuple):
    """A sum over products of entries of two tensors, with a letter for each axis.

    Attributes:
        x, given: one factor and its letters.
        weight, letters: the other factor, which may be a weight, and its letters.
        out: letters of the result.
        bias: added along the axes of the weight, or None.
        entire: whether the op is used for linear maps only.
    """

    x: Tensor
    given: str
    weight: Tensor
    letters: str
    out: str
    bias: Tensor | None = None
    entire: bool = False

    @property
    def width(self) -> int:
        """Return the number of entries of x that one sum runs over."""
        width = 1
        for axis, size in zip(self.given, self.x.shape, strict=True):
            if axis in self.letters and axis not in self.out:
                width *= size
        return width

    def orders(self) -> Iterator[tuple[str, Contraction]]:
        """Yield both orders of the factors, each with the op in the address of the linear map."""
        yield calls.RIGHT, self
        # A weight on the left is the same for all samples: with axes in common with the other
        # factor, it is a learned query.
        x, given, weight, letters, out = self[:5]
        common = set(given) & set(letters) & set(out)
        if not self.entire and not common:
            yield calls.LEFT, Contraction(weight, letters, x, given, out)

    def read(self) -> Linear | None:
        """Return y = x W; None if it is none.

        Along common axes that are not summed over, each entry has its own block of W.
        """
        x, given, weight, letters, out = self[:5]
        for axis in set(given) & set(letters) & set(out):
            place = letters.index(axis)
            place_in_x = given.index(axis)
            if _is_even(weight, place):
                weight = weight.select(place, 0)
                letters = letters.replace(axis, "")
            elif _is_even(x, place_in_x):
                x = x.select(place_in_x, 0)
                given = given.replace(axis, "")
        rows = [a for a in out if a not in letters]
        blocks = [a for a in out if a in given and a in letters]
        summed = [a for a in given if a in letters and a not in out]
        columns = [a for a in out if a not in given]
        if not summed:
            return None
        x = x.permute([given.index(a) for a in rows + blocks + summed])
        x = x.flatten(len(rows))
        weight = weight.permute([letters.index(a) for a in blocks + summed + columns])
        count = math.prod(weight.shape[: len(blocks)])
        if blocks and count * weight.numel() > LARGEST:
            return None
        first_column = len(blocks) + len(summed)
        width = math.prod(weight.shape[first_column:])
        each = weight.reshape(count, x.shape[-1] // count, width)
        whole: Tensor = torch.block_diag(*each) if blocks else each[0]  # type: ignore[no-untyped-call]
        order = [out.index(a) for a in rows + blocks + columns]

        def arrange(y: Tensor) -> Tensor:
            return y.permute(order).flatten(len(rows))

        return Linear(x, whole, self.bias, arrange)


def _is_even(t: Tensor, axis: int) -> bool:
    """Say whether a tensor is constant along an axis, judged by its strides."""
    return t.shape[axis] == 1 or t.stride(axis) == 0


def _read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Contraction | None:
    rows = ascii_lowercase[: input.ndim - 1]
    if weight.ndim < 2:
        return None
    return Contraction(input, f"{rows}y", weight, "zy", f"{rows}z", bias, entire=True)


def _read_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **scaling: Any) -> Contraction | None:
    if scaling:
        return None
    return _read_linear(mat1, mat2.t(), input)


def _read_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Contraction | None:
    pointwise = math.prod(weight.shape[2:]) == 1 and input.ndim == weight.ndim
    steps = {stride} if isinstance(stride, int) else set(stride)
    pads: set[Any] = {0}  # a string asks for the padding that keeps the size: none here
    if not isinstance(padding, str):
        pads = {padding} if isinstance(padding, int) else set(padding)
    if not pointwise or steps != {1} or pads != {0}:
        return None
    weight = weight.flatten(1)
    place = ascii_lowercase[: input.ndim - 2]
    if groups > 1:  # channels kept apart: a block of W each
        weight = torch.block_diag(*weight.chunk(groups))  # type: ignore[no-untyped-call]
    return Contraction(input, f"xy{place}", weight, "zy", f"xz{place}", bias, entire=True)


def _read_matmul(*operands: Any, **kwargs: Any) -> Contraction | None:
    if len(operands) != 2 or kwargs:
        return None
    a, b = operands
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or min(a.ndim, b.ndim) < 2:
        return None
    axes = max(a.ndim, b.ndim) - 2
    lead = ascii_lowercase[:axes]
    # Leading axes are aligned at their end.
    first = lead[axes + 2 - a.ndim :]
    second = lead[axes + 2 - b.ndim :]
    return Contraction(a, f"{first}xy", b, f"{second}yz", f"{lead}xz")


def _read_tensordot(a: Tensor, b: Tensor, dims: Any = 2, **kwargs: Any) -> Contraction:
    if isinstance(dims, int):
        dims = range(a.ndim - dims, a.ndim), range(dims)
    first = ascii_lowercase[: a.ndim]
    second = list(ascii_lowercase[a.ndim :][: b.ndim])
    for i, j in zip(*dims, strict=True):
        second[j] = first[i]
    kept = [c for c in first if c not in second]
    kept += [c for c in second if c not in first]
    return Contraction(a, first, b, "".join(second), "".join(kept))


def read_einsum(equation: Any, *operands: Any) -> Contraction | None:
    """Read an einsum "ab,bc->ac".

    None for other numbers of operands, and for implicit equations, an ellipsis, a diagonal or a
    lone sum.
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) != 2 or not isinstance(equation, str):
        return None
    letters, arrow, out = equation.replace(" ", "").partition("->")
    first, comma, second = letters.partition(",")
    if not arrow or not comma or "," in second or "." in equation:
        return None
    axes = set(first)
    other_axes = set(second)
    diagonal = len(axes) < len(first) or len(other_axes) < len(second)
    lone_sum = (axes ^ other_axes) - set(out)
    if diagonal or lone_sum:
        return None
    return Contraction(operands[0], first, operands[1], second, out)


READERS: dict[Callable[..., Any], Callable[..., Contraction | None]] = {
    F.linear: _read_linear,
    torch.addmm: _read_addmm,
    torch.tensordot: _read_tensordot,
    torch.einsum: read_einsum,
    **dict.fromkeys((F.conv1d, F.conv2d, torch.conv1d, torch.conv2d), _read_conv),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _read_matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm), _read_matmul),
}
