"""Recognise every way a model writes "x times a constant matrix"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.models.lifting import Kept, read

RIGHT, LEFT = "linear", "linear from the left"
"""Name of the operation, by the side of the weight."""

LARGEST = 2**24
"""Largest number of entries of a block matrix."""

Arrange = Callable[..., Tensor]
"""Moves the channels of a tensor to the last axis."""


@dataclass(frozen=True)
class Linear:
    """A product y = x W + b with a weight that does not depend on the sample.

    Attributes:
        x: the input, channels last.
        parameter: W, (channels in, channels out), for any orientation of the parameter, or a
            reference to it (`lifting.keep`).
        bias: b, or None.
        arrange: converts y to the axes of x; for joined maps, the y of each.
    """

    x: Tensor
    parameter: Tensor | Kept
    bias: Tensor | None
    arrange: Arrange = lambda y: y

    @property
    def weight(self) -> Tensor:
        """Return W."""
        return read(self.parameter)

    @property
    def inputs(self) -> Tensor:
        """Return X, one token per row."""
        return self.x.reshape(-1, self.parameter.shape[0])

    def reads_same(self, other: Linear) -> bool:
        """Say whether another map reads the same values in the same order."""
        x, y = self.inputs, other.inputs
        return x.shape == y.shape and torch.equal(x, y)

    def outputs(self, *y: Tensor) -> Tensor:
        """Return y, or anything of its shape, with one token per row."""
        return self.arrange(*y).reshape(-1, self.parameter.shape[1])


def join_linears(linears: Sequence[Linear]) -> Linear:
    """Return linear maps of one input as one: y = (y_1, y_2, ...), x [W_1 W_2 ...]."""
    if len(linears) == 1:
        return linears[0]
    weights = [linear.weight for linear in linears]
    biases = [
        w.new_zeros(w.shape[1]) if each.bias is None else each.bias
        for each, w in zip(linears, weights, strict=True)
    ]

    def arrange(*parts: Tensor) -> Tensor:
        rows = (each.outputs(y) for each, y in zip(linears, parts, strict=True))
        return torch.cat([*rows], 1)

    return Linear(linears[0].x, torch.cat(weights, 1), torch.cat(biases), arrange)


class Operands(NamedTuple):
    """Two factors of an op, one of which may be a weight.

    Attributes:
        x: the input, if the other factor is a weight.
        weight: the weight.
        bias: the bias, or None.
        op: the op in the address of the linear map.
        read: returns the linear map; None if the op is none.
        entire: whether the op is used for linear maps only.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    op: str
    read: Callable[[], Linear | None]
    entire: bool = False


def find_operands(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Operands, ...] | None:
    """Return the factors of an op, one of which may be a weight; None if it multiplies nothing.

    In a product of two tensors, either may be the weight.
    """
    reader = _READERS.get(func)
    return None if reader is None else tuple(reader(*args, **kwargs))


def parse_contraction(
    equation: Any, *operands: Any
) -> tuple[Tensor, str, Tensor, str, str] | None:
    """Read an einsum "ab,bc->ac": both operands, each with its letters, and those of the result.

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
    if any(len(set(each)) < len(each) for each in (first, second)):
        return None
    if set(first + second) - set(out) - (set(first) & set(second)):
        return None
    return operands[0], first, operands[1], second, out


def _read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Iterator[Operands]:
    if weight.ndim == 2:
        yield Operands(input, weight, bias, RIGHT, lambda: Linear(input, weight.t(), bias), True)


def _read_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **scaling: Any) -> Iterator[Operands]:
    if not scaling:
        yield Operands(mat1, mat2, input, RIGHT, lambda: Linear(mat1, mat2, input), True)


def _read_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Iterator[Operands]:
    pointwise = math.prod(weight.shape[2:]) == 1 and input.ndim == weight.ndim
    dense = _all_equal(stride, 1) and (isinstance(padding, str) or _all_equal(padding, 0))
    if pointwise and dense:

        def read() -> Linear:
            whole = weight.flatten(1)
            if groups > 1:  # channels kept apart: a block of W each
                whole = torch.block_diag(*whole.chunk(groups))  # type: ignore[no-untyped-call]
            return Linear(input.movedim(1, -1), whole.t(), bias, lambda y: y.movedim(1, -1))

        yield Operands(input, weight, bias, RIGHT, read, True)


def _all_equal(value: int | tuple[int, ...], wanted: int) -> bool:
    return all(v == wanted for v in ((value,) if isinstance(value, int) else value))


def _read_matmul(*operands: Any, **kwargs: Any) -> Iterator[Operands]:
    if len(operands) != 2 or kwargs or not all(isinstance(t, Tensor) for t in operands):
        return
    a, b = operands
    if b.ndim == 2:
        yield Operands(a, b, None, RIGHT, lambda: Linear(a, b, None))
    elif min(a.ndim, b.ndim) > 1:
        lead = ascii_lowercase[: max(a.ndim, b.ndim) - 2]
        first, second = (lead[len(lead) + 2 - t.ndim :] for t in (a, b))
        yield from _read_either(a, f"{first}xy", b, f"{second}yz", f"{lead}xz")


def _read_tensordot(a: Tensor, b: Tensor, dims: Any = 2, **kwargs: Any) -> Iterator[Operands]:
    if isinstance(dims, int):
        dims = range(a.ndim - dims, a.ndim), range(dims)
    first, second = ascii_lowercase[: a.ndim], list(ascii_lowercase[a.ndim :][: b.ndim])
    for i, j in zip(*dims, strict=True):
        second[j] = first[i]
    out = "".join(c for c in [*first, *second] if (c in first) != (c in second))
    yield from _read_either(a, first, b, "".join(second), out)


def _read_einsum(*args: Any) -> Iterator[Operands]:
    found = parse_contraction(*args)
    if found is not None:
        yield from _read_either(*found)


def _read_either(a: Tensor, first: str, b: Tensor, second: str, out: str) -> Iterator[Operands]:
    """Read a sum over products of entries, with the second operand as the weight, else the first.

    The first is a weight only if it is the same for all samples: with axes in common with the
    second, it is a learned query.
    """
    yield Operands(a, b, None, RIGHT, lambda: _contract(a, first, b, second, out))
    # A weight on the left has no axis in common with the samples of the other operand.
    if not set(first) & set(second) & set(out):
        yield Operands(b, a, None, LEFT, lambda: _contract(b, second, a, first, out))


def _contract(x: Tensor, given: str, weight: Tensor, letters: str, out: str) -> Linear | None:
    """Return y = x W of a sum over products of entries.

    Along common axes that are not summed over, each entry has its own block of W.
    """
    for axis in set(given) & set(letters) & set(out):
        if _is_even(weight, letters.index(axis)):
            weight, letters = weight.select(letters.index(axis), 0), letters.replace(axis, "")
        elif _is_even(x, given.index(axis)):
            x, given = x.select(given.index(axis), 0), given.replace(axis, "")
    rows = [a for a in out if a not in letters]
    blocks = [a for a in out if a in given and a in letters]
    summed = [a for a in given if a in letters and a not in out]
    columns = [a for a in out if a not in given]
    if not summed:
        return None
    x = x.permute([given.index(a) for a in rows + blocks + summed]).flatten(len(rows))
    weight = weight.permute([letters.index(a) for a in blocks + summed + columns])
    count = math.prod(weight.shape[: len(blocks)])
    if blocks and count * weight.numel() > LARGEST:
        return None
    each = weight.reshape(count, x.shape[-1] // count, -1)
    whole: Tensor = torch.block_diag(*each) if blocks else each[0]  # type: ignore[no-untyped-call]
    order = [out.index(a) for a in rows + blocks + columns]
    return Linear(x, whole, None, lambda y: y.permute(order).flatten(len(rows)))


def _is_even(t: Tensor, axis: int) -> bool:
    """Say whether a tensor is constant along an axis, judged by its strides."""
    return t.shape[axis] == 1 or t.stride(axis) == 0


_READERS: dict[Callable[..., Any], Callable[..., Iterator[Operands]]] = {
    F.linear: _read_linear,
    torch.addmm: _read_addmm,
    torch.tensordot: _read_tensordot,
    torch.einsum: _read_einsum,
    **dict.fromkeys((F.conv1d, F.conv2d, torch.conv1d, torch.conv2d), _read_conv),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _read_matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm), _read_matmul),
}
