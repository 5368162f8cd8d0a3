"""The measure `scaling`: its options and its tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lipaudit.settings.measure import MeasureOptions, MeasureRecord
from lipaudit.settings.option import Need, option
from lipaudit.settings.parsing import Layers, Lengths, Names, listed
from lipaudit.tables.columns import Column, count_column, text_column
from lipaudit.tables.common import NORM
from lipaudit.tables.report import Layout
from lipaudit.theory.bounds.catalogue import load_bounds
from lipaudit.theory.bounds.record import Bound
from lipaudit.theory.policy import TOL

ScalingMode = Literal["real", "adversarial", "radius", "ascent"]


WORST = Need("a --mode other than real", lambda o: {*o.modes} != {"real"})


ScalingModes = Annotated[tuple[ScalingMode, ...], listed]


class ScalingOptions(MeasureOptions):
    """How the norms of attention layers and of the model grow with the number of tokens.

    [dim]Modes:[/]
      real         your samples at growing lengths: text cut, images resized
      adversarial  worst-case tokens: the norm grows like sqrt n up to n_max
      radius       the same tokens at growing radius
      ascent       the largest norm that searches find within the radius

    [dim]Examples:[/]
      [cyan]lipaudit scaling demo[/]
      [cyan]lipaudit scaling ./my-bert --data book.txt --lengths 8:512:log7 -n 8[/]
      [cyan]lipaudit scaling ./my-bert --mode adversarial --heads 0.8,5.11[/]
      [cyan]lipaudit scaling timm:vit_tiny_patch16_224 --lengths 16:196:log4[/]
    """

    samples: ClassVar[int] = 4
    reads_heads: ClassVar[bool] = True

    lengths: Lengths = option("8:256:log8", "Tokens, FIRST:LAST:logCOUNT.")
    modes: ScalingModes = option(
        "real,adversarial,radius,ascent",
        "real, adversarial, radius, ascent (comma-separated).",
        "--mode",
        min_length=1,
    )
    layers: Layers = option(None, "Measure only these attention layers, e.g. 0,5-7.")
    heads: Names = option(
        None,
        "Heads of the worst-case modes: 0.8,5.11 or all. Default: the head with the "
        "largest norm of each layer.",
    )
    radius: Annotated[float, Field(gt=0, le=1e6)] | None = option(
        None,
        "Also search the worst tokens of at most this norm, besides the norm that the layer has.",
        need=WORST,
    )
    mask: Literal["own", "none", "causal", "both"] = option(
        "own", "Mask of the worst case: own (the model's), none, causal or both.", need=WORST
    )
    tol: float = option(
        TOL, "Relative accuracy at which the iteration stops (estimated, not proven).", gt=0, lt=1
    )

    @property
    def tokens(self) -> int | None:
        """Return the number of tokens that texts need."""
        return max(self.lengths) if "real" in self.modes else None

    def outline(self, samples: int) -> str:
        """Describe before the run what will be measured."""
        heads = "the strongest head of each layer" if self.heads is None else "the heads given"
        worst = [mode for mode in self.modes if mode != "real"]
        parts = [
            f"{samples} samples at {len(self.lengths)} lengths" if "real" in self.modes else "",
            f"{', '.join(worst)} of {heads}" if worst else "",
        ]
        return "; ".join(filter(None, parts))


def _follow_bounds(columns_of: Callable[[Bound], dict[str, Column]]) -> dict[str, Column]:
    """Return columns of the bounds that are measured over the length."""
    followed = (bound for bound in load_bounds().values() if bound.scaling)
    return {name: column for bound in followed for name, column in columns_of(bound).items()}


PART = {
    "layer": Column("layer", "Attention layer; empty: the model.", format="d"),
    "head": Column("head", "Head; empty: the layer.", format="d"),
}
"""The part of the model that a norm belongs to."""

MODE = {
    "mode": text_column("mode", "real, adversarial, radius or ascent."),
    "masked": Column("masked", "For worst cases: whether later keys are masked.", format=""),
}
"""The tokens at which a norm was computed."""

SCALING_TABLE = Layout(
    name="scaling",
    title="Norms over the sequence length",
    fixed={
        **PART,
        "module": text_column("module", "Module."),
        **MODE,
        "n": count_column("n", "Tokens.", least=1.0, needed=True),
        "radius": Column("R", "max_i ||x_i||, mean over the windows."),
        "n_max": Column(
            "n_max",
            "1 + exp(2 R^2 gamma), more with a query bias: where norms peak.",
            domain="",
            reading="The worst case grows like sqrt n up to about this many tokens and falls "
            "beyond.",
        ),
        "norm": Column("norm", "||J||, median over the windows; best of an ascent.", reading=NORM),
        "norm_low": Column(
            "low", "Smallest over the windows; for an ascent, the lowest end of repeated searches."
        ),
        "norm_high": Column(
            "high",
            "Largest over the windows; for an ascent, the highest end of repeated searches.",
        ),
        "fitted": Column("fitted", "Value of the fit c n^a at this n.", status="estimate"),
        "mean_field": Column(
            "mean field", "Largest norm for the same two points repeated any number of times."
        ),
    },
    behind="mean_field",
    declared=lambda: _follow_bounds(Bound.over_lengths),
)


FITS_TABLE = Layout(
    name="scaling.fit",
    title="Scaling exponents",
    fixed={
        **PART,
        **MODE,
        "radius": Column("R", "For worst cases: the radius. Each radius has its own fit."),
        "exponent": Column(
            "exponent",
            "Exponent a of the fit c n^a.",
            status="estimate",
            reading="How fast the norm grows with the number of tokens. 0 is no growth, 0.5 the "
            "largest growth that theory allows for long sequences in a fixed ball.",
        ),
        "exponent_se": Column("s.e.", "Standard error of the exponent.", status="estimate"),
        "r2": Column(
            "R2", "R^2 of the fit: share of variance that n explains.", status="estimate"
        ),
        "joint_exponent": Column(
            "exponent, joint", "Exponent a of the joint fit c n^a R^b.", status="estimate"
        ),
        "joint_exponent_se": Column(
            "s.e.", "Standard error of a, fitted jointly.", status="estimate"
        ),
        "radius_exponent": Column(
            "exponent of R", "Exponent b of the joint fit c n^a R^b.", status="estimate"
        ),
        "radius_exponent_se": Column("s.e.", "Standard error of b.", status="estimate"),
    },
    behind="radius_exponent_se",
    declared=lambda: _follow_bounds(Bound.exponent),
)


SCALING = MeasureRecord(name="scaling", tables=(SCALING_TABLE, FITS_TABLE), options=ScalingOptions)
