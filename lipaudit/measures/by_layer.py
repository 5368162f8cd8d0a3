"""Shared by the measures of attention layers: choice of layers, names of heads, windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lipaudit.data.batch import Batch, find_first
from lipaudit.errors import InputError, StructureError, UsageError
from lipaudit.measures.measure import Part
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.sites import Site, list_blocks_without_attention
from lipaudit.models.attention.survey import find_layers, list_unread
from lipaudit.models.attention.surveyor import HALF
from lipaudit.models.net import Net
from lipaudit.models.requirements import require_padding_is_ignored
from lipaudit.models.sources.weights import few
from lipaudit.tables import Note

Facts = dict[str, Any]
Reduced = dict[str, Tensor]
"""Values of one layer: axis 0 is the sample, axis 1 the head."""


class HeadName(NamedTuple):
    """The layer, number and module of a head."""

    layer: int
    head: int
    module: str


def head_names(sites: Sequence[Site]) -> list[HeadName]:
    """Return every head of the layers, ordered by (layer, head)."""
    return [
        HeadName(site.index, head, site.module) for site in sites for head in range(site.heads)
    ]


def choose_layers(sites: Sequence[Site], layers: Sequence[int] | None) -> tuple[Site, ...]:
    """Return the layers that the options name, by default all.

    Raises:
        UsageError: a layer does not exist.
    """
    surplus = [layer for layer in layers or () if layer >= len(sites)]
    if surplus:
        raise UsageError(
            f"there is no attention layer {surplus[0]}: the model has {len(sites)}",
            f"Give layers from 0 to {len(sites) - 1}.",
        )
    return tuple(site for site in sites if layers is None or site.index in layers)


class LayerReader(Protocol):
    """The computation of a measure on one layer; it keeps its state for the whole run."""

    def reduce(self, layer: Layer) -> Reduced:
        """Return the figures of a layer. The model is in the middle of its forward pass."""

    def facts(self, sites: Sequence[Site]) -> Facts:
        """Return facts that do not depend on the sample."""


def by_layer(
    net: Net,
    batches: Iterable[Batch],
    reader: LayerReader,
    *,
    layers: Sequence[int] | None,
    projections: bool = True,
) -> Iterator[Part]:
    """Yield a Part per batch: every layer reduced, joined along the heads; see `capture`.

    If a layer differs from its survey on a sample, that sample is reduced without the closed form,
    and a note says so. The other samples of the batch keep the closed form.
    """
    reduction = _Reduction(reader, layers, projections)
    sites: tuple[Site, ...] = ()
    remarks: tuple[Note, ...] = ()
    for batch in batches:
        require_padding_is_ignored(net, batch)
        if not sites:
            sites = find_layers(net, find_first(batches, batch))
            selected = choose_layers(sites, layers)
            remarks = open_notes(selected) + _input_notes(selected) + _part_notes(selected)
            remarks += unread_notes(net, sites) + _hybrid_notes(net, sites)
        reduced, changes = _reduce_batch(net, sites, batch, reduction)
        values = {name: t.numpy() for name, t in reduced.items()}
        yield Part(batch.ids, values, reader.facts(selected), remarks + changes)


@dataclass(frozen=True)
class _Reduction:
    """A reader and the layers it reads."""

    reader: LayerReader
    layers: Sequence[int] | None
    projections: bool

    def __call__(self, layer: Layer) -> Reduced:
        _require_heads(layer)
        reduced = self.reader.reduce(layer)
        return {name: (t.float() if t.dtype in HALF else t).cpu() for name, t in reduced.items()}

    def joined(self, net: Net, sites: Sequence[Site], batch: Batch) -> Reduced:
        """Reduce the layers of a batch to arrays (samples, heads or layers)."""
        layers = capture(net, sites, batch, self, layers=self.layers, projections=self.projections)
        return {name: torch.cat([layer[name] for layer in layers], 1) for name in layers[0]}


def _reduce_batch(
    net: Net, sites: Sequence[Site], batch: Batch, reduction: _Reduction
) -> tuple[Reduced, tuple[Note, ...]]:
    """Reduce a batch; sample by sample and without closed form if a layer has changed."""
    try:
        return reduction.joined(net, sites, batch), ()
    except StructureError as error:
        change = error
    if len(batch) == 1:
        opened = [_open_layer(site, change) for site in sites]
        reduced, changes = _reduce_batch(net, opened, batch, reduction)
        return reduced, (_note_reopening(change), *changes)
    parts = [_reduce_batch(net, sites, one, reduction) for one in batch.split(1)]
    whole = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
    return whole, tuple(note for _, changes in parts for note in changes)


def _require_heads(layer: Layer) -> None:
    """Refuse a layer whose number of heads follows the number of tokens: it was read wrongly."""
    heads = layer.attention.q.shape[1]
    if heads != layer.site.heads:
        raise InputError(
            f"attention layer {layer.site.index} ({layer.site.module}) has {heads} heads on "
            f"this batch and had {layer.site.heads} when the model was loaded, so heads and "
            "tokens cannot be distinguished",
            "Leave it out with --layers, or use lipaudit jacobian or lipaudit attack, which "
            "need no heads.",
        )


def _open_layer(site: Site, error: StructureError) -> Site:
    """Return the layer that the error names without its closed form; return others unchanged."""
    same = site.index != error.layer
    return site if same else replace(site, structure=None, reason=error.reason)


def _note_reopening(error: StructureError) -> Note:
    text = (
        f"layer {error.layer} ({error.module}) {error.reason} on some samples. It has no "
        "closed form there, so it gets no bounds on any sample"
    )
    return Note(level="warning", code="structure-changed", text=text)


def open_notes(sites: Sequence[Site]) -> tuple[Note, ...]:
    """Note which layers have no closed form, one note per reason."""
    reasons: dict[str, list[Site]] = {}
    for site in sites:
        if site.reason is not None:
            reasons.setdefault(site.reason, []).append(site)
    return tuple(
        Note(
            level="warning",
            code="no-closed-form",
            text=f"layers {', '.join(str(s.index) for s in alike)} ({alike[0].module}) "
            f"have no closed form: {reason}",
        )
        for reason, alike in reasons.items()
    )


def _input_notes(sites: Sequence[Site]) -> tuple[Note, ...]:
    """Name X if it is not the first input of the attention module."""
    texts: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        measured = site.closed_form or site.inputs
        if measured and not (site.reads_inside and (not site.inner or not site.closed_form)):
            what = f"X is the input of {few([name or 'the model' for name in site.reads])}"
            where = ", inside the module" if site.reads_inside else ", outside the module"
            level = "info" if site.reads_inside else "warning"
            texts.setdefault((level, what + where), []).append(site)
    return tuple(
        Note(
            level=level,
            code="input-elsewhere",
            text=f"layers {', '.join(str(s.index) for s in alike)} ({alike[0].module}): {what} "
            "that computes the attention"
            + ". Other maps or normalisations come between them"
            * (level == "info"),
        )
        for (level, what), alike in texts.items()
    )


def _part_notes(sites: Sequence[Site]) -> tuple[Note, ...]:
    """Note which layers are calls on the same input: they may be parts of one attention."""
    groups = {site.partners: site for site in sites if site.partners}
    texts = (
        f"layers {few([str(index) for index in partners])} ({site.module}, {site.line}) are "
        "separate calls on the same input. They may be parts of one attention; each table row "
        "is one call"
        for partners, site in groups.items()
    )
    return tuple(Note(level="warning", code="in-parts", text=text) for text in texts)


def unread_notes(net: Net, sites: tuple[Site, ...]) -> tuple[Note, ...]:
    """Note which modules have attention that no layer covers; layer numbers skip them."""
    modules = list_unread(net, sites)
    if not modules:
        return ()
    text = (
        f"attention that was not measured ({few(modules)}). Its weights are not a plain softmax "
        "over keys, or are used twice, detached, or computed per sample. Layer numbers skip it"
    )
    return (Note(level="warning", code="attention-unread", text=text),)


def _hybrid_notes(net: Net, sites: Sequence[Site]) -> tuple[Note, ...]:
    """Note which blocks of a language model are left out because they have no attention."""
    blocks = list_blocks_without_attention(net.module, sites) if net.kind == "text" else ()
    if not blocks:
        return ()
    text = (
        f"blocks without softmax attention have no heads to measure ({few(blocks)}). To "
        "measure them (state spaces, linear attention, convolutions), use `lipaudit jacobian`"
    )
    return (Note(level="info", code="no-attention", text=text),)


def sum_windows(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Add up the batch rows (windows) of each sample."""
    return values.new_zeros(samples, *values.shape[1:]).index_add_(0, sample, values)


def per_sample(values: Tensor, sample: Tensor) -> Tensor:
    """Return the largest value over the batch rows (windows) of each sample, in order.

    The Jacobian of a windowed layer is block diagonal, so its norm is the largest norm of a block.

    >>> per_sample(torch.tensor([1.0, 5.0, 2.0]), torch.tensor([0, 0, 1]))
    tensor([5., 2.])
    """
    windows = sample.cpu().bincount().tolist()
    return torch.stack([rows.amax(0) for rows in torch.split(values, windows)])
