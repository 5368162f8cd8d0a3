"""Read the attention of any transformer: one pass over the unmodified model, layer by layer.

`survey` (in `lipaudit.models.attention.survey`) analyses each layer once. `capture` then runs the
model on a batch and passes each layer to a function while the model runs, so that only the tensors
of one layer are in memory. The first half of this file turns an attention call into `Heads`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, StructureError
from lipaudit.models.attention.agreement import matches_autograd
from lipaudit.models.attention.observe.calls import Address, AttentionCall, Explicit, Fused
from lipaudit.models.attention.observe.trace import Frame, Tracer, freeze, run_observed
from lipaudit.models.attention.project.logits import read_logits, read_position_terms
from lipaudit.models.attention.project.projections import (
    NotClosedForm,
    Projected,
    TokenIndex,
    project,
)
from lipaudit.models.attention.sites import Site, Structure, list_loops
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.theory.heads import Heads, Pairs


def read_product(
    call: AttentionCall, batch: Batch, queries: TokenIndex | None
) -> tuple[Heads, Tensor | None]:
    """Return q, k, v and the logits of a layer, with a graph if there are position vectors.

    Args:
        call: the call, with its axes in order (`AttentionCall.arrange`).
        batch: the samples.
        queries: the tokens of the queries, if known.

    Raises:
        NotClosedForm: a logit depends on another pair's product.
    """
    form, q, k, v = read_logits(call), call.q.detach(), call.k.detach(), call.v.detach()
    plain = form.slope is None and form.relative is None
    windows, tokens, mask = q.shape[0], q.shape[2], batch.mask
    valid = None
    if mask is not None and not bool(mask.all()):
        # Windows and tokens of the queries may be arranged in any way: by their index, if known.
        known = None if queries is None else queries.resize(mask.shape[1], tokens)
        if known is not None:
            valid = known.pick(mask)
        elif (windows, tokens) == mask.shape:
            valid = mask
    heads = Heads(
        x=q.new_zeros(windows, tokens, 0),
        x_kv=None,
        q=q,
        k=k,
        v=v,
        scale=form.scale,
        bias=form.bias,
        causal=isinstance(call.form, Fused) and call.form.causal,
        valid=valid,
        to_q=None,
        to_k=None,
        to_v=None,
        out=None,
        sample=torch.arange(windows, device=q.device) * len(batch) // windows,
        pairs=None if plain else Pairs(form.slope),
        sink=form.sink,
    )
    return heads, form.relative


def add_inputs(
    structure: Structure,
    attention: Heads,
    call: AttentionCall,
    batch: Batch,
    relative: Tensor | None,
) -> tuple[Heads, dict[str, Projected]]:
    """Add X, the projections, position vectors and W_O to the heads of a canonical call.

    Args:
        structure: the structure of the layer.
        attention: its q, k, v and logits, from `read_product`.
        call: the call.
        batch: the samples.
        relative: its logits with their graph, from `read_product`.

    Raises:
        NotClosedForm: the call does not have this structure.
    """
    forms = {"k": structure.k, "v": structure.v}
    forms |= {} if structure.q is None else {"q": structure.q}
    parts: dict[str, Projected] = {}
    for name, form in forms.items():
        t: Tensor = getattr(call, name)
        parts[name] = project(form, t, call.origins.leaves(t), len(batch))
    # Padded tokens are no part of X: bounds by norms of X would count them.
    memory = _zero_padding(parts["k"], batch)
    width = (*call.q.shape[::2], memory.shape[2])
    heads = replace(
        attention,
        x=_zero_padding(parts["q"], batch) if "q" in parts else memory.new_zeros(width),
        x_kv=None if structure.joint else memory,
        to_q=parts["q"].projection if "q" in parts else None,
        to_k=parts["k"].projection,
        to_v=parts["v"].projection,
        out=None if structure.out is None else structure.out.per_head(call.q.shape[1]),
    )
    if relative is not None:
        heads = replace(heads, pairs=read_position_terms(heads, relative, parts))
    return heads, parts


def _zero_padding(part: Projected, batch: Batch) -> Tensor:
    if batch.mask is None or batch.mask.shape[1] != part.index.length:
        return part.x
    return part.x * part.index.pick(batch.mask)[..., None]


Result = TypeVar("Result")


@dataclass(frozen=True)
class Layer:
    """One attention layer on a batch; valid only while the model runs it.

    Attributes:
        site: the layer's site.
        call: the attention call of the model, with its axes in order.
        batch: the samples.
        attention: its P, for every kind of layer, without X and projections. If the model writes
            its softmax out, q, k and v are empty and `bias` holds the captured logits.
        frame: the module call that contains it (`site.scope`); None if unknown.
        numbers: numbers of its attention calls within that module call.
    """

    site: Site
    call: AttentionCall
    batch: Batch
    attention: Heads
    frame: Frame | None
    numbers: Sequence[int]

    @property
    def samples(self) -> int:
        """Return the number of samples in the batch."""
        return len(self.batch)

    @property
    def output(self) -> Tensor:
        """Return O of every head, (windows, heads, tokens, d_v)."""
        return self.call.output.detach()

    def heads(self) -> Heads:
        """Return the layer with X and its projections, for the closed form.

        Raises:
            ValueError: `site.closed_form` is False.
            StructureError: the layer differs from its survey, or its closed form differs from
                autograd for a random vector on these samples.
        """
        site, structure = self.site, self.site.structure
        if structure is None:
            raise ValueError(f"layer {site.index} has no closed form: {site.reason}")
        try:
            with torch.enable_grad():
                whole, relative = read_product(self.call, self.batch, structure.queries)
                heads, parts = add_inputs(structure, whole, self.call, self.batch, relative)
                if not matches_autograd(heads, parts, self.call):
                    raise NotClosedForm("has a closed form that disagrees with autograd")
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

    The pass ends after the last requested layer.

    Args:
        net: the model.
        sites: all its layers, from `survey`: a layer is identified by its number within its
            module.
        batch: the samples.
        reduce: function of a layer; tensors that its result does not keep are freed before the
            next layer.
        layers: indices of the layers to reduce; None for all.
        projections: whether `reduce` calls `Layer.heads`; the pass is cheaper if it does not.

    Returns:
        The results, one per layer.

    Raises:
        EvaluationError: a selected layer did not run.
    """
    chosen = {site.address: site for site in sites if layers is None or site.index in layers}
    # A written-out softmax is recognised by a graph from q or k, also where no layer is read.
    cut = [s for s in sites if s.explicit or (projections and s.address in chosen)]
    pending, results = dict(chosen), list[Result]()

    def visit(call: AttentionCall, address: Address) -> None:
        """Reduce a layer, if it is requested, while the model runs it."""
        site = pending.pop(address, None)
        if site is None:
            return
        with torch.no_grad():
            results.append(reduce(make_layer(site, call, batch, tracer.place.frames)))
        if not pending:
            raise _AllRead

    wanted = frozenset().union(*(site.sources for site in cut))
    tracer = Tracer(visit, wanted=wanted, loops=list_loops(sites))
    with freeze(net.module), exact_arithmetic(net.device), suppress(_AllRead):
        run_observed(net, batch, tracer)
    for site in pending.values():
        raise EvaluationError(
            f"attention layer {site.index} ({site.module}) was not used for this batch",
            "The model chooses its layers by the data. Leave this layer out with --layers.",
        )
    return results


class _AllRead(Exception):
    """Ends a pass: the rest of the model, with its logits over all tokens, is not needed."""


def make_layer(site: Site, call: AttentionCall, batch: Batch, frames: Sequence[Frame]) -> Layer:
    """Return the layer of a call, while the model is inside the given module calls."""
    with torch.enable_grad():  # `Layer.heads` walks the graph of these tensors
        call = call.arrange(site.layout, len(batch))
    queries, plain = None if site.structure is None else site.structure.queries, call
    if isinstance(call.form, Explicit):
        # P of a written-out softmax by its logits: they are the bias of a q, k and v of width 0.
        logits = call.form.logits.detach()
        windows, heads, rows, keys = logits.shape
        q, k, v = (logits.new_zeros(windows, heads, n, 0) for n in (rows, keys, keys))
        plain = replace(call, q=q, k=k, v=v, form=Fused(0.0, logits, causal=False))
    attention, _ = read_product(plain, batch, queries)
    frame = next((f for f in reversed(frames) if f.name == site.scope), None)
    order = [] if frame is None else frame.attentions
    numbers = [order.index(address) for address in site.addresses if address in order]
    return Layer(site, call, batch, attention, frame, numbers)
