"""Split the logits of a written-out softmax into scale q k^T + bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lipaudit.models.events import AttentionCall, Explicit
from lipaudit.models.graph import SHAPE_OPS, nodes, op, vjp
from lipaudit.models.structure import NotClosedForm

_AFFINE_OPS = {
    "Add",
    "Clamp",
    "Div",
    "MaskedFill",
    "Maximum",
    "Mul",
    "Neg",
    "Rsub",
    "Split",
    "Sub",
    "Where",
}
_ADDED = {"Add", "Clamp", "MaskedFill", "Maximum", "Rsub", "Sub", "Where"}
"""Ops that may put a bias into the logits."""
_ROUNDING = 4  # times the machine epsilon of the row's largest logit
_NEGLIGIBLE = 1e-5  # in a logit: P moves by this share, far below every tolerance
_OUT_OF_REACH = 1e9  # a level that logits are not cut off at: the end of float32 stands for -inf


def scale_and_bias(call: AttentionCall, form: Explicit) -> tuple[Tensor, Tensor | None]:
    """Return s, one number per (..., head), and B with logits = s q k^T + B; None for B = 0.

    Masked entries of B are -inf; so is every entry of a query whose keys are all masked.

    Raises:
        NotClosedForm: the logits are not of this form, or P is changed before it meets v.
    """
    if form.others:
        raise NotClosedForm("x-dependent-bias", "its logits depend on the input beside q k^T")
    product = (call.q @ call.k.mT).detach()
    if form.logits.numel() != product.numel():
        raise NotClosedForm("sinks", "it has more logits than keys (attention sinks)")
    slope = _slope(form, torch.ones_like(form.logits), product)
    generator = torch.Generator(product.device).manual_seed(0)
    some = torch.rand(product.shape, generator=generator, device=product.device) < 0.5
    pulled = _slope(form, some.reshape(form.logits.shape).to(form.logits.dtype), product)
    # Exact zeros: a small share of a large head's logits would still be much in another head.
    if not _close(pulled, slope * some, 1e-3):
        raise NotClosedForm("mixed-logits", "its logits mix heads or keys")
    _check_ops(form)
    logits, p = form.logits.detach().reshape(product.shape), form.p.reshape(product.shape)
    seen = (p > 0) & (slope != 0).any(-1, keepdim=True)
    scale = torch.where(seen, slope, 0.0).abs().amax((-2, -1), keepdim=True)
    if not _close(torch.where(seen, slope, scale), scale, 1e-4):
        raise NotClosedForm("nonlinear-logits", "its logits are not linear in q k^T")
    return scale[..., 0, 0], _bias(form, logits, scale * product, (slope == 0) & ~seen)


def _bias(form: Explicit, logits: Tensor, linear: Tensor, masked: Tensor) -> Tensor | None:
    """Return B; zero in heads in which no row has more of it than rounding, None if in all.

    By the row: the logits of one head say nothing of the rounding in another one's. Rounding that
    would move P is kept, so that P is the model's own.
    """
    if _ADDED.isdisjoint(_ops(form)) and not masked.any():
        return None
    bias = (logits - linear).masked_fill(masked, -torch.inf)
    rounding = _ROUNDING * torch.finfo(logits.dtype).eps * linear.abs().amax(-1, keepdim=True)
    rounding = rounding.clamp_max(_NEGLIGIBLE)
    absent = ~(bias.abs() > rounding).any(-1, keepdim=True).any(-2, keepdim=True)
    return None if absent.all() else bias.masked_fill(absent, 0.0)


def _close(a: Tensor, b: Tensor, relative: float) -> bool:
    """Compare entry by entry; `torch.allclose` takes several times as long."""
    return bool(((a - b).abs_() <= relative * b.abs()).all())


def _ops(form: Explicit) -> set[str]:
    """Return the ops between q k^T and the softmax, without the product itself."""
    return {op(node) for node in _path(form)}


def _path(form: Explicit) -> Iterator[Node]:
    return (n for n in nodes(form.logits, (form.product.node,)) if n is not form.product.node)


def _is_cut_off(node: Node) -> bool:
    """Say whether an op cuts the logits off at a level that they may reach, at X or elsewhere."""
    names = {"Clamp": ("_saved_min", "_saved_max"), "Maximum": ("_saved_self", "_saved_other")}
    levels = [getattr(node, name, None) for name in names.get(op(node), ())]
    constant = [t for t in levels if t is not None and not getattr(t, "requires_grad", False)]
    return any(float(torch.as_tensor(t).abs().min()) < _OUT_OF_REACH for t in constant)


def _check_ops(form: Explicit) -> None:
    unknown = _ops(form) - _AFFINE_OPS - SHAPE_OPS
    unknown |= {op(node) for node in _path(form) if _is_cut_off(node)}
    if unknown:
        what = ", ".join(sorted(unknown))
        raise NotClosedForm("nonlinear-logits", f"its logits pass through {what}")
    p, weights = form.p.detach(), form.weights.detach()
    if p.numel() != weights.numel() or not torch.equal(
        p.reshape(weights.shape).to(weights), weights
    ):
        raise NotClosedForm("post-softmax-op", "P is changed between the softmax and the values")


def _slope(form: Explicit, cotangent: Tensor, product: Tensor) -> Tensor:
    pulled = vjp(form.logits, form.product, cotangent)
    assert pulled is not None
    return pulled.reshape(product.shape).to(product.dtype)
