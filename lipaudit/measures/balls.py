"""Norms of heads on balls around the samples: the largest found, and certified upper bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lipaudit.measures.measure import Values, reduce_columns
from lipaudit.tables import Array, Note, Row, Section
from lipaudit.tables.columns import Column, Reduction
from lipaudit.tables.common import HEAD, NEAR
from lipaudit.tables.report import Display, Layout
from lipaudit.tables.trials import Radius
from lipaudit.theory.bounds.record import AFFINE_PLAIN, BALL

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.measures.bounds import BoundsOptions
    from lipaudit.measures.by_layer import Reduced
    from lipaudit.models.attention.capture import Site
    from lipaudit.theory.heads import Heads
    from lipaudit.theory.ingredients import Weights


BALLS_TABLE = Layout(
    name="bounds.ball",
    title="How large can the norm of a head get near the samples?",
    display=Display(
        about="Within a ball of radius r around a sample's tokens: the largest norm that a search "
        "found, and proven upper bounds."
    ),
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


CERTIFIED = ("ball_sharp", "castin", "mean_field", "hu")
"""Columns of balls that bound `ball_norm`."""
COLUMNS = ("ball_norm", *CERTIFIED)
LOOSE = 10
"""Ratio of bound to norm found above which the bound is not informative."""


def measure_balls(
    heads: Heads,
    seeds: Sequence[int],
    radii: Sequence[Radius],
    weights: Weights | None,
    reduced: Reduced,
) -> Reduced:
    """Return the columns of balls per batch row, head and radius; names begin with "at_r".

    Args:
        heads: the heads of one layer.
        seeds: one seed per sample.
        radii: radii of the balls, at least one.
        weights: norms that depend on the weights alone, if known.
        reduced: `exact` and `sharp` of the heads at X.
    """
    import torch

    from lipaudit.theory.ascent import ball_norm
    from lipaudit.theory.ball import ball_sharp, ball_size_bounds

    parts = []
    for r in map(float, radii):
        norm = ball_norm(heads, r, seeds=seeds)
        bounds = ball_size_bounds(heads, r, weights=weights) | {
            "ball_norm": torch.where(norm.isnan(), norm, norm.maximum(reduced["exact"].to(norm))),
            "ball_sharp": ball_sharp(heads, r, sharp=reduced["sharp"], weights=weights),
        }
        parts.append(bounds)
    return {f"at_r_{name}": torch.stack([part[name] for part in parts], -1) for name in COLUMNS}


def require_balls_hold(
    site: Site,
    ids: Sequence[str],
    values: Mapping[str, Tensor],
    radii: Sequence[Radius],
    heads: Heads,
) -> None:
    """Stop the run if a constant of a head on a ball is below a norm found in that ball.

    Args:
        site: the layer.
        ids: ids of the samples.
        values: `exact` and the columns of `measure_balls`, (samples, heads, radii).
        radii: radii of the balls.
        heads: the heads behind the values.

    Raises:
        EvaluationError: a constant is below a norm; the message names head and constant.
    """
    import torch

    from lipaudit.measures.by_layer import per_sample
    from lipaudit.measures.guard import require_bound
    from lipaudit.theory.bounds.sharp import SHARP
    from lipaudit.theory.head_norms import ball_error, bound_error

    def slack(r: float) -> Tensor:
        double = heads.to(torch.float64)
        error = ball_error(double, r) + bound_error(double, values["exact"][heads.sample.cpu()])
        return per_sample(error.cpu(), heads.sample)

    for name in CERTIFIED:
        for k, radius in enumerate(radii):
            found, bound = (values[f"at_r_{each}"][..., k] for each in ("ball_norm", name))
            text, excuse = f"{name} at r = {radius.text}", partial(slack, float(radius))
            require_bound(text, bound, found, site, ids, advice=SHARP.remedy, slack=excuse)


def make_ball_section(
    facts: Mapping[str, Any],
    measured: Mapping[str, Values],
    options: BoundsOptions,
    ids: tuple[str, ...],
) -> Section:
    """Make the section `bounds.ball`: a row per head and radius."""
    import numpy as np

    from lipaudit.measures.guard import below_by_rounding, name_head

    lost = np.any(measured["numerical"], axis=0, keepdims=True)[..., None]
    columns = {name: np.where(lost, np.nan, measured[f"at_r_{name}"]) for name in COLUMNS}
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = columns["ball_sharp"] / columns["ball_norm"]
    ratio[~np.isfinite(ratio)] = np.nan
    rows = []
    for i, head in enumerate(facts["heads"]):
        for k, radius in enumerate(options.radius):
            found = {name: values[:, i, k] for name, values in columns.items()}
            found |= {"exact": measured["exact"][:, i], "ball_ratio_max": ratio[:, i, k]}
            cells = reduce_columns(found, ("ball_ratio_max",))
            rows.append(BALLS_TABLE.row(**head._asdict(), r=float(radius), **cells))
    kept = ("ball_norm", "ball_sharp")
    found = {name: measured[f"at_r_{name}"].reshape(len(ids), -1) for name in COLUMNS}
    places = [
        f"{name_head(head)} at r = {radius.text}"
        for head in facts["heads"]
        for radius in options.radius
    ]
    return BALLS_TABLE.section(
        settings=options.model_dump(),
        rows=tuple(rows),
        samples={"ids": ids},
        arrays={name: Array.of(columns[name].reshape(len(ids), -1).T) for name in kept},
        notes=_write_notes(rows, options)
        + below_by_rounding(places, ids, found.pop("ball_norm"), found, "norm found"),
    )


def _write_notes(rows: Sequence[Row], options: BoundsOptions) -> tuple[Note, ...]:
    import numpy as np

    remarks = []
    open_heads = sum(row.ball_sharp is None for row in rows) // len(options.radius)
    if open_heads:
        text = f"ball_sharp was not computed for {open_heads} heads: it {AFFINE_PLAIN}"
        remarks.append(Note(level="info", code="no-bound", text=text))
    for radius in options.radius:
        shares = [
            row.ball_sharp / row.ball_norm
            for row in rows
            if row.r == float(radius) and row.ball_norm and row.ball_sharp is not None
        ]
        if shares and (middle := float(np.median(shares))) > LOOSE:
            text = (
                f"at r = {radius.text} ball_sharp is {middle:.3g} times the norm found "
                "(median over heads), so it is not informative. Use smaller radii"
            )
            remarks.append(Note(level="info", code="loose-ball", text=text))
    return tuple(remarks)
