"""Layers of random hostile networks, (samples, tokens, width) to the same shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Layer = Callable[[Any], Any]


class Draw:
    """Random numbers of one part of a network."""

    def __init__(self, *seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed[0] * 64 + sum(seed[1:]))

    def __call__(self, *shape: int) -> Tensor:
        """Weights that float32 holds; some have ties, or rows of zeros."""
        t = torch.randn(shape, generator=self.generator)
        t = t.mul(2).round().div(2) if self.happens(0.2) else t
        if self.happens(0.15):
            t[torch.rand(shape[:1], generator=self.generator) < 0.3] = 0.0
        return t

    def happens(self, chance: float) -> bool:
        return float(torch.rand((), generator=self.generator)) < chance

    def pick(self, *choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=self.generator))]

    def gain(self, chance: float = 0.3) -> float:
        """A factor from 1e-3 to 1e3, mostly one."""
        return self.pick(1e-3, 1e-2, 0.1, 10.0, 100.0, 1e3) if self.happens(chance) else 1.0

    def linear(self, into: int, out: int) -> Layer:
        w, b = self(out, into) / into**0.5, self(out) * self.gain(0.2)
        return lambda x: F.linear(x, w.to(x.dtype), b.to(x.dtype))


CURVES: Mapping[str, Layer] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
    "softplus": F.softplus,
    "elu": F.elu,
    "elu-0.3": lambda x: F.elu(x, 0.3),
    "relu": F.relu,
    "dead": lambda x: F.relu(x - 100.0) + F.relu(-x - 0.5),
    "relu6": F.relu6,
    "leaky": F.leaky_relu,
    "abs": torch.abs,
    "hardswish": F.hardswish,
    "square": torch.square,
    "cube": lambda x: x**3,
    "fifth": lambda x: x**5,
    "root": lambda x: (x * x + 1e-6).sqrt(),
    "rsqrt": lambda x: (x * x + 1e-3).rsqrt(),
    "log": lambda x: (x.abs() + 1e-4).log(),
    "ratio": lambda x: x / (x * x + 1e-2),
}


def curve(d: Draw, t: int, w: int) -> Layer:
    return CURVES[d.pick(*CURVES)]


def mlp(d: Draw, t: int, w: int) -> Layer:
    up, down, f = d.linear(w, 2 * w), d.linear(2 * w, w), CURVES[d.pick(*CURVES)]
    return lambda x: down(f(up(x)))


def norm(d: Draw, t: int, w: int) -> Layer:
    eps, weight, bias = d.pick(1e-12, 1e-6, 1e-5, 1.0), d(w), d(w)
    kind = d.pick("layer", "rms", "axes", "group", "batch", "normalize")
    mean, var = d(t), d(t).square() * d.pick(0.0, 1.0, 1e3)

    def normalise(x: Any) -> Any:
        if kind == "layer" or t * w == 1:
            return F.layer_norm(x, (w,), weight.to(x.dtype), bias.to(x.dtype), eps)
        if kind == "rms":
            return F.rms_norm(x, (w,), weight.to(x.dtype), eps)
        if kind == "axes":
            return F.layer_norm(x, (t, w), None, None, eps)
        if kind == "group":
            return F.group_norm(x, 1, None, None, eps)
        if kind == "batch":
            return F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), None, None, False, 0.1, eps)
        return F.normalize(x, dim=-1)

    return normalise


def attention(d: Draw, t: int, w: int) -> Layer:
    """Masks of all kinds; scores from nearly equal to one-hot."""
    q, k, v, gain = d.linear(w, w), d.linear(w, w), d.linear(w, w), d.gain(0.5)
    visible = torch.rand(t, t, generator=d.generator) > 0.4
    visible |= torch.eye(t, dtype=torch.bool)
    kind, fused = (
        d.pick("none", "bool", "inf", "least", "uint8", "subtract", "causal"),
        d.happens(0.5),
    )

    def mix(x: Any) -> Any:
        scores = (q(x) @ k(x).mT) * gain
        hidden = torch.zeros(t, t, dtype=x.dtype)
        if kind in ("inf", "least"):
            least = -torch.inf if kind == "inf" else torch.finfo(torch.float32).min
            hidden = hidden.masked_fill(~visible, least)
        if fused:
            mask = visible if kind == "bool" else hidden if kind in ("inf", "least") else None
            return F.scaled_dot_product_attention(
                q(x) * gain, k(x), v(x), mask, is_causal=kind == "causal"
            )
        if kind == "bool":
            scores = scores.masked_fill(~visible, -torch.inf)
        elif kind == "uint8":
            scores = torch.where(visible.byte(), scores, torch.tensor(-1e4, dtype=x.dtype))
        elif kind == "subtract":
            scores = scores - (~visible).byte() * 100
        else:
            scores = scores + hidden
        return scores.softmax(-1) @ v(x)

    return mix


def extremes(d: Draw, t: int, w: int) -> Layer:
    """Ties of equal copies, and the softmax family over any axis."""
    axis, gain, limit = d.pick(1, 2), d.gain(0.6), d(w)
    kinds: Mapping[str, Layer] = {
        "amax": lambda x: x.amax(axis, keepdim=True) - 0.5 * x,
        "amin": lambda x: x.amin(axis, keepdim=True) * x,
        "tie": lambda x: torch.stack([x, x, x - limit.to(x.dtype).relu()], -1).amax(-1),
        "maximum": lambda x: torch.maximum(x, x.flip(1)) + torch.minimum(x, limit.to(x.dtype)),
        "softmax": lambda x: (gain * x).softmax(axis),
        "log_softmax": lambda x: (gain * x).log_softmax(axis),
        "logsumexp": lambda x: x - (gain * x).logsumexp(axis, keepdim=True),
        "clamp": lambda x: x.clamp(-0.5, 0.5),
    }
    return kinds[d.pick(*kinds)]


def degenerate(d: Draw, t: int, w: int) -> Layer:
    """Constant tokens and channels: no variance, and differences of equals."""
    kinds: tuple[Layer, ...] = (
        lambda x: x[:, :1].expand(-1, t, -1) * 1.0,
        lambda x: x[..., :1].expand(-1, -1, w) + 0.0,
        lambda x: F.layer_norm(x[..., :1].expand(-1, -1, w), (w,), None, None, 1e-6),
        lambda x: (x - x.mean(-1, keepdim=True)) * 1e-4,
        lambda x: x - x.sum(1, keepdim=True) / t,
        lambda x: torch.zeros_like(x) * x,
        lambda x: x * 1e3 - x * 999.0,
    )
    return d.pick(*kinds)


def product(d: Draw, t: int, w: int) -> Layer:
    mix, keys = d.linear(w, w), d(t, t)
    kinds: tuple[Layer, ...] = (
        lambda x: x * mix(x),
        lambda x: (x @ mix(x).mT) @ x / w,
        lambda x: keys.to(x.dtype) @ x,
        lambda x: torch.einsum("bik,bjk->bij", x, mix(x)) @ x,
        lambda x: x * torch.sigmoid(mix(x)) + mix(x),
        lambda x: x.clone().mul_(0.5).add_(mix(x)),
    )
    return d.pick(*kinds)


MAKERS = {f.__name__: f for f in (curve, mlp, norm, attention, extremes, degenerate, product)}


def fit(d: Draw, layer: Layer, shape: tuple[int, int]) -> Layer:
    """Give a layer a gain, sometimes a shortcut, and the shape of its input: mixed if need be."""
    gain, add, last, shortcut = d.gain(), d.gain(0.1) - 1, d.gain(0.2), d.happens(0.3)

    def whole(x: Any) -> Any:
        y = layer(x * gain + add) * last
        if tuple(y.shape[1:]) != shape:
            flat = y.reshape(y.shape[0], -1)
            w = Draw(d.generator.initial_seed(), 63)(shape[0] * shape[1], flat.shape[1])
            y = F.linear(flat, (w / w.shape[1] ** 0.5).to(y.dtype)).unflatten(1, shape)
        return x + y if shortcut else y

    return whole
