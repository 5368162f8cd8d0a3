"""Models of the user's own: `py:FILE_OR_MODULE:FACTORY`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lipaudit.errors import InputError, LipauditError, UsageError, out_of_memory, suggestion
from lipaudit.models.sources.assembly import unwrapped
from lipaudit.models.sources.readings import spec_by_data
from lipaudit.models.sources.spec import LoadOptions, ModelSpec
from lipaudit.models.sources.weights import load_strictly, mismatches, read_weights, unprefixed

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
        model = unwrapped(_call(factory, reference, dict(options.model_kwargs)))
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
    load_strictly(spec.module, state if fits else unprefixed(state), origin=str(path))
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
        return _resized(model, options)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"py:{reference} returned {type(model).__name__}, not an nn.Module or a ModelSpec",
            "Return the model itself, not its state dict or a class.",
        )
    spec = recognised(model, options)
    if spec is not None:
        return spec
    spec = spec_by_data(model, options)
    if spec is None:
        raise UsageError(f"py:{reference} returned a {type(model).__name__}: {WHAT}", HOW)
    return spec


WHAT = "what does it take?"
HOW = (
    "Name --data whose samples are of one shape, or give --input-size 224 (or 1,28,28), or let it "
    "return a lipaudit.ModelSpec; lipaudit init py writes an example of that."
)


def recognised(module: nn.Module, options: LoadOptions) -> ModelSpec | None:
    """Return how to feed a module of timm or transformers, None for any other."""
    if hasattr(module, "pretrained_cfg"):
        from lipaudit.models.sources import timm

        return timm.timm_spec(module, options)
    if hasattr(module, "main_input_name") and hasattr(module, "config"):
        from lipaudit.models.sources.hf.outputs import hf_spec

        return hf_spec(module, options)
    return None


def _resized(spec: ModelSpec, options: LoadOptions) -> ModelSpec:
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
