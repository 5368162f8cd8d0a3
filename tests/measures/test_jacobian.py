"""The measure `jacobian`: blocks beside the model, and norms that are not numbers."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import schema
from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import UsageError
from lipaudit.measures.base import Part
from lipaudit.measures.jacobian import JacobianOptions, summarise
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from tests.gate import cases
from tests.measures.cases import dense_norm, run_measure
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
