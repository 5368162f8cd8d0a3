"""How the norm of a model's Jacobian changes, to first order, as its weights do.

Where the largest singular value sigma of J is simple, it is differentiable with

    d sigma = u^T dJ v,    u and v its unit singular vectors

(Hellmann and Feynman, of J as Kato, Perturbation Theory, II.6, has it of symmetric operators): the
vectors are held. So the derivative of u^T J(theta) v in the weights theta, one backward pass
through J^T u, is that of the norm in all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, of_machine
from lipaudit.models.derivative.endpoints import SampleFunction
from lipaudit.models.derivative.linear_mode import AdjointMode
from lipaudit.models.derivative.model_norms import SingularPairs
from lipaudit.models.graph import nodes
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic

Move = Sequence[tuple[Tensor, Tensor]]
"""Weights of a model, each with the step that it takes."""


def norm_slopes(
    net: Net, batch: Batch, at: SampleFunction, pairs: SingularPairs, moves: Sequence[Move]
) -> Tensor:
    """Return d sigma / dt at t = 0 as the weights of a move go to theta + t step.

    Where the function begins at embeddings, the points go along with the weights that make them.
    Each sample takes about as long as five forward passes.

    Args:
        net: the model.
        batch: the samples.
        at: the function whose Jacobian is taken, at these samples.
        pairs: its leading singular vectors there.
        moves: one or more sets of weights and steps.

    Returns:
        (moves, samples), float64 on the CPU.

    Raises:
        InputError: an operation of the model has no second derivative.
    """
    leaves = [leaf for move in moves for leaf, _ in move]
    slopes = torch.zeros(len(moves), len(batch), dtype=torch.float64)
    with exact_arithmetic(net.device), _differentiable(leaves):
        for i in range(len(batch)):
            gradients = iter(_gradients(net, batch, at, pairs, i, leaves))
            for j, move in enumerate(moves):
                slopes[j, i] = sum(_dot(next(gradients), step) for _, step in move)
    return slopes


def _gradients(
    net: Net,
    batch: Batch,
    at: SampleFunction,
    pairs: SingularPairs,
    i: int,
    leaves: Sequence[Tensor],
) -> list[Tensor | None]:
    """The derivative of u^T J v of one sample in every leaf; None where there is none."""
    index = torch.tensor([i], device=net.device)
    point = at.x[index].clone().requires_grad_()
    direct = _of_product(at, point, index, (pairs.u[index], pairs.v[index]), [*leaves, point])
    *own, by_point = direct
    if at.start != "embeddings" or by_point is None:
        return own
    with torch.enable_grad():
        place = net.entered(batch.unnamed(index))
    moved = _grad(place, leaves, by_point)
    return [b if a is None else a if b is None else a + b for a, b in zip(own, moved, strict=True)]


def _of_product(
    at: SampleFunction,
    point: Tensor,
    index: Tensor,
    ends: tuple[Tensor, Tensor],
    leaves: Sequence[Tensor],
) -> list[Tensor | None]:
    """The derivative of u^T J v in every leaf."""
    sdpa = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    # u is a variable: only then such an operation leaves a mark.
    u, v = ends[0].clone().requires_grad_(), ends[1]
    try:
        with torch.enable_grad():
            with sdpa, AdjointMode(widen=point.dtype == torch.float64, weights=True):
                value = at.f(point.clone(), index)
            (pullback,) = torch.autograd.grad(value, point, u, create_graph=True)
            product = (pullback * v).sum()
        # A gradient passes an operation by that can be differentiated but once, without a word.
        if any(node.name().endswith("::Error") for node in nodes(product)):
            raise _not_twice("an operation can be differentiated but once")
        return _grad(product, leaves, torch.ones_like(product))
    except RuntimeError as error:
        if of_machine(error):
            raise
        raise _not_twice(str(error).partition("\n")[0]) from error


def _not_twice(reason: str) -> InputError:
    return InputError(
        f"the norm cannot be differentiated in the weights: {reason}",
        "use an attention implementation made of plain torch operations (eager)",
    )


def _grad(of: Tensor, leaves: Sequence[Tensor], cotangent: Tensor) -> list[Tensor | None]:
    if not of.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(of, leaves, cotangent, allow_unused=True))


def _dot(gradient: Tensor | None, step: Tensor) -> float:
    return 0.0 if gradient is None else float((gradient.double() * step.double()).sum())


@contextmanager
def _differentiable(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters and buffers have gradients while the block runs."""
    before = [leaf.requires_grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.requires_grad_()
        yield
    finally:
        for leaf, was in zip(leaves, before, strict=True):
            leaf.requires_grad_(was)
