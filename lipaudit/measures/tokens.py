"""The tokens of samples: their text, their place in an image, their share of a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.data.images import thumbnail
from lipaudit.errors import LipauditError
from lipaudit.models.attention.capture import capture
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.net import Net

MOST = 512
"""Number of leading tokens of a sample that are stored."""
LETTERS = 40
"""Longest text shown for a token: reserved names and runs of signs may be long."""
MOST_EXTRA = 8
"""Largest number of extra tokens beside the image patches (class token, registers)."""
MOVED = 1e-3
"""Share of the largest token change below which a token counts as unchanged (rounding)."""
CLASS_TOKENS = {"cls_token", "class_token", "class_embedding"}
"""Names of the class token parameter."""


def names(net: Net, batch: Batch) -> list[tuple[str, ...]]:
    """Return the tokens of each sample as text, without padding.

    Token ids without text become numbers; tokens of other inputs become positions.
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
        batch: the samples; padding has no share.
        gradient: (batch, tokens, ...), of any length.

    Returns:
        The shares of each sample; empty if its gradient is 0 or NaN.
    """
    # In units of the largest entry, so that no square underflows.
    rows = gradient.flatten(2)
    largest = rows.abs().amax((1, 2), keepdim=True)
    squares = (rows / largest).to("cpu", torch.float64).square().sum(2)
    each = (row / row.sum() for row in _real(batch, squares))
    return [tuple(row.tolist()) if bool(row.isfinite().all()) else () for row in each]


def gradients(net: Net, batch: Batch, gradient: Tensor, of: str) -> dict[str, dict[str, Any]]:
    """Describe, by sample id, each token's share of a gradient, as plain values.

    For prompts with continuations, only the tokens of the prompt are listed.
    """
    # A waveform is a number for each time: those are no tokens.
    if gradient.ndim < 3 or batch.x.ndim < 2 or gradient.shape[:2] != batch.x.shape[:2]:
        return {}
    batch = replace(batch, mask=net.free(batch))
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
    """Return the values of each sample at tokens that are not padding."""
    values = values.cpu()
    if batch.mask is None:
        return list(values)
    return [row[mask] for row, mask in zip(values, batch.mask.cpu(), strict=True)]


def describe_tokens(net: Net, batch: Batch) -> dict[str, Any]:
    """Describe the tokens of the first sample and their places, as plain values."""
    first = batch[:1].trim()
    described: dict[str, Any] = {"sample": first.ids[0], "tokens": ()}
    if net.kind == "text":
        described["tokens"] = names(net, first)[0]
    if net.kind != "image":
        return described
    with suppress(LipauditError):  # only for display
        count, rows, columns, start = patches(net, first) or (0, 0, 0, 0)
        written = [f"extra {i}" for i in range(count)]
        parameters = {name.rpartition(".")[2] for name, _ in net.module.named_parameters()}
        if start and parameters & CLASS_TOKENS:
            written[0] = "CLS"
        for patch in range(rows * columns):
            written[start + patch] = "patch {},{}".format(*divmod(patch, columns))
        image = thumbnail(first.x[0], net.box) if count else ""
        place = {"grid": (rows, columns), "first": start, "image": image}
        described |= {"tokens": tuple(written), **place}
    return described


def patches(net: Net, sample: Batch) -> tuple[int, int, int, int] | None:
    """Find the image patches behind the tokens of the first layer, by changing the corners.

    Returns:
        The number of tokens, rows and columns of patches, and the index of the first patch token;
        None if the tokens are not patches in row order.
    """
    sites = find_layers(net, sample)

    def read_queries(x: Tensor) -> Tensor:
        batch, first = Batch(x, None, sample.ids * len(x)), {sites[0].index}
        read = capture(
            net,
            sites,
            batch,
            lambda layer: layer.attention.q.cpu(),
            layers=first,
            projections=False,
        )
        return read[0]

    (height, width), count = sample.x.shape[2:], read_queries(sample.x).shape[2]
    # A grid fits if each corner of the picture, when changed, moves the queries of the token in
    # that corner and of no other: attention mixes tokens only behind them.
    for side in range(1, min(height, width) + 1):  # square patches
        rows, columns = height // side, width // side
        whole = side * rows == height and side * columns == width
        if not (whole and 0 <= count - rows * columns <= MOST_EXTRA and rows * columns > 1):
            continue
        corners = [(i, j) for i in (0, rows - 1) for j in (0, columns - 1)]
        probes = sample.x.repeat(5, 1, 1, 1)
        for probe, (i, j) in zip(probes[1:], corners, strict=True):
            patch = probe[:, i * side : (i + 1) * side, j * side : (j + 1) * side]
            patch += torch.where(patch < 0.5, 0.25, -0.25)
        q = read_queries(probes)
        if q.shape[0] != len(probes) or not q.numel():
            return None
        change = (q[1:] - q[:1]).abs().amax((1, 3))
        moved = [row.nonzero().flatten().tolist() for row in change > MOVED * change.amax()]
        start = moved[0][0] if moved[0] else 0
        if moved == [[start + i * columns + j] for i, j in corners]:
            return count, rows, columns, start
    return None
