"""The bound of Hu et al. (Specformer): norms of the weights and of the tokens alone.

[H24] Hu et al., Specformer, ECCV 2024, as Yudin et al. 2025 Theorem 1. Published as a Lipschitz
constant on the ball ||X' - X||_F <= r. At r = 0 the ball is X alone: what is printed bounds the
norm at X and is neither a constant on a set of inputs nor certified on one.
"""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.bounds.ingredients import Ingredients


def hu(known: Ingredients, r: float = 0.0) -> Float[Tensor, "batch heads"]:
    """Return N (N + 1) (||X||_F + r)^2 ||W_V|| (||W_Q|| ||W_K|| + 1) of affine heads, else NaN.

    NaN also where N (N + 1) (||X||_F + r)^2 < sqrt N: there the formula is below ||P||.
    """
    if not known.affine:
        return known.nothing
    weights, n = known.weights, known.tokens.count
    # As published it has no s: below 1 it is left out, which raises the bound; above 1 it acts.
    q = weights.q * known.heads.scale.abs().clamp_min(1.0)
    size = n * (n + 1) * (known.tokens.frobenius + r).square()
    return (size * weights.v * (q * weights.k + 1)).masked_fill(size < n.sqrt(), math.nan)
