"""A module of the user's own: measured as it is, and left as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lipaudit.errors import InputError, UsageError
from lipaudit.models.net import OWN, Kind, Net
from lipaudit.models.sources.assembly import assemble, require_values, unwrapped
from lipaudit.models.sources.factory import recognised
from lipaudit.models.sources.readings import spec_by_data
from lipaudit.models.sources.spec import LoadOptions, ModelSpec
from lipaudit.models.sources.weights import require_finite_weights, sha256

KINDS: dict[int, Kind] = {1: "tokens", 2: "tokens", 3: "image"}
"""What a sample is, by the number of its axes: a waveform, a float sequence, an image."""


@contextmanager
def borrowed(
    model: nn.Module | ModelSpec, options: LoadOptions, input_shape: Sequence[int] | None = None
) -> Iterator[Net]:
    """Make a module ready to be measured while the block runs, and put it back as it was.

    Flags (training, requires_grad), dtype and device come back, and every tensor with the very
    storage it had. No copy could stand in for it: functions of a `ModelSpec` may refer to the
    module itself, and tensors that a forward pass left on it cannot be copied.

    Args:
        model: a module, or a `ModelSpec` that says how to feed one.
        options: device (auto is the module's own) and dtype, and how images are normalised.
        input_shape: of one sample, where the module does not say itself: (channels, height,
            width), (tokens, width), or (samples,) of a waveform.

    Raises:
        UsageError: nothing says what the module takes.
        InputError: it is no module, or cannot be run on its own sample.
    """
    if options.device_map is not None:
        raise UsageError(
            "device_map spreads models that are loaded by name, and this is a module",
            "Leave it out: a module is measured where it is.",
        )
    spec = _spec(model, options, input_shape)
    if options.device == "auto":
        first = next(spec.module.parameters(), torch.empty(0))
        options = replace(options, device=str(first.device))
    require_values(spec.module, type(spec.module).__name__)
    with _put_back(spec.module):
        yield assemble(spec, options, name=type(spec.module).__name__, source=OWN)


@contextmanager
def as_now(net: Net) -> Iterator[Net]:
    """Make a model that is being trained ready to be measured, with the weights it has now.

    Its flags, weights and gradients are put back when the block ends; what was learnt of the
    model at earlier weights is forgotten.
    """
    with _put_back(net.module):
        net.module.eval().requires_grad_(False)
        require_finite_weights(net.module, net.info.spec)
        yield replace(net, info=replace(net.info, weights_sha256=sha256(net.module)))


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Put back, when the block ends, all that `assemble` changes of a module."""
    modes = {each: each.training for each in module.modules()}
    tables: list[dict[str, Any]] = []
    for each in module.modules():
        tables += [each._parameters, each._buffers]
    tensors = [(t, name, held) for t in tables for name, held in t.items() if held is not None]
    values = [(held, held.data) for _, _, held in tensors]
    trained = [(held, held.requires_grad) for held in module.parameters()]
    gradients = [(held, held.grad, held.grad.data) for held, _ in trained if held.grad is not None]
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode
        for table, name, held in tensors:
            table[name] = held
        for held, value in values:
            held.data = value
        for held, gradient, value in gradients:
            gradient.data = value
            held.grad = gradient
        for held, requires_grad in trained:
            held.requires_grad_(requires_grad)


def _spec(
    model: nn.Module | ModelSpec, options: LoadOptions, shape: Sequence[int] | None
) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return replace(model, module=unwrapped(model.module))
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{type(model).__name__} is no model",
            "Give the name of a checkpoint, an nn.Module or a lipaudit.ModelSpec.",
        )
    model = unwrapped(model)
    if shape is not None:
        if not isinstance(shape, Sequence) or len(shape) not in KINDS:
            raise UsageError(
                f"input_shape {shape} is none of a sample",
                "Give (channels, height, width), (tokens, width) or (samples,).",
            )
        return ModelSpec(model, tuple(shape), kind=KINDS[len(shape)])
    spec = recognised(model, options) or spec_by_data(model, options)
    if spec is None:
        raise UsageError(
            f"what does the {type(model).__name__} take?",
            "Give data as arrays, input_shape=(3, 32, 32), or a lipaudit.ModelSpec that says how "
            "to feed it.",
        )
    return spec
