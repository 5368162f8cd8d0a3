"""A Lipschitz constant that stops growing with the number of tokens.

Ours, after the mean-field bound of Castin, Ablin, Peyré, How Smooth Is Attention?, ICML 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.theory.bounds.record import AFFINE_ONLY, EVERYWHERE, Bound

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


def mean_field(ingredients: Ingredients, r: float = 0.0) -> Tensor:
    """Return ||W_V|| ((1 + a) min(e^a, sqrt N) + a), a = ||A|| (R + r)^2, of affine heads.

    Other heads give NaN. With a mask or a position bias it is sqrt N in place of the minimum. N is
    the number of tokens, R = max_i ||x_i|| at X, A = s W_Q W_K^T with the scale s of the logits.
    """
    if not ingredients.affine:
        return ingredients.nothing
    # By the proof of `castin`, values, keys and the query move the output, before W_V, by at most
    # c^(1/2), a c^(1/2) and a, where c is the largest column sum of the attention map P. c <= N;
    # and unmasked logits of at most a in size give P_ij <= e^(2 a) / N, so that c <= e^(2 a).
    a = ingredients.reach(r)  # ||A|| (R + r)^2
    root_n = ingredients.tokens.count.sqrt()  # sqrt N
    heads = ingredients.heads
    root_c = a.exp().minimum(root_n)  # an upper limit of c^(1/2)
    if heads.causal:
        root_c = root_n
    elif heads.bias is not None:
        # Pairs of tokens without mask or position bias, (#batch, #heads, #n, #m).
        if heads.bias.is_floating_point():
            is_plain = heads.bias == 0
        else:  # a mask: True where the query sees the key
            is_plain = heads.bias
        if heads.valid is not None:  # pairs with padding do not count
            queries = heads.valid[:, None, :, None]
            keys = heads.valid[:, None, None]
            is_plain = is_plain | ~(queries & keys)
        has_only_plain = is_plain.flatten(2).all(2)
        root_c = root_c.where(has_only_plain, root_n)
    return ingredients.weights.v * ((1 + a) * root_c + a)


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
