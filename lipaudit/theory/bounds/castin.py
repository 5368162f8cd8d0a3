"""The Lipschitz constant of Castin et al. on all tokens of norm R or less.

[C24] Castin, Ablin, Peyré, How Smooth Is Attention?, ICML 2024, as Yudin et al. 2025 Theorem 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import AFFINE_ONLY, EVERYWHERE, Bound

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


def castin(ingredients: Ingredients, r: float = 0.0) -> Tensor:
    """Return sqrt(3) ||W_V|| (||A||^2 (R + r)^4 (4N + 1) + N)^(1/2) of affine heads, else NaN.

    The result is a Lipschitz constant on all inputs of N tokens with norms of R + r or less, where
    R = max_i ||x_i|| at X and A = s W_Q W_K^T with the scale s of the logits.
    """
    if not ingredients.affine:
        return ingredients.nothing
    # Proof, with the attention map P and m_i = sum_j P_ij x_j.
    # 1. If the tokens move by dX, row i of P X (the output before W_V) changes through values,
    #    keys and its query by
    #        sum_j P_ij dx_j + sum_j P_ij (x_j - m_i) x_i^T A dx_j
    #            + sum_j P_ij (x_j - m_i) (x_j - m_i)^T A^T dx_i.
    # 2. A variance is at most a mean square: sum_j P_ij ||x_j - m_i||^2 <= R^2. With a = ||A|| R^2
    #    Cauchy and Schwarz bound the second term by a (sum_j P_ij ||dx_j||^2)^(1/2), and the third
    #    by a ||dx_i||.
    # 3. Let c be the largest column sum of P. Rows sum to 1, so ||P||^2 <= c. Over all rows the
    #    three terms are at most c^(1/2), a c^(1/2) and a times ||dX||_F.
    # 4. c <= N and (x + y + z)^2 <= 3 (x^2 + y^2 + z^2) give the square 3 (N + a^2 (N + 1)) of the
    #    constant, and N + 1 <= 4 N + 1.
    n = ingredients.tokens.count  # N
    a = ingredients.reach(r)  # ||A|| (R + r)^2
    # (a^2 (4 N + 1) + N)^(1/2) as a hypotenuse: squares of huge logits would overflow.
    logits = a * (4 * n + 1).sqrt()
    return 3**0.5 * ingredients.weights.v * logits.hypot(n.sqrt())


CASTIN = Bound(
    name="castin",
    label="castin",
    meaning="Castin et al. 2024.",
    formula="sqrt(3) ||W_V|| (||A||^2 R^4 (4N+1) + N)^(1/2)",
    source="Castin et al. 2024, as Yudin et al. 2025 Theorem 2",
    explanation="Upper bound on the Lipschitz constant over all sequences of N tokens with norm "
    "at most R. Mask and position bias stay fixed.",
    compute=castin,
    domain=EVERYWHERE,
    null=AFFINE_ONLY,
    log10_label="log10 castin",
    scaling=True,
    place=60,
)
