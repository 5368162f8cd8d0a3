"""Every operator that is read from ONNX, held to onnxruntime: at points, and over whole balls."""

import re
from dataclasses import dataclass, field

import onnx
import onnxruntime
import pytest
import torch

from lipaudit.errors import InputError
from lipaudit.wings.certificates.form import Form, NoRuleError
from lipaudit.wings.certificates.onnx_graph import Graph
from lipaudit.wings.certificates.onnx_operators import OPERATORS
from lipaudit.wings.certificates.prove import ball, run
from tests.nets import draw

X = "X"
INTEGERS = torch.int64


@dataclass
class Row:
    """One operator: its inputs (X, constants, or "" for none) and attributes.

    X is multiplied with a result that does not depend on it; of several results the last counts.
    """

    name: str
    inputs: tuple = (X,)
    given: dict = field(default_factory=dict)
    shape: tuple = (1, 2, 4)
    version: int = 17
    outputs: int = 1

    def __str__(self):
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.given.items())])

    def write(self, path):
        helper, from_array = onnx.helper, onnx.numpy_helper.from_array
        constants = {f"w{i}": t for i, t in enumerate(self.inputs) if isinstance(t, torch.Tensor)}
        names = [f"w{i}" if f"w{i}" in constants else each for i, each in enumerate(self.inputs)]
        weights = [from_array(t.numpy(), name) for name, t in constants.items()]
        tensors = {k: from_array(v.numpy()) for k, v in self.given.items() if k == "value"}
        given, results = self.given | tensors, [f"r{i}" for i in range(self.outputs)]
        nodes = [helper.make_node(self.name, names, results, **given)]
        if X not in self.inputs or self.name in ("Shape", "Equal"):
            nodes.append(helper.make_node("Cast", ["r0"], ["c"], to=1))
            nodes.append(helper.make_node("Mul", [X, "c"], ["Y"]))
        else:
            nodes.append(helper.make_node("Identity", results[-1:], ["Y"]))
        ends = [helper.make_tensor_value_info(n, 1, s) for n, s in ((X, self.shape), ("Y", None))]
        graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
        opset = [helper.make_opsetid("", self.version)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def weights(*shape, seed=7):
    return draw(seed, *shape)


def whole(*values):
    return torch.tensor(values, dtype=INTEGERS)


IMAGE, SIGNAL = (1, 4, 7, 6), (1, 4, 9)
KERNEL, FILTER = weights(6, 4, 3, 2), weights(6, 2, 3)
POSITIVE = 0.5 + weights(4).abs()
ONE, W, SQUARE = torch.tensor(1.0), weights(2, 4), weights(4, 3)


def two(name):
    return [Row(name, (X, W)), Row(name, (W, X)), Row(name, (X, X)), Row(name, (X, ONE))]


def plain(*names, **given):
    return [Row(name, (X,), given) for name in names]


ROWS = [
    *plain("Abs", "Cos", "Erf", "Exp", "HardSwish", "Identity", "Neg", "Relu", "Sigmoid", "Sin"),
    *plain("Softplus", "Softsign", "Tanh", "Softmax", "LogSoftmax", "LeakyRelu", "Elu"),
    *plain("HardSigmoid", "Flatten", "Transpose", "ReduceL2"),
    *plain("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "Dropout", "LpNormalization"),
    *plain("GlobalMaxPool", "GlobalAveragePool"),
    *(row for name in ("Add", "Sub", "Mul", "Max", "Min") for row in two(name)),
    Row("Div", (X, W)),
    Row("Div", (W, X), shape=(1, 1, 1)),
    Row("Sum", (X, W, X)),
    Row("Mean", (X, W, X)),
    Row("Mish", version=18),
    *(Row(n, shape=(1, 1, 1)) for n in ("Log", "Sqrt", "Reciprocal")),  # of about 1
    *(Row("Pow", (X, torch.tensor(p)), shape=(1, 1, 1)) for p in (2.0, 3.0, 0.5, -0.5, -1.0)),
    *(Row("Gelu", (X,), {"approximate": kind}, version=20) for kind in ("none", "tanh")),
    Row("Clip", (X, torch.tensor(-0.3), torch.tensor(0.4))),
    Row("Clip", (X, "", torch.tensor(0.4))),
    Row("Clip", (X,), {"min": -0.3, "max": 0.4}, version=8),
    Row("Dropout", (X,), {"ratio": 0.5}, version=7),
    Row("PRelu", (X, weights(2, 1))),
    Row("PRelu", (X, torch.tensor([0.3]))),
    Row("LeakyRelu", (X,), {"alpha": -0.2}),
    Row("Elu", (X,), {"alpha": 0.7}),
    *plain("HardSigmoid", alpha=0.5, beta=0.2),
    *plain("Softmax", "LogSoftmax", axis=1),
    *plain("Flatten", axis=2),
    Row("LpNormalization", (X,), {"axis": 1, "p": 2}, shape=(1, 7, 2)),
    *plain("ReduceMean", "ReduceMax", "ReduceMin", axes=[1, 2], keepdims=0),
    *plain("ReduceLogSumExp", "ReduceL2", axes=[-1]),
    Row("ReduceSum", (X, whole(2)), {"keepdims": 0}),
    Row("MatMul", (X, SQUARE)),
    Row("MatMul", (weights(3, 2), X)),
    Row("Einsum", (X, SQUARE), {"equation": "bij,jk->bik"}),
    Row("Einsum", (X, X), {"equation": "bij,bkj->bik"}),
    Row("Gemm", (X, SQUARE, weights(3)), {"alpha": 0.5, "beta": 2.0}, shape=(1, 4)),
    Row("Gemm", (SQUARE, X), {"transA": 1, "transB": 1}, shape=(1, 4)),
    Row("Conv", (X, KERNEL, weights(6)), shape=IMAGE),
    Row(
        "Conv",
        (X, weights(6, 2, 3, 2)),
        {"group": 2, "strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [1, 2]},
        shape=IMAGE,
    ),
    *(
        Row("Conv", (X, KERNEL), {"auto_pad": kind, "strides": [2, 3]}, shape=IMAGE)
        for kind in ("SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET")
    ),
    Row("Conv", (X, FILTER), {"auto_pad": "SAME_LOWER", "strides": [2], "group": 2}, shape=SIGNAL),
    Row("Conv", (X, FILTER), {"pads": [2, 0], "dilations": [2], "group": 2}, shape=SIGNAL),
    *(
        Row(name, (X,), {"kernel_shape": [3, 2], **given}, shape=IMAGE)
        for name in ("MaxPool", "AveragePool")
        for given in (
            {},
            {"strides": [2, 1], "pads": [1, 0, 2, 1]},
            {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
            {"auto_pad": "SAME_LOWER", "strides": [2, 1]},
            {"auto_pad": "VALID", "ceil_mode": 0},
        )
    ),
    Row("MaxPool", (X,), {"kernel_shape": [2, 2], "dilations": [2, 3]}, shape=IMAGE),
    Row(
        "AveragePool",
        (X,),
        {"kernel_shape": [2, 3], "pads": [1, 1, 0, 2], "count_include_pad": 1},
        shape=IMAGE,
    ),
    Row("AveragePool", (X,), {"kernel_shape": [3], "pads": [1, 1]}, shape=SIGNAL),
    Row(
        "AveragePool",
        (X,),
        {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [1, 0, 0, 0]},
        shape=IMAGE,
        version=19,
    ),
    *(Row(f"Global{kind}Pool", shape=IMAGE) for kind in ("Max", "Average")),
    Row("BatchNormalization", (X, *(weights(4, seed=i) for i in range(3)), POSITIVE), shape=IMAGE),
    Row("InstanceNormalization", (X, POSITIVE, weights(4)), {"epsilon": 1e-3}, shape=SIGNAL),
    Row("InstanceNormalization", (X, POSITIVE, weights(4)), shape=SIGNAL),
    Row("LayerNormalization", (X, POSITIVE, weights(4))),
    Row("LayerNormalization", (X, weights(2, 4)), {"axis": 1, "epsilon": 1e-3}),
    Row("Reshape", (X, whole(0, -1, 2))),
    Row("Expand", (X, whole(3, 1, 4))),
    Row("Tile", (X, whole(1, 2, 3))),
    *plain("Transpose", perm=[0, 2, 1]),
    Row("Squeeze", (X, whole(0, -2)), shape=(1, 3, 1, 4)),
    Row("Squeeze", shape=(1, 3, 1, 4)),
    Row("Squeeze", (X,), {"axes": [2]}, shape=(1, 3, 1, 4), version=11),
    Row("Unsqueeze", (X, whole(-1, 0))),
    Row("Concat", (X, W[None], X), {"axis": 1}),
    Row("Split", (X, whole(1, 3)), {"axis": 2}, outputs=2),
    Row("Split", (X,), {"axis": -1}, outputs=2),
    Row("Split", (X,), {"axis": 2, "num_outputs": 3}, IMAGE, version=18, outputs=3),
    Row("Split", (X,), {"axis": 1, "split": [1, 1]}, outputs=2, version=11),
    *(
        Row("Slice", (X, *(whole(*each) for each in parts)), shape=IMAGE)
        for parts in (
            ([1, -5], [9, -1], [1, 2]),
            ([-1], [-(2**31)], [3], [-1]),
            ([5, 0], [1, 6], [2, 3], [-2, 2]),
            ([-2, 3], [-(2**63), 0], [-1, 1], [-3, -1]),
            ([0, 1], [1, 4]),
        )
    ),
    Row("Slice", (X,), {"starts": [1], "ends": [3], "axes": [2]}, version=9),
    Row("Gather", (X, whole(3, 0, -1)), {"axis": 2}),
    Row("Gather", (X, torch.tensor(-1)), {"axis": 1}),
    Row("Gather", (X, torch.tensor([[0, 1], [3, 2]])), {"axis": -1}),
    Row("GatherElements", (X, torch.tensor([[[0, -1], [3, 2]]])), {"axis": 2}),
    Row("Pad", (X, whole(0, 1, 0, 0, 0, 2), torch.tensor(0.7))),
    Row("Pad", (X, whole(0, 0, 1, 0, 0, 2)), {"mode": "reflect"}),
    Row("Pad", (X, whole(0, 1, 0, 0, 0, 2), "")),
    Row("Where", (W > 0, X, W)),
    # Constants.
    Row("Constant", (), {"value": W}),
    Row("ConstantOfShape", (whole(2, 4),), {"value": torch.tensor([0.3])}),
    Row("Shape", (X,), shape=(1, 3, 3)),
    Row("Cast", (whole(1, 2, 3, 4),), {"to": 11}),
    Row("Equal", (whole(1, 2, 3, 4), whole(1, 5, 3, 5))),
    Row("Div", (whole(7, -7, 5, 4), whole(2))),
    Row("Pow", (whole(7, 2, 9, 4), torch.tensor(0.5))),  # of the type of its base
    Row("Mod", (whole(7, -7, 5, 4), whole(3))),
    Row("Mod", (torch.tensor([5.5, -5.5, 2.0, 1.0]), torch.tensor([2.0])), {"fmod": 1}),
]


def test_the_table_has_every_operator():
    assert {row.name for row in ROWS} == {*OPERATORS}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_operators_are_those_of_a_runtime(row, tmp_path):
    """At points of a ball, which its certificate holds too."""
    row.write(tmp_path / "a.onnx")
    graph, session = Graph(tmp_path / "a.onnx"), onnxruntime.InferenceSession(tmp_path / "a.onnx")
    x, radius = draw(3, 1, *row.shape)[0], 0.3
    x = x.abs() + 1.5 if x.numel() == 1 else x  # positive on the whole ball
    share = torch.rand(20, *x.shape[1:], generator=torch.Generator().manual_seed(0))
    share[:10] = share[:10].round()  # corners
    points = x + radius * (2 * share - 1)
    truth = [torch.tensor(session.run(None, {X: z[None].numpy()})[0]).flatten() for z in points]
    found = torch.cat([graph(z.reshape(1, -1)) for z in points])
    assert torch.allclose(found.float(), torch.stack(truth), rtol=1e-5, atol=1e-5)
    result = run(graph, ball(x.reshape(1, -1), radius))
    assert isinstance(result, Form)
    low, high = (end[0] for end in result.range())
    assert (high - low).isfinite().all()
    room = 1e-5 * (1 + torch.stack(truth).abs().amax(0))
    for y in truth:
        assert (low - room <= y).all()
        assert (y <= high + room).all()


def test_the_output_may_be_read_by_further_steps(tmp_path):
    """As where a file is cut at its logits, and the softmax behind them stays."""
    path = tmp_path / "a.onnx"
    Row("Relu").write(path)
    model = onnx.load(path)
    model.graph.node.append(onnx.helper.make_node("Softmax", ["Y"], ["unused"]))
    onnx.save(model, path)
    x = draw(3, 1, 2, 4)
    (truth,) = onnxruntime.InferenceSession(path).run(None, {X: x.numpy()})
    assert Graph(path)(x.reshape(1, -1)).tolist() == torch.tensor(truth).reshape(1, -1).tolist()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row("MaxPool", (X,), {"kernel_shape": [2, 2], "ceil_mode": 1}, IMAGE), "ceil_mode and"),
        (Row("Conv", (X, weights(1, 1, 1, 1, 1)), {}, (1, 1, 2, 2, 2)), "windows over 3 axes"),
        (Row("Conv", (X, KERNEL), {"flow": 1}, IMAGE), "the operator Conv with flow is not read"),
        (Row("LogSoftmax", version=11), "the operator LogSoftmax with axis is not read"),
        (Row("CumSum", (X, torch.tensor(1))), "the operator CumSum is not read"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(row, said, tmp_path):
    row.write(tmp_path / "a.onnx")
    with pytest.raises(InputError, match=re.escape(said)):
        Graph(tmp_path / "a.onnx")(draw(3, 1, *row.shape).reshape(1, -1))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row("MaxPool", (X,), {"kernel_shape": [3]}, SIGNAL), "max_pool1d"),
        (Row("LpNormalization", (X,), {"p": 1}), "normalize by a norm of order 1"),
        (Row("Equal", (X, W)), "eq"),
    ],
    ids=str,
)
def test_operators_without_a_rule_run_at_points_only(row, said, tmp_path):
    row.write(tmp_path / "a.onnx")
    graph, x = Graph(tmp_path / "a.onnx"), draw(3, 1, *row.shape).reshape(1, -1)
    assert graph(x).isfinite().all()
    with pytest.raises(NoRuleError, match=said):
        run(graph, ball(x, 0.1))


@pytest.mark.parametrize("slope", [0.1, 1e-3, 1.7])
def test_the_slope_of_a_prelu_is_not_rounded(slope):
    result = OPERATORS["PRelu"](ball(torch.ones(1, 2), 0.0), torch.tensor([slope]))
    low, high = result.range()
    assert (low <= 1).all()
    assert (high >= 1).all()
