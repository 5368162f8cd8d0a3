"""Operators of ONNX as functions of tensors, which also run on forms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lipaudit.errors import InputError


def _integers(values: Any) -> list[int]:
    """Return a tensor or a sequence of sizes or axes as integers."""
    return [int(value) for value in values]


def _slice(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    """Return x[start:end:step] along each of the axes, the operator Slice."""
    if axes is None:
        axes = range(len(starts))
    if steps is None:
        steps = [1] * len(starts)
    for start, end, step, axis in zip(starts, ends, steps, _integers(axes), strict=False):
        index: Any = slice(int(start), int(end), int(step))
        if index.step < 0:  # torch takes no negative steps: list the indices
            index = [*range(x.shape[axis])[index]]
        x = _take(x, index, axis)
    return x


def _take(x: Any, index: Any, axis: int) -> Any:
    """Return x with an index (integer, slice or list) applied to one axis."""
    before = [slice(None)] * (axis % x.ndim)
    return x[*before, index]


def _gather(x: Any, indices: Any, axis: int = 0) -> Any:
    """Return the entries of an axis at some indices; a scalar index removes the axis."""
    if not indices.ndim:
        indices = int(indices)
    return _take(x, indices, axis)


def _split(x: Any, split: Any = None, axis: int = 0, num_outputs: int = 1) -> Any:
    """Return the parts of an axis: of the sizes `split`, or `num_outputs` of about equal size."""
    if split is not None:
        return x.split(_integers(split), axis)
    size = -(-x.shape[axis] // num_outputs)  # rounded up: the last part may be smaller
    return x.split(size, axis)


def _reshape(x: Any, shape: Any, allowzero: int = 0) -> Any:
    """Return x in another shape, the operator Reshape: 0 keeps an axis, unless `allowzero`."""
    sizes = _integers(shape)
    for i, size in enumerate(sizes):
        if size == 0 and not allowzero:
            sizes[i] = x.shape[i]
    return x.reshape(sizes)


def _squeeze(x: Any, axes: Any = None) -> Any:
    if axes is None:
        return x.squeeze()
    return x.squeeze(tuple(_integers(axes)))


def _unsqueeze(x: Any, axes: Any) -> Any:
    """Insert axes of size 1; `axes` are their numbers in the result, which may be negative."""
    ndim = x.ndim + len(axes)
    # In ascending order, so that later axes do not move the earlier ones.
    for axis in sorted(axis % ndim for axis in _integers(axes)):
        x = torch.unsqueeze(x, axis)
    return x


def _clip(x: Any, min: Any = None, max: Any = None) -> Any:
    """Return x clamped to [min, max]; in ONNX these are tensors, here they become numbers."""
    if min is not None:
        min = torch.as_tensor(min).item()
    if max is not None:
        max = torch.as_tensor(max).item()
    return x.clamp(min, max)


def _pad(x: Any, pads: Any, value: Any = None, mode: str = "constant") -> Any:
    """Add entries at the ends of axes; `pads` has the sizes at beginnings, then at ends."""
    # torch expects a pair (beginning, end) for each axis, the last axis first.
    ends = torch.tensor(_integers(pads)).view(2, -1)
    pairs = ends.flip(1).mT.flatten().tolist()
    # Some modes of torch cannot pad the first axes: leave them out if nothing is added there.
    while pairs[-2:] == [0, 0]:
        del pairs[-2:]
    if not pairs:
        return x
    if value is None:  # absent
        value = 0.0
    return F.pad(x, pairs, mode, float(value))


def _place_windows(
    x: Any, size: Sequence[int], attributes: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Return strides, dilations and padding of the windows of a convolution or a pooling.

    Args:
        x: (batch, channels, ...), the input; windows move over the axes behind these two.
        size: size of a window along each of these axes.
        attributes: the attributes of the ONNX operator.

    Returns:
        A stride and a dilation per axis; padding at all beginnings, then at all ends.
    """
    n = len(size)
    if attributes.get("ceil_mode") or n > 2:
        raise InputError(
            "ceil_mode and windows over 3 axes are not read",
            "Export the network with other operators.",
        )
    strides = attributes.get("strides", [1] * n)
    dilations = attributes.get("dilations", [1] * n)
    kind = attributes.get("auto_pad", "")
    if not kind.startswith("SAME"):
        return strides, dilations, attributes.get("pads", [0] * 2 * n)
    # SAME: windows begin at the entries 0, stride, 2 stride, ... of an axis. Padding adds the
    # entries that the last window lacks: one half at each end, of which one may be larger.
    smaller = []
    larger = []
    for i in range(n):
        needed = dilations[i] * (size[i] - 1)  # behind the first entry of a window
        available = (x.shape[2 + i] - 1) % strides[i]  # behind the first entry of the last window
        padding = max(needed - available, 0)
        smaller.append(padding // 2)
        larger.append(padding - padding // 2)
    if kind == "SAME_LOWER":
        return strides, dilations, larger + smaller
    return strides, dilations, smaller + larger


def _convolve(x: Any, w: Any, b: Any = None, group: int = 1, **how: Any) -> Any:
    """Return a convolution over one or two axes; `how` has strides, dilations and padding."""
    strides, dilations, pads = _place_windows(x, w.shape[2:], how)
    convolve: Any = F.conv1d if w.ndim == 3 else F.conv2d
    return convolve(_pad(x, pads), w, b, stride=strides, dilation=dilations, groups=group)


def _pool_largest(x: Any, kernel_shape: Any, storage_order: int = 0, **how: Any) -> Any:
    """Return the largest value of every window; `how` has strides, dilations and padding.

    `storage_order` concerns only the indices of the values, which are not returned: it is ignored.
    """
    strides, dilations, pads = _place_windows(x, kernel_shape, how)
    padded = _pad(x, pads, -math.inf)
    pool: Any = F.max_pool1d if x.ndim == 3 else F.max_pool2d
    return pool(padded, kernel_shape, stride=strides, dilation=dilations)


def _pool_mean(x: Any, kernel_shape: Any, count_include_pad: int = 0, **how: Any) -> Any:
    """Return the mean of every window: a convolution with ones, divided by a count of entries.

    Entries of padding are counted only with `count_include_pad`. `how` has strides, dilations and
    padding.
    """
    channels = x.shape[1]
    w = torch.ones(channels, 1, *kernel_shape, dtype=x.dtype)  # each channel is summed alone
    sums = _convolve(x, w, group=channels, **how)
    if count_include_pad:
        return sums / w[0].numel()
    # The same sums of ones, padded with zeros, count the entries that are no padding.
    inside = torch.ones(1, *x.shape[1:], dtype=x.dtype)
    return sums / _convolve(inside, w, group=channels, **how)


def _multiply(
    a: Any,
    b: Any,
    c: Any = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803  (the attribute's name)
    transB: int = 0,  # noqa: N803
) -> Any:
    """Return alpha a @ b + beta c, the operator Gemm.

    Factors alpha = 1 and beta = 1 are not multiplied: on forms, a product takes time and adds
    rounding errors.
    """
    if transA:
        a = a.mT
    if transB:
        b = b.mT
    product = a @ b
    if alpha != 1:
        product = alpha * product
    if c is None:
        return product
    if beta == 1:
        return product + c
    return torch.add(product, c, alpha=beta)  # counts the rounding of beta c, if c is a constant


def _power(x: Any, y: Any) -> Any:
    """Return x^y in the dtype of x."""
    if y.numel() == 1:  # certificates have rules for exponents that are numbers
        y = y.item()
    power = x**y
    if x.is_floating_point():
        return power
    return power.to(x.dtype)


def _divide(x: Any, y: Any) -> Any:
    if x.is_floating_point():
        return x / y
    return torch.div(x, y, rounding_mode="trunc")


def _find_remainder(x: Any, y: Any, fmod: int = 0) -> Any:
    compute: Any = torch.fmod if fmod else torch.remainder
    return compute(x, y)


def _cast(x: Any, to: int) -> Any:
    """Return x cast to the type with the number `to` in ONNX.

    A cast between floating-point types is ignored, because certificates treat the network as a
    function of real numbers.
    """
    dtype = CASTS[to]
    if x.is_floating_point() and dtype.is_floating_point:
        return x
    return x.to(dtype)


def _rectify(x: Any, slope: Any) -> Any:
    """Return x where x > 0, else slope x: the operator PRelu."""
    positive = x.relu()
    # The formula slope x + (1 - slope) relu(x) is not used, because 1 - slope would be rounded.
    return positive + (x - positive) * slope


def _drop(x: Any, ratio: Any = None, training: Any = None, seed: int = 0) -> Any:
    if training is not None and bool(training):
        raise InputError("Dropout in training is random", TRAINED)
    return x


def _reduce(name: str, *order: int) -> Any:
    """Return the operator that reduces axes by a method of tensors, such as "sum".

    Args:
        name: the method.
        order: its first argument, the order of the norm for the method "norm"; else nothing.
    """

    def reduce_axes(x: Any, axes: Any = None, keepdims: int = 1) -> Any:
        """Return x.sum(axes, keepdim), or another method `name`; by default over all axes.

        `order` is empty, except for norms.
        """
        if axes is None:
            axes = range(x.ndim)
        return getattr(x, name)(*order, tuple(_integers(axes)), keepdim=bool(keepdims))

    return reduce_axes


def _wrap_torch(name: str) -> Any:
    """Return a function of torch or torch.nn.functional, such as "relu", as an operator.

    It is wrapped, because `inspect.signature` fails on functions of torch that are built in.
    """

    def compute(*x: Any) -> Any:
        return (getattr(torch, name, None) or getattr(F, name))(*x)

    return compute


TRAINED = "Export the network in evaluation mode."
# Types by their numbers in ONNX.
CASTS = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 11: torch.float64}
# Functions of torch: their names in ONNX, without attributes.
SAME = """Abs Add Cos Erf Exp HardSwish Log MatMul Mish Mul Neg Reciprocal Relu Sigmoid Sin
Softplus Sqrt Sub Tanh Where"""
REDUCTIONS = {"ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "amax", "ReduceMin": "amin"}
WINDOWS = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
OPERATORS: dict[str, Any] = {
    **{name: _wrap_torch(name.lower()) for name in SAME.split()},
    **{name: _reduce(same) for name, same in REDUCTIONS.items()},
    "ReduceLogSumExp": _reduce("logsumexp"),
    "ReduceL2": _reduce("norm", 2),
    "Div": _divide,
    "Equal": lambda x, y: x == y,
    "Identity": lambda x: x,
    "Dropout": _drop,
    "Constant": lambda value: value,
    "Max": lambda *x: reduce(torch.maximum, x),
    "Min": lambda *x: reduce(torch.minimum, x),
    "Sum": lambda *x: reduce(torch.add, x),
    "Mean": lambda *x: reduce(torch.add, x) / len(x),
    "Mod": _find_remainder,
    "Pow": _power,
    "Clip": _clip,
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "PRelu": _rectify,
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "Softsign": lambda x: x / (1 + x.abs()),
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (x * alpha + beta).clamp(0.0, 1.0),
    "Softmax": lambda x, axis=-1: x.softmax(axis),
    "LogSoftmax": lambda x, axis=-1: x.log_softmax(axis),
    "Einsum": lambda *x, equation: torch.einsum(equation, *x),
    "Gemm": _multiply,
    "Conv": _convolve,
    "MaxPool": _pool_largest,
    "AveragePool": _pool_mean,
    "GlobalMaxPool": lambda x: x.amax(tuple(range(2, x.ndim)), True),
    "GlobalAveragePool": lambda x: x.mean(tuple(range(2, x.ndim)), True),
    "BatchNormalization": lambda x, w, b, mean, var, epsilon=1e-5, momentum=0, training_mode=0: (
        F.batch_norm(x, mean, var, w, b, bool(training_mode), 0.0, epsilon)
    ),
    "LayerNormalization": lambda x, w, b=None, axis=-1, epsilon=1e-5, stash_type=1: F.layer_norm(
        x, tuple(x.shape[axis:]), w, b, epsilon
    ),
    "LpNormalization": lambda x, axis=-1, p=2: F.normalize(x, p, axis),
    "InstanceNormalization": lambda x, w, b, epsilon=1e-5: F.group_norm(
        x, x.shape[1], w, b, epsilon
    ),
    "Shape": lambda x: torch.tensor(tuple(x.shape)),
    "ConstantOfShape": lambda shape, value=0.0: torch.as_tensor(value).expand(_integers(shape)),
    "Cast": _cast,
    "Reshape": _reshape,
    "Flatten": lambda x, axis=1: x.reshape(math.prod(x.shape[:axis]), -1),
    "Expand": lambda x, shape: x.expand(np.broadcast_shapes(tuple(x.shape), _integers(shape))),
    "Transpose": lambda x, perm=None: x.permute(*(perm or range(x.ndim)[::-1])),
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": lambda *x, axis: torch.cat(x, axis),
    "Split": _split,
    "Slice": _slice,
    "Tile": lambda x, repeats: x.repeat(_integers(repeats)),
    "GatherElements": lambda x, at, axis=0: x.gather(axis, at % x.shape[axis]),
    "Gather": _gather,
    "Pad": _pad,
}
"""The operators that are read: functions of their inputs, with attributes as keywords."""
