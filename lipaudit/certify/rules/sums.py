"""Sums of products over axes: einsum, interpolation, means and variances."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.certify.form import Form, NoRuleError
from lipaudit.certify.rounding import DOUBLE, gamma, up
from lipaudit.certify.rules.affine import add, linear_map, reduce_axes, scale
from lipaudit.certify.rules.moves import make_move, make_moving
from lipaudit.certify.rules.products import matmul


def einsum(equation: str, *operands: Any) -> Any:
    """Return sums of products by names of axes, two operands at a time, each as a matmul."""
    factors = list(operands[0] if isinstance(operands[0], list | tuple) else operands)
    names, wanted = _names(equation.replace(" ", ""), [factor.ndim for factor in factors])
    like = next(each for each in factors if isinstance(each, Form))
    here, product = names[0], factors[0]
    for i, (axes, factor) in enumerate(zip(names[1:], factors[1:], strict=True), 1):
        kept = wanted + "".join(names[i + 1 :])
        product, factor = make_moving(like, product, factor)
        here, product = _contract((here, product), (axes, factor), kept)
    product, here = _sum_axes(product, here, wanted)
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


def _sum_axes(t: Any, axes: str, kept: str) -> tuple[Any, str]:
    """Sum over the axes that no other operand has."""
    gone = [i for i, axis in enumerate(axes) if axis not in kept]
    return (t.sum(gone) if gone else t), "".join(axis for axis in axes if axis in kept)


def _contract(one: tuple[str, Any], other: tuple[str, Any], kept: str) -> tuple[str, Any]:
    """Multiply two operands, and sum over shared axes that are not kept."""
    (a, x), (b, y) = one, other
    x, a = _sum_axes(x, a, b + kept)
    y, b = _sum_axes(y, b, a + kept)
    batch = [c for c in a if c in b and c in kept]
    inner = [c for c in a if c in b and c not in kept]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    sizes = dict.fromkeys(a + b, 1)
    for its, t in ((a, x), (b, y)):
        sizes |= {c: n for c, n in zip(its, t.shape, strict=True) if n != 1}
    x, y = (
        t.permute([its.index(c) for c in order]).expand([sizes[c] for c in order])
        for t, its, order in ((x, a, batch + rows + inner), (y, b, batch + inner + columns))
    )
    outer = [sizes[c] for c in batch]
    x = x.reshape(*outer, _size(sizes, rows), _size(sizes, inner))
    y = y.reshape(*outer, _size(sizes, inner), _size(sizes, columns))
    axes = (*batch, *rows, *columns)
    return "".join(axes), (x @ y).reshape([sizes[c] for c in axes])


def _size(sizes: dict[str, int], axes: list[str]) -> int:
    return torch.Size(sizes[c] for c in axes).numel()


def addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float | int = 1, alpha: float | int = 1
) -> Form:
    """Return beta input + alpha mat1 @ mat2."""
    mat1, mat2 = make_moving(input, mat1, mat2)
    product: Any = mat1 @ mat2
    return add(product if alpha == 1 else product * alpha, input if beta == 1 else input * beta)


def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: float | int = 1) -> Form:
    """Return input + value tensor1 tensor2."""
    tensor1, tensor2 = make_moving(input, tensor1, tensor2)
    product: Any = tensor1 * tensor2
    return add(input, product if value == 1 else product * value)


def interpolate(
    input: Form,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Form:
    """Resize two axes: copies, or one matrix of weights per axis."""
    if input.ndim != 4 or recompute_scale_factor:
        raise NoRuleError("interpolate of other than two axes")
    if mode.startswith("nearest"):
        wide = partial(F.interpolate, size=size, scale_factor=scale_factor, mode=mode)
        return make_move(wide)(input)

    def weights(axis: int) -> Tensor:
        """Return the weight of every input place in every output place, from unit vectors.

        The other axis is two wide: with one, torch may take antialiased images for channels last.
        """
        n, name = input.shape[axis - 2], "scale_factor" if size is None else "size"
        wanted, other = (scale_factor, 1.0) if size is None else (size, 2)
        own = wanted if isinstance(wanted, int | float) else wanted[axis]
        chosen = {name: [own, other] if axis == 0 else [other, own]}
        single = torch.eye(n, dtype=torch.float64, device=input.device)[:, None, :, None]
        wide = single.repeat(1, 1, 1, 2)
        wide = wide if axis == 0 else wide.mT.contiguous()
        options = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
        result = F.interpolate(wide, **chosen, **options)  # type: ignore[arg-type]
        return result.select(3 - axis, 0)[:, 0].mT

    def op(t: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return rows @ t @ columns.mT

    down, across = weights(0), weights(1)
    if antialias and 1 in across.shape:
        raise NoRuleError("interpolate with antialias of images of width one")
    places = input.shape[-2] + input.shape[-1]
    x = input.settle()
    result = linear_map(x, op, down, across, roundings=places + 4)
    # A weight is a difference of two places, with an error of a few roundings of their number.
    everywhere = (x.centre.abs() + x.mass + x.slack).sum((-2, -1), keepdim=True)
    result.slack = up(result.slack + gamma(64 * places, DOUBLE) * everywhere, places)
    return result


def cumsum(input: Form, dim: int, *, dtype: Any = None) -> Form:
    """Return cumulative sums along an axis."""
    n = input.shape[dim]
    ones = torch.ones(n, n, dtype=torch.float64, device=input.device).triu()
    return matmul(input.movedim(dim, -1), ones).movedim(-1, dim)  # type: ignore[return-value]


def make_pooling(mean: Callable[..., Tensor], axes: int) -> Callable[..., Form]:
    """Return the rule of a function that averages over windows of the last axes."""

    def rule(input: Form, *args: Any, **kwargs: Any) -> Form:
        if input.ndim != axes + 2:
            raise NoRuleError("a mean over windows of one sample without a batch axis")

        def op(t: Tensor) -> Tensor:
            return torch.unflatten(mean(t.flatten(0, 1), *args, **kwargs), 0, t.shape[:2])

        # A window has no more entries than the axes; its sum is divided once.
        terms = input.shape[-axes:].numel()
        return linear_map(input.settle(), op, roundings=terms + 2)

    return rule


def variance(
    input: Form, dim: Any = None, unbiased: bool = True, keepdim: bool = False, **options: Any
) -> Form:
    """Return the sum of squares around the mean, divided by n - correction."""
    if isinstance(dim, bool):  # x.var(unbiased) of all entries
        dim, unbiased = None, dim
    correction = options.get("correction", int(unbiased))
    centred: Any = input - reduce_axes(input, dim, True, mean=True)
    total = reduce_axes(centred.square(), dim, keepdim)
    return scale(total, 1 / (input.numel() // total.numel() - correction), roundings=2)
