"""A Lipschitz constant that stops growing with the number of tokens.

Ours, after the mean-field bound of Castin, Ablin, Peyré, How Smooth Is Attention?, ICML 2024.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lipaudit.theory.bounds.ingredients import Ingredients
from lipaudit.theory.heads import Heads


def mean_field(known: Ingredients, r: float = 0.0) -> Float[Tensor, "batch heads"]:
    """Return ||W_V|| ((1 + a) min(e^a, sqrt N) + a), a = ||A|| (R + r)^2; else NaN.

    A mask or a position bias leaves sqrt N alone.
    """
    if not known.affine:
        return known.nothing
    a, root = known.reach(r), known.tokens.count.sqrt()
    # ||P||^2 <= (largest row sum) (largest column sum) <= 1 N; unmasked logits of at most a in
    # size give P_ij <= e^(2 a) / N, so columns sum to at most e^(2 a).
    p_norm = a.exp().minimum(root).where(_sees_all_tokens(known.heads), root)
    return known.weights.v * ((1 + a) * p_norm + a)


def _sees_all_tokens(heads: Heads) -> Bool[Tensor, "#batch #heads"]:
    """Whether every token sees every other one and no position bias acts."""
    if heads.causal or heads.bias is None:
        return heads.scale.new_full(heads.scale.shape, not heads.causal).bool()
    free = heads.bias == 0 if heads.bias.is_floating_point() else heads.bias
    if heads.valid is not None:
        free = free | ~(heads.valid[:, None, :, None] & heads.valid[:, None, None, :])
    return free.all(-1).all(-1)
