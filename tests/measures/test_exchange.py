"""Models and properties for other verifiers, held to onnxruntime and to the balls of certify."""

import re
import sys

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import ModelSpec
from lipaudit.errors import InputError, UsageError
from tests.measures.test_certify import Small, Words, in_order
from tests.nets import Calls, draw

NUMBER = r"(-?[\d.]+)"


class Tokens(nn.Module):
    """A vision transformer with BatchNorm and ReLU, as in the verification competition."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.token = nn.Conv2d(1, 6, 2, 2), nn.Parameter(torch.randn(1, 1, 6))
        self.norm, self.qkv, self.head = nn.BatchNorm1d(6), nn.Linear(6, 18), nn.Linear(6, 3)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        for values in (self.norm.running_mean, self.norm.bias.data):
            values.copy_(0.3 * torch.randn(6))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        q, k, v = self.qkv(self.norm(x.transpose(1, 2)).transpose(1, 2)).chunk(3, -1)
        x = x + (q @ k.transpose(1, 2) / 6**0.5).softmax(-1) @ v
        return self.head((x + self.down(self.up(x).relu()))[:, 0])


def gelu():
    return ModelSpec(Small().eval(), (1, 3, 4), mean=(0.4,), std=(0.3,))


def relu():
    return ModelSpec(Tokens().eval(), (1, 4, 4))


def words():
    return ModelSpec(Words().eval(), (8,), kind="text", vocabulary=50)


def export(spec, folder, eps="0.02,0.3", **options):
    """Certify three samples with the model's own classes, the last one a false one."""
    if spec.kind == "text":
        x = torch.randint(1, 50, (3, 8), generator=torch.Generator().manual_seed(0))
    else:
        x = 0.5 + 0.2 * draw(0, 3, *spec.input_shape).clamp(-2.5, 2.5)
    given = {"norm": "linf", "attack": "fgsm", "samples": 3, "order": "1"} | options
    with torch.no_grad():
        inner = (
            (x - (spec.mean or (0,))[0]) / (spec.std or (1,))[0] if x.is_floating_point() else x
        )
        y = spec.module(inner).argmax(1)
    y[2] = (y[2] + 1) % 2
    report = lipaudit.measure(spec, "certify", data=(x, y), eps=eps, export=folder, **given)
    told = report.section("certify").samples
    return in_order(told, (x, y))[0], told


def read_numbers(text, pattern):
    """Return the numbers of all lines of a property that have a form, one after the other."""
    found = re.findall(pattern, text, re.M)
    assert [int(i) for i, *_ in found] == [*range(len(found))]
    return torch.tensor([float(value) for _, value in found], dtype=torch.float64)


@pytest.mark.parametrize("make", [gelu, relu, words])
def test_an_exported_folder_has_the_function_and_the_balls_of_certify(make, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    spec = make()
    x, told = export(spec, tmp_path, seconds=7)
    rows = [line.split(",") for line in (tmp_path / "instances.csv").read_text().splitlines()]
    assert len(rows) == 4  # two balls of each correct sample
    assert {row[2] for row in rows} == {"7"}
    assert {p.name for p in tmp_path.iterdir()} >= {name for row in rows for name in row[:2]}
    for i, (model, name, _) in enumerate(rows):
        ids, eps = name.removesuffix(".vnnlib").split("_eps_")
        at = told["ids"].index(ids)
        point, label = x[at], int(told["label"][at])
        text = (tmp_path / name).read_text()
        low, high = (
            read_numbers(text, rf"^\(assert \({w} X_(\d+) {NUMBER}\)\)$") for w in (">=", "<=")
        )
        words = spec.kind == "text"
        centre = spec.module.embed(point) if words else point
        centre, change = centre.detach().double().flatten(), float(eps)
        limits = (-torch.inf, torch.inf) if words else (0, 1)
        assert torch.allclose(low, (centre - change).clamp(*limits), rtol=0, atol=1e-15)
        assert torch.allclose(high, (centre + change).clamp(*limits), rtol=0, atol=1e-15)
        # What must not happen: another logit that is at least the label's.
        others = re.findall(r"^    \(and \(>= Y_(\d+) Y_(\d+)\)\)$", text, re.M)
        classes = text.count("declare-const Y_")
        assert [*map(int, dict(others))] == [c for c in range(classes) if c != label]
        assert {int(c) for _, c in others} == {label}
        # The whole box, not only the sample, gets the logits of the model.
        session = onnxruntime.InferenceSession(tmp_path / model)
        shape = [1, *session.get_inputs()[0].shape[1:]]
        for seed in range(3):
            share = torch.rand(low.shape, generator=torch.Generator().manual_seed(seed + 9 * i))
            z = torch.lerp(low, high, share.double()).float().view(shape)
            (logits,) = session.run(None, {"X": z.numpy()})
            with torch.no_grad():
                if words:
                    hook = spec.module.embed.register_forward_hook(lambda *_, z=z: z)
                    expected = spec.module(point[None])
                    hook.remove()
                else:
                    mean, std = (spec.mean or (0,))[0], (spec.std or (1,))[0]
                    expected = spec.module((z - mean) / std)
            assert logits.shape == (1, classes)
            assert abs(logits - expected.numpy()).max() < 1e-5


def test_a_gelu_is_one_operator_and_other_models_are_written_for_older_readers(tmp_path):
    onnx = pytest.importorskip("onnx")
    versions = []
    for make, name in ((gelu, "Gelu"), (relu, "Relu")):
        export(make(), tmp_path, eps="0.001")
        model = onnx.load(tmp_path / "model.onnx")
        assert name in {node.op_type for node in model.graph.node}
        versions.append(model.opset_import[0].version)
    assert versions == [20, 17]


def test_what_cannot_be_exported_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="a ball of the norm l2 is none"):
        export(relu(), tmp_path, norm="l2")
    with pytest.raises(UsageError, match="there is no folder"):
        export(relu(), tmp_path / "none")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match="ONNX needs the library `onnx`") as refusal:
        export(relu(), tmp_path)
    assert refusal.value.advice == "pip install 'lipaudit[onnx]'"
    assert [*tmp_path.iterdir()] == []


def test_an_operation_that_onnx_lacks_is_refused_before_anything_is_proven(tmp_path, capsys):
    pytest.importorskip("onnx")
    model = Calls(
        lambda head, x: head(nn.functional.rms_norm(x.flatten(1), (4,))), nn.Linear(4, 2)
    )
    with pytest.raises(InputError, match=r"Calls cannot be written as ONNX.*aten::rms_norm"):
        export(ModelSpec(model, (1, 2, 2)), tmp_path)
    assert capsys.readouterr().out == ""
    assert [*tmp_path.iterdir()] == []
