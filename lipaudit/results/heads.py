"""What names a head, and the columns that every head of the section `bounds` has."""

from __future__ import annotations

import math

from lipaudit.results import readings
from lipaudit.results.columns import Float, Row, column
from lipaudit.results.figures import log10


class HeadRow(Row):
    """What names a head."""

    layer: int = column("layer", "Attention layer, in the order of execution.", ..., format="d")
    head: int = column("head", "Head within the layer.", ..., format="d")
    module: str = column("module", "Module that computes the attention.", "", format="s")


class HeadNorms(HeadRow):
    """One head: its exact Jacobian norm and what goes with it (medians over samples)."""

    kind: str = column("kind", "How q, k and v come from X.", "", format="s")
    input: str = column(
        "input",
        "In what the norms and bounds are taken.",
        "",
        format="s",
        reading="one input: X, which queries, keys and values all read. queries apart: the "
        "input of the queries and that of the keys and values, varied independently; where one is "
        "made from the other, or both from one tensor (spatial reduction, class attention), they "
        "cannot move so, and the norm in what the module takes is another one, larger or smaller. "
        "keys and values: their input, the queries being constant. module input: all that the "
        "innermost module around the layer takes; norms are numerical there. `lipaudit bounds "
        "--input module` takes every norm so.",
    )
    tokens: int = column("tokens", "Tokens of the longest sample.", 0, format="d")
    exact: Float | None = column(
        "exact",
        "||J||, the norm of the head's Jacobian.",
        better="lower",
        reading=readings.norm_of("the layer's input", "the head's output"),
    )
    exact_max: Float | None = column(
        "exact max", "Largest ||J|| over the samples.", better="lower"
    )
    sharp_ratio_max: Float | None = column("sharp/exact", "Largest sharp / exact over samples.")
    p_norm: Float | None = column("||P||", "Spectral norm of the attention matrix.")
    x_norm: Float | None = column("||X||", "Spectral norm of the layer's input.")
    radius: Float | None = column("R", "max_i ||x_i|| of the layer's input.")
    softmax_norm_max: Float | None = column("max ||M||", "Largest ||diag(p) - p p^T|| over rows.")
    splitting_gain: Float | None = column(
        "splitting",
        "How much ||J|| grows when tokens are duplicated (--splitting).",
        reading="Attacks that may insert copies of tokens can gain this factor on the head; 1 "
        "means that duplicating tokens does not help them.",
    )
    upper: Float | None = column(
        "upper",
        "Probabilistic upper limit of exact (eta 1e-3).",
        status="estimate",
        reading=readings.UPPER,
    )
    within: Float | None = column(
        "within",
        f"{readings.PROVEN}.",
        status="estimate",
        format=".2g",
        reading=readings.WITHIN,
    )
    forward_error: Float | None = column(
        "rounding",
        "Share of ||J|| by which the rounding of the forward pass may have moved it.",
        status="estimate",
        format=".2g",
        reading="The model computes queries and keys with a relative error of its precision; "
        "where logits are in the thousands, single precision cannot tell the attention map. This "
        "is an estimate of how far ||J|| moves by it, largest over the samples. All figures of "
        "the head are right for the rounded pass; --dtype float64 gives those of the model on "
        "paper.",
    )
    converged: bool = column(
        "converged", f"{readings.STOPPED}: every sample.", True, reading=readings.CONVERGED
    )

    def log10_ratio(self, bound: str) -> float | None:
        """Return log10(bound / exact), from the logarithm where the bound overflows."""
        value, exact = getattr(self, bound), log10(self.exact)
        if exact is None or not math.isfinite(exact):
            return None
        if value is None or math.isinf(value):
            stored = getattr(self, f"log10_{bound}", None)
            return None if stored is None else stored - exact
        ratio = log10(value)
        return None if ratio is None else ratio - exact
