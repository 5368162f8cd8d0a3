"""Arithmetic that the figures can be trusted with, whatever the caller has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in the tensors' own precision with gradients on: no TF32, autocast, inference mode.

    Every setting comes back as it was. TF32 would leave three digits of a spectral norm.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        for settings, name, value in _tf32_switches():
            stack.callback(setattr, settings, name, getattr(settings, name))
            setattr(settings, name, value)
        yield


def _tf32_switches() -> list[tuple[Any, str, Any]]:
    """The settings that allow TF32: torch 2.9 renamed them and refuses to read a mixture."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        return [(part, "fp32_precision", "ieee") for part in (cuda, cudnn.conv, cudnn.rnn)]
    return [(cuda, "allow_tf32", False), (cudnn, "allow_tf32", False)]
