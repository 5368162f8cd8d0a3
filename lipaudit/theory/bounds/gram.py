"""The sharp bound of affine heads that are not small: by the norms of the blocks of J J^T.

J = A + B + C, what moves through values, keys and queries. With w_ij = v_j - o_i and F_i the
matrix of columns P_ij w_ij (it is V^T M(P_i)),

    A dX = P dX W_V,    (B dX)_i = F_i dX u_i,    (C dX)_i = s T_i W_Q^T dx_i,    T_i = F_i K.

Block (i, l) of A A^T is (P P^T)_il Phi Phi^T; that of B B^T is <u_i, u_l> F_i F_l^T, where
||F_i F_l^T|| is at most ||F_i|| ||F_l|| and at most sum_j P_ij ||w_ij|| P_lj ||w_lj||; C C^T is
block diagonal; that of (A + B) C^T is P_il (Phi + w_il u_i^T) X (s T_l R^T)^T, where W_Q = X R
with ||X|| <= 1. M is the matrix of what these norms add up to, and A B^T is met as a whole:

    ||J||^2 <= ||M|| + 2 ||A B^T||.

Block by block, what moves through keys would be as large as if all w_ij were parallel; and the
paths hardly meet in J J^T, while in J their norms add. Everything holds in any precision: what is
returned is raised by its rounding error. u below is the unit roundoff, eps / 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.bounds.ingredients import AffineRows, Centred, query_term, rounding, tiles
from lipaudit.theory.policy import POLICY, Policy
from lipaudit.theory.spectral.upper import keeps_single, nonnegative_norm, nonnegative_pair

Rows = Float[Tensor, "batch heads n"]

CLEAR = 0.01
"""A sum that cancels to less than this share of its terms has lost what single precision has."""

FAINT = 1e-25
"""A square may have lost what single precision takes for 0 where it is less, in units of values:
as where those are constant, and queries and keys hardly move the output."""

KEYS_MATTER = 0.25
"""What B B^T may be of A A^T at least before closer norms of its blocks are worth their cost."""


def gram_bound(
    at: Centred, rows: AffineRows, *, joint: bool, steps: int = 6, policy: Policy = POLICY
) -> Float[Tensor, "batch heads"]:
    """Bound ||J||; in single precision first where that pays, and again where it costs.

    `joint`: queries and keys read one input. Where they read two, C meets neither A nor B.
    """
    if at.p.shape[-1] < policy.single_blocks or not keeps_single(at.p.device):
        return _limits(at, rows, joint, steps, policy)[0].sqrt()
    square, least = _limits(at.single, rows.to_single(), joint, steps, policy)
    # ||M|| + 2 ||A B^T|| in exact arithmetic lies between the two: where they are close, so is
    # `square` to it. Negated, so that NaN (an overflow) counts as apart.
    apart = ~((square <= (1 + policy.single_loss) ** 2 * least) & (square > FAINT))
    if apart.any():
        these = (*apart.nonzero(as_tuple=True), None)
        square[apart] = _limits(at.pick(these), rows.pick(these), joint, steps, policy)[0][:, 0]
    return square.sqrt()


def _limits(
    at: Centred, rows: AffineRows, joint: bool, steps: int, policy: Policy
) -> tuple[Tensor, Tensor]:
    """Return what ||M|| + 2 ||A B^T|| is at most, and at least."""
    square, least = at.s.new_empty(2, *at.p.shape[:2], dtype=torch.float64)
    for tile in tiles(at.p, policy):
        square[tile], least[tile] = _tile_limits(at.pick(tile), rows.pick(tile), joint, steps)
    return square.nan_to_num(torch.inf), least  # NaN comes of numbers beyond the largest


def _tile_limits(at: Centred, rows: AffineRows, joint: bool, steps: int) -> tuple[Tensor, Tensor]:
    pw = at.w2.sqrt().mul_(at.p)
    t, f = query_term(at, rows), row_lengths(at, rows, pw)
    keys = KeyBlocks(pw @ pw.mT, _turn_products(rows))
    matrix = block_norms(at, rows, keys, pw, (t[0], f[0]), joint=joint)
    # In units of its largest entry no square of M overflows.
    largest = matrix.amax((-2, -1)).clamp_min(torch.finfo(matrix.dtype).tiny)
    norm, z = nonnegative_pair(matrix.div_(largest[..., None, None]), steps)
    z = z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    cross, less_cross = value_key_norm(at, rows, f, z)
    # Entries of M are sums of m products of numbers >= 0: off by at most (m + 40) u, relatively.
    share = 2 * _sums(at.p)
    square = (1 + share) * (norm * largest).double() + 2 * cross
    if matrix.dtype == torch.float64:
        return square, square  # where there is nothing to fall back on
    # ||M|| >= <z, M z>, and M is the matrix here less what limits exceed.
    reached = largest * ((z @ matrix) * z).sum((-2, -1))
    less = _less_of_keys(z, at, rows, keys, pw, f)
    less += _less_of_queries(z, at, rows, pw, t, joint)
    return square, ((1 - share) * reached - less).double() + 2 * (cross - less_cross)


def _sums(p: Tensor) -> float:
    """Return more than the relative error of sums over tokens, twice, of numbers >= 0."""
    return (sum(p.shape[-2:]) + 16) * torch.finfo(p.dtype).eps


class KeyBlocks(NamedTuple):
    """Limits of the two factors of the blocks of B B^T, (batch, heads, n, n) each."""

    common: Tensor  # sum_j P_ij ||w_ij|| P_lj ||w_lj||
    turns: Tensor  # |<u_i, u_l>|


def _turn_products(rows: AffineRows) -> Tensor:
    # <u_i, u_l> costs r + 4 roundings in units of ||u_i|| ||u_l||, fewer than rounding() allows.
    turns = (rows.images @ rows.images.mT).abs_()
    return turns.addcmul_(rounding(rows.images) * rows.u, rows.u.mT)


def block_norms(
    at: Centred,
    rows: AffineRows,
    keys: KeyBlocks,
    pw: Float[Tensor, "batch heads n m"],
    sizes: tuple[Rows, Rows],
    *,
    joint: bool,
) -> Float[Tensor, "batch heads n n"]:
    """Return M, given P_ij ||w_ij|| and the limits of s ||T_i W_Q^T|| and of ||F_i||."""
    t, f = (size[..., None] for size in sizes)
    matrix = torch.minimum(keys.common, f * f.mT).mul_(keys.turns)
    value = rows.wv * at.p
    matrix += value @ value.mT
    matrix.diagonal(0, -2, -1).add_(t[..., 0].square())
    if joint:
        # ||(Phi + w u^T) X|| <= ||Phi X|| + ||w|| ||X^T u||; block (l, i) is the transpose.
        meeting = (rows.shared * at.p).addcmul_(pw, rows.inside).mul_(t.mT)
        matrix += meeting
        matrix += meeting.mT
    return matrix


def row_lengths(
    at: Centred, rows: AffineRows, pw: Float[Tensor, "batch heads n m"]
) -> tuple[Rows, Rows]:
    """Bound ||F_i|| of every query, and by how much it can be less.

    By the Frobenius norm; and by a Schatten-4 norm in heads where keys matter: B B^T is at most
    sum_i ||u_i||^2 ||F_i||_F^2, and A A^T at least ||W_V||^2 ||P^T e||^2 for a unit vector e.
    """
    length, less = torch.linalg.vector_norm(pw, dim=-1), _less_of_lengths(at)
    keys = (rows.u[..., 0] * length).square().sum(-1)
    values = rows.wv[..., 0, 0].square() * at.p.sum(-2).square().sum(-1) / at.p.shape[-2]
    matter = ~(keys <= KEYS_MATTER * values)
    if matter.any():
        these = (*matter.nonzero(as_tuple=True), None)
        f, gap = row_spread(at.pick(these), length[these], less[these])
        length[matter], less[matter] = f[:, 0], gap[:, 0]
    return length, less


def row_spread(at: Centred, length: Rows, less: Rows) -> tuple[Rows, Rows]:
    """Bound ||F_i||, and by how much it can be less, given both of the Frobenius norm.

    With q_j = P_ij^2, c_j = <v_j, o_i> - ||o_i||^2 / 2 the fourth power of the Schatten-4 norm is
    sum_jl q_j q_l (<v_j, v_l> - c_j - c_l)^2 = A - 4 B + 2 C sum_j q_j + 2 R^2,
    A = sum_jl q_j q_l g_jl^2, B = sum_jl q_j q_l c_j g_jl, C = sum_j q_j c_j^2, R = sum_j q_j c_j.
    """
    q, tiny = at.p.square(), torch.finfo(at.p.dtype).tiny
    c = (at.v2.mT - at.w2).mul_(0.5)
    qc = q * c
    b = (q @ at.gram).mul_(qc).sum(-1)
    a = (q @ at.gram.square()).mul_(q).sum(-1)
    total, r, cc = q.sum(-1), qc.sum(-1), c.mul_(qc).sum(-1)
    fourth = a - 4 * b + 2 * total * cc + 2 * r.square()
    # B^2 <= A C sum q and R^2 <= C sum q, so terms add up to at most 3 (A + 2 C sum q); each is a
    # sum of m terms of sums of m, off by at most (2 m + 32) u, 4 times which is allowed for the 3
    # and what A, C and sum q are off by themselves. What underflows is below the smallest number.
    error = 4 * rounding(at.p) * (a + 2 * total * cc) + 8 * at.p.shape[-1] ** 2 * tiny
    # The root is the norm of D (g - c 1^T - 1 c^T) D, D^2 = diag q, which moves by at most
    # (|dg| + 2 |dc|) sum q. In units of ||v||^2 + ||o||^2 at most, g is off by (d_v + 4) u; w2 is
    # raised by and off by less than rounding() each, c by half of that and a few u.
    reach = at.v2.amax(-2) + at.o2[..., 0]
    moved = 3 * rounding(at.v) * total * reach
    upper = ((fourth + error).clamp_min(0.0).sqrt() + moved).sqrt()
    lower = ((fourth - error).clamp_min(0.0).sqrt() - moved).clamp_min(0.0).sqrt()
    clear = fourth >= CLEAR * torch.maximum(a + 2 * total * cc, CLEAR * (total * reach).square())
    f = torch.where(clear, torch.minimum(upper, length), length)
    return f, f - torch.where(clear, torch.minimum(lower, length - less), length - less)


def _less_of_lengths(at: Centred) -> Rows:
    """Return how far (sum_j P_ij^2 ||w_ij||^2)^1/2 can be below what w2 gives."""
    # ||w||^2 is raised by and off by less than rounding (v^2 + o^2) each, so ||w|| by at most the
    # smaller of moved / ||w|| and moved^1/2: x^1/2 - (x - m)^1/2 = m / (x^1/2 + (x - m)^1/2).
    moved = 2 * rounding(at.v) * (at.v2.amax(-2, keepdim=True) + at.o2)
    shift = torch.minimum(moved / at.w2.amin(-1, keepdim=True).sqrt(), moved.sqrt())
    return shift[..., 0] * torch.linalg.vector_norm(at.p, dim=-1)


def value_key_norm(
    at: Centred, rows: AffineRows, spread: tuple[Rows, Rows], e: Float[Tensor, "batch heads 1 n"]
) -> tuple[Float[Tensor, "batch heads"], Float[Tensor, "batch heads"]]:
    """Bound ||A B^T||, and by how much it can be less.

    A B^T g = H a with H_il = (P F_l^T g_l)_i and a_l = W_V^T u_l: with rho_l >= ||P F_l^T||
    ||H a||_F <= ||H diag(1 / rho)||_F ||diag(rho) a|| <= ||g|| ||diag(rho) a||. For a unit vector
    e and y = P^T e it is P = e y^T + P', e^T P' = 0: rho_l^2 = ||F_l y||^2 + ||P'||^2 ||F_l||^2.
    Any e >= 0 will do; near the leading singular vector P' is small.
    """
    (f, less_f), p, share = spread, at.p, _sums(at.p)
    e = (e @ p) @ p.mT
    e = e / torch.linalg.vector_norm(e, dim=-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    y = e @ p
    py = p @ y.mT
    image = torch.linalg.vector_norm((p * y) @ at.v - at.o * py, dim=-1)
    # y is off by (n + 4) u, relatively, sums over keys by (m + 6) u of sum_j P_ij y_j ||w_ij||.
    off = 2 * share * py[..., 0] * (at.v2.amax(-2) + at.o2.amax(-2)).mul_(2.0).sqrt()
    part = e.mT @ y
    rest = nonnegative_norm((p - part).abs_().add_(part, alpha=share), 3)[..., None]
    rho = (1 + share) * torch.hypot(image + off, rest * f)
    less = 2 * off + rest * less_f + 2 * share * rho
    lengths = torch.linalg.vector_norm(rows.a, dim=-1)
    return _weighted_norm(rho, rows.a), torch.linalg.vector_norm(less * lengths, dim=-1)


def _weighted_norm(weights: Rows, a: Tensor) -> Float[Tensor, "batch heads"]:
    """Return at least ||diag(weights) a||, a Schatten-8 norm, in double precision."""
    scaled = (weights[..., None] * a).double()
    gram = scaled.mT @ scaled
    return torch.linalg.matrix_norm(gram @ gram).sqrt().sqrt()


def _less_of_keys(
    z: Float[Tensor, "batch heads 1 n"],
    at: Centred,
    rows: AffineRows,
    keys: KeyBlocks,
    pw: Float[Tensor, "batch heads n m"],
    spread: tuple[Rows, Rows],
) -> Float[Tensor, "batch heads"]:
    """Return at least <z, D z>, D what the limits of the blocks of B B^T exceed these by."""
    f, least = spread[0][..., None], (spread[0] - spread[1])[..., None]
    length, less = torch.linalg.vector_norm(pw, dim=-1)[..., None], _less_of_lengths(at)[..., None]
    # Cauchy and Schwarz, and x y - (x - a)(y - b) <= x b + a y.
    common = keys.common - length * less.mT - less * length.mT
    lost = torch.minimum(keys.common, f * f.mT) - torch.minimum(common, least * least.mT)
    turned = z * (rows.u * f).mT
    blocks = ((z @ lost.mul_(keys.turns)) * z).sum((-2, -1))
    return blocks + 2 * rounding(rows.images) * turned.sum((-2, -1)).square()


def _less_of_queries(
    z: Float[Tensor, "batch heads 1 n"],
    at: Centred,
    rows: AffineRows,
    pw: Float[Tensor, "batch heads n m"],
    limit: tuple[Rows, Rows],
    joint: bool,
) -> Float[Tensor, "batch heads"]:
    """The same of the blocks of C C^T and (A + B) C^T."""
    t, less = (size[..., None, :] for size in limit)
    lost = (z.square() * t * less).sum((-2, -1))
    if joint:
        inside = z * rows.inside.mT
        along = rows.shared * (z @ at.p) + inside @ pw
        lost += (along * z * less).sum((-2, -1))
        moved = (inside[..., 0, :] * _less_of_lengths(at)).sum(-1)
        lost += moved * torch.linalg.vector_norm(z * t, dim=(-2, -1))
    return 2 * lost
