"""Rows of long attention maps, on the keys that they can see."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.heads import Heads


def rows_in_reach(
    heads: Heads, start: int, stop: int
) -> tuple[Float[Tensor, "batch heads rows keys"], slice]:
    """Return P of the queries start..stop-1 and which keys its columns are; it is 0 on others.

    Of a causal mask these are the keys up to the last query, of a sliding window those from the
    first window to the last.

    >>> from lipaudit.theory.heads import affine_heads
    >>> heads = replace(affine_heads(torch.zeros(1, 8, 3), *torch.ones(3, 1, 3, 4)), causal=True)
    >>> rows_in_reach(heads, 1, 2)
    (tensor([[[[0.5000, 0.5000]]]]), slice(0, 2, None))
    """
    keys = _keys(heads, start, stop)
    bias = heads.bias if heads.bias is None or keys.start is None else heads.bias[..., keys]
    k, v = heads.k[:, :, keys], heads.v[:, :, keys, :0]
    there = replace(heads, k=k, v=v, bias=bias, x_kv=None, to_k=None, to_v=None, out=None)
    return there.rows(start, stop), keys


def _keys(heads: Heads, start: int, stop: int) -> slice:
    bias = heads.bias
    if bias is None:
        return slice(0, stop) if heads.causal else slice(None)
    if bias.dtype != torch.bool or bias.shape[-1] == 1 or heads.causal:
        return slice(None)
    rows = bias if bias.shape[-2] == 1 else bias[..., start:stop, :]
    seen = rows.flatten(0, 2).any(0).nonzero()
    return slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
