"""Theorem 3 of Yudin et al. with 1/2, which no softmax exceeds: the maps P_i do not enter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import AT_X, Bound
from lipaudit.theory.bounds.theorem3 import bound_by_softmax

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


def theorem3_half(known: Ingredients) -> Tensor:
    """Return Theorem 3 with 1/2 for ||M(P_i)||."""
    import torch

    # ||M(p)|| <= g_1(p) = p_(1) (1 - p_(1) + p_(2)), see `theorem3_g1`. The entries sum to 1, so
    # p_(2) <= 1 - p_(1), and g_1 <= 2 p_(1) (1 - p_(1)) <= 1/2, attained at (1/2, 1/2, 0, ...).
    # With a sink the row has one more entry, and M of the keys is a part of that larger M.
    return bound_by_softmax(known, torch.full_like(known.g1_max, 0.5))


THEOREM3_HALF = Bound(
    name="theorem3_half",
    label="theorem 3, 1/2",
    meaning="Theorem 3 with 1/2 for ||M(P_i)||.",
    formula="theorem3 with 1/2 for ||M(P_i)||",
    source="Yudin et al. 2025 Theorem 3, with ||M(P_i)|| <= g_1(P_i) <= 1/2",
    explanation="theorem3 with the largest sensitivity that any softmax has. Compare both: they "
    "differ by what the attention maps of these samples add.",
    compute=theorem3_half,
    domain=AT_X,
    place=45,
)
