"""Every upper bound of the Jacobian norm of attention heads: ours, and those of plug-ins."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.errors import EvaluationError, LipauditError, of_machine
from lipaudit.theory import cut
from lipaudit.theory.bounds.record import Bound, load_bounds
from lipaudit.theory.heads import Heads, are_affine, unit_values
from lipaudit.theory.ingredients import Ingredients, Tokens

ROUNDING = 1e-12
"""Every bound is raised by this share: more than float64 rounding takes from it.

It is 9000 u. A bound is a product of a few norms, each from sums of n = N, D or d terms: off by
n u at worst, which this covers for small layers, and by about n^1/2 u otherwise.
"""


@torch.inference_mode()
def head_bounds(
    heads: Heads, *, bounds: Iterable[Bound] | None = None
) -> dict[str, Float[Tensor, "batch heads"]]:
    """Return the bounds of every head, and what the bounds are made of, in float64.

    The ingredients: `p_norm` ||P||, `softmax_norm_max` over the rows of P, `x_norm` the norm of X
    as it enters the formulas, `radius` R. A bound that cannot be given is NaN: see `AFFINE_ONLY`,
    and for hu its domain.

    Args:
        heads: all heads of a layer, any kind, any precision.
        bounds: records of those that are computed; by default all.

    Raises:
        EvaluationError: tokens, queries, keys or values are not finite; or the function of a bound
            fails, or returns anything but floats of shape (batch, heads).

    Examples:
        >>> from lipaudit.theory.heads import affine_heads
        >>> eye, x = torch.eye(2)[None], torch.tensor([[[3.0, 4.0]]])
        >>> head_bounds(affine_heads(x, eye, eye, eye))["sharp"]
        tensor([[1.0000]], dtype=torch.float64)
    """
    records = list(load_bounds().values() if bounds is None else bounds)
    if len(heads.row_blocks()) > 1 and len(heads.q) > 1:
        rows = [heads.row(b) for b in range(len(heads.q))]
        each = [head_bounds(row, bounds=records) for row in rows]
        return {name: torch.cat([one[name] for one in each]) for name in each[0]}
    heads = heads.to(torch.float64)
    for name in ("x", "q", "k", "v"):
        if not getattr(heads, name).sum().isfinite():
            raise EvaluationError(
                f"The attention layer has infinite or undefined {name} entries.",
                "Look for overflow in the model: run it in float32 or float64.",
            )
    tokens = Tokens(heads)
    heads, size = unit_values(heads)
    parts = []
    for some in chunks(heads):
        known = Ingredients(heads.pick(some), tokens)
        terms = {
            "p_norm": known.p_norm,
            "softmax_norm_max": known.softmax_norm_max,
            "x_norm": tokens.norm.expand_as(known.p_norm),
            "radius": tokens.radius.expand_as(known.p_norm),
        }
        raised = {bound.name: _compute(bound, known) * (1 + ROUNDING) for bound in records}
        parts.append(terms | raised)
    whole = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    size = size.to(heads.v.device)
    return whole | {bound.name: whole[bound.name] * size for bound in records}


def chunks(heads: Heads) -> list[slice]:
    """Cut the heads of a layer, so that a temporary stays near `map_entries` numbers."""
    (batch, count, n, d), (m, dv) = heads.q.shape, heads.v.shape[2:]
    per_head = batch * (n * m if are_affine(heads) else max(n * m, n * d * d, m * d * dv))
    return cut(count, per_head, heads.policy.map_entries)


def _compute(bound: Bound, known: Ingredients) -> Tensor:
    shape = known.heads.q.shape[:2]
    try:
        values = known.once(bound.compute)
        fits = isinstance(values, Tensor) and values.shape == shape
        if not fits or not values.is_floating_point():
            tensor = isinstance(values, Tensor)
            found = tuple(values.shape) if tensor else type(values).__name__
            raise TypeError(f"returned {found}, not floats of shape {tuple(shape)} (batch, heads)")
    except Exception as error:
        # An OSError is about a file of the plug-in's own.
        machine = of_machine(error) and not isinstance(error, OSError)
        if isinstance(error, LipauditError) or machine:
            raise
        reason = f"{type(error).__name__}: {error}"
        raise EvaluationError(f"the bound {bound.name} failed: {reason}", bound.remedy) from error
    return values.to(torch.float64)
