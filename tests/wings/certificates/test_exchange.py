"""Models and properties for other verifiers, held to onnxruntime and to the balls of certify."""

import gzip
import re
import sys
from fractions import Fraction
from pathlib import Path

import onnx
import onnxruntime
import pytest
import timm
import torch
import transformers
from torch import nn

import lipaudit
from lipaudit import ModelSpec
from lipaudit.errors import InputError
from lipaudit.models.precision import exact_arithmetic
from lipaudit.wings.certificates.onnx_graph import Graph, Query, export_onnx
from lipaudit.wings.certificates.vnnlib import read_property
from tests.commands import invoke, refuse
from tests.measures.cases import Small, Words, in_order
from tests.nets import TEXT, Calls, draw, hf_net, own_batch, own_net

NUMBER = r"(-?[\d.]+)"
node = onnx.helper.make_node


def run(file, x):
    """Return what onnxruntime makes of samples."""
    session = onnxruntime.InferenceSession(file)
    shape = session.get_inputs()[0].shape[1:]
    return torch.tensor(session.run(None, {"X": x.view(len(x), *shape).numpy()})[0])


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


@torch.no_grad()
def call(spec, x):
    """Return the logits of a module, of pixels or of ids."""
    mean, std = (spec.mean or (0,))[0], (spec.std or (1,))[0]
    return spec.module((x - mean) / std if x.is_floating_point() else x)


def export(spec, folder, eps="0.02,0.3", **options):
    """Certify three samples with the model's own classes, the last one a false one."""
    if spec.kind == "text":
        x = torch.randint(1, 50, (3, 8), generator=torch.Generator().manual_seed(0))
    else:
        x = 0.5 + 0.2 * draw(0, 3, *spec.input_shape).clamp(-2.5, 2.5)
    given = {"norm": "linf", "attack": "fgsm", "samples": 3, "order": "1"} | options
    y = call(spec, x).argmax(1)
    y[2] = (y[2] + 1) % 2
    report = lipaudit.measure(spec, "certify", data=(x, y), eps=eps, export=folder, **given)
    told = report.section("certify").samples
    return in_order(told, (x, y))[0], told


def read_rows(folder):
    return [line.split(",") for line in (folder / "instances.csv").read_text().splitlines()]


def read_ends(text):
    """Return the least and the greatest values of the inputs of a property."""
    ends = []
    for word in (">=", "<="):
        found = re.findall(rf"^\(assert \({word} X_(\d+) {NUMBER}\)\)$", text, re.M)
        assert [int(i) for i, _ in found] == [*range(len(found))]
        ends.append(torch.tensor([float(value) for _, value in found], dtype=torch.float64))
    return ends


@pytest.mark.parametrize("make", [gelu, relu, words])
def test_an_exported_folder_has_the_function_and_the_balls_of_certify(make, tmp_path):
    spec = make()
    x, told = export(spec, tmp_path, seconds=7)
    rows = read_rows(tmp_path)
    assert len(rows) == 4  # two balls of each correct sample
    assert {row[2] for row in rows} == {"7"}
    assert {p.name for p in tmp_path.iterdir()} >= {name for row in rows for name in row[:2]}
    for i, (model, name, _) in enumerate(rows):
        ids, eps = name.removesuffix(".vnnlib").split("_eps_")
        at = told["ids"].index(ids)
        point, label = x[at], int(told["label"][at])
        text = (tmp_path / name).read_text()
        low, high = read_ends(text)
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
        shape = (1, 8, 6) if words else (1, *spec.input_shape)
        for seed in range(3):
            share = torch.rand(low.shape, generator=torch.Generator().manual_seed(seed + 9 * i))
            z = torch.lerp(low, high, share.double()).float().view(shape)
            logits = run(tmp_path / model, z)
            if words:
                with spec.module.embed.register_forward_hook(lambda *_, z=z: z):
                    expected = call(spec, point[None])
            else:
                expected = call(spec, z)
            assert logits.shape == (1, classes)
            assert (logits - expected).abs().max() < 1e-5


def test_a_gelu_is_one_operator_and_other_models_are_written_for_older_readers(tmp_path):
    versions = []
    for make, name in ((gelu, "Gelu"), (relu, "Relu")):
        export(make(), tmp_path, eps="0.001")
        model = onnx.load(tmp_path / "model.onnx")
        assert name in {node.op_type for node in model.graph.node}
        versions.append(model.opset_import[0].version)
    assert versions == [20, 17]


def test_an_export_without_its_library_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match="ONNX needs the library `onnx`") as refusal:
        export(relu(), tmp_path)
    assert refusal.value.advice == "pip install 'lipaudit[onnx]'"
    assert [*tmp_path.iterdir()] == []


def test_an_operation_that_onnx_lacks_is_refused_before_anything_is_proven(tmp_path, capfd):
    model = Calls(
        lambda head, x: head(nn.functional.rms_norm(x.flatten(1), (4,))), nn.Linear(4, 2)
    )
    with pytest.raises(InputError, match=r"Calls cannot be written as ONNX.*aten::rms_norm"):
        export(ModelSpec(model, (1, 2, 2)), tmp_path)
    assert capfd.readouterr().out == ""
    assert [*tmp_path.iterdir()] == []


def decide(*args, code=0):
    """Return the results that a list of instances gets, by property."""
    done = invoke("certify", "--instances", *map(str, args), code=code)
    rows = [line.split(",") for line in done.stdout.splitlines()]
    return {row[2]: row[4] for row in rows}


@pytest.mark.parametrize("make", [gelu, relu, words])
def test_an_exported_folder_gets_the_verdicts_of_certify(make, tmp_path):
    _, told = export(make(), tmp_path, eps="0.002,0.05,0.9")
    meant = {"certified": "unsat", "broken": "sat", "undecided": "unknown"}
    expected = {
        f"{name}_eps_{eps}.vnnlib": meant[verdict]
        for eps in ("0.002", "0.05", "0.9")
        for name, verdict in zip(told["ids"], told[f"verdict@linf,{eps}"], strict=True)
        if verdict != "wrong"
    }
    file = tmp_path / "results.csv"
    how = ("--order", "1", "--attack", "fgsm")
    found = decide(tmp_path / "instances.csv", "-o", file, *how)
    assert found == expected
    assert {"unsat", "sat"} <= {*found.values()}
    assert len(file.read_text().splitlines()) == 6
    examples = {path.name for path in tmp_path.glob("*.counterexample.gz")}
    broken = {
        f"{Path(model).stem}_{name[:-7]}.counterexample.gz": (model, name)
        for model, name, _ in read_rows(tmp_path)
        if found[name] == "sat"
    }
    assert examples == {*broken}
    # As the competition checks them: inside the box, and another logit is at least the label's.
    for example, (model, name) in broken.items():
        text = gzip.decompress((tmp_path / example).read_bytes()).decode()
        assert text.startswith("((X_0 ")
        given = {n: float(v) for n, v in re.findall(r"\((\w+) (\S+?)\)", text)}
        prop = (tmp_path / name).read_text()
        x = [given[f"X_{i}"] for i in range(prop.count("declare-const X"))]
        x = torch.tensor(x, dtype=torch.float64)  # the numbers as written
        low, high = read_ends(prop)
        assert ((low <= x) & (x <= high)).all()
        y = run(tmp_path / model, x[None].float())
        assert any(
            y[0, int(other)] >= y[0, int(label)]
            for other, label in re.findall(r"\(and \(>= Y_(\d+) Y_(\d+)\)\)", prop)
        )


def net(path, *nodes, shape=(1, 2), outputs=None, **initial):
    """Write a network that is a list of nodes from X to Y; without any, Y is X."""
    helper, nodes = onnx.helper, nodes or (node("Identity", ["X"], ["Y"]),)
    ends = (("X", shape), ("Y", outputs or shape))
    x, y = (helper.make_tensor_value_info(name, 1, size) for name, size in ends)
    weights = [onnx.numpy_helper.from_array(v.numpy(), n) for n, v in initial.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


DECLARED = "".join(f"(declare-const {c}_{i} Real)\n" for c in "XY" for i in (0, 1))
BOX = (
    DECLARED + "(assert (>= X_0 0.6)) (assert (<= X_0 1))\n(assert (and (<= 0 X_1)(<= X_1 0.3)))\n"
)


@pytest.mark.parametrize(
    ("text", "result"),
    [  # of y = x, known by hand
        ("(assert (<= Y_0 Y_1))", "unsat"),
        ("(assert (>= Y_0 Y_1))", "sat"),
        ("(assert (<= Y_0 0.59)) ; a limit", "unsat"),
        ("(assert (>= 0.61\n  Y_0))", "sat"),
        ("(assert (or (and (<= Y_0 Y_1)) (and (>= Y_1 0.31))))", "unsat"),
        ("(assert (or (<= Y_0 Y_1) (>= Y_1 0.29)))", "sat"),
        ("(assert (and (>= Y_0 0.5) (>= Y_1 0.31)))", "unsat"),
        ("(assert (>= Y_0 0.5))(assert (>= Y_1 0.31))", "unsat"),
        ("(assert (or (and (>= Y_0 0.9) (>= Y_1 0.25)) (<= Y_0 0)))", "sat"),
        ("(assert (>= Y_0 0.9))(assert (or (<= Y_1 0.1) (>= Y_1 0.4)))", "sat"),
        ("(assert (or (<= Y_0 0) (>= Y_0 0.9)))(assert (>= Y_1 0.4))", "unsat"),
    ],
)
def test_properties_mean_what_the_standard_says(text, result, tmp_path):
    net(tmp_path / "a.onnx")
    (tmp_path / "p.vnnlib").write_text(BOX + text)
    (tmp_path / "list.csv").write_text("a.onnx,p.vnnlib,9\n")
    assert decide(tmp_path / "list.csv") == {"p.vnnlib": result}


def test_the_ball_of_a_query_holds_the_box_of_the_decimals(tmp_path):
    net(tmp_path / "a.onnx")
    for seed in range(20):
        ends = draw(seed, 2, 2, dtype=torch.float64).sort(0).values.tolist()
        lines = "".join(
            f"(assert ({word} X_{i} {end[i]:.25f}))"
            for word, end in zip((">=", "<="), ends, strict=True)
            for i in (0, 1)
        )
        (tmp_path / "p.vnnlib").write_text(f"{DECLARED}{lines}(assert (<= Y_0 Y_1))")
        asked = read_property(tmp_path / "p.vnnlib")
        query = Query(Graph(tmp_path / "a.onnx"), asked)
        for i in (0, 1):
            low, high = (Fraction(f"{end[i]:.25f}") for end in ends)
            assert Fraction(float(asked.low[i])) <= low <= high <= Fraction(float(asked.high[i]))
            centre, radius = (Fraction(t[i].item()) for t in (query.centre, query.radius))
            assert centre - radius <= low <= high <= centre + radius
            assert radius <= (high - low) / 2 * Fraction("1.000001") + Fraction(1, 10**6)


MODELS = {
    "vit": lambda: timm_net("vit_tiny_patch16_224", depth=2),
    "cait": lambda: timm_net("cait_xxs24_224", depth=1, depth_token_only=1),
    "beit": lambda: timm_net("beit_base_patch16_224", depth=1, embed_dim=24, num_heads=2),
    "bert": lambda: text_net("Bert"),
    "albert": lambda: text_net("Albert", embedding_size=16),
    "deberta": lambda: text_net("DebertaV2"),
}


def timm_net(name, **how):
    side = 32
    module = timm.create_model(name, num_classes=5, img_size=side, **how)
    return own_net(module, (3, side, side), kind="image"), torch.rand(1, 3, side, side)


def text_net(name, **how):
    config = getattr(transformers, f"{name}Config")(**TEXT, **how)
    module = transformers.AutoModelForSequenceClassification.from_config(config)
    return hf_net(module), torch.randint(1, 50, (1, 8))


@pytest.mark.parametrize("name", MODELS)
def test_networks_are_read_as_a_runtime_reads_them(name, tmp_path):
    model, x = MODELS[name]()
    batch, file = own_batch(x), tmp_path / "m.onnx"
    with exact_arithmetic(torch.device("cpu")):
        file.write_bytes(export_onnx(model, batch))
        graph = Graph(file)
        point = model.point(batch) + 0.1 * draw(0, 3, *model.point(batch).shape[1:])
        with torch.no_grad():
            found = graph(point.flatten(1))  # a batch, though the file has one sample
            own = torch.cat([model.forward(z[None], batch) for z in point])
    runtime = torch.cat([run(file, z[None]) for z in point])
    for expected in (runtime, own):
        assert torch.allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(assert (<= (* 2 Y_0) Y_1))", "line 7 is not read"),
        ("\n(assert (not (<= Y_0 Y_1)))", "line 8 is not read: 'not'"),
        ("(assert (<= Y_0 Y_1)", "a bracket is not closed"),
        ("(assert (<= Y_0 one))", "line 7 is not read: Invalid literal for Fraction: 'one'"),
        ("(assert (<= Y_0 Y_7))", "no condition on declared outputs"),
        ("(declare-const Y_0 Int)(assert (<= Y_0 Y_1))", "line 7 is not read: 'declare-const'"),
        ("(assert (or (<= X_0 0.7) (>= X_0 0.9)))(assert (<= Y_0 Y_1))", "line 7"),
        ("(assert (<= Y_0 X_1))", "no condition on declared outputs"),
        ("(declare-const X_2 Real)(assert (<= Y_0 Y_1))", "'X_2'"),
        ("", "no condition on declared outputs"),
        ("(assert (or (and) (<= Y_0 Y_1)))", "no condition on declared outputs"),
        ("(assert (>= X_1 0.5))(assert (<= Y_0 Y_1))", "the range of an input is empty"),
        ("(assert (<= X_2 0))(assert (<= Y_0 Y_1))", "a range of an input that is not declared"),
        ("(assert (<= Y_0 1e400))", "too large"),
    ],
)
def test_a_property_that_is_not_read_is_refused_with_its_line(text, said, tmp_path):
    (tmp_path / "p.vnnlib").write_text(BOX + text)
    with pytest.raises(InputError, match=re.escape(said)) as refusal:
        read_property(tmp_path / "p.vnnlib")
    assert str(tmp_path / "p.vnnlib") in refusal.value.message


def test_lists_and_networks_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net("a.onnx")
    n, r, t = (torch.tensor(value) for value in (1, 0.5, True))
    net("sum.onnx", node("CumSum", ["X", "n"], ["Y"]), n=n)
    net("odd.onnx", node("Gelu", ["X"], ["Y"], domain="com.microsoft"))
    net("drop.onnx", node("Dropout", ["X", "r", "t"], ["Y"]), r=r, t=t)
    net("wide.onnx", shape=(1, 3))
    net("few.onnx", node("ReduceSum", ["X"], ["Y"]), outputs=(1, 1))
    Path("bad.onnx").write_bytes(b"no network")
    Path("p.vnnlib").write_text(f"{BOX}(assert (<= Y_0 Y_1))")
    lists = {
        "none.csv": (None, "none.csv is no list of instances"),
        "two.csv": ("a.onnx,p.vnnlib", "two.csv is no list of instances"),
        "time.csv": ("a.onnx,p.vnnlib,soon", "time.csv is no list of instances"),
        "model.csv": ("b.onnx,p.vnnlib,1", "b.onnx cannot be read as ONNX"),
        "damaged.csv": ("bad.onnx,p.vnnlib,1", "bad.onnx cannot be read as ONNX"),
        "property.csv": ("a.onnx,q.vnnlib,1", "cannot read q.vnnlib"),
        "sum.csv": ("sum.onnx,p.vnnlib,1", "the operator CumSum is not read"),
        "odd.csv": ("odd.onnx,p.vnnlib,1", "the operator Gelu is not read"),
        "drop.csv": ("drop.onnx,p.vnnlib,1", "Dropout in training is random"),
        "wide.csv": ("wide.onnx,p.vnnlib,1", "p.vnnlib does not fit wide.onnx"),
        "few.csv": ("few.onnx,p.vnnlib,1", "p.vnnlib does not fit few.onnx"),
    }
    for name, (line, said) in lists.items():
        if line is not None:
            Path(name).write_text(line)
        assert said in refuse(4, said, "certify", "--instances", name)
    # What was decided before a refusal is there.
    Path("late.csv").write_text("a.onnx,p.vnnlib,1\nsum.onnx,p.vnnlib,1\n")
    invoke("certify", "--instances", "late.csv", "-o", "r.csv", code=4)
    assert [line.split(",")[4] for line in Path("r.csv").read_text().splitlines()] == ["unsat"]
    monkeypatch.setitem(sys.modules, "onnx", None)
    refuse(4, "ONNX needs the library `onnx`", "certify", "--instances", "late.csv")
