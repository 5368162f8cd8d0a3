"""Recognise every way a model writes "x times a constant matrix"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.models.lifting import Kept, read


@dataclass(frozen=True)
class Linear:
    """One product y = x W + b with a weight that does not depend on the input.

    Attributes:
        x: the input, channels on `axis`.
        parameter: W, (channels in, channels out), whatever the orientation of the parameter, or
            what it is read from (`lifting.keep`).
        bias: b, or None.
        axis: where the channels are: -1, or 1 for a 1x1 convolution.
    """

    x: Tensor
    parameter: Tensor | Kept
    bias: Tensor | None
    axis: int = -1

    @property
    def weight(self) -> Tensor:
        """Return W."""
        return read(self.parameter)

    @property
    def inputs(self) -> Tensor:
        """Return X, one token per row."""
        return self._rows(self.x, self.parameter.shape[0])

    def outputs(self, y: Tensor) -> Tensor:
        """Return y, or anything of its shape, with one token per row."""
        return self._rows(y, self.parameter.shape[1])

    def _rows(self, t: Tensor, width: int) -> Tensor:
        return (t if self.axis == -1 else t.movedim(self.axis, -1)).reshape(-1, width)


def recognise(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Linear | None:
    """Return the linear map that an op applies, or None when it is something else."""
    reader = _READERS.get(func)
    return None if reader is None else reader(*args, **kwargs)


def is_parameter(t: object) -> bool:
    """Say whether a tensor is a parameter or a view of one."""
    return isinstance(t, nn.Parameter) or (
        isinstance(t, Tensor) and isinstance(t._base, nn.Parameter)
    )


@dataclass(frozen=True)
class Contraction:
    """The letters of a two-operand einsum, by the part they play."""

    first: str
    second: str
    out: str
    batch: str
    rows: str
    columns: str
    summed: str


def contraction(equation: str) -> Contraction | None:
    """Read "ab,bc->ac"; None where it is implicit, has an ellipsis, a diagonal or a lone sum."""
    operands, arrow, out = equation.replace(" ", "").partition("->")
    first, comma, second = operands.partition(",")
    if not arrow or not comma or "," in second or "." in equation:
        return None
    if any(len(set(letters)) < len(letters) for letters in (first, second)):
        return None
    if set(first + second) - set(out) - (set(first) & set(second)):
        return None
    parts = (
        [c for c in out if c in first and c in second],
        [c for c in out if c not in second],
        [c for c in out if c not in first],
        [c for c in first if c in second and c not in out],
    )
    return Contraction(first, second, out, *("".join(part) for part in parts))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Linear | None:
    return Linear(input, weight.t(), bias) if weight.ndim == 2 else None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **scaling: Any) -> Linear | None:
    return None if scaling or not is_parameter(mat2) else Linear(mat1, mat2, input)


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Linear | None:
    pointwise = math.prod(weight.shape[2:]) == 1 and input.ndim == weight.ndim
    dense = _all(stride, 1) and (isinstance(padding, str) or _all(padding, 0))
    if not (pointwise and dense):
        return None
    if groups == 1:
        return Linear(input, weight.flatten(1).t(), bias, 1)
    blocks = weight.flatten(1).chunk(groups)
    whole: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return Linear(input, whole.t(), bias, 1)


def _all(value: int | tuple[int, ...], wanted: int) -> bool:
    return all(v == wanted for v in ((value,) if isinstance(value, int) else value))


def _matmul(*operands: Any, **kwargs: Any) -> Linear | None:
    if len(operands) != 2 or kwargs or not is_parameter(operands[1]) or operands[1].ndim != 2:
        return None
    return Linear(*operands, bias=None)


def _einsum(equation: Any, *operands: Any) -> Linear | None:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) != 2 or not isinstance(equation, str) or not is_parameter(operands[1]):
        return None
    c = contraction(equation)
    if c is None or c.batch or c.out != c.rows + c.columns:
        return None
    x, weight = operands
    x = x.permute([c.first.index(a) for a in c.rows + c.summed]).flatten(len(c.rows))
    weight = weight.permute([c.second.index(a) for a in c.summed + c.columns])
    return Linear(x, weight.flatten(0, len(c.summed) - 1).flatten(1), None)


_READERS: dict[Callable[..., Any], Callable[..., Linear | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.conv1d: _conv,
    F.conv2d: _conv,
    torch.conv1d: _conv,
    torch.conv2d: _conv,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.einsum: _einsum,
}
