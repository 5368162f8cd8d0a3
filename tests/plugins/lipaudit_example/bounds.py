"""A bound of one's own: formula, proof and record. Nothing here needs torch before it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import Bound

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.heads import Projection
    from lipaudit.theory.ingredients import Ingredients


def frobenius(known: Ingredients) -> Tensor:
    """Return ||W_V||_F ||P||_F + s/2 ||V||_F (||K W_Q^T||_F + ||Q W_K^T||_F)."""
    heads = known.heads
    maps = (heads.to_q, heads.to_k, heads.to_v)
    if heads.pairs is not None or any(to is not None and to.local is not None for to in maps):
        return known.nothing
    # J dX = P dV + (V^T M(P_i) (s K dq_i + s dK q_i))_i, with M(P_i) = diag(P_i) - P_i P_i^T, part
    # of a matrix of norm <= 1/2. ||P dV||_F <= ||P|| ||W_V|| ||dX||_F. dq_i = W_Q^T dx_i: the
    # second term acts query by query, ||V|| 1/2 s ||K W_Q^T|| at most. Row i of the third is
    # V^T M(P_i) y_i with y_ij = s <q_i, W_K^T dx_j>, and
    # sum_ij y_ij^2 <= s^2 ||Q W_K^T||^2 ||dX||_F^2. Every spectral norm is at most the Frobenius
    # norm. Keys that no query sees, and padded queries, have P = 0: they are left out.
    p = heads.attention()
    k, v = (rows * (p.sum(-2) > 0)[..., None] for rows in (heads.k, heads.v))
    q = heads.q * (p.sum(-1) > 0)[..., None]
    by_queries = norm(k @ transpose(heads.to_q, q))
    by_keys = norm(q @ transpose(heads.to_k, k))
    growth = 0.5 * heads.scale.abs() * norm(v) * (by_queries + by_keys)
    return norm(transpose(heads.to_v, v)) * norm(p) + growth


def transpose(projection: Projection | None, rows: Tensor) -> Tensor:
    """Return W^T of every head; 0 for rows that depend on nothing."""
    return rows.new_zeros(rows.shape[-1], 1) if projection is None else projection.weight.mT


def norm(matrices: Tensor) -> Tensor:
    """Return the Frobenius norms."""
    return matrices.square().sum((-2, -1)).sqrt()


FROBENIUS = Bound(
    name="frobenius",
    label="Frobenius",
    meaning="Frobenius norms in place of spectral ones, and ||M(P_i)|| <= 1/2.",
    formula="||W_V||_F ||P||_F + s/2 ||V||_F (||K W_Q^T||_F + ||Q W_K^T||_F)",
    source="an example",
    explanation="The size of weights, tokens and attention map, without any spectral norm.",
    compute=frobenius,
    null="needs affine projections and logits s q k^T",
    better="lower",
    log10_label="log10 Frob.",
    scaling=True,
)
