"""Split the logits of a written-out softmax into scale q k^T + bias."""

from __future__ import annotations

import torch
from torch import Tensor

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
    "Sub",
    "Where",
}
_ROUNDING = 64  # times the machine epsilon of the largest logit


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
    u = torch.rand(product.shape, generator=generator, dtype=product.dtype, device=product.device)
    mixed = _slope(form, u.reshape(form.logits.shape).to(form.logits.dtype), product)
    if not _close(mixed, slope * u, 1e-3, 1e-6):
        raise NotClosedForm("mixed-logits", "its logits mix heads or keys")
    _check_ops(form)
    logits, p = form.logits.detach().reshape(product.shape), form.p.reshape(product.shape)
    seen = (p > 0) & (slope != 0).any(-1, keepdim=True)
    scale = torch.where(seen, slope, 0.0).abs().amax((-2, -1), keepdim=True)
    if not _close(torch.where(seen, slope, scale), scale, 1e-4, 1e-8):
        raise NotClosedForm("nonlinear-logits", "its logits are not linear in q k^T")
    linear = scale * product
    bias = (logits - linear).masked_fill((slope == 0) & ~seen, -torch.inf)
    rounding = _ROUNDING * torch.finfo(logits.dtype).eps * linear.abs().amax()
    return scale[..., 0, 0], None if bias.abs().amax() <= rounding else bias


def _close(a: Tensor, b: Tensor, relative: float, absolute: float) -> bool:
    """Compare entry by entry; `torch.allclose` takes several times as long."""
    return float(((a - b).abs_() - relative * b.abs()).amax()) <= absolute


def _check_ops(form: Explicit) -> None:
    ops = {op(node) for node in nodes(form.logits, (form.product.node,))}
    if unknown := sorted(ops - _AFFINE_OPS - SHAPE_OPS - {op(form.product.node)}):
        raise NotClosedForm("nonlinear-logits", f"its logits pass through {', '.join(unknown)}")
    p, weights = form.p.detach(), form.weights.detach()
    if p.numel() != weights.numel() or not torch.equal(
        p.reshape(weights.shape).to(weights), weights
    ):
        raise NotClosedForm("post-softmax-op", "P is changed between the softmax and the values")


def _slope(form: Explicit, cotangent: Tensor, product: Tensor) -> Tensor:
    pulled = vjp(form.logits, form.product, cotangent)
    assert pulled is not None
    return pulled.reshape(product.shape).to(product.dtype)
