"""A sharp upper bound of a head's Jacobian norm, at a point and on a ball around it.

Block (i, j) of the Jacobian is P_ij (Phi^v_j + w u^T), w = v_j - o_i, u = s Phi^k_j^T q_i, plus
s T_i Phi^q_i on the diagonal. The bound is the norm of the non-negative matrix B of bounds of
these blocks, B_ij = P_ij beta_ij + delta_ij t_i. Keys and values stand less their mean over the
keys that are seen: M(P_i) 1 = 0, so no constant matters, and less cancels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.attention import Heads, Projection
from lipaudit.theory.jacobian import dense_jacobian
from lipaudit.theory.norms import nonnegative_norm, spectral_norm

ENTRIES = 2**22
"""Numbers that a temporary may hold: 32 MB in float64."""

SMALL = 2**18
"""Entries of a head's dense Jacobian up to which its blocks are formed."""


TILE = 2**16
"""Entries of attention maps that chains of operations meet together: 0.5 MB stay in the cache."""

Tile = tuple[slice, slice]
"""Some batch rows, some heads."""


@dataclass(frozen=True)
class Centred:
    """What the bounds of a layer share, centred as the module says; unseen keys are zero rows."""

    p: Float[Tensor, "batch heads n m"]
    seen: Float[Tensor, "batch heads m 1"]
    k: Float[Tensor, "batch heads m d"]
    v: Float[Tensor, "batch heads m dv"]
    o: Float[Tensor, "batch heads n dv"]
    s: Float[Tensor, "batch heads 1 1"]

    def tile(self, tile: Tile) -> Centred:
        """Return some of the maps."""
        return Centred(*(getattr(self, field.name)[tile] for field in fields(self)))


def centred(heads: Heads) -> Centred:
    """Return the attention map of the heads and their centred keys, values and outputs."""
    p = heads.attention()
    seen = (p.amax(-2) > 0).to(p)[..., None]
    share = seen / seen.sum(-2, keepdim=True).clamp_min(1.0)
    k, v = (seen * (rows - (share * rows).sum(-2, keepdim=True)) for rows in (heads.k, heads.v))
    scale = heads.scale.expand(p.shape[:2])[..., None, None]
    return Centred(p, seen, k, v, p @ v, scale)


def tiles(maps: Float[Tensor, "batch heads n m"]) -> Iterator[Tile]:
    """Cut the maps of a layer into a few at a time, TILE entries of them where one has less."""
    batch, heads, n, m = maps.shape
    rows, some = (max(1, TILE // count) for count in (heads * n * m, n * m))
    for b in range(0, batch, rows):
        for h in range(0, heads, some):
            yield slice(b, b + rows), slice(h, h + some)


def maps(heads: Heads) -> tuple[Projection, Projection, Projection]:
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


def is_affine(heads: Heads) -> bool:
    """Whether q, k and v are affine in the tokens (or constant): no rotation, no norm."""
    return all(projection.local is None for projection in maps(heads))


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


def block_bound(heads: Heads, at: Centred, *, steps: int = 10) -> Float[Tensor, "batch heads"]:
    """Return ||B||, an upper bound of the Jacobian norm at X, for heads of every kind.

    beta_ij is the smaller of ||Phi^v_j|| + ||w|| ||u|| (the triangle inequality) and
    (||Phi^v_j||^2 + ||Phi^v_j u/||u|| + ||u|| w||^2)^1/2 (the input split along u and across it).
    t_i bounds s ||T_i Phi^q_i|| by a Frobenius (affine) or Schatten-4 norm. With another
    key/value input B = [P∘beta, diag t]. In small layers every block norm is exact.
    """
    if heads.x_kv is None and at.p[0, 0].numel() * heads.v.shape[-1] * heads.x.shape[-1] <= SMALL:
        return nonnegative_norm(exact_blocks(heads), steps)
    if is_affine(heads):
        t, blocks = _affine_blocks(heads, at)
    else:
        t, blocks = _local_query_term(heads, at), _local_beta(heads, at).mul_(at.p)
    if heads.x_kv is not None:
        return nonnegative_norm(torch.cat([blocks, torch.diag_embed(t)], -1), steps)
    blocks.diagonal(0, -2, -1).add_(t)
    return nonnegative_norm(blocks, steps)


def exact_blocks(heads: Heads) -> Float[Tensor, "batch heads n n"]:
    """Return ||J_ij||, the norms of the d_v x D blocks, of heads that read one input.

    Memory for the dense Jacobian of one batch row at a time.
    """
    n, dv = heads.q.shape[2], heads.v.shape[3]
    rows = (dense_jacobian(heads.row(b)) for b in range(heads.q.shape[0]))
    blocks = (j.reshape(*j.shape[:2], n, dv, n, -1).transpose(-3, -2) for j in rows)
    return torch.cat([spectral_norm(block) for block in blocks])


@dataclass(frozen=True)
class AffineRows:
    """What the block norms of affine heads are made of."""

    wv: Float[Tensor, "batch heads 1 1"]  # ||W_V||
    u: Float[Tensor, "batch heads n 1"]  # ||u_i||
    a: Float[Tensor, "batch heads n dv"]  # W_V^T u_i
    along: Float[Tensor, "batch heads n 1"]  # ||a_i / ||u_i||||^2 - 2 <a_i, o_i>
    images: Float[Tensor, "batch heads m d"]  # k_j W_Q^T W_Q
    o: Float[Tensor, "batch heads n dv"]
    v: Float[Tensor, "batch heads m dv"]

    @cached_property
    def w2(self) -> Float[Tensor, "batch heads n m"]:
        """||v_j - o_i||^2 rounded up."""
        return squared_distances(self.o, self.v)

    def tile(self, tile: Tile) -> AffineRows:
        """Return those of some of the maps."""
        return AffineRows(*(getattr(self, field.name)[tile] for field in fields(self)))


def affine_rows(heads: Heads, at: Centred) -> AffineRows:
    """Return what the block norms of affine heads are made of."""
    to_q, to_k, to_v = maps(heads)
    q = at.s * heads.q
    u = torch.linalg.vector_norm(q @ factor(to_k)[:, 0].mT, dim=-1, keepdim=True)
    a = q @ (to_k.weight.mT @ to_v.weight)
    along = (a / u).square().sum(-1, keepdim=True).nan_to_num(0.0)
    return AffineRows(
        wv=spectral_norm(to_v.weight)[:, None, None].expand_as(at.s),
        u=u,
        a=a,
        along=along - 2 * (a * at.o).sum(-1, keepdim=True),
        images=at.k @ (to_q.weight.mT @ to_q.weight),
        o=at.o,
        v=at.v,
    )


def _affine_blocks(heads: Heads, at: Centred) -> tuple[Tensor, Tensor]:
    """Return t and P∘beta of affine heads."""
    rows = affine_rows(heads, at)
    t, blocks = torch.empty_like(at.o[..., 0]), torch.empty_like(at.p)
    for tile in tiles(at.p):
        some, mine = at.tile(tile), rows.tile(tile)
        t[tile] = _image_norms(some, mine)
        torch.mul(_affine_beta(some, mine), some.p, out=blocks[tile])
    return heads.scale.abs()[..., None] * t, blocks


def squared_distances(
    a: Float[Tensor, "*batch n d"], b: Float[Tensor, "*batch m d"]
) -> Float[Tensor, "*batch n m"]:
    """Return ||a_i - b_j||^2 from one product, raised by more than its rounding error."""
    up = 1 + 4 * (a.shape[-1] + 4) * torch.finfo(a.dtype).eps
    a2, b2 = (up * rows.square().sum(-1, keepdim=True) for rows in (a, b))
    return ((-2 * a) @ b.mT).add_(a2).add_(b2.mT)


def split_excess(at: Centred, rows: AffineRows) -> Float[Tensor, "batch heads n m"]:
    """Return ||a/||u|| + ||u|| w||^2 - ||u||^2 ||w||^2."""
    return ((2 * rows.a) @ at.v.mT).add_(rows.along)


def affine_query_term(
    heads: Heads, at: Centred, rows: AffineRows
) -> Float[Tensor, "batch heads n"]:
    """Return s ||T_i W_Q^T||_F from N x N kernels, no T_i formed.

    With kappa_jl = k_j W_Q^T W_Q k_l^T and ||v_j - v_l||^2 = 2 h_jl the square is
    s^2 sum_jl P_ij P_il kappa_jl (||w_ij||^2 - h_jl), raised by its rounding error.
    """
    return heads.scale.abs()[..., None] * _image_norms(at, rows)


def _image_norms(at: Centred, rows: AffineRows) -> Tensor:
    """Return ||T_i W_Q^T||_F."""
    kappa = rows.images @ at.k.mT
    v2 = at.v.square().sum(-1, keepdim=True).mT
    largest = v2.amax(-1) * kappa.diagonal(0, -2, -1).amax(-1, keepdim=True)
    rounding = 16 * kappa.shape[-1] * torch.finfo(kappa.dtype).eps * largest
    inner = at.p @ (at.v @ at.v.mT).sub_(v2).mul_(kappa)
    inner.addcmul_((at.p @ at.k) @ rows.images.mT, rows.w2)
    squares = inner.mul_(at.p).sum(-1).clamp_min(0.0) + rounding * at.p.sum(-1)
    return squares.sqrt()


def _affine_beta(at: Centred, rows: AffineRows) -> Tensor:
    excess = split_excess(at, rows)
    triangle = rows.w2.sqrt().mul_(2 * rows.wv * rows.u)
    torch.minimum(excess, triangle, out=excess)
    return excess.addcmul_(rows.w2, rows.u.square()).add_(rows.wv.square()).sqrt_()


def value_norms(heads: Heads) -> Float[Tensor, "#batch heads #m"]:
    """Return ||Phi^v_j|| of every key token, or of all at once where values are affine."""
    to_v = maps(heads)[2]
    return spectral_norm(local_map(to_v) @ factor(to_v).mT)


def _local_beta(heads: Heads, at: Centred) -> Tensor:
    """Return beta of heads whose q, k or v are rotated or normalised, some keys at a time."""
    _, to_k, to_v = maps(heads)
    along = factor(to_k) @ local_map(to_k).mT
    turn = local_map(to_v) @ (to_v.weight.mT @ to_k.weight)[:, None] @ local_map(to_k).mT
    norms = value_norms(heads)
    beta = torch.empty_like(at.p)
    for j in _chunks(
        at.p.shape[-1], at.p[..., 0].numel() * (along.shape[-2] + 3 * turn.shape[-2])
    ):
        u, a = (at.s[..., None] * _images(_some(m, j), heads.q) for m in (along, turn))
        gap = at.v[..., j, :, None] - at.o.mT[:, :, None]
        beta[..., j] = _beta(u, a, gap, _some(norms, j)[..., None]).mT
    return beta


def _images(stack: Tensor, q: Tensor) -> Tensor:
    """Apply the matrix of every token to every query: (..., tokens, r, n)."""
    flat = stack.flatten(2, 3) @ q.mT
    return flat.reshape(*flat.shape[:2], *stack.shape[2:4], -1)


def _beta(u: Tensor, a: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    """Bound every block norm given u, a = Phi^v u and w, vectors in the second last axis."""
    u2, w2 = u.square().sum(-2), w.square().sum(-2)
    split = (a.square().sum(-2) / u2).nan_to_num(0.0) + 2 * (a * w).sum(-2)
    triangle = 2 * norm * (u2 * w2).sqrt()
    return (norm.square() + u2 * w2 + torch.minimum(split, triangle)).sqrt()


def _local_query_term(heads: Heads, at: Centred) -> Tensor:
    """Return s ||T_i Phi^q_i|| of every query in the Schatten-4 norm, some queries at a time."""
    to_q = maps(heads)[0]
    phi = local_map(to_q) @ factor(to_q).mT
    outer = (at.v[..., :, None] * at.k[..., None, :]).flatten(-2)
    means = at.p @ at.k
    t = torch.empty_like(at.p[..., 0])
    for i in _chunks(t.shape[-1], 2 * t[..., 0].numel() * outer.shape[-1]):
        offset = at.o[..., i, :, None] * means[..., i, None, :]
        products = (at.p[..., i, :] @ outer).reshape(offset.shape) - offset
        images = products @ _some(phi, i)
        t[..., i] = torch.linalg.matrix_norm(images @ images.mT).sqrt()
    return at.s[..., 0] * t


def _some(per_token: Tensor, chunk: slice) -> Tensor:
    """Take some of the tokens (third axis), or the one that stands for all."""
    return per_token if per_token.shape[2] == 1 else per_token[:, :, chunk]


def _chunks(total: int, entries: int) -> Iterator[slice]:
    """Cut `total` items of `entries` numbers each so that a chunk stays within ENTRIES."""
    size = max(1, ENTRIES // max(1, entries))
    return (slice(start, start + size) for start in range(0, total, size))
