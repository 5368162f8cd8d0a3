"""From an attention call to `Heads`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.models.events import AttentionCall, Explicit, Fused, additive
from lipaudit.models.logits import scale_and_bias
from lipaudit.models.sites import Structure
from lipaudit.models.structure import LAYOUTS, Projected, Rows, project
from lipaudit.theory.attention import Heads

_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""q, k, v, scale and bias."""


def canonical(call: AttentionCall, layout: str, samples: int) -> AttentionCall:
    """Return the call with q, k, v and output as (windows, heads, tokens, width)."""
    output = call.output.mT if call.transposed else call.output
    q, k, v, o = (LAYOUTS[layout](t, samples) for t in (call.q, call.k, call.v, output))
    return replace(call, q=q, k=k, v=v, output=o, transposed=False)


def distribution(call: AttentionCall, layout: str, batch: Batch, rows: Rows | None) -> Heads:
    """Return P of a layer, without X and projections; of a written-out softmax, by its logits.

    Args:
        call: the attention call, as the model made it.
        layout: the axes of its q, k and v.
        batch: the samples, for their padding.
        rows: which tokens the queries are, where that is known.
    """
    if isinstance(call.form, Fused):
        return product(call, layout, batch, rows)
    parts = _from_logits(call.form.logits.detach(), call.q.ndim, layout, len(batch))
    return _heads(parts, False, batch, rows)


def product(call: AttentionCall, layout: str, batch: Batch, rows: Rows | None) -> Heads:
    """Return q, k and v of a layer with P = softmax(scale q k^T + bias), as `distribution` does.

    Raises:
        NotClosedForm: the logits are not of this form.
    """
    arranged = canonical(call, layout, len(batch))
    scale, bias = _scale_and_bias(call, layout, len(batch))
    parts = arranged.q.detach(), arranged.k.detach(), arranged.v.detach(), scale, bias
    return _heads(parts, isinstance(call.form, Fused) and call.form.causal, batch, rows)


def _heads(parts: _Parts, causal: bool, batch: Batch, rows: Rows | None) -> Heads:
    q, k, v, scale, bias = parts
    windows, tokens = q.shape[0], q.shape[2]
    return Heads(
        x=q.new_zeros(windows, tokens, 0),
        x_kv=None,
        q=q,
        k=k,
        v=v,
        scale=scale,
        bias=bias,
        causal=causal,
        valid=_valid(batch, windows, tokens, rows),
        to_q=None,
        to_k=None,
        to_v=None,
        out=None,
        sample=torch.arange(windows, device=q.device) * len(batch) // windows,
    )


def assemble(
    structure: Structure, attention: Heads, call: AttentionCall, batch: Batch
) -> tuple[Heads, dict[str, Projected]]:
    """Add X, the projections and W_O to the heads of a canonical call.

    Raises:
        NotClosedForm: the call is not what the structure says.
    """
    recipes = {"q": structure.q, "k": structure.k, "v": structure.v}
    made = {
        name: project(recipe, getattr(call, name), len(batch))
        for name, recipe in recipes.items()
        if recipe is not None
    }
    memory = _without_padding(made["k"], batch)
    width = (*call.q.shape[::2], memory.shape[2])
    heads = replace(
        attention,
        x=_without_padding(made["q"], batch) if "q" in made else memory.new_zeros(width),
        x_kv=None if structure.joint else memory,
        to_q=made["q"].projection if "q" in made else None,
        to_k=made["k"].projection,
        to_v=made["v"].projection,
        out=None if structure.out is None else structure.out.per_head(call.q.shape[1]),
    )
    return heads, made


def _scale_and_bias(
    call: AttentionCall, layout: str, samples: int
) -> tuple[Tensor, Tensor | None]:
    """Return s (#windows, #heads) and B (#windows, #heads, #queries, #keys)."""
    if isinstance(call.form, Explicit):
        scale, bias = scale_and_bias(call, call.form)
        scale = LAYOUTS[layout](scale[..., None, None], samples)[..., 0, 0]
        return scale, None if bias is None else LAYOUTS[layout](bias, samples)
    scale = call.q.new_full((1, 1), call.form.scale)
    if call.form.mask is None:
        return scale, None
    bias = additive(call.form.mask.detach(), call.q.dtype)
    if layout == "batch heads tokens":
        return scale, bias[(None,) * (4 - bias.ndim)]
    return scale, LAYOUTS[layout](bias.expand(*call.q.shape[:-1], call.k.shape[-2]), samples)


def _from_logits(logits: Tensor, axes: int, layout: str, samples: int) -> _Parts:
    """Return q, k, v of width 0 and scale 0: all of P is in the bias, the captured logits."""
    if logits.ndim == axes:
        logits = LAYOUTS[layout](logits, samples)
    elif logits.ndim != 4:
        logits = logits.flatten(0, -4) if logits.ndim > 4 else logits[:, None]
    windows, heads, queries, keys = logits.shape
    q, k, v = (logits.new_zeros(windows, heads, n, 0) for n in (queries, keys, keys))
    return q, k, v, logits.new_zeros(1, 1), logits


def _valid(batch: Batch, windows: int, tokens: int, rows: Rows | None) -> Tensor | None:
    mask = batch.mask
    if mask is None or bool(mask.all()):
        return None
    known = None if rows is None else rows.resized(mask.shape[1], tokens)
    if known is not None:
        return known.pick(mask)
    return mask if (windows, tokens) == mask.shape else None


def _without_padding(made: Projected, batch: Batch) -> Tensor:
    if batch.mask is None or batch.mask.shape[1] != made.rows.length:
        return made.x
    return made.x * made.rows.pick(batch.mask)[..., None]
