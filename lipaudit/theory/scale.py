"""Powers of two, and heads with values rescaled to size one.

The Jacobian of a head and all its bounds are homogeneous in W_V. Squares of a head that weight
decay has shrunk to 1e-20 underflow in single precision. So everything is computed for W_V / c with
a power of two c, and multiplied by c, which changes no digit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.theory.heads import Heads, Projection


def powers_of_two(exponent: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return 2^exponent without rounding, on the CPU (`torch.ldexp` computes in float32).

    >>> powers_of_two(torch.tensor([1, -2]))
    tensor([2.0000, 0.2500], dtype=torch.float64)
    """
    powers = [math.ldexp(1.0, k) for k in exponent.flatten().tolist()]
    return torch.tensor(powers, dtype=torch.float64).view(exponent.shape)


def shift_exponent(
    t: Float[Tensor, "*shape"], exponent: Int[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """Return t 2^exponent, exact if t can hold it: in two steps, as 2^exponent may overflow.

    >>> shift_exponent(torch.tensor([3.0, 2.0**-140]), torch.tensor([1, 139]))
    tensor([6.0000, 0.5000])
    """
    exponent = exponent.cpu()
    half = exponent // 2
    first, second = powers_of_two(torch.stack([half, exponent - half])).to(t)
    return t * first * second


def times_power(
    z: Float[Tensor, "problems ..."], exponent: Int[Tensor, " problems"]
) -> Float[Tensor, "problems ..."]:
    """Return z 2^exponent, with one exponent per problem.

    >>> times_power(torch.tensor([[3.0], [3.0]]), torch.tensor([1, -2]))
    tensor([[6.0000],
            [0.7500]])
    """
    return shift_exponent(z, exponent.view(-1, *[1] * (z.ndim - 1)))


_SWAMPED = 16
"""Times the values that their bias may be: it drops out of J, but it costs them their digits.

Not with a sink, where the rows of P sum to less than 1: there the bias acts.
"""


def unit_values(heads: Heads) -> tuple[Heads, Float[Tensor, " heads"]]:
    """Return the heads with values divided by c, and c of every head, float64 on the CPU.

    c is the power of two next to the largest entry of Phi^v, or of v where that is constant.

    >>> from lipaudit.theory.heads import affine_heads
    >>> heads = affine_heads(torch.ones(1, 2, 3), *torch.full((3, 2, 3, 4), 1e-30))
    >>> unit, c = unit_values(heads)
    >>> unit.v[0, 0, 0], c[0] < 1e-29, torch.equal(unit.v * c[0].float(), heads.v)
    (tensor([1.9015, 1.9015, 1.9015, 1.9015]), tensor(True), True)
    """
    to_v = heads.to_v
    if to_v is None:
        exponents = _exponents(heads.v.abs().amax((0, 2, 3)))
        v = shift_exponent(heads.v, -exponents[:, None, None])
        return heads.with_same_map(v=v), powers_of_two(exponents)
    # An expanded weight stays expanded: heads that are normalised together share it.
    weight = to_v.weight[:1] if to_v.weight.stride(0) == 0 else to_v.weight
    by_weight = _exponents(weight.abs().amax((1, 2)))
    weight = shift_exponent(weight, -by_weight[:, None, None]).expand_as(to_v.weight)
    bias = None if to_v.bias is None else shift_exponent(to_v.bias, -by_weight[:, None])
    unit, exponents = replace(to_v, weight=weight, bias=bias), by_weight.expand(len(to_v.weight))
    if to_v.local is not None:
        behind = _exponents(to_v.local.abs().amax((0, 2, 3, 4)))
        unit = replace(unit, local=shift_exponent(to_v.local, -behind[:, None, None, None]))
        exponents = exponents + behind
    v = _values(heads, unit, exponents)
    return heads.with_same_map(v=v, to_v=unit), powers_of_two(exponents)


def scale_values(heads: Heads, gains: Float[Tensor, " heads"]) -> Heads:
    """Return the heads with values times a number each, as far as J depends on them.

    >>> from lipaudit.theory.heads import affine_heads
    >>> heads = affine_heads(torch.ones(1, 2, 3), *torch.ones(3, 2, 3, 4))
    >>> scale_values(heads, torch.tensor([1.0, 0.5])).to_v.weight[:, 0, 0]
    tensor([1.0000, 0.5000])
    """
    gains = gains.to(heads.v)[:, None, None]
    to_v = heads.to_v and replace(heads.to_v, weight=gains * heads.to_v.weight, bias=None)
    return heads.with_same_map(v=gains * heads.v, to_v=to_v)


def unit_matrices(stack: Float[Tensor, "heads n m"]) -> tuple[Float[Tensor, "heads n m"], float]:
    """Return matrices divided by c, the power of two next to the largest entry of all, and c.

    >>> unit_matrices(torch.full((2, 1, 1), 12.0))[1]
    16.0
    """
    exponent = _exponents(stack.abs().amax())
    return shift_exponent(stack, -exponent), 2.0 ** int(exponent)


def _values(heads: Heads, unit: Projection, exponents: Tensor) -> Tensor:
    """Return v / c; if the bias dominates affine values, without it, as X W_V."""
    v = shift_exponent(heads.v, -exponents[:, None, None])
    if unit.local is not None or unit.bias is None or heads.sink is not None:
        return v
    bias = unit.bias[:, None]
    if (bias.abs().amax((1, 2)) <= _SWAMPED * (v - bias).abs().amax((0, 2, 3))).all():
        return v
    source = heads.x if heads.x_kv is None else heads.x_kv
    return source[:, None] @ unit.weight


def _exponents(largest: Float[Tensor, "*heads"]) -> Int[Tensor, "*heads"]:
    """Return the exponents of positive numbers, on the CPU; 0 for 0."""
    return torch.frexp(largest.cpu()).exponent
