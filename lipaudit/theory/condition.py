"""How much of a head's Jacobian the rounding of the forward pass can have changed."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.heads import Heads


def forward_error(
    heads: Heads, precision: torch.dtype | None = None
) -> Float[Tensor, "batch heads"]:
    """Estimate the relative change of ||J|| by rounding q and k to the precision of the model.

    The rows q_i, k_j carry relative errors of about eps, and so does what is added to a logit: a
    logit l_i = max_j (s ||q_i|| ||k_j|| + |B_ij|) moves by up to d_i = 2 eps l_i, and with it
    every P_ij and c_ij = P_ij (v_j - o_i) by a factor of up to exp(2 d_i). Rows that stay one-hot
    move by less. An estimate: the constants of the model's own sums are not known.

    Args:
        heads: one layer, any kind.
        precision: in which the model computed q and k; by default that of the heads.

    Returns:
        At most 1, the largest over the queries.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0], [4.0, 3.0]]]), torch.eye(2)[None]
    >>> forward_error(affine_heads(x, eye, eye, eye)).log10().round()
    tensor([[-5.]])
    """
    eps = torch.finfo(precision or heads.q.dtype).eps
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
