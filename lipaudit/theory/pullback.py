"""Vector-Jacobian products of a graph, without importing sympy.

`torch.autograd.grad(value, inputs, u)` compares the shape of u with symbolic sizes, and so imports
sympy: 0.5 s of CPU time in every process, more than a small model takes. The gradient of a scalar
needs no u.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Scalar(torch.autograd.Function):
    """A scalar whose gradient with respect to `value` is the last of the given cotangents."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, cotangents: list[Tensor]) -> Tensor:
        ctx.cotangents = cotangents
        return value.new_zeros(())  # the number does not matter, only its gradient

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.cotangents[-1], None  # the second: a list has no gradient


def _make_scalar(value: Tensor, cotangents: list[Tensor]) -> Tensor:
    """Return a scalar s such that `torch.autograd.grad(s, x)` is J^T u, J the Jacobian of `value`.

    u is the last of `cotangents` when the backward pass runs: the caller may append it later.
    """
    # A graph is needed, also if the caller is under no_grad or in inference mode.
    with torch.inference_mode(False), torch.enable_grad():
        scalar: Tensor = _Scalar.apply(value, cotangents)
    return scalar


def pull_back(
    value: Tensor, inputs: Tensor | Sequence[Any], cotangent: Tensor, **how: Any
) -> tuple[Tensor, ...]:
    """Return J^T u with respect to every input, as `torch.autograd.grad(value, inputs, u)` does.

    Unlike that call it does not import sympy, which takes half a second.

    Args:
        value: the output.
        inputs: a tensor or gradient edge of its graph, or several.
        cotangent: u, in the shape of the value; the result is differentiable in it.
        how: further arguments of `torch.autograd.grad`.

    Raises:
        RuntimeError: u has another shape, or as `torch.autograd.grad`.
    """
    if cotangent.shape != value.shape:
        raise RuntimeError(f"a cotangent of {value.shape} has the shape {cotangent.shape}")
    scalar = _make_scalar(value, [cotangent])
    return torch.autograd.grad(scalar, inputs, **how)


def pull_back_rows(value: Tensor, leaf: Tensor, cotangents: Tensor) -> Tensor:
    """Return J^T u of several u in one backward pass, by vmap; the graph is kept.

    J is the Jacobian of `value` with respect to `leaf`. `torch.autograd.grad(value, leaf, u)` in
    vmap would compute the same, but import sympy. So a scalar is differentiated whose gradient in
    `value` is u. vmap refuses to make this scalar, an autograd.Function: it is made before, and
    the u of vmap is handed to it later, in a list.

    Args:
        value: the output.
        leaf: the input.
        cotangents: the u, (number, *shape of the value).

    Raises:
        RuntimeError: an operation cannot be mapped over.
    """
    # The gradient of `scalar` is J^T u for the last u in this list, which is still empty.
    current: list[Tensor] = []
    scalar = _make_scalar(value, current)

    def pull(cotangent: Tensor) -> Tensor:
        # `vmap` calls this once, with a tensor that stands for every row of the cotangents.
        current.append(cotangent)
        return torch.autograd.grad(scalar, leaf, retain_graph=True)[0]

    rows: Tensor = torch.vmap(pull)(cotangents)
    return rows
