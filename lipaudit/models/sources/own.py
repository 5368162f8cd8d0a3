"""The user's own models: module objects, and modules that a factory returns."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lipaudit.data.samples import warning
from lipaudit.errors import (
    InputError,
    UsageError,
    explain_failure,
    suggestion,
)
from lipaudit.models.net import OWN, Kind, LoadOptions, ModelSpec, Net
from lipaudit.models.sources.assembly import assemble, require_values, unwrap
from lipaudit.models.sources.weights import (
    hash_weights,
    load_strictly,
    read_weights,
    require_finite_weights,
    strip_prefix,
)

EXAMPLE = "py:FILE.py:FACTORY or py:PACKAGE.MODULE:FACTORY"
KINDS: dict[int, Kind] = {1: "tokens", 2: "tokens", 3: "image"}
"""Kind of a sample, by its number of axes: waveform, float sequence, image."""


class UnknownInputError(UsageError):
    """The input of a module is unknown: no data, no shape, no ModelSpec."""


def load_factory(reference: str, options: LoadOptions) -> ModelSpec:
    """Call a factory and prepare its model.

    The factory gets --model-kwargs as keyword arguments, and returns a `ModelSpec` or an
    `nn.Module`. This is the only kind of MODEL that runs the user's code.

    Raises:
        UsageError: the reference is malformed, or the input of the module is unknown.
        InputError: the file or function does not exist, or the function fails.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UsageError(f"py:{reference} has no factory name", f"Write {EXAMPLE}.")
    # The user's module may import its neighbours, like `python FILE` and `python -m`: Python puts
    # the folder of a script first.
    root = Path(place).resolve().parent if place.endswith(".py") else Path.cwd()
    before = list(sys.path)
    sys.path.insert(0, str(root))
    try:
        with explain_failure(f"{place} cannot be imported", f"Write {EXAMPLE}."):
            module = _import_module(place)
        if not hasattr(module, name):
            functions = [k for k, v in vars(module).items() if callable(v) and k[0] != "_"]
            otherwise = None if functions else "The module has no functions."
            raise InputError(f"{place} has no {name!r}", suggestion(name, functions, otherwise))
        with explain_failure(
            f"the factory py:{reference} failed",
            "Check the factory: it is called with --model-kwargs as its only arguments.",
        ):
            model = getattr(module, name)(**options.model_kwargs)
    finally:
        sys.path[:] = before
    if not isinstance(model, nn.Module | ModelSpec):
        raise InputError(
            f"py:{reference} returned {type(model).__name__}, not an nn.Module or a ModelSpec",
            "Return the model itself, not its state dict or a class.",
        )
    spec = describe(model, options)
    if spec is None:
        raise UnknownInputError(
            f"py:{reference} returned a {type(model).__name__}, and the shape of its input is "
            "unknown",
            "Give --data whose samples have one shape, or --input-size 224 (or 1,28,28). Or "
            "return a lipaudit.ModelSpec: `lipaudit init py` writes an example.",
        )
    if spec.kind != "image" or options.input_size is None:
        return spec
    channels, height, width = spec.input_shape
    return replace(spec, input_shape=options.image_shape((channels, height, width)))


def load_file(path: Path, reference: str, options: LoadOptions) -> ModelSpec:
    """Load a file of weights into the model that a factory returns.

    Raises:
        UsageError: as in `load_factory`.
        InputError: as in `load_factory`, or the weights do not fit.
    """
    if options.classes is not None:
        raise UsageError(f"{reference} has a fixed number of classes", "Leave --classes out.")
    spec = load_factory(reference.removeprefix("py:"), options)
    state, notes = read_weights(path)
    load_strictly(spec.module, strip_prefix(state, spec.module), origin=str(path))
    return replace(spec, notes=spec.notes + notes)


def _import_module(place: str) -> ModuleType:
    """Import a module by its name, or a Python file."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look up their module
    spec.loader.exec_module(module)
    return module


def describe(model: nn.Module | ModelSpec, options: LoadOptions) -> ModelSpec | None:
    """Return the input description of a user's model.

    A `ModelSpec` describes itself. Modules of timm and transformers are recognised. Any other
    module takes images of --input-size, or else samples of the shape of the data.

    Returns:
        The description, or None if the input is unknown.

    Raises:
        UsageError: the shape of the data has several readings, and the values fit each.
    """
    if isinstance(model, ModelSpec):
        return replace(model, module=unwrap(model.module))
    module: Any = unwrap(model)
    if hasattr(module, "pretrained_cfg"):
        from lipaudit.models.sources.timm import describe_timm

        return describe_timm(module, options)
    if hasattr(module, "main_input_name") and hasattr(module, "config"):
        from lipaudit.models.sources.huggingface import describe_transformers

        return describe_transformers(module, options)
    forms = options.forms()
    if options.input_size is not None:
        images = [(c, h, w) for form in forms if form.kind == "image" for c, h, w in [form.shape]]
        fitting = [shape for shape in images if options.image_shape(shape) == shape]
        return ModelSpec(module, options.image_shape((fitting or images or [(3, 0, 0)])[0]))
    possible = [form for form in forms if form.fits]
    if all(form.kind == "image" for form in possible):
        # Pictures have 1 or 3 channels, first or last.
        possible = [form for form in possible if form.shape[0] in (1, 3)] or possible
    if len(possible) > 1:
        sizes = [",".join(map(str, form.shape)) for form in possible if form.kind == "image"]
        raise UsageError(
            f"each sample may be {' or '.join(map(str, possible))}",
            f"Give --input-size {' or '.join(sizes)} for an image, or in Python input_shape="
            f"{' or '.join(str(form.shape) for form in possible)}. A py: factory may return "
            "lipaudit.ModelSpec(model, SHAPE).",
        )
    if not possible:
        return None
    form = possible[0]
    notes = (warning("read-as", f"each sample is read as {form}"),) if len(forms) > 1 else ()
    return ModelSpec(module, form.shape, kind=form.kind, notes=notes)


@contextmanager
def borrow(
    model: nn.Module | ModelSpec, options: LoadOptions, input_shape: Sequence[int] | None = None
) -> Iterator[Net]:
    """Make a module ready to be measured inside the block, and restore it afterwards.

    Restores flags (training, requires_grad), dtype, device, and every tensor with its own storage.
    A copy would not do: functions of a `ModelSpec` may refer to the module itself, and tensors
    that a forward pass left on the module cannot be copied.

    Args:
        model: a module, or a `ModelSpec`, which also describes the input.
        options: device (auto keeps the module's device), dtype and normalisation of images.
        input_shape: shape of one sample, if the module does not declare it: (channels, height,
            width), (tokens, width), or (samples,) of a waveform.

    Raises:
        UsageError: the input of the module is unknown.
        InputError: the object is no module, or cannot run on a blank sample.
    """
    name = type(unwrap(model)).__name__
    if options.device_map is not None:
        raise UsageError(
            "device_map works only for models that are loaded by name, not for a module",
            "Leave device_map out: a module is measured on its own device.",
        )
    if not isinstance(model, nn.Module | ModelSpec):
        raise InputError(
            f"{name} is not a model",
            "Give the name of a checkpoint, an nn.Module or a lipaudit.ModelSpec.",
        )
    if input_shape is None or isinstance(model, ModelSpec):
        spec = describe(model, options)
    elif isinstance(input_shape, Sequence) and len(input_shape) in KINDS:
        spec = ModelSpec(unwrap(model), tuple(input_shape), kind=KINDS[len(input_shape)])
    else:
        raise UsageError(
            f"input_shape {input_shape} is not the shape of a sample",
            "Give (channels, height, width), (tokens, width) or (samples,).",
        )
    if spec is None:
        raise UsageError(
            f"the input shape of {name} is unknown",
            "Give data as arrays, input_shape=(3, 32, 32), or a lipaudit.ModelSpec that "
            "defines the input.",
        )
    name = type(spec.module).__name__
    if options.device == "auto":
        first = next(spec.module.parameters(), torch.empty(0))
        options = replace(options, device=str(first.device))
    require_values(spec.module, name)
    with restore(spec.module):
        yield assemble(spec, options, name=name, source=OWN)


@contextmanager
def freeze_net(net: Net) -> Iterator[Net]:
    """Make a model in training ready to be measured, with its current weights.

    Flags, weights and gradients are restored when the block ends; anything cached for earlier
    weights is dropped.
    """
    with restore(net.module):
        net.module.eval().requires_grad_(False)
        require_finite_weights(net.module, net.name)
        yield replace(net, weights_sha256=hash_weights(net.module))


@contextmanager
def restore(module: nn.Module) -> Iterator[None]:
    """Undo, when the block ends, all changes that `assemble` made to a module."""
    modes = {each: each.training for each in module.modules()}
    tables: list[dict[str, Any]] = [t for m in modes for t in (m._parameters, m._buffers)]
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
