"""One head's attention map, for drawing."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from lipaudit.errors import UsageError
from lipaudit.measures.measure import Part, Values
from lipaudit.measures.tokens import MOST
from lipaudit.models.attention.capture import Layer
from lipaudit.tables import Array
from lipaudit.tables.report import Attended

SIDE = 256
"""Largest side of a stored map; longer maps are stored as means of square blocks."""


def draw_map(layer: Layer, head: int) -> dict[str, Values]:
    """Return the map of a head for the batch's first sample: of its first window, no padding.

    Raises:
        UsageError: the layer has no such head.
    """
    count = layer.attention.q.shape[1]
    if head >= count:
        raise UsageError(
            f"there is no head {layer.site.index}.{head}: the layer has {count}",
            f"Give a head from {layer.site.index}.0 to {layer.site.index}.{count - 1}.",
        )
    heads = layer.attention.pick(slice(head, head + 1)).to(torch.float64).row(0)
    queries, keys = heads.q.shape[2], heads.k.shape[2]
    every = torch.arange(queries)
    real = every if heads.valid is None else every[heads.valid[0].cpu()]
    columns = real if queries == keys else torch.arange(keys)
    block = -(-max(len(real), len(columns)) // SIDE)
    size = block * max(1, SIDE // block)
    pooled = []
    for start in range(0, len(real), size):  # in chunks of rows, as the map may be large
        group = real[start : start + size]
        p = heads.rows(int(group[0]), int(group[-1]) + 1)[0, 0][group - group[0]][:, columns]
        pooled.append(F.avg_pool2d(p[None], block, ceil_mode=True, count_include_pad=False)[0])
    tokens = np.array([len(real), len(columns)])
    return {"map": torch.cat(pooled).cpu().numpy(), "map_tokens": tokens}


def describe_map(part: Part, head: str) -> tuple[dict[str, Array], dict[str, Attended]]:
    """Return the arrays of a drawn map, and its sample if its tokens are those of the map."""
    drawn = part.facts["maps"][head]
    sample = Attended(**part.facts["attended"])
    count = len(sample.tokens)
    fits = {*drawn["map_tokens"].tolist(), *drawn["map"].shape} == {count} and 0 < count <= MOST
    arrays = {f"{name}@{head}": Array.of(values) for name, values in drawn.items()}
    return arrays, {f"map@{head}": sample} if fits else {}
