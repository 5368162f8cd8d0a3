"""From an attention call to `Heads`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.models.attention.observe.calls import AttentionCall, Explicit, Fused
from lipaudit.models.attention.observe.layouts import arrange
from lipaudit.models.attention.project.forms import TokenIndex
from lipaudit.models.attention.project.logits import LogitForm, logit_form
from lipaudit.models.attention.project.positions import position_terms
from lipaudit.models.attention.project.projected import Projected, projected
from lipaudit.models.attention.sites import Structure
from lipaudit.theory.heads import Heads, Pairs

_Vectors = tuple[Tensor, Tensor, Tensor]
"""q, k and v."""


def canonical(call: AttentionCall, layout: str, samples: int) -> AttentionCall:
    """Return the call with q, k, v and output as (windows, heads, tokens, width)."""
    output = call.output.mT if call.transposed else call.output
    q, k, v, o = (arrange(layout, t, samples) for t in (call.q, call.k, call.v, output))
    return replace(call, q=q, k=k, v=v, output=o, transposed=False)


def distribution(
    call: AttentionCall, layout: str, batch: Batch, queries: TokenIndex | None
) -> Heads:
    """Return P of a layer, without X and projections; of a written-out softmax, by its logits.

    Args:
        call: the attention call, as the model made it.
        layout: the axes of its q, k and v.
        batch: the samples, for their padding.
        queries: which tokens these are, where that is known.
    """
    if isinstance(call.form, Fused):
        return product(call, layout, batch, queries)[0]
    parts, form = _from_logits(call.form.logits.detach(), call.q.ndim, layout, len(batch))
    return _heads(parts, form, False, batch, queries)


def product(
    call: AttentionCall, layout: str, batch: Batch, queries: TokenIndex | None
) -> tuple[Heads, Tensor | None]:
    """Return q, k, v and the logits of a layer; and, where q or k meet positions, with a graph.

    Raises:
        NotClosedForm: a logit depends on the product of another pair.
    """
    arranged = canonical(call, layout, len(batch))
    form = _form(call, layout, len(batch))
    parts = arranged.q.detach(), arranged.k.detach(), arranged.v.detach()
    causal = isinstance(call.form, Fused) and call.form.causal
    return _heads(parts, form, causal, batch, queries), form.relative


def _heads(
    parts: _Vectors, form: LogitForm, causal: bool, batch: Batch, queries: TokenIndex | None
) -> Heads:
    q, k, v = parts
    plain = form.slope is None and form.relative is None
    windows, tokens = q.shape[0], q.shape[2]
    return Heads(
        x=q.new_zeros(windows, tokens, 0),
        x_kv=None,
        q=q,
        k=k,
        v=v,
        scale=form.scale,
        bias=form.bias,
        causal=causal,
        valid=_valid(batch, windows, tokens, queries),
        to_q=None,
        to_k=None,
        to_v=None,
        out=None,
        sample=torch.arange(windows, device=q.device) * len(batch) // windows,
        pairs=None if plain else Pairs(form.slope),
        sink=form.sink,
    )


def with_inputs(
    structure: Structure,
    attention: Heads,
    call: AttentionCall,
    batch: Batch,
    relative: Tensor | None,
) -> tuple[Heads, dict[str, Projected]]:
    """Add X, the projections, what meets positions and W_O to the heads of a canonical call.

    Args:
        structure: how its tensors come about.
        attention: its q, k, v and logits, from `product`.
        call: the call.
        batch: the samples.
        relative: its logits with their graph, from `product`.

    Raises:
        NotClosedForm: the call is not what the structure says.
    """
    parts = _projected(structure, call, len(batch))
    memory = _without_padding(parts["k"], batch)
    width = (*call.q.shape[::2], memory.shape[2])
    heads = replace(
        attention,
        x=_without_padding(parts["q"], batch) if "q" in parts else memory.new_zeros(width),
        x_kv=None if structure.joint else memory,
        to_q=parts["q"].projection if "q" in parts else None,
        to_k=parts["k"].projection,
        to_v=parts["v"].projection,
        out=None if structure.out is None else structure.out.per_head(call.q.shape[1]),
    )
    if relative is not None:
        heads = replace(heads, pairs=position_terms(heads, relative, parts))
    return heads, parts


def _projected(structure: Structure, call: AttentionCall, samples: int) -> dict[str, Projected]:
    """Project k, v and, where it depends on the input, q."""
    forms = {"k": structure.k, "v": structure.v}
    forms |= {} if structure.q is None else {"q": structure.q}
    tensors = {name: getattr(call, name) for name in forms}
    return {
        name: projected(form, tensors[name], call.origins.leaves(tensors[name]), samples)
        for name, form in forms.items()
    }


def _form(call: AttentionCall, layout: str, samples: int) -> LogitForm:
    """Return the logits with axes (#windows, #heads, #queries, #keys)."""

    def arranged(t: Tensor | None) -> Tensor | None:
        return None if t is None else arrange(layout, t, samples)

    if isinstance(call.form, Explicit):
        form = logit_form(call, call.form)
        return LogitForm(
            scale=arrange(layout, form.scale[..., None, None], samples)[..., 0, 0],
            bias=arranged(form.bias),
            slope=arranged(form.slope),
            sink=None
            if form.sink is None
            else arrange(layout, form.sink[..., None], samples)[..., 0],
            relative=arranged(form.relative),
        )
    scale, mask = call.q.new_full((1, 1), call.form.scale), call.form.mask
    if mask is None:
        return LogitForm(scale, None)
    if mask.requires_grad:
        logits = arrange(layout, call.form.scale * (call.q @ call.k.mT) + mask, samples)
        return LogitForm(scale, logits.detach(), relative=logits)
    if layout == "batch heads tokens":
        return LogitForm(scale, mask[(None,) * (4 - mask.ndim)])
    return LogitForm(scale, arranged(mask.expand(*call.q.shape[:-1], call.k.shape[-2])))


def _from_logits(
    logits: Tensor, axes: int, layout: str, samples: int
) -> tuple[_Vectors, LogitForm]:
    """Return q, k, v of width 0 and scale 0: all of P is in the bias, the captured logits."""
    if logits.ndim == axes:
        logits = arrange(layout, logits, samples)
    elif logits.ndim != 4:
        logits = logits.flatten(0, -4) if logits.ndim > 4 else logits[:, None]
    windows, heads, queries, keys = logits.shape
    q, k, v = (logits.new_zeros(windows, heads, n, 0) for n in (queries, keys, keys))
    return (q, k, v), LogitForm(logits.new_zeros(1, 1), logits)


def _valid(batch: Batch, windows: int, tokens: int, index: TokenIndex | None) -> Tensor | None:
    mask = batch.mask
    if mask is None or bool(mask.all()):
        return None
    known = None if index is None else index.resized(mask.shape[1], tokens)
    if known is not None:
        return known.pick(mask)
    return mask if (windows, tokens) == mask.shape else None


def _without_padding(part: Projected, batch: Batch) -> Tensor:
    if batch.mask is None or batch.mask.shape[1] != part.index.length:
        return part.x
    return part.x * part.index.pick(batch.mask)[..., None]
