"""Generic points: inputs at which nothing is equal, zero or constant by accident.

On a black image all tokens are equal: a normalisation of queries looks affine, heads look
repeated, two inputs look like one, and mixing of samples stays invisible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.models.net import Net

FEWEST_TOKENS = 16  # with one token, a rotary position of 0 is no rotation
MOST_TOKENS = 1024  # long enough to show the structure, short enough: autograd keeps whole maps


def make_generic(net: Net, batch: Batch) -> tuple[Net, Batch, Batch]:
    """Return a net, and two pairs of samples: a generic sample beside each of two companions.

    All come from the first sample of the batch (for texts: the longest) plus seeded noise: half
    noise inside the box, or noise of the sample's size without a box. Texts keep their token ids,
    and so their special tokens and masks; the returned net adds noise to the embeddings instead.
    """

    def call(x: Tensor, mask: Tensor | None) -> Any:
        seeds = count()  # from the start in every pass, so that all passes have the same noise

        def move(out: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(next(seeds))
            return out + _measure_size(out) * torch.randn(out.shape, generator=generator).to(out)

        with watch_embeddings(net, move):
            return net.call(x, mask)

    x = _take_longest(net, batch) if net.kind == "text" else batch.x[:1]
    samples = [x, x.flip(-1), x]
    for seed, t in enumerate(samples if net.kind != "text" else ()):
        generator = torch.Generator().manual_seed(seed)
        if net.box is None:
            noise = torch.randn(x.shape, generator=generator).to(x)
            samples[seed] = t + _measure_size(t) * noise
        else:
            low, high = net.box
            noise = low + (high - low) * torch.rand(x.shape, generator=generator).to(x)
            samples[seed] = 0.5 * (t + noise)
    ids = (batch.ids[0], batch.ids[0] + "-companion")
    pairs = [Batch(torch.cat([samples[0], other]), None, ids) for other in samples[1:]]
    return replace(net, call=call) if net.kind == "text" else net, pairs[0], pairs[1]


@contextmanager
def watch_embeddings(net: Net, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Pass the outputs of a text model's token embedding through `change` (None keeps them).

    So are those of every embedding that shares its weight.
    """
    with ExitStack() as hooks:
        for module in _find_token_embeddings(net):
            hooks.enter_context(module.register_forward_hook(lambda _m, _args, out: change(out)))
        yield


def _find_token_embeddings(net: Net) -> list[nn.Module]:
    # A function of its own: a converted weight must not live as long as the hooks.
    if net.kind != "text" or net.entry is None:
        return []
    table = getattr(net.entry, "weight", None)
    tied: list[nn.Module] = [
        m for m in net.module.modules() if isinstance(m, nn.Embedding) and m.weight is table
    ]
    return tied or [net.entry]


def shape_at(net: Net, batch: Batch) -> torch.Size:
    """Return the shape of the generic sample of a batch."""
    return (_take_longest(net, batch) if net.kind == "text" else batch.x[:1]).shape[1:]


def _take_longest(net: Net, batch: Batch) -> Tensor:
    """Return the longest sample without its padding, repeated or cut to a useful length."""
    ids = batch.x[:1]
    if batch.mask is not None:
        i = int(batch.mask.sum(1).argmax())
        ids = batch.x[i : i + 1, batch.mask[i]]
    wanted = max(ids.shape[1], min(FEWEST_TOKENS, net.input_shape[0]))
    return ids.repeat(1, -(-wanted // ids.shape[1]))[:, : min(wanted, MOST_TOKENS)]


def _measure_size(x: Tensor) -> Tensor:
    """Return the root mean square of every token, or 1 where it is zero."""
    size = x.square().mean(-1, keepdim=True).sqrt()
    return torch.where(size == 0, 1.0, size)
