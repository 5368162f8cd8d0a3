"""The bound of Hu et al. (Specformer): norms of the weights and of the tokens alone.

[H24] Hu et al., Specformer, ECCV 2024, as Yudin et al. 2025 Theorem 1. Published as a Lipschitz
constant on the ball ||X' - X||_F <= r. At r = 0 the ball is X alone: what is printed bounds the
norm at X and is neither a constant on a set of inputs nor certified on one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import AFFINE_ONLY, Bound

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


def hu(ingredients: Ingredients, r: float = 0.0) -> Tensor:
    """Return N (N + 1) (||X||_F + r)^2 ||W_V|| (||W_Q|| ||W_K|| + 1) of affine heads, else NaN.

    X are the N tokens, r is the radius of a ball around X. NaN also if N (N + 1) (||X||_F + r)^2 <
    sqrt N: the formula may then be below ||W_V|| times the norm of the attention map P, which is
    up to sqrt N.
    """
    if not ingredients.affine:
        return ingredients.nothing
    weights = ingredients.weights
    n = ingredients.tokens.count  # N
    size = n * (n + 1) * (ingredients.tokens.frobenius + r).square()
    # Theorem 3 with ||M|| <= 1/2 and ||P||^2 <= N: ||J|| <= ||W_V|| (sqrt N + ||X||^2 ||A||), and
    # ||X||^2 ||A|| <= size |s| ||W_Q|| ||W_K||. So if sqrt N <= size,
    #     ||J|| <= ||W_V|| size (1 + |s| ||W_Q|| ||W_K||).
    # The published formula has no scale s of the logits and holds for |s| <= 1. A larger |s| is a
    # factor here.
    q = weights.q * ingredients.heads.scale.abs().clamp_min(1.0)
    bound = size * weights.v * (q * weights.k + 1)
    return bound.masked_fill(size < n.sqrt(), math.nan)


HU = Bound(
    name="hu",
    label="hu",
    meaning="Hu et al. 2024 at r = 0.",
    formula="N(N+1) ||X||_F^2 (||W_V|| ||W_Q|| ||W_K|| + ||W_V||)",
    source="Hu et al. 2024, as Yudin et al. 2025 Theorem 1, at r = 0",
    explanation="Uses only norms of weights and tokens. Published for a ball of radius r around "
    "X; here r = 0, so it holds at X only.",
    compute=hu,
    null=f"{AFFINE_ONLY}, and N(N+1) ||X||_F^2 >= sqrt N",
    log10_label="log10 hu",
    place=80,
)
