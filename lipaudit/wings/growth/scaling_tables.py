"""The tables of the measure `scaling`: norms over the length, and power laws fitted to them."""

from __future__ import annotations

from collections.abc import Callable

from lipaudit.tables import Column, Display, Layout
from lipaudit.tables.columns import NORM
from lipaudit.theory.bounds.record import Bound, load_bounds


def list_bounds() -> list[str]:
    """Return the bounds that are measured over the length."""
    return [name for name, bound in load_bounds().items() if bound.scaling]


def _join_columns(columns_of: Callable[[Bound], dict[str, Column]]) -> dict[str, Column]:
    """Return the columns of a table for all bounds that are measured over the length, by name.

    Args:
        columns_of: returns the columns of one bound, such as `Bound.exponent_columns`.
    """
    columns: dict[str, Column] = {}
    for name in list_bounds():
        columns |= columns_of(load_bounds()[name])
    return columns


# The part of the model that a norm belongs to.
PART = {
    "layer": Column("layer", "Attention layer; empty: the model.", format="d"),
    "head": Column("head", "Head; empty: the layer.", format="d"),
}

# The tokens at which a norm was computed.
MODE = {
    "mode": Column.text("mode", "real, adversarial, radius or ascent."),
    "masked": Column("masked", "For worst cases: whether later keys are masked.", format=""),
}

SCALING_TABLE = Layout(
    name="scaling",
    title="How do norms grow with the length of the sequence?",
    display=Display(
        about="n is the number of tokens. Dotted lines are reference slopes.",
        columns=("head", "mode", "n", "masked", "radius", "norm", "fitted", "mean_field"),
        drawings=("lengths",),
    ),
    fixed={
        **PART,
        "module": Column.text("module", "Module."),
        **MODE,
        "n": Column.count("n", "Tokens.", least=1.0, needed=True),
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
    declared=lambda: _join_columns(Bound.growth_columns),
)


FITS_TABLE = Layout(
    name="scaling.fit",
    title="By which power of the length do norms grow?",
    display=Display(
        about="norm = c n^a: Castin et al. (2024) find a near 1/4 on text; 1/2 is the worst case."
    ),
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
    },
    behind="r2",
    declared=lambda: _join_columns(Bound.exponent_columns),
)
