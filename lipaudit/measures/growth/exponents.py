"""Power laws of the measure `scaling`: which rows are fitted, and what the fits say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lipaudit.measures.measure import Values, number_or_none
from lipaudit.results import ScalingFitRow, ScalingRow
from lipaudit.theory.growth.worst_tokens import PowerLaw, power_law

WELL_UNDER = 10
"""The sqrt n law is fitted up to n_max over this."""

AGREED = 1.02
"""Searches whose interval reaches further than this times the norm have no exponent."""


def groups(rows: Sequence[ScalingRow]) -> Iterator[tuple[dict[str, Any], list[ScalingRow]]]:
    """Yield the rows of each head, mode, mask and, at chosen radii, radius, in their order."""
    keys = ("mode", "layer", "head", "masked", "radius")
    groups: dict[tuple[Any, ...], list[ScalingRow]] = {}
    for row in rows:
        name = {key: getattr(row, key) for key in keys}
        if row.mode == "radius":  # where the radius is what varies
            name["radius"] = None
        groups.setdefault(tuple(name.values()), []).append(row)
    for key, group in groups.items():
        yield dict(zip(keys, key, strict=True)), group


def points(rows: Sequence[ScalingRow]) -> tuple[Values, Values, Values]:
    """Return n, norm and R of the rows where a power law is expected."""
    kept = [row for row in rows if _in_law(row)]
    columns = [[getattr(row, name) for row in kept] for name in ("n", "norm", "radius")]
    n, norm, radius = np.array(columns, dtype=np.float64)
    return n, norm, radius


def _in_law(row: ScalingRow) -> bool:
    """Whether a row is where a power law is expected."""
    return row.mode != "adversarial" or row.n * WELL_UNDER <= (row.n_max or 0)


def fit_of(
    name: Mapping[str, Any], n: Values, norm: Values, radius: Values
) -> tuple[PowerLaw, ScalingFitRow]:
    """Fit the norms against n alone, and against n and R together."""
    kept = np.isfinite(norm) & (norm > 0)
    lengths, norms, radii = (torch.from_numpy(values[kept]) for values in (n, norm, radius))
    alone = power_law(lengths, norms)
    known = bool(radii.isfinite().all())
    joint = power_law(lengths, norms, radii) if known else PowerLaw(*[math.nan] * 6)
    row = ScalingFitRow(
        **{key: value for key, value in name.items() if key != "module"},
        exponent=number_or_none(alone.exponent),
        exponent_se=number_or_none(alone.exponent_se),
        r2=number_or_none(alone.r2),
        joint_exponent=number_or_none(joint.exponent),
        joint_exponent_se=number_or_none(joint.exponent_se),
        radius_exponent=number_or_none(joint.radius_exponent),
        radius_exponent_se=number_or_none(joint.radius_exponent_se),
    )
    return alone, row


def with_searches(fit: ScalingFitRow, rows: Sequence[ScalingRow]) -> ScalingFitRow | None:
    """Widen the standard error of an ascent by its searches; None where they do not agree."""
    above = np.array([(row.norm_high or math.nan) / (row.norm or math.nan) for row in rows])
    if not (above <= AGREED).all():
        return None
    if fit.exponent_se is None:
        return fit
    logs = np.log([row.n for row in rows])
    shares = (logs - logs.mean()) / ((logs - logs.mean()) ** 2).sum()
    reach = float(np.abs(shares) @ np.log(above))  # if every search errs the worst way
    return fit.model_copy(update={"exponent_se": math.hypot(fit.exponent_se, reach)})


def bound_exponents(n: Values, bounds: Mapping[str, Values]) -> dict[str, float | None]:
    """Return the exponent of every bound, as columns of the fit."""
    return {
        f"{name}_exponent": fit_of({}, n, bound, np.full_like(bound, np.nan))[1].exponent
        for name, bound in bounds.items()
    }


def with_fit(row: ScalingRow, law: PowerLaw) -> ScalingRow:
    """Return a row with what the fit says there, where it is expected to hold."""
    if math.isnan(law.exponent) or row.mode == "ascent" or not _in_law(row):
        return row
    return row.model_copy(update={"fitted": law.constant * row.n**law.exponent})
