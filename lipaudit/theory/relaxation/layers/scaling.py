"""Normalisations over other axes than the last, and by a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lipaudit.theory.relaxation.form import Form
from lipaudit.theory.relaxation.layers.pieces import absolute, amax
from lipaudit.theory.relaxation.operations.affine import add, reduced, scaled
from lipaudit.theory.relaxation.operations.norms import layer_norm, rms_norm
from lipaudit.theory.relaxation.operations.smooth import SQRT, relax, square
from lipaudit.theory.relaxation.refusals import NoRuleError, UnboundedError


def layer_norm_of_axes(
    input: Form,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Form:
    """A LayerNorm over the last axes, together one."""
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if len(shape) < 2:
        return layer_norm(input, normalized_shape, weight, bias, eps)
    flat: Any = input.flatten(-len(shape))
    weight, bias = (None if t is None else t.flatten() for t in (weight, bias))
    result: Any = layer_norm(flat, flat.shape[-1], weight, bias, eps)
    return result.unflatten(-1, shape)


def group_norm(
    input: Form,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Form:
    """A LayerNorm of every group of channels (axis 1) and all places, its weights by channel."""
    groups: Any = input.reshape(input.shape[0], num_groups, -1)
    result: Any = layer_norm(groups, groups.shape[-1], None, None, eps).reshape(input.shape)
    shape = (-1, *[1] * (input.ndim - 2))
    result = result if weight is None else scaled(result, weight.view(shape))
    return result if bias is None else add(result, bias.view(shape))


def instance_norm(
    input: Form,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Form:
    """A LayerNorm of all places of every channel."""
    if not use_input_stats:
        raise NoRuleError("instance_norm with running statistics")
    return group_norm(input, input.shape[1], weight, bias, eps)


def vector_norm(
    input: Form,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,  # noqa: A002
) -> Form:
    """The 1-, 2- or largest norm over axes."""
    if ord in (2, "fro", None):
        return relax(reduced(square(input), dim, keepdim), SQRT, positive=True)
    if ord == 1:
        return reduced(absolute(input), dim, keepdim)
    if ord == float("inf"):
        return amax(absolute(input), dim, keepdim)
    raise NoRuleError(f"a norm of order {ord}")


def norm(
    input: Form, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Form:
    """As torch.norm of vectors."""
    return vector_norm(input, p, dim, keepdim)


def normalize(
    input: Form, p: float | int = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Form:
    """Return x / ||x|| along an axis: an RMSNorm over sqrt(n), for norms of more than eps."""
    if p != 2 or out is not None:
        raise NoRuleError(f"normalize by a norm of order {p}")
    rows: Any = input.transpose(dim, -1)
    n = rows.shape[-1]
    low, _ = reduced(square(rows), -1).range()
    if not (low > eps**2).all():  # below it, torch divides by eps
        raise UnboundedError
    unit = scaled(rms_norm(rows, n, None, 0.0), n**-0.5, roundings=3)
    return unit.transpose(dim, -1)  # type: ignore[return-value]


RULES: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm_of_axes,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    **dict.fromkeys(("vector_norm", "linalg_vector_norm"), vector_norm),
    "norm": norm,
    "normalize": normalize,
}
"""What these normalisations do to forms."""
