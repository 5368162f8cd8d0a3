"""Arithmetic and execution that figures can be trusted with, whatever is switched on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SEEDED = ("cuda", "xpu")
"""Devices that have their own random state."""


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in the tensors' own precision with gradients on: no TF32, autocast, inference mode.

    Every setting comes back as it was. TF32 would leave three digits of a spectral norm. A model
    may still choose for itself, by `torch.backends.cudnn.flags()` say: it is measured as it is.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        _leave_out_tf32(stack)
        yield


class Widening(TorchFunctionMode):
    """Run a float64 model without the steps that it takes in float32.

    Many models cast to float32 for norms, rotary positions or softmax, whatever their own
    precision: that would leave seven of the sixteen digits.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with float64 in place of float32."""
        func, args, kwargs = widen_call(func, args, kwargs or {})
        return func(*args, **kwargs)


def widen_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """Return the same call with float64 wherever it asks for float32."""
    if func is Tensor.float:
        return Tensor.double, args, kwargs
    if func is Tensor.view:  # of the bits
        return func, args, kwargs
    wide = {name: _wide(value) for name, value in kwargs.items()}
    return func, tuple(_wide(value) for value in args), wide


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def seed_device(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the CPU and one device while the block runs; their random states come back.

    No other device is touched: reading the state of a GPU takes memory, which it may not have.
    """
    own = [device] if device.type in SEEDED else []
    with torch.random.fork_rng(devices=own, device_type=device.type if own else "cuda"):
        torch.default_generator.manual_seed(seed)
        for each in own:
            accelerator = torch.get_device_module(each)
            with accelerator.device(each):
                accelerator.manual_seed(seed)
        yield


def _leave_out_tf32(stack: ExitStack) -> None:
    """Compute in float32 where it is asked for, until the stack is closed.

    torch 2.9 has a setting per operation beside the two older ones, and refuses to read the older
    where they contradict it: so all of them say the same here, and each is read where nothing
    contradicts it.
    """
    for part in _operations():  # the general ones first: what follows them reads as "none"
        stack.callback(setattr, part, "fp32_precision", part.fp32_precision)
        part.fp32_precision = "none"
    cudnn = torch.backends.cudnn
    stack.callback(setattr, cudnn, "allow_tf32", _cudnn_allows_tf32())
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    for part in _operations():
        part.fp32_precision = "ieee"


def _operations() -> list[Any]:
    """What torch keeps a precision of, from all there is to single operations."""
    backends: Any = torch.backends
    cudnn, onednn = backends.cudnn, backends.mkldnn
    if not hasattr(cudnn, "conv"):
        return []
    single = [part for each in (cudnn, onednn) for part in (each.conv, each.rnn)]
    return [backends, cudnn, onednn, backends.cuda.matmul, onednn.matmul, *single]


def _cudnn_allows_tf32() -> bool:
    """Return the older setting; once all newer ones are "none", only True contradicts them."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return True


@contextmanager
def eager() -> Iterator[None]:
    """Run what `torch.compile` wraps as the Python it is: kernels it made cannot be observed.

    That covers a module that is wrapped or compiled in place, parts of one, and functions.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled: importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class EagerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode under which nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no to a wrapper that keeps the compiler out, and imports it for that: a second."""
        return False
