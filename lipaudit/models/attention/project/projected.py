"""A decoded projection on the batch at hand: its `Projection`, and the tokens that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lipaudit.models.attention.observe.linears import Linear
from lipaudit.models.attention.observe.origins import Leaf, Origin
from lipaudit.models.attention.project import probes
from lipaudit.models.attention.project.decode import by_sample, token_rows
from lipaudit.models.attention.project.forms import NotClosedForm, ProjectionForm, TokenIndex
from lipaudit.models.attention.project.probes import Probed
from lipaudit.theory.heads import Projection


@dataclass(frozen=True)
class Projected:
    """A projection on a batch, and what it reads.

    Attributes:
        form: what it is on every batch.
        projection: the map, per head.
        x: its input, (windows, tokens, D).
        index: which tokens of the linear map these are.
        linear: the linear map.
        leaf: its output, as q, k or v depends on it.
        origin: what made that.
    """

    form: ProjectionForm
    projection: Projection
    x: Tensor
    index: TokenIndex
    linear: Linear
    leaf: Tensor
    origin: Origin


def projected(form: ProjectionForm, t: Tensor, leaves: Sequence[Leaf], samples: int) -> Projected:
    """Build the projection of a decoded q, k or v on the batch at hand.

    Args:
        form: from `decode`.
        t: q, k or v, with its graph.
        leaves: what it was made from.
        samples: number of samples in the batch.

    Raises:
        NotClosedForm: it is not what was decoded.
    """
    leaf, origin, linear = _reading(form, leaves)
    source = Probed(t[:, :: form.repeat], leaf, linear.outputs)
    index = _index_on(form, source, samples, linear.inputs.shape[0])
    rows = index.rows(samples)
    projection = _projection(form, source, linear, rows)
    x = probes.take(linear.inputs, rows, 0)
    whole = _repeated(projection, form.repeat)
    return Projected(form, whole, x, index, linear, leaf, origin)


def _reading(form: ProjectionForm, leaves: Sequence[Leaf]) -> tuple[Tensor, Origin, Linear]:
    """Return the one leaf behind q, k or v, once it is the output of the decoded linear map."""
    for leaf, origin in leaves:
        if len(leaves) == 1 and origin.address == form.source and origin.linear is not None:
            return leaf, origin, origin.linear
    raise NotClosedForm("changed", "comes from another linear map than at first")


def _index_on(form: ProjectionForm, source: Probed, samples: int, total: int) -> TokenIndex:
    index = form.index.resized(total // samples, source.t.shape[2])
    if index is None:
        return by_sample(token_rows(source), samples, total)
    # An affine map is compared by value on every token: other rows would show there.
    if form.kind != "affine" and not probes.reads_only(source, index.rows(samples)):
        raise NotClosedForm("changed", "reads other tokens than at first")
    return index


def _projection(form: ProjectionForm, source: Probed, linear: Linear, rows: Tensor) -> Projection:
    if form.kind == "affine":
        return _affine(form, source, linear, rows)
    if form.kind == "cross-head":
        merged = _local(form, source.merged(), linear, rows)
        return _split_heads(merged, source.t.shape[1])
    return _local(form, source, linear, rows)


def _affine(form: ProjectionForm, source: Probed, linear: Linear, rows: Tensor) -> Projection:
    """T = M y + c of y = X W + b: t = X (W M^T) + (M b + c), checked on every token."""
    mix, offset, columns = form.mix, form.offset, form.columns
    t, value = source.t.detach(), source.values(rows, columns)
    weight = probes.take(linear.weight, columns, 1).transpose(0, 1)
    bias = None if linear.bias is None else probes.take(linear.bias, columns, 0)
    if mix is not None:
        value, weight = value @ mix.mT, weight @ mix.mT
        bias = None if bias is None else (mix @ bias[..., None])[..., 0]
    if offset is not None:
        value = value + offset[:, None]
        bias = offset if bias is None else offset + bias
    if not probes.within(value - t, probes.LINEAR_TOLERANCE, t):
        raise NotClosedForm("changed", "is no longer an affine function of its input")
    return Projection(weight, bias, None, "affine")


def _local(form: ProjectionForm, source: Probed, linear: Linear, rows: Tensor) -> Projection:
    """t_i = phi(X_i W + b) with the Jacobian G_i of phi."""
    columns = form.columns
    local = probes.position_map(source, rows, columns) if form.shared else None
    if local is None:
        local = probes.local_map(source, rows, columns)
    weight = probes.take(linear.weight, columns, 1).transpose(0, 1)
    bias = None if linear.bias is None else linear.bias[columns]
    return Projection(weight, bias, local, form.kind)


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
