"""The measure `attention`: how each head distributes its attention, row by row.

Every layer's map is met once, in chunks of query rows in float64, and only sums, maxima and
histograms are kept: a map of 8192 x 8192 is never held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.measures.base import Measure, Options, Part, joined, notes, number, sample_ids
from lipaudit.measures.layers import Reduced, by_layer, head_names, summed
from lipaudit.models.capture import Layer
from lipaudit.models.net import Net
from lipaudit.results import Array, AttentionRow, Section
from lipaudit.theory import softmax
from lipaudit.theory.attention import Heads, per_sample
from lipaudit.theory.lanczos import random_starts, spectral_norms

SHARES = {
    "uniform": softmax.UNIFORM,
    "intermediate": softmax.INTERMEDIATE,
    "categorical": softmax.CATEGORICAL,
}
MEANS = (
    "top1",
    "top2",
    "g1",
    "softmax_norm",
    "g1_ratio",
    "gk_ratio",
    "entropy",
    "entropy_normalized",
    "support",
    *SHARES,
)
BINS = 50
RATIO = (1.0, 1.5)
"""Range of the histograms of g_1 / ||M||, the last bin open."""
CHUNK = 2**20
"""Entries of P that are held at a time (8 MB in float64, and as much again a few times)."""


class AttentionOptions(Options):
    """Options of `lipaudit attention`.

    Attributes:
        gamma: rows with g_1 above it are intermediate.
        k: the k of g_1 / g_k.
        p_norm_tokens: ||P|| is left out above this many tokens.
    """

    gamma: float = Field(0.1, gt=0, lt=0.25)
    k: int = Field(10, gt=1)
    p_norm_tokens: int = 2048


def run(net: Net, batches: Iterable[Batch], options: AttentionOptions) -> Iterator[Part]:
    """Yield the sums, maxima and histograms of every head, per sample."""

    def reduce(layer: Layer, batch: Batch) -> Reduced:
        heads = layer.attention.to(torch.float64)
        reduced = _statistics(heads, layer.samples, options)
        tokens = torch.full((layer.samples, heads.q.shape[1]), heads.k.shape[2])
        p_norm = per_sample(_p_norm(heads, options), heads.sample)
        return reduced | {"tokens": tokens, "p_norm": p_norm}

    yield from by_layer(
        net, batches, options.layers, reduce, lambda sites: {"heads": head_names(sites)}
    )


def row_statistics(p: Tensor, *, k: int, gamma: float) -> dict[str, Tensor]:
    """Return each statistic of `MEANS` for each row of P, NaN where it does not count.

    A row of zeros (a padded query) counts nowhere; one-key rows have no normalised entropy; rows
    with ||M|| = 0 no ratio; rows with at most k keys no g_1 / g_k; rows with fewer than 3 keys no
    regime.

    Args:
        p: rows of probabilities in float64, (..., n).
        k: the k of g_1 / g_k.
        gamma: threshold of the regimes.
    """
    keys = softmax.support(p)
    top = p.topk(min(2, p.shape[-1]), -1).values
    g1, norm, entropy = softmax.g(p), softmax.softmax_norm(p), softmax.entropy(p)
    regime = softmax.regimes(p, gamma)
    named = regime != softmax.LEFT_OUT
    found = {
        "top1": top[..., 0],
        "top2": top[..., 1] if p.shape[-1] > 1 else torch.zeros_like(g1),
        "g1": g1,
        "softmax_norm": norm,
        "g1_ratio": _where(norm > 0, g1 / norm),
        "gk_ratio": _where(keys > k, g1 / softmax.g(p, k)),
        "entropy": entropy,
        "entropy_normalized": _where(keys > 1, entropy / keys.to(p.dtype).log()),
        "support": entropy.exp(),
    }
    found |= {name: _where(named, (regime == code).to(p.dtype)) for name, code in SHARES.items()}
    return {name: _where(keys > 0, value) for name, value in found.items()}


def _where(counts: Tensor, value: Tensor) -> Tensor:
    return value.masked_fill(~counts, torch.nan)


def _statistics(heads: Heads, samples: int, options: AttentionOptions) -> Reduced:
    """Meet the rows of P in chunks, and reduce them per (sample, head)."""
    batch, count, queries = heads.q.shape[:3]
    keys = heads.k.shape[2]
    mass = heads.q.new_zeros(batch, count, keys)
    chunks = []
    for start in range(0, queries, max(1, CHUNK // (batch * count * keys))):
        p = heads.rows(start, min(queries, start + max(1, CHUNK // (batch * count * keys))))
        mass += p.sum(-2)
        found = row_statistics(p, k=options.k, gamma=options.gamma)
        chunks.append(torch.stack([found[name] for name in MEANS], -1))
    rows = torch.cat(chunks, 2)
    return _reduced(rows, heads.sample, samples) | _sinks(mass, heads.sample, samples)


def _reduced(rows: Tensor, sample: Tensor, samples: int) -> Reduced:
    """Reduce statistics per row, (batch, heads, rows, statistics), to sums and histograms."""
    counts = ~rows.isnan()
    visible = counts[..., MEANS.index("top1")]
    short = visible & ~counts[..., MEANS.index("uniform")]
    largest = rows[..., [MEANS.index("g1"), MEANS.index("softmax_norm")]].nan_to_num(0.0)
    ratio = rows[..., MEANS.index("g1_ratio")]
    position = (ratio - RATIO[0]) / (RATIO[1] - RATIO[0]) * BINS
    first, second = (rows[..., MEANS.index(name)] for name in ("top1", "top2"))
    joint = (first * BINS).nan_to_num(-1.0).clamp_max(BINS - 1).floor() * BINS
    joint += (2 * second * BINS).clamp_max(BINS - 1).floor()
    sums = {
        "total": rows.nan_to_num(0.0).sum(2),
        "count": counts.sum(2).to(rows.dtype),
        "short": short.sum(2).to(rows.dtype),
        "ratio_hist": _histogram(position.clamp(0, BINS - 1), ~ratio.isnan(), BINS),
        "joint_hist": _histogram(joint, visible, BINS * BINS).sum(1, keepdim=True),
    }
    reduced = {name: summed(value, sample, samples) for name, value in sums.items()}
    return reduced | {"largest": per_sample(largest.amax(2), sample)}


def _histogram(position: Tensor, counts: Tensor, bins: int) -> Tensor:
    """Count positions per (batch, head): (batch, heads, rows) to (batch, heads, bins)."""
    index = position.nan_to_num(0.0).long().clamp(0, bins - 1)
    empty = torch.zeros(*position.shape[:2], bins, dtype=torch.float64, device=position.device)
    return empty.scatter_add_(2, index, counts.to(empty.dtype))


def _sinks(mass: Tensor, sample: Tensor, samples: int) -> Reduced:
    """Mean mass on the first and on the most attended key, and where that one is."""
    each = summed(mass, sample, samples)
    share = each / each.sum(-1, keepdim=True)
    largest = share.max(-1)
    return {
        "sink": torch.stack([share[..., 0], largest.values], -1),
        "sink_token": largest.indices,
    }


def _p_norm(heads: Heads, options: AttentionOptions) -> Tensor:
    """Return ||P|| per (batch, head); NaN where the map is too large to hold."""
    batch, count, queries = heads.q.shape[:3]
    if max(queries, heads.k.shape[2]) > options.p_norm_tokens:
        return heads.q.new_full((batch, count), torch.nan)
    p = heads.attention().flatten(0, 1)

    def take(index: Tensor) -> Callable[[Tensor], Tensor]:
        part = p[index.to(p.device)]
        return lambda u: (part @ (u[:, None] @ part).mT)[..., 0]

    start = random_starts([options.seed], queries).to(p).expand(len(p), -1)
    valid = p.sum(-1) > 0
    return spectral_norms(take, start * valid, tol=1e-8).norm.view(batch, count).to(p.device)


def summarise(parts: Sequence[Part], options: AttentionOptions) -> list[Section]:
    """Make the section `attention`: a row per head, histograms over all rows."""
    total, count = joined(parts, "total").sum(0), joined(parts, "count").sum(0)
    with np.errstate(invalid="ignore"):
        means = np.where(count > 0, total / count, np.nan)
    largest = joined(parts, "largest").max(0)
    sink, token = joined(parts, "sink").mean(0), joined(parts, "sink_token")
    short, p_norm = joined(parts, "short").sum(0), joined(parts, "p_norm").mean(0)
    tokens = joined(parts, "tokens").max(0)
    rows = tuple(
        AttentionRow(
            **head._asdict(),
            tokens=int(tokens[i]),
            **{name: number(means[i, j]) for j, name in enumerate(MEANS)},
            g1_max=number(largest[i, 0]),
            softmax_norm_max=number(largest[i, 1]),
            sink_first=number(sink[i, 0]),
            sink_max=number(sink[i, 1]),
            sink_token=int(np.bincount(token[:, i]).argmax()),
            short_rows=int(short[i]),
            p_norm=number(p_norm[i]),
        )
        for i, head in enumerate(parts[0].facts["heads"])
    )
    ids = {"ids": sample_ids(parts)}
    settings = options.model_dump()
    found = Section(measure="attention", settings=settings, rows=rows, samples=ids)
    return [found.model_copy(update={"arrays": _arrays(parts), "notes": notes(parts)})]


def _arrays(parts: Sequence[Part]) -> dict[str, Array]:
    ratio = joined(parts, "ratio_hist").sum(0)
    joint = joined(parts, "joint_hist").sum((0, 1)).reshape(BINS, BINS)
    edges = np.linspace(0.0, 1.0, BINS + 1)
    return {
        "g1_ratio_hist": Array.of(ratio),
        "g1_ratio_edges": Array.of(np.linspace(*RATIO, BINS + 1)),
        "p1p2_hist": Array.of(joint),
        "p1p2_edges": Array.of(np.stack([edges, edges / 2])),
    }


ATTENTION = Measure(run, summarise, AttentionOptions, samples=32, batch=8)
