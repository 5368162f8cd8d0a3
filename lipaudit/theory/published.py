"""The published bounds of a head's Jacobian norm, each from its few ingredients.

[Y25] Yudin et al., arXiv 2507.07814; [C24] Castin et al., ICML 2024; [H24] Hu et al., ECCV 2024.
Everything here is in float64; `bounds` says where each bound holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.attention import Heads, Projection
from lipaudit.theory.sharp import Centred, factor, local_map, maps, spectral_norm, value_norms

REFINED = 8
"""How many of the largest cheap bounds are replaced by better ones."""


@dataclass(frozen=True)
class Tokens:
    """What all heads of a layer share, (batch, 1) each: N, and norms of X or [X 1]."""

    count: Tensor
    norm: Tensor
    frobenius: Tensor
    radius: Tensor
    gram: Tensor  # of the tokens less their mean, (batch, 1, n, n)


def tokens_of(heads: Heads) -> Tokens:
    """Measure the tokens of a layer; with any bias as [X 1], without padding."""
    x = heads.x
    valid = x.new_ones(x.shape[:2]) if heads.valid is None else heads.valid.to(x)
    count = valid.sum(-1, keepdim=True)
    mean = x.sum(1, keepdim=True) / count[..., None].clamp_min(1.0)
    spread = (x - mean) * valid[..., None]
    if any(p is not None and p.bias is not None for p in (heads.to_q, heads.to_k, heads.to_v)):
        x = torch.cat([x, valid[..., None]], -1)
    sizes = torch.linalg.vector_norm(x, dim=-1)
    return Tokens(
        count=count,
        norm=spectral_norm(x)[:, None],
        frobenius=torch.linalg.vector_norm(sizes, dim=-1, keepdim=True),
        radius=sizes.amax(-1, keepdim=True),
        gram=(spread @ spread.mT)[:, None],
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
    wq, wk, wv = (_augmented(projection) for projection in maps(heads))
    v = spectral_norm(wv)
    a = heads.scale.abs() * spectral_norm(_product(wq, wk))
    n, growth = tokens.count, a * tokens.norm
    x = found["p_norm"] + 2 * growth * tokens.norm * found["softmax_norm_max"]
    g1 = found["p_norm"] + 2 * growth * tokens.norm * found["g1_max"]
    spread = torch.minimum(_row_spread(at, tokens), tokens.norm * found["softmax_norm_max"])
    return {
        "hu": _hu(heads, tokens, wq, wk, v, r),
        "castin": 3**0.5 * v * (a.square() * tokens.radius**4 * (4 * n + 1) + n).sqrt(),
        "mean_field": _mean_field(heads, v, a * tokens.radius.square(), n),
        "theorem3": v * x,
        "theorem3_g1": v * g1,
        "appendix_c": v * (found["p_norm"] + 2 * spread * growth),
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
    values = value_norms(heads).amax(-1)
    reach = _largest_image(heads.q, to_k) + _largest_image(at.k, to_q)
    growth = at.s[..., 0, 0].abs() * spectral_norm(at.v) * reach
    nothing = torch.full_like(found["p_norm"], torch.nan)
    return dict.fromkeys(("hu", "castin", "mean_field", "appendix_c"), nothing) | {
        "theorem3": values * found["p_norm"] + growth * found["softmax_norm_max"],
        "theorem3_g1": values * found["p_norm"] + growth * found["g1_max"],
    }


def _augmented(projection: Projection) -> Tensor:
    """Return [W; b^T], (heads, D + 1, d): [Y25] Remark 2."""
    if projection.bias is None:
        return projection.weight
    return torch.cat([projection.weight, projection.bias[:, None]], 1)


def _product(wq: Tensor, wk: Tensor) -> Tensor:
    """Return a small matrix with the spectral norm of W_Q W_K^T."""
    rq, rk = (torch.linalg.qr(w, mode="r").R for w in (wq, wk))
    return rq @ rk.mT


def _hu(heads: Heads, tokens: Tokens, wq: Tensor, wk: Tensor, v: Tensor, r: float) -> Tensor:
    size = tokens.count * (tokens.count + 1) * (tokens.frobenius + r).square()
    qk = heads.scale.abs().clamp_min(1.0) * spectral_norm(wq) * spectral_norm(wk)
    bound = size * v * (qk + 1)
    return bound.masked_fill(size < tokens.count.sqrt(), torch.nan)


def _mean_field(heads: Heads, v: Tensor, a: Tensor, n: Tensor) -> Tensor:
    masked = heads.causal or heads.bias is not None
    crowd = n.sqrt() if masked else torch.minimum(a.exp(), n.sqrt())
    return v * ((1 + a) * crowd + a)


def _row_spread(at: Centred, tokens: Tokens) -> Float[Tensor, "batch heads"]:
    """Bound max_i ||X^T M(P_i)||: Frobenius norms, and Schatten-4 norms of the largest of them.

    Column j of X^T M(P_i) is P_ij (x_j - m_i) with m_i = sum_l P_il x_l, so both norms come from
    the Gram matrix of the tokens.
    """
    gram = tokens.gram
    sizes = gram.diagonal(0, -2, -1)
    towards = at.p @ gram
    means = (towards * at.p).sum(-1, keepdim=True)
    distances = (sizes[..., None, :] - 2 * towards + means).clamp_min(0.0)
    frobenius = (at.p.square() * distances).sum(-1).sqrt()
    largest = frobenius.topk(min(REFINED + 1, frobenius.shape[-1]), -1)
    chosen = largest.indices[..., :REFINED]
    rows, near = (
        t.gather(-2, chosen[..., None].expand(*chosen.shape, t.shape[-1])) for t in (at.p, towards)
    )
    mean = means.squeeze(-1).gather(-1, chosen)[..., None, None]
    kernel = gram[:, :, None] - near[..., None] - near[..., None, :] + mean
    kernel = kernel * rows[..., None] * rows[..., None, :]
    schatten = torch.linalg.matrix_norm(kernel).sqrt().amax(-1)
    rest = largest.values[..., -1] if largest.values.shape[-1] > REFINED else 0 * schatten
    return torch.maximum(schatten, rest)


def _largest_image(rows: Tensor, projection: Projection) -> Float[Tensor, "batch heads"]:
    """Bound max_t ||rows Phi_t||: Schatten-4 norms, and exact norms for the largest of them."""
    small = torch.linalg.qr(rows, mode="r").R
    phi = local_map(projection) @ factor(projection).mT
    images = small[:, :, None] @ phi
    cheap = torch.linalg.matrix_norm(images @ images.mT).sqrt()
    largest = cheap.topk(min(REFINED + 1, cheap.shape[-1]), -1)
    chosen = largest.indices[..., :REFINED, None, None].expand(-1, -1, -1, *images.shape[-2:])
    exact = spectral_norm(images.gather(2, chosen)).amax(-1)
    rest = largest.values[..., -1] if largest.values.shape[-1] > REFINED else 0 * exact
    return torch.maximum(exact, rest)
