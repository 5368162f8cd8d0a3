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

from lipaudit.certify.symbols import cast_up, up
from lipaudit.data.batch import Batch
from lipaudit.data.vnnlib import Property
from lipaudit.errors import InputError, explain_failure
from lipaudit.models.net import Net


def _integers(values: Any) -> list[int]:
    return [*map(int, values)]


def _slice(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    for i, axis in enumerate(range(len(starts)) if axes is None else _integers(axes)):
        at: Any = slice(int(starts[i]), int(ends[i]), 1 if steps is None else int(steps[i]))
        at = at if at.step > 0 else [*range(x.shape[axis])[at]]  # torch has no steps back
        x = x[*[slice(None)] * (axis % x.ndim), at]
    return x


def _pad(x: Any, pads: Any, value: Any = 0.0, mode: str = "constant") -> Any:
    # ONNX has all beginnings, then all ends; torch wants pairs, the last axis first.
    pairs = torch.tensor(_integers(pads)).view(2, -1).flip(1).mT.flatten().tolist()
    while pairs[-2:] == [0, 0]:  # of the first axes, which some modes do not take
        del pairs[-2:]
    return F.pad(x, pairs, mode, float(value)) if pairs else x


def _place_windows(x: Any, size: Sequence[int], how: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return steps, gaps, and padding of windows of a size, for the axes behind the first two."""
    n, kind = len(size), how.get("auto_pad", "")
    if how.get("ceil_mode") or n > 2:
        raise InputError(
            "ceil_mode and windows over 3 axes are not read",
            "Export the network with other operators.",
        )
    strides, gaps = how.get("strides", [1] * n), how.get("dilations", [1] * n)
    pads = [*how.get("pads", [0] * 2 * n)]
    for i in range(n) if kind.startswith("SAME") else ():
        room = max(gaps[i] * (size[i] - 1) - (x.shape[2 + i] - 1) % strides[i], 0)
        pads[i] = (room + (kind == "SAME_LOWER")) // 2
        pads[n + i] = room - pads[i]
    return strides, gaps, pads


def _convolve(x: Any, w: Any, b: Any = None, group: int = 1, **how: Any) -> Any:
    strides, gaps, pads = _place_windows(x, w.shape[2:], how)
    return (F.conv1d, F.conv2d)[w.ndim - 3](_pad(x, pads), w, b, strides, 0, gaps, group)


def _pool_largest(x: Any, kernel_shape: Any, storage_order: int = 0, **how: Any) -> Any:
    strides, gaps, pads = _place_windows(x, kernel_shape, how)
    wide = _pad(x, pads, -math.inf)
    return (F.max_pool1d, F.max_pool2d)[x.ndim - 3](wide, kernel_shape, strides, 0, gaps)


def _pool_mean(x: Any, kernel_shape: Any, count_include_pad: int = 0, **how: Any) -> Any:
    w = torch.ones(x.shape[1], 1, *kernel_shape, dtype=x.dtype)
    inside = torch.ones(1, *x.shape[1:], dtype=x.dtype)
    count = w[0].numel() if count_include_pad else _convolve(inside, w, None, len(w), **how)
    return _convolve(x, w, None, len(w), **how) / count


def _multiply(a: Any, b: Any, c: Any, alpha: float, beta: float) -> Any:
    product = a @ b if alpha == 1 else alpha * (a @ b)
    return product if c is None else product + (c if beta == 1 else beta * c)


def _power(x: Any, y: Any) -> Any:
    power = x ** (y.item() if y.numel() == 1 else y)
    return power if x.is_floating_point() else power.to(x.dtype)  # the type of the base


def _drop(x: Any, ratio: Any = None, training: Any = None, seed: int = 0) -> Any:
    if training is not None and bool(training):
        raise InputError("Dropout in training is random", TRAINED)
    return x


def _reduce(name: str, *order: int) -> Any:
    return lambda x, axes=None, keepdims=1: getattr(x, name)(
        *order, tuple(range(x.ndim) if axes is None else _integers(axes)), keepdim=bool(keepdims)
    )


def _rename(name: str) -> Any:
    return lambda *x: (getattr(torch, name, None) or getattr(F, name))(*x)


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
    "Div": lambda x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc"),
    "Equal": lambda x, y: x == y,
    "Identity": lambda x: x,
    "Dropout": _drop,
    "Constant": lambda value: value,
    "Max": lambda *x: reduce(torch.maximum, x),
    "Min": lambda *x: reduce(torch.minimum, x),
    "Sum": lambda *x: reduce(torch.add, x),
    "Mean": lambda *x: reduce(torch.add, x) / len(x),
    "Mod": lambda x, y, fmod=0: (torch.fmod if fmod else torch.remainder)(x, y),
    "Pow": _power,
    "Clip": lambda x, min=None, max=None: x.clamp(
        *(e if e is None else torch.as_tensor(e).item() for e in (min, max))
    ),
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "PRelu": lambda x, slope: (r := x.relu()) + (x - r) * slope,  # 1 - slope would be rounded
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "Softsign": lambda x: x / (1 + x.abs()),
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (x * alpha + beta).clamp(0.0, 1.0),
    "Softmax": lambda x, axis=-1: x.softmax(axis),
    "LogSoftmax": lambda x, axis=-1: x.log_softmax(axis),
    "Einsum": lambda *x, equation: torch.einsum(equation, *x),
    "Gemm": lambda a, b, c=None, alpha=1.0, beta=1.0, transA=0, transB=0: _multiply(
        a.mT if transA else a, b.mT if transB else b, c, alpha, beta
    ),
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
    "Cast": lambda x, to: x if x.is_floating_point() and to in (1, 11) else x.to(CASTS[to]),
    "Reshape": lambda x, shape, allowzero=0: x.reshape(
        [size or x.shape[i] for i, size in enumerate(_integers(shape))]
    ),
    "Flatten": lambda x, axis=1: x.reshape(math.prod(x.shape[:axis]), -1),
    "Expand": lambda x, shape: x.expand(np.broadcast_shapes(tuple(x.shape), _integers(shape))),
    "Transpose": lambda x, perm=None: x.permute(*(perm or range(x.ndim)[::-1])),
    "Squeeze": lambda x, axes=None: (
        x.squeeze() if axes is None else x.squeeze(tuple(_integers(axes)))
    ),
    "Unsqueeze": lambda x, axes: reduce(
        torch.unsqueeze, sorted(a % (x.ndim + len(axes)) for a in _integers(axes)), x
    ),
    "Concat": lambda *x, axis: torch.cat(x, axis),
    "Split": lambda x, split=None, axis=0, num_outputs=1: x.split(
        -(-x.shape[axis] // num_outputs) if split is None else _integers(split), axis
    ),
    "Slice": _slice,
    "Tile": lambda x, repeats: x.repeat(_integers(repeats)),
    "GatherElements": lambda x, at, axis=0: x.gather(axis, at % x.shape[axis]),
    "Gather": lambda x, at, axis=0: x[
        *[slice(None)] * (axis % x.ndim), at if at.ndim else int(at)
    ],
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
        advice = "pip install 'lipaudit[onnx]'"
        with explain_failure("ONNX needs the library `onnx`", advice, ImportError):
            import onnx

        def read(value: Any) -> Any:
            if isinstance(value, onnx.TensorProto):
                return torch.tensor(onnx.numpy_helper.to_array(value))
            return value.decode() if isinstance(value, bytes) else value

        advice = "Give a network with one input and one output."
        with explain_failure(f"{path} cannot be read as ONNX", advice, Exception):
            model = onnx.load(path)
            (version,) = (o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
            graph = model.graph
            self.weights = {each.name: read(each) for each in graph.initializer} | {"": None}
            (start,) = (each for each in graph.input if each.name not in self.weights)
            (end,) = graph.output
            kind = start.type.tensor_type
            self.dtype, self.ends = CASTS[kind.elem_type], (start.name, end.name)
        self.shape = [size.dim_value or 1 for size in kind.shape.dim]  # 0: any batch size
        self.steps = []
        for node in graph.node:
            given = {a.name: read(onnx.helper.get_attribute_value(a)) for a in node.attribute}
            name, known = node.op_type, {}
            if name in OPERATORS and not node.domain:
                known = {"": 0, **inspect.signature(OPERATORS[name]).parameters}
                known |= dict.fromkeys(WINDOWS if "how" in known else ())
            given |= {"num_outputs": len(node.output)} if name == "Split" else {}
            odd = [*given.keys() - known] if known else []
            odd += ["axis"] * ("Softmax" in name and version < OLDEST and given.get("axis") != -1)
            advice = f"Export the network with other operators, in version 17 (not {version})."
            if odd or not known:
                raise InputError(
                    f"{path}: the operator {name}{odd and f' with {odd[0]}' or ''} is not read",
                    advice,
                )
            self.steps.append((OPERATORS[name], node.input, node.output, given))
        # A value is dropped after its last use: forms are large.
        self.last = {name: i for i, step in enumerate(self.steps) for name in step[1]}

    def __call__(self, x: Any) -> Any:
        """Run the network; row by row, because the shapes in the file may be those of one."""
        if len(x) > 1:
            return torch.cat([self(row[None]) for row in x])
        values = {**self.weights, self.ends[0]: x.reshape(self.shape)}
        for i, (operator, inputs, outputs, given) in enumerate(self.steps):
            result = operator(*(values[name] for name in inputs), **given)
            many = isinstance(result, tuple | list)
            values |= zip(outputs, result if many else (result,), strict=False)
            values[""] = None  # outputs that nobody reads have the name of absent inputs
            for name in {*inputs} - {""}:
                if self.last[name] == i:
                    del values[name]
        return values[self.ends[1]].reshape(1, -1)


class Query(nn.Module):
    """A property as a classifier of u in [-1, 1]: class 0 wins where it holds.

    Every other class is a clause of what must not happen: the least of limits - rows @ y, which is
    negative where a condition fails.

    Args:
        graph: the network.
        asked: the property.
    """

    def __init__(self, graph: Graph, asked: Property) -> None:
        super().__init__()
        self.graph, self.asked, (_, self.size, outputs) = graph, asked, asked.rows.shape
        centre = ((asked.low + asked.high) / 2).to(graph.dtype)
        # Rounding moves the centre: the radius covers it.
        radius = up(torch.maximum(asked.high - centre, centre - asked.low))
        first = torch.zeros(self.size, outputs, dtype=graph.dtype)
        limits = cast_up(asked.limits, graph.dtype).flatten()
        self.centre = nn.Parameter(centre)
        self.radius = nn.Parameter(cast_up(radius, graph.dtype))
        self.rows = nn.Parameter(torch.cat([first, -asked.rows.to(first).flatten(0, 1)]))
        self.limits = nn.Parameter(torch.cat([first[:, 0], limits]))

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """Return the name of the dtype of the network."""
        return "float64" if self.graph.dtype == torch.float64 else "float32"

    def forward(self, u: Tensor) -> Tensor:
        """Return the logits of (batch, inputs)."""
        y = F.linear(self.graph(self.centre + u * self.radius), self.rows, self.limits)
        return y if self.size == 1 else y.reshape(len(y), -1, self.size).amin(2)

    def find_example(self, u: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the input in the box and its outputs, if the network breaks the property."""
        low = cast_up(self.asked.low, self.graph.dtype)
        high = -cast_up(-self.asked.high, self.graph.dtype)
        with torch.no_grad():
            x = (self.centre + u * self.radius).maximum(low).minimum(high)
            y = self.graph(x)
        return (x[0], y[0]) if self.asked.is_broken_by(y[0]) else None


# Writing

# What most verifiers read.
OPSET = 17
# The first version with GELU as one operator. Before, it is spelled with erf and a rounded root of
# two, or with tanh: another function, with looser bounds.
GELU_OPSET, SPELLINGS = 20, {"Erf", "Tanh"}


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

    class Forward(nn.Module):
        """`Net.forward` with the parameters of the model."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = net.module

        def forward(self, z: Tensor) -> Tensor:
            """Return logits."""
            return net.forward(z, sample)

    text, advice = f"{net.architecture} cannot be written as ONNX", "Leave --export out."
    for version in (OPSET, GELU_OPSET):
        file: Any = io.BytesIO()
        # Where it fails, it prints the graph.
        quiet = patch.object(torch._C, "_jit_onnx_log", create=True)
        with explain_failure(text, advice), warnings.catch_warnings(action="ignore"), quiet:
            # The exporter by tracing: the newer one takes 25 times as long and rewrites the graph.
            torch.onnx.export(
                Forward(),
                (net.point(sample),),
                file,
                dynamo=False,
                opset_version=version,
                input_names=["X"],
                output_names=["Y"],
                # In eval mode it would merge normalisations into weights, and round them.
                training=torch.onnx.TrainingMode.PRESERVE,
            )
        nodes = onnx.load_from_string(file.getvalue()).graph.node
        if SPELLINGS.isdisjoint(node.op_type for node in nodes):
            break
    return file.getvalue()
