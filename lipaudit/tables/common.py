"""Columns that several measures have, and how to read them."""

from __future__ import annotations

from lipaudit.tables.columns import Column, Reduction, count_column, text_column

PROVEN = (
    "With probability 0.999 the norm is at most this share above what is given (largest over the "
    "samples)"
)


STOPPED = "The error was estimated at most tol and proven to stay within its limit"


WITHIN = (
    "Norms are lower estimates. The iteration stops where it estimates the error at "
    "most tol; that is no proof, and falls short where singular values crowd below the first. "
    "What is proven, for each sample with probability 0.999 over the random start vector and "
    "whatever the model: the truth is at most this share higher. Ask for less with --within; as "
    "small as tol it costs 1.4 to 2.4 times as much. 0: nothing random is left out."
)


CONVERGED = (
    "The stop rule was met: the error is estimated at most tol (no proof), and "
    "within is at most what --within asks for (proven). Otherwise the norm is a lower estimate of "
    "unknown quality: see upper."
)


UPPER = (
    "With probability 1 - eta over the random start vector the norm is not above it. Not "
    "a proof: the proven upper bounds are those of `lipaudit bounds`."
)


NORM = (
    "The largest factor by which an infinitesimal change of the input can be magnified in "
    "the output, at each sample. It says nothing of how far away the nearest adversarial example "
    "is: see radius_first_order for a hint and `lipaudit attack` for a trial. It is met from "
    "below: see within."
)


NEAR = (
    "The norm at X, the largest that was found near X, and the constant that nothing near X can "
    "exceed: the truth lies between the last two. An ascent is no proof, a certificate no attack."
)


ROBUST = (
    "An upper limit of the true robust accuracy: a stronger attack may break more. "
    "Compare only figures of the same attack, radius and samples."
)


CERTIFIED = (
    "A lower limit of the true robust accuracy, on these samples: no attack whatever can break "
    "what is certified, and what is not certified may stand or fall. The truth lies between it "
    "and the accuracy under attack.\n"
    "Proven of the function of real numbers that the stored weights define. A program that "
    "evaluates it in float32 rounds, and may err where a margin is as small as that."
)


def norm_of(source: str, target: str) -> str:
    """Say what the norm of a Jacobian at the samples is, and what it is not."""
    return (
        f"The largest factor by which an infinitesimal change of {source} can be magnified in "
        f"{target}, at each sample. A large change may be magnified more. The solver "
        "approaches the norm from below: see within."
    )


WITHIN_COLUMN = Column("within", f"{PROVEN}.", status="estimate", format=".2g", reading=WITHIN)

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
    "softmax_norm_max": Column("max ||M||", "Largest ||diag(p) - p p^T|| over rows."),
    "splitting_gain": Column(
        "splitting",
        "How much ||J|| grows when tokens are duplicated (--splitting).",
        reading="Attacks that may insert copies of tokens can gain this factor on the head; 1 "
        "means that duplicating tokens does not help them.",
    ),
    "upper": Column(
        "upper", "Probabilistic upper limit of exact (eta 1e-3).", status="estimate", reading=UPPER
    ),
    "within": WITHIN_COLUMN,
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
        "converged", f"{STOPPED}: every sample.", reading=CONVERGED, format="", default=True
    ),
}


def wilson_limit(label: str) -> Column:
    """Return the column of an end of the interval of a share."""
    return Column(label, "Wilson 95 % limit.", format=".1%", status="estimate")


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
"""Columns of a ball: how its radius was typed, and the accuracies with and without attack."""

CERTIFIED_SHARE = Column(
    "certified",
    "Share of samples that are classified rightly on their whole ball, proven.",
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
        "Whether the sample withstood the attack.",
        better="higher",
        domain="ball",
        status="empirical",
        format="d",
        reading=ROBUST,
    ),
}
"""What attacks and certificates have for every sample."""
