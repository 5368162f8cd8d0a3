"""A denoiser in front of a model: Salman et al., *Denoised Smoothing*, arXiv 2003.01908 (2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lipaudit.errors import UsageError, explain_failure, refuse
from lipaudit.models.net import LoadOptions, Net
from lipaudit.models.sources.own import call_factory
from lipaudit.models.sources.weights import hash_weights


def load_denoiser(reference: str) -> nn.Module:
    """Return the module of py:FILE:FACTORY in eval mode, with frozen parameters.

    Raises:
        UsageError: the reference is malformed.
        InputError: the file or function does not exist, fails, or returns no module.
    """
    text = f"--denoiser {reference}: it must be py:FILE:FACTORY"
    refuse(not reference.startswith("py:"), text, "Its factory returns an nn.Module.", UsageError)
    module = call_factory(reference.removeprefix("py:"), LoadOptions())
    text = f"{reference} returned {type(module).__name__}, not an nn.Module"
    refuse(not isinstance(module, nn.Module), text, "Return the denoiser itself.")
    return module.eval().requires_grad_(False)


def hash_denoiser(reference: str) -> str | None:
    """Return the hash of the weights of a denoiser; None if it has no weights."""
    module = load_denoiser(reference)
    return hash_weights(module, reference) if [*module.parameters()] else None


def add_denoiser(net: Net, reference: str) -> Net:
    """Return a model of images or float tokens behind a denoiser, which takes pixels in [0, 1].

    Raises:
        UsageError: as in `load_denoiser`.
        InputError: as in `load_denoiser`. When it runs: the denoiser fails, or returns another
            shape.
    """
    denoiser = load_denoiser(reference).to(net.device, net.dtype)
    advice = "A denoiser takes noisy samples, and returns them without noise in the same shape."

    def call(x: Tensor, mask: Tensor | None) -> Any:
        with explain_failure(f"the denoiser {reference} failed", advice):
            z = denoiser(x)
        shape = tuple(getattr(z, "shape", ()))  # of anything but a tensor: ()
        text = f"the denoiser {reference} returned {shape} for samples of {tuple(x.shape)}"
        refuse(shape != x.shape, text, advice)
        return net.call(z, mask)

    return replace(net, call=call)
