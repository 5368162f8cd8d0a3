"""Norms of heads on balls around the samples: the largest found, and certified upper bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lipaudit.measures.by_layer import Reduced
from lipaudit.measures.guard import CERTIFIED, below_by_rounding, name_head
from lipaudit.measures.measure import Values, reduce_known
from lipaudit.settings import BALLS_TABLE
from lipaudit.settings.bounds import BoundsOptions
from lipaudit.tables import Array, Note, Row, Section
from lipaudit.tables.trials import Radius
from lipaudit.theory.bounds.ball import ball_sharp, ball_size_bounds
from lipaudit.theory.bounds.ingredients import Weights
from lipaudit.theory.bounds.record import AFFINE_PLAIN
from lipaudit.theory.growth.ascent import ball_norm
from lipaudit.theory.heads import Heads

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
    parts = []
    for r in map(float, radii):
        norm = ball_norm(heads, r, seeds=seeds)
        bounds = ball_size_bounds(heads, r, weights=weights) | {
            "ball_norm": torch.where(norm.isnan(), norm, norm.maximum(reduced["exact"].to(norm))),
            "ball_sharp": ball_sharp(heads, r, sharp=reduced["sharp"], weights=weights),
        }
        parts.append(bounds)
    return {f"at_r_{name}": torch.stack([part[name] for part in parts], -1) for name in COLUMNS}


def make_ball_section(
    facts: Mapping[str, Any],
    measured: Mapping[str, Values],
    options: BoundsOptions,
    ids: tuple[str, ...],
) -> Section:
    """Make the section `bounds.ball`: a row per head and radius."""
    lost = np.any(measured["numerical"], axis=0, keepdims=True)[..., None]
    columns = {name: np.where(lost, np.nan, measured[f"at_r_{name}"]) for name in COLUMNS}
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = columns["ball_sharp"] / columns["ball_norm"]
    ratio[~np.isfinite(ratio)] = np.nan
    rows = [
        BALLS_TABLE.row(
            **head._asdict(),
            r=float(radius),
            exact=reduce_known(measured["exact"][:, i], np.median),
            ball_ratio_max=reduce_known(ratio[:, i, k], np.max),
            **{name: reduce_known(v[:, i, k], np.median) for name, v in columns.items()},
        )
        for i, head in enumerate(facts["heads"])
        for k, radius in enumerate(options.radius)
    ]
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
