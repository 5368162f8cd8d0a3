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
from lipaudit.models.attention.calls import (
    Address,
    AttentionCall,
    Explicit,
    Fused,
    hide_later_keys,
    make_additive,
)
from lipaudit.models.attention.capture import Site, Structure
from lipaudit.models.attention.events import AttentionMode
from lipaudit.models.attention.survey import survey
from lipaudit.models.net import Net
from lipaudit.models.sources.loader import restore
from lipaudit.theory import penalties

# A function that returns the penalty of the current weights, or of the last forward pass.
Penalty = Callable[[], Tensor]
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
) -> Iterator[Penalty]:
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
        raise UsageError(
            f"k = {k}, reduction = {reduction!r}",
            "Use k = 0, 2, 3... and max or mean.",
        )
    observer = _PenaltyObserver(k, reduction, None if mask is None else mask.bool(), entries)
    hook = model.register_forward_pre_hook(observer.read_batch, with_kwargs=True)
    with hook, AttentionMode(observer.add_layer):
        yield observer.take_total


@dataclass
class _PenaltyObserver:
    """The penalties of the layers observed so far.

    Attributes:
        k: of the JaSMin penalty: log g_1 of each attention row for k = 0, log(g_1 / g_k) for
            k > 1. g_1 bounds the norm of the softmax Jacobian; g_k is the same function of the
            k-th largest entry.
        reduction: how the rows of an attention map are reduced, "max" or "mean".
        mask: True at real tokens, (batch, tokens); None: all.
        entries: number of map entries in memory at a time.
        batch: number of samples of the model's input.
        masked: whether the mask fitted a layer.
        layers: the penalty of each layer.
    """

    k: int
    reduction: penalties.Reduction
    mask: Tensor | None
    entries: int
    batch: int | None = None
    masked: bool = False
    layers: list[Tensor] = field(default_factory=list)

    def read_batch(self, _model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Store the batch size of the model's input: the length of the first tensor with axes."""
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        self.batch = len(tensors[0]) if tensors else None

    def add_layer(self, call: AttentionCall, _address: Address) -> None:
        """Add the penalty of the attention call of a layer, averaged over the batch."""
        if self.batch is None:
            raise InputError(
                "the batch size, over which the penalty is averaged, is unknown",
                "Call the same module that was given to attention_penalty, on tensors.",
            )
        # Autocast is off here: it would compute the matrix products of the penalty in 16 bits.
        with torch.autocast(call.q.device.type, enabled=False):
            values, is_counted = _measure_rows(call, self.k, self.entries)
        if self.mask is not None:
            is_counted = self.exclude_padding(is_counted, self.mask.to(is_counted.device))
        # The penalty of a map is the maximum or the mean over the rows that count.
        by_map = penalties.reduce_rows(values, is_counted, self.reduction)
        self.layers.append(by_map.sum() / self.batch)

    def exclude_padding(self, is_counted: Tensor, mask: Tensor) -> Tensor:
        """Return which attention rows of a layer count, without the rows of padding.

        Args:
            is_counted: which rows count, (batch, heads, queries), or (batch * heads, queries).
            mask: True at real tokens, (batch, tokens).
        """
        batch, tokens = mask.shape
        # The queries of some layers are not the tokens of the batch, but windows or pooled tokens.
        # The mask does not describe them, so all their rows stay.
        if is_counted.shape[-1] != tokens or len(is_counted) % batch:
            return is_counted
        self.masked = True  # the mask fits at least one layer
        by_sample = is_counted.reshape(batch, -1, tokens)
        return (by_sample & mask[:, None]).reshape(is_counted.shape)

    def take_total(self) -> Tensor:
        """Return the sum over the layers since the last call, and start again at 0."""
        if not self.layers:
            advice = "Before penalty(), run the uncompiled model inside the block, with gradients."
            raise InputError("no attention was seen", advice)
        if self.mask is not None and not self.masked:
            shape = tuple(self.mask.shape)
            raise InputError(
                f"a mask of shape {shape} does not fit the queries of any attention layer",
                "Give a mask of shape (batch, tokens) as the layers use it, or no mask.",
            )
        device = self.layers[0].device
        total = torch.stack([layer.to(device) for layer in self.layers]).sum()
        self.layers = []
        self.masked = False
        return total


def _measure_rows(call: AttentionCall, k: int, entries: int) -> tuple[Tensor, Tensor]:
    """Return the penalty of every attention row, (..., queries), and whether the row counts.

    Args:
        call: a call of attention in the model, with its q and k.
        k: of the JaSMin penalty: log g_1 of each attention row for k = 0, log(g_1 / g_k) for
            k > 1. g_1 bounds the norm of the softmax Jacobian; g_k is the same function of the
            k-th largest entry.
        entries: number of entries of the attention map in memory at a time.
    """
    form = call.form
    if isinstance(form, Explicit):  # the model computed the map P itself
        return penalties.jasmin_rows(form.p, k)
    # Fused attention hides its map: compute it again, in chunks of queries.
    q = call.q * form.scale
    keys = call.k
    mask = _read_mask(call, form)
    maps = q[..., 0, 0].numel()  # number of attention maps: samples times heads
    size = max(1, entries // (maps * keys.shape[-2]))
    parts = []
    for first in range(0, q.shape[-2], size):
        rows = slice(first, first + size)
        bias = mask
        if mask is not None and mask.shape[-2] > 1:  # a mask of one row is for all queries
            bias = mask[..., rows, :]
        parts.append(fused_rows(q[..., rows, :], keys, bias, k))
    values, is_counted = zip(*parts, strict=True)
    return torch.cat(values, -1), torch.cat(is_counted, -1)


def _read_mask(call: AttentionCall, form: Fused) -> Tensor | None:
    """Return the mask that a call of fused attention adds to its logits; None: nothing.

    It is 0 at visible keys and -inf at hidden keys, (..., queries or 1, keys).
    """
    mask = form.mask
    if form.causal:
        mask = hide_later_keys(call.q.shape[-2], call.k.shape[-2], mask, call.q)
    if mask is None:
        return None
    return make_additive(mask, call.q.dtype)


def fused_rows(q: Tensor, keys: Tensor, bias: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Return the penalty of the attention rows of some queries, and whether each row counts.

    The attention map P is not stored, because it has queries x keys entries: the backward pass
    computes it again.

    Args:
        q: scaled queries, (..., queries, d).
        keys: (..., keys, d).
        bias: added to the logits; None: nothing.
        k: of the JaSMin penalty: log g_1 of each attention row for k = 0, log(g_1 / g_k) for
            k > 1. g_1 bounds the norm of the softmax Jacobian; g_k is the same function of the
            k-th largest entry.
    """
    return checkpoint(_Rows(bias, k), q, keys, use_reentrant=False, preserve_rng_state=False)


@dataclass(eq=False)
class _Rows:
    """The penalty of rows of P as a function of q and k.

    Attributes:
        bias: added to the logits; None: nothing.
        k: of the JaSMin penalty: log g_1 of each attention row for k = 0, log(g_1 / g_k) for
            k > 1. g_1 bounds the norm of the softmax Jacobian; g_k is the same function of the
            k-th largest entry.
        largest: indices of the largest entries of each row, found in the forward pass: the
            backward pass, which computes P again, uses the same ones.
    """

    bias: Tensor | None
    k: int
    largest: Tensor | None = None

    def __call__(self, q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the penalty of each row of softmax(q k^T + bias), and whether it counts."""
        logits = q @ keys.mT
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if self.bias is None:
            p = torch.softmax(logits, -1)
        else:
            logits = logits + self.bias
            # The softmax of a row without visible keys would be NaN: the row is set to 0.
            is_empty = logits.isneginf().all(-1, keepdim=True)
            p = torch.softmax(logits.masked_fill(is_empty, 0.0), -1)
            p = p.masked_fill(is_empty, 0.0)
        # The penalty needs only the largest entries. Their positions are chosen once: when the
        # backward pass runs this function again, rounding must not choose other entries.
        if self.largest is None:
            count = penalties.count_entries(p.shape[-1], self.k)
            self.largest = p.detach().topk(count).indices
        return penalties.jasmin_of_largest(p.gather(-1, self.largest), self.k)


def _read_heads(parameter: nn.Parameter, weight: Tensor, columns: Tensor) -> Tensor:
    """Return the weight of every head, (heads, D, d), as a differentiable part of a parameter.

    Args:
        parameter: a parameter of the model that contains the weight.
        weight: a view of the parameter's memory, (channels in, channels out), without gradient.
        columns: columns of each head, (heads, d).
    """
    # The same view of the parameter itself, through which gradients reach the parameter.
    matrix = parameter.as_strided(weight.shape, weight.stride(), weight.storage_offset())
    return matrix[:, columns].transpose(0, 1)


class SpecformerPenalty:
    """Specformer's penalty: sum of sigma_1(W)^2 over layers, heads and q, k, v.

    Args:
        net: a model whose layers have a closed form; their weights are found by running it.
        batch: one or two samples for that run.

    Raises:
        InputError: a weight is not a parameter of the model.
    """

    def __init__(self, net: Net, batch: Batch) -> None:
        """Find the weights of all heads, by running the model on a batch; draw start vectors."""
        # Functions that read the current weights of q, k and v of each layer, (heads, D, d).
        self._weights = list(_find_weights(net, batch))
        generator = torch.Generator().manual_seed(0)
        # For each of these weights a vector per head, (heads, d): the start of a power iteration
        # for the largest singular value. Each call of the penalty continues from the last one.
        self.vectors: Sequence[Tensor] = []
        for read_weight in self._weights:
            heads, _, width = read_weight().shape
            start = torch.randn(heads, width, generator=generator)
            self.vectors.append(start.to(net.device, net.dtype))

    def __call__(self) -> Tensor:
        """Return the sum of sigma_1(W)^2 over all heads' weights of q, k and v.

        sigma_1, the largest singular value, is estimated by one step of power iteration per call.
        """
        starts = zip(self._weights, self.vectors, strict=True)
        # For each weight, the penalty and the next vector of the power iteration.
        steps = [penalties.specformer(read_weight(), start) for read_weight, start in starts]
        values, self.vectors = zip(*steps, strict=True)
        return torch.stack(values).sum()


def _find_weights(net: Net, batch: Batch) -> Iterator[Callable[[], Tensor]]:
    """Yield functions that return the current weights of q, k and v of each layer, by head.

    The model runs once on the batch, to find the parameters that hold these weights.
    """
    layers, weights = _survey_weights(net, batch)
    # Parameters by the address of their memory: a weight may be a view or a slice of one, such as
    # the weight of q in the weight of a fused projection to q, k and v.
    parameters = {p.untyped_storage().data_ptr(): p for p in net.module.parameters()}
    for layer in layers:
        where = f"layer {layer.index} ({layer.module})"
        structure = _require_structure(layer, where)
        for projection in filter(None, (structure.q, structure.k, structure.v)):
            # Several linear maps may compute q together, each for some of the heads. Their columns
            # are numbered one map after the other; `first` is the first column of a map.
            first = 0
            for source in projection.source:
                weight = weights[source]
                parameter = parameters.get(weight.untyped_storage().data_ptr())
                if parameter is None:
                    raise InputError(f"a weight of layer {layer.index} is not a parameter")
                columns = _select_heads(
                    projection.columns, first, count=weight.shape[1], where=where
                )
                yield partial(_read_heads, parameter, weight, columns)
                first += weight.shape[1]


def _require_structure(layer: Site, where: str) -> Structure:
    """Return the linear maps to q, k and v of a layer, each of which needs weights of its own.

    `where` is the name of the layer in messages.

    Raises:
        InputError: the layer has no such maps.
    """
    if layer.structure is None:
        raise InputError(f"{where}: {layer.reason}, so its weights are unknown")
    if layer.inner:
        raise InputError(
            f"{where} computes queries, keys or values by several linear maps in a row, so they "
            "have no weight of their own"
        )
    return layer.structure


def _survey_weights(net: Net, batch: Batch) -> tuple[Sequence[Site], dict[Address, Tensor]]:
    """Run a model to find its attention layers, and the linear maps that compute q, k and v.

    Returns:
        The layers, and the weights of these maps by the address of each map in the run.
    """
    weights: dict[Address, Tensor] = {}

    def collect_weights(call: AttentionCall, _address: Address) -> None:
        """Store the weights of the linear maps that computed q, k and v of a call."""
        # The graph of q, k and v begins at outputs of these maps: leaves, each with its origin.
        for _, origin in call.origins.find_leaves(call.q, call.k, call.v):
            if origin.linear is not None:
                weights[origin.address] = origin.linear.weight

    # Restore flags and random states afterwards: the model may be in training.
    with restore(net.module), trace.fork_random(net):
        net.module.eval().requires_grad_(False)
        layers = survey(net, batch).sites
        trace.run(net, batch, trace.Tracer(collect_weights))
    return layers, weights


def _select_heads(columns: Tensor, first: int, count: int, where: str) -> Tensor:
    """Return the columns of the heads that one linear map computes, numbered within this map.

    Args:
        columns: the columns of each head, (heads, d), numbered over all maps that compute q (or k,
            or v) together.
        first: the first column of the map in this numbering.
        count: the number of columns of the map.
        where: the layer, for a message.

    Raises:
        InputError: a head has columns of several maps.
    """
    # Either all columns of a head belong to this map, or none of them.
    is_inside = (columns >= first) & (columns < first + count)  # (heads, d)
    is_head_inside = is_inside.all(1)
    if bool((is_inside.any(1) != is_head_inside).any()):
        raise InputError(
            f"{where} adds several linear maps up in a head, so it has no weight of its own",
            "Merge adapters into the weights first.",
        )
    return columns[is_head_inside] - first
