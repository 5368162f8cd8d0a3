"""Columns that several measures share, with their readings."""

from __future__ import annotations

from lipaudit.tables.columns import Column, Reduction, count_column, text_column

PROVEN = "Proven relative error of the norm (probability 99.9 %; largest over the samples)"


STOPPED = "Whether the estimated error is at most tol and the proven error within its limit"


WITHIN = (
    "The true norm is at most this share higher than the value shown (probability 99.9 % "
    "over the random start vector). The iteration approaches the norm from below and stops "
    "at an estimated error of tol. That estimate can fail if many singular values are close "
    "to the largest. For a smaller proven error use --within; at the size of tol it costs "
    "1.4 to 2.4 times as much. 0: the norm was computed without randomness."
)


CONVERGED = (
    "yes: the estimated error is at most tol, and the proven error at most --within. no: the "
    "norm may be far too low; see upper for a proven limit."
)


UPPER = (
    "The norm is at most this value with probability 1 - eta over the random start vector. "
    "Bounds without randomness are those of `lipaudit bounds`."
)


NORM = (
    "The largest factor by which a very small change of the input can grow in the output. It "
    "does not say how far away the nearest adversarial example is: see radius_first_order "
    "for a hint and run `lipaudit attack`. The solver approaches it from below: see within."
)


NEAR = (
    "Three values: the norm at X, the largest norm that a search found near X, and a proven "
    "upper bound near X. The true maximum is between the last two."
)


ROBUST = (
    "The true robust accuracy is at most this: a stronger attack may break more samples. "
    "Compare only values with the same attack, radius and samples."
)


CERTIFIED = (
    "The true robust accuracy on these samples is at least this: no attack can break a "
    "certified sample. Samples without a certificate may be robust or not. The truth is "
    "between this and the accuracy under attack.\nThe proof holds for exact arithmetic with "
    "the stored weights. A float32 program adds rounding errors, which matter if a margin is "
    "that small."
)


def norm_of(source: str, target: str) -> str:
    """Return the reading of the norm of a Jacobian at the samples."""
    return (
        f"The largest factor by which a very small change of {source} can grow in {target}. A "
        "large change may grow more. The solver approaches the norm from below: see within."
    )


WITHIN_COLUMN = Column("within", f"{PROVEN}.", status="estimate", format=".2g", reading=WITHIN)

HEAD = {
    "layer": count_column("layer", "Attention layer, in the order of execution.", needed=True),
    "head": count_column("head", "Head within the layer.", needed=True),
    "module": text_column("module", "Module that computes the attention."),
}


HEAD_NORMS = {
    **HEAD,
    "kind": text_column(
        "kind", "How queries, keys and values are computed from X (affine, local or numeric)."
    ),
    "input": text_column(
        "input",
        "Input of the norms and bounds.",
        default="one input",
        reading="one input: queries, keys and values read the same X. queries apart: queries read "
        "another input than keys and values, and both vary independently. If both come from one "
        "tensor (spatial reduction, class attention), the norm with respect to that tensor can be "
        "larger or smaller. keys and values: only their input varies; the queries are constant. "
        "module input: all inputs of the innermost module around the layer, with numerical norms. "
        "`lipaudit bounds --input module` computes every norm that way.",
    ),
    "tokens": count_column("tokens", "Tokens of the longest sample."),
    "exact": Column(
        "exact",
        "||J||, the norm of the head's Jacobian.",
        better="lower",
        reading=norm_of("the layer's input", "the head's output"),
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
    "softmax_norm_max": Column(
        "max ||M||", "Largest norm ||diag(p) - p p^T|| over the attention rows p."
    ),
    "splitting_gain": Column(
        "splitting",
        "Factor by which ||J|| grows if tokens are duplicated (--splitting).",
        reading="An attack that may insert copies of tokens gains up to this factor on the "
        "head. 1: duplicating tokens does not help.",
    ),
    "upper": Column(
        "upper", "Probabilistic upper limit of exact (eta 1e-3).", status="estimate", reading=UPPER
    ),
    "within": WITHIN_COLUMN,
    "forward_error": Column(
        "rounding",
        "Relative error of ||J|| that rounding in the forward pass may cause.",
        status="estimate",
        format=".2g",
        reading="Estimated effect of rounding on ||J||, largest over the samples. It matters "
        "if attention logits are in the thousands: float32 then does not resolve the "
        "attention map. Use --dtype float64 to remove it.",
    ),
    "converged": Column(
        "converged", f"{STOPPED}: every sample.", reading=CONVERGED, format="", default=True
    ),
}


def wilson_limit(label: str) -> Column:
    """Return the column of one end of the interval of a share."""
    return Column(label, "95 % confidence limit (Wilson).", format=".1%", status="estimate")


ACCURACY = {
    "eps_text": text_column("eps", "The radius as it was typed."),
    "samples": count_column("samples", "Number of samples."),
    "clean": Column(
        "clean",
        "Accuracy without attack.",
        format=".1%",
        better="higher",
        status="empirical",
        reduction=Reduction("mean", "correct"),
    ),
    "robust": Column(
        "robust",
        "Accuracy under attack.",
        format=".1%",
        better="higher",
        status="empirical",
        domain="ball",
        reading=ROBUST,
        reduction=Reduction("mean", "robust"),
    ),
    "robust_low": wilson_limit("low"),
    "robust_high": wilson_limit("high"),
}
"""Columns of a ball: radius as typed, and accuracies with and without attack."""

CERTIFIED_SHARE = Column(
    "certified",
    "Share of samples that are proven to be classified correctly on their whole ball.",
    format=".1%",
    better="higher",
    status="certified",
    domain="ball",
    reading=CERTIFIED,
    reduction=Reduction("mean", "certified"),
)
OUTCOMES = {
    "label": Column("label", "True class; empty: unknown.", format="d"),
    "predicted": Column("predicted", "Predicted class.", format="d"),
    "correct": Column("correct", "Whether the prediction is right.", format="d"),
    "robust": Column(
        "robust",
        "Whether the sample stayed correct under the attack.",
        better="higher",
        domain="ball",
        status="empirical",
        format="d",
        reading=ROBUST,
    ),
}
"""Per-sample columns shared by attacks and certificates."""
