"""From an autograd graph to a `Projection`: which part of which linear map made q, k or v."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipaudit.models.attention.observe.linears import Linear
from lipaudit.models.attention.observe.trace import Address, Origin, origins
from lipaudit.models.attention.project import probes
from lipaudit.models.attention.project.probes import Source
from lipaudit.models.graph import is_affine
from lipaudit.theory.heads import Projection

LARGEST_LOCAL = 2**28  # numbers in a local Jacobian: 1 GiB in float32


class NotClosedForm(Exception):
    """A layer does something that the closed form does not cover.

    Args:
        kind: one word for the table of layers.
        reason: what the model does instead, for the reader of a report.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True)
class Rows:
    """Which token of a linear map each attention row reads, for any number of samples.

    Attributes:
        tokens: index of the token within its sample, (windows per sample, tokens per window).
        length: tokens per sample at the linear map.
        samples_first: whether its rows are ordered by sample, then token.
    """

    tokens: Tensor
    length: int
    samples_first: bool

    def index(self, samples: int) -> Tensor:
        """Return the row of X for each (window, token) of a batch."""
        sample = torch.arange(samples, device=self.tokens.device).view(-1, 1, 1)
        if self.samples_first:
            return (sample * self.length + self.tokens).flatten(0, 1)
        return (self.tokens * samples + sample).flatten(0, 1)

    def pick(self, values: Tensor) -> Tensor:
        """Arrange per-token values, (samples, length), as (windows, tokens)."""
        return values[:, self.tokens].flatten(0, 1)

    def resized(self, length: int, tokens: int) -> Rows | None:
        """Return the same rows for longer or shorter samples, where that is obvious."""
        if (length, tokens) == (self.length, self.tokens.shape[1]):
            return self
        every = [torch.arange(n, device=self.tokens.device)[None] for n in (self.length, length)]
        if length != tokens or not torch.equal(self.tokens, every[0]):
            return None
        return Rows(every[1], length, self.samples_first)


@dataclass(frozen=True)
class Recipe:
    """How q, k or v comes out of a linear map: enough to build its Projection on any batch.

    Attributes:
        kind: affine | rotation | linear-pos | local | cross-head.
        source: the linear map.
        rows: which of its rows.
        columns: which of its columns feed each head, (heads, e).
        repeat: how often each head is repeated (grouped queries).
        mix: constant map from these columns to the channels of the head, (heads, d, e), where it
            is affine and not the identity.
        offset: what is added after the linear map, (heads, d), if anything is.
        shared: whether the local Jacobian is the same in every head and window.
    """

    kind: str
    source: Address
    rows: Rows
    columns: Tensor
    repeat: int
    mix: Tensor | None = None
    offset: Tensor | None = None
    shared: bool = False


@dataclass(frozen=True)
class Projected:
    """A projection on a batch, and what it reads.

    Attributes:
        projection: the map, per head.
        x: its input, (windows, tokens, D).
        rows: which tokens of the linear map these are.
        linear: the linear map.
        leaf: its output, as q, k or v depends on it.
        origin: what made that.
    """

    projection: Projection
    x: Tensor
    rows: Rows
    linear: Linear
    leaf: Tensor
    origin: Origin


def decode(t: Tensor, samples: int) -> Recipe | None:
    """Work out how a tensor of an attention call, (windows, heads, tokens, width), was made.

    Returns:
        The recipe, or None for a constant (a learned query).

    Raises:
        NotClosedForm: it is not a token-wise function of one linear map.
    """
    found = origins(t)
    if not found:
        return None
    if len(found) > 1:
        raise NotClosedForm("multi-source", "is made from several linear maps")
    leaf, origin = found[0]
    if origin.linear is None:
        raise NotClosedForm("unprojected", "is not the output of a linear map")
    source = Source(t, leaf, origin.linear.outputs)
    index = token_rows(source)
    columns, repeat = _head_columns(source), 1
    if columns is None:
        unique, repeat = _undo_repeat(t)
        source = replace(source, t=unique)
        columns = None if repeat == 1 else _head_columns(source)
    rows = _by_sample(index, samples, origin.linear.inputs.shape[0])
    if columns is not None:
        return _refine(source, index, Recipe("affine", origin.address, rows, columns, repeat))
    columns = (source.pull(source.random()) != 0).any(0).nonzero().T
    recipe = Recipe("cross-head", origin.address, rows, columns, repeat)
    _refuse_large(source.merged(), recipe)
    return recipe


def project(recipe: Recipe, t: Tensor, samples: int) -> Projected:
    """Build the projection of a decoded q, k or v on the batch at hand.

    Raises:
        NotClosedForm: the structure is not the one that was decoded.
    """
    ((leaf, origin),) = origins(t)
    linear = origin.linear
    if linear is None or origin.address != recipe.source:
        raise NotClosedForm("changed", "comes from another linear map than at first")
    source = Source(t[:, :: recipe.repeat], leaf, linear.outputs)
    rows = _rows_on(recipe, source, samples, linear.inputs.shape[0])
    index = rows.index(samples)
    if recipe.kind == "affine":
        projection = _affine(recipe, source, linear, index)
    elif recipe.kind == "cross-head":
        merged = _local(recipe, source.merged(), linear, index)
        projection = _split_heads(merged, source.t.shape[1])
    else:
        projection = _local(recipe, source, linear, index)
    x = probes.take(linear.inputs, index, 0)
    return Projected(_repeated(projection, recipe.repeat), x, rows, linear, leaf, origin)


def _undo_repeat(t: Tensor) -> tuple[Tensor, int]:
    """Return the distinct heads of grouped keys or values, and how often each is repeated.

    Only for heads that share what they read: others may be equal by accident, or be zero.
    """
    heads = t.shape[1]
    for repeat in range(heads, 1, -1):
        unique = t[:, ::repeat]
        if heads % repeat == 0 and torch.equal(unique.repeat_interleave(repeat, 1), t):
            return unique, repeat
    return t, 1


def token_rows(source: Source) -> Tensor:
    """Find the row of y that each token reads, (windows, tokens)."""
    windows, _, tokens, _ = source.t.shape
    number = torch.arange(windows * tokens, device=source.t.device)
    if probes.in_order(source, number.view(windows, tokens)):
        return number.view(windows, tokens)
    token = probes.labels(source, number.view(windows, 1, tokens, 1), rows=True)
    if token is None:
        raise NotClosedForm("mixing", "depends on several tokens")
    times = torch.bincount(token[token >= 0], minlength=number.numel())
    if (times > 1).any():
        raise NotClosedForm("mixing", "depends on several tokens")
    if (times == 0).any():
        raise NotClosedForm("partial", "has tokens that are not made from the input")
    return token.argsort()[int((token < 0).sum()) :].view(windows, tokens)


def _by_sample(index: Tensor, samples: int, total: int) -> Rows:
    if index.shape[0] % samples == 0 and total % samples == 0:
        first = index[: index.shape[0] // samples]
        for rows in (
            Rows(first, total // samples, samples_first=True),
            Rows(first // samples, total // samples, samples_first=False),
        ):
            if torch.equal(rows.index(samples), index):
                return rows
    raise NotClosedForm("rows", "has rows that cannot be attributed to samples")


def _head_columns(source: Source) -> Tensor | None:
    """Find the columns of y that each head reads, (heads, e); None where heads share them."""
    heads = source.t.shape[1]
    number = torch.arange(heads, device=source.t.device).view(1, heads, 1, 1)
    head = probes.labels(source, number, rows=False)
    if head is None:
        return None
    sizes = torch.bincount(head[head >= 0], minlength=heads)
    if (sizes != sizes[0]).any():
        raise NotClosedForm("ragged", "takes more channels in some heads than in others")
    return head.argsort(stable=True)[int((head < 0).sum()) :].view(heads, -1)


def _refine(source: Source, index: Tensor, recipe: Recipe) -> Recipe:
    """Tell affine, rotation, linear-pos and local apart."""
    if not is_affine(source.t):
        _refuse_large(source, recipe)
        return replace(recipe, kind="local")
    affine = probes.affine_map(source, index, recipe.columns)
    if affine is not None:
        mix, offset = affine
        return replace(
            recipe,
            mix=None if _is_identity(mix) else mix,
            offset=offset if offset.any() else None,
        )
    local = probes.position_map(source, index, recipe.columns)
    shared = local is not None
    if local is None:
        _refuse_large(source, recipe)
        local = probes.local_map(source, index, recipe.columns)
        if not probes.is_linear(source, local, index, recipe.columns):
            return replace(recipe, kind="local")
    kind = "rotation" if probes.is_orthogonal(local) else "linear-pos"
    return replace(recipe, kind=kind, shared=shared)


def _refuse_large(source: Source, recipe: Recipe) -> None:
    size = source.t.numel() * recipe.columns.shape[1]
    if size > LARGEST_LOCAL:
        raise NotClosedForm("large", f"has a local Jacobian of {size:.1e} numbers")


def _rows_on(recipe: Recipe, source: Source, samples: int, total: int) -> Rows:
    rows = recipe.rows.resized(total // samples, source.t.shape[2])
    if rows is None:
        return _by_sample(token_rows(source), samples, total)
    # An affine map is compared by value on every token: other rows would show there.
    if recipe.kind != "affine" and not probes.reads_only(source, rows.index(samples)):
        raise NotClosedForm("changed", "reads other tokens than at first")
    return rows


def _affine(recipe: Recipe, source: Source, linear: Linear, index: Tensor) -> Projection:
    mix, offset, columns = recipe.mix, recipe.offset, recipe.columns
    t, made = source.t.detach(), source.values(index, columns)
    weight = probes.take(linear.weight, columns, 1).transpose(0, 1)
    bias = None if linear.bias is None else probes.take(linear.bias, columns, 0)
    if mix is not None:
        made, weight = made @ mix.mT, weight @ mix.mT
        bias = None if bias is None else (mix @ bias[..., None])[..., 0]
    if offset is not None:
        made = made + offset[:, None]
        bias = offset if bias is None else offset + bias
    if not probes.within(made - t, probes.LINEAR_TOLERANCE, t):
        raise NotClosedForm("changed", "is no longer an affine function of its input")
    return Projection(weight, bias, None, "affine")


def _is_identity(mix: Tensor) -> bool:
    eye = torch.eye(mix.shape[-1], dtype=mix.dtype, device=mix.device)
    return mix.shape[-1] == mix.shape[-2] and torch.equal(mix, eye.expand_as(mix))


def _local(recipe: Recipe, source: Source, linear: Linear, index: Tensor) -> Projection:
    columns = recipe.columns
    local = probes.position_map(source, index, columns) if recipe.shared else None
    if local is None:
        local = probes.local_map(source, index, columns)
    weight = probes.take(linear.weight, columns, 1).transpose(0, 1)
    bias = None if linear.bias is None else linear.bias[columns]
    return Projection(weight, bias, local, recipe.kind)


def _split_heads(merged: Projection, heads: int) -> Projection:
    """Turn the projection of all heads as one into one per head, each reading all columns."""
    assert merged.local is not None
    local = merged.local[:, 0]
    local = local.reshape(*local.shape[:2], heads, -1, local.shape[3]).transpose(1, 2)
    bias = None if merged.bias is None else merged.bias.expand(heads, -1)
    return Projection(merged.weight.expand(heads, -1, -1), bias, local, merged.kind)


def _repeated(projection: Projection, repeat: int) -> Projection:
    if repeat == 1:
        return projection
    bias, local = projection.bias, projection.local
    if local is not None and local.shape[1] > 1:
        local = local.repeat_interleave(repeat, 1)
    if bias is not None:
        bias = bias.repeat_interleave(repeat, 0)
    return Projection(projection.weight.repeat_interleave(repeat, 0), bias, local, projection.kind)
