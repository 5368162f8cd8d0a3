"""Norms of whole models of any size: squares of derivatives leave the range of floats first."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError
from lipaudit.models.attention.capture import capture
from lipaudit.models.attention.numeric import compute_numeric_norms
from lipaudit.models.linearize import linearize
from lipaudit.models.model_norms import compute_jacobian_norms

X = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))


def network(inputs, outputs, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(inputs, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, outputs)
        layers[-1].bias.data.zero_()
    return nn.Sequential(*layers).to(dtype)


def norms_of(model, x, norm="2"):
    linear = linearize(lambda z, _: model(z), x)
    return compute_jacobian_norms(linear, norm=norm, tol=1e-6, within=1e-6)


def scaled(model, powers):
    """The model with its last layers times powers of ten."""
    model = copy.deepcopy(model)
    for layer, power in zip(reversed(model), powers, strict=False):
        layer.weight.data *= 10.0**power
        layer.bias.data *= 0
    return model


SHAPES = [(40, 5), (40, 20), (18, 30), (5, 30)]  # dense, J J^T, J^T J, dense by columns


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_the_norm_scales_with_the_last_layer(inputs, outputs, dtype, norm):
    model, x = network(inputs, outputs, dtype), X[:, :inputs].to(dtype)
    want = norms_of(model, x, norm)
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    for power in (-25, 12, 30):
        found = norms_of(scaled(model, [power]), x, norm)
        for name in ("norm", "upper"):
            value, unit = getattr(found, name).double(), getattr(want, name).double()
            torch.testing.assert_close(value / 10.0**power, unit, rtol=rounding, atol=0)
        assert found.converged.all()


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize(
    ("dtype", "powers"), [(torch.float32, (-20, -35)), (torch.float64, (-100, -100))]
)
def test_norms_that_the_precision_cannot_hold_are_refused(inputs, outputs, dtype, powers):
    model, x = network(inputs, outputs, dtype), X[:, :inputs].to(dtype)
    with pytest.raises(EvaluationError, match="too small for torch.float"):
        norms_of(scaled(model, powers), x)
    assert norms_of(nn.Sequential(model, nn.Threshold(1e9, 0.5)), x).norm.eq(0).all()


def test_samples_of_different_size_do_not_disturb_each_other():
    factors = torch.tensor([1.0, 1e-20, 1e25])[:, None]
    model = network(40, 20, torch.float32)
    alone = norms_of(model, X).norm
    beside = compute_jacobian_norms(linearize(lambda z, i: model(z) * factors[i], X), tol=1e-6)
    torch.testing.assert_close(beside.norm / factors[:, 0].double(), alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize("power", [-25, 12, 25])
def test_layers_without_a_closed_form(zoo, power):
    net, sites, batch = zoo("deberta", "float32")
    values = net.module.get_submodule(sites[0].module).value_proj
    batch = Batch(batch.x[:1], None, batch.ids[:1])

    norms_of = partial(compute_numeric_norms, seeds=[3])
    norms = []
    kept = copy.deepcopy(values.state_dict())
    try:
        for factor in (1.0, 10.0**power):
            values.load_state_dict({name: factor * each for name, each in kept.items()})
            norms += capture(net, sites, batch, norms_of, layers=[0])
    finally:
        values.load_state_dict(kept)
    assert norms[1].converged.all()
    torch.testing.assert_close(norms[1].norm / 10.0**power, norms[0].norm, rtol=1e-5, atol=0)
