"""The measure `bounds`: its options and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from lipaudit.settings.measure import MeasureRecord, NormOptions, keep_ends
from lipaudit.settings.option import Need, option
from lipaudit.settings.parsing import Balls, Layers
from lipaudit.tables.columns import Column, Reduction, count_column, text_column
from lipaudit.tables.common import HEAD, HEAD_NORMS, NEAR, WITHIN_COLUMN, norm_of
from lipaudit.tables.report import Layout
from lipaudit.theory.bounds.catalogue import load_bounds
from lipaudit.theory.bounds.record import AFFINE_PLAIN, BALL
from lipaudit.theory.policy import LAYER_WITHIN
from lipaudit.theory.policy import WITHIN as PROVEN_WITHIN


class BoundsOptions(NormOptions):
    """Lipschitz bounds of every attention head beside its exact Jacobian norm.

    For each head: the exact norm ||J|| of its Jacobian on each sample, and upper bounds. These
    are the bounds of Hu 2024, Castin 2024 and Yudin 2025, and lipaudit's own, far tighter one
    (sharp).

    --radius also covers the ball of that radius around the tokens X of a layer. Every head gets
    a certified Lipschitz constant there, and the largest norm that gradient ascent finds.

    --input module computes the norms with respect to the input of the surrounding module:
    numerically, and without bounds.

    [dim]Examples:[/]
      [cyan]lipaudit bounds demo[/]
      [cyan]lipaudit bounds demo --radius 0.01,0.03,0.1[/]
      [cyan]lipaudit bounds timm:vit_base_patch16_224 --data photos/ --samples 16[/]
      [cyan]lipaudit bounds ./my-bert --data reviews.csv --layers 0,5-7 -o bounds.json[/]
    """

    reads_heads: ClassVar[bool] = True

    once: ClassVar[Mapping[str, Any]] = {
        "concat": True,
        "layer_within": PROVEN_WITHIN,
        "splitting": True,
    }

    radius: Balls = option(
        (),
        "Also bound the norms within distance r of the tokens (||X' - X||_F <= r): 0.03 or "
        "0.01,0.03.",
        need=Need("--input projections", lambda options: options.input == "projections"),
    )
    layers: Layers = option(None, "Measure only these attention layers, e.g. 0,5-7.")
    input: Literal["projections", "module"] = option(
        "projections",
        "Input of the norms: what the projections read, or the input of the "
        "whole attention module.",
    )
    concat: bool = option(
        False, "Also compute norms of each layer's concatenated heads, before W_O."
    )
    splitting: bool = option(
        False, "Also compute how much the norm of each head grows if tokens are duplicated."
    )
    layer_within: float = option(
        LAYER_WITHIN,
        "Proven relative accuracy of layer norms (probability 99.9 %).",
        gt=0,
        allow_inf_nan=False,
    )

    def shorten(self, layers: Mapping[int, bool]) -> Self | None:
        """Return the options for two of the layers with a closed form."""
        ends = keep_ends(layer for layer, closed in layers.items() if closed)
        return self.model_copy(update={"layers": ends}) if ends else None

    @property
    def layer_accuracy(self) -> dict[str, Any]:
        """What the solver is asked for where a norm is that of a layer."""
        return self.accuracy | {"within": self.layer_within}


def _list_bounds() -> dict[str, Column]:
    """Return the columns of every bound, those of the logarithms last."""
    pairs = [pair for bound in load_bounds().values() for pair in bound.columns().items()]
    return dict(sorted(pairs, key=lambda pair: pair[0].startswith("log10_")))


BOUNDS_TABLE = Layout(
    name="bounds",
    title="Heads: exact norms and bounds",
    sample_columns={
        "exact_max": Column("largest head", "Largest head norm of the sample.", better="lower")
    },
    fixed=HEAD_NORMS,
    behind="exact_max",
    declared=_list_bounds,
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
            reading=norm_of("the layer's input", "the outputs of its heads"),
            reduction=Reduction("median", "exact"),
        ),
        "exact_out": Column(
            "with W_O",
            "Norm after the output projection.",
            better="lower",
            reduction=Reduction("median", "exact_out"),
        ),
        "within": WITHIN_COLUMN,
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
        "exact": Column("exact", "||J|| at X.", reading=NEAR),
        "ball_norm": Column(
            "norm found",
            "Largest ||J|| that gradient ascent finds in the ball.",
            better="lower",
            domain=BALL,
            status="empirical",
            reading=NEAR,
            reduction=Reduction("median", "ball_norm"),
        ),
        "ball_sharp": Column(
            "ball sharp",
            "Upper bound on ||J|| everywhere in the ball (lipaudit's own).",
            better="lower",
            domain=BALL,
            status="certified",
            formula="sharp + integral_0^r C(rho) d rho, C(rho) >= ||D^2 O[F, F]||_F, ||F||_F = 1",
            reading="Source: ours.\nThe norm at X, and what the second derivative can add to "
            "it on the way to any X' in the ball.\nWhy it exceeds the norm found is "
            "unknown: the bound may be loose, or the search missed a worse "
            f"point.\nNot computed for every head: it {AFFINE_PLAIN}.",
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
            "The bound castin for tokens of norm up to R + r.",
            domain="all inputs, every ||x_i|| <= R + r",
            status="certified",
        ),
        "mean_field": Column(
            "mean field at R+r",
            "The bound mean_field for tokens of norm up to R + r.",
            domain="all inputs, every ||x_i|| <= R + r",
            status="certified",
        ),
        "hu": Column(
            "hu at r", "The bound of Hu et al. 2024 on the ball.", domain=BALL, status="certified"
        ),
    },
)


BOUNDS = MeasureRecord(
    name="bounds", tables=(BOUNDS_TABLE, LAYERS_TABLE, BALLS_TABLE), options=BoundsOptions
)
