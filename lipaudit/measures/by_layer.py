"""Shared by the measures of attention layers: choice of layers, names of heads, windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipaudit.data.batch import Batch, find_first
from lipaudit.errors import InputError, StructureError, UsageError
from lipaudit.measures.measure import Part
from lipaudit.models.attention.capture import Layer, Site, capture, list_blocks_without_attention
from lipaudit.models.attention.survey import find_layers, list_unread
from lipaudit.models.attention.surveyor import HALF
from lipaudit.models.net import Net
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


def by_layer(
    net: Net,
    batches: Iterable[Batch],
    reduce: Callable[[Layer], Reduced],
    *,
    layers: Sequence[int] | None,
    projections: bool = True,
    describe: Callable[[Sequence[Site]], Facts] = lambda _sites: {},
) -> Iterator[Part]:
    """Yield a Part per batch: every layer reduced, joined along the heads; see `capture`.

    If a layer differs from its survey on a sample, that sample is reduced without the closed form,
    and a note says so. The other samples of the batch keep the closed form.

    Args:
        net: the model.
        batches: the samples.
        reduce: function of a layer, while the model is in the middle of its forward pass.
        layers: indices of the layers to read; None for all.
        projections: whether `reduce` calls `Layer.heads`.
        describe: facts of the layers that do not depend on the sample, besides the heads' names.
    """

    def reduce_layer(layer: Layer) -> Reduced:
        site, heads = layer.site, layer.attention.q.shape[1]
        if heads != site.heads:  # the number of heads follows that of the tokens: wrongly read
            raise InputError(
                f"attention layer {site.index} ({site.module}) has {heads} heads on "
                f"this batch and had {site.heads} when the model was loaded, so heads and "
                "tokens cannot be distinguished",
                "Leave it out with --layers, or use lipaudit jacobian or lipaudit attack, which "
                "need no heads.",
            )
        reduced = reduce(layer)
        return {name: (t.float() if t.dtype in HALF else t).cpu() for name, t in reduced.items()}

    def reduce_batch(sites: Sequence[Site], batch: Batch) -> tuple[Reduced, tuple[Note, ...]]:
        """Return arrays (samples, heads or layers), and notes on layers that have changed."""
        try:
            each = capture(net, sites, batch, reduce_layer, layers=layers, projections=projections)
            return {name: torch.cat([layer[name] for layer in each], 1) for name in each[0]}, ()
        except StructureError as error:
            changed, reason = error.layer, error.reason
            text = (
                f"layer {error.layer} ({error.module}) {error.reason} on some samples. It has no "
                "closed form there, so it gets no bounds on any sample"
            )
        if len(batch) == 1:  # try again without the closed form of this layer
            sites = [
                replace(site, structure=None, reason=reason) if site.index == changed else site
                for site in sites
            ]
            reduced, changes = reduce_batch(sites, batch)
            return reduced, (Note(level="warning", code="structure-changed", text=text), *changes)
        parts = [reduce_batch(sites, one) for one in batch.split(1)]
        whole = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
        return whole, tuple(note for _, changes in parts for note in changes)

    sites: tuple[Site, ...] = ()
    for batch in batches:
        if not sites:
            sites = find_layers(net, find_first(batches, batch))
            selected = choose_layers(sites, layers)
            remarks = _note_layers(net, sites, selected)
        names = [HeadName(s.index, head, s.module) for s in selected for head in range(s.heads)]
        reduced, changes = reduce_batch(sites, batch)
        values = {name: t.numpy() for name, t in reduced.items()}
        yield Part(batch.ids, values, {"heads": names} | describe(selected), remarks + changes)


def _note_layers(net: Net, sites: tuple[Site, ...], selected: Sequence[Site]) -> tuple[Note, ...]:
    """Note what a reader must know of the selected layers, and which attention is left out."""
    closed: dict[str, list[Site]] = {}
    inputs: dict[tuple[bool, str], list[Site]] = {}
    for site in selected:
        if site.reason is not None:
            closed.setdefault(site.reason, []).append(site)
        measured = site.closed_form or site.inputs
        # X is named if it is not the first input of the attention module.
        if measured and not (site.reads_inside and (not site.inner or not site.closed_form)):
            what = few([name or "the model" for name in site.reads])
            inputs.setdefault((site.reads_inside, what), []).append(site)

    def name_layers(alike: Sequence[Site]) -> str:
        return f"layers {', '.join(str(s.index) for s in alike)} ({alike[0].module})"

    remarks = []
    for reason, alike in closed.items():
        text = f"{name_layers(alike)} have no closed form: {reason}"
        remarks.append(Note(level="warning", code="no-closed-form", text=text))
    for (inside, what), alike in inputs.items():
        text = (
            f"{name_layers(alike)}: X is the input of {what}, {'in' if inside else 'out'}side the "
            "module that computes the attention"
        )
        if inside:
            text += ". Other maps or normalisations come between them"
        level = "info" if inside else "warning"
        remarks.append(Note(level=level, code="input-elsewhere", text=text))
    for partners, site in {site.partners: site for site in selected if site.partners}.items():
        text = (
            f"layers {few([str(index) for index in partners])} ({site.module}, {site.line}) are "
            "separate calls on the same input. They may be parts of one attention; each table row "
            "is one call"
        )
        remarks.append(Note(level="warning", code="in-parts", text=text))
    remarks += note_unread(net, sites)
    blocks = list_blocks_without_attention(net.module, sites) if net.kind == "text" else ()
    if blocks:
        text = (
            f"blocks without softmax attention have no heads to measure ({few(blocks)}). To "
            "measure them (state spaces, linear attention, convolutions), use `lipaudit jacobian`"
        )
        remarks.append(Note(level="info", code="no-attention", text=text))
    return tuple(remarks)


def note_unread(net: Net, sites: tuple[Site, ...]) -> tuple[Note, ...]:
    """Note which modules have attention that no layer covers; layer numbers skip them."""
    modules = list_unread(net, sites)
    if not modules:
        return ()
    text = (
        f"attention that was not measured ({few(modules)}). Its weights are not a plain softmax "
        "over keys, or are used twice, detached, or computed per sample. Layer numbers skip it"
    )
    return (Note(level="warning", code="attention-unread", text=text),)


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
