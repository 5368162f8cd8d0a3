"""The sharp bound on a ball around X: a certified local Lipschitz constant of a head.

Every ingredient of B at X is followed over all X' with ||X' - X||_F <= r: logits, the attention
map P between two maps P- and P+, values, outputs and the vectors u_i. ||W_K|| r is how far a key
can move, and so on (ours; the symbols are those of `sharp`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.errors import UsageError
from lipaudit.theory.bounds.affine import (
    AffineRows,
    affine_rows,
    query_term,
    split_excess,
)
from lipaudit.theory.bounds.centred import (
    Centred,
    are_affine,
    centred,
    factor,
    projections,
    squared_distances,
)
from lipaudit.theory.bounds.head_bounds import ROUNDING
from lipaudit.theory.heads import Heads
from lipaudit.theory.spectral.upper import nonnegative_norm, spectral_norm


def ball_sharp(heads: Heads, r: float) -> Float[Tensor, "batch heads"]:
    """Return a Lipschitz constant of every head on the ball ||X' - X||_F <= r.

    ||B+||, B+_ij = P+_ij beta+_ij + delta_ij t+_i with each factor at its largest on the ball. At
    r = 0 it is the block bound at X. Any mask or position bias that does not depend on X.
    Useful while the logits move by less than about 1; beyond that it explodes.

    Args:
        heads: self-attention with affine (or constant) projections; others give NaN.
        r: radius, in the Frobenius norm over all tokens of a sample.

    Raises:
        UsageError: r is negative.
    """
    if r < 0:
        raise UsageError(f"the radius of a ball cannot be negative: {r}")
    heads = heads.to(torch.float64)
    if heads.x_kv is not None or not are_affine(heads):
        return torch.full_like(heads.q[..., 0, 0], torch.nan)
    at = centred(heads)
    rows = affine_rows(heads, at)
    move = _moves(heads, at, r)
    blocks = _beta(at, rows, move).mul_(move.upper)
    blocks.diagonal(0, -2, -1).add_(_query_term(heads, at, rows, move))
    return nonnegative_norm(blocks) * (1 + ROUNDING)


@dataclass(frozen=True)
class _Moves:
    """How far things move on the ball: bounds over all X' in it."""

    upper: Tensor  # P+, the largest P'_ij
    p: Tensor  # the largest |P'_ij - P_ij|
    w: Tensor  # ||v_j - o_i|| at X, (n, m)
    keys: Tensor  # ||k_j - sum_l P_il k_l|| at X, (n, m)
    key: Tensor  # largest move of a key, r ||W_K||
    u: Tensor  # largest move of u_i
    shift: Tensor  # largest move of v_j - o_i, (n, 1)


def _moves(heads: Heads, at: Centred, r: float) -> _Moves:
    to_q, to_k, to_v = projections(heads)
    key, value = (r * spectral_norm(to.weight)[:, None, None] for to in (to_k, to_v))
    product = spectral_norm(factor(to_q) @ factor(to_k).mT)[..., None]
    means = at.p @ at.k
    along = _distances(means @ to_q.weight.mT, at.k @ to_q.weight.mT)
    queries = torch.linalg.vector_norm(heads.q @ to_k.weight.mT, dim=-1, keepdim=True)
    upper, change = _attention_range(at.p, at.s.abs() * r * (along + queries + r * product))
    w = at.w2.sqrt()
    return _Moves(
        upper=upper,
        p=change,
        w=w,
        keys=_distances(means, at.k),
        key=key,
        u=at.s.abs() * r * product,
        shift=2 * value + (change * w).sum(-1, keepdim=True),
    )


def _distances(a: Tensor, b: Tensor) -> Tensor:
    a2, b2 = (rows.square().sum(-1, keepdim=True) for rows in (a, b))
    return squared_distances(a, b, a2, b2).sqrt()


def _attention_range(p: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Return P+ and max(P+ - P, P - P-) when every logit moves by at most eps."""
    attended = (p.sum(-1, keepdim=True) > 0).to(p)  # no padded queries
    # An entry that underflowed is at most the smallest number; a masked one stays about there.
    log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log()
    upper = torch.sigmoid(log_p + eps - _log_others(log_p - eps)) * attended
    lower = torch.sigmoid(log_p - eps - _log_others(log_p + eps)) * attended
    return upper, torch.maximum(upper - p, p - lower).clamp_min(0.0)


def _log_others(logits: Tensor) -> Tensor:
    """Return log sum_{l != j} exp(logits_l), that of the largest entry without cancellation."""
    largest, place = logits.max(-1, keepdim=True)
    weights = (logits - largest).exp()
    rest = weights.scatter(-1, place, 0.0).sum(-1, keepdim=True)
    others = (rest + 1 - weights).scatter(-1, place, rest)
    return others.log() + largest


def _beta(at: Centred, rows: AffineRows, move: _Moves) -> Tensor:
    """Bound the block norms over the ball: the split, or the triangle inequality."""
    u = rows.u + move.u
    turned = (2 * move.u / rows.u).nan_to_num(2.0).clamp_max(2.0)
    split = (split_excess(at, rows) + rows.u.square() * at.w2).clamp_min(0.0).sqrt()
    split = split + rows.wv * turned + move.u * move.w + u * move.shift
    triangle = rows.wv + (move.w + move.shift) * u
    return torch.minimum(torch.hypot(rows.wv, split), triangle)


def _query_term(heads: Heads, at: Centred, rows: AffineRows, move: _Moves) -> Tensor:
    """Bound s ||T_i W_Q^T|| over the ball."""
    changed = move.p * move.w * move.keys
    moved = move.upper * (move.shift * (move.keys + move.key) + move.w * move.key)
    norm = spectral_norm(projections(heads)[0].weight)[:, None]
    start, _ = query_term(at, rows)
    return start + at.s[..., 0].abs() * norm * (changed + moved).sum(-1)
