"""A sharp upper bound of a head's Jacobian norm, at a point.

The norm of a block matrix is at most that of the matrix of its blocks' norms. For small heads of
every kind, and for affine ones, the blocks are those of J J^T, where what moves through values,
keys and queries hardly meets: see `gram`, next door. For large heads of other kinds they are those
of J: block (i, j) is P_ij (Phi^v_j + w u^T), w = v_j - o_i, u = s Phi^k_j^T q_i, plus
s T_i Phi^q_i on the diagonal; their bounds are B_ij = P_ij beta_ij + delta_ij t_i. Keys and values
stand less their mean over the keys that are seen: M(P_i) 1 = 0, so no constant matters, and less
cancels. With other logits b_ij stands for s q_i, and a_ij for s k_j in
s T_i = sum_j P_ij w a_ij^T: see `exact.attend`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.bounds.gram import gram_bound
from lipaudit.theory.bounds.ingredients import (
    Centred,
    Ingredients,
    are_affine,
    factor,
    local_map,
    projections,
    value_norms,
)
from lipaudit.theory.bounds.yudin import theorem3
from lipaudit.theory.exact.attend import (
    Anchored,
    anchor_outputs,
    join_rows,
    key_gradients,
    query_gradients,
)
from lipaudit.theory.exact.head_norms import dense_jacobian
from lipaudit.theory.heads import Heads
from lipaudit.theory.spectral.upper import nonnegative_norm, spectral_norm


def sharp(known: Ingredients) -> Float[Tensor, "batch heads"]:
    """Return the smaller of `block_bound` and Theorem 3, for heads of every kind."""
    return torch.minimum(block_bound(known), known.once(theorem3))


def block_bound(known: Ingredients, steps: int = 10) -> Float[Tensor, "batch heads"]:
    """Return an upper bound of the Jacobian norm at X, for heads of every kind.

    Small heads: the root of the norm of the matrix of all norms of blocks of J J^T. Affine ones:
    `gram_bound`. Others: ||B||, where beta_ij is the smaller of ||Phi^v_j|| + ||w|| ||u|| (the
    triangle inequality) and (||Phi^v_j||^2 + ||Phi^v_j u/||u|| + ||u|| w||^2)^1/2 (the input split
    along u and across it), and t_i bounds s ||T_i Phi^q_i|| by a Schatten-4 norm. With another
    key/value input B = [P∘beta, diag t].
    """
    heads, at = known.heads, known.at
    joint = heads.x_kv is None
    entries = at.p[0, 0].numel() * heads.v.shape[-1] * heads.x.shape[-1]
    if joint and entries <= heads.policy.dense_entries:
        norms, size = exact_blocks(heads)
        return size * nonnegative_norm(norms, steps).sqrt()
    if are_affine(heads):
        return gram_bound(at, known.rows, joint=joint, policy=heads.policy)
    largest = _anchor_rows(heads, at)
    blocks = _local_beta(heads, at, largest).mul_(at.p)
    t = _local_query_term(heads, at, largest)
    return nonnegative_norm(_matrix(t, blocks, joint), steps)


def _anchor_rows(heads: Heads, at: Centred) -> Anchored:
    """Return what the largest entry of each row contributes, some queries at a time."""
    sink = heads.sink_share()
    queries = [*heads.policy.chunks(at.p.shape[2], at.p[:, :, 0].numel())]
    shares = [None if sink is None else sink[:, :, i] for i in queries]
    blocks = zip(queries, shares, strict=True)
    return join_rows([anchor_outputs(at.p[:, :, i], at.v, share) for i, share in blocks])


def _matrix(t: Tensor, blocks: Tensor, joint: bool) -> Tensor:
    """Return B, where queries and keys read one input or two."""
    if not joint:
        # In the precision of the blocks, from which the norm knows how they were rounded.
        return torch.cat([blocks, torch.diag_embed(t).to(blocks)], -1)
    # ||J_ii|| <= P_ii beta_ii + t_i; dX_q and dX_kv are other columns where they are two inputs.
    blocks.diagonal(0, -2, -1).add_(t)
    return blocks


def exact_blocks(
    heads: Heads,
) -> tuple[Float[Tensor, "batch heads n n"], Float[Tensor, "batch heads"]]:
    """Return the norms of the d_v x d_v blocks of J J^T / c^2, and c, the largest entry of J.

    Memory for the dense Jacobian of one batch row at a time.
    """
    n, dv = heads.q.shape[2], heads.v.shape[3]
    norms, sizes = [], []
    for b in range(heads.q.shape[0]):
        j = dense_jacobian(heads.row(b)).flatten(0, 1)
        # In units of its largest entry no power of J overflows.
        size = j.abs().amax((-2, -1)).clamp_min(torch.finfo(j.dtype).tiny)
        j = j / size[:, None, None]
        blocks = (j @ j.mT).reshape(-1, n, dv, n, dv).transpose(-3, -2)
        norms.append(spectral_norm(blocks))
        sizes.append(size)
    return torch.stack(norms), torch.stack(sizes)


def _local_beta(heads: Heads, at: Centred, rows: Anchored) -> Tensor:
    """Return beta of heads whose q, k or v are rotated or normalised, some keys at a time."""
    _, to_k, to_v = projections(heads)
    # ||u_ij|| = s ||R_K G_j^T q_i||, R_K^T R_K = W_K^T W_K; a_ij = Phi^v_j u_ij has d_v channels.
    root, mixed = factor(to_k), (to_v.weight.mT @ to_k.weight)[:, None]
    keys, values = local_map(to_k), local_map(to_v)
    norms = value_norms(heads)
    # Rounding entries to single precision costs u: `nonnegative_norm` leaves 3 (n + m) u / 2 over.
    long = at.p.shape[-2] * at.p.shape[-1] > heads.policy.map_limit
    beta = torch.empty_like(at.p, dtype=torch.float32 if long else at.p.dtype)
    per_key = at.p[..., 0].numel() * (root.shape[-2] + 3 * mixed.shape[-2])
    for j in heads.policy.chunks(at.p.shape[-1], per_key):
        along, turn = root @ _some(keys, j).mT, _some(values, j) @ mixed @ _some(keys, j).mT
        if heads.pairs is None:
            u, a = (at.s[..., None] * _images(m, heads.q) for m in (along, turn))
        else:
            b = query_gradients(heads, j).mT
            u, a = (m @ b for m in (along, turn))
        gap = _gaps(at.v, rows, j)
        beta[..., j] = _beta(u, a, gap, _some(norms, j)[..., None]).mT
    return beta


def _gaps(v: Tensor, rows: Anchored, keys: slice) -> Tensor:
    """Return v_j - o_i of some keys: (batch, heads, keys, d_v, n)."""
    own = rows.key.mT == torch.arange(v.shape[2], device=v.device)[keys, None]
    gaps = v[..., keys, :, None] - rows.o.mT[:, :, None]
    return torch.where(own[:, :, :, None], rows.gap.mT[:, :, None], gaps)


def _images(stack: Tensor, q: Tensor) -> Tensor:
    """Apply the matrix of every token to every query: (..., tokens, r, n)."""
    flat = stack.flatten(2, 3) @ q.mT
    return flat.reshape(*flat.shape[:2], *stack.shape[2:4], -1)


def _beta(u: Tensor, a: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    """Bound every block norm given u, a = Phi^v u and w, vectors in the second last axis."""
    u2, w2 = u.square().sum(-2), w.square().sum(-2)
    # x = c u / ||u|| + y, y across u: (Phi + w u^T) x = c (Phi u / ||u|| + ||u|| w) + Phi y is at
    # most (||Phi u / ||u|| + ||u|| w||^2 + ||Phi||^2)^1/2 ||x|| by Cauchy-Schwarz. `split` and
    # `triangle` are the squares of the two limits less ||Phi||^2 + ||u||^2 ||w||^2.
    split = (a.square().sum(-2) / u2).nan_to_num(0.0) + 2 * (a * w).sum(-2)
    triangle = 2 * norm * (u2 * w2).sqrt()
    return (norm.square() + u2 * w2 + torch.minimum(split, triangle)).sqrt()


def _local_query_term(heads: Heads, at: Centred, rows: Anchored) -> Tensor:
    """Return s ||T_i Phi^q_i|| of every query in the Schatten-4 norm, some queries at a time."""
    to_q = projections(heads)[0]
    phi = local_map(to_q) @ factor(to_q).mT
    if heads.pairs is not None:
        return _pair_query_term(heads, at, rows, phi)
    # T_i = sum_j P_ij (v_j - o_i) k_j^T = c_ia k_a^T + sum_{j != a} P_ij v_j k_j^T
    # - o_i (sum_{j != a} P_ij k_j)^T.
    outer = (at.v[..., :, None] * at.k[..., None, :]).flatten(-2)
    own = at.k.gather(2, rows.key.expand(-1, -1, -1, at.k.shape[-1]))
    t = torch.empty_like(at.p[..., 0])
    per_query = t[..., 0].numel() * max(2 * outer.shape[-1], at.p.shape[-1])
    for i in heads.policy.chunks(t.shape[-1], per_query):
        others = at.p[:, :, i].scatter(-1, rows.key[:, :, i], 0.0)
        offset = rows.o[..., i, :, None] * (others @ at.k)[..., None, :]
        offset -= rows.c[..., i, :, None] * own[..., i, None, :]
        products = (others @ outer).reshape(offset.shape) - offset
        images = products @ _some(phi, i)
        # ||A|| <= (sum sigma^4)^1/4 = ||A A^T||_F^1/2, at most rank^1/4 above it.
        t[..., i] = torch.linalg.matrix_norm(images @ images.mT).sqrt()
    return at.s[..., 0] * t


def _pair_query_term(heads: Heads, at: Centred, rows: Anchored, phi: Tensor) -> Tensor:
    """The same of other logits, where the vectors a_ij of one query are its own."""
    (m, d), dv = heads.k.shape[2:], at.v.shape[-1]
    t = torch.empty_like(at.p[..., 0])
    for i in heads.policy.chunks(t.shape[-1], t[..., 0].numel() * m * (2 * d + dv)):
        c = at.p[:, :, i, :, None] * (at.v[:, :, None] - rows.o[:, :, i, None])
        c.scatter_(3, rows.key[:, :, i, :, None].expand(-1, -1, -1, -1, dv), rows.c[:, :, i, None])
        images = c.mT @ key_gradients(heads, i) @ _some(phi, i)
        t[..., i] = torch.linalg.matrix_norm(images @ images.mT).sqrt()
    return t


def _some(per_token: Tensor, chunk: slice) -> Tensor:
    """Take some of the tokens (third axis), or the one that stands for all."""
    return per_token if per_token.shape[2] == 1 else per_token[:, :, chunk]
