"""Is the gradient of a model its derivative? Finite differences beside autograd.

A straight-through estimator, `detach`, a part under `no_grad` or a wrong backward pass give a
gradient that is not the derivative of what the model computes. Everything that is measured by
autograd is then of another function than the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import of_machine
from lipaudit.models.net import Net
from lipaudit.models.precision import Widening, exact_arithmetic
from lipaudit.results import Note

STEPS = (1e-3, 1e-4, 1e-5)
"""Lengths of a step, as shares of the length of the sample.

A central difference D(h) = (g(h) - g(-h)) / 2h of g(t) = w . f(x + t u) errs by h^2 g''' / 6, by
rounding, eps |g| / h, and by the kinks (ReLU, maxima) between x - h u and x + h u, whose number
falls with h. Of three steps one is free of all three in float64; a wrong gradient is wrong at all.
"""
DIFFERS = 0.01
"""Least difference, as a share of the derivative, that is no rounding."""
WIDENED = 2**28
"""Most parameters of a model that is compared in float64: a copy of them takes 2 GB."""


def compare_derivative(net: Net, batch: Batch) -> tuple[Note, ...]:
    """Warn of a model whose gradient is not its derivative.

    Two samples are moved along one random direction each, in float64 where the model is not too
    large; otherwise, and where the model's own code fails, nothing is compared.

    Args:
        net: the model.
        batch: samples of it.

    Returns:
        A warning that names a sample, or nothing.
    """
    parameters = list(net.module.parameters())
    if sum(p.numel() for p in parameters) > WIDENED or any(p.is_meta for p in parameters):
        return ()
    pair = batch[:2].trimmed()
    try:
        with _in_float64(net), exact_arithmetic(net.device), Widening():
            shares = _differences(net, pair.to(net.device, torch.float64))
    except Exception as error:  # whatever the model's own code raises: the measures say so
        if of_machine(error):
            raise
        return ()
    sample = int(shares.argmax())
    if not bool(shares[sample] > DIFFERS):
        return ()
    text = (
        "the gradient of this model is not its derivative (they differ by "
        f"{float(shares[sample]):.0%} at sample {pair.ids[sample]}): figures of autograd, norms "
        "and attacks by gradients among them, are not of the function that the model computes"
    )
    return (Note(level="warning", code="no-derivative", text=text),)


def _differences(net: Net, batch: Batch) -> Tensor:
    """Return |D(h) - J u . w| as a share of the derivative, the smallest over h; per sample."""
    x = net.point(batch)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    free = net.free(batch)
    if free is not None:
        u = u * free[..., None]
    flat = tuple(range(1, x.ndim))
    length = torch.linalg.vector_norm(x, dim=flat, keepdim=True).clamp_min(1.0)
    u = u * length / torch.linalg.vector_norm(u, dim=flat, keepdim=True)
    with torch.enable_grad():
        point = x.clone().requires_grad_()
        output = net.forward(point, batch)
        w = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        pulled = _gradient((output * w).sum(), point)
    slope = (pulled * u).sum(flat)
    # Of a random u the slope is about ||J^T w|| ||u|| / sqrt(n): chance may make one far smaller.
    entries = u.count_nonzero() / len(u)
    usual = torch.linalg.vector_norm(pulled, dim=flat) * length.flatten() / entries.sqrt()
    with torch.no_grad():
        found = torch.stack([_central(net, batch, x, u, w, h) for h in STEPS])
    scale = torch.stack([slope.abs(), usual]).amax(0).clamp_min(found.abs())
    # What rounding may make of g, where the derivative itself vanishes.
    eps = torch.finfo(torch.float64).eps
    rounding = eps * (output.detach() * w).abs().flatten(1).sum(1) / min(STEPS)
    apart = ((found - slope).abs() - rounding).clamp_min(0) / scale.clamp_min(1e-300)
    return apart.amin(0)


def _central(net: Net, batch: Batch, x: Tensor, u: Tensor, w: Tensor, h: float) -> Tensor:
    ahead, behind = (net.forward(x + sign * h * u, batch) for sign in (1, -1))
    return ((ahead - behind) * w).flatten(1).sum(1) / (2 * h)


def _gradient(value: Tensor, point: Tensor) -> Tensor:
    """Return the gradient; zeros where no graph leads to the point."""
    if not value.requires_grad:
        return torch.zeros_like(point)
    (gradient,) = torch.autograd.grad(value, point, allow_unused=True)
    return torch.zeros_like(point) if gradient is None else gradient


@contextmanager
def _in_float64(net: Net) -> Iterator[None]:
    """Widen all weights while the block runs; they come back as they were, in the same memory."""
    tensors = [*net.module.parameters(), *net.module.buffers()]
    narrow = {id(t): (t, t.data) for t in tensors if t.is_floating_point()}
    try:
        for t, data in narrow.values():
            t.data = data.double()
        yield
    finally:
        for t, data in narrow.values():
            t.data = data
