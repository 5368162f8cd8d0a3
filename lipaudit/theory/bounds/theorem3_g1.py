"""Theorem 3 of Yudin et al. with g_1, which the two largest entries of a row give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import Bound
from lipaudit.theory.bounds.theorem3 import theorem3

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


def theorem3_g1(ingredients: Ingredients) -> Tensor:
    """Return Theorem 3 with g_1(P_i) in place of ||M(P_i)||, the norm of the softmax Jacobian.

    g_1 = p_(1) (1 - p_(1) + p_(2)) with the largest two entries of a row p = P_i of the attention
    map. g_1 is an upper limit of ||M(p)||, M(p) = diag(p) - p p^T.
    """
    # Proof of g_1 >= ||M(p)||. The largest eigenvalue of M(p) solves phi(x) = 0 for
    # phi(x) = 1 - sum_j p_j^2 / (p_j - x). phi falls between p_(2) and p_(1), so phi(g_1) <= 0 is
    # enough, which is
    #     sum_(j>=2) p_(j)^2 / (g_1 - p_(j)) <= p_(1)^2 / (p_(1) - g_1) - 1.
    # For j >= 2, g_1 - p_(j) >= g_1 - p_(2) = (1 - p_(1)) (p_(1) - p_(2)): the left side is at
    # most p_(2) / (p_(1) - p_(2)). p_(1) - g_1 = p_(1) (p_(1) - p_(2)): the right side equals it.
    return theorem3(ingredients, ingredients.g1_max)


THEOREM3_G1 = Bound(
    name="theorem3_g1",
    label="theorem 3 g1",
    meaning="Theorem 3 with g1(P_i) for ||M(P_i)||.",
    formula="theorem3 with g_1(P_i) for ||M(P_i)||",
    source="Yudin et al. 2025 equation 7",
    explanation="theorem3, computed from the two largest entries of each attention row.",
    compute=theorem3_g1,
    place=40,
)
