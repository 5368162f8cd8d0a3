"""One row type per section of a report: what each column is, and how it reads."""

from __future__ import annotations

from itertools import chain
from typing import ClassVar

from lipaudit.results import readings
from lipaudit.results.bounds import AFFINE_PLAIN, BALL, Bound, catalogue
from lipaudit.results.columns import Column, Float, OpenRow, Row, column, wilson_limit
from lipaudit.results.heads import HeadNorms, HeadRow
from lipaudit.results.trials import TrialKey, parse_radius


class BoundsRow(HeadNorms, OpenRow):
    """One head: its exact Jacobian norm and the upper bounds (medians over samples)."""

    section: ClassVar[str] = "bounds"
    title: ClassVar[str] = "Heads: exact norms and bounds"
    behind: ClassVar[str] = "exact_max"

    @classmethod
    def declared(cls) -> dict[str, Column]:
        """Return the columns of every bound, those of the logarithms last."""
        pairs = [pair for bound in catalogue().values() for pair in bound.columns().items()]
        return dict(sorted(pairs, key=lambda pair: pair[0].startswith("log10_")))


class LayerRow(Row):
    """One attention layer: heads concatenated, with and without W_O."""

    section: ClassVar[str] = "bounds.layers"
    title: ClassVar[str] = "Layers"
    layer: int = column("layer", "Attention layer, in the order of execution.", ..., format="d")
    module: str = column("module", "Module that computes the attention.", "", format="s")
    exact: Float | None = column(
        "exact",
        "Norm with the heads concatenated, before W_O (--concat).",
        better="lower",
        reading=readings.norm_of("the layer's input", "the outputs of its heads"),
    )
    exact_out: Float | None = column(
        "with W_O", "Norm after the output projection.", better="lower"
    )
    within: Float | None = column(
        "within",
        f"{readings.PROVEN}.",
        status="estimate",
        format=".2g",
        reading=readings.WITHIN,
    )
    sharp_sum: Float | None = column(
        "||W_O|| sum", "||W_O|| times the sum of the heads' sharp bounds.", status="bound"
    )
    sharp_rss: Float | None = column(
        "||W_O|| rss", "||W_O|| times the root of the sum of squares of sharp.", status="bound"
    )
    theorem3_sum: Float | None = column(
        "theorem 3 sum", "||W_O|| times the sum of the heads' Theorem 3 bounds.", status="bound"
    )


class BallRow(HeadRow):
    """One head on the balls ||X' - X||_F <= r around the samples (medians over samples)."""

    section: ClassVar[str] = "bounds.ball"
    title: ClassVar[str] = "Heads on balls: norms found and certified"
    r: Float = column("r", "Radius: ||X' - X||_F over all tokens of a sample.", ..., domain="")
    exact: Float | None = column("exact", "||J|| at X.", reading=readings.NEAR)
    ball_norm: Float | None = column(
        "norm found",
        "Largest ||J|| that gradient ascent finds in the ball.",
        better="lower",
        domain=BALL,
        status="empirical",
        reading=readings.NEAR,
    )
    ball_sharp: Float | None = column(
        "ball sharp",
        "Lipschitz constant of the head on the ball, lipaudit's own.",
        better="lower",
        domain=BALL,
        status="certified",
        formula="sharp + integral_0^r C(rho) d rho, C(rho) >= ||D^2 O[F, F]||_F, ||F||_F = 1",
        reading="Source: ours.\nThe norm at X, and what the second derivative can add to it on "
        "the way to any X' in the ball.\nWhat it is above the norm found is open: it may be "
        f"slack, or a worse point that was not found.\nNot given everywhere: it {AFFINE_PLAIN}.",
    )
    ball_ratio_max: Float | None = column(
        "sharp/found",
        "Largest ball sharp / norm found over samples.",
        domain=BALL,
        status="empirical",
    )
    castin: Float | None = column(
        "castin at R+r",
        "castin for tokens as long as R + r.",
        domain="all inputs, every ||x_i|| <= R + r",
        status="certified",
    )
    mean_field: Float | None = column(
        "mean field at R+r",
        "mean_field for tokens as long as R + r.",
        domain="all inputs, every ||x_i|| <= R + r",
        status="certified",
    )
    hu: Float | None = column(
        "hu at r",
        "Hu et al. 2024 on the ball.",
        domain=BALL,
        status="certified",
    )


OVER_ROWS = "mean over the rows (queries) of all samples, of which long texts have more"
OVER_SAMPLES = "mean over a sample's rows, then over samples"


class AttentionRow(HeadRow):
    """One head: how its attention rows are distributed, and where attention goes."""

    section: ClassVar[str] = "attention"
    title: ClassVar[str] = "Heads: attention distributions"
    tokens: int = column("tokens", "Keys of the longest sample.", 0, format="d")
    top1: Float | None = column("p(1)", f"Largest entry of a row; {OVER_ROWS}.")
    top2: Float | None = column("p(2)", f"Second largest entry of a row; {OVER_ROWS}.")
    g1: Float | None = column(
        "g1",
        f"p(1) (1 - p(1) + p(2)), bounds ||M||; {OVER_ROWS}.",
        better="lower",
        reading="Between 0 (one-hot, or spread over very many keys) and 1/2 (two keys share the "
        "row). The Jacobian of the softmax has norm at most g1, and nearly that.",
    )
    g1_max: Float | None = column("g1 max", "Largest g1 of any row of any sample.")
    softmax_norm: Float | None = column(
        "||M||", f"||diag(p) - p p^T|| of a row; {OVER_ROWS}.", better="lower"
    )
    softmax_norm_max: Float | None = column("||M|| max", "Largest ||M|| of any row of any sample.")
    g1_ratio: Float | None = column("g1/||M||", f"How tight g1 is (1 is exact); {OVER_ROWS}.")
    gk_ratio: Float | None = column(
        "g1/gk",
        f"g1 / g_k; {OVER_ROWS}.",
        reading="How much of g1 is left when the k largest keys have equal weights; what JaSMin "
        "with k > 1 pushes towards 1.",
    )
    entropy: Float | None = column(
        "entropy", f"Shannon entropy of a row; {OVER_ROWS}.", unit="nat"
    )
    entropy_normalized: Float | None = column(
        "entropy/log n", f"Entropy over its largest value; {OVER_ROWS}."
    )
    support: Float | None = column(
        "support",
        f"exp(entropy), the effective number of keys; {OVER_ROWS}.",
        reading="Over how many keys the row would spread if all had the same weight.",
    )
    sink_first: Float | None = column(
        "sink first", f"Share of attention on the first key; {OVER_SAMPLES}."
    )
    sink_max: Float | None = column(
        "sink max",
        f"Share of attention on a sample's most attended key; {OVER_SAMPLES}.",
        reading="Attention mass that all queries together put on one key. Sinks are normal in "
        "language models; a change of the sink token reaches every other one.",
    )
    sink_token: int | None = column(
        "sink at", "Position of the most attended key, in most samples.", format="d"
    )
    uniform: Float | None = column(
        "uniform", "Share of the rows of all samples in the uniform-like regime.", format=".1%"
    )
    intermediate: Float | None = column(
        "intermediate",
        "Share of the rows of all samples in the fragile regime, g1 > gamma.",
        better="lower",
        format=".1%",
        reading="Rows that are neither near uniform nor near one-hot: small changes of the logits "
        "move much attention. A high share is what JaSMin training lowers; by itself it is no "
        "vulnerability.",
    )
    categorical: Float | None = column(
        "categorical", "Share of the rows of all samples close to one-hot.", format=".1%"
    )
    short_rows: int = column(
        "short rows", "Rows with fewer than 3 keys: no share counts them.", 0, format="d"
    )
    p_norm: Float | None = column(
        "||P||", "Spectral norm of a sample's attention matrix; mean over samples."
    )


class JacobianRow(Row):
    """The Jacobian norm of the whole model, over samples; or of the rest from one block on."""

    section: ClassVar[str] = "jacobian"
    title: ClassVar[str] = "Jacobian norms"
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
    within: Float | None = column(
        "within",
        f"{readings.PROVEN}.",
        status="estimate",
        format=".2g",
        reading=readings.WITHIN,
    )
    products: Float | None = column("products", "Mean number of products per sample.", domain="")
    converged: int = column(
        "converged",
        f"{readings.STOPPED}: samples.",
        0,
        format="d",
        reading=readings.CONVERGED,
    )


class AttackRow(Row):
    """One attack at one radius."""

    section: ClassVar[str] = "attack"
    title: ClassVar[str] = "Attacks"
    attack: str = column("attack", "Attack; worst = all attacks together.", ..., format="s")
    norm: str = column("norm", "Of a ball, or what is counted.", ..., format="s")
    eps: Float = column(
        "eps",
        "Radius, of pixels in [0, 1] or of token embeddings; or how many changes.",
        ...,
        format=".4g",
        domain="",
    )
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
        reading=readings.ROBUST,
    )
    robust_low: Float | None = wilson_limit("low")
    robust_high: Float | None = wilson_limit("high")
    seconds: Float | None = column("seconds", "Wall time.", format=".1f", unit="s", domain="")
    forwards: int | None = column("forwards", "Model forwards, in samples.", format="d")
    backwards: int | None = column("backwards", "Model backwards, in samples.", format="d")

    @property
    def key(self) -> TrialKey:
        """Its trial; a report that does not say how the radius was typed has it rounded."""
        return TrialKey(self.attack, self.norm, parse_radius(self.eps_text or f"{self.eps:.4g}"))


class ScalingRow(OpenRow):
    """The norm of one head, layer or model at one sequence length and radius."""

    section: ClassVar[str] = "scaling"
    title: ClassVar[str] = "Norms over the sequence length"
    behind: ClassVar[str] = "mean_field"
    layer: int | None = column("layer", "Attention layer; empty: the model.", format="d")
    head: int | None = column("head", "Head; empty: the layer.", format="d")
    module: str = column("module", "Module.", "", format="s")
    mode: str = column("mode", "real, adversarial, radius, ascent or split.", "", format="s")
    masked: bool | None = column("masked", "Worst case: whether later keys are masked.")
    n: int = column("n", "Tokens.", ..., format="d", least=1)
    radius: Float | None = column("R", "max_i ||x_i||, mean over the windows.")
    n_max: Float | None = column(
        "n_max",
        "1 + exp(2 R^2 gamma), more with a query bias: where norms peak.",
        domain="",
        reading="Up to about this many tokens the worst case grows like sqrt n; beyond, it falls.",
    )
    norm: Float | None = column(
        "norm",
        "||J||, median over the windows; best of an ascent.",
        reading=readings.NORM,
    )
    norm_low: Float | None = column(
        "low", "Smallest over the windows; of an ascent, where searches end again at least."
    )
    norm_high: Float | None = column(
        "high", "Largest over the windows; of an ascent, where searches end again at most."
    )
    fitted: Float | None = column("fitted", "What the fit c n^a gives here.", status="estimate")
    mean_field: Float | None = column(
        "mean field", "Largest norm of the same two points with any multiplicities."
    )

    @classmethod
    def declared(cls) -> dict[str, Column]:
        """Return the bounds that are followed over the length, medians over the windows."""
        pairs = (bound.over_lengths().items() for bound in _scaling())
        return dict(chain.from_iterable(pairs))


class ScalingFitRow(OpenRow):
    """A log-log fit of the norm against length (and radius)."""

    section: ClassVar[str] = "scaling.fit"
    title: ClassVar[str] = "Scaling exponents"
    behind: ClassVar[str] = "radius_exponent_se"
    layer: int | None = column("layer", "Attention layer; empty: the model.", format="d")
    head: int | None = column("head", "Head; empty: the layer.", format="d")
    mode: str = column("mode", "Which rows were fitted.", "", format="s")
    masked: bool | None = column("masked", "Worst case: whether later keys are masked.")
    radius: Float | None = column("R", "Worst case: the radius; each is fitted apart.")
    exponent: Float | None = column(
        "exponent",
        "a of c n^a.",
        status="estimate",
        reading="How fast the norm grows with the number of tokens: 0.5 is the worst that theory "
        "allows for long sequences in a fixed ball, 0 is no growth. A fit over the lengths "
        "measured.",
    )
    exponent_se: Float | None = column("s.e.", "Its standard error.", status="estimate")
    r2: Float | None = column("R2", "Share of variance that n explains.", status="estimate")
    joint_exponent: Float | None = column("exponent, joint", "a of c n^a R^b.", status="estimate")
    joint_exponent_se: Float | None = column(
        "s.e.", "Standard error of a, fitted jointly.", status="estimate"
    )
    radius_exponent: Float | None = column("exponent of R", "b of c n^a R^b.", status="estimate")
    radius_exponent_se: Float | None = column("s.e.", "Standard error of b.", status="estimate")

    @classmethod
    def declared(cls) -> dict[str, Column]:
        """Return the exponents of the bounds that are followed over the length."""
        return dict(chain.from_iterable(bound.exponent().items() for bound in _scaling()))


def _scaling() -> list[Bound]:
    return [bound for bound in catalogue().values() if bound.scaling]


class ScalingSplitRow(HeadRow):
    """One head: attacks that only move tokens, and that duplicate every token first."""

    section: ClassVar[str] = "scaling.split"
    title: ClassVar[str] = "Splitting tokens before moving them"
    n: int = column("n", "Tokens before any is duplicated.", 0, format="d")
    budget: Float | None = column("budget", "||M||_F of the move, the same for both.", domain="")
    norm: Float | None = column("norm", "||J||.", reading=readings.NORM)
    gain: Float | None = column("gain", "How much ||J|| grows when tokens are duplicated.")
    moved: Float | None = column(
        "moved", "Largest ||O(X + M) - O(X)|| / ||M|| found.", status="empirical"
    )
    split: Float | None = column(
        "split", "The same with every token duplicated first.", status="empirical"
    )


class CertifyRow(Row):
    """One ball around every sample: certified accuracy beside accuracy under attack."""

    section: ClassVar[str] = "certify"
    title: ClassVar[str] = "Certificates"
    norm: str = column("norm", "Of the ball.", ..., format="s")
    eps: Float = column(
        "eps", "Radius, of pixels in [0, 1] or of token embeddings.", ..., format=".4g", domain=""
    )
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
        reading=readings.ROBUST,
    )
    robust_low: Float | None = wilson_limit("low")
    robust_high: Float | None = wilson_limit("high")
    certified: Float | None = column(
        "certified",
        "Share of samples that are classified rightly on their whole ball, proven.",
        format=".1%",
        better="higher",
        status="certified",
        domain="ball",
        reading=readings.CERTIFIED,
    )
    certified_low: Float | None = wilson_limit("low")
    certified_high: Float | None = wilson_limit("high")
    undecided: int = column("undecided", "Samples neither broken nor certified.", 0, format="d")
    order: int = column(
        "order", "1: affine in the input, 2: quadratic, tighter and dearer.", 1, format="d"
    )
    nodes: int | None = column("nodes", "Parts that branch and bound looked at.", format="d")
    seconds: Float | None = column(
        "seconds", "Wall time of certificates.", format=".1f", unit="s", domain=""
    )

    @property
    def key(self) -> TrialKey:
        """Its ball."""
        return TrialKey("", self.norm, parse_radius(self.eps_text or f"{self.eps:.4g}"))


class CertifyRadiusRow(Row):
    """The largest certified radius of the samples, beside the smallest adversarial one found."""

    section: ClassVar[str] = "certify.radius"
    title: ClassVar[str] = "Certified radii"
    norm: str = column("norm", "Of the ball.", ..., format="s")
    samples: int = column("samples", "Samples that are classified rightly.", 0, format="d")
    radius: Float | None = column(
        "certified", "Median certified radius.", better="higher", status="certified", domain="ball"
    )
    radius_adversarial: Float | None = column(
        "adversarial",
        "Median of the smallest adversarial radii found.",
        better="higher",
        status="empirical",
        domain="ball",
    )
    ratio: Float | None = column(
        "ratio",
        "Median of certified over adversarial radius, sample by sample.",
        better="higher",
        status="empirical",
        domain="ball",
        reading="How much of the way to the nearest adversarial example that was found is proven "
        "to be free of any. 1 would leave nothing open; what is open may be the proof's weakness "
        "or the attack's.",
    )
    smallest: Float | None = column(
        "smallest", "Smallest certified radius.", status="certified", domain="ball"
    )
    largest: Float | None = column(
        "largest", "Largest certified radius.", status="certified", domain="ball"
    )
    passes: int | None = column("passes", "Balls that were tried.", format="d")
    seconds: Float | None = column(
        "seconds", "Wall time of certificates.", format=".1f", unit="s", domain=""
    )
