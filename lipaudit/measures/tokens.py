"""The tokens of samples: what they are called, and how a gradient is shared out among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.models.net import Net

MOST = 512
"""So many tokens of a sample are kept, from its first on."""
LETTERS = 40
"""How much of a token is written: names of reserved ones and runs of signs may be long."""


def names(net: Net, batch: Batch) -> list[tuple[str, ...]]:
    """Return how the tokens of each sample are written, without padding.

    Token ids that cannot be spelled are numbers; of tokens that are no text, their positions.
    """
    if net.kind != "text":
        return [tuple(map(str, range(batch.x.shape[1])))] * len(batch)
    lexicon = None if net.lexicon is None else net.lexicon()
    written: dict[int, str] = {}
    for token in set(batch.x.flatten().tolist()):
        written[token] = (str(token) if lexicon is None else lexicon.name(token))[:LETTERS]
    return [tuple(written[token] for token in row.tolist()) for row in _real(batch, batch.x)]


def shares(batch: Batch, gradient: Tensor) -> list[tuple[float, ...]]:
    """Return per sample ||g_t||^2 / sum_s ||g_s||^2 of a gradient g over its tokens t.

    Args:
        batch: the samples; what is padded has no share.
        gradient: (batch, tokens, ...), of any length.

    Returns:
        The shares of each sample; nothing where its gradient is 0 or no number.
    """
    rows = gradient.flatten(2)
    largest = rows.abs().amax((1, 2), keepdim=True)
    squares = (rows / largest).to("cpu", torch.float64).square().sum(2)
    each = (row / row.sum() for row in _real(batch, squares))
    return [tuple(row.tolist()) if bool(row.isfinite().all()) else () for row in each]


def gradients(net: Net, batch: Batch, gradient: Tensor, of: str) -> dict[str, dict[str, Any]]:
    """Describe, by sample id, how a gradient is shared out among tokens, in plain values."""
    if batch.x.ndim < 2 or gradient.shape[:2] != batch.x.shape[:2]:
        return {}
    both = zip(batch.ids, names(net, batch), shares(batch, gradient), strict=True)
    return {
        name: {
            "of": of,
            "tokens": tokens[:MOST],
            "shares": tuple(float(f"{share:.6g}") for share in parts[:MOST]),
            "left_out": len(tokens[MOST:]),
        }
        for name, tokens, parts in both
        if parts
    }


def _real(batch: Batch, values: Tensor) -> Sequence[Tensor]:
    """Return of each sample what belongs to tokens that are not padded."""
    values = values.cpu()
    if batch.mask is None:
        return list(values)
    return [row[mask] for row, mask in zip(values, batch.mask.cpu(), strict=True)]
