"""The factors of Theorem 3 for heads of every kind, and that of Appendix C."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.bounds.ingredients import (
    Centred,
    Ingredients,
    factor,
    local_map,
    projections,
    tiles,
    value_norms,
)
from lipaudit.theory.exact.attend import key_gradients, query_gradients
from lipaudit.theory.heads import Projection
from lipaudit.theory.policy import POLICY, Policy
from lipaudit.theory.spectral.upper import single_pays, spectral_norm


def value_and_growth(known: Ingredients) -> tuple[Tensor, Tensor]:
    """Return the factors of ||P|| and of max_i ||M(P_i)|| in `theorem3` for heads of every kind.

    They are max_j ||Phi^v_j|| and ||V_c|| (max_j ||B_j Phi^k_j|| + max_i ||A_i Phi^q_i||). For
    plain logits every A_i is s K_c, the keys less their mean, and every B_j is s Q.
    """
    heads, at, policy = known.heads, known.at, known.policy
    to_q, to_k, _ = projections(heads)
    queries, keys = at.p.sum(-1) > 0, at.seen[..., 0] > 0
    values = (value_norms(heads) * keys).amax(-1)
    if heads.pairs is None:
        reach = _largest_image(heads.q * queries[..., None], to_k, keys, policy)
        reach = heads.scale.abs() * (reach + _largest_image(at.k, to_q, queries, policy))
        return values, spectral_norm(at.v) * reach
    p, d = at.p, heads.q.shape[-1]
    by_query, by_key = torch.zeros_like(p[..., 0]), torch.zeros_like(p[..., 0, :])
    for i in policy.chunks(p.shape[2], 2 * by_key.numel() * d):  # unseen pairs do not count
        rows = (p[:, :, i] > 0)[..., None] * key_gradients(heads, i)
        by_query[..., i] = _images_norm(rows, to_q, i)
    for j in policy.chunks(p.shape[3], 2 * by_query.numel() * d):
        rows = (p[..., j] > 0).mT[..., None] * query_gradients(heads, j)
        by_key[..., j] = _images_norm(rows, to_k, j)
    reach = (by_query * queries).amax(-1) + (by_key * keys).amax(-1)
    return values, spectral_norm(at.v) * reach


def _images_norm(rows: Tensor, projection: Projection, tokens: slice) -> Tensor:
    """Return ||rows_i Phi_i|| of some tokens i, each with its own rows."""
    local = local_map(projection)
    local = local if local.shape[2] == 1 else local[:, :, tokens]
    return spectral_norm(rows @ (local @ factor(projection).mT))


def row_spread(at: Centred, gram: Tensor, policy: Policy = POLICY) -> Float[Tensor, "batch heads"]:
    """Bound max_i ||X^T M(P_i)||, with the Gram matrix of the tokens less their mean.

    Column j of X^T M(P_i) is P_ij (x_j - m), m = sum_l P_il x_l. With w_j = P_ij^2 and
    c_j = <x_j, m> - ||m||^2 / 2 the fourth power of its Schatten-4 norm is
    sum_jl w_j w_l (<x_j, x_l> - c_j - c_l)^2: three products with the Gram matrix for all rows,
    within 1 % of the spectral norm on trained heads. Where it pays, the maps are met in
    single precision first, and again where its rounding costs more than `single_loss`.
    """
    # With entries at most 1 the allowance for c below is one number, and nothing overflows.
    largest = gram.diagonal(0, -2, -1).amax(-1).clamp_min(torch.finfo(gram.dtype).tiny)
    unit = gram / largest[:, None, None]
    if not single_pays(at.p, policy):
        square = squared_spread(at.p, unit, policy)[0]
    else:
        square, below = squared_spread(at.single.p, unit.float(), policy)
        # Both ends hold: below <= truth <= square. Apart from a share, double precision decides.
        apart = square > (1 + policy.single_loss) ** 2 * below
        if apart.any():
            square = torch.where(apart, squared_spread(at.p, unit, policy)[0], square)
    return (square * largest[:, None]).sqrt()


def squared_spread(p: Tensor, gram: Tensor, policy: Policy = POLICY) -> tuple[Tensor, Tensor]:
    """Bound the largest root of the sums S of `row_spread` from both sides; gram <= 1.

    S = A - 4 B + 2 C + 2 R^2 with A = sum_jl w_j w_l g_jl^2, B = sum_jl w_j w_l c_j g_jl,
    C = sum_j w_j sum_j w_j c_j^2 and R = sum_j w_j c_j: B^2 <= A C and R^2 <= C. Sums of N terms
    of sums have relative errors of at most e / 2, e = 2 (N + 16) eps, so that of S is below
    3 e (A + 2 C); that of c is below e / 2, which moves the root of S by at most e sum_j w_j.
    """
    tails = gram.square()
    sums = p.new_empty(5, *p.shape[:3])
    for tile in tiles(p, policy):
        flat, g = p[tile].flatten(1, 2), gram[tile[0]]
        # c_j = <x_j, m> - ||m||^2 / 2 by the Gram matrix: (P g)_ij - (P g P^T)_ii / 2.
        w, c = flat.square(), flat @ g
        c -= 0.5 * (flat * c).sum(-1, keepdim=True)
        wc = w * c
        b = (w @ g).mul_(wc).sum(-1)
        a = (w @ tails[tile[0]]).mul_(w).sum(-1)
        parts = torch.stack([a, b, c.mul_(wc).sum(-1), wc.sum(-1), w.sum(-1)])
        sums[:, *tile] = parts.view(5, len(flat), -1, p.shape[2])
    a, b, q, r, total = sums.double()
    # (g - c_j - c_l)^2 = g^2 - 2 g (c_j + c_l) + c_j^2 + c_l^2 + 2 c_j c_l, summed with w_j w_l.
    # |terms| add up to A + 4 |B| + 2 C + 2 R^2 <= 3 (A + 2 C), each off by e / 2 = 2 (N + 16) u 2.
    e = 2 * (p.shape[-1] + 16) * torch.finfo(p.dtype).eps
    fourth, error = a - 4 * b + 2 * total * q + 2 * r.square(), 3 * e * (a + 2 * total * q)
    # S^1/2 is the norm of D (g - c 1^T - 1 c^T) D, D^2 = diag w: it moves by 2 (e / 2) sum_j w_j.
    upper = (1 + e) * ((fourth + error).clamp_min(0.0).sqrt() + e * total)
    lower = (fourth - error).clamp_min(0.0).sqrt() - e * total
    return upper.amax(-1), lower.amax(-1)


def _largest_image(rows: Tensor, projection: Projection, used: Tensor, policy: Policy) -> Tensor:
    """Return max_i ||rows Phi_i|| over the tokens that are used, some at a time.

    E = (rows Phi_i)(rows Phi_i)^T has ||E^2||_F / ||E||_F <= ||E|| <= ||E^2||_F^(1/2): eigenvalues
    are computed only for tokens whose upper limit reaches every lower one.
    """
    small = torch.linalg.qr(rows, mode="r").R[:, :, None]
    tokens, weight = local_map(projection), factor(projection).mT
    total = tokens.shape[2]
    entries = len(rows) * rows.shape[1] * rows.shape[3] * weight.shape[-1]
    some = max(1, policy.chunk_entries // entries)
    size = total if total * entries <= policy.map_limit else some
    parts = []
    for i in range(0, total, size):
        images = small @ tokens[:, :, i : i + size] @ weight
        if projection.local is not None:
            images = images * used[..., i : i + size, None, None]
        # ||E^2||_F <= ||E|| ||E||_F, and ||E||^2 = ||E^2|| <= ||E^2||_F.
        e = images @ images.mT
        sizes, upper = (torch.linalg.matrix_norm(power) for power in (e, e @ e))
        lower = (upper / sizes).nan_to_num(0.0).amax(-1, keepdim=True)
        norm = upper.sqrt()
        left = norm >= lower * (1 - 1e-9)
        norm[left] = torch.linalg.eigvalsh(e[left])[..., -1].clamp_min(0.0)
        parts.append(norm.amax(-1))
    return torch.stack(parts).amax(0).sqrt()
