"""The bound of Yudin et al., Appendix C: Theorem 3 that counts the tokens a row attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import AFFINE_ONLY, Bound

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


def appendix_c(known: Ingredients) -> Tensor:
    """Return ||W_V|| (||P|| + 2 max_i ||X^T M(P_i)|| ||X|| ||A||); NaN unless heads are affine."""
    from lipaudit.theory.ingredients import bound_token_spread

    if not known.affine:
        return known.nothing
    # As Theorem 3, with ||E_i|| <= ||dS_i|| ||M(P_i) X|| ||W_V||. ||X^T M|| <= ||X|| ||M||, so it
    # is never above Theorem 3; the limit of ||X^T M|| that is computed may be.
    x = known.tokens.norm
    off = known.tokens.off
    spread = bound_token_spread(known.at.p, off @ off.mT)
    spread = spread.minimum(x * known.softmax_norm_max)
    growth = 2 * x * known.a_norm * spread
    return known.weights.v * (known.p_norm + growth)


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
