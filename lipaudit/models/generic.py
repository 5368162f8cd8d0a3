"""Points at which nothing is equal, zero or constant by accident: what a model is shows there.

On a black image all tokens are alike: a norm of queries looks affine, heads look repeated, two
inputs look like one, and a model that mixes samples looks as if it did not.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.models.net import Net

FEWEST_TOKENS = 16  # one token says nothing: a rotary position of 0 is no rotation
MOST_TOKENS = 1024  # autograd keeps whole maps: a layer is what it is at this length too


def make_generic(net: Net, batch: Batch) -> tuple[Net, Batch, Batch]:
    """Return a net, one generic sample beside a companion, and beside another companion.

    Both come of the first sample of the batch (of text: the longest), moved by seeded noise: half
    of it noise inside the box, or noise of its own size where there is none. Text keeps its token
    ids, and so its special tokens and masks; the returned net moves their embeddings instead.
    """
    if net.kind == "text":
        ids = _take_longest(net, batch)
        return (
            _move_embeddings(net),
            _make_pair(batch, ids, ids.flip(-1)),
            _make_pair(batch, ids, ids),
        )
    x = batch.x[:1]
    one, other, third = (_add_noise(net, t, seed) for seed, t in enumerate((x, x.flip(-1), x)))
    return net, _make_pair(batch, one, other), _make_pair(batch, one, third)


def shape_at(net: Net, batch: Batch) -> torch.Size:
    """Return the shape of the sample that `make_generic` makes of a batch."""
    return (_take_longest(net, batch) if net.kind == "text" else batch.x[:1]).shape[1:]


def find_token_embeddings(net: Net) -> list[nn.Module]:
    """Return the token embedding of a text model and every embedding that shares its weight."""
    if net.kind != "text" or net.entry is None:
        return []
    table = getattr(net.entry, "weight", None)
    tied: list[nn.Module] = [
        m for m in net.module.modules() if isinstance(m, nn.Embedding) and m.weight is table
    ]
    return tied or [net.entry]


def _make_pair(batch: Batch, one: Tensor, companion: Tensor) -> Batch:
    ids = (batch.ids[0], batch.ids[0] + "-companion")
    return Batch(torch.cat([one, companion]), None, ids)


def _take_longest(net: Net, batch: Batch) -> Tensor:
    """Return the longest sample without its padding, repeated or cut to a useful length."""
    ids = batch.x[:1]
    if batch.mask is not None:
        i = int(batch.mask.sum(1).argmax())
        ids = batch.x[i : i + 1, batch.mask[i]]
    wanted = max(ids.shape[1], min(FEWEST_TOKENS, net.sample_shape[0]))
    return ids.repeat(1, -(-wanted // ids.shape[1]))[:, : min(wanted, MOST_TOKENS)]


def _add_noise(net: Net, x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if net.box is None:
        return x + _measure_size(x) * torch.randn(x.shape, generator=generator).to(x)
    low, high = net.box
    noise = low + (high - low) * torch.rand(x.shape, generator=generator).to(x)
    return 0.5 * (x + noise)


def _measure_size(x: Tensor) -> Tensor:
    """Return the root mean square of every token, or 1 where it is zero."""
    size = x.square().mean(-1, keepdim=True).sqrt()
    return torch.where(size == 0, 1.0, size)


def _move_embeddings(net: Net) -> Net:
    """Return the same model with noise on its token embeddings, the same in every pass."""

    def call(x: Tensor, mask: Tensor | None) -> Any:
        seeds = count()

        def move(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(next(seeds))
            return out + _measure_size(out) * torch.randn(out.shape, generator=generator).to(out)

        with ExitStack() as hooks:
            for module in find_token_embeddings(net):
                hooks.callback(module.register_forward_hook(move).remove)
            return net.call(x, mask)

    return replace(net, call=call)
