"""The bound of Yudin et al., Appendix C: Theorem 3 that counts the tokens a row attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import AFFINE_ONLY, Bound

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


def appendix_c(ingredients: Ingredients) -> Tensor:
    """Return ||W_V|| (||P|| + 2 max_i ||X^T M(P_i)|| ||X|| ||A||); NaN unless heads are affine.

    An upper bound of the norm of each head's Jacobian at X, from the paper's appendix C. X has the
    tokens as rows, P_i is a row of the attention map P, M(p) = diag(p) - p p^T is the Jacobian of
    softmax, and A = s W_Q W_K^T with the scale s of the logits.
    """
    from lipaudit.theory.ingredients import bound_token_spread

    if not ingredients.affine:
        return ingredients.nothing
    # Proof. If the tokens move by dX, the output moves by P dX W_V + E, where the change dS of the
    # logits gives E the rows E_i = dS_i M(P_i) X W_V.
    # ||E_i|| <= ||dS_i|| ||M(P_i) X|| ||W_V||, and ||dS||_F <= 2 ||A|| ||X|| ||dX||_F.
    x_norm = ingredients.tokens.norm
    # The smaller of two upper limits of max_i ||X^T M(P_i)||: by a Gram matrix, and
    # ||X|| max_i ||M(P_i)||. M(P_i) 1 = 0, so the mean of the tokens does not matter.
    spread = bound_token_spread(ingredients.centred.p, ingredients.tokens.centred)
    spread = spread.minimum(x_norm * ingredients.softmax_norm_max)
    growth = 2 * x_norm * ingredients.a_norm * spread
    return ingredients.weights.v * (ingredients.p_norm + growth)


APPENDIX_C = Bound(
    name="appendix_c",
    label="appendix C",
    meaning="Yudin et al. 2025, Appendix C.",
    formula="||W_V|| (||P|| + 2 max_i ||X^T M(P_i)|| ||X|| ||A||)",
    source="Yudin et al. 2025 Appendix C",
    explanation="theorem3 that counts only the tokens to which a row attends.",
    compute=appendix_c,
    null=AFFINE_ONLY,
    place=20,
)
