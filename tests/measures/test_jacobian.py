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
from lipaudit.measures.jacobian import JacobianOptions, measure, summarise
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from tests.nets import draw, own_batch, own_net


def measured(net, *batches, **given):
    options = JacobianOptions(**given)
    (section,) = summarise(list(measure(net, batches, options)), options)
    return section


def test_blocks_are_measured_beside_the_model():
    net = load_net("demo", LoadOptions(dtype="float64"))
    batch = load_data("demo", net, DataOptions(samples=3)).batch.to(net.device, net.dtype)
    section = measured(net, batch[:2], batch[2:], tol=1e-8, per_layer=True)
    assert [row.module for row in section.rows] == ["", "blocks.0", "blocks.1", "blocks.2"]
    inputs = []
    for block in net.module.blocks:
        block.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    net.output(batch)
    assert section.arrays["norm"].shape == (4, 3)
    assert section.arrays["norm"].numpy()[0] == pytest.approx(section.samples["norm"], rel=1e-5)
    for i, block in enumerate(net.module.blocks):
        exact = []
        for x in list(inputs[i]):
            jacobian = torch.autograd.functional.jacobian(block, x[None], vectorize=True)
            exact.append(float(torch.linalg.matrix_norm(jacobian.reshape(x.numel(), -1), 2)))
        row = section.rows[i + 1]
        assert row.median == pytest.approx(np.median(exact), rel=1e-8)
        assert row.max == pytest.approx(max(exact), rel=1e-8)
        assert section.arrays["norm"].numpy()[i + 1] == pytest.approx(exact, rel=1e-5)
        assert row.converged == row.samples == 3
    with pytest.raises(UsageError, match="--per-layer needs --norm 2"):
        JacobianOptions(norm="inf", per_layer=True)


def test_a_norm_that_is_not_a_number_says_so():
    values = {
        "norm": np.array([1.0, math.nan]),
        "upper": np.array([1.0, math.nan]),
        "within": np.array([0.0, math.nan]),
        "products": np.array([3, 3]),
        "converged": np.array([True, False]),
        "radius_first_order": np.array([0.5, math.nan]),
        "rivals": np.array([1, 1]),
        "complete": np.array([True, True]),
    }
    part = Part(("a", "b"), values, {"from": "pixels", "to": "logits", "method": "lanczos"})
    section = summarise([part], JacobianOptions())[0]
    report = lipaudit.measure("demo", "jacobian", samples=1)
    report = report.model_copy(update={"sections": (section,)})
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
        section = measured(net, batch, within=within)
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
        section = measured(net, batch, rivals=rivals)
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
