"""The published bounds of a head's Jacobian norm, each from its few ingredients.

[Y25] Yudin et al., arXiv 2507.07814; [C24] Castin et al., ICML 2024; [H24] Hu et al., ECCV 2024.
Everything here is in float64; `bounds` says where each bound holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipaudit.theory.attention import Heads, Projection
from lipaudit.theory.norms import spectral_norm, upper_norm
from lipaudit.theory.sharp import Centred, factor, local_map, maps, value_norms


@dataclass(frozen=True)
class Tokens:
    """What all heads of a layer share, (batch, 1) each: N, R, and norms of X or [X 1]."""

    count: Tensor
    radius: Tensor
    norm: Tensor
    frobenius: Tensor
    longest: Tensor  # R, or max_i ||(x_i, 1)||
    gram: Tensor  # of the tokens less their mean, (batch, n, n)


def tokens_of(heads: Heads) -> Tokens:
    """Measure the tokens of a layer; with any bias as [X 1], without padding."""
    x = heads.x
    valid = x.new_ones(x.shape[:2]) if heads.valid is None else heads.valid.to(x)
    count = valid.sum(-1, keepdim=True)
    off = (x - x.sum(1, keepdim=True) / count[..., None].clamp_min(1.0)) * valid[..., None]
    radius = torch.linalg.vector_norm(x, dim=-1).amax(-1, keepdim=True)
    if any(p is not None and p.bias is not None for p in (heads.to_q, heads.to_k, heads.to_v)):
        x = torch.cat([x, valid[..., None]], -1)
    lengths = torch.linalg.vector_norm(x, dim=-1)
    return Tokens(
        count=count,
        radius=radius,
        norm=upper_norm(x)[:, None],
        frobenius=torch.linalg.vector_norm(lengths, dim=-1, keepdim=True),
        longest=lengths.amax(-1, keepdim=True),
        gram=off @ off.mT,
    )


def affine_bounds(
    heads: Heads, at: Centred, tokens: Tokens, found: Mapping[str, Tensor], *, r: float
) -> dict[str, Float[Tensor, "batch heads"]]:
    """Return hu, castin, mean_field, theorem3, theorem3_g1 and appendix_c of affine heads.

    Args:
        heads: affine self-attention.
        at: its map, and its keys and values less their mean.
        tokens: norms of its tokens.
        found: `p_norm`, `softmax_norm_max` and `g1_max`.
        r: radius of the ball of `hu`.
    """
    q, k, v, a = _weight_norms(heads)
    n, root, reach = tokens.count, tokens.count.sqrt(), a * tokens.longest.square()
    size = n * (n + 1) * (tokens.frobenius + r).square()
    crowd = torch.where(_unmasked(heads), reach.exp().minimum(root), root)
    growth = 2 * tokens.norm * a
    spread = torch.minimum(_row_spread(at.p, tokens.gram), tokens.norm * found["softmax_norm_max"])
    return {
        "hu": (size * v * (q * k + 1)).masked_fill(size < root, torch.nan),
        "castin": 3**0.5 * v * torch.hypot(reach * (4 * n + 1).sqrt(), root),
        "mean_field": v * ((1 + reach) * crowd + reach),
        "theorem3": v * (found["p_norm"] + growth * tokens.norm * found["softmax_norm_max"]),
        "theorem3_g1": v * (found["p_norm"] + growth * tokens.norm * found["g1_max"]),
        "appendix_c": v * (found["p_norm"] + growth * spread),
    }


def general_bounds(
    heads: Heads, at: Centred, found: Mapping[str, Tensor]
) -> dict[str, Float[Tensor, "batch heads"]]:
    """Return theorem3 and theorem3_g1 in the form that holds for heads of every kind; else NaN.

    max_j ||Phi^v_j|| ||P|| + s max_i ||M(P_i)|| ||V_c|| times
    (max_j ||Q Phi^k_j|| + max_i ||K_c Phi^q_i||), with V_c, K_c the values and keys less their
    mean (ours, after [Y25] Theorem 3).
    """
    to_q, to_k, _ = maps(heads)
    queries, keys = at.p.sum(-1) > 0, at.seen[..., 0] > 0
    values = (value_norms(heads) * keys).amax(-1)
    reach = _largest_image(heads.q * queries[..., None], to_k, keys)
    reach = reach + _largest_image(at.k, to_q, queries)
    growth = heads.scale.abs() * spectral_norm(at.v) * reach
    nothing = torch.full_like(found["p_norm"], torch.nan)
    return dict.fromkeys(("hu", "castin", "mean_field", "appendix_c"), nothing) | {
        "theorem3": values * found["p_norm"] + growth * found["softmax_norm_max"],
        "theorem3_g1": values * found["p_norm"] + growth * found["g1_max"],
    }


def _weight_norms(heads: Heads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ||W_Q|| max(1, s), ||W_K||, ||W_V|| and ||A||, with biases as [Y25] Remark 2 says."""
    q, k, v = (_augmented(projection) for projection in maps(heads))
    norms = [spectral_norm(projection.weight) for projection in (q, k, v)]
    scale = heads.scale.abs()
    a = scale * spectral_norm(factor(q)[:, 0] @ factor(k)[:, 0].mT)
    return norms[0] * scale.clamp_min(1.0), norms[1], norms[2], a


def _augmented(projection: Projection) -> Projection:
    """W becomes [W; b^T]."""
    if projection.bias is None:
        return projection
    weight = torch.cat([projection.weight, projection.bias[:, None]], 1)
    return replace(projection, weight=weight, bias=None)


def _unmasked(heads: Heads) -> Bool[Tensor, "#batch #heads"]:
    """Whether every token sees every other one and no position bias acts."""
    if heads.causal or heads.bias is None:
        return torch.full_like(heads.scale, not heads.causal, dtype=torch.bool)
    free = heads.bias == 0
    if heads.valid is not None:
        free = free | ~(heads.valid[:, None, :, None] & heads.valid[:, None, None, :])
    return free.all(-1).all(-1)


def _row_spread(p: Tensor, gram: Tensor) -> Float[Tensor, "batch heads"]:
    """Bound max_i ||X^T M(P_i)||, with the Gram matrix of the tokens less their mean.

    Column j of X^T M(P_i) is P_ij (x_j - m), m = sum_l P_il x_l. With w_j = P_ij^2 and
    c_j = <x_j, m> - ||m||^2 / 2 the fourth power of its Schatten-4 norm is
    sum_jl w_j w_l (<x_j, x_l> - c_j - c_l)^2, raised by its rounding error: three products with
    the Gram matrix for all rows, within 1 % of the spectral norm on trained heads.
    """
    rows = p.flatten(1, 2)
    w, c = rows.square(), rows @ gram
    c -= 0.5 * (rows * c).sum(-1, keepdim=True)
    total = w.sum(-1, keepdim=True)
    inner = (w @ gram).mul_(-4).addcmul_(c, total, value=2).mul_(c)
    inner += w @ gram.square()
    powers = inner.mul_(w).sum(-1) + 2 * c.mul_(w).sum(-1).square()
    largest = total[..., 0] * gram.diagonal(0, -2, -1).amax(-1, keepdim=True)
    rounding = 64 * p.shape[-1] * torch.finfo(p.dtype).eps * largest.square()
    norms = (powers.clamp_min(0.0) + rounding) ** 0.25
    return norms.reshape(p.shape[:3]).amax(-1)


def _largest_image(rows: Tensor, projection: Projection, used: Tensor) -> Tensor:
    """Return max_i ||rows Phi_i|| over the tokens that are used.

    E = (rows Phi_i)(rows Phi_i)^T has ||E^2||_F / ||E||_F <= ||E|| <= ||E^2||_F^(1/2): eigenvalues
    are computed only for tokens whose upper limit reaches every lower one.
    """
    small = torch.linalg.qr(rows, mode="r").R[:, :, None]
    images = small @ local_map(projection) @ factor(projection).mT
    if projection.local is not None:
        images = images * used[..., None, None]
    e = images @ images.mT
    size, upper = (torch.linalg.matrix_norm(power) for power in (e, e @ e))
    lower = (upper / size).nan_to_num(0.0).amax(-1, keepdim=True)
    norm = upper.sqrt()
    left = norm >= lower * (1 - 1e-9)
    norm[left] = torch.linalg.eigvalsh(e[left])[..., -1].clamp_min(0.0)
    return norm.amax(-1).sqrt()
