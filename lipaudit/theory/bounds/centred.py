"""What the bounds of a layer share: its attention maps, centred keys and values, projections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.heads import Heads, Projection
from lipaudit.theory.policy import POLICY, Policy

S = TypeVar("S", bound="Stack")


@dataclass(frozen=True)
class Stack:
    """Tensors that are indexed and cast together."""

    def pick(self: S, index: Any) -> S:
        """Index all of them."""
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))

    def to_single(self: S) -> S:
        """Return all of them in single precision."""
        return type(self)(*(getattr(self, field.name).float() for field in fields(self)))


@dataclass(frozen=True)
class Centred(Stack):
    """Keys and values less their mean over the keys that are seen; unseen keys are zero rows.

    With a sink neither has its mean taken off: see `centred`.
    """

    p: Float[Tensor, "batch heads n m"]
    seen: Float[Tensor, "batch heads m 1"]
    k: Float[Tensor, "batch heads m d"]
    v: Float[Tensor, "batch heads m dv"]
    o: Float[Tensor, "batch heads n dv"]
    s: Float[Tensor, "batch heads 1 1"]

    @cached_property
    def single(self) -> Centred:
        """The same in single precision."""
        return self.to_single()

    @cached_property
    def o2(self) -> Float[Tensor, "batch heads n 1"]:
        """||o_i||^2."""
        return self.o.square().sum(-1, keepdim=True)

    @cached_property
    def v2(self) -> Float[Tensor, "batch heads m 1"]:
        """||v_j||^2."""
        return self.v.square().sum(-1, keepdim=True)

    @cached_property
    def gram(self) -> Float[Tensor, "batch heads m m"]:
        """<v_j, v_l>."""
        return self.v @ self.v.mT

    @cached_property
    def w2(self) -> Float[Tensor, "batch heads n m"]:
        """||v_j - o_i||^2, raised by more than its rounding error."""
        return squared_distances(self.o, self.v, self.o2, self.v2)


def centred(heads: Heads) -> Centred:
    """Return the attention map of the heads and their centred keys, values and outputs.

    M(P_i) 1 = 0 where P_i sums to 1: then no constant matters in v, nor in s k_j. With a sink it
    does not. (Other logits have gradients of their own, see `pairs`: no keys enter there.)
    """
    p = heads.attention()
    free = heads.sink is None
    if heads.bias is None and heads.valid is None and not heads.causal:
        seen = torch.ones_like(p[..., :1, :].mT)
        means = [rows.mean(-2, keepdim=True) for rows in (heads.k, heads.v)]
    else:
        seen = (p.amax(-2) > 0).to(p)[..., None]
        share = seen / seen.sum(-2, keepdim=True).clamp_min(1.0)
        means = [(share * rows).sum(-2, keepdim=True) for rows in (heads.k, heads.v)]
    k, v = (
        seen * (rows - mean if free else rows)
        for rows, mean in zip((heads.k, heads.v), means, strict=True)
    )
    scale = heads.scale.expand(p.shape[:2])[..., None, None]
    return Centred(p, seen, k, v, p @ v, scale)


def squared_distances(
    a: Float[Tensor, "*batch n d"],
    b: Float[Tensor, "*batch m d"],
    a2: Float[Tensor, "*batch n 1"],
    b2: Float[Tensor, "*batch m 1"],
) -> Float[Tensor, "*batch n m"]:
    """Return ||a_i - b_j||^2 from one product and the squares, raised by its rounding error."""
    # In units of (||a||^2 + ||b||^2) eps / 2, where 2 ||a|| ||b|| is at most 1: the product costs
    # d, the squares d, casting a and b 4, the sums 4, the factor 2; 2 d + 32 are added.
    up = 1 + rounding(a)
    return ((-2 * a) @ b.mT).add_(up * a2).add_(up * b2.mT)


def rounding(rows: Float[Tensor, "*batch n d"]) -> float:
    """Return more than the rounding error of <x, y>, in units of ||x|| ||y||."""
    # gamma_n = n u / (1 - n u), u = eps / 2, in any order of the sum (Higham, Accuracy and
    # Stability of Numerical Algorithms, 3.1). This is twice that and 32 u: what callers do beside.
    return (rows.shape[-1] + 16) * torch.finfo(rows.dtype).eps


def tiles(
    maps: Float[Tensor, "batch heads n m"], policy: Policy = POLICY
) -> Iterator[tuple[slice, slice]]:
    """Cut the maps of a layer into a few at a time: `tile_bytes`, or one that has more."""
    batch, heads, n, m = maps.shape
    size = n * m * maps.element_size()
    rows, some = (max(1, policy.tile_bytes // each) for each in (heads * size, size))
    for b in range(0, batch, rows):
        for h in range(0, heads, some):
            yield slice(b, b + rows), slice(h, h + some)


def projections(heads: Heads) -> tuple[Projection, Projection, Projection]:
    """Return the projections to q, k and v; a constant is a projection with W = 0."""
    source = heads.x if heads.x_kv is None else heads.x_kv
    return (
        heads.to_q or _zero(heads.x, heads.q),
        heads.to_k or _zero(source, heads.k),
        heads.to_v or _zero(source, heads.v),
    )


def _zero(x: Tensor, rows: Tensor) -> Projection:
    weight = x.new_zeros(rows.shape[1], x.shape[-1], rows.shape[-1])
    return Projection(weight=weight, bias=None, local=None, kind="constant")


def are_affine(heads: Heads) -> bool:
    """Whether the formulas for affine heads apply: no rotation, no norm, plain logits, no sink."""
    if heads.pairs is not None or heads.sink is not None:
        return False
    return all(projection.local is None for projection in projections(heads))


def local_map(projection: Projection) -> Float[Tensor, "#batch #heads #tokens d e"]:
    """Return G_i of Phi_i = G_i W^T; the identity, for all tokens at once, where it is affine."""
    if projection.local is not None:
        return projection.local
    width = projection.weight.shape[-1]
    return torch.eye(width, dtype=projection.weight.dtype, device=projection.weight.device)[
        None, None, None
    ]


def factor(projection: Projection) -> Float[Tensor, "heads 1 r e"]:
    """Return R with R^T R = W^T W: ||R y|| = ||W y||, and the width D leaves the computation."""
    return torch.linalg.qr(projection.weight, mode="r").R[:, None]
