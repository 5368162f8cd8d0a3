"""What the bounds of affine heads are made of: their weights, u_i = s W_K q_i, and s T_i W_Q^T.

Everything holds in any precision: what is returned is raised by its rounding error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.bounds.centred import (
    Centred,
    Stack,
    are_affine,
    factor,
    projections,
    rounding,
)
from lipaudit.theory.heads import Heads, Projection
from lipaudit.theory.spectral.upper import gram_root, spectral_norm


@dataclass(frozen=True)
class Weights(Stack):
    """What comes of the weights of affine heads alone.

    Attributes:
        q, k, v, a: ||W_Q||, ||W_K||, ||W_V|| and ||W_Q W_K^T|| with their biases, [W; b^T] for W.
        value: ||W_V|| without.
        to_u: to what has the norm of W_K q.
        to_a: W_K^T W_V.
        to_inside: to what has the norm of W_K q on the range of W_Q, but for `left`.
        shared: at least ||W_V^T|| on the range of W_Q.
        to_z: to what has the inner products of W_Q k.
    """

    q: Float[Tensor, " heads"]
    k: Float[Tensor, " heads"]
    v: Float[Tensor, " heads"]
    a: Float[Tensor, " heads"]
    value: Float[Tensor, " heads"]
    to_u: Float[Tensor, "heads d r"]
    to_a: Float[Tensor, "heads d dv"]
    to_z: Float[Tensor, "heads d d"]
    to_inside: Float[Tensor, "heads d e"]
    shared: Float[Tensor, " heads"]
    left: Float[Tensor, " heads"]

    def per_value(self, size: Float[Tensor, " heads"]) -> Weights:
        """Return those of the heads with W_V divided by a number each."""
        factor = 1 / size.to(self.v)
        to_a = factor[:, None, None] * self.to_a
        sizes = {name: factor * getattr(self, name) for name in ("v", "value", "shared")}
        return replace(self, to_a=to_a, **sizes)


def weights_of(heads: Heads) -> Weights:
    """Meet the weights of affine heads, in float64, once for all samples."""
    to_q, to_k, to_v = (projection.to(torch.float64) for projection in projections(heads))
    q, k, v = (_augmented(projection) for projection in (to_q, to_k, to_v))
    value, (root, basis, left) = spectral_norm(to_v.weight), _basis(to_q.weight)
    if heads.x_kv is not None:  # queries move with another input, and meet no key or value
        basis = torch.zeros_like(to_k.weight[..., :1])
    return Weights(
        q=spectral_norm(q),
        k=spectral_norm(k),
        v=spectral_norm(v),
        # ||W_Q W_K^T|| = ||W_Q R^T|| for every R with R^T R = W_K^T W_K; with more it is more.
        a=spectral_norm(q @ gram_root(k).mT),
        value=value,
        # Not gram_root, which is an upper limit: `ball` divides by ||u_i||.
        to_u=factor(to_k)[:, 0].mT,
        to_a=to_k.weight.mT @ to_v.weight,
        # kappa enters t_i^2 = ||sum_j P_ij w_ij z_j^T||_F^2, which grows with z's Gram matrix.
        to_z=root.mT,
        to_inside=to_k.weight.mT @ basis,
        shared=spectral_norm(basis.mT @ to_v.weight) + left * value,
        left=torch.full_like(value, left),
    )


class KnownWeights:
    """Weights of a model's layers, met once for as long as they are the same memory, unchanged."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[Tensor], list[Any], Weights]] = {}

    def of(self, layer: int, heads: Heads) -> Weights | None:
        """Return those of a layer, in float64; None where its heads are not affine."""
        if not are_affine(heads):
            return None
        own = [p for p in (heads.to_q, heads.to_k, heads.to_v) if p is not None]
        parts = [t for p in own for t in (p.weight, p.bias) if t is not None]
        if any(t.is_inference() for t in parts):  # they keep no record of changes
            return weights_of(heads)
        memory = [(t.data_ptr(), t._version, t.shape, t.stride()) for t in parts]
        if layer not in self._known or self._known[layer][1] != memory:
            self._known[layer] = parts, memory, weights_of(heads)  # what is held is not reused
        return self._known[layer][2]


def _augmented(projection: Projection) -> Tensor:
    """W becomes [W; b^T]."""
    if projection.bias is None:
        return projection.weight
    return torch.cat([projection.weight, projection.bias[:, None]], 1)


def _basis(weight: Float[Tensor, "heads D d"]) -> tuple[Tensor, Tensor, float]:
    """Return R of `gram_root`, X with W = X R but for rounding, and what that can cost.

    ||X|| <= 1. Row by row X solves x (R + dR) = w with |dR| <= d u |R| (Higham, Theorem 8.5), so
    ||(W - X R) y|| <= d u ||X||_F ||R||_F ||y||, while ||R y||^2 is at least (D + d) eps ||W||_F^2
    ||y||^2, what `gram_root` adds: it is at most the share of ||R y|| that is returned.
    """
    root = gram_root(weight)
    basis = torch.linalg.solve_triangular(root, weight, upper=True, left=False)
    wide, narrow = weight.shape[-2:]
    eps = torch.finfo(weight.dtype).eps
    return root, basis, narrow**1.5 * eps / ((wide + narrow) * eps) ** 0.5


@dataclass(frozen=True)
class AffineRows(Stack):
    """What the bounds of affine heads are made of, beside their maps and values."""

    wv: Float[Tensor, "batch heads 1 1"]  # ||W_V||
    shared: Float[Tensor, "batch heads 1 1"]  # ||W_V^T X||, W_Q = X R, X^T X <= 1
    u: Float[Tensor, "batch heads n 1"]  # ||u_i||
    images: Float[Tensor, "batch heads n r"]  # u_i, in coordinates that keep inner products
    inside: Float[Tensor, "batch heads n 1"]  # ||X^T u_i||
    a: Float[Tensor, "batch heads n dv"]  # W_V^T u_i
    z: Float[Tensor, "batch heads m d"]  # s W_Q k_j, in coordinates that keep inner products


def affine_rows(heads: Heads, at: Centred, weights: Weights | None = None) -> AffineRows:
    """Return what the bounds of affine heads are made of."""
    weights = weights or weights_of(heads)
    s = heads.scale[..., None, None]
    # <u_i, u_l> = s^2 q_i^T W_K^T W_K q_l; a_i = W_V^T u_i = s (W_K^T W_V)^T q_i: D is gone.
    images = heads.q @ (s * weights.to_u)
    u = torch.linalg.vector_norm(images, dim=-1, keepdim=True)
    inside = torch.linalg.vector_norm(heads.q @ (s * weights.to_inside), dim=-1, keepdim=True)
    return AffineRows(
        wv=weights.value[:, None, None].expand_as(at.s),
        shared=weights.shared[:, None, None].expand_as(at.s),
        u=u,
        images=images,
        inside=inside + weights.left[:, None, None] * u,
        a=heads.q @ (s * weights.to_a),
        z=at.k @ (s * weights.to_z),
    )


def query_term(
    at: Centred, rows: AffineRows
) -> tuple[Float[Tensor, "batch heads n"], Float[Tensor, "batch heads n"]]:
    """Bound s ||T_i W_Q^T||_F by N x N kernels, no T_i formed; and by how much it can be less.

    With kappa_jl = <z_j, z_l> and ||v_j - v_l||^2 = 2 h_jl the square is
    sum_jl P_ij P_il kappa_jl (||w_ij||^2 - h_jl). With m_k = sum_j P_ij ||z_j|| ||v_j||^k its
    terms add up to at most m_1^2 + m_0 (2 m_2 + 2 m_1 ||o_i|| + m_0 ||o_i||^2), and each has
    relative errors below those of sums of N terms of products.
    """
    # <w_ij, w_il> = (||w_ij||^2 + ||w_il||^2) / 2 - h_jl. The sum is symmetric in j and l, so
    # either half may stand for both: ||w_il||^2 and, for -h_jl, <v_j, v_l> - ||v_l||^2.
    inner = at.p @ (at.gram - at.v2.mT).mul_(rows.z @ rows.z.mT)
    inner.addcmul_((at.p @ rows.z) @ rows.z.mT, at.w2)
    squares = inner.mul_(at.p).sum(-1)
    z, v2 = torch.linalg.vector_norm(rows.z, dim=-1), at.v2[..., 0]
    m0, m1, m2 = (torch.stack([z, z * v2.sqrt(), z * v2], -2) @ at.p.mT).unbind(-2)
    o2 = at.o2[..., 0]
    terms = m1.square() + m0 * (2 * m2 + 2 * m1 * o2.sqrt() + m0 * o2)
    # In units u = eps / 2 of terms, rounding(x of n columns) = 2 n + 32. The two sums over tokens
    # cost 2 m, kappa d, <v_j, v_l> d_v, casting P, P, z, z, v, v 6, other sums and products 20.
    # Downwards ||w||^2 counts too, which is raised by 2 d_v + 32 and off by 2 d_v + 10.
    channels = max(rounding(at.v), rounding(rows.z))
    over, under = ((rounding(at.p) + times * channels) * terms for times in (2, 3))
    upper, lower = ((squares + e).clamp_min(0.0).sqrt() for e in (over, -under))
    return upper, upper - lower
