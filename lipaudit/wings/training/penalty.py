"""Penalties of a whole model, for any training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, UsageError
from lipaudit.models.attention import trace
from lipaudit.models.attention.calls import Address, AttentionCall, Explicit, make_additive
from lipaudit.models.attention.events import AttentionMode
from lipaudit.models.attention.survey import survey
from lipaudit.models.net import Net
from lipaudit.models.sources.loader import restore
from lipaudit.theory import penalties

# Largest number of attention map entries in memory at a time.
ENTRIES = 2**22


@contextmanager
def attention_penalty(
    model: nn.Module,
    name: str = "jasmin",
    *,
    k: int = 0,
    reduction: penalties.Reduction = "max",
    mask: Tensor | None = None,
    entries: int = ENTRIES,
) -> Iterator[Callable[[], Tensor]]:
    """Compute the JaSMin penalty of a model while it runs inside the block.

    The model runs unmodified, also in train mode, under autocast, and in DistributedDataParallel.
    Its attention maps are computed again from q and k in chunks of rows, and once more in the
    backward pass. The penalty is the sum over the attention layers of `theory.penalties.jasmin`;
    each window of a windowed layer is one map.

        with attention_penalty(model, "jasmin", k=10, reduction="mean") as penalty:
            loss = criterion(model(x), y) + 1e-2 * penalty()
        loss.backward()

    Call `penalty()` after the forward passes to include; the sum then starts again at 0. Call
    `backward` after the block: a model that recomputes its activations would otherwise be observed
    twice.

    Args:
        model: any model that `lipaudit` can read; compiled and scripted modules cannot be
            observed.
        name: jasmin, the penalty on attention maps (`SpecformerPenalty` is the one on weights).
        k: 0, or more than 1.
        reduction: over the rows of a map.
        mask: nonzero at real tokens, (batch, tokens), for padded batches: only these tokens count.
        entries: number of map entries in memory at a time; fewer need less memory.

    Raises:
        UsageError: the name, k or reduction is invalid.
        InputError: raised by `penalty()` if no attention was observed or none fits the mask, and
            by the model's run if its batch size is unknown.
    """
    if name != "jasmin":
        advice = "Use jasmin. For a penalty on weights, use SpecformerPenalty(net, batch)."
        raise UsageError(f"{name!r} is not a penalty on attention maps", advice)
    if k == 1 or k < 0 or reduction not in get_args(penalties.Reduction):
        text = f"k = {k}, reduction = {reduction!r}"
        raise UsageError(text, "Use k = 0, 2, 3... and max or mean.")
    watch = _Watch(k, reduction, None if mask is None else mask.bool(), entries)
    hook = model.register_forward_pre_hook(watch.enter, with_kwargs=True)
    with hook, AttentionMode(watch.attention):
        yield watch.total


@dataclass
class _Watch:
    """The penalties of the layers observed so far."""

    k: int
    reduction: penalties.Reduction
    mask: Tensor | None
    entries: int
    batch: int | None = None
    masked: bool = False
    layers: list[Tensor] = field(default_factory=list)

    def enter(self, _model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Store the batch size of the model's input."""
        first = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
        self.batch = None if first is None else len(first)

    def attention(self, call: AttentionCall, _address: Address) -> None:
        """Add the penalty of a layer."""
        if self.batch is None:
            text = "the batch size, over which the penalty is averaged, is unknown"
            advice = "Call the same module that was given to attention_penalty, on tensors."
            raise InputError(text, advice)
        # Autocast would take the products of the penalty itself in 16 bits.
        with torch.autocast(call.q.device.type, enabled=False):
            values, counted = _row_values(call, self.k, self.entries)
        if self.mask is not None:
            counted = self.real(counted, self.mask.to(counted.device))
        by_map = penalties.reduce_rows(values, counted, self.reduction)
        self.layers.append(by_map.sum() / self.batch)

    def real(self, counted: Tensor, mask: Tensor) -> Tensor:
        """Exclude padding from the rows of a layer, whose heads may be folded into the batch."""
        batch, tokens = mask.shape
        if counted.shape[-1] != tokens or len(counted) % batch:
            return counted
        self.masked = True
        by_sample = counted.reshape(batch, -1, tokens)
        real = by_sample & mask[:, None]
        return real.reshape(counted.shape)

    def total(self) -> Tensor:
        """Return the sum since the last call."""
        if not self.layers:
            advice = "Before penalty(), run the uncompiled model inside the block, with gradients."
            raise InputError("no attention was seen", advice)
        if self.mask is not None and not self.masked:
            shape = tuple(self.mask.shape)
            text = f"a mask of shape {shape} does not fit the queries of any attention layer"
            advice = "Give a mask of shape (batch, tokens) as the layers use it, or no mask."
            raise InputError(text, advice)
        layers = self.layers
        self.layers = []
        self.masked = False
        return torch.stack([each.to(layers[0].device) for each in layers]).sum()


def _row_values(call: AttentionCall, k: int, entries: int) -> tuple[Tensor, Tensor]:
    """Return the penalty of every row of P, (..., queries), and whether it counts."""
    form = call.form
    if isinstance(form, Explicit):
        return penalties.jasmin_rows(form.p, k)
    q = call.q * form.scale
    keys = call.k
    queries = q.shape[-2]
    width = keys.shape[-2]
    mask = None
    if form.causal:
        seen = torch.ones(queries, width, dtype=torch.bool, device=q.device).tril()
        mask = make_additive(seen, call.q.dtype)
    elif form.mask is not None:
        mask = make_additive(form.mask, call.q.dtype)
    heads = q[..., 0, 0].numel()
    size = max(1, entries // (heads * width))
    values = []
    counted = []
    for first in range(0, queries, size):
        rows = slice(first, first + size)
        bias = mask
        if mask is not None and mask.shape[-2] > 1:
            bias = mask[..., rows, :]
        value, counts = fused_rows(q[..., rows, :], keys, bias, k)
        values.append(value)
        counted.append(counts)
    return torch.cat(values, -1), torch.cat(counted, -1)


def fused_rows(q: Tensor, keys: Tensor, bias: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Return the penalty of some rows; nothing of size queries x keys is kept for the backward."""
    places: list[Tensor] = []

    def rows(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        logits = q @ keys.mT
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if bias is None:
            p = torch.softmax(logits, -1)
        else:  # rows without keys are zero
            logits = logits + bias
            unseen = logits.isneginf().all(-1, keepdim=True)
            p = torch.softmax(logits.masked_fill(unseen, 0.0), -1)
            p = p.masked_fill(unseen, 0.0)
        if not places:  # found once, reused in the backward pass
            count = penalties.count_entries(p.shape[-1], k)
            places.append(p.detach().topk(count).indices)
        largest = p.gather(-1, places[0])
        return penalties.jasmin_of_largest(largest, k)

    # The backward pass computes P again: kept, it would need memory of queries x keys.
    return checkpoint(rows, q, keys, use_reentrant=False, preserve_rng_state=False)


def _read_heads(parameter: nn.Parameter, weight: Tensor, columns: Tensor) -> Tensor:
    """Return W of every head, (heads, D, d), with its gradient.

    Args:
        parameter: holds the weight.
        weight: a view of the same memory, (channels in, channels out).
        columns: columns of each head.
    """
    whole = parameter.as_strided(weight.shape, weight.stride(), weight.storage_offset())
    return whole[:, columns].transpose(0, 1)


class SpecformerPenalty:
    """Specformer's penalty: sum of sigma_1(W)^2 over layers, heads and q, k, v.

    Args:
        net: a model whose layers have a closed form; their weights are found by running it.
        batch: one or two samples for that run.

    Raises:
        InputError: a weight is not a parameter of the model.
    """

    def __init__(self, net: Net, batch: Batch) -> None:
        self._weights = list(_find_weights(net, batch))
        generator = torch.Generator().manual_seed(0)
        # Where the power iteration starts; each call goes on from the vectors of the last one.
        self.vectors: Sequence[Tensor] = []
        for read in self._weights:
            heads, _, width = read().shape
            start = torch.randn(heads, width, generator=generator)
            self.vectors.append(start.to(net.device, net.dtype))

    def __call__(self) -> Tensor:
        """Return the penalty at the current weights, after one more power step."""
        pairs = zip(self._weights, self.vectors, strict=True)
        steps = [penalties.specformer(read(), v) for read, v in pairs]
        values, self.vectors = zip(*steps, strict=True)
        return torch.stack(values).sum()


def _find_weights(net: Net, batch: Batch) -> Iterator[Callable[[], Tensor]]:
    """Yield functions that return the weights of q, k and v of each layer."""
    weights: dict[Address, Tensor] = {}  # of every linear map that an attention reads

    def note(call: AttentionCall, _address: Address) -> None:
        for _, origin in call.origins.leaves(call.q, call.k, call.v):
            if origin.linear is not None:
                weights[origin.address] = origin.linear.weight

    with restore(net.module), trace.fork_random(net.module):  # the model may be in training
        net.module.eval().requires_grad_(False)
        sites = survey(net, batch).sites
        trace.run(net, batch, trace.Tracer(note))
    parameters = {p.untyped_storage().data_ptr(): p for p in net.module.parameters()}
    for site in sites:
        where = f"layer {site.index} ({site.module})"
        if site.structure is None:
            raise InputError(f"{where}: {site.reason}, so its weights are unknown")
        text = f"{where} computes queries, keys or values by several linear maps in a row"
        if site.inner:
            raise InputError(f"{text}, so they have no weight of their own")
        for form in filter(None, (site.structure.q, site.structure.k, site.structure.v)):
            first = 0
            for source in form.source:
                weight = weights[source]
                parameter = parameters.get(weight.untyped_storage().data_ptr())
                if parameter is None:
                    raise InputError(f"a weight of layer {site.index} is not a parameter")
                # Of several maps of one input, each has the heads of which all columns are its.
                end = first + weight.shape[1]
                own = (form.columns >= first) & (form.columns < end)
                whole = own.all(1)
                if bool((own.any(1) != whole).any()):
                    raise InputError(
                        f"{where} adds several linear maps up in a head, so it has no weight of "
                        "its own",
                        "Merge adapters into the weights first.",
                    )
                yield partial(_read_heads, parameter, weight, form.columns[whole] - first)
                first = end
