"""Operations whose derivative is applied many times: both directions of it, written by hand.

Reverse mode gives u -> J^T u. That map is linear in u, so differentiating it with respect to u
gives v -> J v: two backward passes replace forward-mode differentiation, which fused attention
lacks. Autograd can only do so where each backward formula is differentiable itself (that of fused
attention is not), and keeps a graph through second derivatives, which J v never needs. Here the
nonlinear operations of transformers get a backward that is explicitly a linear map, with its
adjoint: nothing but what the two directions read is kept. A function returns NotImplemented where
it does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from lipaudit.models.derivative.reads import Read, among, only
from lipaudit.models.lifting import keep
from lipaudit.models.lifting import read as read_weight

Saved = tuple[Tensor | None, ...]


class Derivative(NamedTuple):
    """An operation y = f(x_1, ..., x_k) and the two directions of its derivative J.

    Attributes:
        forward: (x_1, ..., x_k) -> y and what the other two need.
        vjp: (saved, u) -> J^T u, one tensor per input.
        jvp: (saved, v_1, ..., v_k) -> J v.
    """

    forward: Callable[..., tuple[Tensor, Saved]]
    vjp: Callable[[Any, Tensor], tuple[Tensor, ...]]
    jvp: Callable[..., Tensor]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, derivative: Derivative, *inputs: Tensor) -> Tensor:
        output, saved = derivative.forward(*inputs)
        ctx.derivative = derivative
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return None, *ctx.derivative.vjp(ctx.saved_tensors, u.contiguous())
        # Detached: J^T u is differentiated with respect to u alone.
        saved = [None if t is None else t.detach() for t in ctx.saved_tensors]
        return None, *_Pullback.apply(ctx.derivative, u, *saved)


class _Pullback(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, derivative: Derivative, u: Tensor, *saved: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.derivative = derivative
        ctx.save_for_backward(*saved)
        return derivative.vjp(saved, u.contiguous())

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return None, ctx.derivative.jvp(saved, *v), *[None] * len(saved)


def elementwise(
    function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """An activation: J is diagonal."""
    if kwargs.get("inplace") or True in args:
        return NotImplemented

    def forward(x: Tensor) -> tuple[Tensor, Saved]:
        if function is F.gelu:  # what autograd would call, without its preparations
            slope = torch.ops.aten.gelu_backward(torch.ones_like(x), x, *args, **kwargs)
            return function(x, *args, **kwargs), (slope,)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = function(leaf, *args, **kwargs)
            (slope,) = torch.autograd.grad(y.sum(), leaf)
        return y.detach(), (slope,)

    return _Forward.apply(Derivative(forward, _scale_back, _scale), input)


def _scale(saved: tuple[Tensor], v: Tensor) -> Tensor:
    return saved[0] * v


def _scale_back(saved: tuple[Tensor], u: Tensor) -> tuple[Tensor]:
    return (saved[0] * u,)


LARGE = 2**22
"""Products of numbers in a linear map from which it is worth a look where it is read."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map; W that is stored in another precision is lifted again for every product."""
    kept = keep(weight)
    small = input.ndim < 3 or input.numel() * len(weight) < LARGE
    if isinstance(kept, Tensor) and (small or _depends_on_input(weight, bias)):
        return NotImplemented
    read = Read(learns=not small)

    def forward(x: Tensor) -> tuple[Tensor, Saved]:
        return F.linear(x, read_weight(kept), bias), ()

    def vjp(_: Saved, u: Tensor) -> tuple[Tensor]:
        rows = read.of(u)
        return (among(rows, only(rows, u) @ read_weight(kept), u),)

    def jvp(_: Saved, v: Tensor) -> Tensor:
        return among(read.rows, F.linear(only(read.rows, v), read_weight(kept)), v)

    return _Forward.apply(Derivative(forward, vjp, jvp), input)


def softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """Softmax: J = diag(p) - p p^T is symmetric."""
    if dim is None:
        return NotImplemented

    def forward(x: Tensor) -> tuple[Tensor, Saved]:
        p = torch.softmax(x, dim)
        return p, (p,)

    def jvp(saved: tuple[Tensor], v: Tensor) -> Tensor:
        weighted = saved[0] * v
        return weighted.sub_(saved[0] * weighted.sum(dim, keepdim=True))

    def vjp(saved: tuple[Tensor], u: Tensor) -> tuple[Tensor]:
        return (jvp(saved, u),)

    return _Forward.apply(
        Derivative(forward, vjp, jvp), input if dtype is None else input.to(dtype)
    )


def layer_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """LayerNorm, w * (x - mean) / std + b: J = diag(w) S with S symmetric."""
    if _depends_on_input(weight, bias):
        return NotImplemented
    shape = list(normalized_shape)

    def forward(x: Tensor) -> tuple[Tensor, Saved]:
        x = x.contiguous()
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        return y, (x, mean, rstd, weight)

    def symmetric(x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, v: Tensor) -> Tensor:
        # S diag(w) v
        mask = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(v, x, shape, mean, rstd, w, None, mask)[0]

    def vjp(saved: tuple[Tensor, Tensor, Tensor, Tensor | None], u: Tensor) -> tuple[Tensor]:
        return (symmetric(*saved, u),)

    def jvp(saved: tuple[Tensor, Tensor, Tensor, Tensor | None], v: Tensor) -> Tensor:
        x, mean, rstd, w = saved
        return _weigh(symmetric(x, mean, rstd, None, v.contiguous()), w)

    return _Forward.apply(Derivative(forward, vjp, jvp), input)


def rms_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """RMSNorm, w * z with z = x / rms: J = diag(w) (I - z z^T / n) / rms."""
    if _depends_on_input(weight):
        return NotImplemented
    dims = tuple(range(-len(normalized_shape), 0))

    def forward(x: Tensor) -> tuple[Tensor, Saved]:
        floor = torch.finfo(x.dtype).eps if eps is None else eps
        inverse = x.square().mean(dims, keepdim=True).add_(floor).rsqrt_()
        z = x * inverse
        return _weigh(z, weight), (z, inverse, weight)

    def symmetric(z: Tensor, inverse: Tensor, v: Tensor) -> Tensor:
        return (v - z * (z * v).mean(dims, keepdim=True)).mul_(inverse)

    def vjp(saved: tuple[Tensor, Tensor, Tensor | None], u: Tensor) -> tuple[Tensor]:
        z, inverse, w = saved
        return (symmetric(z, inverse, _weigh(u, w)),)

    def jvp(saved: tuple[Tensor, Tensor, Tensor | None], v: Tensor) -> Tensor:
        z, inverse, w = saved
        return _weigh(symmetric(z, inverse, v), w)

    return _Forward.apply(Derivative(forward, vjp, jvp), input)


def patch_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution over patches side by side, as one product: several times faster backwards."""
    out, _, *patch = weight.shape
    rows, columns = (size // side for size, side in zip(input.shape[-2:], patch, strict=True))
    whole = input.shape[1:] == (weight.shape[1], rows * patch[0], columns * patch[1])
    plain = (_pair(stride), _pair(padding), _pair(dilation)) == (tuple(patch), (0, 0), (1, 1))
    if input.ndim != 4 or not whole or not plain:
        return NotImplemented
    tiles = input.reshape(len(input), -1, rows, patch[0], columns, patch[1])
    vectors = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)
    return torch.nn.functional.linear(vectors, weight.flatten(1), bias).permute(0, 3, 1, 2)


def _pair(value: int | tuple[int, ...] | str) -> tuple[int, ...]:
    if isinstance(value, str):
        return (0, 0) if value == "valid" else ()
    return (value, value) if isinstance(value, int) else tuple(value)


def _weigh(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _depends_on_input(*parameters: Tensor | None) -> bool:
    """A weight that was computed may depend on the input; a stored one cannot."""
    return any(p is not None and p.grad_fn is not None for p in parameters)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention, O = P V with P = softmax(scale Q K^T + mask).

    dP = P * (dS - rowsum(P * dS)) for the logits S, so no map of N x N x d is ever formed. The
    row sum is that of the very numbers it is taken from: where P is one-hot the difference is 0
    and not their rounding, which K, as large as it must be for that, would make any size.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    query, key, value = _same_batch(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.requires_grad:
        logits = query @ key.mT * scale + attn_mask
        return softmax(logits, -1) @ value
    forward, read = partial(_attend, scale, attn_mask), Read()
    vjp, jvp = partial(_attention_vjp, scale, read), partial(_attention_jvp, scale, read)
    return _Forward.apply(Derivative(forward, vjp, jvp), query, key, value)


def _same_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Expand the leading dimensions to a common shape."""
    if len({t.shape[:-2] for t in tensors}) == 1:
        return tensors
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))  # type: ignore[no-untyped-call]
    return tuple(t.expand(*batch, *t.shape[-2:]) for t in tensors)


def _attend(
    scale: float, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Saved]:
    q, k, v = (q * scale).contiguous(), k.contiguous(), v.contiguous()
    logits = q @ k.mT
    if mask is not None and mask.dtype == torch.bool:
        logits.masked_fill_(~mask, -math.inf)
    elif mask is not None:
        logits += mask
    p = logits.softmax(-1)
    if mask is not None:  # a query that may see no key has the output 0
        p.masked_fill_((logits == -math.inf).all(-1, keepdim=True), 0)
    return p @ v, (q, k, v, p)


def _attention_vjp(
    scale: float, read: Read, saved: tuple[Tensor, ...], u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = read.of(u)
    k, v = saved[1:3]
    q, p, u = (only(rows, t) for t in (saved[0], saved[3], u))
    ds = _centre((u @ v.mT).mul_(p), p)
    return among(rows, (ds @ k).mul_(scale), saved[0]), ds.mT @ q, p.mT @ u


def _attention_jvp(
    scale: float, read: Read, saved: tuple[Tensor, ...], dq: Tensor, dk: Tensor, dv: Tensor
) -> Tensor:
    k, v = saved[1:3]
    q, p, dq = (only(read.rows, t) for t in (saved[0], saved[3], dq))
    # One product for dq k^T + q dk^T.
    ds = torch.cat([dq * scale, q], -1) @ torch.cat([k, dk], -1).mT
    return among(read.rows, (_centre(ds.mul_(p), p) @ v).add_(p @ dv), saved[0])


def _centre(weighted: Tensor, p: Tensor) -> Tensor:
    """P * (G - rowsum(P * G)) of P * G, in place."""
    return weighted.addcmul_(p, weighted.sum(-1, keepdim=True), value=-1)
