"""A Lipschitz constant that stops growing with the number of tokens.

Ours, after the mean-field bound of Castin, Ablin, Peyré, How Smooth Is Attention?, ICML 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import AFFINE_ONLY, EVERYWHERE, Bound

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


def mean_field(known: Ingredients, r: float = 0.0) -> Tensor:
    """Return ||W_V|| ((1 + a) min(e^a, sqrt N) + a), a = ||A|| (R + r)^2; else NaN.

    A mask or a position bias leaves sqrt N alone.
    """
    if not known.affine:
        return known.nothing
    # What values, keys and the query move is at most c^(1/2), a c^(1/2) and a, with c the largest
    # column sum of P: see `castin`. c <= N; and unmasked logits of at most a in size give
    # P_ij <= e^(2 a) / N, so that c <= e^(2 a).
    a = known.reach(r)
    root = known.tokens.count.sqrt()
    heads = known.heads
    column = a.exp().minimum(root)
    if heads.causal:
        column = root
    elif heads.bias is not None:
        # Whether every token sees every other one and no position bias acts, per head.
        if heads.bias.is_floating_point():
            free = heads.bias == 0
        else:
            free = heads.bias
        if heads.valid is not None:
            queries = heads.valid[:, None, :, None]
            keys = heads.valid[:, None, None, :]
            free = free | ~(queries & keys)
        plain = free.all(-1).all(-1)
        column = column.where(plain, root)
    return known.weights.v * ((1 + a) * column + a)


MEAN_FIELD = Bound(
    name="mean_field",
    label="mean field",
    meaning="lipaudit's form of the mean-field bound.",
    formula="||W_V|| ((1 + a) min(e^a, sqrt N) + a), a = ||A|| R^2; sqrt N alone if masked",
    source="ours, after the mean-field bound of Castin et al. 2024",
    explanation="Upper bound on the Lipschitz constant over the same inputs as castin. It does "
    "not grow without limit as tokens are added.",
    compute=mean_field,
    domain=EVERYWHERE,
    null=AFFINE_ONLY,
    log10_label="log10 m. f.",
    place=70,
)
