"""The norms of the Jacobian's blocks of affine heads, from N x N kernels.

u_i = s W_K q_i, w = v_j - o_i, a_i = W_V^T u_i; beta_ij and t_i are as in `sharp`, next door.
Everything holds in any precision: what is returned is raised by its rounding error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    tiles,
)
from lipaudit.theory.heads import Heads, Projection
from lipaudit.theory.policy import POLICY, Policy
from lipaudit.theory.spectral.upper import gram_root, spectral_norm


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
    to_u: Float[Tensor, "heads d r"]
    to_a: Float[Tensor, "heads d dv"]
    to_z: Float[Tensor, "heads d d"]

    def per_value(self, size: Float[Tensor, " heads"]) -> Weights:
        """Return those of the heads with W_V divided by a number each."""
        factor = 1 / size.to(self.v)
        to_a = factor[:, None, None] * self.to_a
        return replace(self, v=factor * self.v, value=factor * self.value, to_a=to_a)


def weights_of(heads: Heads) -> Weights:
    """Meet the weights of affine heads, in float64, once for all samples."""
    to_q, to_k, to_v = (projection.to(torch.float64) for projection in projections(heads))
    q, k, v = (_augmented(projection) for projection in (to_q, to_k, to_v))
    return Weights(
        q=spectral_norm(q),
        k=spectral_norm(k),
        v=spectral_norm(v),
        # ||W_Q W_K^T|| = ||W_Q R^T|| for every R with R^T R = W_K^T W_K; with more it is more.
        a=spectral_norm(q @ gram_root(k).mT),
        value=spectral_norm(to_v.weight),
        # Not gram_root: ||a_i||^2 / ||u_i||^2 below needs ||u_i|| itself, no upper limit of it.
        to_u=factor(to_k)[:, 0].mT,
        to_a=to_k.weight.mT @ to_v.weight,
        # kappa enters t_i^2 = ||sum_j P_ij w_ij z_j^T||_F^2, which grows with z's Gram matrix.
        to_z=gram_root(to_q.weight).mT,
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
    # <u_i, u_i> = s^2 q_i^T W_K^T W_K q_i; a_i = W_V^T u_i = s (W_K^T W_V)^T q_i: D is gone.
    u = torch.linalg.vector_norm(heads.q @ (s * weights.to_u), dim=-1, keepdim=True)
    a = heads.q @ (s * weights.to_a)
    return AffineRows(
        wv=weights.value[:, None, None].expand_as(at.s),
        u=u,
        a=a,
        turn=(torch.linalg.vector_norm(a, dim=-1, keepdim=True) / u).square().nan_to_num(0.0),
        z=at.k @ (s * weights.to_z),
    )


class BlockLimits(NamedTuple):
    """Upper limits of the entries of P∘beta and diag t, and how far above the truth they can be.

    Row i of P∘beta keeps at least the share `kept` of its limits; t_i is less by at most `gap`.
    """

    t: Float[Tensor, "batch heads n"]
    blocks: Float[Tensor, "batch heads n m"]
    kept: Float[Tensor, "batch heads n"]
    gap: Float[Tensor, "batch heads n"]


def affine_blocks(at: Centred, rows: AffineRows, policy: Policy = POLICY) -> BlockLimits:
    """Bound the norms of all blocks of affine heads."""
    shape = at.p.shape
    sizes = (shape[:3], shape, shape[:3], shape[:3])
    limits = BlockLimits(*(at.p.new_empty(size) for size in sizes))
    for tile in tiles(at.p, policy):
        part, part_rows = at.pick(tile), rows.pick(tile)
        limits.t[tile], limits.gap[tile] = query_term(part, part_rows)
        beta, limits.kept[tile] = affine_beta(part, part_rows)
        torch.mul(beta, part.p, out=limits.blocks[tile])
    return limits


def split_excess(at: Centred, rows: AffineRows) -> Float[Tensor, "batch heads n m"]:
    """Return ||a/||u|| + ||u|| w||^2 - ||u||^2 ||w||^2."""
    # The cross term is 2 <a_i, w_ij> = 2 <a_i, v_j> - 2 <a_i, o_i>; ||a_i||^2 / ||u_i||^2 = turn.
    return ((2 * rows.a) @ at.v.mT).add_(rows.turn - 2 * (rows.a * at.o).sum(-1, keepdim=True))


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
    inner = at.p @ (at.v @ at.v.mT).sub_(at.v2.mT).mul_(rows.z @ rows.z.mT)
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


def affine_beta(
    at: Centred, rows: AffineRows
) -> tuple[Float[Tensor, "batch heads n m"], Float[Tensor, "batch heads n"]]:
    """Bound beta, and what share of the bound it has at least in each row.

    ||w||^2 is at most `moved` below its limit, so ||w|| at most moved / ||w||, and the split at
    most 2 `error`; beta itself is at least ||W_V||.
    """
    share, wv2 = rounding(at.v), rows.wv.square()
    # reach >= ||v_j||^2 + ||o_i||^2 >= ||w_ij||^2 / 2, and ||v_j|| + ||o_i|| <= (2 reach)^1/2.
    reach = at.v2.amax(-2, keepdim=True) + at.o2
    # The limit of ||w||^2 is its value + share (v^2 + o^2) + its error, which is no more again.
    moved = 2 * share * reach
    # split_excess: 2 <a, v - o> costs (2 d_v + 8) u ||a|| (||v|| + ||o||) with its casts, and
    # ||a|| = u_i turn^1/2; turn costs a few u of itself. share = (2 d_v + 32) u.
    error = share * (rows.u * (2 * rows.turn * reach).sqrt() + rows.turn)
    triangle = 2 * rows.wv * rows.u
    # x^1/2 - (x - m)^1/2 = m / (x^1/2 + (x - m)^1/2) <= min(m / x^1/2, m^1/2).
    shift = torch.minimum(moved / at.w2.amin(-1, keepdim=True).sqrt(), moved.sqrt())
    loss = torch.maximum(2 * error, triangle * shift) + rows.u.square() * moved + 2 * share * wv2
    # beta^2 = W_V^2 + u^2 w^2 + min(split excess, 2 W_V u w); each summand at its upper limit. The
    # last sums round by a few u of W_V^2 + u^2 w^2: w^2 keeps 20 u (v^2 + o^2) >= 10 u w^2 unused.
    excess = torch.minimum(split_excess(at, rows).add_(error), at.w2.sqrt().mul_(triangle))
    squares = excess.addcmul_(at.w2, rows.u.square()).add_((1 + share) * wv2)
    # true beta^2 >= squares - loss >= squares (1 - loss / W_V^2), since squares >= W_V^2.
    kept = (1 - share) * (1 - loss / wv2).clamp_min(0.0).sqrt()
    return squares.clamp_min_(0.0).sqrt_(), kept[..., 0]
