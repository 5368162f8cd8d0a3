"""Norms of models of any size: squares of derivatives leave the range of floats first."""

import copy
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError
from lipaudit.measures.bounds import BoundsOptions, measure, summarise
from lipaudit.models.attention.capture import capture
from lipaudit.models.attention.numeric import compute_numeric_norms
from lipaudit.models.attention.survey import survey
from lipaudit.models.linearize import linearize
from lipaudit.models.model_norms import compute_jacobian_norms
from lipaudit.theory.bounds.record import load_bounds
from tests.models.attention.tiny import WIDTH, Tiny, tiny_net
from tests.models.attention.tiny import norms as dense_norms
from tests.nets import TEXT, draw, hf_net, own_batch, seeded

X = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))


def network(inputs, outputs, dtype):
    sizes = (inputs, 24), (24, 24), (24, outputs)
    first, second, last = seeded(lambda: nn.Sequential(*(nn.Linear(*size) for size in sizes)))
    last.bias.data.zero_()
    return nn.Sequential(first, nn.Tanh(), second, last).to(dtype)


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


def test_a_head_without_a_derivative_at_one_sample_alone():
    """A black image beside others: values are relu(0), and the norm there is 0, not an error."""

    def attend(q, k, v):  # each row of P is divided by its norm: no closed form
        p = (q @ k.mT).softmax(-1)
        return p / p.norm(dim=-1, keepdim=True) @ v

    def clip(m, _x, q, k, v):
        return q, k, (v - m.to_v.bias.unflatten(0, (2, 1, -1))).relu()

    module = Tiny(attend=attend, change=clip)
    net = tiny_net(module, 5)
    x = draw(3, 3, 5, WIDTH, dtype=torch.float64)
    x[1] = 0.0
    batch = own_batch(x)
    sites = survey(net, batch).sites
    assert not sites[0].closed_form
    norms_of = partial(compute_numeric_norms, seeds=[1, 2, 3], tol=1e-9)
    (found,) = capture(net, sites, batch, norms_of)
    true = torch.stack([dense_norms(module.heads, one) for one in x])
    assert true[1].tolist() == [0.0, 0.0]
    torch.testing.assert_close(found.norm, true, rtol=1e-7, atol=0)


# --- logits in the thousands: bounds for the rounded pass, a label, and what helps


def model(attention: str, gain: float, dtype: str = "float32"):
    torch.manual_seed(0)
    config = transformers.BertConfig(**TEXT, num_labels=3, initializer_range=0.2)
    module = transformers.AutoModelForSequenceClassification.from_config(
        config, attn_implementation=attention
    )
    for layer in module.bert.encoder.layer:
        layer.attention.self.query.weight.data.mul_(gain)
    ids = torch.stack([torch.randperm(57)[:12] + 3 for _ in range(1)])
    return hf_net(module, dtype), own_batch(ids)


def section(net, batch):
    options = BoundsOptions()
    return summarise([*measure(net, [batch], options)], options)[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("gain", [1.0, 1e4])
def test_layers_keep_their_closed_form_and_say_what_rounding_may_have_moved(attention, gain):
    net, batch = model(attention, gain)
    table = section(net, batch)
    assert all(site.closed_form for site in survey(net, batch).sites)
    for row in table.rows:
        assert all(
            getattr(row, name) is None or getattr(row, name) >= row.exact for name in load_bounds()
        )
    noted = [note for note in table.notes if note.code == "forward-error"]
    largest = max(row.forward_error for row in table.rows)
    assert (largest > 1e-4) == (gain > 1) == bool(noted)
    assert all("--dtype float64" in note.text for note in noted)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_where_single_precision_is_hopeless_it_says_what_helps(attention):
    single, double = (model(attention, 1e6, dtype) for dtype in ("float32", "float64"))
    assert any("--dtype float64" in str(site.reason) for site in survey(*single).sites)
    assert all(site.closed_form for site in survey(*double).sites)
    assert max(row.forward_error for row in section(*double).rows) < 1e-4
