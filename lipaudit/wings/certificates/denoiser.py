"""Denoisers in front of a model: Salman et al., *Denoised Smoothing*, arXiv 2003.01908 (2020)."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lipaudit.errors import InputError, UsageError, explain_failure
from lipaudit.models.net import LoadOptions, Net
from lipaudit.models.sources.own import call_factory
from lipaudit.models.sources.weight_files import hash_weights


def load_denoiser(reference: str) -> nn.Module:
    """Return the module of py:FILE:FACTORY in eval mode, with frozen parameters.

    Raises:
        UsageError: the reference is malformed.
        InputError: the file or function does not exist, fails, or returns no module.
    """
    if not reference.startswith("py:"):
        raise UsageError(
            f"--denoiser {reference}: it must be py:FILE:FACTORY",
            "Its factory returns an nn.Module.",
        )
    module = call_factory(reference.removeprefix("py:"), LoadOptions())
    if not isinstance(module, nn.Module):
        raise InputError(
            f"{reference} returned {type(module).__name__}, not an nn.Module",
            "Return the denoiser itself.",
        )
    return module.eval().requires_grad_(False)


def hash_denoiser(reference: str) -> str:
    """Return the SHA-256 of a denoiser: of its weights, its buffers and the file of its factory.

    A denoiser may have no parameters (`bare`), so the weights alone would not tell two apart.
    """
    weights = hash_weights(load_denoiser(reference), reference, bare=True)
    source = reference.removeprefix("py:").rpartition(":")[0]  # a file, or a module by name
    if source.endswith(".py"):
        path = source
    else:
        path = str(sys.modules[source].__file__)
    return hashlib.sha256(Path(path).read_bytes() + weights.encode()).hexdigest()


def add_denoiser(net: Net, reference: str) -> Net:
    """Return a model of images or float tokens behind a denoiser, which takes pixels in [0, 1].

    Raises:
        UsageError: as in `load_denoiser`.
        InputError: as in `load_denoiser`. When it runs: the denoiser fails, or returns another
            shape or type.
    """
    denoiser = load_denoiser(reference).to(net.device, net.dtype)
    advice = "A denoiser takes noisy samples and returns samples of their shape and type."

    def call_behind_denoiser(x: Tensor, mask: Tensor | None) -> Any:
        """Denoise samples, require an unchanged shape and dtype, and run the model on them."""
        with explain_failure(f"the denoiser {reference} failed", advice):
            z = denoiser(x)
        returned = _describe(z)
        expected = _describe(x)
        if returned != expected:
            raise InputError(
                f"the denoiser {reference} returned {returned} for samples of {expected}", advice
            )
        return net.call(z, mask)

    return replace(net, call=call_behind_denoiser)


def _describe(value: Any) -> tuple[Any, ...]:
    """Return the shape and the dtype of a tensor, to compare or print; else the value's type."""
    if isinstance(value, Tensor):
        return (*value.shape, value.dtype)
    return (type(value),)
