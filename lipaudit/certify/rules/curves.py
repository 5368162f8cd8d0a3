"""Smooth functions of one number beside those of `smooth`, and powers.

Suprema of |f''| and |f'''|: of erf at 0.707 and 0, of softplus those of the sigmoid's first two
derivatives, of mish at -0.088 and 0.716; those of the logarithm and of powers are at an end. Where
f'' jumps (ELU at 0) no bound of f''' is of use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.certify.form import Form, NoRuleError
from lipaudit.certify.rounding import up
from lipaudit.certify.rules.affine import add, neg, scale
from lipaudit.certify.rules.pieces import clamp, relu
from lipaudit.certify.rules.products import mul
from lipaudit.certify.rules.smooth import EXP, SIGMOID, Smooth, power, relax

_UNKNOWN = 1e300


def _constant(value: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda low, high: torch.full_like(low, value)


def _mish_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    t, s = torch.tanh(F.softplus(x)), torch.sigmoid(x)
    outer = 1 - t.square()
    return t + x * outer * s, outer * s * (2 + x * (1 - s) - 2 * x * t * s)


_DENSITY = 2 / math.sqrt(math.pi)

ERF = Smooth(
    torch.erf,
    lambda x: _DENSITY * torch.exp(-x.square()),
    lambda x: -2 * _DENSITY * x * torch.exp(-x.square()),
    _constant(0.9679),
    _constant(2.2568),
)
SOFTPLUS = Smooth(
    lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    torch.sigmoid,
    lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
    _constant(0.25),
    _constant(0.0963),
)
MISH = Smooth(
    F.mish,
    lambda x: _mish_slopes(x)[0],
    lambda x: _mish_slopes(x)[1],
    _constant(0.6443),
    _constant(0.5885),
    torch.abs,
)
ELU = Smooth(
    F.elu,
    lambda x: x.clamp_max(0).exp(),
    lambda x: torch.where(x > 0, 0.0, x.clamp_max(0).exp()),
    _constant(1.0),
    _constant(_UNKNOWN),
    torch.ones_like,
)
LOG = Smooth(
    torch.log,
    torch.reciprocal,
    lambda x: -x.square().reciprocal(),
    lambda low, high: up(low.square().reciprocal()),
    lambda low, high: up(2 / low**3),
)
SIN = Smooth(torch.sin, torch.cos, lambda x: -torch.sin(x), _constant(1.0), _constant(1.0))
COS = Smooth(
    torch.cos, lambda x: -torch.sin(x), lambda x: -torch.cos(x), _constant(1.0), _constant(1.0)
)


def monomial(n: int) -> Smooth:
    """Return x^n for n > 2."""

    def derivative(k: int) -> Callable[[Tensor, Tensor], Tensor]:
        factor = float(math.perm(n, k))
        return lambda low, high: up(
            factor * torch.maximum(low.abs(), high.abs()) ** (n - k), 2 * n + 8
        )

    return Smooth(
        lambda x: x**n,
        lambda x: n * x ** (n - 1),
        lambda x: n * (n - 1) * x ** (n - 2),
        derivative(2),
        derivative(3),
    )


def raise_power(input: Any, exponent: Any) -> Form:
    """Powers: whole ones of any number, some others of positive numbers."""
    if not isinstance(input, Form) or not isinstance(exponent, int | float):
        raise NoRuleError("pow with an exponent for every entry")
    if exponent == 1:
        return input.copy()
    if exponent > 2 and exponent == int(exponent):
        return relax(input, monomial(int(exponent)))
    return power(input, exponent)


def softplus(input: Form, beta: float | int = 1, threshold: float | int = 20) -> Form:
    """Return log(1 + e^(beta x)) / beta; torch takes x for it above the threshold."""
    z = scale(input, float(beta))
    result = relax(z, SOFTPLUS)
    beyond = up(torch.exp(torch.tensor(-float(threshold), dtype=torch.float64)), 32)
    result.slack = up(result.slack + beyond * (z.range()[1] > threshold))
    return result if beta == 1 else scale(result, 1 / beta, roundings=2)


def log_sigmoid(input: Form) -> Form:
    """Return log sigmoid(x) = -softplus(-x)."""
    return neg(relax(neg(input), SOFTPLUS))


def elu(input: Form, alpha: float | int = 1.0, inplace: bool = False) -> Form:
    """Return x where x > 0, else alpha (e^x - 1); its slope jumps at 0 unless alpha is 1."""
    if alpha == 1:
        return relax(input, ELU)
    below = scale(add(relax(clamp(input, None, 0.0), EXP), -1.0), alpha)
    return add(relu(input), below)


def selu(input: Form, inplace: bool = False) -> Form:
    """An ELU, with torch's constants."""
    alpha, gain = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return scale(elu(input, alpha), gain)


def glu(input: Form, dim: int = -1) -> Form:
    """The first half of an axis, times the sigmoid of the second."""
    first, second = input.chunk(2, dim)
    return mul(first, relax(second, SIGMOID))  # type: ignore[arg-type]


def _unary(f: Smooth, **known: Any) -> Callable[[Form], Form]:
    return lambda input: relax(input, f, **known)


def _mish(input: Form, inplace: bool = False) -> Form:
    return relax(input, MISH)


RULES: dict[str, Callable[..., Any]] = {
    "pow": raise_power,
    "erf": _unary(ERF),
    "log": _unary(LOG, positive=True),
    "sin": _unary(SIN),
    "cos": _unary(COS),
    "mish": _mish,
    "softplus": softplus,
    **dict.fromkeys(("log_sigmoid", "logsigmoid"), log_sigmoid),
    "elu": elu,
    "glu": glu,
    "selu": selu,
}
"""What these functions do to forms."""
