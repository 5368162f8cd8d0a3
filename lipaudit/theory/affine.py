"""The norms of the Jacobian's blocks of affine heads, from N x N kernels.

u_i = s W_K q_i, w = v_j - o_i, a_i = W_V^T u_i; beta_ij and t_i are as in `lipaudit.theory.sharp`.
Everything holds in any precision: what is returned is raised by its rounding error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.attention import Heads, Projection
from lipaudit.theory.centred import Centred, Stack, factor, maps, rounding, tiles
from lipaudit.theory.norms import gram_root, spectral_norm


@dataclass(frozen=True)
class Weights(Stack):
    """What comes of the weights of affine heads alone.

    Attributes:
        q, k, v, a: ||W_Q||, ||W_K||, ||W_V|| and ||W_Q W_K^T|| with their biases, [W; b^T] for W.
        value: ||W_V|| without.
        to_u: to what has the norm of W_K q.
        to_a: W_K^T W_V.
        to_z: to what has the inner products of W_Q k.
    """

    q: Float[Tensor, " heads"]
    k: Float[Tensor, " heads"]
    v: Float[Tensor, " heads"]
    a: Float[Tensor, " heads"]
    value: Float[Tensor, " heads"]
    to_u: Float[Tensor, "heads d d"]
    to_a: Float[Tensor, "heads d dv"]
    to_z: Float[Tensor, "heads d d"]


def weights_of(heads: Heads) -> Weights:
    """Meet the weights of affine heads, once for all samples."""
    to_q, to_k, to_v = maps(heads)
    q, k, v = (_augmented(projection) for projection in (to_q, to_k, to_v))
    return Weights(
        q=spectral_norm(q),
        k=spectral_norm(k),
        v=spectral_norm(v),
        a=spectral_norm(q @ gram_root(k).mT),
        value=spectral_norm(to_v.weight),
        to_u=factor(to_k)[:, 0].mT,
        to_a=to_k.weight.mT @ to_v.weight,
        to_z=gram_root(to_q.weight).mT,
    )


def _augmented(projection: Projection) -> Tensor:
    """W becomes [W; b^T]."""
    if projection.bias is None:
        return projection.weight
    return torch.cat([projection.weight, projection.bias[:, None]], 1)


@dataclass(frozen=True)
class AffineRows(Stack):
    """What the block norms of affine heads are made of."""

    wv: Float[Tensor, "batch heads 1 1"]  # ||W_V||
    u: Float[Tensor, "batch heads n 1"]  # ||u_i||
    a: Float[Tensor, "batch heads n dv"]  # W_V^T u_i
    turn: Float[Tensor, "batch heads n 1"]  # ||a_i||^2 / ||u_i||^2
    z: Float[Tensor, "batch heads m d"]  # s W_Q k_j, in coordinates that keep inner products


def affine_rows(heads: Heads, at: Centred, weights: Weights | None = None) -> AffineRows:
    """Return what the block norms of affine heads are made of."""
    weights = weights or weights_of(heads)
    s = heads.scale[..., None, None]
    u = torch.linalg.vector_norm(heads.q @ (s * weights.to_u), dim=-1, keepdim=True)
    a = heads.q @ (s * weights.to_a)
    return AffineRows(
        wv=weights.value[:, None, None].expand_as(at.s),
        u=u,
        a=a,
        turn=(torch.linalg.vector_norm(a, dim=-1, keepdim=True) / u).square().nan_to_num(0.0),
        z=at.k @ (s * weights.to_z),
    )


class Blocks(NamedTuple):
    """Limits of the entries of B = P∘beta + diag t, from one side."""

    t: Float[Tensor, "batch heads n"]
    blocks: Float[Tensor, "batch heads n m"]


def affine_blocks(at: Centred, rows: AffineRows, *, both: bool = False) -> list[Blocks]:
    """Bound the norms of all blocks of affine heads from above, or from both sides."""
    ends = [
        Blocks(torch.empty_like(at.o[..., 0]), torch.empty_like(at.p)) for _ in range(1 + both)
    ]
    for tile in tiles(at.p):
        some, mine = at.pick(tile), rows.pick(tile)
        found = query_term(some, mine), affine_beta(some, mine)
        for end, t, beta in zip(ends, *found, strict=False):
            end.t[tile] = t
            torch.mul(beta, some.p, out=end.blocks[tile])
    return ends


def split_excess(at: Centred, rows: AffineRows) -> Float[Tensor, "batch heads n m"]:
    """Return ||a/||u|| + ||u|| w||^2 - ||u||^2 ||w||^2."""
    return ((2 * rows.a) @ at.v.mT).add_(rows.turn - 2 * (rows.a * at.o).sum(-1, keepdim=True))


def query_term(
    at: Centred, rows: AffineRows
) -> tuple[Float[Tensor, "batch heads n"], Float[Tensor, "batch heads n"]]:
    """Bound s ||T_i W_Q^T||_F from both sides by N x N kernels, no T_i formed.

    With kappa_jl = <z_j, z_l> and ||v_j - v_l||^2 = 2 h_jl the square is
    sum_jl P_ij P_il kappa_jl (||w_ij||^2 - h_jl). With m_k = sum_j P_ij ||z_j|| ||v_j||^k its
    terms add up to at most m_1^2 + m_0 (2 m_2 + 2 m_1 ||o_i|| + m_0 ||o_i||^2), and each has
    relative errors below those of sums of N terms of products.
    """
    inner = at.p @ (at.v @ at.v.mT).sub_(at.v2.mT).mul_(rows.z @ rows.z.mT)
    inner.addcmul_((at.p @ rows.z) @ rows.z.mT, at.w2)
    squares = inner.mul_(at.p).sum(-1)
    z, v2 = torch.linalg.vector_norm(rows.z, dim=-1), at.v2[..., 0]
    m0, m1, m2 = (torch.stack([z, z * v2.sqrt(), z * v2], -2) @ at.p.mT).unbind(-2)
    o2 = at.o2[..., 0]
    terms = m1.square() + m0 * (2 * m2 + 2 * m1 * o2.sqrt() + m0 * o2)
    error = (rounding(at.p) + 2 * rounding(at.v)) * terms
    upper, lower = ((squares + e).clamp_min(0.0).sqrt() for e in (error, -error))
    return upper, lower


def affine_beta(at: Centred, rows: AffineRows) -> Iterator[Float[Tensor, "batch heads n m"]]:
    """Bound beta from above, then from below."""
    share, longest = rounding(at.v), at.v2.amax(-2, keepdim=True)
    error = share * (rows.u * rows.turn.sqrt() * (longest.sqrt() + at.o2.sqrt()) + rows.turn)
    excess = split_excess(at, rows)
    yield _beta(rows, excess + error, at.w2, 1 + share)
    least = (at.w2 - 2 * share * (longest + at.o2)).clamp_min_(0.0)
    yield _beta(rows, excess.sub_(error), least, 1 - share)


def _beta(rows: AffineRows, excess: Tensor, w2: Tensor, raised: float) -> Tensor:
    triangle = w2.sqrt().mul_(2 * rows.wv * rows.u)
    torch.minimum(excess, triangle, out=excess)
    squares = excess.addcmul_(w2, rows.u.square()).add_(raised * rows.wv.square())
    return squares.clamp_min_(0.0).sqrt_()
