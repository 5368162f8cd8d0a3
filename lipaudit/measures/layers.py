"""What the measures of attention layers share: which layers, what heads are called, windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import UsageError
from lipaudit.measures.base import Part
from lipaudit.models.capture import Layer, capture
from lipaudit.models.net import Net
from lipaudit.models.sites import Site
from lipaudit.models.survey import survey
from lipaudit.results import Note

Facts = dict[str, Any]
Reduced = dict[str, Tensor]
"""Numbers of one layer: the first axis is the sample, the second the head."""


class HeadName(NamedTuple):
    """Where a head is."""

    layer: int
    head: int
    module: str


def head_names(sites: Sequence[Site]) -> list[HeadName]:
    """Return every head of the layers, ordered by (layer, head)."""
    return [
        HeadName(site.index, head, site.module) for site in sites for head in range(site.heads)
    ]


def chosen(sites: Sequence[Site], layers: Sequence[int] | None) -> tuple[Site, ...]:
    """Return the layers that were asked for.

    Raises:
        UsageError: a layer does not exist.
    """
    surplus = [layer for layer in layers or () if layer >= len(sites)]
    if surplus:
        raise UsageError(
            f"there is no attention layer {surplus[0]}: the model has {len(sites)}",
            f"Layers are counted from 0 to {len(sites) - 1}.",
        )
    return tuple(site for site in sites if layers is None or site.index in layers)


def by_layer(
    net: Net,
    batches: Iterable[Batch],
    layers: Sequence[int] | None,
    reduce: Callable[[Layer, Batch], Reduced],
    facts: Callable[[Sequence[Site]], Facts],
    *,
    projections: bool = True,
) -> Iterator[Part]:
    """Yield a Part per batch: `reduce` of every layer, joined along the heads; see `capture`."""
    sites: tuple[Site, ...] = ()
    for batch in batches:
        sites = sites or chosen(survey(net, batch), layers)
        found: list[Reduced] = []

        def visit(layer: Layer, batch: Batch = batch, found: list[Reduced] = found) -> None:
            found.append({k: v.cpu() for k, v in reduce(layer, batch).items()})

        wanted = {site.index for site in sites}
        capture(net, sites, batch, visit, layers=wanted, projections=projections)
        joined = {name: torch.cat([layer[name] for layer in found], 1) for name in found[0]}
        values = {name: t.numpy() for name, t in joined.items()}
        yield Part(batch.ids, values, facts(sites), open_notes(sites))


def open_notes(sites: Sequence[Site]) -> tuple[Note, ...]:
    """Say which layers have no closed form, and why: one note per reason."""
    reasons: dict[str, list[Site]] = {}
    for site in sites:
        if site.reason is not None:
            reasons.setdefault(site.reason, []).append(site)
    return tuple(
        Note(
            level="warning",
            code="no-closed-form",
            text=f"layers {', '.join(str(s.index) for s in found)} ({found[0].module}) "
            f"have no closed form: {reason}",
        )
        for reason, found in reasons.items()
    )


def summed(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Add up the batch rows (windows) of each sample."""
    return values.new_zeros(samples, *values.shape[1:]).index_add_(0, sample, values)
