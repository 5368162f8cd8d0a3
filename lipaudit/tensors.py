"""Bounds of one attention layer on bare tensors: `lipaudit.bounds.sharp(x, wq, wk, wv)`.

Every bound is a function with the same arguments: `sharp`, `theorem3`, `theorem3_g1`,
`appendix_c`, `castin`, `mean_field`, `hu`, and the bounds of plug-ins. `exact` is the exact norm.
`ball_sharp` and `ball_norm` also take a radius: an upper bound of all norms in the ball around X,
and the largest norm found there.

    >>> import torch, lipaudit
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> eye = torch.eye(2)
    >>> norm, bound = exact(x, eye, eye, eye), lipaudit.bounds.sharp(x, eye, eye, eye)
    >>> bool(norm <= bound)
    True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lipaudit.errors import EvaluationError, UsageError
from lipaudit.theory import ascent, head_bounds
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.head_norms import head_norms
from lipaudit.theory.heads import Heads, affine_heads

ArrayLike: TypeAlias = Tensor | np.ndarray | Sequence[Any]


def heads(
    x: ArrayLike,
    wq: ArrayLike,
    wk: ArrayLike,
    wv: ArrayLike,
    *,
    biases: tuple[ArrayLike | None, ArrayLike | None, ArrayLike | None] = (None, None, None),
    scale: float | None = None,
    causal: bool = False,
    mask: ArrayLike | None = None,
) -> Heads:
    """Return the heads softmax(s X W_Q (X W_K)^T + mask) X W_V, in float64.

    Arguments are tensors, NumPy arrays or nested lists.

    Args:
        x: tokens X, (tokens, D) or (batch, tokens, D).
        wq: W_Q, (D, d) or (heads, D, d).
        wk: W_K, of the same shape.
        wv: W_V, (D, d_v) or (heads, D, d_v).
        biases: of q, k and v, each (d,) or (heads, d), or None.
        scale: s; default 1 / sqrt(d).
        causal: whether queries see no later keys.
        mask: added to the logits, broadcastable to (batch, heads, tokens, tokens).

    Raises:
        UsageError: values that are not real numbers, a mask of truth values, empty arrays, or
            shapes that do not fit.
    """
    # x becomes (batch, tokens, D), a weight (heads, D, d): a missing first axis has length 1.
    tokens = _read_numbers("tokens", x, least=2, most=3)
    queries = _read_numbers("W_Q", wq, least=2, most=3)
    keys = _read_numbers("W_K", wk, least=2, most=3)
    values = _read_numbers("W_V", wv, least=2, most=3)
    expected = "(D, d) or (heads, D, d), as X and W_Q have them"
    count = len(queries)
    width = tokens.shape[-1]
    _require_shape(queries.shape[1] == width, "W_Q", queries, expected)
    _require_shape(keys.shape == queries.shape, "W_K", keys, expected)
    _require_shape(values.shape[:2] == (count, width), "W_V", values, expected)
    layer = affine_heads(tokens, queries, keys, values)
    for name, bias in zip("qkv", biases, strict=True):
        if bias is not None:
            layer = _add_bias(layer, name, bias)
    logit_bias = None
    if mask is not None:
        logit_bias = _read_mask(mask, layer)
    if scale is None:
        scales = layer.scale  # 1 / sqrt(d)
    else:
        scales = tokens.new_full((1, 1), scale)
    return replace(layer, scale=scales, bias=logit_bias, causal=causal)


def _read_mask(mask: ArrayLike, layer: Heads) -> Tensor:
    """Return a mask with four axes that broadcasts to the logits, (batch, heads, tokens, tokens).

    The mask holds numbers that are added to the logits, such as 0 and -inf.

    Raises:
        UsageError: its shape does not fit the heads.
    """
    logit_bias = _read_numbers("mask", mask, least=0, most=4)
    shape = (*layer.q.shape[:3], layer.q.shape[2])  # (batch, heads, tokens, tokens)
    fits = all(n in (1, full) for n, full in zip(logit_bias.shape, shape, strict=True))
    _require_shape(fits, "mask", logit_bias, f"that broadcasts to {shape}")
    return logit_bias


def _add_bias(layer: Heads, name: str, values: ArrayLike) -> Heads:
    """Return the heads with a bias added to their q, k or v (`name`), and to its projection."""
    bias = _read_numbers(f"bias {name}", values, least=1, most=2)  # (1 or heads, width)
    rows = getattr(layer, name)  # q, k or v, (batch, heads, tokens, width)
    count = rows.shape[1]
    width = rows.shape[-1]
    fits = bias.shape[0] in (1, count) and bias.shape[1] == width
    _require_shape(fits, f"bias {name}", bias, f"({width},) or ({count}, {width})")
    bias = bias.expand(count, -1)  # a single bias is used by all heads
    # The record of the projection x W + b, `to_q` for q.
    projection = replace(getattr(layer, f"to_{name}"), bias=bias)
    changes: dict[str, Any] = {name: rows + bias[:, None], f"to_{name}": projection}
    return replace(layer, **changes)


def exact(x: ArrayLike, wq: ArrayLike, wk: ArrayLike, wv: ArrayLike, **how: Any) -> Tensor:
    """Return ||J||, the spectral norm of each head's Jacobian at x, to 1e-6.

    The shape is (batch, heads), without the batch axis if x is (tokens, D), and without the head
    axis if W_Q is (D, d).

    Args:
        x: tokens X, (tokens, D) or (batch, tokens, D).
        wq: W_Q, (D, d) or (heads, D, d).
        wk: W_K, of the same shape.
        wv: W_V, (D, d_v) or (heads, D, d_v).
        how: biases, scale, causal, mask, as in `heads`.

    Raises:
        UsageError: shapes that do not fit.
        EvaluationError: a norm did not converge.
    """
    layer = heads(x, wq, wk, wv, **how)
    # The seeds of the start vectors are the positions in the batch: further samples do not change
    # the norm of a sample.
    norms = head_norms(layer, seeds=range(len(layer.x)), tol=1e-6, within=1e-6)
    if not norms.converged.all():
        raise EvaluationError(
            f"{int((~norms.converged).sum())} norms did not converge to 1e-6",
            "Call lipaudit.theory.head_norms to choose the accuracy and to get proven limits.",
        )
    return _drop_axes(norms.norm, x, wq)


def every(
    x: ArrayLike, wq: ArrayLike, wk: ArrayLike, wv: ArrayLike, **how: Any
) -> dict[str, Tensor]:
    """Return every upper bound of ||J||, by name; NaN where a bound does not apply.

    J is the Jacobian of a head at x. Arguments and shapes are those of `exact`: tokens, weights,
    and `how` for biases, scale, causal and mask.
    """
    bounds = head_bounds.head_bounds(heads(x, wq, wk, wv, **how))
    return {name: _drop_axes(bounds[name], x, wq) for name in load_bounds()}


def ball_sharp(
    x: ArrayLike, wq: ArrayLike, wk: ArrayLike, wv: ArrayLike, r: float, **how: Any
) -> Tensor:
    """Return an upper bound of ||J(X')|| for all X' with ||X' - X||_F <= r: a Lipschitz constant.

    J(X') is the Jacobian of a head at tokens X'. The bound is proven, and equals the bound `sharp`
    at r = 0. Other arguments and shapes are those of `exact`: tokens, weights, and `how` for
    biases, scale, causal and mask.

    Raises:
        UsageError: shapes that do not fit, or a negative radius.
    """
    return _drop_axes(head_bounds.ball_sharp(heads(x, wq, wk, wv, **how), r), x, wq)


def ball_norm(
    x: ArrayLike, wq: ArrayLike, wk: ArrayLike, wv: ArrayLike, r: float, **how: Any
) -> Tensor:
    """Return the largest ||J(X')|| that a search finds with ||X' - X||_F <= r: a lower bound.

    J(X') is the Jacobian of a head at tokens X'. The norm at X counts as found. Arguments and
    shapes are those of `ball_sharp`.
    """
    layer = heads(x, wq, wk, wv, **how)
    # The seed of a sample's random start is its position in the batch.
    seeds = range(len(layer.x))
    found = ascent.ball_norm(layer, r, seeds=seeds)
    # Few steps of the search are at X, so it may find less than the norm there.
    at_x = head_norms(layer, seeds=seeds, tol=1e-6, within=1e-6).norm
    return _drop_axes(found.maximum(at_x), x, wq)


def __getattr__(name: str) -> Callable[..., Tensor]:
    """Return the function that computes the bound of this name.

    Python calls this for names that the module does not define: `lipaudit.bounds.sharp`.
    """
    bound = load_bounds().get(name)
    if bound is None:
        raise AttributeError(f"there is no bound {name!r}; there are {', '.join(load_bounds())}")

    def compute(x: ArrayLike, wq: ArrayLike, wk: ArrayLike, wv: ArrayLike, **how: Any) -> Tensor:
        return every(x, wq, wk, wv, **how)[name]

    compute.__doc__ = f"{bound.formula}\n\n{bound.explanation} ({bound.source}; {bound.domain})"
    return compute


def __dir__() -> list[str]:
    return ["ball_norm", "ball_sharp", "every", "exact", "heads", *load_bounds()]


def _read_numbers(name: str, values: ArrayLike, least: int, most: int) -> Tensor:
    """Return numbers as a float64 tensor of `most` axes; at least `least` axes must be given.

    Missing axes are added in front, with length 1.

    Args:
        name: what the values are, for the error.
        values: the numbers.
        least: smallest number of axes.
        most: largest number of axes.

    Raises:
        UsageError: the values are not real numbers, are empty or have another number of axes.
    """
    try:
        if isinstance(values, Tensor):
            numbers = values.detach()  # a parameter needs no graph here
        else:
            numbers = torch.tensor(np.array(values))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: {error}", "Give a tensor or an array of numbers.") from None
    if numbers.dtype == torch.bool:  # a mask of other libraries: True would add 1 to a logit
        raise UsageError(
            f"{name}: truth values are not numbers",
            "Give real numbers. (A mask is added to the logits: 0 where a query sees a key, -inf "
            "where it does not.)",
        )
    expected = f"of real numbers (at least one) with {least} to {most} axes"
    is_real = not numbers.is_complex()
    fits = is_real and numbers.numel() > 0 and least <= numbers.ndim <= most
    _require_shape(fits, name, numbers, expected)
    missing = (1,) * (most - numbers.ndim)
    return numbers.reshape(missing + tuple(numbers.shape)).to(torch.float64)


def _require_shape(fits: bool, name: str, values: Tensor, expected: str) -> None:
    """Refuse values whose shape does not fit; the error names the shape that is `expected`."""
    if not fits:
        raise UsageError(
            f"{name} of shape {tuple(values.shape)} does not fit", f"Give a tensor {expected}."
        )


def _drop_axes(values: Tensor, x: ArrayLike, weight: ArrayLike) -> Tensor:
    """Return values (batch, heads) with only those of the two axes that the user's arguments have.

    Args:
        values: one number per sample and head.
        x: the tokens, as the user gave them: (tokens, D) is one sample, without a batch axis.
        weight: W_Q, as the user gave it: (D, d) is one head, without a head axis.
    """
    if np.ndim(weight) != 3:
        values = values[:, 0]  # the only head
    if np.ndim(x) == 3:
        return values
    return values[0]  # the only sample
