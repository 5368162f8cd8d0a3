"""The norms of blocks that `sharp` is made of.

The norm of a block matrix is at most that of the matrix of its blocks' norms. The blocks are

* of small heads of every kind: those of J J^T, exact;
* of affine heads: those of J J^T, bounded, where what moves through values, keys and queries
  hardly overlaps (`gram_bound`);
* of large heads of other kinds: those of J, bounded (`_bound_local_blocks`).

Keys and values stand less their mean over the keys that are seen: M(P_i) 1 = 0, so no constant
matters, and less cancels. What is returned is raised by its rounding error. u in comments on
rounding is the unit roundoff, eps / 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import matrix_norm, vector_norm

from lipaudit.theory import attend, matrix_norms, products
from lipaudit.theory.heads import Heads, are_affine, factor, local_map, projections
from lipaudit.theory.ingredients import (
    Centred,
    Ingredients,
    rounding,
    sum_spread,
    value_norms,
)

if TYPE_CHECKING:
    from jaxtyping import Float

    PerHead = Float[Tensor, "batch heads"]
    Rows = Float[Tensor, "batch heads n"]
    Maps = Float[Tensor, "batch heads n m"]
    OfHeads = Float[Tensor, "batch heads 1 1"]
    OfRows = Float[Tensor, "batch heads n 1"]


@dataclass(frozen=True)
class AffineRows:
    """Norms and inner products of u_i, a_i and z_j, which the bounds of affine heads need."""

    wv: OfHeads  # ||W_V||
    shared: OfHeads  # ||W_V^T X||, W_Q = X R, X^T X <= 1
    u: OfRows  # ||u_i||
    images: Float[Tensor, "batch heads n r"]  # u_i, in coordinates that keep inner products
    inside: OfRows  # ||X^T u_i||
    a: Float[Tensor, "batch heads n dv"]  # W_V^T u_i
    z: Float[Tensor, "batch heads m d"]  # s W_Q k_j, in coordinates that keep inner products


def affine_rows(ingredients: Ingredients) -> AffineRows:
    """Return the norms and inner products of u_i, a_i and z_j of affine heads.

    u_i = s W_K q_i is the gradient of the logits of query i, as a direction of the tokens;
    a_i = W_V^T u_i, and z_j = s W_Q k_j.
    """
    at = ingredients.at
    weights = ingredients.weights
    q = ingredients.heads.q
    s = ingredients.heads.scale[..., None, None]
    # <u_i, u_l> = s^2 q_i^T W_K^T W_K q_l and a_i = s (W_K^T W_V)^T q_i need products of weights
    # only, so no row of the width D of tokens is formed.
    images = q @ (s * weights.to_u)
    u = vector_norm(images, dim=-1, keepdim=True)
    projected = q @ (s * weights.to_inside)
    inside = vector_norm(projected, dim=-1, keepdim=True)
    # The basis X of the range of W_Q may be off by the share `left` of ||u_i||.
    inside = inside + weights.left[:, None, None] * u
    return AffineRows(
        wv=weights.value[:, None, None].expand_as(at.s),
        shared=weights.shared[:, None, None].expand_as(at.s),
        u=u,
        images=images,
        inside=inside,
        a=q @ (s * weights.to_a),
        z=at.k @ (s * weights.to_z),
    )


def query_term(at: Centred, rows: AffineRows) -> Rows:
    """Bound s ||T_i W_Q^T||_F, how far query i moves O, by N x N kernels: no T_i is formed.

    s T_i W_Q^T = sum_j P_ij w_ij z_j^T, w_ij = v_j - o_i. With kappa_jl = <z_j, z_l> and
    ||v_j - v_l||^2 = 2 h_jl its square is sum_jl P_ij P_il kappa_jl (||w_ij||^2 - h_jl).
    """
    # <w_ij, w_il> = (||w_ij||^2 + ||w_il||^2) / 2 - h_jl. The sum is symmetric in j and l, so
    # ||w_il||^2 may stand for both squares, and <v_j, v_l> - ||v_l||^2 for -h_jl.
    kappa = rows.z @ rows.z.mT
    inner = at.gram - at.v2.mT
    inner = at.p @ inner.mul_(kappa)
    totals = (at.p @ rows.z) @ rows.z.mT  # sum_j P_ij kappa_jl
    inner.addcmul_(totals, at.w2)
    squares = inner.mul_(at.p).sum(-1)
    error = _bound_query_rounding(at, rows)
    return (squares + error).clamp_min(0.0).sqrt()


def _bound_query_rounding(at: Centred, rows: AffineRows) -> Rows:
    """Bound the rounding error of the square that `query_term` computes.

    With m_k = sum_j P_ij ||z_j|| ||v_j||^k its terms add up to at most
    m_1^2 + m_0 (2 m_2 + 2 m_1 ||o_i|| + m_0 ||o_i||^2), and each has relative errors below those
    of sums of N terms of products.
    """
    z = vector_norm(rows.z, dim=-1)
    v2 = at.v2[..., 0]
    o2 = at.o2[..., 0]
    factors = torch.stack([z, z * v2.sqrt(), z * v2], -2)
    m0, m1, m2 = (factors @ at.p.mT).unbind(-2)
    # m_1^2 + m_0 (2 m_2 + 2 m_1 ||o_i|| + m_0 ||o_i||^2)
    behind_m0 = 2 * m2 + 2 * m1 * o2.sqrt() + m0 * o2
    terms = m1.square() + m0 * behind_m0
    # In units u = eps / 2 of terms, rounding(x of n columns) = 2 n + 32. The two sums over tokens
    # cost 2 m, kappa d, <v_j, v_l> d_v, other sums and products 20.
    channels = max(rounding(at.v), rounding(rows.z))
    return (rounding(at.p) + 2 * channels) * terms


CLEAR = 0.01
"""Below this ratio of a sum to its terms, cancellation has removed too many of its digits."""

STEPS = 6
"""Power steps to the vector that proves ||M||: more would tighten it by less than they cost."""

KEYS_MATTER = 0.25
"""Smallest ratio of B B^T to A A^T for which tighter block norms are worth their cost."""


def bound_by_blocks(ingredients: Ingredients) -> PerHead:
    """Return an upper bound of the Jacobian norm at X, for heads of every kind.

    Small heads: from the exact norms of the blocks of J J^T. Affine ones: `gram_bound`. Others:
    ||B|| of the matrix of `_bound_local_blocks`.
    """
    heads = ingredients.heads
    joint = heads.x_kv is None
    pairs = ingredients.at.p[0, 0].numel()
    entries = pairs * heads.v.shape[-1] * heads.x.shape[-1]  # of J of one head on one batch row
    if joint and entries <= heads.policy.dense_entries:
        return _bound_dense_blocks(heads)
    if are_affine(heads):
        return gram_bound(ingredients.at, affine_rows(ingredients), joint=joint)
    blocks = _bound_local_blocks(heads, ingredients.at, joint=joint)
    return matrix_norms.nonnegative_norm(blocks)


def _bound_dense_blocks(heads: Heads) -> Tensor:
    """Bound ||J|| by the norms of the d_v x d_v blocks of J J^T, J of one batch row at a time."""
    n = heads.q.shape[2]
    dv = heads.v.shape[3]
    norms = []
    sizes = []
    for b in range(len(heads.q)):
        jacobian = products.dense_jacobian(heads.row(b)).flatten(0, 1)  # (heads, n dv, inputs)
        # In units of its largest entry no power of J overflows.
        largest = jacobian.abs().amax((-2, -1))
        size = largest.clamp_min(torch.finfo(jacobian.dtype).tiny)
        jacobian = jacobian / size[:, None, None]
        gram = jacobian @ jacobian.mT
        blocks = gram.reshape(-1, n, dv, n, dv)
        blocks = blocks.transpose(-3, -2)  # (heads, n, n, dv, dv)
        norms.append(matrix_norms.spectral_norm(blocks))
        sizes.append(size)
    squares = matrix_norms.nonnegative_norm(torch.stack(norms))
    return torch.stack(sizes) * squares.sqrt()


# Affine heads: J = A + B + C, what moves through values, keys and queries. With w_ij = v_j - o_i
# and F_i the matrix of columns P_ij w_ij (it is V^T M(P_i)),
#
#     A dX = P dX W_V,    (B dX)_i = F_i dX u_i,    (C dX)_i = s T_i W_Q^T dx_i,    T_i = F_i K.
#
# Block (i, l) of A A^T is (P P^T)_il Phi Phi^T; that of B B^T is <u_i, u_l> F_i F_l^T, where
# ||F_i F_l^T|| is at most ||F_i|| ||F_l|| and at most sum_j P_ij ||w_ij|| P_lj ||w_lj||; C C^T is
# block diagonal; that of (A + B) C^T is P_il (Phi + w_il u_i^T) X (s T_l R^T)^T, where W_Q = X R
# with ||X|| <= 1. M is the matrix of what index norms add up to, and A B^T is bounded as a whole:
#
#     ||J||^2 <= ||M|| + 2 ||A B^T||.
#
# Block by block, what moves through keys would be as large as if all w_ij were parallel; and the
# paths hardly overlap in J J^T, while in J their norms add.


def gram_bound(at: Centred, rows: AffineRows, *, joint: bool) -> PerHead:
    """Bound ||J|| of affine heads by ||J||^2 <= ||M|| + 2 ||A B^T||, (batch, heads).

    M has upper limits of the norms of the blocks of J J^T without A B^T; J = A + B + C is what
    moves through values, keys and queries. `joint`: queries and keys read one input. Where they
    read two, C overlaps with neither A nor B.
    """
    pw = at.w2.sqrt().mul_(at.p)  # P_ij ||v_j - o_i||
    t = query_term(at, rows)
    f = row_lengths(at, rows, pw)
    matrix = block_norms(at, rows, pw, t, f, joint=joint)  # M
    # In units of its largest entry no square of M overflows.
    largest = matrix.amax((-2, -1))
    largest = largest.clamp_min(torch.finfo(matrix.dtype).tiny)
    matrix = matrix.div_(largest[..., None, None])
    leading = matrix_norms.positive_vector(matrix.float(), STEPS).to(matrix)
    norm = matrix_norms.nonnegative_norm(matrix, u=leading)
    leading = leading / vector_norm(leading, dim=-1, keepdim=True)
    # Entries of M are sums of m products of numbers >= 0: off by at most (m + 40) u, relatively.
    share = 2 * matrix_norms.product_rounding(at.p)
    norm = (1 + share) * (norm * largest)
    square = norm + 2 * value_key_norm(at, rows, f, leading)
    return square.nan_to_num(torch.inf).sqrt()  # an overflow may have made a NaN: no bound


def block_norms(
    at: Centred,
    rows: AffineRows,
    pw: Maps,
    t: Rows,
    f: Rows,
    *,
    joint: bool,
) -> Float[Tensor, "batch heads n n"]:
    """Return M: upper limits of the norms of the blocks of J J^T, but for A B^T.

    M_il bounds block (i, l) of A A^T + B B^T + C C^T + (A + B) C^T + C (A + B)^T, where J = A + B
    + C: what moves through values, keys and queries. w_ij = v_j - o_i, u_i = s W_K q_i, F_i has
    the columns P_ij w_ij, Phi = W_V^T, and X is a basis of the range of W_Q.

    Args:
        at: maps and values.
        rows: what the projections make of queries and keys.
        pw: P_ij ||w_ij||.
        t: limits of s ||T_i W_Q^T||.
        f: limits of ||F_i||.
        joint: whether queries and keys read one input.
    """
    t = t[..., None]
    f = f[..., None]
    # |<u_i, u_l>|, raised: it costs r + 4 roundings in units of ||u_i|| ||u_l||, fewer than
    # rounding() allows.
    inner_u = (rows.images @ rows.images.mT).abs_()
    inner_u.addcmul_(rounding(rows.images) * rows.u, rows.u.mT)
    # B B^T: |<u_i, u_l>| ||F_i F_l^T||
    matrix = torch.minimum(pw @ pw.mT, f * f.mT)
    matrix.mul_(inner_u)
    # A A^T: ||W_V||^2 P P^T
    value = rows.wv * at.p
    matrix += value @ value.mT
    # C C^T: t_i^2, on the diagonal
    diagonal = matrix.diagonal(0, -2, -1)
    diagonal.add_(t[..., 0].square())
    if joint:
        # (A + B) C^T: P_il ||(Phi + w_il u_i^T) X|| t_l <= P_il (||Phi X|| + ||w_il|| ||X^T u_i||)
        # t_l; C (A + B)^T is its transpose.
        overlap = rows.shared * at.p
        overlap.addcmul_(pw, rows.inside).mul_(t.mT)
        matrix += overlap
        matrix += overlap.mT
    return matrix


def row_lengths(at: Centred, rows: AffineRows, pw: Maps) -> Rows:
    """Bound ||F_i|| of every query, F_i with the columns P_ij w_ij, given pw_ij = P_ij ||w_ij||.

    By the Frobenius norm; and by a Schatten-4 norm in heads where keys matter: B B^T is at most
    sum_i ||u_i||^2 ||F_i||_F^2, and A A^T at least ||W_V||^2 ||P^T e||^2 for a unit vector e.
    """
    length = vector_norm(pw, dim=-1)  # ||F_i||_F, (batch, heads, n)
    # sum_i ||u_i||^2 ||F_i||_F^2, (batch, heads)
    lengths = rows.u[..., 0] * length
    by_keys = lengths.square().sum(-1)
    # ||W_V||^2 ||P^T e||^2, e = 1 / sqrt n
    columns = at.p.sum(-2).square().sum(-1)
    weight = rows.wv[..., 0, 0].square()
    by_values = weight * columns / at.p.shape[-2]
    keys_matter = ~(by_keys <= KEYS_MATTER * by_values)  # a NaN counts as well
    if keys_matter.any():
        # These heads as (number, 1, n): the None stands for the axis of heads.
        index = (*keys_matter.nonzero(as_tuple=True), None)
        spread = row_spread(at.pick(index), length[index])
        length[keys_matter] = spread[:, 0]
    return length


def row_spread(at: Centred, length: Rows) -> Rows:
    """Return the smaller of ||F_i||_F (`length`) and the Schatten-4 norm of F_i = V^T M(P_i).

    Both bound ||F_i||. The second is that of `sum_spread` with values v_j for tokens x_j, and o_i
    for m; it counts only where rounding has left it enough digits.
    """
    tiny = torch.finfo(at.p.dtype).tiny
    # c_j = <v_j, o_i> - ||o_i||^2 / 2
    c = (at.v2.mT - at.w2).mul_(0.5)
    power, terms, total = sum_spread(at.p, at.gram, c)
    # The terms add up to at most 3 (A + 2 W C); each is a sum of m terms of sums of m, off by at
    # most (2 m + 32) u, 4 times which is allowed for the 3 and what A, C and W are off by
    # themselves. What underflows is below the smallest number.
    underflow = 8 * at.p.shape[-1] ** 2 * tiny
    error = 4 * rounding(at.p) * terms + underflow
    # The root is the norm of D (g - c 1^T - 1 c^T) D, D^2 = diag w, which moves by at most
    # (|dg| + 2 |dc|) W. In units of ||v||^2 + ||o||^2 at most, g is off by (d_v + 4) u; w2 is
    # raised by and off by less than rounding() each, c by half of that and a few u.
    reach = at.v2.amax(-2) + at.o2[..., 0]
    moved = 3 * rounding(at.v) * total * reach
    root = (power + error).clamp_min(0.0).sqrt()
    upper = (root + moved).sqrt()
    largest = (total * reach).square()
    has_digits = power >= CLEAR * torch.maximum(terms, CLEAR * largest)
    return torch.where(has_digits, torch.minimum(upper, length), length)


def value_key_norm(
    at: Centred, rows: AffineRows, f: Rows, e: Float[Tensor, "batch heads 1 n"]
) -> PerHead:
    """Bound ||A B^T||, what values and keys move together, given limits f_i of ||F_i||.

    A B^T g = H a with H_il = (P F_l^T g_l)_i and a_l = W_V^T u_l. With rho_l >= ||P F_l^T||,
    ||H a||_F <= ||H diag(1 / rho)||_F ||diag(rho) a|| <= ||g|| ||diag(rho) a||: the result is
    ||diag(rho) a||, or its Schatten-8 norm, which is no smaller.
    """
    rho = _bound_mixed_rows(at, f, e)
    scaled = rho[..., None] * rows.a
    gram = scaled.mT @ scaled
    return matrix_norm(gram @ gram).sqrt().sqrt()


def _bound_mixed_rows(at: Centred, f: Rows, e: Float[Tensor, "batch heads 1 n"]) -> Rows:
    """Return rho_l >= ||P F_l^T|| of every query, given limits f_l of ||F_l||.

    For a unit vector e and y = P^T e, P = e y^T + P' with e^T P' = 0, so that
    rho_l^2 = ||F_l y||^2 + ||P'||^2 ||F_l||^2. Any e >= 0 will do; near the leading left singular
    vector of P, P' is small.
    """
    p = at.p
    share = matrix_norms.product_rounding(p)
    # A power step on P P^T, and y = P^T e.
    e = (e @ p) @ p.mT
    length = vector_norm(e, dim=-1, keepdim=True)
    e = e / length.clamp_min(torch.finfo(p.dtype).tiny)
    y = e @ p
    # F_l y = sum_j P_lj y_j (v_j - o_l)
    py = p @ y.mT
    sums = (p * y) @ at.v - at.o * py
    image = vector_norm(sums, dim=-1)
    # y is off by (n + 4) u, relatively, sums over keys by (m + 6) u of sum_j P_ij y_j ||w_ij||.
    longest = at.v2.amax(-2) + at.o2.amax(-2)
    longest = longest.mul_(2.0).sqrt()
    off = 2 * share * py[..., 0] * longest
    # ||P'||, P' = P - e y^T
    leading = e.mT @ y
    others = (p - leading).abs_().add_(leading, alpha=share)
    others_norm = matrix_norms.nonnegative_norm(others, 3)[..., None]
    return (1 + share) * torch.hypot(image + off, others_norm * f)


# Large heads of other kinds: block (i, j) of J is P_ij (Phi^v_j + w u^T), w = v_j - o_i,
# u = s Phi^k_j^T q_i, plus s T_i Phi^q_i on the diagonal; their bounds are
# B_ij = P_ij beta_ij + delta_ij t_i. With other logits b_ij stands for s q_i, and a_ij for s k_j
# in s T_i = sum_j P_ij w a_ij^T: see `attend`.


def _bound_local_blocks(heads: Heads, at: Centred, *, joint: bool) -> Tensor:
    """Return B with B_ij >= ||J_ij||, (batch, heads, n, m), or (.., n, m + n) if not `joint`.

    B_ij = P_ij beta_ij, plus t_i on the diagonal where queries and keys read one input (`joint`);
    else B = [P∘beta, diag t].
    """
    # What the largest entry of each row contributes, some queries at a time.
    per_query = at.p[:, :, 0].numel()
    chunks = heads.policy.chunks(at.p.shape[2], per_query)
    rows = (attend.MapRows(at.p[:, :, i], queries=i, keys=slice(None)) for i in chunks)
    largest = attend.anchor_blocks(rows, at.v, heads.sink_share())
    blocks = _local_beta(heads, at, largest)
    blocks.mul_(at.p)
    t = _local_query_term(heads, at, largest)
    if not joint:
        # In the precision of the blocks, from which the norm knows how they were rounded.
        diagonal = torch.diag_embed(t).to(blocks)
        return torch.cat([blocks, diagonal], -1)
    # ||J_ii|| <= P_ii beta_ii + t_i; dX_q and dX_kv are other columns where they are two inputs.
    blocks.diagonal(0, -2, -1).add_(t)
    return blocks


def _local_beta(heads: Heads, at: Centred, rows: attend.Anchored) -> Tensor:
    """Return beta_ij >= ||Phi^v_j + w u^T|| of every query and key, some keys at a time.

    The smaller of ||Phi^v_j|| + ||w|| ||u|| (the triangle inequality) and
    (||Phi^v_j||^2 + ||Phi^v_j u/||u|| + ||u|| w||^2)^1/2 (the input split along u and across it).
    """
    _, to_k, to_v = projections(heads)
    # ||u_ij|| = s ||R_K G_j^T q_i||, R_K^T R_K = W_K^T W_K; a_ij = Phi^v_j u_ij has d_v channels.
    root = factor(to_k)
    mixed = to_v.weight.mT @ to_k.weight
    mixed = mixed[:, None]
    key_maps = local_map(to_k)
    value_maps = local_map(to_v)
    norms = value_norms(heads)
    p = at.p
    precision = p.dtype
    if p.shape[-2] * p.shape[-1] > heads.policy.map_limit:
        # Rounding entries to single precision costs u, where `nonnegative_norm` leaves
        # 3 (n + m) u / 2 over.
        precision = torch.float32
    beta = torch.empty_like(p, dtype=precision)
    tokens = torch.arange(p.shape[-1], device=p.device)
    channels = root.shape[-2] + 3 * mixed.shape[-2]
    per_key = p[..., 0].numel() * channels
    for j in heads.policy.chunks(p.shape[-1], per_key):
        # u_ij and a_ij, (batch, heads, keys, channels, n)
        key_map = _pick(key_maps, j).mT
        b = attend.logit_gradients(heads, "k", j).mT
        u = (root @ key_map) @ b
        a = _pick(value_maps, j) @ mixed @ key_map
        a = a @ b
        w = _subtract_outputs(at.v[:, :, j], tokens[j], rows)
        # x = c u / ||u|| + y, y across u: (Phi + w u^T) x = c (Phi u / ||u|| + ||u|| w) + Phi y is
        # at most (||Phi u / ||u|| + ||u|| w||^2 + ||Phi||^2)^1/2 ||x|| by Cauchy-Schwarz. `split`
        # and `triangle` are the squares of the two limits less ||Phi||^2 + ||u||^2 ||w||^2.
        norm = _pick(norms, j)[..., None]
        u2 = u.square().sum(-2)  # ||u||^2, (batch, heads, keys, n)
        w2 = w.square().sum(-2)
        split = (a.square().sum(-2) / u2).nan_to_num(0.0)
        split = split + 2 * (a * w).sum(-2)
        triangle = 2 * norm * (u2 * w2).sqrt()
        square = norm.square() + u2 * w2 + torch.minimum(split, triangle)
        beta[..., j] = square.sqrt().mT
    return beta


def _subtract_outputs(v: Tensor, keys: Tensor, rows: attend.Anchored) -> Tensor:
    """Return w_ij = v_j - o_i, (batch, heads, keys, d_v, n), given some keys and their values.

    For the key with the largest entry of its row it is computed without cancellation.
    """
    is_largest = rows.key.mT == keys[:, None]
    outputs = rows.o.mT[:, :, None]
    gaps = rows.gap.mT[:, :, None]
    w = v[..., None] - outputs
    return torch.where(is_largest[:, :, :, None], gaps, w)


def _local_query_term(heads: Heads, at: Centred, rows: attend.Anchored) -> Tensor:
    """Return t_i, s ||T_i Phi^q_i|| of every query in the Schatten-4 norm, (batch, heads, n).

    Some queries at a time; s T_i Phi^q_i = sum_j c_ij a_ij^T Phi^q_i, c_ij = P_ij (v_j - o_i).
    """
    to_q = projections(heads)[0]
    phi = local_map(to_q) @ factor(to_q).mT
    m, d = heads.k.shape[2:]
    dv = at.v.shape[-1]
    if heads.pairs is None:
        # No constant in k_j matters where the logits are plain: less cancels in the keys of `at`.
        heads = replace(heads, k=at.k)
    t = torch.empty_like(at.p[..., 0])
    per_query = t[..., 0].numel() * m * (2 * d + dv)
    for i in heads.policy.chunks(t.shape[-1], per_query):
        # c_ij, (batch, heads, queries, m, d_v), with the largest entry of each row apart.
        c = at.v[:, :, None] - rows.o[:, :, i, None]
        c = at.p[:, :, i, :, None] * c
        largest = rows.key[:, :, i, :, None]
        largest = largest.expand(-1, -1, -1, -1, dv)
        c.scatter_(3, largest, rows.c[:, :, i, None])
        a = attend.logit_gradients(heads, "q", i)
        images = c.mT @ a @ _pick(phi, i)
        # ||A|| <= (sum sigma^4)^1/4 = ||A A^T||_F^1/2, at most rank^1/4 above it.
        t[..., i] = matrix_norm(images @ images.mT).sqrt()
    return t


def _pick(per_token: Tensor, chunk: slice) -> Tensor:
    """Return the entries of some tokens (third axis); an axis of length 1 serves all tokens."""
    if per_token.shape[2] == 1:
        return per_token
    return per_token[:, :, chunk]
