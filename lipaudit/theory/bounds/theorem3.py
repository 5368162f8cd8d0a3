"""Theorem 3 of Yudin et al.: the sensitivity of the softmax times norms of tokens and weights.

[Y25] Yudin, Gaponov, Kudriashov, Rakhuba, Pay Attention to Attention Distribution, arXiv
2507.07814. Biases enter as Remark 2 says: X becomes [X 1], W becomes [W; b^T].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import Bound

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


def theorem3(ingredients: Ingredients, m: Tensor | None = None) -> Tensor:
    """Return ||W_V|| (||P|| + 2 ||X||^2 ||A|| m), or our bound for heads that are not affine.

    X has the tokens as rows, P is the attention map, A = s W_Q W_K^T with the scale s of the
    logits. m is max_i ||M(P_i)|| over the rows of P by default, or an upper limit of it, where
    M(p) = diag(p) - p p^T is the Jacobian of softmax.
    """
    from lipaudit.theory.ingredients import compute_theorem3_factors

    if m is None:
        m = ingredients.softmax_norm_max
    if ingredients.affine:
        # If the tokens move by dX, the logits change by dS = dX A X^T + X A dX^T up to a constant
        # of each row, which drops out (M(P_i) 1 = 0), and the output by
        #     J dX = P dX W_V + E   with the rows E_i = dS_i M(P_i) X W_V.
        # ||dS||_F <= 2 ||A|| ||X|| ||dX||_F, and ||E||_F <= m ||dS||_F ||X|| ||W_V||.
        x_norm = ingredients.tokens.norm
        growth = 2 * x_norm * ingredients.a_norm * x_norm * m
        return ingredients.weights.v * (ingredients.p_norm + growth)
    # Ours, because after a rotation or normalisation of the rows ||Q|| may exceed ||X|| ||W_Q||.
    # Symbols: the Phi are the Jacobians of the projections, V_c is V less its mean. Logit ij has
    # the gradients a_ij in q_i and b_ij in k_j. G_i has the rows a_ij over j, H_j the rows b_ij
    # over i. If the tokens move by dX, row i of the output changes by
    #     (P dV)_i + V^T M(P_i) (y_i + G_i dq_i)   with y_ij = <b_ij, dk_j>.
    # 1. ||P dV||_F <= ||P|| max_j ||Phi^v_j|| ||dX||_F.
    # 2. V^T M = V_c^T M, and sum_ij y_ij^2 = sum_j ||H_j Phi^k_j dx_j||^2. So the term with y is
    #    at most ||V_c|| m max_j ||H_j Phi^k_j|| ||dX||_F.
    # 3. The last term acts query by query: ||V_c|| m max_i ||G_i Phi^q_i|| ||dX||_F.
    # With a sink (a further, constant logit of each query), P_i has the probabilities of the keys
    # alone, and V keeps its mean.
    # `value` is the limit of term 1 without ||P||, `growth` that of terms 2 and 3 without m.
    value, growth = ingredients.once(compute_theorem3_factors)
    return value * ingredients.p_norm + growth * m


THEOREM3 = Bound(
    name="theorem3",
    label="theorem 3",
    meaning="Yudin et al. 2025, Theorem 3, exact ||M(P_i)||.",
    formula="||W_V|| (||P|| + 2 ||X||^2 ||A|| m), m = max_i ||M(P_i)||. Heads that are not "
    "affine: max_j ||Phi^v_j|| ||P|| + ||V_c|| (max_j ||H_j Phi^k_j|| + max_i ||G_i Phi^q_i||) m",
    source="Yudin et al. 2025 Theorem 3; a general form of ours where heads are not affine",
    explanation="Multiplies the sensitivity of the softmax by the norms of tokens and weights.",
    compute=theorem3,
    scaling=True,
    place=30,
)
