"""The layout of every section of a report: what each column is, and how it reads."""

from __future__ import annotations

from lipaudit.results import readings
from lipaudit.results.bounds import AFFINE_PLAIN, BALL, catalogue
from lipaudit.results.columns import Column, Layout, Reduction, count_column, text_column
from lipaudit.results.heads import HEAD, HEAD_NORMS
from lipaudit.results.samples import SAMPLES

OVER_ROWS = "mean over the rows (queries) of all samples, of which long texts have more"
OVER_SAMPLES = "mean over a sample's rows, then over samples"


def _bounds() -> dict[str, Column]:
    """Return the columns of every bound, those of the logarithms last."""
    pairs = [pair for bound in catalogue().values() for pair in bound.columns().items()]
    return dict(sorted(pairs, key=lambda pair: pair[0].startswith("log10_")))


def _bounds_over_lengths() -> dict[str, Column]:
    """Return the bounds that are followed over the length, medians over the windows."""
    followed = (bound for bound in catalogue().values() if bound.scaling)
    return {name: c for bound in followed for name, c in bound.over_lengths().items()}


def _exponents() -> dict[str, Column]:
    """Return the exponents of the bounds that are followed over the length."""
    followed = (bound for bound in catalogue().values() if bound.scaling)
    return {name: c for bound in followed for name, c in bound.exponent().items()}


def _wilson_limit(label: str) -> Column:
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
        reading=readings.ROBUST,
        reduction=Reduction("mean", "robust"),
    ),
    "robust_low": _wilson_limit("low"),
    "robust_high": _wilson_limit("high"),
}
"""Columns of a ball: how its radius was typed, and the accuracies with and without attack."""

BOUNDS_TABLE = Layout(
    name="bounds",
    title="Heads: exact norms and bounds",
    sample_columns=SAMPLES["bounds"],
    fixed=HEAD_NORMS,
    behind="exact_max",
    declared=_bounds,
)

LAYERS_TABLE = Layout(
    name="bounds.layers",
    title="Layers",
    fixed={
        "layer": count_column("layer", "Attention layer, in the order of execution.", needed=True),
        "module": text_column("module", "Module that computes the attention."),
        "exact": Column(
            "exact",
            "Norm with the heads concatenated, before W_O (--concat).",
            better="lower",
            reading=readings.norm_of("the layer's input", "the outputs of its heads"),
            reduction=Reduction("median", "exact"),
        ),
        "exact_out": Column(
            "with W_O",
            "Norm after the output projection.",
            better="lower",
            reduction=Reduction("median", "exact_out"),
        ),
        "within": Column(
            "within",
            f"{readings.PROVEN}.",
            status="estimate",
            format=".2g",
            reading=readings.WITHIN,
        ),
        "sharp_sum": Column(
            "||W_O|| sum", "||W_O|| times the sum of the heads' sharp bounds.", status="bound"
        ),
        "sharp_rss": Column(
            "||W_O|| rss", "||W_O|| times the root of the sum of squares of sharp.", status="bound"
        ),
        "theorem3_sum": Column(
            "theorem 3 sum",
            "||W_O|| times the sum of the heads' Theorem 3 bounds.",
            status="bound",
        ),
    },
)

BALLS_TABLE = Layout(
    name="bounds.ball",
    title="Heads on balls: norms found and certified",
    fixed={
        **HEAD,
        "r": Column(
            "r", "Radius: ||X' - X||_F over all tokens of a sample.", domain="", needed=True
        ),
        "exact": Column("exact", "||J|| at X.", reading=readings.NEAR),
        "ball_norm": Column(
            "norm found",
            "Largest ||J|| that gradient ascent finds in the ball.",
            better="lower",
            domain=BALL,
            status="empirical",
            reading=readings.NEAR,
            reduction=Reduction("median", "ball_norm"),
        ),
        "ball_sharp": Column(
            "ball sharp",
            "Lipschitz constant of the head on the ball, lipaudit's own.",
            better="lower",
            domain=BALL,
            status="certified",
            formula="sharp + integral_0^r C(rho) d rho, C(rho) >= ||D^2 O[F, F]||_F, ||F||_F = 1",
            reading="Source: ours.\nThe norm at X, and what the second derivative can add to it "
            "on the way to any X' in the ball.\nWhat it is above the norm found is open: it may "
            "be slack, or a worse point that was not found.\nNot given everywhere: it "
            f"{AFFINE_PLAIN}.",
            reduction=Reduction("median", "ball_sharp"),
        ),
        "ball_ratio_max": Column(
            "sharp/found",
            "Largest ball sharp / norm found over samples.",
            domain=BALL,
            status="empirical",
            reduction=Reduction("max", "ball_sharp", per="ball_norm"),
        ),
        "castin": Column(
            "castin at R+r",
            "castin for tokens as long as R + r.",
            domain="all inputs, every ||x_i|| <= R + r",
            status="certified",
        ),
        "mean_field": Column(
            "mean field at R+r",
            "mean_field for tokens as long as R + r.",
            domain="all inputs, every ||x_i|| <= R + r",
            status="certified",
        ),
        "hu": Column("hu at r", "Hu et al. 2024 on the ball.", domain=BALL, status="certified"),
    },
)

ATTENTION_TABLE = Layout(
    name="attention",
    title="Heads: attention distributions",
    fixed={
        **HEAD,
        "tokens": count_column("tokens", "Keys of the longest sample."),
        "top1": Column("p(1)", f"Largest entry of a row; {OVER_ROWS}."),
        "top2": Column("p(2)", f"Second largest entry of a row; {OVER_ROWS}."),
        "g1": Column(
            "g1",
            f"p(1) (1 - p(1) + p(2)), bounds ||M||; {OVER_ROWS}.",
            better="lower",
            reading="Between 0 (one-hot, or spread over very many keys) and 1/2 (two keys share "
            "the row). The Jacobian of the softmax has norm at most g1, and nearly that.",
            reduction=Reduction("mean", "g1", weights="rows"),
        ),
        "g1_max": Column("g1 max", "Largest g1 of any row of any sample."),
        "softmax_norm": Column(
            "||M||",
            f"||diag(p) - p p^T|| of a row; {OVER_ROWS}.",
            better="lower",
            reduction=Reduction("mean", "softmax_norm", weights="rows"),
        ),
        "softmax_norm_max": Column("||M|| max", "Largest ||M|| of any row of any sample."),
        "g1_ratio": Column("g1/||M||", f"How tight g1 is (1 is exact); {OVER_ROWS}."),
        "gk_ratio": Column(
            "g1/gk",
            f"g1 / g_k; {OVER_ROWS}.",
            reading="How much of g1 is left when the k largest keys have equal weights; what "
            "JaSMin with k > 1 pushes towards 1.",
        ),
        "entropy": Column("entropy", f"Shannon entropy of a row; {OVER_ROWS}.", unit="nat"),
        "entropy_normalized": Column(
            "entropy/log n", f"Entropy over its largest value; {OVER_ROWS}."
        ),
        "support": Column(
            "support",
            f"exp(entropy), the effective number of keys; {OVER_ROWS}.",
            reading="Over how many keys the row would spread if all had the same weight.",
        ),
        "sink_first": Column(
            "sink first", f"Share of attention on the first key; {OVER_SAMPLES}."
        ),
        "sink_max": Column(
            "sink max",
            f"Share of attention on a sample's most attended key; {OVER_SAMPLES}.",
            reading="Attention mass that all queries together put on one key. Sinks are normal in "
            "language models; a change of the sink token reaches every other one.",
        ),
        "sink_token": Column(
            "sink at",
            "Position of the most attended key (in its window), in most samples.",
            format="d",
        ),
        "uniform": Column(
            "uniform", "Share of the rows of all samples in the uniform-like regime.", format=".1%"
        ),
        "intermediate": Column(
            "intermediate",
            "Share of the rows of all samples in the fragile regime, g1 > gamma.",
            better="lower",
            format=".1%",
            reading="Rows that are neither near uniform nor near one-hot: small changes of the "
            "logits move much attention. A high share is what JaSMin training lowers; by itself "
            "it is no vulnerability.",
            reduction=Reduction("mean", "intermediate", weights="long_rows"),
        ),
        "categorical": Column(
            "categorical", "Share of the rows of all samples close to one-hot.", format=".1%"
        ),
        "short_rows": count_column(
            "short rows", "Rows with fewer than 3 keys: no share counts them."
        ),
        "p_norm": Column(
            "||P||",
            "Spectral norm of a sample's attention matrix, with windows of the largest; mean over "
            "samples.",
        ),
    },
)

JACOBIAN_TABLE = Layout(
    name="jacobian",
    title="Jacobian norms",
    sample_columns=SAMPLES["jacobian"],
    fixed={
        "from": text_column("from", "Where the derivative is taken."),
        "to": text_column("to", "What is differentiated."),
        "module": text_column("module", "Block whose input and output are meant; empty: model."),
        "norm": text_column("norm", "2 (spectral) or inf (largest L1 row norm).", default="2"),
        "samples": count_column("samples", "Number of samples."),
        "mean": Column("mean", "Mean norm.", better="lower", reduction=Reduction("mean", "norm")),
        "median": Column(
            "median", "Median norm.", better="lower", reduction=Reduction("median", "norm")
        ),
        "p95": Column(
            "p95", "95th percentile.", better="lower", reduction=Reduction("p95", "norm")
        ),
        "max": Column("max", "Largest norm.", better="lower", reduction=Reduction("max", "norm")),
        "method": text_column("method", "dense VJPs or Lanczos."),
        "tol": Column("tol", "Estimated relative accuracy asked for.", domain=""),
        "within": Column(
            "within",
            f"{readings.PROVEN}.",
            status="estimate",
            format=".2g",
            reading=readings.WITHIN,
        ),
        "products": Column("products", "Mean number of products per sample.", domain=""),
        "converged": count_column(
            "converged", f"{readings.STOPPED}: samples.", reading=readings.CONVERGED
        ),
    },
)

ATTACK_TABLE = Layout(
    name="attack",
    title="Attacks",
    sample_columns=SAMPLES["attack"],
    fixed={
        "attack": text_column("attack", "Attack; worst = all attacks together.", needed=True),
        "norm": text_column("norm", "Of a ball, or what is counted.", needed=True),
        "eps": Column(
            "eps",
            "Radius, of pixels in [0, 1] or of token embeddings; or how many changes.",
            format=".4g",
            domain="",
            needed=True,
        ),
        **ACCURACY,
        "seconds": Column("seconds", "Wall time.", format=".1f", unit="s", domain=""),
        "forwards": Column("forwards", "Model forwards, in samples.", format="d"),
        "backwards": Column("backwards", "Model backwards, in samples.", format="d"),
    },
)

SCALING_TABLE = Layout(
    name="scaling",
    title="Norms over the sequence length",
    fixed={
        "layer": Column("layer", "Attention layer; empty: the model.", format="d"),
        "head": Column("head", "Head; empty: the layer.", format="d"),
        "module": text_column("module", "Module."),
        "mode": text_column("mode", "real, adversarial, radius, ascent or split."),
        "masked": Column("masked", "Worst case: whether later keys are masked.", format=""),
        "n": count_column("n", "Tokens.", least=1.0, needed=True),
        "radius": Column("R", "max_i ||x_i||, mean over the windows."),
        "n_max": Column(
            "n_max",
            "1 + exp(2 R^2 gamma), more with a query bias: where norms peak.",
            domain="",
            reading="Up to about this many tokens the worst case grows like sqrt n; beyond, it "
            "falls.",
        ),
        "norm": Column(
            "norm", "||J||, median over the windows; best of an ascent.", reading=readings.NORM
        ),
        "norm_low": Column(
            "low", "Smallest over the windows; of an ascent, where searches end again at least."
        ),
        "norm_high": Column(
            "high", "Largest over the windows; of an ascent, where searches end again at most."
        ),
        "fitted": Column("fitted", "What the fit c n^a gives here.", status="estimate"),
        "mean_field": Column(
            "mean field", "Largest norm of the same two points with any multiplicities."
        ),
    },
    behind="mean_field",
    declared=_bounds_over_lengths,
)

FITS_TABLE = Layout(
    name="scaling.fit",
    title="Scaling exponents",
    fixed={
        "layer": Column("layer", "Attention layer; empty: the model.", format="d"),
        "head": Column("head", "Head; empty: the layer.", format="d"),
        "mode": text_column("mode", "Which rows were fitted."),
        "masked": Column("masked", "Worst case: whether later keys are masked.", format=""),
        "radius": Column("R", "Worst case: the radius; each is fitted apart."),
        "exponent": Column(
            "exponent",
            "a of c n^a.",
            status="estimate",
            reading="How fast the norm grows with the number of tokens: 0.5 is the worst that "
            "theory allows for long sequences in a fixed ball, 0 is no growth. A fit over the "
            "lengths measured.",
        ),
        "exponent_se": Column("s.e.", "Its standard error.", status="estimate"),
        "r2": Column("R2", "Share of variance that n explains.", status="estimate"),
        "joint_exponent": Column("exponent, joint", "a of c n^a R^b.", status="estimate"),
        "joint_exponent_se": Column(
            "s.e.", "Standard error of a, fitted jointly.", status="estimate"
        ),
        "radius_exponent": Column("exponent of R", "b of c n^a R^b.", status="estimate"),
        "radius_exponent_se": Column("s.e.", "Standard error of b.", status="estimate"),
    },
    behind="radius_exponent_se",
    declared=_exponents,
)

SPLITS_TABLE = Layout(
    name="scaling.split",
    title="Splitting tokens before moving them",
    fixed={
        **HEAD,
        "n": count_column("n", "Tokens before any is duplicated."),
        "budget": Column("budget", "||M||_F of the move, the same for both.", domain=""),
        "norm": Column("norm", "||J||.", reading=readings.NORM),
        "gain": Column("gain", "How much ||J|| grows when tokens are duplicated."),
        "moved": Column("moved", "Largest ||O(X + M) - O(X)|| / ||M|| found.", status="empirical"),
        "split": Column(
            "split", "The same with every token duplicated first.", status="empirical"
        ),
    },
)

CERTIFY_TABLE = Layout(
    name="certify",
    title="Certificates",
    sample_columns=SAMPLES["certify"],
    fixed={
        "norm": text_column("norm", "Of the ball.", needed=True),
        "eps": Column(
            "eps",
            "Radius, of pixels in [0, 1] or of token embeddings.",
            format=".4g",
            domain="",
            needed=True,
        ),
        **ACCURACY,
        "certified": Column(
            "certified",
            "Share of samples that are classified rightly on their whole ball, proven.",
            format=".1%",
            better="higher",
            status="certified",
            domain="ball",
            reading=readings.CERTIFIED,
            reduction=Reduction("mean", "certified"),
        ),
        "certified_low": _wilson_limit("low"),
        "certified_high": _wilson_limit("high"),
        "undecided": count_column("undecided", "Samples neither broken nor certified."),
        "order": count_column(
            "order", "1: affine in the input, 2: quadratic, tighter and dearer.", default=1
        ),
        "nodes": Column("nodes", "Parts that branch and bound looked at.", format="d"),
        "seconds": Column(
            "seconds", "Wall time of certificates.", format=".1f", unit="s", domain=""
        ),
    },
)

RADII_TABLE = Layout(
    name="certify.radius",
    title="Certified radii",
    fixed={
        "norm": text_column("norm", "Of the ball.", needed=True),
        "samples": count_column("samples", "Samples that are classified rightly."),
        "radius": Column(
            "certified",
            "Median certified radius.",
            better="higher",
            status="certified",
            domain="ball",
        ),
        "radius_adversarial": Column(
            "adversarial",
            "Median of the smallest adversarial radii found.",
            better="higher",
            status="empirical",
            domain="ball",
        ),
        "ratio": Column(
            "ratio",
            "Median of certified over adversarial radius, sample by sample.",
            better="higher",
            status="empirical",
            domain="ball",
            reading="How much of the way to the nearest adversarial example that was found is "
            "proven to be free of any. 1 would leave nothing open; what is open may be the "
            "proof's weakness or the attack's.",
        ),
        "smallest": Column(
            "smallest", "Smallest certified radius.", status="certified", domain="ball"
        ),
        "largest": Column(
            "largest", "Largest certified radius.", status="certified", domain="ball"
        ),
        "passes": Column("passes", "Balls that were tried.", format="d"),
        "seconds": Column(
            "seconds", "Wall time of certificates.", format=".1f", unit="s", domain=""
        ),
    },
)
