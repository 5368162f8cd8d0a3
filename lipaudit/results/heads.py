"""What names a head, and the columns that every head of the section `bounds` has."""

from __future__ import annotations

from lipaudit.results import readings
from lipaudit.results.columns import Column, Reduction, count_column, text_column

HEAD = {
    "layer": count_column("layer", "Attention layer, in the order of execution.", needed=True),
    "head": count_column("head", "Head within the layer.", needed=True),
    "module": text_column("module", "Module that computes the attention."),
}

HEAD_NORMS = {
    **HEAD,
    "kind": text_column("kind", "How q, k and v come from X."),
    "input": text_column(
        "input",
        "In what the norms and bounds are taken.",
        reading="one input: X, which queries, keys and values all read. queries apart: the "
        "input of the queries and that of the keys and values, varied independently; where one is "
        "made from the other, or both from one tensor (spatial reduction, class attention), they "
        "cannot move so, and the norm in what the module takes is another one, larger or smaller. "
        "keys and values: their input, the queries being constant. module input: all that the "
        "innermost module around the layer takes; norms are numerical there. `lipaudit bounds "
        "--input module` takes every norm so.",
    ),
    "tokens": count_column("tokens", "Tokens of the longest sample."),
    "exact": Column(
        "exact",
        "||J||, the norm of the head's Jacobian.",
        better="lower",
        reading=readings.norm_of("the layer's input", "the head's output"),
        reduction=Reduction("median", "exact"),
    ),
    "exact_max": Column(
        "exact max",
        "Largest ||J|| over the samples.",
        better="lower",
        reduction=Reduction("max", "exact"),
    ),
    "sharp_ratio_max": Column(
        "sharp/exact",
        "Largest sharp / exact over samples.",
        reduction=Reduction("max", "sharp", per="exact"),
    ),
    "p_norm": Column("||P||", "Spectral norm of the attention matrix."),
    "x_norm": Column("||X||", "Spectral norm of the layer's input."),
    "radius": Column("R", "max_i ||x_i|| of the layer's input."),
    "softmax_norm_max": Column("max ||M||", "Largest ||diag(p) - p p^T|| over rows."),
    "splitting_gain": Column(
        "splitting",
        "How much ||J|| grows when tokens are duplicated (--splitting).",
        reading="Attacks that may insert copies of tokens can gain this factor on the head; 1 "
        "means that duplicating tokens does not help them.",
    ),
    "upper": Column(
        "upper",
        "Probabilistic upper limit of exact (eta 1e-3).",
        status="estimate",
        reading=readings.UPPER,
    ),
    "within": Column(
        "within", f"{readings.PROVEN}.", status="estimate", format=".2g", reading=readings.WITHIN
    ),
    "forward_error": Column(
        "rounding",
        "Share of ||J|| by which the rounding of the forward pass may have moved it.",
        status="estimate",
        format=".2g",
        reading="The model computes queries and keys with a relative error of its precision; "
        "where logits are in the thousands, single precision cannot tell the attention map. This "
        "is an estimate of how far ||J|| moves by it, largest over the samples. All figures of "
        "the head are right for the rounded pass; --dtype float64 gives those of the model on "
        "paper.",
    ),
    "converged": Column(
        "converged",
        f"{readings.STOPPED}: every sample.",
        reading=readings.CONVERGED,
        format="",
        default=True,
    ),
}
