"""Where a pass begins and ends: the box of inputs, and how far the wrong classes can be ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lipaudit.theory.hybrid import affine, nonlinear
from lipaudit.theory.hybrid.tensor import Hybrid
from lipaudit.theory.relaxation.balls import paths_named

Hybrid.rules = {**affine.RULES, **nonlinear.RULES}


def box(
    x: Float[Tensor, "batch ..."], eps: float, limits: tuple[float, float] | None = None
) -> Hybrid:
    """Return all inputs within `eps` of x in the L-inf norm, cut by the values they can have."""
    low, high = x - eps, x + eps
    if limits is not None:
        low, high = low.clamp(*limits), high.clamp(*limits)
    centre, radius = (low + high) / 2, (high - low) / 2
    rows = torch.diag_embed(radius.flatten(1)).movedim(1, 0)
    return Hybrid(centre, rows.reshape(-1, *x.shape), torch.zeros_like(x), spread=radius)


def worst_logits(
    model: Callable[[Any], Any],
    x: Hybrid,
    label: Int[Tensor, " batch"],
    *,
    module: nn.Module,
) -> Float[Tensor, "batch classes"]:
    """Return no less than logit_j - logit_label on the whole box, for every class j.

    0 for the label itself: no input of the box is labelled otherwise if all others are negative.
    Its cross-entropy is no less than that of any input of the box. Rounding is not counted.

    Args:
        model: gives logits, (batch, classes).
        x: box of each sample.
        label: class of each sample.
        module: whose parts name an operation that is refused.

    Raises:
        NoRuleError: the model uses an operation without a rule.
    """
    with paths_named(module):
        return affine.differences(model(x), label).ends[1]
