"""A sharp upper bound of a head's Jacobian norm at X, from the norms of blocks (ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import Bound
from lipaudit.theory.bounds.theorem3 import theorem3

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


def sharp(ingredients: Ingredients) -> Tensor:
    """Return the smaller of two upper bounds of ||J||: `bound_by_blocks` and Theorem 3.

    Both hold for heads of every kind.
    """
    from lipaudit.theory.block_norms import bound_by_blocks

    # The norm of a block matrix G is at most the norm of a matrix B with entries B_il >= ||G_il||:
    # ||G x||^2 = sum_i ||sum_l G_il x_l||^2 <= sum_i (sum_l B_il ||x_l||)^2 <= ||B||^2 ||x||^2.
    # `bound_by_blocks` uses this for G = J J^T, where ||J J^T|| = ||J||^2, or for G = J. `once`
    # stores Theorem 3, because it is also a bound of its own.
    return bound_by_blocks(ingredients).minimum(ingredients.once(theorem3))


SHARP = Bound(
    name="sharp",
    label="sharp",
    meaning="lipaudit's own bound, from the norms of the Jacobian's blocks.",
    formula="min(theorem3, ||B||^(1/2)), B_il >= ||sum_j J_ij J_lj^T|| with the blocks of J; of "
    "large heads that are not affine min(theorem3, ||B||), B_ij >= ||J_ij||",
    source="ours",
    explanation="Combines bounds on the norms of the blocks of J J^T. Usually within a factor of "
    "two of the exact norm.",
    compute=sharp,
    better="lower",
    scaling=True,
    stored=True,
    place=10,
)
