"""How much of a head's Jacobian the rounding of the forward pass can have changed."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.attention import Heads

_SMALL = 1e-5  # changes that need no look at P


def forward_error(
    heads: Heads, precision: torch.dtype | None = None
) -> Float[Tensor, "batch heads"]:
    """Estimate the relative change of ||J|| by rounding q and k to the precision of the model.

    The rows q_i, k_j carry relative errors of about eps, so a logit moves by up to
    d_i = 2 eps s ||q_i|| max_j ||k_j||, and with it every P_ij and c_ij = P_ij (v_j - o_i) by a
    factor of up to exp(2 d_i). Where the largest entry of a row keeps all but a share
    exp(2 d_i) (1 - p_(1)) of it, no other one matters. An estimate: the constants of the model's
    own sums are not known, and a bound on J would be far larger.

    Args:
        heads: one layer, any kind.
        precision: in which the model computed q and k; by default that of the heads.

    Returns:
        At most 1, the largest over the queries.

    >>> from lipaudit.theory.attention import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0], [4.0, 3.0]]]), torch.eye(2)[None]
    >>> forward_error(affine_heads(x, eye, eye, eye)).log10().round()
    tensor([[-6.]])
    """
    eps = torch.finfo(precision or heads.q.dtype).eps
    rows, keys = (torch.linalg.vector_norm(t, dim=-1) for t in (heads.q, heads.k))
    moved = 2 * eps * heads.scale.abs()[..., None] * rows * keys.amax(-1, keepdim=True)
    growth = torch.expm1((2 * moved).clamp_max(30.0))
    if heads.valid is not None:
        growth = growth * heads.valid[:, None]
    if growth.amax() > _SMALL:
        others = (1 - heads.attention().amax(-1)).clamp_min(0.0)
        growth = growth * ((1 + growth) * others).clamp_max(1.0)
    return growth.amax(-1).clamp_max(1.0)
