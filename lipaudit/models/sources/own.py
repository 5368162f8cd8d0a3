"""The user's own models: module objects, and modules that a factory returns."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args
from unittest.mock import patch

from torch import nn

from lipaudit.errors import InputError, UsageError, explain_failure, suggestion
from lipaudit.models.net import Kind, LoadOptions, ModelSpec
from lipaudit.models.sources.weight_files import load_strictly, match_names, read_weights
from lipaudit.tables import Note, Notes

EXAMPLE = "py:FILE.py:FACTORY or py:PACKAGE.MODULE:FACTORY"
# Kind of a sample, by its number of axes: waveform, float sequence, image.
KINDS: dict[int, Kind] = {1: "tokens", 2: "tokens", 3: "image", 4: "tokens"}
# Axes of a sample of a kind; volumes and videos are floats of any number of axes.
AXES = {"image": 3, "text": 1}


def unwrap(module: Any) -> Any:
    """Return the original module if `torch.compile` wraps it, else the module as it is."""
    return getattr(module, "_orig_mod", module)


def call_factory(reference: str, options: LoadOptions) -> Any:
    """Call a factory of the user with --model-kwargs as keyword arguments.

    Args:
        reference: `FILE.py:FACTORY` or `PACKAGE.MODULE:FACTORY`.
        options: the user's options, whose `model_kwargs` are the arguments.

    Raises:
        UsageError: the reference is malformed.
        InputError: the file or function does not exist, or the function fails.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise UsageError(f"py:{reference} has no factory name", f"Write {EXAMPLE}.")
    # The user's module may import neighbouring files and parse command-line arguments. As for
    # `python FILE` and `python -m`, the folder of the file comes first in `sys.path`, and there
    # are no arguments.
    root = Path.cwd()
    if source.endswith(".py"):
        root = Path(source).resolve().parent
    path = [str(root), *sys.path]
    with patch.object(sys, "argv", [source]), patch.object(sys, "path", path):
        advice = f"Write {EXAMPLE}, the second for a file with relative imports."
        with explain_failure(f"{source} cannot be imported", advice):
            module = _import_module(source)
        if not hasattr(module, name):
            names = [key for key, value in vars(module).items() if callable(value)]
            functions = [key for key in names if not key.startswith("_")]
            otherwise = None if functions else "The module has no functions."
            raise InputError(f"{source} has no {name!r}", suggestion(name, functions, otherwise))
        if isinstance(getattr(module, name), nn.Module):
            raise InputError(
                f"py:{reference} is a module, not a function that returns one",
                f"Write a function, such as `def build(): return {name}`.",
            )
        with explain_failure(
            f"the factory py:{reference} failed",
            "Check the factory: it is called with --model-kwargs as its only arguments.",
        ):
            return getattr(module, name)(**options.model_kwargs)


def load_factory(reference: str, options: LoadOptions) -> ModelSpec:
    """Call a factory and prepare its model, an `nn.Module` or a `ModelSpec`.

    This is the only kind of MODEL that runs the user's code.

    Raises:
        UsageError: as in `call_factory`, or the input of the module is unknown.
        InputError: as in `call_factory`, or the function returns something else.
    """
    model = call_factory(reference, options)
    if not isinstance(model, nn.Module | ModelSpec):
        raise InputError(
            f"py:{reference} returned {type(model).__name__}, not an nn.Module or a ModelSpec",
            "Return the model itself, not its state dict or a class.",
        )
    spec = describe(model, options, f"py:{reference}, a {type(model).__name__},")
    if spec.kind != "image":
        return spec
    return replace(spec, input_shape=options.image_shape(spec.input_shape))


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
    # Names may have a prefix, such as `model.` in a checkpoint of Lightning. `left_out` is a note
    # on weights beside the model, such as those of a loss.
    matched, left_out = match_names(state, spec.module)
    load_strictly(spec.module, matched, path)
    return replace(spec, notes=spec.notes + notes + left_out)


def _import_module(source: str) -> ModuleType:
    """Import a module by its name, or a Python file."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source)
    path.read_bytes()  # fails for a missing file, before `sys.modules` gets a module without code
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look modules up here
    spec.loader.exec_module(module)
    return module


def describe(model: nn.Module | ModelSpec, options: LoadOptions, name: str = "") -> ModelSpec:
    """Return the input description of a user's model.

    A `ModelSpec` has its own description. Modules of timm and transformers are recognised. Any
    other module takes images of --input-size, or else samples of the shape of the data. `name` is
    the model's name in errors.

    Raises:
        UsageError: the input is unknown, or the shape of the data has several readings that all
            fit the values.
    """
    module = model
    if isinstance(model, ModelSpec):
        module = model.module
    module = unwrap(module)
    is_transformers = hasattr(module, "main_input_name") and hasattr(module, "config")
    if options.tower and not is_transformers:
        raise UsageError(
            f"{name or type(module).__name__} has no towers",
            "Leave --tower out: CLIP and similar models of transformers have towers.",
        )
    if isinstance(model, ModelSpec):
        _require_consistent(model)
        return replace(model, module=module)
    if hasattr(module, "pretrained_cfg"):
        from lipaudit.models.sources.timm import describe_timm

        return describe_timm(module, options)
    if is_transformers:
        from lipaudit.models.sources.transformer_inputs import describe_transformers

        return describe_transformers(module, options)
    if options.input_size is not None:
        return ModelSpec(module, _choose_image(options))
    return _describe_by_data(module, options, name)


def _require_consistent(spec: ModelSpec) -> None:
    """Check a user's description of a model.

    Raises:
        InputError: the description has no module, an unknown kind, or a shape of another kind.
    """
    kinds = get_args(Kind)
    if not isinstance(spec.module, nn.Module) or spec.kind not in kinds:
        raise InputError(
            f"a ModelSpec has a {type(spec.module).__name__} of the kind {spec.kind!r}",
            f"It needs an nn.Module, and one of the kinds {', '.join(kinds)}.",
        )
    shape = spec.input_shape
    if len(shape) != AXES.get(spec.kind, len(shape)):
        raise InputError(
            f"a ModelSpec of the kind {spec.kind!r} has samples of shape {shape}",
            'An image is (channels, height, width), a text (most tokens,). Give kind="tokens" '
            "for volumes, videos and all other floats, with box=(0, 1) if they have limits.",
        )


def _choose_image(options: LoadOptions) -> tuple[int, int, int]:
    """Return the (channels, height, width) of a user's model for which --input-size is given.

    --input-size may be a side, (height, width) or (channels, height, width). If it does not give
    the channels, the data does. Without images in the data, there are 3 channels.
    """
    # Several shapes if the data does not say whether channels come first or last. Prefer a shape
    # that agrees with --input-size. `image_shape` puts --input-size into a shape.
    shapes = [form.shape for form in options.forms() if form.kind == "image"]
    for shape in shapes:
        if options.image_shape(shape) == shape:
            return shape
    if shapes:
        return options.image_shape(shapes[0])
    return options.image_shape((3, 0, 0))  # --input-size replaces the zeros


def _describe_by_data(module: nn.Module, options: LoadOptions, name: str) -> ModelSpec:
    """Return the description of a module that takes samples of the shape of the data.

    Raises:
        UsageError: the data has no shape, or a shape with several readings.
    """
    # The possible readings of a sample: as an image, with channels first or last, or as floats. A
    # reading is dropped if the values of the data do not fit it.
    forms = options.forms()
    readings = [form for form in forms if form.fits]
    if all(form.kind == "image" for form in readings):
        # The shape of a reading has channels first, whatever the data. Pictures have 1 or 3.
        readings = [form for form in readings if form.shape[0] in (1, 3)] or readings
    if not readings:
        raise UsageError(
            f"the input shape of {name or type(module).__name__} is unknown",
            "Give --data whose samples have one shape, or --input-size 224 (or 1,28,28); in "
            "Python "
            "data as arrays, or input_shape=(3, 32, 32). Or return a lipaudit.ModelSpec, which "
            "defines the input: `lipaudit init py` writes an example.",
        )
    if len(readings) > 1:
        sizes = [",".join(map(str, form.shape)) for form in readings if form.kind == "image"]
        raise UsageError(
            f"each sample may be {' or '.join(map(str, readings))}",
            f"Give --input-size {' or '.join(sizes)} for an image, or in Python input_shape="
            f"{' or '.join(str(form.shape) for form in readings)}. A py: factory may return "
            "lipaudit.ModelSpec(model, SHAPE).",
        )
    form = readings[0]
    notes: Notes = ()
    # A note if there was a choice, or if four axes were taken for a volume or a video.
    if len(forms) > 1 or len(form.shape) > 3:
        notes = (Note.warn("read-as", f"each sample is read as {form}"),)
    return ModelSpec(module, form.shape, kind=form.kind, notes=notes)
