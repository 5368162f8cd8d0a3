"""One head's attention map, or one row averaged over all samples, for drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from lipaudit.errors import UsageError
from lipaudit.measures.by_layer import sum_windows
from lipaudit.measures.measure import Part, Values, join_parts
from lipaudit.measures.tokens import MOST
from lipaudit.models.attention.capture import Layer
from lipaudit.tables import Array
from lipaudit.tables.report import Attended
from lipaudit.theory import softmax

SIDE = 256
"""Largest side of a stored map; longer maps are stored as means of square blocks."""


def draw(layer: Layer, head: int, query: int | None) -> dict[str, Values]:
    """Return the map of the batch's first sample, or one query's row in every sample.

    Raises:
        UsageError: the layer has no such head.
    """
    count = layer.attention.q.shape[1]
    if head >= count:
        raise UsageError(
            f"there is no head {layer.site.index}.{head}: the layer has {count}",
            f"Give a head from {layer.site.index}.0 to {layer.site.index}.{count - 1}.",
        )
    heads = layer.attention.pick(slice(head, head + 1)).to(torch.float64)
    if query is not None:  # the row of the query, ||M|| and g_1: means over a sample's windows
        p = heads.rows(query, query + 1)[:, 0]
        row = p[:, 0] if p.shape[1] else heads.q.new_zeros(len(p), heads.k.shape[2])
        there = (row.sum(-1, keepdim=True) > 0).to(row.dtype)
        norms = torch.stack([softmax.softmax_norm(row), softmax.g(row)], -1) * there
        arrays = {"row": row, "row_norms": norms}
        sums = {n: sum_windows(t, heads.sample, layer.samples) for n, t in arrays.items()}
        number = sum_windows(there, heads.sample, layer.samples)  # 0 gives NaN: no such row
        return {name: (total / number).cpu().numpy() for name, total in sums.items()}
    # The map of the first window without padding, in chunks of rows.
    heads = heads.row(0)
    queries, keys = heads.q.shape[2], heads.k.shape[2]
    every = torch.arange(queries)
    real = every if heads.valid is None else every[heads.valid[0].cpu()]
    columns = real if queries == keys else torch.arange(keys)
    block = -(-max(len(real), len(columns)) // SIDE)
    size = block * max(1, SIDE // block)
    pooled = []
    for start in range(0, len(real), size):
        group = real[start : start + size]
        p = heads.rows(int(group[0]), int(group[-1]) + 1)[0, 0][group - group[0]][:, columns]
        pooled.append(F.avg_pool2d(p[None], block, ceil_mode=True, count_include_pad=False)[0])
    tokens = np.array([len(real), len(columns)])
    return {"map": torch.cat(pooled).cpu().numpy(), "map_tokens": tokens}


def arrays(parts: Sequence[Part], head: str, query: int | None) -> dict[str, Array]:
    """Name the drawn arrays: map@HEAD of the first sample, or row@HEAD,QUERY and its norms.

    Raises:
        UsageError: no sample has such a query.
    """
    if query is None:
        drawn = parts[0].facts["maps"][head]
        return {f"{name}@{head}": Array.of(value) for name, value in drawn.items()}
    norms = join_parts(parts, "row_norms")
    known = ~np.isnan(norms[:, 0])
    if not known.any():
        raise UsageError(
            f"no sample has a query {query}", "Give a smaller query number (the first is 0)."
        )
    keys = max(part.values["row"].shape[1] for part in parts)
    rows = [np.pad(r, ((0, 0), (0, keys - r.shape[1]))) for p in parts for r in [p.values["row"]]]
    whole = np.concatenate(rows)
    drawn = {"row": whole[known].mean(0), "row_norms": norms[known].mean(0)}
    if known[0]:
        drawn["first_row"] = whole[0]
    return {f"{name}@{head},{query}": Array.of(value) for name, value in drawn.items()}


def map_tokens(parts: Sequence[Part], drawn: Mapping[str, Array]) -> dict[str, Attended]:
    """Describe the tokens of the first sample, if they are the tokens of the drawn map."""
    known = Attended(**parts[0].facts["attended"])
    count, whose = len(known.tokens), {}
    for name, array in drawn.items():
        kind, _, head = name.partition("@")
        if kind == "map":
            fits = {*drawn[f"map_tokens@{head}"].data, *array.shape} == {count}
        else:  # tokens beyond these are padding, which is not attended to
            long = len(array.data) >= count and not any(array.data[count:])
            fits = kind == "first_row" and long
        if fits and 0 < count <= MOST:
            whose[name] = known
    return whose
