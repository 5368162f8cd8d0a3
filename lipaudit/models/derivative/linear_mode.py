"""Run an unmodified model so that it can be linearised: replaced and refused operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipaudit.errors import InputError, first_line, of_machine
from lipaudit.models.graph import leaves
from lipaudit.models.lifting import Kept, keep
from lipaudit.models.precision import widen_call


def _refuse_dropout(probability: float) -> Tensor:
    if probability > 0:
        raise InputError(
            f"dropout is on (p = {probability:g}), so forward passes differ",
            "Call model.eval() first, or set the probability to 0.",
        )
    return NotImplemented


class _StoredProduct(torch.autograd.Function):
    """x W^T (or x W, `back`), with W read again for every product.

    A graph that stores W would keep a converted copy of every weight: 28 GB for a 7B model in
    bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Kept, back: bool) -> Tensor:
        ctx.kept, ctx.back = kept, back
        weight = kept.lifted()
        return x @ (weight if back else weight.mT)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, None, None]:
        return _StoredProduct.apply(u, ctx.kept, not ctx.back), None, None


def _run_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kept = keep(weight)
    if isinstance(kept, Tensor):  # stored in the precision and place of the run
        return NotImplemented
    product: Tensor = _StoredProduct.apply(input, kept, False)
    return product if bias is None else product + bias


def _run_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Refuse batch statistics, and compute fixed ones as an affine map per channel.

    On a CPU, torch's backward pass (at least up to 2.15) gives wrong gradients for a batch of one
    if the cotangent is a transposed view, as in every model that turns channels into tokens.
    """
    # Statistics over axis 0 and axes from 2 on may cover several samples. A standardised weight
    # depends on parameters only. One row with all samples' channels side by side is an instance
    # norm; if samples are in the other axes, the check of their gradients finds it.
    mixes = len(input) > 1 and not all(isinstance(p, nn.Parameter) for p in leaves(input)[0])
    if training and (running_mean is not None or mixes):
        raise InputError(
            "a BatchNorm layer uses batch statistics, so samples depend on each other",
            "Call model.eval() first. A BatchNorm without running statistics is not supported.",
        )
    if training or running_mean is None or running_var is None:
        return NotImplemented
    # x -> (x - mean) gain + shift: products and sums, whose derivatives are right everywhere.
    gain = (running_var + eps).rsqrt()
    gain = gain if weight is None else gain * weight
    channels = (-1, *[1] * (input.ndim - 2))
    shift = 0.0 if bias is None else bias.view(channels)
    return (input - running_mean.view(channels)) * gain.view(channels) + shift


_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _run_linear,
    F.scaled_dot_product_attention: (
        lambda query, key, value, attn_mask=None, dropout_p=0.0, *_, **__: _refuse_dropout(
            dropout_p
        )
    ),
    F.dropout: (
        lambda input, p=0.5, training=True, inplace=False: _refuse_dropout(p if training else 0.0)
    ),
    F.batch_norm: _run_batch_norm,
}
"""Replacements of torch functions; NotImplemented means that torch's own function runs."""


class LinearMode(TorchFunctionMode):
    """Run a model so that it can be differentiated twice, and refuse what is no fixed function.

    Outputs change by rounding only. In a float64 run (`widen`) casts to float32 inside the model
    are skipped: many models compute norms, rotary positions or softmax in float32, which would
    leave seven of sixteen digits.

    Raises:
        InputError: inside the block, if the model uses dropout, batch statistics or autocast.
    """

    def __init__(self, *, widen: bool) -> None:
        super().__init__()
        self.widen = widen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the replacement of `func` if one applies, else `func`."""
        kwargs = kwargs or {}
        if self.widen:  # autocast leaves float64 as it is
            func, args, kwargs = widen_call(func, args, kwargs)
        elif torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise InputError(
                "the model rounds to half precision under autocast", "Use --dtype float64."
            )
        replacement = _REPLACEMENTS.get(func)
        result = NotImplemented if replacement is None else replacement(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def evaluate(f: Callable[[Tensor, Tensor], Tensor], leaf: Tensor, index: Tensor) -> Tensor:
    """Evaluate f with operations that can be differentiated twice."""
    sdpa = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    hooks = torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTING)
    # Fused kernels have a backward pass without derivative; MATH uses torch operations, which have
    # one.
    with sdpa, hooks, LinearMode(widen=leaf.dtype == torch.float64):
        return f(leaf.clone(), index)  # a copy, because f may change it in place


_CHECKPOINTING = "gradient checkpointing is on"
_CAUSES = (
    "checkpoint",
    "does not require grad",
    "not have been used in the graph",
    "is not implemented",
    "double backward",
)
"""Parts of autograd's messages on a model that it cannot differentiate, or not twice."""


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn autograd's messages on an unsuitable model into hints."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        # An assertion is one of the model's authors, in a backward pass of their own.
        known = isinstance(error, AssertionError) or any(part in str(error) for part in _CAUSES)
        if of_machine(error) or not known:
            raise
        raise InputError(
            f"the model cannot be linearised: {first_line(error)}",
            "Its output must depend on its input. Switch gradient checkpointing off "
            "(gradient_checkpointing_disable()), and load it uncompiled, with "
            "attn_implementation='eager'.",
        ) from error
