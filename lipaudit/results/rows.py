"""The row type of every section: one line per column, and what it means."""

from __future__ import annotations

from typing import ClassVar, get_args

from lipaudit.results.columns import Column, Float, Row, column
from lipaudit.results.trials import TrialKey, parse_radius

PROVEN = (
    "With probability 0.999 the norm is at most this share above what is given (largest over the "
    "samples)"
)
STOPPED = "The error was estimated at most tol and proven to stay within its limit"


class HeadRow(Row):
    """What names a head."""

    layer: int = column("layer", "Attention layer, in the order of execution.", ..., format="d")
    head: int = column("head", "Head within the layer.", ..., format="d")
    module: str = column("module", "Module that computes the attention.", "", format="s")


class BoundsRow(HeadRow):
    """One head: its exact Jacobian norm and the upper bounds (medians over samples)."""

    section: ClassVar[str] = "bounds"
    kind: str = column("kind", "How q, k and v come from X.", "", format="s")
    input: str = column("input", "In what the norms and bounds are taken.", "", format="s")
    tokens: int = column("tokens", "Tokens of the longest sample.", 0, format="d")
    exact: Float | None = column(
        "exact", "||J||, the norm of the head's Jacobian.", better="lower"
    )
    exact_max: Float | None = column(
        "exact max", "Largest ||J|| over the samples.", better="lower"
    )
    sharp: Float | None = column(
        "sharp",
        "lipaudit's own bound, from the norms of the Jacobian's blocks.",
        better="lower",
        status="bound",
    )
    theorem3: Float | None = column(
        "theorem 3", "Yudin et al. 2025, Theorem 3, exact ||M(P_i)||.", status="bound"
    )
    theorem3_g1: Float | None = column(
        "theorem 3 g1", "Theorem 3 with g1(P_i) for ||M(P_i)||.", status="bound"
    )
    appendix_c: Float | None = column(
        "appendix C", "Yudin et al. 2025, Appendix C.", status="bound"
    )
    castin: Float | None = column(
        "castin",
        "Castin et al. 2024.",
        domain="all inputs, every ||x_i|| <= R",
        status="certified",
    )
    mean_field: Float | None = column(
        "mean field",
        "lipaudit's form of the mean-field bound.",
        domain="all inputs, every ||x_i|| <= R",
        status="certified",
    )
    hu: Float | None = column("hu", "Hu et al. 2024 at r = 0.", status="bound")
    log10_castin: Float | None = column(
        "log10 castin",
        "log10 of castin.",
        domain="all inputs, every ||x_i|| <= R",
        status="certified",
    )
    log10_mean_field: Float | None = column(
        "log10 m. f.",
        "log10 of it.",
        domain="all inputs, every ||x_i|| <= R",
        status="certified",
    )
    log10_hu: Float | None = column("log10 hu", "log10 of hu.", status="bound")
    sharp_ratio_max: Float | None = column("sharp/exact", "Largest sharp / exact over samples.")
    p_norm: Float | None = column("||P||", "Spectral norm of the attention matrix.")
    x_norm: Float | None = column("||X||", "Spectral norm of the layer's input.")
    radius: Float | None = column("R", "max_i ||x_i|| of the layer's input.")
    softmax_norm_max: Float | None = column("max ||M||", "Largest ||diag(p) - p p^T|| over rows.")
    splitting_gain: Float | None = column(
        "splitting", "How much ||J|| grows when tokens are duplicated."
    )
    upper: Float | None = column(
        "upper", "Probabilistic upper limit of exact (eta 1e-3).", status="estimate"
    )
    within: Float | None = column("within", f"{PROVEN}.", status="estimate", format=".2g")
    forward_error: Float | None = column(
        "rounding",
        "Share of ||J|| by which the rounding of the forward pass may have moved it.",
        status="estimate",
        format=".2g",
    )
    converged: bool = column("converged", f"{STOPPED}: every sample.", True)


class LayerRow(Row):
    """One attention layer: heads concatenated, with and without W_O."""

    section: ClassVar[str] = "bounds.layers"
    layer: int = column("layer", "Attention layer, in the order of execution.", ..., format="d")
    module: str = column("module", "Module that computes the attention.", "", format="s")
    exact: Float | None = column("exact", "Norm with the heads concatenated.", better="lower")
    exact_out: Float | None = column(
        "with W_O", "Norm after the output projection.", better="lower"
    )
    within: Float | None = column("within", f"{PROVEN}.", status="estimate", format=".2g")
    sharp_sum: Float | None = column(
        "||W_O|| sum", "||W_O|| times the sum of the heads' sharp bounds.", status="bound"
    )
    sharp_rss: Float | None = column(
        "||W_O|| rss", "||W_O|| times the root of the sum of squares of sharp.", status="bound"
    )
    theorem3_sum: Float | None = column(
        "theorem 3 sum", "||W_O|| times the sum of the heads' Theorem 3 bounds.", status="bound"
    )


class AttentionRow(HeadRow):
    """One head: how its attention rows are distributed (means over rows and samples)."""

    section: ClassVar[str] = "attention"
    tokens: int = column("tokens", "Keys of the longest sample.", 0, format="d")
    top1: Float | None = column("p(1)", "Largest entry of a row.")
    top2: Float | None = column("p(2)", "Second largest entry of a row.")
    g1: Float | None = column("g1", "p(1) (1 - p(1) + p(2)), bounds ||M||.", better="lower")
    g1_max: Float | None = column("g1 max", "Largest g1.")
    softmax_norm: Float | None = column("||M||", "||diag(p) - p p^T||.", better="lower")
    softmax_norm_max: Float | None = column("||M|| max", "Largest ||diag(p) - p p^T||.")
    g1_ratio: Float | None = column("g1/||M||", "How tight g1 is (1 is exact).")
    gk_ratio: Float | None = column("g1/gk", "g1 / g_k.")
    entropy: Float | None = column("entropy", "Shannon entropy.", unit="nat")
    entropy_normalized: Float | None = column("entropy/log n", "Entropy over its largest value.")
    support: Float | None = column("support", "exp(entropy), the effective number of keys.")
    sink_first: Float | None = column("sink first", "Mass on the first key.")
    sink_max: Float | None = column("sink max", "Mass on the most attended key.")
    sink_token: int | None = column("sink at", "Position of the most attended key.", format="d")
    uniform: Float | None = column(
        "uniform", "Share of rows in the uniform-like regime.", format=".1%"
    )
    intermediate: Float | None = column(
        "intermediate",
        "Share of rows in the fragile regime, g1 > gamma.",
        better="lower",
        format=".1%",
    )
    categorical: Float | None = column(
        "categorical", "Share of rows close to one-hot.", format=".1%"
    )
    short_rows: int = column("short rows", "Rows with fewer than 3 keys, left out.", 0, format="d")
    p_norm: Float | None = column("||P||", "Spectral norm of the attention matrix.")


class JacobianRow(Row):
    """The Jacobian norm of the whole model, over samples; or of the rest from one block on."""

    section: ClassVar[str] = "jacobian"
    from_: str = column("from", "Where the derivative is taken.", "", alias="from", format="s")
    to: str = column("to", "What is differentiated.", "", format="s")
    module: str = column(
        "module", "Block whose input and output are meant; empty: model.", "", format="s"
    )
    norm: str = column("norm", "2 (spectral) or inf (largest L1 row norm).", "2", format="s")
    samples: int = column("samples", "Number of samples.", 0, format="d")
    mean: Float | None = column("mean", "Mean norm.", better="lower")
    median: Float | None = column("median", "Median norm.", better="lower")
    p95: Float | None = column("p95", "95th percentile.", better="lower")
    max: Float | None = column("max", "Largest norm.", better="lower")
    method: str = column("method", "dense VJPs or Lanczos.", "", format="s")
    tol: Float | None = column("tol", "Estimated relative accuracy asked for.", domain="")
    within: Float | None = column("within", f"{PROVEN}.", status="estimate", format=".2g")
    products: Float | None = column("products", "Mean number of products per sample.", domain="")
    converged: int = column("converged", f"{STOPPED}: samples.", 0, format="d")


class AttackRow(Row):
    """One attack at one radius."""

    section: ClassVar[str] = "attack"
    attack: str = column("attack", "Attack; worst = the worst over all of them.", ..., format="s")
    norm: str = column("norm", "linf or l2.", ..., format="s")
    eps: Float = column("eps", "Radius in pixel space [0, 1].", ..., format=".4g")
    eps_text: str = column("eps", "The radius as it was typed.", "", format="s")
    samples: int = column("samples", "Number of samples.", 0, format="d")
    clean: Float | None = column(
        "clean", "Accuracy without attack.", format=".1%", better="higher", status="empirical"
    )
    robust: Float | None = column(
        "robust",
        "Accuracy under attack.",
        format=".1%",
        better="higher",
        status="empirical",
        domain="ball",
    )
    robust_low: Float | None = column("low", "Wilson 95 % limit.", format=".1%", status="estimate")
    robust_high: Float | None = column(
        "high", "Wilson 95 % limit.", format=".1%", status="estimate"
    )
    seconds: Float | None = column("seconds", "Wall time.", format=".1f", unit="s", domain="")
    forwards: int | None = column("forwards", "Model forwards, in samples.", format="d")
    backwards: int | None = column("backwards", "Model backwards, in samples.", format="d")

    @property
    def key(self) -> TrialKey:
        """Its trial; a report that does not say how the radius was typed has it rounded."""
        return TrialKey(self.attack, self.norm, parse_radius(self.eps_text or f"{self.eps:.4g}"))


class ScalingRow(Row):
    """The norm of one head, layer or model at one sequence length and radius."""

    section: ClassVar[str] = "scaling"
    layer: int | None = column("layer", "Attention layer; empty: the model.", format="d")
    head: int | None = column("head", "Head; empty: the layer.", format="d")
    module: str = column("module", "Module.", "", format="s")
    mode: str = column("mode", "real, adversarial, radius, ascent or split.", "", format="s")
    masked: bool | None = column("masked", "Worst case: whether later keys are masked.")
    n: int = column("n", "Tokens.", ..., format="d")
    radius: Float | None = column("R", "max_i ||x_i||, mean over the windows.")
    n_max: Float | None = column(
        "n_max", "1 + exp(2 R^2 gamma), more with a query bias: where norms peak.", domain=""
    )
    norm: Float | None = column("norm", "||J||, median over the windows; best of an ascent.")
    norm_low: Float | None = column("low", "Smallest over windows or starts.")
    norm_high: Float | None = column("high", "Largest over windows or starts.")
    fitted: Float | None = column("fitted", "What the fit c n^a gives here.", status="estimate")
    mean_field: Float | None = column(
        "mean field", "Largest norm of the same two points with any multiplicities."
    )
    bound_sharp: Float | None = column("sharp", "Median sharp bound.", status="bound")
    bound_theorem3: Float | None = column("theorem 3", "Median Theorem 3 bound.", status="bound")
    bound_castin: Float | None = column(
        "castin",
        "Median of castin.",
        domain="all inputs, every ||x_i|| <= R",
        status="certified",
    )


class ScalingFitRow(Row):
    """A log-log fit of the norm against length (and radius)."""

    section: ClassVar[str] = "scaling.fit"
    layer: int | None = column("layer", "Attention layer; empty: the model.", format="d")
    head: int | None = column("head", "Head; empty: the layer.", format="d")
    mode: str = column("mode", "Which rows were fitted.", "", format="s")
    masked: bool | None = column("masked", "Worst case: whether later keys are masked.")
    exponent: Float | None = column("exponent", "a of c n^a.", status="estimate")
    exponent_se: Float | None = column("s.e.", "Its standard error.", status="estimate")
    r2: Float | None = column("R2", "Share of variance that n explains.", status="estimate")
    joint_exponent: Float | None = column("exponent, joint", "a of c n^a R^b.", status="estimate")
    joint_exponent_se: Float | None = column(
        "s.e.", "Standard error of a, fitted jointly.", status="estimate"
    )
    radius_exponent: Float | None = column("exponent of R", "b of c n^a R^b.", status="estimate")
    radius_exponent_se: Float | None = column("s.e.", "Standard error of b.", status="estimate")
    sharp_exponent: Float | None = column(
        "sharp", "The exponent of the sharp bound.", status="estimate"
    )
    theorem3_exponent: Float | None = column(
        "theorem 3", "The exponent of the Theorem 3 bound.", status="estimate"
    )
    castin_exponent: Float | None = column("castin", "The exponent of castin.", status="estimate")


class ScalingSplitRow(HeadRow):
    """One head: attacks that only move tokens, and that duplicate every token first."""

    section: ClassVar[str] = "scaling.split"
    n: int = column("n", "Tokens before any is duplicated.", 0, format="d")
    budget: Float | None = column("budget", "||M||_F of the move, the same for both.", domain="")
    norm: Float | None = column("norm", "||J||.")
    gain: Float | None = column("gain", "How much ||J|| grows when tokens are duplicated.")
    moved: Float | None = column(
        "moved", "Largest ||O(X + M) - O(X)|| / ||M|| found.", status="empirical"
    )
    split: Float | None = column(
        "split", "The same with every token duplicated first.", status="empirical"
    )


AnyRow = (
    BoundsRow
    | LayerRow
    | AttentionRow
    | JacobianRow
    | AttackRow
    | ScalingRow
    | ScalingFitRow
    | ScalingSplitRow
)
ROWS: dict[str, type[Row]] = {row.section: row for row in get_args(AnyRow)}
"""Row type of each section, by the section's name."""

SAMPLES: dict[str, dict[str, Column]] = {
    "bounds": {
        "exact_max": Column(
            label="largest head", meaning="Largest head norm of the sample.", better="lower"
        )
    },
    "jacobian": {
        "norm": Column(label="||J||", meaning="Norm of the sample's Jacobian.", better="lower"),
        "upper": Column(
            label="upper", meaning="Probabilistic upper limit of norm.", status="estimate"
        ),
        "products": Column(label="products", meaning="Products used.", format="d"),
        "converged": Column(label="converged", meaning=f"{STOPPED}.", format=""),
        "margin": Column(label="margin", meaning="f_y - max_(j != y) f_j.", better="higher"),
        "radius_first_order": Column(
            label="first-order radius",
            meaning="min_j (f_y - f_j) / ||grad(f_y - f_j)|| over all other classes j, or a lower "
            "limit of it (complete: no): indicative, never a certificate.",
            better="higher",
            status="estimate",
        ),
        "rivals": Column(
            label="rivals", meaning="Other classes j looked at for the radius.", format="d"
        ),
        "complete": Column(
            label="complete", meaning="Whether the other classes are no nearer.", format=""
        ),
        "correct": Column(label="correct", meaning="Whether the prediction is right.", format=""),
    },
    "attack": {
        "label": Column(label="label", meaning="True class.", format="d"),
        "predicted": Column(label="predicted", meaning="Predicted class.", format="d"),
        "correct": Column(label="correct", meaning="Whether the prediction is right.", format="d"),
        "robust": Column(
            label="robust",
            meaning="Whether the sample withstood the attack.",
            better="higher",
            domain="ball",
            status="empirical",
            format="d",
        ),
    },
}
"""Per-sample columns of each section; `robust@ATTACK,NORM,EPS` reads as `robust`."""
