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
from lipaudit.theory.heads import (
    Heads,
    are_affine,
    factor,
    local_map,
    narrow_jacobians,
    projections,
    select_tokens,
)
from lipaudit.theory.ingredients import (
    Centred,
    Ingredients,
    rounding,
    sum_spread,
    value_norms,
)

if TYPE_CHECKING:
    from jaxtyping import Float

    from lipaudit.theory.heads import PerHead
    from lipaudit.theory.ingredients import Maps, OfRows

    Rows = Float[Tensor, "batch heads n"]
    OfHeads = Float[Tensor, "batch heads 1 1"]


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
    """Return norms and inner products of the gradients of the logits of affine heads.

    Logit ij is s <q_i, k_j> with the scale s. Its gradient in the token of key j is
    u_i = s W_K q_i, and its gradient in the token of query i is z_j = s W_Q k_j. Both are as long
    as a token (D channels). Shorter vectors with the same inner products, `images` and `z`,
    replace both. a_i is W_V^T u_i.

    A token acts through its query only in the range of W_Q. With a basis X of this range, `inside`
    (||X^T u_i||) and `shared` (||W_V^T X||) say how much of the gradients u_i and of W_V is there:
    `block_norms` bounds with them how much a token's moves through its query overlap with those
    through values (`wv` is ||W_V||) and keys.
    """
    centred = ingredients.centred
    weights = ingredients.weights
    q = ingredients.heads.q
    s = ingredients.heads.scale[..., None, None]
    # <u_i, u_l> = s^2 q_i^T W_K^T W_K q_l and a_i = s (W_K^T W_V)^T q_i need small products of
    # weights only: no vector of the width D of tokens is formed.
    images = q @ (s * weights.to_u)
    u = vector_norm(images, dim=-1, keepdim=True)
    projected = q @ (s * weights.to_inside)
    inside = vector_norm(projected, dim=-1, keepdim=True)
    # X has a rounding error of at most `left`: adding `left` ||u_i|| gives an upper limit.
    inside = inside + weights.left[:, None, None] * u
    return AffineRows(
        wv=weights.value[:, None, None].expand_as(centred.s),
        shared=weights.shared[:, None, None].expand_as(centred.s),
        u=u,
        images=images,
        inside=inside,
        a=q @ (s * weights.to_a),
        # Keys less their mean: only differences of the z_j matter, because a constant added to all
        # logits of a row changes no P_ij. The length of u_i matters, so q keeps its mean.
        z=centred.k @ (s * weights.to_z),
    )


def query_term(centred: Centred, rows: AffineRows) -> Rows:
    """Bound s ||T_i W_Q^T||_F: how far a move of token i moves its output o_i through query i.

    s T_i W_Q^T = sum_j P_ij w_ij z_j^T with w_ij = v_j - o_i and z_j = s W_Q k_j. With
    kappa_jl = <z_j, z_l> the square of its Frobenius norm is

        sum_jl P_ij P_il kappa_jl <w_ij, w_il>
            = sum_jl P_ij P_il kappa_jl (||w_il||^2 + <v_j, v_l> - ||v_l||^2).

    So n x n matrices suffice: no T_i is formed.
    """
    # <w_ij, w_il> = (||w_ij||^2 + ||w_il||^2 - ||v_j||^2 - ||v_l||^2) / 2 + <v_j, v_l>. The sum
    # over j and l is symmetric, so it stays the same with l in place of j in the squares.
    kappa = rows.z @ rows.z.mT
    inner = centred.gram - centred.v2.mT  # <v_j, v_l> - ||v_l||^2
    # The sum over j for every query i and key l, (batch, heads, n, l): of the products with
    # `inner`, and of those with ||w_il||^2.
    by_key = centred.p @ inner.mul_(kappa)
    totals = (centred.p @ rows.z) @ rows.z.mT  # sum_j P_ij kappa_jl
    by_key.addcmul_(totals, centred.w2)
    squares = by_key.mul_(centred.p).sum(-1)  # the sum over l
    error = _bound_query_rounding(centred, rows)
    return (squares + error).clamp_min(0.0).sqrt()


def _bound_query_rounding(centred: Centred, rows: AffineRows) -> Rows:
    """Bound the rounding error of the square that `query_term` computes.

    The square is sum_jl P_ij P_il <z_j, z_l> (||v_j - o_i||^2 - ||v_j - v_l||^2 / 2). With the
    moments m_k = sum_j P_ij ||z_j|| ||v_j||^k, the absolute values of all terms add up to at most
    m_1^2 + m_0 (2 m_2 + 2 m_1 ||o_i|| + m_0 ||o_i||^2). The rounding error is at most this sum
    times the relative error of sums of products.
    """
    z = vector_norm(rows.z, dim=-1)
    v2 = centred.v2[..., 0]
    o2 = centred.o2[..., 0]
    # ||z_j|| ||v_j||^k for k = 0, 1, 2, and the three moments of every query
    factors = torch.stack([z, z * v2.sqrt(), z * v2], -2)
    m0, m1, m2 = (factors @ centred.p.mT).unbind(-2)
    # m_1^2 + m_0 (2 m_2 + 2 m_1 ||o_i|| + m_0 ||o_i||^2)
    behind_m0 = 2 * m2 + 2 * m1 * o2.sqrt() + m0 * o2
    terms = m1.square() + m0 * behind_m0
    # Relative errors in units of the unit roundoff u = eps / 2: the two sums over m tokens cost
    # 2 m, <z_j, z_l> costs d, <v_j, v_l> costs d_v, all other operations 20. `rounding` of rows
    # with d entries is 2 d + 32 such units, so the factor below is more than all of them.
    channels = max(rounding(centred.v), rounding(rows.z))
    return (rounding(centred.p) + 2 * channels) * terms


CLEAR = 0.01
"""Below this ratio of a sum to its terms, cancellation has removed too many of its digits."""

STEPS = 6
"""Power steps to the vector that proves ||M||: more would tighten it by less than they cost."""

KEYS_MATTER = 0.25
"""Smallest ratio of B B^T to A A^T for which tighter block norms are worth their cost."""


def bound_by_blocks(ingredients: Ingredients) -> PerHead:
    """Return an upper bound of the Jacobian norm ||J|| at X, (batch, heads), for every head.

    The norm of a block matrix is at most the norm of the matrix of its blocks' norms. In order:

    * self-attention with a small J: J is formed, and the norms of the blocks of J J^T are exact;
    * affine heads (q, k and v are affine in the tokens, logits are s q k^T plus a constant): the
      norms of the blocks of J J^T are bounded by a formula (`gram_bound`), without forming J;
    * all other heads: the bound is ||B||, where B_ij bounds the norm of block (i, j) of J.
    """
    heads = ingredients.heads
    joint = heads.x_kv is None  # self-attention: queries and keys read the same tokens
    pairs = ingredients.centred.p[0, 0].numel()  # n queries times m keys
    entries = pairs * heads.v.shape[-1] * heads.x.shape[-1]  # numbers in J of one head on one row
    if joint and entries <= heads.policy.dense_entries:
        return _bound_dense_blocks(heads)
    if are_affine(heads):
        return gram_bound(ingredients.centred, affine_rows(ingredients), joint=joint)
    blocks = _bound_local_blocks(heads, ingredients.centred, joint=joint)
    return matrix_norms.nonnegative_norm(blocks)


def _bound_dense_blocks(heads: Heads) -> Tensor:
    """Bound ||J|| by the exact norms of the d_v x d_v blocks of J J^T, one batch row at a time.

    ||J||^2 = ||J J^T||. The norm of a block matrix is at most the norm of the matrix of its
    blocks' norms.
    """
    n = heads.q.shape[2]
    dv = heads.v.shape[3]
    norms = []
    sizes = []
    for b in range(len(heads.q)):
        jacobian = products.dense_jacobian(heads.row(b)).flatten(0, 1)  # (heads, n dv, inputs)
        # J is divided by its largest entry, so that no product of its entries overflows.
        largest = jacobian.abs().amax((-2, -1))
        size = largest.clamp_min(torch.finfo(jacobian.dtype).tiny)
        jacobian = jacobian / size[:, None, None]
        gram = jacobian @ jacobian.mT
        blocks = gram.reshape(-1, n, dv, n, dv).transpose(-3, -2)  # (heads, n, n, dv, dv)
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


def gram_bound(centred: Centred, rows: AffineRows, *, joint: bool) -> PerHead:
    """Bound ||J|| of affine heads by ||J||^2 <= ||M|| + 2 ||A B^T||, (batch, heads).

    J = A + B + C are the derivatives of the output through values, keys and queries. M_il bounds
    the norm of block (i, l) of J J^T - A B^T - B A^T, and ||J||^2 is the norm of J J^T.

    Args:
        centred: P, keys, values and outputs.
        rows: gradients of the logits.
        joint: whether queries and keys read one input. If they read two inputs, A C^T and B C^T
            are 0.
    """
    pw = centred.w2.sqrt().mul_(centred.p)  # P_ij ||v_j - o_i||
    t = query_term(centred, rows)  # upper limits of the norms of the blocks of C
    # Upper limits of ||F_i||, where F_i has the columns P_ij (v_j - o_i).
    f = row_lengths(centred, rows, pw)
    matrix = block_norms(centred, rows, pw, t, f, joint=joint)  # M
    # M is divided by its largest entry, so that no product of its entries overflows.
    largest = matrix.amax((-2, -1))
    largest = largest.clamp_min(torch.finfo(matrix.dtype).tiny)
    matrix = matrix.div_(largest[..., None, None])
    # A vector near the leading singular vector of M. It serves for ||M||, and with length one as
    # the start vector for ||A B^T||.
    leading = matrix_norms.positive_vector(matrix.float(), STEPS).to(matrix)
    norm = matrix_norms.nonnegative_norm(matrix, u=leading)
    leading = leading / vector_norm(leading, dim=-1, keepdim=True)
    # Entries of M are sums of m products of numbers >= 0. Their relative rounding error is at most
    # (m + 40) u, u = eps / 2: m for the sum over keys, and fewer than 40 for the factors (roots
    # and products) and for the sum of the parts of M. `share` is 4 (n + m + 16) u.
    share = 2 * matrix_norms.product_rounding(centred.p)
    norm = (1 + share) * (norm * largest)  # ||M||
    square = norm + 2 * value_key_norm(centred, rows, f, leading)
    return square.nan_to_num(torch.inf).sqrt()  # an overflow may have made a NaN: no bound


def block_norms(
    centred: Centred,
    rows: AffineRows,
    pw: Maps,
    t: Rows,
    f: Rows,
    *,
    joint: bool,
) -> Float[Tensor, "batch heads n n"]:
    """Return M: upper limits of the norms of the blocks of J J^T, without A B^T and B A^T.

    J = A + B + C are the derivatives of the output through values, keys and queries. M_il bounds
    the norm of block (i, l) of A A^T + B B^T + C C^T + (A + B) C^T + C (A + B)^T. With
    w_ij = v_j - o_i and the gradient u_i = s W_K q_i of logit ij in the token of key j, the blocks
    of A + B are P_ij (W_V^T + w_ij u_i^T). C has the blocks s T_i W_Q^T on its diagonal, where
    T_i = sum_j P_ij w_ij k_j^T.

    Args:
        centred: maps and values.
        rows: norms and inner products of u_i; `u` has the ||u_i||, `inside` the ||X^T u_i||, both
            (batch, heads, n, 1), for a basis X of the range of W_Q.
        pw: P_ij ||w_ij||, (batch, heads, n, m).
        t: upper limits t_i of s ||T_i W_Q^T||, (batch, heads, n).
        f: upper limits of ||F_i||, where F_i has the columns P_ij w_ij, (batch, heads, n).
        joint: whether queries and keys read one input.
    """
    f = f[..., None]
    # |<u_i, u_l>|, plus its rounding error: at most `rounding` times ||u_i|| ||u_l||.
    inner_u = (rows.images @ rows.images.mT).abs_()
    inner_u.addcmul_(rounding(rows.images) * rows.u, rows.u.mT)
    # B B^T: |<u_i, u_l>| ||F_i F_l^T||
    matrix = torch.minimum(pw @ pw.mT, f * f.mT)
    matrix.mul_(inner_u)
    # A A^T: ||W_V||^2 P P^T
    value = rows.wv * centred.p
    matrix += value @ value.mT
    # C C^T: t_i^2, on the diagonal
    diagonal = matrix.diagonal(0, -2, -1)
    diagonal.add_(t.square())
    # With separate inputs of queries and keys, C acts on another input than A and B: the products
    # (A + B) C^T and C (A + B)^T are then 0.
    if joint:
        # (A + B) C^T: the columns of W_Q are in the span of a basis X with ||X|| <= 1. So block
        # (i, l) is at most P_il ||(W_V^T + w_il u_i^T) X|| t_l
        #     <= (`shared` P_il + P_il ||w_il|| `inside`_i) t_l,
        # where `shared` is ||W_V^T X|| and `inside` has the ||X^T u_i||. C (A + B)^T is the
        # transpose.
        overlap = rows.shared * centred.p
        overlap.addcmul_(pw, rows.inside).mul_(t[..., None, :])
        matrix += overlap
        matrix += overlap.mT
    return matrix


def row_lengths(centred: Centred, rows: AffineRows, pw: Maps) -> Rows:
    """Bound ||F_i|| of every query, where F_i has the columns P_ij w_ij, w_ij = v_j - o_i.

    The Frobenius norm ||F_i||_F is such a bound. The Schatten-4 norm (`tighten_row_lengths`) is
    tighter, but expensive. It is computed only for heads where it pays: F_i enters the bound of
    ||J|| through B, the derivative of the output through keys. So B must not be small beside A,
    the derivative through values. To compare them, ||B||^2 is replaced by its upper limit
    sum_i ||u_i||^2 ||F_i||_F^2 with u_i = s W_K q_i, and ||A|| by its lower limit
    ||W_V|| ||P^T e|| for the unit vector e = (1, ..., 1) / sqrt n.

    Args:
        centred: P and the values.
        rows: ||u_i|| and ||W_V||.
        pw: P_ij ||w_ij||.
    """
    length = vector_norm(pw, dim=-1)  # ||F_i||_F, (batch, heads, n)
    # The limit of ||B||^2: sum_i ||u_i||^2 ||F_i||_F^2, (batch, heads)
    lengths = rows.u[..., 0] * length
    by_keys = lengths.square().sum(-1)
    # The limit of ||A||^2: ||W_V||^2 ||P^T e||^2, where P^T e has the column sums of P / sqrt n.
    columns = centred.p.sum(-2).square().sum(-1)
    weight = rows.wv[..., 0, 0].square()
    by_values = weight * columns / centred.p.shape[-2]
    keys_matter = ~(by_keys <= KEYS_MATTER * by_values)  # not `>`: a NaN must count
    if keys_matter.any():
        # The heads where keys matter, one on each batch row: (number, 1, ...).
        picked = centred.pick(keys_matter)
        tight = tighten_row_lengths(picked, length[keys_matter][:, None])
        length[keys_matter] = tight[:, 0]
    return length


def tighten_row_lengths(centred: Centred, length: Rows) -> Rows:
    """Return an upper limit of ||F_i|| for every query, F_i with the columns P_ij (v_j - o_i).

    The limit is the smaller of two: the Frobenius norm `length`, and the Schatten-4 norm, the
    fourth root of the sum of sigma^4 over the singular values of F_i. In exact arithmetic the
    Schatten-4 norm is never larger. Its fourth power (`power`) is computed by `sum_spread` from
    the Gram matrix g = V V^T and numbers c. It is raised by three errors:

    * `underflow`: products below the smallest number become 0, of m^2 products in a double sum;
    * `error`: rounding of the sums in `power`; `terms` is about the sum of their absolute values;
    * `change`: rounding of g and c, which is multiplied by `total`, the sum of the P_ij^2.

    Where too many digits of `power` cancelled, the Schatten-4 norm is not used.
    """
    tiny = torch.finfo(centred.p.dtype).tiny
    # The input c_j = <v_j, o_i> - ||o_i||^2 / 2 of `sum_spread`, as
    # (||v_j||^2 - ||v_j - o_i||^2) / 2.
    c = (centred.v2.mT - centred.w2).mul_(0.5)
    power, terms, total = sum_spread(centred.p, centred.gram, c)
    underflow = 8 * centred.p.shape[-1] ** 2 * tiny
    # `power` adds numbers whose absolute values sum to at most 3 `terms`. Each number is a double
    # sum over m keys, with a relative error of at most (2 m + 32) u = rounding(P), u = eps / 2.
    # The factor 4 in place of 3 covers the error of `terms` itself.
    error = 4 * rounding(centred.p) * terms + underflow
    # The square root of `power` is the norm of D (g - c 1^T - 1 c^T) D with D^2 = diag(w),
    # w_j = P_ij^2. Errors dg and dc change this norm by at most (|dg| + 2 |dc|) `total`, where
    # `total` is the sum of the w_j. In units of r `unit` with r = rounding(V) = (2 d_v + 32) u:
    # |dg| is at most 1/2 (a sum of d_v products). c has half of `w2`, which is raised by 1 and off
    # by 1 at most: 2 |dc| is at most 2. So 3 units are more than both.
    unit = centred.v2.amax(-2) + centred.o2[..., 0]  # max_j ||v_j||^2 + ||o_i||^2
    change = 3 * rounding(centred.v) * total * unit
    root = (power + error).clamp_min(0.0).sqrt()
    upper = (root + change).sqrt()
    # `error` and `change` are small if power >= CLEAR terms and
    # power^(1/2) >= CLEAR total unit, where CLEAR is 1 %.
    largest = (total * unit).square()
    has_digits = power >= CLEAR * torch.maximum(terms, CLEAR * largest)
    return torch.where(has_digits, torch.minimum(upper, length), length)


def value_key_norm(
    centred: Centred, rows: AffineRows, f: Rows, e: Float[Tensor, "batch heads 1 n"]
) -> PerHead:
    """Bound ||A B^T|| by ||diag(rho) a||: A and B are the output's derivatives by values and keys.

    If the tokens move by dX, the output moves by A dX = P dX W_V through the values, and its row l
    by (B dX)_l = F_l dX u_l through the keys. u_l = s W_K q_l is the gradient of logit lj in token
    j, and F_l has the columns P_lj (v_j - o_l). a, (n, d_v), has the rows a_l = W_V^T u_l. rho_l
    is an upper limit of ||P F_l^T||. The proof:

    * for any matrix g with the rows g_l, (n, d_v), B^T g = sum_l F_l^T g_l u_l^T. So A B^T g =
      sum_l P F_l^T g_l a_l^T = H a, where column l of H is P F_l^T g_l;
    * this column has at most the length rho_l ||g_l||, so ||H diag(1 / rho)||_F <= ||g||_F, and
      ||H a||_F <= ||H diag(1 / rho)||_F ||diag(rho) a|| <= ||g||_F ||diag(rho) a||.

    The Schatten-8 norm of diag(rho) a is returned. It is at least the spectral norm, and needs no
    eigenvalues. Its own rounding, a few sums of products, is covered by `ROUNDING` of all bounds.

    Args:
        centred: P, values and outputs.
        rows: a_l of every query.
        f: upper limits of ||F_l||.
        e: a unit vector over the queries, near the leading left singular vector of P.
    """
    rho = _bound_mixed_rows(centred, f, e)
    scaled = rho[..., None] * rows.a
    gram = scaled.mT @ scaled
    # (sum sigma^8)^(1/8) = ||(S^T S)^2||_F^(1/4)
    return matrix_norm(gram @ gram).sqrt().sqrt()


def _bound_mixed_rows(centred: Centred, f: Rows, e: Tensor) -> Rows:
    """Return rho_l >= ||P F_l^T|| of every query, where F_l has the columns P_lj (v_j - o_l).

    Forming P F_l^T for every query l would be too expensive. So P is split into a matrix of rank
    one and a remainder: P = e y^T + P' with a unit vector e, y = P^T e, and e^T P' = 0. For every
    vector x, P F_l^T x = <F_l y, x> e + P' F_l^T x, where the two terms are orthogonal. So

        ||P F_l^T||^2 <= ||F_l y||^2 + ||P'||^2 ||F_l||^2 = rho_l^2.

    This holds for every unit vector e. The nearer e is to the leading left singular vector of P,
    the smaller is P', and the tighter the bound. e >= 0 makes y >= 0, which the limit of the
    rounding error below needs.

    Args:
        centred: P, values and outputs.
        f: upper limits of ||F_l||.
        e: a start vector >= 0; one power step here brings it nearer to the leading singular
            vector.
    """
    p = centred.p
    # 2 (n + m + 16) u with u = eps / 2: more than each of the relative rounding errors of e, of y,
    # of e y^T, and of the last line.
    share = matrix_norms.product_rounding(p)
    # A power step on P P^T, and y = P^T e.
    e = (e @ p) @ p.mT
    length = vector_norm(e, dim=-1, keepdim=True)
    e = e / length.clamp_min(torch.finfo(p.dtype).tiny)
    y = e @ p
    # F_l y = sum_j P_lj y_j (v_j - o_l)
    py = p @ y.mT  # sum_j P_lj y_j
    sums = (p * y) @ centred.v - centred.o * py
    image = vector_norm(sums, dim=-1)
    # The rounding error of ||F_l y||, u = eps / 2: y has a relative error of (n + 4) u (a sum over
    # queries, and the length of e). Sums over keys, with a few products and a difference, have an
    # error of (m + 6) u times sum_j P_lj y_j ||v_j - o_l||, and ||v_j - o_l|| is at most
    # `longest`: ||v - o||^2 <= 2 (||v||^2 + ||o||^2). Both errors together are (n + m + 10) u:
    # below 2 `share` = 4 (n + m + 16) u.
    longest = centred.v2.amax(-2) + centred.o2.amax(-2)
    longest = longest.mul_(2.0).sqrt()
    error = 2 * share * py[..., 0] * longest
    # |P'| = |P - e y^T|, plus its rounding error
    leading = e.mT @ y
    remainder = (p - leading).abs_().add_(leading, alpha=share)
    remainder_norm = matrix_norms.nonnegative_norm(remainder, steps=3)[..., None]
    return (1 + share) * torch.hypot(image + error, remainder_norm * f)


# Large heads of other kinds: block (i, j) of J is P_ij (Phi^v_j + w u^T), w = v_j - o_i,
# u = s Phi^k_j^T q_i, plus s T_i Phi^q_i on the diagonal; their bounds are
# B_ij = P_ij beta_ij + delta_ij t_i. With other logits b_ij stands for s q_i, and a_ij for s k_j
# in s T_i = sum_j P_ij w a_ij^T: see `attend`.


def _bound_local_blocks(heads: Heads, centred: Centred, *, joint: bool) -> Tensor:
    """Return B with B_ij >= ||J_ij||, an upper limit of the norm of every block of J.

    Block (i, j) is the derivative of output o_i in token j. Through value j and key j it is
    P_ij (Phi^v_j + w u^T) with Phi^v_j = dv_j / dx_j, w = v_j - o_i and the gradient u of logit ij
    in token j. Its norm is at most P_ij beta_ij (`_bound_key_blocks`). Block (i, i) adds a term
    through query i, with a norm of at most t_i (`_local_query_term`). B is (batch, heads, n, m).
    If queries read another input than keys (not `joint`), J has further columns for this input,
    and B = [P∘beta, diag t] is (batch, heads, n, m + n).
    """
    # The outputs o_i. And for the largest P_ij of each row c_ij = P_ij (v_j - o_i): if P_ij is
    # near 1, o_i is near v_j, and their difference would cancel. Some queries at a time, to save
    # memory.
    per_query = centred.p[:, :, 0].numel()
    chunks = heads.policy.chunks(centred.p.shape[2], per_query)
    rows = (attend.MapRows(centred.p[:, :, i], queries=i, keys=slice(None)) for i in chunks)
    outputs = attend.anchor_blocks(rows, centred.v, heads.sink_share())
    blocks = _bound_key_blocks(heads, centred, outputs)  # beta_ij
    blocks.mul_(centred.p)
    t = _local_query_term(heads, centred, outputs)
    if not joint:
        # In the precision of the blocks: `nonnegative_norm` derives its rounding error from it.
        diagonal = torch.diag_embed(t).to(blocks)
        return torch.cat([blocks, diagonal], -1)
    # ||J_ii|| <= P_ii beta_ii + t_i
    blocks.diagonal(0, -2, -1).add_(t)
    return blocks


def _bound_key_blocks(heads: Heads, centred: Centred, rows: attend.Anchored) -> Tensor:
    """Return beta_ij >= ||Phi^v_j + w u^T|| of every query and key, (batch, heads, n, m).

    P_ij (Phi^v_j + w u^T) is how output o_i changes with token j through its value v_j and key
    k_j: Phi^v_j = dv_j / dx_j, w = v_j - o_i, and u is the gradient of logit ij in token j. beta
    is the smaller of ||Phi^v_j|| + ||w|| ||u|| (the triangle inequality) and
    (||Phi^v_j||^2 + ||Phi^v_j u/||u|| + ||u|| w||^2)^1/2 (the input split along u and across it).

    Args:
        heads: heads of any kind.
        centred: P and the values.
        rows: the outputs o_i, and w for the largest P_ij of each row, where v_j - o_i would lose
            digits: if P_ij is nearly 1, o_i is nearly v_j.
    """
    _, to_k, to_v = projections(heads)
    # A projection to keys has the Jacobian G_j W_K^T at token j, one to values H_j W_V^T: G_j and
    # H_j are those of a rotary position or qk-norm behind W. b_ij is the gradient of logit ij in
    # key j (s q_i for logits s q k^T). So
    #     u = W_K G_j^T b_ij   and   a = Phi^v_j u = H_j W_V^T W_K G_j^T b_ij.
    # Of u only the norm is needed: R (`root`), with R^T R = W_K^T W_K and fewer rows, replaces
    # W_K.
    root = factor(to_k)
    value_key = to_v.weight.mT @ to_k.weight  # W_V^T W_K, (heads, d_v, d)
    value_key = value_key[:, None]  # (heads, 1, d_v, d): the same for all keys
    key_maps = local_map(to_k)  # G_j
    value_maps = local_map(to_v)  # H_j
    norms = value_norms(heads)  # ||Phi^v_j||
    p = centred.p
    precision = p.dtype
    if p.shape[-2] * p.shape[-1] > heads.policy.map_limit:
        # Single precision, to save memory. Rounding an entry has a relative error of eps / 2. This
        # is covered: `nonnegative_norm` raises its result by 3 (n + m) eps / 4 more than its own
        # rounding needs, with the eps of single precision.
        precision = torch.float32
    beta = torch.empty_like(p, dtype=precision)
    tokens = torch.arange(p.shape[-1], device=p.device)
    # Numbers in u, and in a, w and their product, for one key and all queries.
    channels = root.shape[-2] + 3 * value_key.shape[-2]
    per_key = p[..., 0].numel() * channels
    for j in heads.policy.chunks(p.shape[-1], per_key):
        # b, u, a and w are (batch, heads, keys, channels, n): a column for every query.
        key_map = select_tokens(key_maps, j).mT  # G_j^T
        b = attend.logit_gradients(heads, "k", j).mT
        u = (root @ key_map) @ b
        to_a = select_tokens(value_maps, j) @ value_key @ key_map  # H_j W_V^T W_K G_j^T
        a = to_a @ b
        w = _subtract_outputs(centred.v[:, :, j], tokens[j], rows)
        by_key = _bound_rank_one_update(select_tokens(norms, j), u, a, w)
        beta[..., j] = by_key.mT
    return beta


def _bound_rank_one_update(phi: Tensor, u: Tensor, a: Tensor, w: Tensor) -> Tensor:
    """Return the smaller of two limits of ||Phi + w u^T||, (batch, heads, keys, n).

    The limits are ||Phi|| + ||w|| ||u||, and (||Phi||^2 + ||Phi u/||u|| + ||u|| w||^2)^1/2.

    Args:
        phi: ||Phi|| of every key, (batch, heads, keys).
        u: u of every key and query, (batch, heads, keys, channels, n).
        a: Phi u.
        w: w.
    """
    # Proof of the second limit: for x = c u / ||u|| + y with y orthogonal to u,
    # (Phi + w u^T) x = c (Phi u / ||u|| + ||u|| w) + Phi y. By Cauchy-Schwarz this is at most
    # (||Phi u / ||u|| + ||u|| w||^2 + ||Phi||^2)^1/2 ||x|| long.
    phi = phi[..., None]
    u2 = u.square().sum(-2)  # ||u||^2
    w2 = w.square().sum(-2)  # ||w||^2
    # The squares of both limits are ||Phi||^2 + ||u||^2 ||w||^2 and a mixed term:
    # 2 ||Phi|| ||u|| ||w|| for the first limit, ||a||^2 / ||u||^2 + 2 <a, w> for the second one.
    triangle = 2 * phi * (u2 * w2).sqrt()
    split = (a.square().sum(-2) / u2).nan_to_num(0.0)  # u = 0: the limit is ||Phi||
    split = split + 2 * (a * w).sum(-2)
    square = phi.square() + u2 * w2 + torch.minimum(split, triangle)
    return square.sqrt()


def _subtract_outputs(v: Tensor, keys: Tensor, rows: attend.Anchored) -> Tensor:
    """Return w_ij = v_j - o_i for some keys j and all queries i, (batch, heads, keys, d_v, n).

    For the key with the largest P_ij of a row, `rows` has this difference without cancellation.
    """
    is_largest = rows.key.mT == keys[:, None]  # (batch, heads, keys, n)
    outputs = rows.o.mT[:, :, None]  # (batch, heads, 1, d_v, n)
    gaps = rows.gap.mT[:, :, None]
    w = v[..., None] - outputs
    return torch.where(is_largest[:, :, :, None], gaps, w)


def _local_query_term(heads: Heads, centred: Centred, rows: attend.Anchored) -> Tensor:
    """Return upper limits t_i of ||s T_i Phi^q_i|| of every query, (batch, heads, n).

    s T_i Phi^q_i (d_v x D) is how token i moves its output o_i through its query. T_i is
    sum_j c_ij k_j^T with c_ij = P_ij (v_j - o_i), Phi^q_i is dq_i / dx_i, and s is the scale of
    the logits. If the logits are not s q k^T, their gradient a_ij in q_i replaces s k_j.

    Args:
        heads: heads of any kind.
        centred: P, and keys and values less their mean.
        rows: the outputs o_i, and c_ij for the largest P_ij of each row, where v_j - o_i would
            lose digits: if P_ij is nearly 1, o_i is nearly v_j.
    """
    to_q, _, _ = projections(heads)
    phi = narrow_jacobians(to_q)
    m, d = heads.k.shape[2:]
    dv = centred.v.shape[-1]
    if heads.pairs is None:
        # For logits s q k^T a constant added to all k_j changes nothing, since sum_j c_ij = 0.
        # Without their mean, as in `centred`, less cancels.
        heads = replace(heads, k=centred.k)
    t = torch.empty_like(centred.p[..., 0])
    # Numbers in memory for one query of all heads and batch rows: c (m x d_v), a (m x d), and
    # temporaries of a's size.
    per_query = t[..., 0].numel() * m * (2 * d + dv)
    for i in heads.policy.chunks(t.shape[-1], per_query):
        c = attend.weighted_differences(centred.p, centred.v, rows, i)
        a = attend.logit_gradients(heads, "q", i)
        images = c.mT @ a @ select_tokens(phi, i)  # s T_i Phi^q_i
        # t_i is the Schatten-4 norm: ||A|| <= (sum sigma^4)^1/4 = ||A A^T||_F^1/2, which is at
        # most rank^1/4 times as large.
        t[..., i] = matrix_norm(images @ images.mT).sqrt()
    return t
