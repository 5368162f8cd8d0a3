"""The last check of every head: no bound may lie below the exact norm that it bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lipaudit.errors import EvaluationError
from lipaudit.measures.balls import CERTIFIED
from lipaudit.models.attention.sites import Site
from lipaudit.results.bounds import remedy
from lipaudit.results.trials import Radius
from lipaudit.theory.bounds.catalogue import BOUNDS

ROUNDING_SLACK = 1e-9
"""What rounding in float64 may take from a bound, or add to a norm, relatively."""


def require_bounds_hold(site: Site, ids: Sequence[str], values: Mapping[str, Tensor]) -> None:
    """Stop the run where a bound of a head, or of a layer, is below the exact norm.

    Ours and those of plug-ins alike.

    Args:
        site: the layer.
        ids: of the samples.
        values: `exact` and every bound that is given, (samples, heads); `layer_out`, `out_norm`,
            (samples, 1). NaN is not given.

    Raises:
        EvaluationError: one is below; it names the head and the bound.
    """
    for name, bound in BOUNDS.items():
        _require(name, values[name], values["exact"], site, ids, advice=remedy(bound))
    heads = values["out_norm"] * values["sharp"].square().sum(1, keepdim=True).sqrt()
    advice = remedy(BOUNDS["sharp"])
    _require("sharp_rss", heads, values["layer_out"], site, ids, advice=advice)


def require_balls_hold(
    site: Site, ids: Sequence[str], values: Mapping[str, Tensor], radii: Sequence[Radius]
) -> None:
    """Stop the run where a constant of a head on a ball is below a norm that was found there.

    Args:
        site: the layer.
        ids: of the samples.
        values: the columns of `on_balls`, (samples, heads, radii).
        radii: of the balls.

    Raises:
        EvaluationError: one is below; it names the head and the constant.
    """
    for name in CERTIFIED:
        for k, radius in enumerate(radii):
            found, bound = (values[f"at_r_{each}"][..., k] for each in ("ball_norm", name))
            advice = remedy(BOUNDS["sharp"])
            _require(f"{name} at r = {radius.text}", bound, found, site, ids, advice=advice)


def _require(
    name: str,
    bound: Tensor,
    exact: Tensor,
    site: Site,
    ids: Sequence[str],
    *,
    advice: str,
) -> None:
    below = (bound < exact * (1 - ROUNDING_SLACK)).nonzero()
    if not len(below):
        return
    sample, head = below[0].tolist()
    where = f"head {site.index}.{head}" if bound.shape[1] == site.heads else f"layer {site.index}"
    raise EvaluationError(
        f"{name} of {where} ({site.module}) is {float(bound[sample, head]):.9g} on sample "
        f"{ids[sample]}, below the exact norm {float(exact[sample, head]):.9g}: one of them is "
        "wrong, and no figure of this run can be relied on",
        advice,
    )
