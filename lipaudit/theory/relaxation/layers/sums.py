"""Sums of products over axes: einsum, further convolutions and means over windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.theory.relaxation.affine import add, conv2d, linear_map, reduced, scaled
from lipaudit.theory.relaxation.form import Form, NoRuleError
from lipaudit.theory.relaxation.products import matmul


def einsum(equation: str, *operands: Any) -> Any:
    """Sums of products by names of axes, two operands at a time: permuted to a matmul."""
    factors = list(operands[0] if isinstance(operands[0], list | tuple) else operands)
    names, wanted = _names(equation.replace(" ", ""), [factor.ndim for factor in factors])
    here, product = names[0], factors[0]
    for i, (axes, factor) in enumerate(zip(names[1:], factors[1:], strict=True), 1):
        kept = wanted + "".join(names[i + 1 :])
        here, product = _contracted((here, product), (axes, factor), kept)
    product, here = _summed(product, here, wanted)
    return product.permute([here.index(axis) for axis in wanted])


def _names(equation: str, ndims: list[int]) -> tuple[list[str], str]:
    """Return a letter for every axis of every operand, and of the result."""
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    spare = [c for c in map(chr, range(65, 91)) if c not in equation][::-1]
    most = max(n - len(t.replace("...", "")) for t, n in zip(terms, ndims, strict=True))
    if most and "..." not in left:
        raise NoRuleError(f"einsum of {equation} and other axes")
    dots = "".join(spare.pop() for _ in range(most))
    named = []
    for term, ndim in zip(terms, ndims, strict=True):
        missing = ndim - len(term.replace("...", ""))
        named.append(term.replace("...", dots[most - missing :]))
    if any(len(set(term)) < len(term) for term in named):
        raise NoRuleError(f"einsum of a diagonal, {equation}")
    joined = "".join(named)
    once = "".join(sorted(c for c in set(joined) - set(dots) if joined.count(c) == 1))
    return named, right.replace("...", dots) if arrow else dots + once


def _summed(t: Any, axes: str, kept: str) -> tuple[Any, str]:
    """Sum over the axes that nothing else has."""
    gone = [i for i, axis in enumerate(axes) if axis not in kept]
    return (t.sum(gone) if gone else t), "".join(axis for axis in axes if axis in kept)


def _contracted(one: tuple[str, Any], other: tuple[str, Any], kept: str) -> tuple[str, Any]:
    """Multiply two operands, summed over the axes that they share and that are not kept."""
    (a, x), (b, y) = one, other
    x, a = _summed(x, a, b + kept)
    y, b = _summed(y, b, a + kept)
    batch = [c for c in a if c in b and c in kept]
    inner = [c for c in a if c in b and c not in kept]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    sizes = dict(zip(b, y.shape, strict=True)) | dict(zip(a, x.shape, strict=True))
    x = x.permute([a.index(c) for c in (*batch, *rows, *inner)])
    y = y.permute([b.index(c) for c in (*batch, *inner, *columns)])
    outer = [sizes[c] for c in batch]
    x = x.reshape(*outer, _size(sizes, rows), _size(sizes, inner))
    y = y.reshape(*outer, _size(sizes, inner), _size(sizes, columns))
    axes = (*batch, *rows, *columns)
    return "".join(axes), matmul_any(x, y).reshape([sizes[c] for c in axes])


def _size(sizes: dict[str, int], axes: list[str]) -> int:
    return torch.Size(sizes[c] for c in axes).numel()


def matmul_any(x: Any, y: Any) -> Any:
    """Return x @ y of forms and constants, or of constants alone."""
    return matmul(x, y) if isinstance(x, Form) or isinstance(y, Form) else x @ y


def addmm(
    input: Any, one: Any, other: Any, *, beta: float | int = 1, alpha: float | int = 1
) -> Form:
    """Return beta input + alpha one @ other."""
    product: Any = matmul_any(one, other)
    product = product if alpha == 1 else product * alpha
    result: Form = add(product, input if beta == 1 else input * beta)
    return result


def cumsum(input: Form, dim: int, *, dtype: Any = None) -> Form:
    """Sums up to every place of an axis."""
    n = input.shape[dim]
    ones = torch.ones(n, n, dtype=torch.float64, device=input.device).triu()
    return matmul(input.movedim(dim, -1), ones).movedim(-1, dim)  # type: ignore[return-value]


def conv1d(
    input: Form,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Form:
    """A convolution over the last axis."""
    stride, dilation = (_first(v) for v in (stride, dilation))
    wide: Any = input.unsqueeze(-2)
    if isinstance(padding, str):
        room = dilation * (weight.shape[-1] - 1) if padding == "same" else 0
        wide, padding = F.pad(wide, (room // 2, room - room // 2)), 0
    options = ((1, stride), (0, _first(padding)), (1, dilation), groups)
    return conv2d(wide, weight.unsqueeze(-2), bias, *options).squeeze(-2)  # type: ignore[return-value]


def convolution(
    input: Form,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Form:
    """A convolution over two axes, its padding in numbers or by name."""
    wide: Any = input
    if isinstance(padding, str):
        gaps = dilation if isinstance(dilation, tuple) else (dilation, dilation)
        room = [gap * (size - 1) for gap, size in zip(gaps, weight.shape[-2:], strict=True)]
        ends = [(r // 2, r - r // 2) if padding == "same" else (0, 0) for r in room]
        wide, padding = F.pad(input, (*ends[1], *ends[0])), 0
    return conv2d(wide, weight, bias, stride, padding, dilation, groups)


def _first(value: Any) -> int:
    return int(value[0]) if isinstance(value, list | tuple) else int(value)


def pooled(mean: Callable[..., Tensor], axes: int) -> Callable[..., Form]:
    """Return the rule of a function that takes means over windows of the last axes."""

    def rule(input: Form, *args: Any, **kwargs: Any) -> Form:
        if input.ndim != axes + 2:
            raise NoRuleError("a mean over windows of one sample without a batch axis")

        def op(t: Tensor) -> Tensor:
            return torch.unflatten(mean(t.flatten(0, 1), *args, **kwargs), 0, t.shape[:2])

        # A window has no more entries than the axes; its sum is divided once.
        terms = input.shape[-axes:].numel()
        return linear_map(input.settle(), op, roundings=terms + 2)

    return rule


def average(
    input: Form, dim: Any = None, keepdim: bool = False, *, axis: Any = None, dtype: Any = None
) -> Form:
    """The mean; numpy's name of axes is known too."""
    return reduced(input, axis if dim is None else dim, keepdim, mean=True)


def variance(
    input: Form, dim: Any = None, unbiased: bool = True, keepdim: bool = False, **options: Any
) -> Form:
    """Return the sum of squares around the mean, over n - correction."""
    correction = options.get("correction", int(unbiased))
    centred: Any = input - reduced(input, dim, True, mean=True)
    total = reduced(centred.square(), dim, keepdim)
    return scaled(total, 1 / (input.numel() // total.numel() - correction), roundings=2)


RULES: dict[str, Callable[..., Any]] = {
    "einsum": einsum,
    **dict.fromkeys(("addmm", "baddbmm"), addmm),
    "cumsum": cumsum,
    "conv1d": conv1d,
    "conv2d": convolution,
    "mean": average,
    "var": variance,
    "avg_pool1d": pooled(F.avg_pool1d, 1),
    "avg_pool2d": pooled(F.avg_pool2d, 2),
    "adaptive_avg_pool1d": pooled(F.adaptive_avg_pool1d, 1),
    "adaptive_avg_pool2d": pooled(F.adaptive_avg_pool2d, 2),
}
"""What sums do to forms."""
