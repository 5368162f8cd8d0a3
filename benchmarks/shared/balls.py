"""Points of a ball, and what forms say of them."""

from __future__ import annotations

import torch
from torch import Tensor

from lipaudit.wings.certificates.form import Form


def draw_symbols(x: Form, count: int, generator: torch.Generator) -> Tensor:
    """Return e (count, n) in the unit ball: every second on its sphere or at a corner."""
    e = torch.randn(count, x.symbols.inputs, generator=generator, dtype=torch.float64)
    if x.symbols.norm == "linf":
        e = e.sign()
        e[::2] *= torch.rand(e[::2].shape, generator=generator, dtype=torch.float64)
    else:
        e = e / torch.linalg.vector_norm(e, dim=1, keepdim=True)
        e[::2] *= torch.rand(len(e[::2]), 1, generator=generator, dtype=torch.float64)
    return e


def inputs_at(x: Form, e: Tensor) -> Tensor:
    """Return the inputs (count, *shape) of a ball at its symbols e (count, n)."""
    moved = torch.einsum("bn,n...->b...", e, x.generators[: x.symbols.inputs].double())
    return x.centre + moved.flatten(0, 1)


def excess(form: Form, e: Tensor, truth: Tensor) -> float:
    """Return by how much true values leave what a form says of them at the points e.

    Negative where all is well: the true value lies within the errors and the slack of the
    polynomial of e. A stronger demand than that of its range.
    """
    symbols = form.symbols
    g = form.generators.double()
    value = torch.einsum("bn,n...->b...", e[:, : len(g)], g[: symbols.inputs])
    if symbols.order == 2:
        i, j = symbols.pairs
        q = g[symbols.inputs : symbols.first_error]
        value = value + torch.einsum("bn,n...->b...", e[:, i] * e[:, j], q)
    errors = g[symbols.first_error :].abs().sum(0)
    off = (truth - form.centre - value.view(truth.shape)).abs()
    assert not off.isnan().any()
    low, high = form.range()
    outside = torch.maximum(low - truth, truth - high).amax().item()
    return max((off - errors - form.slack).amax().item(), outside)
