"""The bounds that are computed: ours, and those of plug-ins by the functions of their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.errors import EvaluationError, LipauditError, UsageError, of_machine
from lipaudit.results.bounds import Bound, catalogue, remedy
from lipaudit.theory.heads import Heads

BOUNDS: Mapping[str, Bound] = catalogue()
"""The record of every bound."""

BoundFunction = Callable[[Heads], Tensor]
"""Computes a bound of ||J||, (batch, heads) on the device of the heads; NaN where there is none.

It is handed heads of every kind, in float64, W_V of each scaled to size one (J is homogeneous in
it), and of a large layer some heads at a time. Padding must not change it: see `Heads`."""


def separate_bounds(
    heads: Heads, records: Iterable[Bound] = tuple(BOUNDS.values())
) -> dict[str, Float[Tensor, "batch heads"]]:
    """Return every bound whose record names a function, by its name.

    Args:
        heads: what the functions are handed.
        records: of bounds with and without a function.

    Raises:
        UsageError: a function cannot be imported.
        EvaluationError: a function fails, or returns anything but floats of shape (batch, heads).
    """
    return {bound.name: _computed(bound, heads) for bound in records if bound.function}


def _computed(bound: Bound, heads: Heads) -> Tensor:
    shape = heads.q.shape[:2]
    try:
        values = _function(bound)(heads)
    except Exception as error:
        file = isinstance(error, OSError)  # of the plug-in's own
        if isinstance(error, LipauditError) or (of_machine(error) and not file):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise EvaluationError(f"the bound {bound.name} failed: {reason}", remedy(bound)) from error
    if not isinstance(values, Tensor) or values.shape != shape or not values.is_floating_point():
        is_now = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        reason = f"returned {is_now}, not floats of shape {tuple(shape)} (batch, heads)"
        raise EvaluationError(f"the bound {bound.name} {reason}", remedy(bound))
    return values.to(torch.float64)


def _function(bound: Bound) -> BoundFunction:
    module, _, name = bound.function.partition(":")
    try:
        function: BoundFunction = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the bound {bound.name} cannot be computed: {bound.function} is not there: {error}",
            remedy(bound),
        ) from error
    return function
