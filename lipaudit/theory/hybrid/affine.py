"""Moves and affine operations: exact on the linear part, sizes of the weights on the box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.theory.hybrid.tensor import Hybrid, Layer
from lipaudit.theory.relaxation.operations.affine import dropout
from lipaudit.theory.relaxation.operations.moves import MOVES
from lipaudit.theory.relaxation.refusals import NoRuleError


def moved(name: str) -> Callable[..., Any]:
    """Return the rule of a method of tensors that only moves entries about, or copies them."""

    def rule(x: Hybrid, *args: Any, **kwargs: Any) -> Any:
        def move(t: Tensor) -> Any:
            return getattr(t, name)(*args, **kwargs)

        parts = move(x.centre), torch.vmap(move)(x.generators), move(x.radius), move(x.spread)
        if isinstance(parts[0], Tensor):
            return _assembled(*parts)
        return tuple(_assembled(*each) for each in zip(*parts, strict=True))

    return rule


def _assembled(centre: Tensor, generators: Tensor, radius: Tensor, spread: Tensor) -> Hybrid:
    return Hybrid(centre, generators, radius, spread=spread)


def cat(tensors: Sequence[Any], dim: int = 0) -> Hybrid:
    """Put hybrids and constants side by side."""
    like = next(each for each in tensors if isinstance(each, Hybrid))
    parts = [each if isinstance(each, Hybrid) else constant(each, like) for each in tensors]
    axis = dim % like.ndim
    return Hybrid(
        torch.cat([part.centre for part in parts], axis),
        torch.cat([part.generators for part in parts], axis + 1),
        torch.cat([part.radius for part in parts], axis),
    )


def constant(value: Tensor, like: Hybrid) -> Hybrid:
    """Return what does not move, with as many generators as another."""
    none = torch.zeros_like(value)
    return Hybrid(value, none.expand(len(like.generators), *value.shape), none, spread=none)


def broadcast(x: Hybrid, shape: Sequence[int]) -> Hybrid:
    """Return entries repeated to a shape that may have more axes."""
    if tuple(x.shape) == tuple(shape):
        return x
    rows = x.generators
    rows = rows.view(len(rows), *[1] * (len(shape) - x.ndim), *x.shape).expand(-1, *shape)
    return _assembled(x.centre.expand(shape), rows, x.radius.expand(shape), x.spread.expand(shape))


def expand(x: Hybrid, *shape: Any) -> Hybrid:
    """As of a tensor."""
    return broadcast(x, x.centre.expand(*shape).shape)


def add(x: Any, y: Any, *, alpha: float = 1) -> Hybrid:
    """Return x + alpha y."""
    y = y if alpha == 1 else y * alpha
    if not isinstance(x, Hybrid) or not isinstance(y, Hybrid):
        x, y = (x, y) if isinstance(x, Hybrid) else (y, x)
        centre = x.centre + y
        x = broadcast(x, centre.shape)
        return _assembled(centre, x.generators, x.radius, x.spread)
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    x, y = broadcast(x, shape), broadcast(y, shape)
    return Hybrid(x.centre + y.centre, x.generators + y.generators, x.radius + y.radius)


def sub(x: Any, y: Any, *, alpha: float = 1) -> Hybrid:
    """Return x - alpha y."""
    return add(x, y * -alpha)


def scaled(x: Hybrid, weight: Any) -> Hybrid:
    """Return x times a constant, entry by entry."""
    centre = x.centre * weight
    x, size = broadcast(x, centre.shape), abs(weight)
    return _assembled(centre, x.generators * weight, x.radius * size, x.spread * size)


def mapped(x: Hybrid, op: Callable[..., Tensor], *weights: Tensor) -> Hybrid:
    """Apply op(x, *weights), linear in both, to the parts; the axis of generators comes first."""
    centre = op(x.centre[None], *weights)[0]
    radius = op(x.radius[None], *(weight.abs() for weight in weights))[0]
    return Hybrid(centre, op(x.generators, *weights), radius)


def linear(input: Hybrid, weight: Tensor, bias: Tensor | None = None) -> Hybrid:
    """Weights times the last axis."""
    out = mapped(input, F.linear, weight)
    out = out if bias is None else add(out, bias)
    out.layer = Layer(input, weight, bias)
    return out


def conv2d(input: Hybrid, weight: Tensor, bias: Tensor | None = None, *how: Any) -> Hybrid:
    """A convolution; `how`: stride, padding, dilation and groups."""

    def op(t: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(t.flatten(0, 1), w, None, *how).unflatten(0, t.shape[:2])  # type: ignore[no-untyped-call]

    out = mapped(input, op, weight)
    return out if bias is None else add(out, bias.view(-1, 1, 1))


def batch_norm(
    input: Hybrid,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Hybrid:
    """Return a (x - mean) + b with a = weight / sqrt(var + eps) of every channel, axis 1."""
    if training or running_mean is None or running_var is None:
        raise NoRuleError("batch_norm with statistics of the batch (call eval() first)")
    gain = (running_var + eps).rsqrt() * (1.0 if weight is None else weight)
    shift = -running_mean * gain + (0.0 if bias is None else bias)
    gain, shift = (each.view(-1, *[1] * (input.ndim - 2)) for each in (gain, shift))
    return add(scaled(input, gain), shift)


def averaged(x: Hybrid, dim: Any = None, keepdim: bool = False) -> Hybrid:
    """The mean over axes; never over the batch."""
    axes = [dim] if isinstance(dim, int) else list(dim or ())
    axes = [axis % x.ndim for axis in axes]
    if not axes or 0 in axes:
        raise NoRuleError("mean over the batch")
    return mapped(x, lambda t: t.mean([axis + 1 for axis in axes], keepdim=keepdim))


def same(x: Hybrid, *_: Any, **__: Any) -> Hybrid:
    """The rule of copies."""
    return x


def negative(x: Hybrid) -> Hybrid:
    """-x."""
    return scaled(x, -1.0)


def differences(logits: Hybrid, label: Tensor) -> Hybrid:
    """Return logit_j - logit_label of every class j, (batch, classes), 0 for the label itself."""
    layer = logits.layer or Layer(logits, torch.eye(logits.shape[-1]).to(logits.centre), None)
    weight = layer.weight - layer.weight[label][:, None]
    centre = torch.einsum("bw,bcw->bc", layer.x.centre, weight)
    generators = torch.einsum("nbw,bcw->nbc", layer.x.generators, weight)
    radius = torch.einsum("bw,bcw->bc", layer.x.radius, weight.abs())
    if layer.bias is not None:
        centre = centre + layer.bias - layer.bias[label][:, None]
    return Hybrid(centre, generators, radius)


RULES: dict[str, Callable[..., Any]] = {
    **{name: moved(name) for name in MOVES},
    "view": moved("reshape"),
    "getitem": moved("__getitem__"),
    "mT": lambda x: x.transpose(-1, -2),
    **dict.fromkeys(("contiguous", "clone", "to", "float"), same),
    **dict.fromkeys(("cat", "concat"), cat),
    **dict.fromkeys(("add", "radd", "iadd"), add),
    "sub": sub,
    "rsub": lambda x, y: sub(y, x),
    **dict.fromkeys(("neg", "negative"), negative),
    "expand": expand,
    "dropout": dropout,
    "linear": linear,
    "conv2d": conv2d,
    "batch_norm": batch_norm,
    "mean": averaged,
}
"""What moves and affine operations do to hybrids."""
