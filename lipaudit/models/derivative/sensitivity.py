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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, of_machine
from lipaudit.models.derivative.endpoints import SampleFunction
from lipaudit.models.derivative.linear_mode import AdjointMode
from lipaudit.models.derivative.linearize import Linearization, require_finite
from lipaudit.models.derivative.model_norms import DENSE, gram_products
from lipaudit.models.graph import nodes
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.theory.spectral.lanczos import random_starts, spectral_norms

Move = Sequence[tuple[Tensor, Tensor]]
"""Weights of a model, each with the step that it takes."""
PAIR_TOL = 1e-6
"""Accuracy of a norm at which its vectors are good to about its root."""
SECOND_TOL = 1e-3
"""Accuracy of a second singular value, which only says how far it is below the first."""


@dataclass(frozen=True)
class SingularPairs:
    """Unit vectors with J v = sigma u and J^T u = sigma v, sigma the norm of each sample.

    Attributes:
        u: in the space of outputs, (batch, *out).
        v: in the space of inputs, (batch, *in).
        gap: 1 - sigma_2 / sigma_1, (batch,) on the CPU: where it is 0 the pair is not unique.
    """

    u: Tensor
    v: Tensor
    gap: Tensor


def singular_pairs(
    linear: Linearization, *, seeds: Sequence[int] | None = None, max_steps: int = 300
) -> SingularPairs:
    """Return the leading singular vectors of every sample's Jacobian, and the gap below them.

    From the dense Jacobian where one side is at most `DENSE`, else by the Lanczos process; the
    second singular value is then that of what is orthogonal to the first vector.

    Raises:
        EvaluationError: a derivative is not finite.
    """
    few_outputs = linear.outputs <= linear.inputs
    if min(linear.inputs, linear.outputs) <= DENSE:
        near, gap = _dense_pairs(linear.rows if few_outputs else linear.columns)
    else:
        near, gap = _lanczos_pairs(linear, seeds or [0] * len(linear), max_steps)
    near = near.to(linear.x).view_as(linear.output if few_outputs else linear.x)
    far = _unit_length(linear.sized(linear.vjp if few_outputs else linear.jvp, near))
    return SingularPairs(*((near, far) if few_outputs else (far, near)), gap)


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


def _dense_pairs(dense: Tensor) -> tuple[Tensor, Tensor]:
    """The first left singular vectors of some matrices, and their gaps."""
    require_finite(dense)
    vectors, gaps = [], []
    for j in dense:
        u, s, _ = torch.linalg.svd(j.to(torch.float64), full_matrices=False)
        vectors.append(u[:, 0])
        gaps.append(1 - s[1:2].sum() / s[0])
    return torch.stack(vectors), torch.stack(gaps).cpu()


def _lanczos_pairs(
    linear: Linearization, seeds: Sequence[int], max_steps: int
) -> tuple[Tensor, Tensor]:
    gram = gram_products(linear)
    size = min(linear.outputs, linear.inputs)
    # Of a double value one start sees one vector: the second one needs a start of its own.
    start, other = (
        random_starts([seed + i for seed in seeds], size).to(linear.x.device, torch.float64)
        for i in (0, 1)
    )
    how: dict[str, Any] = {"max_steps": max_steps, "rebuild": 2.0}
    first = spectral_norms(lambda _: gram, start, tol=PAIR_TOL, vectors=True, **how)
    assert first.vector is not None
    top = _unit_length(first.vector)

    def without(u: Tensor) -> Tensor:
        return u - (u * top).sum(1, keepdim=True) * top

    def deflated(u: Tensor) -> Tensor:
        return without(gram(without(u)))

    second = spectral_norms(lambda _: deflated, without(other), tol=SECOND_TOL, **how)
    return top, 1 - second.norm / first.norm


def _unit_length(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors.flatten(1), dim=1).view_as(vectors)


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
