"""Where Lanczos starts: near what grows most where the tokens act through the values alone.

Without the derivative of P, J is P kron W_V^T: P mixes the tokens, W_V the channels. Its leading
left singular vector is J's own where attention is weak, and often near it elsewhere. For a single
head that vector is a Kronecker product. For all heads together it is sought among the images of
b kron y, for one b that all maps together send far: y is then the leading singular vector of a
matrix as small as W_V, with or without W_O behind it, and a step towards it costs little beside a
product with J.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lipaudit.theory.exact.attend import Attend
from lipaudit.theory.exact.products import HeadProducts, ScaledHeads, Through, value_weight
from lipaudit.theory.spectral.lanczos import Products, random_starts, spectral_norms

_TOKEN_STEPS = 4  # power steps: the first singular value of a map stands apart
_CHANNEL_STEPS = 12  # Lanczos steps: those of weights crowd


def head_guess(products: HeadProducts) -> Tensor:
    """Return the leading left vector of P kron W_V^T of every problem, (problems, n dv), or 0."""
    attend, weight = products.attend, value_weight(products)
    if weight is None:
        return torch.zeros_like(attend.o).flatten(1)
    # The norm and left vector of a Kronecker product are those of its factors.
    tokens = _token_images(attend, attend.v.new_ones(1))
    values, vectors = torch.linalg.eigh(weight.mT @ weight)
    channels = values[:, -1:].clamp_min(0.0).sqrt() * vectors[..., -1]
    return (tokens.mT * channels.repeat(len(tokens) // len(channels), 1)[:, None]).flatten(1)


def layer_guess(family: ScaledHeads | Through) -> Tensor:
    """Return what all values together make of the b kron y they stretch most, one a row, or 0."""
    layer, weight = family.layer, value_weight(family.layer)
    heads, (count, n, dv) = layer.heads, layer.attend.o.shape
    if weight is None:
        return layer.attend.o.new_zeros(count // heads, n * family.channels)
    tokens = _token_images(layer.attend, family.sizes).view(-1, heads, n)
    flat, inner = weight.transpose(0, 1).flatten(1), tokens @ tokens.mT

    def select(index: Tensor) -> Products:
        some = inner[index.to(inner.device)]
        return lambda y: family.returned((y @ flat).view(-1, heads, dv), some).flatten(1) @ flat.mT

    start = random_starts([0], len(flat)).to(flat).expand(len(inner), -1)
    few = partial(spectral_norms, tol=1e-3, max_steps=_CHANNEL_STEPS, within=math.inf)
    y = few(select, start, vectors=True).vector
    assert y is not None
    return family.image((y @ flat).view(-1, heads, dv), tokens)


def _token_images(attend: Attend, sizes: Tensor) -> Tensor:
    """P b of every problem, (problems, 1, n), for one b a row, shared by as many heads as sizes.

    Power steps on sum_h size_h P_h^T P_h are enough for a guess.
    """
    heads = len(sizes)
    rows = attend.v.new_ones(len(attend.q), 1, attend.q.shape[1])
    for _ in range(_TOKEN_STEPS):
        back = attend.maps.left(rows).view(-1, heads, attend.k.shape[1])
        b = normalize((sizes[:, None] * back).sum(1, keepdim=True), dim=-1)
        rows = attend.maps.right(b.repeat_interleave(heads, 0))
    return rows
