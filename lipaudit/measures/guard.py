"""The last check of every head: no bound may be below its exact norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lipaudit.errors import EvaluationError
from lipaudit.measures.by_layer import HeadName, per_sample
from lipaudit.measures.measure import Values
from lipaudit.models.attention.capture import Site
from lipaudit.tables import Note
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.bounds.sharp import SHARP
from lipaudit.theory.head_norms import bound_error
from lipaudit.theory.heads import Heads

DOUBLE = torch.float64
"""Precision in which norms are confirmed and bounds computed, independent of --dtype."""


def require_bounds_hold(
    site: Site, ids: Sequence[str], values: Mapping[str, Tensor], heads: Heads
) -> None:
    """Stop the run if a bound of a head or layer is below the exact norm.

    This checks plug-in bounds, too. A difference that rounding explains passes;
    `below_by_rounding` finds it again in the figures.

    Args:
        site: the layer.
        ids: ids of the samples.
        values: `exact` and all bounds, (samples, heads); `layer_out`, `out_norm`, (samples, 1).
            NaN means not computed.
        heads: the heads behind both.

    Raises:
        EvaluationError: a bound is below the norm; the message names head and bound.
    """
    exact = values["exact"]

    @cache
    def slack() -> Tensor:
        error = bound_error(heads.to(torch.float64), exact[heads.sample.cpu()])
        return per_sample(error.cpu(), heads.sample)

    for name, bound in load_bounds().items():
        require_bound(name, values[name], exact, site, ids, advice=bound.remedy, slack=slack)
    out_norm, sharp = values["out_norm"], values["sharp"]

    def layer_slack() -> Tensor:
        """W_O is linear: an error of a head grows by ||W_O||, and its product has one more."""
        out = heads.out
        assert out is not None
        share = 2 * (out.shape[2] + 16) * out.shape[0] * out.shape[1] * torch.finfo(DOUBLE).eps
        return out_norm * (root_sum(slack()) + share * root_sum(sharp))

    require_bound(
        "sharp_rss",
        out_norm * root_sum(sharp),
        values["layer_out"],
        site,
        ids,
        advice=SHARP.remedy,
        slack=layer_slack,
    )


def below_by_rounding(
    places: Sequence[str],
    ids: Sequence[str],
    exact: Values,
    bounds: Mapping[str, Values],
    norm: str = "exact norm",
) -> tuple[Note, ...]:
    """Name the bound furthest below its norm, in a run that passed the guard.

    Args:
        places: heads, layers, or heads at radii.
        ids: ids of the samples.
        exact: the norms, (samples, places).
        bounds: arrays (samples, places), by the name of the bound.
        norm: the name of the norm in the message.
    """
    with np.errstate(invalid="ignore"):  # NaN is never below
        below = {
            name: np.where(bound < exact, 1 - bound / exact, 0) for name, bound in bounds.items()
        }
    count = sum(int((shares > 0).sum()) for shares in below.values())
    if not count:
        return ()
    name = max(below, key=lambda each: float(below[each].max()))
    sample, index = (int(i) for i in np.unravel_index(below[name].argmax(), exact.shape))
    where = sample, index
    text = (
        f"{count} bounds are below the {norm} by no more than rounding can explain. At most "
        f"by {below[name][where]:.1g} of it: {name} of {places[index]} is "
        f"{bounds[name][where]:.12g} on sample {ids[sample]}, the {norm} {exact[where]:.12g}"
    )
    return (Note(level="info", code="within-rounding", text=text),)


def name_head(head: HeadName) -> str:
    """Name a head and its module."""
    return f"head {head.layer}.{head.head} ({head.module})"


def root_sum(values: Tensor) -> Tensor:
    """Return the root of the sum of squares over the heads, (samples, 1)."""
    return values.square().sum(1, keepdim=True).sqrt()


def require_bound(
    name: str,
    bound: Tensor,
    exact: Tensor,
    site: Site,
    ids: Sequence[str],
    *,
    advice: str,
    slack: Callable[[], Tensor],
) -> None:
    """Stop the run if a bound, (samples, heads or 1), is below a norm by more than its slack.

    Raises:
        EvaluationError: the message names the first such head or layer.
    """
    if not (bound < exact).any():  # nearly always; rounding is estimated only otherwise
        return
    below = (bound < exact - slack().nan_to_num(0.0)).nonzero()
    if not len(below):
        return
    sample, head = below[0].tolist()
    where = f"head {site.index}.{head}" if bound.shape[1] == site.heads else f"layer {site.index}"
    raise EvaluationError(
        f"{name} of {where} ({site.module}) is {float(bound[sample, head]):.9g} on sample "
        f"{ids[sample]}, below the exact norm {float(exact[sample, head]):.9g}. One of them "
        "is wrong: do not rely on any number of this run",
        advice,
    )
