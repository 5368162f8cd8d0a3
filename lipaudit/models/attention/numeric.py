"""Exact Jacobian norms of attention layers that have no closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipaudit.errors import EvaluationError, first_line, of_machine
from lipaudit.models.attention.capture import Layer
from lipaudit.models.attention.observe.calls import AttentionCall
from lipaudit.models.attention.observe.events import AttentionMode
from lipaudit.models.derivative.linearize import Linearization
from lipaudit.models.derivative.model_norms import require_range
from lipaudit.models.requirements import AGREES, agree
from lipaudit.theory.spectral.lanczos import Norms, random_starts, spectral_norms


def compute_numeric_norms(layer: Layer, *, seeds: Sequence[int], **accuracy: Any) -> Norms:
    """Return ||J|| of every head of a layer, (samples, heads), by differentiating its module.

    J is the Jacobian of the head's output O_h with respect to all inputs of the innermost module
    that contains the layer and its projections. That module runs again.

    Args:
        layer: a layer during its visit; the result is NaN if `find_obstacle` finds one.
        seeds: seeds of the start vectors, one per sample.
        accuracy: `tol`, `max_steps` and `within` of `spectral_norms`.
    """
    linear = _linearize_module(layer)
    if isinstance(linear, str):
        nan = torch.full((layer.samples, layer.site.heads), torch.nan, dtype=torch.float64)
        return Norms(nan, nan.clone(), nan.isfinite().long(), nan.isfinite())
    one = layer.output[:, 0]
    start = random_starts(seeds, one.numel() // layer.samples).to(one.device)
    start = _zero_padding(start.view(one.shape), layer).reshape(start.shape)

    def of_head(head: int) -> Norms:
        def spread(u: Tensor) -> Tensor:
            """Return u as rows of this head, and zeros for the others."""
            whole = torch.zeros_like(layer.output)
            whole[:, head] = _zero_padding(u.reshape(whole[:, head].shape), layer)
            return whole.flatten()[None]

        def multiply(u: Tensor) -> Tensor:
            """J_h J_h^T u at every sample."""
            product = linear.outer(spread(u)).view_as(layer.output)[:, head]
            return _zero_padding(product, layer).reshape(u.shape)

        # The samples share one graph, because the module runs as a whole: converged samples
        # stay in it, and it is never built again for the others.
        norms = spectral_norms(lambda _: multiply, start, rebuild=2.0, **accuracy)
        require_range(linear, norms.norm, spread(torch.ones_like(start)))
        return norms

    each = [of_head(head) for head in range(layer.site.heads)]
    names = ("norm", "upper", "products", "converged")
    return Norms(*(torch.stack([getattr(norms, name) for norms in each], 1) for name in names))


def find_obstacle(layer: Layer) -> str | None:
    """Return why the norms of a layer cannot be computed numerically; None if they can."""
    linear = _linearize_module(layer)
    return linear if isinstance(linear, str) else None


def _linearize_module(layer: Layer) -> Linearization | str:
    """Linearise the module of a layer, or return why it cannot run on its own."""
    outside = "its module cannot be run alone"
    site, samples = layer.site, layer.samples
    missing = len(layer.numbers) < len(site.addresses)
    if not site.inputs or layer.frame is None or missing or len(layer.output) % samples:
        return outside
    try:
        linear = _linearize_layer(layer)
        linear.outer(torch.ones_like(linear.output))  # an op without derivative shows only here
    except Exception as error:  # the model's own code may raise anything when run again
        if of_machine(error):
            raise
        return first_line(error) or outside
    return linear


class _Output(Exception):
    """Carries the output of the layer out of its module, so that the rest need not run."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


def _linearize_layer(layer: Layer) -> Linearization:
    """Linearise O with respect to all inputs of the module, flattened and joined: (1, numbers)."""
    frame, site = layer.frame, layer.site
    assert frame is not None
    keys = site.inputs
    given = [frame.args[key] if isinstance(key, int) else frame.kwargs[key] for key in keys]
    # An argument that is given twice (queries and keys) is one input.
    inputs = list({id(t): t for t in given}.values())
    # All inputs of all samples are one vector: the module may arrange samples as it likes.
    z = torch.cat([t.detach().flatten() for t in inputs])[None]

    def output(z: Tensor, _index: Tensor) -> Tensor:
        parts = torch.split(z[0], [t.numel() for t in inputs])
        moved = {id(t): part.view(t.shape) for t, part in zip(inputs, parts, strict=True)}
        calls: list[AttentionCall] = []

        def attention(call: AttentionCall) -> Tensor:
            calls.append(call)
            if len(calls) > layer.numbers[-1]:
                loop = site.loop
                whole = call if loop is None else loop.join([calls[i] for i in layer.numbers])
                raise _Output(whole.arrange(site.layout, layer.samples).output)
            return call.output

        args = [moved.get(id(value), value) for value in frame.args]
        kwargs = {name: moved.get(id(value), value) for name, value in frame.kwargs.items()}
        try:
            with AttentionMode(attention):
                frame.module(*args, **kwargs)
        except _Output as end:
            return end.output.flatten()[None]
        raise EvaluationError(f"{site.scope} computes no attention when it is run alone")

    linear = Linearization(output, z, torch.zeros(1, dtype=torch.long, device=z.device))
    again = linear.output[0].view_as(layer.output)
    if not agree(layer.output, again, AGREES, each=1):
        raise EvaluationError(
            f"{site.scope} gives a different result when it is run alone",
            "It keeps state between calls. Leave its layers out with --layers.",
        )
    return linear


def _zero_padding(rows: Tensor, layer: Layer) -> Tensor:
    """Set the rows of padded queries to zero: they are not outputs."""
    valid = layer.attention.valid
    return rows if valid is None else rows * valid[..., None]
