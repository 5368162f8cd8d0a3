"""A module of the user's own: measured as it is, and left as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn

from lipaudit.errors import InputError, UsageError
from lipaudit.models.net import Kind, Net
from lipaudit.models.sources.assembly import DTYPES, assemble, device
from lipaudit.models.sources.factory import recognised
from lipaudit.models.sources.spec import LoadOptions, ModelSpec

KINDS: dict[int, Kind] = {1: "tokens", 2: "tokens", 3: "image"}
"""What a sample is, by the number of its axes: a waveform, a float sequence, an image."""


@contextmanager
def borrowed(
    model: nn.Module | ModelSpec, options: LoadOptions, input_shape: Sequence[int] | None = None
) -> Iterator[Net]:
    """Make a module ready to be measured while the block runs, and put it back as it was.

    Flags (training, requires_grad) come back, and its device and dtype are kept: where others are
    asked for, a copy is measured.

    Args:
        model: a module, or a `ModelSpec` that says how to feed one.
        options: device (auto is the module's own) and dtype, and how images are normalised.
        input_shape: of one sample, where the module does not say itself: (channels, height,
            width), (tokens, width), or (samples,) of a waveform.

    Raises:
        UsageError: nothing says what the module takes.
        InputError: it is no module, or cannot be run on its own sample.
    """
    spec = _spec(model, options, input_shape)
    if options.device == "auto":
        first = next(spec.module.parameters(), torch.empty(0))
        options = replace(options, device=str(first.device))
    if not _as_asked(spec.module, options):
        spec = _spec(deepcopy(model), options, input_shape)
    modes = {module: module.training for module in spec.module.modules()}
    trained = {parameter: parameter.requires_grad for parameter in spec.module.parameters()}
    try:
        yield assemble(spec, options, name=type(spec.module).__name__, source="module")
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)


def _spec(
    model: nn.Module | ModelSpec, options: LoadOptions, shape: Sequence[int] | None
) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return model
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{type(model).__name__} is no model",
            "Give the name of a checkpoint, an nn.Module or a lipaudit.ModelSpec.",
        )
    if shape is not None:
        if len(shape) not in KINDS:
            raise UsageError(
                f"input_shape {tuple(shape)} is none of a sample",
                "Give (channels, height, width), (tokens, width) or (samples,).",
            )
        return ModelSpec(model, tuple(shape), kind=KINDS[len(shape)])
    spec = recognised(model, options)
    if spec is None:
        raise UsageError(
            f"what does the {type(model).__name__} take?",
            "Give input_shape=(3, 32, 32), or a lipaudit.ModelSpec that says how to feed it.",
        )
    return spec


def _as_asked(module: nn.Module, options: LoadOptions) -> bool:
    """Tell whether every floating-point tensor has the device and the dtype asked for."""
    wanted = device(options.device), DTYPES[options.dtype]
    tensors = [*module.parameters(), *module.buffers()]
    return all((t.device, t.dtype) == wanted for t in tensors if t.is_floating_point())
