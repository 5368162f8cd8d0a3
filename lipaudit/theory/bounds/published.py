"""The published bounds of a head's Jacobian norm, each from its few ingredients.

[Y25] Yudin et al., arXiv 2507.07814; [C24] Castin et al., ICML 2024; [H24] Hu et al., ECCV 2024.
Everything here is in float64; `bounds` says where each bound holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipaudit.theory.bounds.affine import Centred, Weights, factor, local_map, projections, tiles
from lipaudit.theory.bounds.sharp import value_norms
from lipaudit.theory.exact.attend import key_gradients, query_gradients
from lipaudit.theory.heads import Heads, Projection
from lipaudit.theory.policy import POLICY, Policy
from lipaudit.theory.spectral.upper import gram_norm, single_pays, spectral_norm


@dataclass(frozen=True)
class Tokens:
    """What all heads of a layer share, (batch, 1) each: N, R, and norms of X or [X 1]."""

    count: Tensor
    radius: Tensor
    norm: Tensor
    frobenius: Tensor
    longest: Tensor  # R, or max_i ||(x_i, 1)||
    off: Tensor  # the tokens less their mean, (batch, n, D)

    @cached_property
    def gram(self) -> Tensor:
        """Return the Gram matrix of the tokens less their mean, (batch, n, n)."""
        return self.off @ self.off.mT

    def with_norm(self, norm: Tensor) -> Tokens:
        """Return the same with another norm, and the Gram matrix where it is known."""
        known = {"gram": self.gram} if "gram" in self.__dict__ else {}
        tokens = replace(self, norm=norm)
        tokens.__dict__.update(known)  # the place of a cached property: no field, not frozen
        return tokens


def tokens_of(heads: Heads, policy: Policy = POLICY) -> Tokens:
    """Measure the tokens of a layer; with any bias as [X 1], without padding."""
    x, one = heads.x, _ones(heads)
    valid = (x.new_ones(x.shape[:2]) if heads.valid is None else heads.valid.to(x))[..., None]
    count = valid.sum(-2)
    mean = x.sum(1, keepdim=True) / count[..., None].clamp_min(1.0)
    off = x - mean if heads.valid is None else (x - mean) * valid
    squares = x.square().sum(-1)
    lengths = (squares + one * valid[..., 0]).sqrt()
    tokens = Tokens(
        count=count,
        radius=squares.amax(-1, keepdim=True).sqrt(),
        norm=count,
        frobenius=torch.linalg.vector_norm(lengths, dim=-1, keepdim=True),
        longest=lengths.amax(-1, keepdim=True),
        off=off,
    )
    if len(heads.row_blocks()) > 1 and x.shape[1] > x.shape[2]:
        rows = torch.cat([x, one * valid], -1)
        return tokens.with_norm(gram_norm(rows.mT @ rows, policy=policy)[:, None])
    # <x_i, x_j> = <off_i, off_j> + b_i + b_j with b_i = <off_i, mean> + ||mean||^2 / 2
    beside = off @ mean.mT + 0.5 * (mean.square().sum(-1, keepdim=True) + one) * valid
    ends = torch.cat([beside, valid], -1), torch.cat([valid, beside], -1)
    gram = torch.baddbmm(tokens.gram, ends[0], ends[1].mT)
    return tokens.with_norm(gram_norm(gram, policy=policy)[:, None])


def _ones(heads: Heads) -> int:
    """Whether a bias makes [X 1] of X."""
    own = (heads.to_q, heads.to_k, heads.to_v)
    return int(any(projection is not None and projection.bias is not None for projection in own))


def affine_bounds(
    heads: Heads,
    at: Centred,
    weights: Weights,
    tokens: Tokens,
    terms: Mapping[str, Tensor],
    *,
    policy: Policy = POLICY,
) -> dict[str, Float[Tensor, "batch heads"]]:
    """Return hu, castin, mean_field, theorem3, theorem3_g1 and appendix_c of affine heads.

    Args:
        heads: affine self-attention.
        at: its map, and its keys and values less their mean.
        weights: norms of its weights.
        tokens: norms of its tokens.
        terms: `p_norm`, `softmax_norm_max` and `g1_max`.
        policy: how maps are cut and rounded.
    """
    v = weights.v
    growth = 2 * tokens.norm * (heads.scale.abs() * weights.a)
    # ||X^T M(P_i)|| <= ||X|| ||M(P_i)||: appendix_c is never above theorem3.
    spread = _row_spread(at, tokens.gram, policy)
    spread = torch.minimum(spread, tokens.norm * terms["softmax_norm_max"])
    return size_bounds(heads, weights, tokens) | {
        "theorem3": v * (terms["p_norm"] + growth * tokens.norm * terms["softmax_norm_max"]),
        "theorem3_g1": v * (terms["p_norm"] + growth * tokens.norm * terms["g1_max"]),
        "appendix_c": v * (terms["p_norm"] + growth * spread),
    }


def size_bounds(
    heads: Heads, weights: Weights, tokens: Tokens, r: float = 0.0
) -> dict[str, Float[Tensor, "batch heads"]]:
    """Return hu, castin and mean_field of affine heads: of the sizes of weights and tokens alone.

    Where every X' with ||X' - X||_F <= r is meant, tokens are up to r longer.
    """
    scale = heads.scale.abs()
    q, k, v, a = weights.q * scale.clamp_min(1.0), weights.k, weights.v, scale * weights.a
    # `hu` as published has no s: below 1 it is left out, which raises the bound; above 1 it acts.
    n, root, reach = tokens.count, tokens.count.sqrt(), a * (tokens.longest + r).square()
    size = n * (n + 1) * (tokens.frobenius + r).square()
    # ||P||^2 <= (largest row sum) (largest column sum) <= 1 N; unmasked logits of at most `reach`
    # in size give P_ij <= e^(2 reach) / N, so columns sum to at most e^(2 reach).
    crowd = torch.where(_sees_all_tokens(heads), reach.exp().minimum(root), root)
    return {
        "hu": (size * v * (q * k + 1)).masked_fill(size < root, torch.nan),
        "castin": 3**0.5 * v * torch.hypot(reach * (4 * n + 1).sqrt(), root),
        "mean_field": v * ((1 + reach) * crowd + reach),
    }


def general_bounds(
    heads: Heads, at: Centred, terms: Mapping[str, Tensor], *, policy: Policy = POLICY
) -> dict[str, Float[Tensor, "batch heads"]]:
    """Return theorem3 and theorem3_g1 in the form that holds for heads of every kind; else NaN.

    max_j ||Phi^v_j|| ||P|| + max_i ||M(P_i)|| ||V_c|| times
    (max_j ||B_j Phi^k_j|| + max_i ||A_i Phi^q_i||), with V_c the values less their mean, A_i the
    rows a_ij over j and B_j the rows b_ij over i; for plain logits s K_c, the keys less their
    mean, and s Q (ours, after [Y25] Theorem 3).

    In J dX = (P dV)_i + V^T M(P_i) (y_i + A_i dq_i), y_ij = <b_ij, dk_j>: ||P dV||_F is at most
    ||P|| max_j ||Phi^v_j||. V^T M = V_c^T M, and sum_ij y_ij^2 = sum_j ||B_j Phi^k_j dx_j||^2, so
    the second term is at most ||V_c|| max_i ||M(P_i)|| max_j ||B_j Phi^k_j||; the third acts
    query by query. With a sink V^T M(P_i) is the same with P_i on the keys alone, V not centred.
    """
    to_q, to_k, _ = projections(heads)
    queries, keys = at.p.sum(-1) > 0, at.seen[..., 0] > 0
    values = (value_norms(heads) * keys).amax(-1)
    if heads.pairs is None:
        reach = _largest_image(heads.q * queries[..., None], to_k, keys, policy)
        reach = heads.scale.abs() * (reach + _largest_image(at.k, to_q, queries, policy))
    else:
        reach = _pair_reach(heads, at, (queries, keys), policy)
    growth = spectral_norm(at.v) * reach
    nothing = torch.full_like(terms["p_norm"], torch.nan)
    return dict.fromkeys(("hu", "castin", "mean_field", "appendix_c"), nothing) | {
        "theorem3": values * terms["p_norm"] + growth * terms["softmax_norm_max"],
        "theorem3_g1": values * terms["p_norm"] + growth * terms["g1_max"],
    }


def _pair_reach(heads: Heads, at: Centred, used: tuple[Tensor, Tensor], policy: Policy) -> Tensor:
    """Return max_j ||B_j Phi^k_j|| + max_i ||A_i Phi^q_i||; unseen pairs do not count."""
    to_q, to_k, _ = projections(heads)
    p, d = at.p, heads.q.shape[-1]
    by_query, by_key = torch.zeros_like(p[..., 0]), torch.zeros_like(p[..., 0, :])
    for i in policy.chunks(p.shape[2], 2 * by_key.numel() * d):
        rows = (p[:, :, i] > 0)[..., None] * key_gradients(heads, i)
        by_query[..., i] = _images_norm(rows, to_q, i)
    for j in policy.chunks(p.shape[3], 2 * by_query.numel() * d):
        rows = (p[..., j] > 0).mT[..., None] * query_gradients(heads, j)
        by_key[..., j] = _images_norm(rows, to_k, j)
    queries, keys = used
    return (by_query * queries).amax(-1) + (by_key * keys).amax(-1)


def _images_norm(rows: Tensor, projection: Projection, tokens: slice) -> Tensor:
    """Return ||rows_i Phi_i|| of some tokens i, each with its own rows."""
    local = local_map(projection)
    local = local if local.shape[2] == 1 else local[:, :, tokens]
    return spectral_norm(rows @ (local @ factor(projection).mT))


def _sees_all_tokens(heads: Heads) -> Bool[Tensor, "#batch #heads"]:
    """Whether every token sees every other one and no position bias acts."""
    if heads.causal or heads.bias is None:
        return torch.full_like(heads.scale, not heads.causal, dtype=torch.bool)
    free = heads.bias if heads.bias.dtype == torch.bool else heads.bias == 0
    if heads.valid is not None:
        free = free | ~(heads.valid[:, None, :, None] & heads.valid[:, None, None, :])
    return free.all(-1).all(-1)


def _row_spread(
    at: Centred, gram: Tensor, policy: Policy = POLICY
) -> Float[Tensor, "batch heads"]:
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
        square = _squared_spread(at.p, unit, policy)[0]
    else:
        square, below = _squared_spread(at.single.p, unit.float(), policy)
        # Both ends hold: below <= truth <= square. Apart from a share, double precision decides.
        apart = square > (1 + policy.single_loss) ** 2 * below
        if apart.any():
            square = torch.where(apart, _squared_spread(at.p, unit, policy)[0], square)
    return (square * largest[:, None]).sqrt()


def _squared_spread(p: Tensor, gram: Tensor, policy: Policy = POLICY) -> tuple[Tensor, Tensor]:
    """Bound the largest root of the sums S of `_row_spread` from both sides; gram <= 1.

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
        parts.append(_largest_of(images))
    return torch.stack(parts).amax(0).sqrt()


def _largest_of(images: Tensor) -> Tensor:
    """Return the largest ||E|| = ||image||^2 over the tokens."""
    # ||E^2||_F <= ||E|| ||E||_F, and ||E||^2 = ||E^2|| <= ||E^2||_F.
    e = images @ images.mT
    size, upper = (torch.linalg.matrix_norm(power) for power in (e, e @ e))
    lower = (upper / size).nan_to_num(0.0).amax(-1, keepdim=True)
    norm = upper.sqrt()
    left = norm >= lower * (1 - 1e-9)
    norm[left] = torch.linalg.eigvalsh(e[left])[..., -1].clamp_min(0.0)
    return norm.amax(-1)
