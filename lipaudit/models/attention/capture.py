"""Read the attention of any transformer: one pass over the unmodified model, layer by layer.

`survey` (in `lipaudit.models.attention.survey`) finds out once what each layer is.
`capture` then runs the model on a batch and reduces each layer as it is met, with the tensors of
one alive at a time. A forward pass cannot be suspended, so layers are not handed out one by one:
`capture` is given what to make of a layer, and returns what came of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, StructureError
from lipaudit.models.attention.agreement import matches_autograd
from lipaudit.models.attention.observe.calls import AttentionCall
from lipaudit.models.attention.observe.origins import Address
from lipaudit.models.attention.observe.trace import Frame, Tracer, run_observed, undisturbed
from lipaudit.models.attention.project.forms import NotClosedForm
from lipaudit.models.attention.sites import Site
from lipaudit.models.attention.to_heads import canonical, distribution, product, with_inputs
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.theory.heads import Heads

Result = TypeVar("Result")


@dataclass(frozen=True)
class Layer:
    """One attention layer on a batch; valid while the model is in it.

    Attributes:
        site: which one.
        call: what the model does there.
        batch: the samples.
        attention: its P, for every kind of layer, without X and projections. Where the model
            writes its softmax out, q, k and v are empty and `bias` holds the captured logits.
        output: O of every head, (windows, heads, tokens, d_v).
        frame: the module call that it is part of (`site.scope`); None where that is not known.
        number: which attention call of that module call it is.
    """

    site: Site
    call: AttentionCall
    batch: Batch
    attention: Heads
    output: Tensor
    frame: Frame | None
    number: int

    @property
    def samples(self) -> int:
        """Number of samples in the batch."""
        return len(self.batch)

    def heads(self) -> Heads:
        """Return the layer with X and its projections: what the closed form takes.

        Raises:
            ValueError: `site.closed_form` is False.
            StructureError: the layer is not what it was when the model was surveyed, or its
                closed form is not what autograd makes of a random vector on these samples.
        """
        site, structure = self.site, self.site.structure
        if structure is None:
            raise ValueError(f"layer {site.index} has no closed form: {site.reason}")
        try:
            with torch.enable_grad():
                whole, relative = product(self.call, site.layout, self.batch, structure.queries)
                arranged = canonical(self.call, site.layout, self.samples)
                heads, parts = with_inputs(structure, whole, arranged, self.batch, relative)
                if not matches_autograd(heads, parts, arranged):
                    raise NotClosedForm("wrong", "has a closed form that disagrees with autograd")
                return heads
        except NotClosedForm as obstacle:
            raise StructureError(site.index, site.module, obstacle.reason) from obstacle


def capture(
    net: Net,
    sites: Sequence[Site],
    batch: Batch,
    reduce: Callable[[Layer], Result],
    *,
    layers: Collection[int] | None = None,
    projections: bool = True,
) -> list[Result]:
    """Run the unmodified model on a batch and reduce its attention layers in call order.

    The pass ends behind the last layer that is wanted.

    Args:
        net: the model.
        sites: its layers, from `survey`; all of them, since a layer is known by how many of its
            module come before it.
        batch: the samples.
        reduce: what to make of a layer while the model is in it; what the result does not keep is
            freed before the next layer.
        layers: indices of the layers to reduce; None for all.
        projections: whether `reduce` calls `Layer.heads`; the pass is cheaper where it does not.

    Returns:
        The results, a layer each.

    Raises:
        EvaluationError: a selected layer was not met.
    """
    chosen = {site.address: site for site in sites if layers is None or site.index in layers}
    cut = [s for s in sites if s.explicit or (projections and s.address in chosen)]
    reading = _Reading(chosen, batch, reduce, frozenset().union(*(s.sources for s in cut)))
    with undisturbed(net.module), exact_arithmetic(net.device), suppress(_AllRead):
        run_observed(net, batch, reading.tracer)
    for site in reading.pending.values():
        raise EvaluationError(
            f"attention layer {site.index} ({site.module}) was not met on this batch",
            "the model chooses its layers by the data: leave this one out with --layers",
        )
    return reading.results


class _AllRead(Exception):
    """Ends a pass: the rest of the model, its logits over all tokens too, would be for nothing."""


class _Reading(Generic[Result]):
    """One pass: the layers that are still to come, and the results so far."""

    def __init__(
        self,
        sites: Mapping[Address, Site],
        batch: Batch,
        reduce: Callable[[Layer], Result],
        cut: frozenset[Address],
    ) -> None:
        self.pending = dict(sites)
        self.results: list[Result] = []
        self.tracer = Tracer(self.attention, wanted=cut)
        self._batch, self._reduce = batch, reduce

    def attention(self, call: AttentionCall, address: Address) -> None:
        """Reduce a layer, if it is wanted, while the model is in it."""
        site = self.pending.pop(address, None)
        if site is not None:
            with torch.no_grad():
                layer = layer_at(site, call, self._batch, self.tracer.place.frames)
                self.results.append(self._reduce(layer))
            if not self.pending:
                raise _AllRead


def layer_at(site: Site, call: AttentionCall, batch: Batch, frames: Sequence[Frame]) -> Layer:
    """Return the layer that a call is, while the model is inside the given module calls."""
    queries = None if site.structure is None else site.structure.queries
    attention = distribution(call, site.layout, batch, queries)
    output = canonical(call, site.layout, len(batch)).output.detach()
    frame = next((f for f in reversed(frames) if f.name == site.scope), None)
    number = 0 if frame is None else frame.attentions
    return Layer(site, call, batch, attention, output, frame, number)
