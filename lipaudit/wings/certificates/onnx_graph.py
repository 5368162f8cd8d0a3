"""A network in ONNX: read without a runtime, and run on tensors or on forms; and written.

`onnx_operators` has the operators that are read.
"""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, explain_failure
from lipaudit.models.net import Net
from lipaudit.wings.certificates.onnx_operators import CASTS, OPERATORS, WINDOWS
from lipaudit.wings.certificates.rounding import cast_up, round_up
from lipaudit.wings.certificates.vnnlib import Property

# Before this version a softmax runs over all axes from the given one on.
OLDEST = 13


class Graph:
    """A network from one flat input, (batch, inputs), to one flat output, (batch, outputs).

    Values that do not depend on the input have the dtype of the network, as in runtimes.

    Args:
        path: the file.

    Attributes:
        dtype: dtype of the input.

    Raises:
        InputError: `onnx` is not installed, the file cannot be read, or it has an operator or an
            attribute that is not read.
    """

    def __init__(self, path: Path) -> None:
        """Read an ONNX file: the weights, the input, the output, and the steps in order."""
        onnx = _import_onnx()
        advice = "Give a network with one input and one output."
        with explain_failure(f"{path} cannot be read as ONNX", advice, Exception):
            model = onnx.load(path)
            # Each tuple must have one entry: one version of the standard operators, one input, one
            # output. Otherwise the unpacking raises an error.
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
        self.steps = [_read_step(node, path, version) for node in graph.node]
        # Index of the last step that uses a value: after it the value can be deleted.
        self.last_step: dict[str, int] = {}
        for i, node in enumerate(graph.node):
            self.last_step |= dict.fromkeys(node.input, i)
        # No step is the last one to need the output, which is read after all steps.
        self.last_step[end.name] = len(self.steps)

    def __call__(self, x: Any) -> Any:
        """Run the network on tensors or forms (batch, inputs); return (batch, outputs).

        Samples run one by one, because the shapes in the file may be fixed to a batch of 1.
        """
        if len(x) > 1:
            return torch.cat([self(row[None]) for row in x])
        start, end = self.ends  # names of the network's input and output
        # The weights and intermediate results by name. The name "" is that of absent inputs and of
        # unused outputs. Its value is None: in `self.weights`, and again after each step.
        values = {**self.weights, start: x.reshape(self.shape)}
        for i, (operator, inputs, outputs, attributes) in enumerate(self.steps):
            results = operator(*(values[name] for name in inputs), **attributes)
            if not isinstance(results, tuple | list):
                results = (results,)
            values.update(zip(outputs, results, strict=False))
            values[""] = None
            # Delete what no later step reads, because forms take much memory.
            for name in {*inputs} - {""}:
                if self.last_step[name] == i:
                    del values[name]
        return values[end].reshape(1, -1)


def _import_onnx() -> Any:
    """Import the library `onnx`, or raise an `InputError` that says how to install it."""
    advice = "pip install 'lipaudit[onnx]'"
    with explain_failure("ONNX needs the library `onnx`", advice, ImportError):
        import onnx
    return onnx


def _read_value(value: Any) -> Any:
    """Return a value of an ONNX file: tensors as torch tensors, bytes as text, or unchanged."""
    import onnx

    if isinstance(value, onnx.TensorProto):
        return torch.tensor(onnx.numpy_helper.to_array(value))
    if isinstance(value, bytes):
        return value.decode()
    return value


def _read_step(node: Any, path: Path, version: int) -> tuple[Any, ...]:
    """Return a step of the network: operator, names of inputs and of outputs, and attributes.

    Args:
        node: the step in the ONNX file.
        path: the file, for messages.
        version: version of the operators (opset).

    Raises:
        InputError: the operator or one of its attributes is not supported.
    """
    attributes = _read_attributes(node)
    unsupported = _find_unsupported(node, attributes, version)
    if unsupported:
        advice = f"Export the network with other operators, in version 17 (not {version})."
        raise InputError(f"{path}: the operator {unsupported} is not read", advice)
    return OPERATORS[node.op_type], node.input, node.output, attributes


def _read_attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an operator by name."""
    import onnx

    attributes = {
        attribute.name: _read_value(onnx.helper.get_attribute_value(attribute))
        for attribute in node.attribute
    }
    if node.op_type == "Split":  # before version 18 the number of parts is only in the outputs
        attributes["num_outputs"] = len(node.output)
    return attributes


def _find_unsupported(node: Any, attributes: Mapping[str, Any], version: int) -> str:
    """Return what is not supported of an operator: "Gelu" or "Conv with group"; else "".

    Args:
        node: a node of the ONNX graph.
        attributes: the attributes of the node, by name.
        version: version of the operators (opset).
    """
    name = node.op_type
    # Before version 13 (OLDEST) a softmax runs over all axes from `axis` on. This equals torch's
    # softmax only for the last axis.
    if "Softmax" in name and version < OLDEST and attributes.get("axis") != -1:
        return f"{name} with axis"
    if node.domain or name not in OPERATORS:
        return str(name)
    # A function of OPERATORS computes the operator. Its parameters have the names of attributes.
    known = set(inspect.signature(OPERATORS[name]).parameters)
    if "how" in known:  # **how takes all attributes of windows, such as strides
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
        """Store the property as two affine maps: from u in [-1, 1] to inputs, from y to logits.

        The property forbids outputs y of the network with rows @ y <= limits for all conditions of
        a clause. The logit of a condition is limit - row @ y: it is below 0, the logit of class 0,
        if the condition does not hold.
        """
        super().__init__()
        self.graph = graph
        self.goal = goal
        _, self.conditions, outputs = goal.rows.shape  # (clauses, conditions, outputs)
        # The inputs are centre + u radius. The centre is rounded, and the radius is chosen so that
        # the box is still covered.
        centre = ((goal.low + goal.high) / 2).to(graph.dtype)
        radius = round_up(torch.maximum(goal.high - centre, centre - goal.low))
        self.centre = nn.Parameter(centre)
        self.radius = nn.Parameter(cast_up(radius, graph.dtype))
        # The logits are limits - rows @ y. The coefficients in VNN-LIB are -1, 0 and 1, so `rows`
        # is exact in every dtype. The limits are rounded up: so the property is only harder to
        # prove. First comes class 0, with as many zeros as a clause has conditions, because
        # `forward` takes the smallest of the logits of all conditions of a class.
        zeros = torch.zeros(self.conditions, outputs, dtype=graph.dtype)
        rows = goal.rows.to(zeros).flatten(0, 1)  # (conditions of all clauses, outputs)
        limits = cast_up(goal.limits, graph.dtype).flatten()
        self.rows = nn.Parameter(torch.cat([zeros, -rows]))
        self.limits = nn.Parameter(torch.cat([zeros[:, 0], limits]))

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """Return the name of the dtype of the network."""
        return "float64" if self.graph.dtype == torch.float64 else "float32"

    def forward(self, u: Tensor) -> Tensor:
        """Return the logits (batch, 1 + clauses) of inputs u in [-1, 1], (batch, inputs).

        The logit of class 0 is 0. The logit of a clause is the smallest logit of its conditions.
        """
        x = self.centre + u * self.radius
        # The parameter `rows` has minus the rows of the property: the logit of a condition is
        # limit - row @ y, negative where the condition row @ y <= limit fails. All entries of
        # class 0 are 0. (batch, conditions of class 0 and of all clauses), as many for each.
        logits = F.linear(self.graph(x), self.rows, self.limits)
        if self.conditions == 1:
            return logits
        return logits.reshape(len(logits), -1, self.conditions).amin(2)

    def find_example(self, u: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the input and the outputs of the network at u, if they break the property.

        Return None if they do not: in rare cases rounding decides.

        Args:
            u: (1, inputs) in [-1, 1], an adversarial example of the classifier.
        """
        # The ends of the box are rounded inwards, so that the input is inside the exact box. If no
        # number of this dtype is in a range, such as [0.1, 0.1], the input has the one just below.
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

    For a text, the ids, positions and mask are constants in the file, so the file holds only for
    this sample.

    Args:
        net: a model.
        sample: one sample, the shape of the input.

    Raises:
        InputError: `onnx` is not installed, or torch cannot express an operation in ONNX.
    """
    onnx = _import_onnx()
    text = f"{net.architecture} cannot be written as ONNX"
    advice = "Leave --export out."
    content = b""
    # Most verifiers read the older version of the operators. There GELU has no operator and is
    # written with erf or tanh (SPELLINGS): then use the newer version.
    for version in (OPSET, GELU_OPSET):
        with explain_failure(text, advice):
            content = _export_version(net, sample, version)
        nodes = onnx.load_from_string(content).graph.node
        if SPELLINGS.isdisjoint(node.op_type for node in nodes):
            break
    return content


def _export_version(net: Net, sample: Batch, version: int) -> bytes:
    """Return `Net.forward` for a sample as ONNX, with this version of the operators (opset)."""

    class Forward(nn.Module):
        """`Net.forward` with the parameters of the model."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = net.module

        def forward(self, z: Tensor) -> Tensor:
            """Return logits."""
            return net.forward(z, sample)

    file: Any = io.BytesIO()
    # If torch's exporter fails, it prints the graph. The patch prevents this output.
    quiet = patch.object(torch._C, "_jit_onnx_log", create=True)
    with warnings.catch_warnings(action="ignore"), quiet:
        # dynamo=False is the exporter by tracing: the newer one takes 25 times as long and
        # rewrites the graph.
        torch.onnx.export(
            Forward(),
            (net.point(sample),),
            file,
            dynamo=False,
            opset_version=version,
            input_names=["X"],
            output_names=["Y"],
            # In the mode EVAL the exporter would merge normalisations into weights and round them.
            training=torch.onnx.TrainingMode.PRESERVE,
        )
    return bytes(file.getvalue())
