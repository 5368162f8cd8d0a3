"""Effects of rounding: in the forward pass, and in the computation of norms and bounds.

A norm and its bounds are computed from the same q, k, v and P, in float64. Rounding in the forward
pass changes both alike (`forward_error`), so it cannot explain a bound below its norm. Only
`bound_error` can: the rounding of the products with J, and of bounds.

With c_ij = P_ij (v_j - o_i), J is a sum of three parts: J^T u has the cotangents sum_i P_ij u_i of
v_j, sum_i <u_i, c_ij> s q_i of k_j and sum_j <u_i, c_ij> s k_j of q_i, each sent on through the
Jacobian Phi of its token. Let gamma bound the relative error of a sum of as many terms as all
sums of one product have together. In exact arithmetic, with ||W||_F for ||Phi||, the parts are

    T(c) = ||P|| ||W_V||_F + max_i s ||q_i|| (sum_ij ||c_ij||^2)^1/2 ||W_K||_F
           + max_j s ||k_j|| max_i sum_j ||c_ij|| ||W_Q||_F

at most in norm; sums of products are off by gamma times that. c_ij itself is off by gamma times
d_ij = 2 P_ij max ||v||, for v_j - o_i may cancel, and in the largest entry of a row, at key a, by
gamma times 2 (1 - P_ia) max ||v||: see `anchor_outputs`. Without a sink, v stands less its mean
under P here and in the norms (`mean_value`). So J^T u is off by at most

    E = gamma (T(c) + T(d)) ||u||,

and ||J^T u||^2, computed with the Gram matrices W^T W, by gamma (T(c) + E)^2 more. A norm is too
large by at most E + (E^2 + gamma (T(c) + E)^2) / (2 ||J||). Bounds are raised by their own
rounding (`head_bounds`), but not by the error E of the blocks of J that they are made of.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.exact.attend import anchor_outputs, largest_gradients, mean_value
from lipaudit.theory.heads import Heads
from lipaudit.theory.ingredients import local_map, projections

_PLAIN = "donot_use_mm_for_euclid_dist"  # products would cost distances half of their digits


def forward_error(heads: Heads) -> Float[Tensor, "batch heads"]:
    """Estimate the relative change of ||J|| by the rounding of q and k in the model.

    The rows q_i, k_j have relative errors of about eps, and so have the biases of logits: a logit
    l_i = max_j (s ||q_i|| ||k_j|| + |B_ij|) moves by up to d_i = 2 eps l_i, and with it
    every P_ij and c_ij = P_ij (v_j - o_i) by a factor of up to exp(2 d_i). Rows that stay one-hot
    move by less. An estimate: the constants of the model's own sums are not known.

    Args:
        heads: the heads of one layer, of any kind, in the precision of the model.

    Returns:
        At most 1, the largest over the queries.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0], [4.0, 3.0]]]), torch.eye(2)[None]
    >>> forward_error(affine_heads(x, eye, eye, eye)).log10().round()
    tensor([[-5.]])
    """
    eps = torch.finfo(heads.q.dtype).eps
    rows, keys = (torch.linalg.vector_norm(t, dim=-1) for t in (heads.q, heads.k))
    logits = heads.scale.abs()[..., None] * rows * keys.amax(-1, keepdim=True)
    if heads.bias is not None and heads.bias.dtype != torch.bool:  # a mask moves no logit
        added = [
            (heads.bias_rows(*rows).nan_to_num(0.0).abs() * heads.visible(*rows)).amax(-1)
            for rows in heads.row_blocks()
        ]
        logits = logits + torch.cat(added, -1)
    moved = 2 * eps * logits
    if heads.valid is not None:
        moved = moved * heads.valid[:, None]
    return torch.expm1(2 * moved.amax(-1)).clamp_max(1.0)


def bound_error(heads: Heads, norm: Float[Tensor, "batch heads"]) -> Float[Tensor, "batch heads"]:
    """Return how far a correct bound may be below ||J|| because of rounding in both.

    Args:
        heads: the heads of one layer, in the precision in which both were computed.
        norm: ||J|| of each head.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0], [4.0, 3.0]]]).double(), torch.eye(2).double()[None]
    >>> bound_error(affine_heads(x, eye, eye, eye), torch.ones(1, 1)).log10().round()
    tensor([[-12.]], dtype=torch.float64)
    """
    share, (true, lost) = _sum_error(heads), _parts(heads)
    if len(heads.row_blocks()) > 1:  # both compute P anew, in different orders
        share = share + forward_error(heads)
    error = share * (true + lost)
    square = error.square() + share * (true + error).square()
    return 2 * error + square / (2 * norm).clamp_min(torch.finfo(norm.dtype).tiny)


def ball_error(heads: Heads, r: float) -> Float[Tensor, "batch heads"]:
    """Return how much rounding may raise a norm that autograd finds within r of X.

    There P is any map: ||P||^2 <= N. Autograd subtracts o_i from every v_j, so that c and d are
    both at most 2 P_ij max ||v||, v less its mean under P at X.
    """
    phi, (q, k) = _sizes(heads), largest_gradients(heads)
    v = _longest(heads.v - mean_value(heads.attention(), heads.v))
    s, root = heads.scale.abs(), heads.q.shape[2] ** 0.5
    q, k, v = q + r * s * phi[0], k + r * s * phi[1], v + r * phi[2]
    parts = root * phi[2] + 2 * v * (root * q * phi[1] + k * phi[0])
    return 2 * _sum_error(heads) * parts


def _sum_error(heads: Heads) -> Tensor:
    """Return gamma: more than n u / (1 - n u) for the n terms of all sums, u = eps / 2."""
    (n, d), (m, dv), width = heads.q.shape[2:], heads.v.shape[2:], heads.x.shape[-1]
    terms = n + m + width + 3 * d + 2 * dv + 16
    return heads.scale.new_tensor(terms * torch.finfo(heads.q.dtype).eps)


def _parts(heads: Heads) -> tuple[Tensor, Tensor]:
    """Return T(c) and T(d), in chunks of queries."""
    phi, (q, k), v = _sizes(heads), largest_gradients(heads), heads.v
    columns, sink = torch.zeros_like(heads.k[..., 0]), heads.sink_share()
    squares, most = torch.zeros(2, 2, *heads.q.shape[:2]).to(heads.q)
    for i, j in heads.row_blocks():
        p = heads.rows(i, j)
        v = v - mean_value(p, v) if i == 0 and sink is None else v
        rows = anchor_outputs(p, v, None if sink is None else sink[:, :, i:j])
        true = p * torch.cdist(rows.o, v, compute_mode=_PLAIN)
        true = true.scatter(-1, rows.key, torch.linalg.vector_norm(rows.c, dim=-1, keepdim=True))
        lost = 2 * _longest(v)[..., None, None] * p.scatter(-1, rows.key, rows.share)
        columns += p.sum(-2)
        for part, c in enumerate((true, lost)):
            squares[part] += c.square().sum((-2, -1))
            most[part] = torch.maximum(most[part], c.sum(-1).amax(-1))
    # ||P||^2 <= (largest sum of a row, 1) (largest sum of a column).
    values = columns.amax(-1).sqrt() * phi[2]
    true, lost = (values + q * squares.sqrt() * phi[1] + k * most * phi[0]).unbind(0)
    return true, lost


def _sizes(heads: Heads) -> list[Tensor]:
    """Return upper limits of ||Phi||_F for the queries, keys and values of each head."""
    norm = torch.linalg.matrix_norm
    return [norm(local_map(to)).amax(-1) * norm(to.weight) for to in projections(heads)]


def _longest(rows: Float[Tensor, "batch heads n d"]) -> Float[Tensor, "batch heads"]:
    return torch.linalg.vector_norm(rows, dim=-1).amax(-1)
