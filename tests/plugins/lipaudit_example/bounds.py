"""A bound of one's own: its record. What it is computed with is imported when it is computed."""

from lipaudit.tables.bounds import Bound

FROBENIUS = Bound(
    name="frobenius",
    label="Frobenius",
    meaning="Frobenius norms in place of spectral ones, and ||M(P_i)|| <= 1/2.",
    formula="||W_V||_F ||P||_F + s/2 ||V||_F (||K W_Q^T||_F + ||Q W_K^T||_F)",
    source="an example",
    explanation="The size of weights, tokens and attention map, without any spectral norm.",
    null="needs affine projections and logits s q k^T",
    better="lower",
    function="lipaudit_example.formulas:frobenius",
    log10_label="log10 Frob.",
    scaling=True,
)
