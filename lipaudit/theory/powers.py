"""Powers of two: they change the scale of numbers, and nothing else about them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def powers_of_two(exponent: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return 2^exponent without rounding (`torch.ldexp` goes by way of float32), on the CPU.

    >>> powers_of_two(torch.tensor([1, -2]))
    tensor([2.0000, 0.2500], dtype=torch.float64)
    """
    powers = [math.ldexp(1.0, k) for k in exponent.flatten().tolist()]
    return torch.tensor(powers, dtype=torch.float64).view(exponent.shape)


def shifted(
    t: Float[Tensor, "*shape"], exponent: Int[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """Return t 2^exponent, exact while t can hold it: in two steps, for 2^exponent may be out.

    >>> shifted(torch.tensor([3.0, 2.0**-140]), torch.tensor([1, 139]))
    tensor([6.0000, 0.5000])
    """
    exponent = exponent.cpu()
    half = exponent // 2
    first, second = powers_of_two(torch.stack([half, exponent - half])).to(t)
    return t * first * second


def times_power(
    z: Float[Tensor, "problems ..."], exponent: Int[Tensor, " problems"]
) -> Float[Tensor, "problems ..."]:
    """Return z 2^exponent, an exponent for each problem.

    >>> times_power(torch.tensor([[3.0], [3.0]]), torch.tensor([1, -2]))
    tensor([[6.0000],
            [0.7500]])
    """
    return shifted(z, exponent.view(-1, *[1] * (z.ndim - 1)))
