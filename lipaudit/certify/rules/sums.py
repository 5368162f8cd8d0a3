"""Sums of products over axes: einsum, means and variances."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipaudit.certify.form import Form, NoRuleError
from lipaudit.certify.rules.affine import add, linear_map, reduce_axes, scale
from lipaudit.certify.rules.moves import make_moving


def einsum(equation: str, *operands: Any) -> Any:
    """Return sums of products of two operands by names of axes, as one matmul."""
    operands = tuple(operands[0]) if isinstance(operands[0], list | tuple) else operands
    terms, arrow, wanted = equation.replace(" ", "").partition("->")
    a, comma, b = terms.partition(",")
    once = all(len(set(term)) == len(term) for term in (a, b, wanted))
    if len(operands) != 2 or not (arrow and comma and once) or set(wanted) - set(a + b):
        raise NoRuleError(f"einsum of {equation}")
    x, y = operands
    # Axes that nothing else has are summed first: what is left is a batch of matrices.
    x = x.sum(gone) if (gone := [i for i, c in enumerate(a) if c not in b + wanted]) else x
    y = y.sum(gone) if (gone := [i for i, c in enumerate(b) if c not in a + wanted]) else y
    a, b = ("".join(c for c in term if c in others + wanted) for term, others in ((a, b), (b, a)))
    sizes = dict(zip(a, x.shape, strict=True)) | dict(zip(b, y.shape, strict=True))
    inner = [c for c in a if c in b and c not in wanted]
    batch = [c for c in a if c in b and c in wanted]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]

    def fold(t: Any, axes: str, *groups: list[str]) -> Any:
        t = t.permute([axes.index(c) for group in (batch, *groups) for c in group])
        return t.reshape(
            [sizes[c] for c in batch] + [math.prod(sizes[c] for c in group) for group in groups]
        )

    product = fold(x, a, rows, inner) @ fold(y, b, inner, columns)
    order = batch + rows + columns
    return product.reshape([sizes[c] for c in order]).permute([order.index(c) for c in wanted])


def addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float | int = 1, alpha: float | int = 1
) -> Form:
    """Return beta input + alpha mat1 @ mat2."""
    mat1, mat2 = make_moving(input, mat1, mat2)
    product: Any = mat1 @ mat2
    return add(product if alpha == 1 else product * alpha, input if beta == 1 else input * beta)


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
