"""What the measures of attention layers share: which layers, what heads are called, windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, StructureError, UsageError
from lipaudit.measures.measure import Part
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.checks import require_padding_is_ignored
from lipaudit.models.attention.sites import Site
from lipaudit.models.attention.survey import survey
from lipaudit.models.net import Net
from lipaudit.results import Note

SURVEYED: ContextVar[Callable[[Sequence[Site]], None]] = ContextVar(
    "SURVEYED", default=lambda _: None
)
"""Is told which layers are about to be measured, once that is known and before it takes time."""

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
    """Yield a Part per batch: `reduce` of every layer, joined along the heads; see `capture`.

    On a sample on which a layer is not what it was surveyed to be, `reduce` takes it without
    closed form, and a note says so. The other samples of the batch keep theirs.
    """
    sites: tuple[Site, ...] = ()
    visiting = _Visiting(reduce, layers, projections)

    def measure(batch: Batch, sites: tuple[Site, ...]) -> tuple[Reduced, tuple[Note, ...]]:
        try:
            return _joined(net, sites, batch, visiting), ()
        except StructureError as error:
            if len(batch) == 1:
                values, more = measure(batch, tuple(_opened(site, error) for site in sites))
                return values, (_reopened(error), *more)
        parts = [measure(one, sites) for one in batch.split(1)]
        whole = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
        return whole, tuple(note for _, more in parts for note in more)

    for batch in batches:
        require_padding_is_ignored(net, batch)
        if not sites:
            sites = survey(net, batch)
            SURVEYED.get()(chosen(sites, layers))
        picked = chosen(sites, layers)
        found, remarks = measure(batch, sites)
        values = {name: t.numpy() for name, t in found.items()}
        yield Part(batch.ids, values, facts(picked), open_notes(picked) + remarks)


class _Visiting(NamedTuple):
    """What is done with which layers."""

    reduce: Callable[[Layer, Batch], Reduced]
    layers: Sequence[int] | None
    projections: bool


def _joined(net: Net, sites: Sequence[Site], batch: Batch, visiting: _Visiting) -> Reduced:
    found: list[Reduced] = []

    def visit(layer: Layer) -> None:
        _require_heads(layer)
        found.append({k: v.cpu() for k, v in visiting.reduce(layer, batch).items()})

    # All sites, since a layer is known by how many of its module come before it.
    capture(net, sites, batch, visit, layers=visiting.layers, projections=visiting.projections)
    return {name: torch.cat([layer[name] for layer in found], 1) for name in found[0]}


def _require_heads(layer: Layer) -> None:
    """Refuse a layer whose number of heads follows the number of tokens: it was misread."""
    heads = layer.attention.q.shape[1]
    if heads != layer.site.heads:
        raise InputError(
            f"attention layer {layer.site.index} ({layer.site.module}) has {heads} heads on this "
            f"batch and had {layer.site.heads} when the model was surveyed: its heads cannot be "
            "told from its tokens",
            "Leave it out with --layers; lipaudit jacobian and lipaudit attack need no heads.",
        )


def _opened(site: Site, error: StructureError) -> Site:
    """Return the layer that an error is about without its closed form; others as they are."""
    same = site.index != error.layer
    return site if same else replace(site, structure=None, reason=error.reason)


def _reopened(error: StructureError) -> Note:
    text = (
        f"layer {error.layer} ({error.module}) {error.reason} on some samples: it has no closed "
        "form there, and so no bounds on any sample"
    )
    return Note(level="warning", code="structure-changed", text=text)


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
