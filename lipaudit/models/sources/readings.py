"""What a module takes that does not say it: the reading of the data on which it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lipaudit.data.forms import Form
from lipaudit.data.intake import warning
from lipaudit.errors import InputError, UsageError, of_machine
from lipaudit.models.lifting import devices, precision
from lipaudit.models.precision import eager
from lipaudit.models.sources.assembly import main_output, require_values
from lipaudit.models.sources.spec import LoadOptions, ModelSpec


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
        return ModelSpec(module, _sized(forms, options))
    if len(forms) > 1:
        return _tried(module, forms)
    return ModelSpec(module, forms[0].shape, kind=forms[0].kind) if forms else None


def _sized(forms: Sequence[Form], options: LoadOptions) -> tuple[int, int, int]:
    """Return the shape of an image of the size given, with the channels of the data."""
    images = [(c, h, w) for form in forms if form.kind == "image" for c, h, w in [form.shape]]
    fitting = [shape for shape in images if options.image_shape(shape) == shape]
    return options.image_shape((fitting or images or [(3, 0, 0)])[0])


def _tried(module: nn.Module, forms: Sequence[Form]) -> ModelSpec:
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
