"""Models of the user's own: modules at hand, and those that a factory makes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipaudit.data.forms import Form
from lipaudit.data.intake import warning
from lipaudit.errors import (
    InputError,
    LipauditError,
    UsageError,
    of_machine,
    out_of_memory,
    suggestion,
)
from lipaudit.models.lifting import devices, precision
from lipaudit.models.net import OWN, Kind, Net
from lipaudit.models.precision import eager
from lipaudit.models.sources.assembly import assemble, main_output, require_values, unwrap
from lipaudit.models.sources.spec import LoadOptions, ModelSpec
from lipaudit.models.sources.weights import (
    load_strictly,
    mismatches,
    read_weights,
    require_finite_weights,
    sha256,
    strip_prefix,
)


def spec_by_data(module: nn.Module, options: LoadOptions) -> ModelSpec | None:
    """Return how to feed a module: images of a given size, else samples as those of the data.

    Where the shape of the data can be read in several ways, the module runs on each of them.

    Returns:
        None if neither an option nor the data say what the module takes.

    Raises:
        UsageError: the module runs on more than one reading, and the values fit both.
        InputError: it runs on none.
    """
    forms = options.forms()
    if options.input_size is not None:
        return ModelSpec(module, _choose_size(forms, options))
    if len(forms) > 1:
        return _try_forms(module, forms)
    return ModelSpec(module, forms[0].shape, kind=forms[0].kind) if forms else None


def _choose_size(forms: Sequence[Form], options: LoadOptions) -> tuple[int, int, int]:
    """Return the shape of an image of the size given, with the channels of the data."""
    images = [(c, h, w) for form in forms if form.kind == "image" for c, h, w in [form.shape]]
    fitting = [shape for shape in images if options.image_shape(shape) == shape]
    return options.image_shape((fitting or images or [(3, 0, 0)])[0])


def _try_forms(module: nn.Module, forms: Sequence[Form]) -> ModelSpec:
    name = type(module).__name__
    require_values(module, name)
    with _evaluating(module):
        errors = {form: _error(module, form) for form in forms}
    ran = [form for form, error in errors.items() if error is None]
    if not ran:
        raise InputError(
            f"{name} runs on no reading of the samples: "
            + "; ".join(f"{form} ({error})" for form, error in errors.items()),
            "Check the shape of the data, or give a lipaudit.ModelSpec that says how to feed it.",
        )
    ran = [form for form in ran if form.fits] or ran
    if len(ran) > 1:
        raise UsageError(f"each sample may be {' or '.join(map(str, ran))}", _choice(ran, name))
    text = f"each sample is read as {ran[0]}: no other reading of the data is possible"
    return ModelSpec(module, ran[0].shape, kind=ran[0].kind, notes=(warning("read-as", text),))


def _choice(forms: Sequence[Form], name: str) -> str:
    """Say how to choose one of the readings."""
    sizes = [",".join(map(str, form.shape)) for form in forms if form.kind == "image"]
    shapes = " or ".join(str(form.shape) for form in forms)
    other = " for an image" if len(sizes) < len(forms) else ""
    return (
        f"{name} runs on both. Give --input-size {' or '.join(sizes)}{other}, or in Python "
        f"input_shape={shapes}; a py: factory may return lipaudit.ModelSpec(model, SHAPE)."
    )


def _error(module: nn.Module, form: Form) -> str | None:
    """Run two blank samples, one could pass as an image without its batch; return what failed."""
    x = torch.full((2, *form.shape), 0.5, device=next(devices(module)), dtype=precision(module))
    try:
        output = main_output(module(x))
    except Exception as error:  # whatever the model's own code raises
        if of_machine(error):
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    found = tuple(output.shape)
    return None if found[:1] == (2,) else f"it returns {found} for two samples"


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        with eager(), torch.no_grad():
            yield
    finally:
        for each, mode in modes.items():
            each.training = mode


EXAMPLE = "py:FILE.py:FACTORY or py:PACKAGE.MODULE:FACTORY"


def from_factory(reference: str, options: LoadOptions) -> ModelSpec:
    """Call a factory and take its model.

    The factory gets --model-kwargs as its keyword arguments, and returns a `ModelSpec` or an
    `nn.Module`; a module of timm or transformers is recognised, any other takes what --input-size
    says, else samples as those of the data. It is the user's own code: this is the one kind of
    MODEL that runs any.

    Raises:
        UsageError: the reference is malformed, or nothing says what the module takes.
        InputError: there is no such file or function, or it fails.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UsageError(f"py:{reference} names no factory", f"Write {EXAMPLE}.")
    with _import_path(place):
        factory = _attribute(place, name)
        model = unwrap(_call(factory, reference, dict(options.model_kwargs)))
    return _as_spec(model, reference, options)


def from_weights(path: Path, reference: str, options: LoadOptions) -> ModelSpec:
    """Load a file of weights into the model that a factory makes.

    Raises:
        UsageError: as of `from_factory`.
        InputError: the same, or weights that do not fit.
    """
    if options.classes is not None:
        raise UsageError(f"py:{reference} has its own classes", "Leave --classes out.")
    spec = from_factory(reference, options)
    state, notes = read_weights(path)
    fits = not mismatches(spec.module, state)
    load_strictly(spec.module, state if fits else strip_prefix(state), origin=str(path))
    return replace(spec, notes=spec.notes + notes)


def _attribute(place: str, name: str) -> Any:
    module = _module(place)
    try:
        return getattr(module, name)
    except AttributeError as error:
        functions = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        advice = suggestion(name, functions, None if functions else "It has no functions.")
        raise InputError(f"{place} has no {name!r}", advice) from error


def _module(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        return _module_of_file(Path(place))
    except Exception as error:  # whatever the user's module raises
        if out_of_memory(error):
            raise
        raise InputError(
            f"{place} cannot be imported ({type(error).__name__}: {error})", f"Write {EXAMPLE}."
        ) from error


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def _call(factory: Any, reference: str, kwargs: dict[str, Any]) -> Any:
    try:
        return factory(**kwargs)
    except Exception as error:  # whatever the user's factory raises
        if isinstance(error, LipauditError) or out_of_memory(error):
            raise
        raise InputError(
            f"the factory py:{reference} failed ({type(error).__name__}: {error})",
            "It is called with --model-kwargs as keyword arguments and nothing else.",
        ) from error


def _as_spec(model: Any, reference: str, options: LoadOptions) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return _resize(model, options)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"py:{reference} returned {type(model).__name__}, not an nn.Module or a ModelSpec",
            "Return the model itself, not its state dict or a class.",
        )
    spec = recognise(model, options)
    if spec is not None:
        return spec
    spec = spec_by_data(model, options)
    if spec is None:
        raise UnknownInputError(f"py:{reference} returned a {type(model).__name__}: {WHAT}", HOW)
    return spec


class UnknownInputError(UsageError):
    """Nothing says what a module takes: no data, no shape, no ModelSpec."""


WHAT = "what does it take?"
HOW = (
    "Name --data whose samples are of one shape, or give --input-size 224 (or 1,28,28), or let it "
    "return a lipaudit.ModelSpec; lipaudit init py writes an example of that."
)


def recognise(module: nn.Module, options: LoadOptions) -> ModelSpec | None:
    """Return how to feed a module of timm or transformers, None for any other."""
    if hasattr(module, "pretrained_cfg"):
        from lipaudit.models.sources import timm

        return timm.timm_spec(module, options)
    if hasattr(module, "main_input_name") and hasattr(module, "config"):
        from lipaudit.models.sources.hf.outputs import hf_spec

        return hf_spec(module, options)
    return None


def _resize(spec: ModelSpec, options: LoadOptions) -> ModelSpec:
    if spec.kind != "image" or options.input_size is None:
        return spec
    channels, height, width = spec.input_shape
    return replace(spec, input_shape=options.image_shape((channels, height, width)))


@contextmanager
def _import_path(place: str) -> Iterator[None]:
    """Let the user's module import its neighbours, as `python FILE` or `python -m` would."""
    root = str(Path(place).resolve().parent) if place.endswith(".py") else str(Path.cwd())
    before = list(sys.path)
    sys.path.insert(0, root)
    try:
        yield
    finally:
        sys.path[:] = before


KINDS: dict[int, Kind] = {1: "tokens", 2: "tokens", 3: "image"}
"""What a sample is, by the number of its axes: a waveform, a float sequence, an image."""


@contextmanager
def borrow(
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
        return replace(model, module=unwrap(model.module))
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{type(model).__name__} is no model",
            "Give the name of a checkpoint, an nn.Module or a lipaudit.ModelSpec.",
        )
    model = unwrap(model)
    if shape is not None:
        if not isinstance(shape, Sequence) or len(shape) not in KINDS:
            raise UsageError(
                f"input_shape {shape} is none of a sample",
                "Give (channels, height, width), (tokens, width) or (samples,).",
            )
        return ModelSpec(model, tuple(shape), kind=KINDS[len(shape)])
    spec = recognise(model, options) or spec_by_data(model, options)
    if spec is None:
        raise UsageError(
            f"what does the {type(model).__name__} take?",
            "Give data as arrays, input_shape=(3, 32, 32), or a lipaudit.ModelSpec that says how "
            "to feed it.",
        )
    return spec
