"""Arithmetic and execution modes that figures can rely on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SEEDED = ("cuda", "xpu")
"""Devices that have their own random state."""


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in the tensors' own precision with gradients: no TF32, autocast or inference mode.

    All settings are restored. TF32 would leave three digits of a spectral norm. A model may still
    change settings itself, for example by `torch.backends.cudnn.flags()`: it is measured as it is.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        # torch 2.9 has a setting per operation beside the two older ones, and refuses to read an
        # older one if they contradict each other. So all are set to the same value here, and
        # each is read while nothing contradicts it.
        backends: Any = torch.backends
        cudnn, onednn = backends.cudnn, backends.mkldnn
        operations: list[Any] = []  # with a precision setting, from general to single ones
        if hasattr(cudnn, "conv"):
            operations = [backends, cudnn, onednn, backends.cuda.matmul, onednn.matmul]
            operations += [part for each in (cudnn, onednn) for part in (each.conv, each.rnn)]
        for part in operations:  # general ones first: the dependent ones then read as "none"
            stack.callback(setattr, part, "fp32_precision", part.fp32_precision)
            part.fp32_precision = "none"
        try:
            allowed = cudnn.allow_tf32
        except RuntimeError:  # only True contradicts settings that are all "none"
            allowed = True
        stack.callback(setattr, cudnn, "allow_tf32", allowed)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
        for part in operations:
            part.fp32_precision = "ieee"
        yield


_CASTS = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}


class Widening(TorchFunctionMode):
    """Run a float64 model without its casts to lower precisions.

    Many models cast to float32 for norms, rotary positions or softmax, in any precision: that
    would leave seven of sixteen digits.

    Attributes:
        halves: the half precisions that the model would have used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.halves: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with float64 in place of what it asks for."""
        asked = (_CASTS.get(func), *args, *(kwargs or {}).values())
        self.halves.update(each for each in asked if each is torch.half or each is torch.bfloat16)
        func, args, kwargs = widen_call(func, args, kwargs or {})
        return func(*args, **kwargs)


def widen_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """Return the same call with float64 in place of lower precisions."""
    if func in _CASTS:
        return Tensor.double, args, kwargs
    if func is Tensor.view:  # a view of the bits
        return func, args, kwargs

    def widen(value: Any) -> Any:
        lower = isinstance(value, torch.dtype) and value in _CASTS.values()
        return torch.float64 if lower else value

    return func, tuple(map(widen, args)), {name: widen(value) for name, value in kwargs.items()}


@contextmanager
def seed_device(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the CPU and one device inside the block, and restore their random states.

    Other devices are not used: reading the state of a GPU takes memory, which may be missing.
    """
    seeded = [device] if device.type in SEEDED else []
    with torch.random.fork_rng(devices=seeded, device_type=device.type if seeded else "cuda"):
        torch.default_generator.manual_seed(seed)
        for each in seeded:
            accelerator = torch.get_device_module(each)
            with accelerator.device(each):
                accelerator.manual_seed(seed)
        yield


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled code as plain Python: compiled kernels cannot be observed.

    This covers modules that are wrapped or compiled in place, parts of them, and functions.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled: the import takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
