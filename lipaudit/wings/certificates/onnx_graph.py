"""A network in ONNX: read without a runtime, and run on tensors or on forms; and written."""

from __future__ import annotations

import inspect
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, explain_failure
from lipaudit.models.net import Net
from lipaudit.wings.certificates.rounding import cast_up, round_up
from lipaudit.wings.certificates.vnnlib import Property


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
    """Return x[..., index, ...], with the index (integer, slice or list) on one axis."""
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
    rounded_up = -(-x.shape[axis] // num_outputs)
    return x.split(rounded_up, axis)


def _reshape(x: Any, shape: Any, allowzero: int = 0) -> Any:
    """Return x in another shape, in which 0 keeps the size of an axis, the operator Reshape."""
    sizes = _integers(shape)
    for i, size in enumerate(sizes):
        if size == 0:
            sizes[i] = x.shape[i]
    return x.reshape(sizes)


def _squeeze(x: Any, axes: Any = None) -> Any:
    if axes is None:
        return x.squeeze()
    return x.squeeze(tuple(_integers(axes)))


def _unsqueeze(x: Any, axes: Any) -> Any:
    """Insert axes of size 1; `axes` are their numbers in the result."""
    ndim = x.ndim + len(axes)
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


def _pad(x: Any, pads: Any, value: Any = 0.0, mode: str = "constant") -> Any:
    """Add entries at the ends of axes; `pads` has the sizes at beginnings, then at ends."""
    # torch wants pairs of beginning and end, the last axis first.
    ends = torch.tensor(_integers(pads)).view(2, -1)
    pairs = ends.flip(1).mT.flatten().tolist()
    # Some modes of torch cannot pad the first axes: leave them out if nothing is added there.
    while pairs[-2:] == [0, 0]:
        del pairs[-2:]
    if not pairs:
        return x
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
    # SAME: the number of windows is size / stride, rounded up; padding makes room for the last.
    first = []
    last = []
    for i in range(n):
        needed = dilations[i] * (size[i] - 1)  # entries behind the first of a window
        available = (x.shape[2 + i] - 1) % strides[i]  # behind the first of the last window
        padding = max(needed - available, 0)
        smaller = padding // 2
        larger = padding - smaller
        if kind == "SAME_LOWER":
            first.append(larger)
            last.append(smaller)
        else:
            first.append(smaller)
            last.append(larger)
    return strides, dilations, first + last


def _convolve(x: Any, w: Any, b: Any = None, group: int = 1, **how: Any) -> Any:
    """Return a convolution over one or two axes; `how` has strides, dilations and padding."""
    strides, dilations, pads = _place_windows(x, w.shape[2:], how)
    convolve: Any = F.conv1d if w.ndim == 3 else F.conv2d
    return convolve(_pad(x, pads), w, b, strides, 0, dilations, group)


def _pool_largest(x: Any, kernel_shape: Any, storage_order: int = 0, **how: Any) -> Any:
    """Return the largest value of every window; `how` has strides, dilations and padding.

    `storage_order` is only about the indices, which are not computed.
    """
    strides, dilations, pads = _place_windows(x, kernel_shape, how)
    padded = _pad(x, pads, -math.inf)
    pool: Any = F.max_pool1d if x.ndim == 3 else F.max_pool2d
    return pool(padded, kernel_shape, strides, 0, dilations)


def _pool_mean(x: Any, kernel_shape: Any, count_include_pad: int = 0, **how: Any) -> Any:
    """Return the mean of every window: a convolution with ones, divided by a count of entries.

    Without `count_include_pad` padding does not count. `how` has strides, dilations and padding.
    """
    w = torch.ones(x.shape[1], 1, *kernel_shape, dtype=x.dtype)
    channels = len(w)
    sums = _convolve(x, w, None, channels, **how)
    if count_include_pad:
        return sums / w[0].numel()
    inside = torch.ones(1, *x.shape[1:], dtype=x.dtype)
    count = _convolve(inside, w, None, channels, **how)
    return sums / count


def _multiply(
    a: Any,
    b: Any,
    c: Any = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803  (the attribute's name)
    transB: int = 0,  # noqa: N803
) -> Any:
    """Return alpha a @ b + beta c, the operator Gemm; factors of 1 are left out.

    A product with 1 would take time and rounding on forms.
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
    if beta != 1:
        c = beta * c
    return product + c


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
    """Return x in another type, by its number in ONNX.

    A cast between floating-point types does nothing: the network is a real-valued function.
    """
    dtype = CASTS[to]
    if x.is_floating_point() and dtype.is_floating_point:
        return x
    return x.to(dtype)


def _rectify(x: Any, slope: Any) -> Any:
    """Return x where x > 0, else slope x: the operator PRelu."""
    positive = x.relu()
    # Not slope x + (1 - slope) relu(x): 1 - slope would be rounded.
    return positive + (x - positive) * slope


def _drop(x: Any, ratio: Any = None, training: Any = None, seed: int = 0) -> Any:
    if training is not None and bool(training):
        raise InputError("Dropout in training is random", TRAINED)
    return x


def _reduce(name: str, *order: int) -> Any:
    """Return the operator that reduces axes by a method of tensors, such as "sum".

    `order` is the first argument of the method "norm", else nothing.
    """

    def reduce_axes(x: Any, axes: Any = None, keepdims: int = 1) -> Any:
        """Return x reduced over axes, by default all, by its method `name`."""
        if axes is None:
            axes = range(x.ndim)
        method = getattr(x, name)
        return method(*order, tuple(_integers(axes)), keepdim=bool(keepdims))

    return reduce_axes


def _rename(name: str) -> Any:
    """Return the operator that is a function of torch or torch.nn.functional, by its name."""

    def compute(*x: Any) -> Any:
        function = getattr(torch, name, None) or getattr(F, name)
        return function(*x)

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
    **{name: _rename(name.lower()) for name in SAME.split()},
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
    "InstanceNormalization": lambda x, w, b, epsilon: F.group_norm(x, x.shape[1], w, b, epsilon),
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

# Before this version a softmax runs over all axes from the given one on.
OLDEST = 13


class Graph:
    """A network from one flat input, (batch, inputs), to one flat output, (batch, outputs).

    What does not depend on the input is computed in the dtype of the network, as runtimes do.

    Args:
        path: the file.

    Attributes:
        dtype: dtype of the input.

    Raises:
        InputError: `onnx` is not installed, the file cannot be read, or it has an operator or an
            attribute that is not read.
    """

    def __init__(self, path: Path) -> None:
        """Read a file: weights, the input and the output, then the steps in order."""
        advice = "pip install 'lipaudit[onnx]'"
        with explain_failure("ONNX needs the library `onnx`", advice, ImportError):
            import onnx

        advice = "Give a network with one input and one output."
        with explain_failure(f"{path} cannot be read as ONNX", advice, Exception):
            model = onnx.load(path)
            # One version of the standard operators, one input and one output: else an error.
            (version,) = (o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
            graph = model.graph
            self.weights = {tensor.name: _read_value(tensor) for tensor in graph.initializer}
            self.weights[""] = None  # the name of an optional input that is absent
            (start,) = (each for each in graph.input if each.name not in self.weights)
            (end,) = graph.output
            kind = start.type.tensor_type
            self.dtype = CASTS[kind.elem_type]
            self.ends = start.name, end.name
        self.shape = [size.dim_value or 1 for size in kind.shape.dim]  # 0: any batch size

        advice = f"Export the network with other operators, in version 17 (not {version})."
        self.steps = []
        # The last step that uses a value, which is then dropped: tensors of forms are large.
        self.last_step: dict[str, int] = {}
        for i, node in enumerate(graph.node):
            attributes = _read_attributes(node)
            unread = _find_unread(node, attributes, version)
            if unread:
                raise InputError(f"{path}: the operator {unread} is not read", advice)
            self.steps.append((OPERATORS[node.op_type], node.input, node.output, attributes))
            for name in node.input:
                self.last_step[name] = i

    def __call__(self, x: Any) -> Any:
        """Run the network on tensors or forms (batch, inputs); return (batch, outputs).

        It runs row by row, because the shapes in the file may be fixed to one sample.
        """
        if len(x) > 1:
            return torch.cat([self(row[None]) for row in x])
        start, end = self.ends
        values = {**self.weights, start: x.reshape(self.shape)}
        for i, (operator, inputs, outputs, attributes) in enumerate(self.steps):
            results = operator(*(values[name] for name in inputs), **attributes)
            if not isinstance(results, tuple | list):
                results = (results,)
            values.update(zip(outputs, results, strict=False))
            # Unused outputs are named "" in the file, like absent inputs, whose value is None.
            values[""] = None
            for name in {*inputs} - {""}:
                if self.last_step[name] == i:
                    del values[name]
        return values[end].reshape(1, -1)


def _read_value(value: Any) -> Any:
    """Return a value of an ONNX file: tensors for torch, bytes as text, others as they are."""
    import onnx

    if isinstance(value, onnx.TensorProto):
        return torch.tensor(onnx.numpy_helper.to_array(value))
    if isinstance(value, bytes):
        return value.decode()
    return value


def _read_attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an operator by name."""
    import onnx

    attributes = {}
    for attribute in node.attribute:
        attributes[attribute.name] = _read_value(onnx.helper.get_attribute_value(attribute))
    if node.op_type == "Split":  # before version 18 the number of parts is only in the outputs
        attributes["num_outputs"] = len(node.output)
    return attributes


def _find_unread(node: Any, attributes: Mapping[str, Any], version: int) -> str:
    """Return the operator, or operator and attribute, that cannot be read; "" if all can be.

    Args:
        node: a node of the ONNX graph.
        attributes: its attributes by name.
        version: version of the operators (opset).
    """
    name = node.op_type
    # Before version 13 a softmax runs over all axes from `axis` on: only the last one is the same.
    if "Softmax" in name and version < OLDEST and attributes.get("axis") != -1:
        return f"{name} with axis"
    if node.domain or name not in OPERATORS:
        return str(name)
    known = set(inspect.signature(OPERATORS[name]).parameters)
    if "how" in known:  # the function takes any attribute of windows
        known.update(WINDOWS)
    for attribute in attributes:
        if attribute not in known:
            return f"{name} with {attribute}"
    return ""


class Query(nn.Module):
    """A property as a classifier of u in [-1, 1]: class 0 wins where it holds.

    Every other class is a clause of what must not happen. Its logit is the least of
    limits - rows @ y, which is negative where a condition fails; that of class 0 is 0.

    Args:
        graph: the network.
        goal: the property.
    """

    def __init__(self, graph: Graph, goal: Property) -> None:
        """Store the map of u in [-1, 1] to the input centre + u radius, and that of y to logits.

        The logits are limits - rows @ y: one for each condition, behind zeros for class 0.
        """
        super().__init__()
        self.graph = graph
        self.goal = goal
        _, self.conditions, outputs = goal.rows.shape
        centre = ((goal.low + goal.high) / 2).to(graph.dtype)
        # Rounding moves the centre: the radius covers it.
        radius = round_up(torch.maximum(goal.high - centre, centre - goal.low))
        zeros = torch.zeros(self.conditions, outputs, dtype=graph.dtype)  # of class 0
        limits = cast_up(goal.limits, graph.dtype).flatten()
        self.centre = nn.Parameter(centre)
        self.radius = nn.Parameter(cast_up(radius, graph.dtype))
        rows = goal.rows.to(zeros).flatten(0, 1)
        self.rows = nn.Parameter(torch.cat([zeros, -rows]))
        self.limits = nn.Parameter(torch.cat([zeros[:, 0], limits]))

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """Return the name of the dtype of the network."""
        return "float64" if self.graph.dtype == torch.float64 else "float32"

    def forward(self, u: Tensor) -> Tensor:
        """Return the logits (batch, 1 + clauses) of inputs u in [-1, 1], (batch, inputs).

        The logit of a clause is the least of its conditions; that of class 0 is 0.
        """
        x = self.centre + u * self.radius
        y = F.linear(self.graph(x), self.rows, self.limits)
        if self.conditions == 1:  # per clause: y has one entry for each class
            return y
        return y.reshape(len(y), -1, self.conditions).amin(2)

    def find_example(self, u: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the input for u and its outputs if they break the property, else None.

        Args:
            u: (1, inputs) in [-1, 1], an adversarial example of the classifier.
        """
        # The ends of the box are rounded inwards, so that the input is in the box.
        low = cast_up(self.goal.low, self.graph.dtype)
        high = -cast_up(-self.goal.high, self.graph.dtype)
        with torch.no_grad():
            x = (self.centre + u * self.radius).maximum(low).minimum(high)
            y = self.graph(x)
        if not self.goal.is_broken_by(y[0]):
            return None
        return x[0], y[0]


# Writing

# What most verifiers read.
OPSET = 17
# The first version with GELU as one operator. Before, it is spelled with erf and a rounded root of
# two, or with tanh: another function, with looser bounds.
GELU_OPSET = 20
SPELLINGS = {"Erf", "Tanh"}


def export_onnx(net: Net, sample: Batch) -> bytes:
    """Return the function from the attacked space to the logits (`Net.forward`) as ONNX.

    Of a text, ids, positions and mask are constants: the file belongs to this sample.

    Args:
        net: a model.
        sample: one sample, the shape of the input.

    Raises:
        InputError: `onnx` is not installed, or torch cannot express an operation in ONNX.
    """
    advice = "pip install 'lipaudit[onnx]'"
    with explain_failure("ONNX needs the library `onnx`", advice, ImportError):
        import onnx

    text = f"{net.architecture} cannot be written as ONNX"
    advice = "Leave --export out."
    content = b""
    # A newer version of the operators only if the older one cannot express GELU exactly.
    for version in (OPSET, GELU_OPSET):
        with explain_failure(text, advice):
            content = _export_version(net, sample, version)
        nodes = onnx.load_from_string(content).graph.node
        if SPELLINGS.isdisjoint(node.op_type for node in nodes):
            break
    return content


def _export_version(net: Net, sample: Batch, version: int) -> bytes:
    """Return `Net.forward` around a sample as ONNX of a version of its operators."""

    class Forward(nn.Module):
        """`Net.forward` with the parameters of the model."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = net.module

        def forward(self, z: Tensor) -> Tensor:
            """Return logits."""
            return net.forward(z, sample)

    file: Any = io.BytesIO()
    # If torch's exporter fails, it prints the graph: the patch silences that.
    quiet = patch.object(torch._C, "_jit_onnx_log", create=True)
    with warnings.catch_warnings(action="ignore"), quiet:
        # The exporter by tracing: the newer one takes 25 times as long and rewrites the graph.
        torch.onnx.export(
            Forward(),
            (net.point(sample),),
            file,
            dynamo=False,
            opset_version=version,
            input_names=["X"],
            output_names=["Y"],
            # With the mode EVAL it would merge normalisations into weights, which rounds them.
            training=torch.onnx.TrainingMode.PRESERVE,
        )
    return bytes(file.getvalue())
