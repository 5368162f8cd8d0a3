"""Smooth functions, products, normalisations and attention: a line, and a box for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.theory.hybrid.affine import add, mapped, scaled
from lipaudit.theory.hybrid.tensor import Hybrid
from lipaudit.theory.relaxation.operations.smooth import (
    GELU,
    SIGMOID,
    SILU,
    TANH,
    TANH_GELU,
    Smooth,
)
from lipaudit.theory.relaxation.refusals import NoRuleError

PARTS = 16
"""Parts of a range at whose ends a function is compared with its chord."""

_CHORD = 1e-2
"""Ranges that are narrower have the slope of their middle: chords of them are rounding."""

_LOGARITHM = 15.0
"""Ranges of a softmax row beyond which cosh would leave single precision."""

Function = Callable[[Tensor], Tensor]


def smooth(x: Hybrid, f: Smooth) -> Hybrid:
    """Return f of a hybrid: the chord's slope, and the most that f is off a line of that slope.

    Between two of the points, h apart, a function leaves its chord by at most h^2/8 sup |f''|.
    """
    low, high = x.ends
    width = high - low
    slope = torch.where(
        width > _CHORD,
        (f.value(high) - f.value(low)) / width.clamp_min(_CHORD),
        f.slope((low + high) / 2),
    )
    least, largest = torch.full_like(low, math.inf), torch.full_like(low, -math.inf)
    for part in range(PARTS + 1):
        at = low + width * (part / PARTS)
        off = f.value(at) - slope * (at - x.centre)
        least, largest = torch.minimum(least, off), torch.maximum(largest, off)
    widening = (width / PARTS).square() / 8 * f.second(low, high)
    return _line(x, slope, least - widening, largest + widening)


def convex(
    x: Hybrid, ends: tuple[Tensor, Tensor], f: Function, slope: Function, place: Function
) -> Hybrid:
    """Return f of a hybrid, f convex on its range.

    Args:
        x: argument.
        ends: of its range.
        f: the function.
        slope: its derivative.
        place: where f has a slope.
    """
    low, high = ends
    width, middle = high - low, (low + high) / 2
    wide = width > 1e-3 * high.abs() + 1e-6
    a = torch.where(wide, (f(high) - f(low)) / torch.where(wide, width, 1.0), slope(middle))
    touched = torch.where(wide, torch.minimum(torch.maximum(place(a), low), high), middle)
    least = f(touched) - a * (touched - x.centre)
    largest = torch.maximum(f(high) - a * (high - x.centre), f(low) - a * (low - x.centre))
    return _line(x, a, torch.minimum(least, largest), largest)


def _line(x: Hybrid, slope: Tensor, least: Tensor, largest: Tensor) -> Hybrid:
    size = slope.abs()
    radius = size * x.radius + (largest - least) / 2
    middle = (largest + least) / 2
    return Hybrid(middle, x.generators * slope, radius, spread=x.spread * size)


def relu(input: Hybrid, inplace: bool = False) -> Hybrid:
    """max(x, 0)."""
    return convex(input, input.ends, F.relu, lambda x: (x > 0).to(x), torch.zeros_like)


def gelu(input: Hybrid, *, approximate: str = "none") -> Hybrid:
    """Return x times the normal distribution function of x, or torch's approximation by tanh."""
    return smooth(input, TANH_GELU if approximate == "tanh" else GELU)


def silu(input: Hybrid, inplace: bool = False) -> Hybrid:
    """Return x sigmoid(x)."""
    return smooth(input, SILU)


def _exp(x: Hybrid) -> Hybrid:
    """The exponential of what is at most 0."""
    ends = x.ends[0].clamp_max(0), x.ends[1].clamp_max(0)
    return convex(x, ends, torch.exp, torch.exp, lambda a: a.clamp_min(1e-30).log())


def _rsqrt(x: Hybrid, floor: float) -> Hybrid:
    """Return 1 / sqrt of what is at least `floor`."""
    ends = x.ends[0].clamp_min(floor), x.ends[1].clamp_min(floor)
    return convex(
        x,
        ends,
        torch.rsqrt,
        lambda t: -(t**-1.5) / 2,
        lambda a: (-2 * a).clamp_min(1e-30) ** (-2 / 3),
    )


def held(x: Hybrid, low: Tensor, high: Tensor) -> Hybrid:
    """Return x that is known to lie in [low, high], too: that alone where it is less."""
    less = (high - low) / 2 < x.reach
    if not less.any():
        return x
    return Hybrid(
        torch.where(less, (high + low) / 2, x.centre),
        x.generators * ~less,
        torch.where(less, (high - low) / 2, x.radius),
        spread=x.spread * ~less,
    )


def layer_norm(
    input: Hybrid,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Hybrid:
    """(x - mean) / sqrt(var + eps) weight + bias."""
    _check(input, normalized_shape)
    n = input.shape[-1]
    y = mapped(input, lambda t: t - _mean(t))
    # The matrix is 1 - 1/n on its diagonal and -1/n elsewhere.
    y.radius = input.radius * (1 - 2 / n) + _mean(input.radius)
    out = _unit(y, eps, weight, (n - 1) ** 0.5)
    return out if bias is None else add(out, bias)


def rms_norm(
    input: Hybrid, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Hybrid:
    """Return x / sqrt(mean x^2 + eps) weight."""
    _check(input, normalized_shape)
    eps = torch.finfo(input.dtype if weight is None else weight.dtype).eps if eps is None else eps
    return _unit(input, eps, weight, input.shape[-1] ** 0.5)


def _check(x: Hybrid, normalized_shape: Any) -> None:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if shape != [x.shape[-1]]:
        raise NoRuleError(f"a normalisation of the axes {tuple(shape)}")


def _unit(y: Hybrid, eps: float, weight: Tensor | None, most: float) -> Hybrid:
    """Return y / sqrt(mean y^2 + eps) weight; no entry of the quotient is above `most`."""
    half = _mean(y.reach.square()) / 2
    square = Hybrid(
        _mean(y.centre.square()) + half + eps,
        2 * _mean(y.generators * y.centre),
        2 * _mean(y.centre.abs() * y.radius) + half,
    )
    out = held(mul(y, _rsqrt(square, eps)), *_quotients(y, eps, most))
    return out if weight is None else scaled(out, weight)


def _quotients(y: Hybrid, eps: float, most: float) -> tuple[Tensor, Tensor]:
    """Return the ends of y / sqrt(mean y^2 + eps) by those of y alone."""
    low, high = y.ends
    near, far = torch.minimum(low.abs(), high.abs()), torch.maximum(low.abs(), high.abs())
    shrink = (_mean(far.square()) + eps).rsqrt()
    stretch = (_mean(torch.where(low * high > 0, near, 0.0).square()) + eps).rsqrt()
    high = high * torch.where(high > 0, stretch, shrink)
    low = low * torch.where(low > 0, shrink, stretch)
    return low.clamp_min(-most), high.clamp_max(most)


def mul(x: Any, y: Any) -> Hybrid:
    """Return x y, entry by entry."""
    if not (isinstance(x, Hybrid) and isinstance(y, Hybrid)):
        return scaled(x, y) if isinstance(x, Hybrid) else scaled(y, x)
    radius = x.radius * y.centre.abs() + x.centre.abs() * y.radius + x.reach * y.reach
    rows = torch.addcmul(x.generators * y.centre, y.generators, x.centre)
    return Hybrid(x.centre * y.centre, rows, radius)


def div(x: Any, y: Any) -> Hybrid:
    """Return x / y of a constant y."""
    if isinstance(y, Hybrid):
        raise NoRuleError("division by what depends on the input")
    return scaled(x, 1 / y)


def matmul(x: Any, y: Any) -> Hybrid:
    """Return x @ y; where rows of x sum to one, x (y - k) + k with the best k of each row."""
    if not isinstance(y, Hybrid):
        return mapped(x, torch.matmul, y)
    if not isinstance(x, Hybrid):
        return mapped(y, lambda t, w: w @ t, x)
    centre = x.centre @ y.centre
    rows = _rows_times(x.generators, y.centre) + _times_rows(x.centre, y.generators)
    radius = x.centre.abs() @ y.radius + x.reach @ y.reach
    if not x.simplex:
        return Hybrid(centre, rows, radius + x.radius @ y.centre.abs())
    total = x.radius.sum(-1, keepdim=True).clamp_min(1e-20)
    k = ((x.radius @ y.centre) / total).detach()  # any will do
    off = (y.centre[..., None, :, :] - k[..., :, None, :]).abs()
    radius = radius + (x.radius[..., None, :] @ off)[..., 0, :]
    centre = centre + (1 - x.centre.sum(-1, keepdim=True)) * k
    out = Hybrid(centre, rows - x.generators.sum(-1, keepdim=True) * k, radius)
    low, high = y.ends
    return held(out, low.amin(-2, keepdim=True), high.amax(-2, keepdim=True))


def _rows_times(rows: Tensor, y: Tensor) -> Tensor:
    """Return rows (n, *b, i, k) @ y (*b, k, j), as products of tall matrices."""
    tall = rows.movedim(0, -3)
    return torch.unflatten(tall.flatten(-3, -2) @ y, -2, tall.shape[-3:-1]).movedim(-3, 0)


def _times_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x (*b, i, k) @ rows (n, *b, k, j), as products with wide matrices."""
    wide = rows.movedim(0, -2)
    return torch.unflatten(x @ wide.flatten(-2), -1, wide.shape[-2:]).movedim(-2, 0)


def softmax(input: Hybrid, dim: int | None = None, *_: Any, dtype: Any = None) -> Hybrid:
    """exp(s - LSE(s)) over the last axis, as in `theory.relaxation.operations.softmax`."""
    if dim is None or dim % input.ndim != input.ndim - 1:
        raise NoRuleError("softmax over another axis than the last")
    p = input.centre.softmax(-1)
    d = mapped(input, lambda t: t - _total(t * p))
    d.radius = input.radius * (1 - 2 * p) + _total(p * input.radius)
    rho = _log_mean_exp(d.reach, p) / 2
    centre = input.centre.log_softmax(-1) - rho
    out = _exp(Hybrid(centre, d.generators, d.radius + rho, spread=d.spread))
    out.simplex = True
    return out


def _log_mean_exp(r: Tensor, p: Tensor) -> Tensor:
    """Return the most that log sum p e^d, of mean sum p d = 0, can be for |d| <= r."""
    top = r.amax(-1, keepdim=True)
    most = torch.minimum(top, top.square() / 2)
    r = r.clamp(1e-3, _LOGARITHM)
    level = _total(p * torch.cosh(r))
    chord = level.log() + _total((p * torch.sinh(r) / r / level - p).abs() * r)
    return torch.where(top < _LOGARITHM, torch.minimum(most, chord), most)


def attention(
    query: Hybrid,
    key: Hybrid,
    value: Hybrid,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Hybrid:
    """softmax(scale q k^T) v."""
    if dropout_p > 0 or enable_gqa or is_causal or attn_mask is not None:
        raise NoRuleError("scaled_dot_product_attention with dropout, masks or grouped queries")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return matmul(softmax(matmul(scaled(query, scale), key.mT), -1), value)


def _mean(t: Tensor) -> Tensor:
    return t.mean(-1, keepdim=True)


def _total(t: Tensor) -> Tensor:
    return t.sum(-1, keepdim=True)


RULES: dict[str, Callable[..., Any]] = {
    "relu": relu,
    "gelu": gelu,
    "silu": silu,
    "tanh": lambda input: smooth(input, TANH),
    "sigmoid": lambda input: smooth(input, SIGMOID),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    **dict.fromkeys(("mul", "multiply", "rmul"), mul),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), div),
    **dict.fromkeys(("matmul", "bmm"), matmul),
    "rmatmul": lambda x, y: matmul(y, x),
    "softmax": softmax,
    "scaled_dot_product_attention": attention,
}
"""What all other operations do to hybrids."""
