"""An attention call as a model makes it: q, k, v, how the logits come about, and the output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lipaudit.models.attention.observe.origins import Origins


@dataclass(frozen=True)
class Fused:
    """Logits of the fused op: scale q k^T + mask (True or 0 where a key is seen)."""

    scale: float
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True)
class Explicit:
    """Logits of a written-out softmax.

    Attributes:
        product: where q k^T enters the autograd graph of the logits.
        logits: what the softmax is taken of.
        p: its result.
        weights: what multiplies v: p itself, or what the model made of it.
        others: whether the logits depend on more than this product and constants.
    """

    product: GradientEdge
    logits: Tensor
    p: Tensor
    weights: Tensor
    others: bool


@dataclass(frozen=True)
class AttentionCall:
    """One attention call, with its autograd graph.

    Attributes:
        q, k, v: (..., tokens, width), leading axes broadcast, grouped heads repeated.
        form: how the logits come about.
        output: what the model's own ops make of it, (..., tokens, width), in the model's shape.
        transposed: whether the model keeps tokens last, (..., width, tokens).
        origins: what made the leaves of its graph, where a tracer has cut it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    form: Fused | Explicit
    output: Tensor
    transposed: bool = False
    origins: Origins = field(default_factory=Origins)


def probabilities(call: AttentionCall) -> Tensor:
    """Return P, all of it, differentiable to any order."""
    if isinstance(call.form, Explicit):
        return call.form.p
    logits = call.form.scale * (call.q @ call.k.mT)
    if call.form.mask is not None:
        logits = logits + additive(call.form.mask, logits.dtype)
    if call.form.causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, -torch.inf)
    p = torch.softmax(logits, -1)
    # A row without any key: softmax gives NaN, the fused op zero.
    return p if call.form.mask is None else p.masked_fill(logits.isneginf().all(-1, True), 0.0)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as what is added to the logits: -inf where a boolean one is False."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
