"""The Lipschitz constant of Castin et al. on all tokens of norm R or less.

[C24] Castin, Ablin, Peyré, How Smooth Is Attention?, ICML 2024, as Yudin et al. 2025 Theorem 2.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.bounds.ingredients import Ingredients


def castin(known: Ingredients, r: float = 0.0) -> Float[Tensor, "batch heads"]:
    """Return sqrt(3) ||W_V|| (||A||^2 (R + r)^4 (4N + 1) + N)^(1/2) of affine heads, else NaN."""
    if not known.affine:
        return known.nothing
    n = known.tokens.count
    # (a^2 b + n)^(1/2) as a hypotenuse: squares of huge logits would overflow.
    size = (known.reach(r) * (4 * n + 1).sqrt()).hypot(n.sqrt())
    return 3**0.5 * known.weights.v * size
