from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipaudit.attacks.oracle import (
    ByRow,
    Meter,
    Oracle,
    logits_and_gradient,
    logits_of,
    margins,
)
from lipaudit.errors import EvaluationError
from lipaudit.models import model_norms
from lipaudit.models.linearize import linearize


@pytest.fixture
def model():
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return net


@pytest.fixture
def x():
    return torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def oracle_on(f, n, size, meter=None):
    return Oracle(f, torch.arange(n), size, meter or Meter())


@pytest.mark.parametrize("size", [1, 4, 9, 64])
def test_gradients_through_the_pieces_are_those_of_autograd(model, x, size):
    """And backward leaves the parameters alone."""
    weight = torch.randn(9, 3, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((model(leaf) * weight).sum(), leaf)
    other = x.clone().requires_grad_()
    logits = oracle_on(model, 9, size)(other)
    (logits * weight).sum().backward()
    torch.testing.assert_close(logits, model(x))
    torch.testing.assert_close(other.grad, expected)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_no_call_is_larger_than_the_device_batch(model, x):
    sizes = []

    def f(z):
        sizes.append(len(z))
        return model(z)

    logits_and_gradient(oracle_on(f, 9, 4), x, torch.zeros(9, dtype=torch.int64))
    assert max(sizes) == 4
    assert sizes == [4, 4, 1]  # forward and backward at once: no forward pass is repeated


@pytest.mark.parametrize("size", [1, 4, 64])
def test_passes_are_counted_in_samples_whatever_the_batch_size(model, x, size):
    meter = Meter()
    oracle = oracle_on(model, 9, size, meter)
    oracle(x)
    logits_and_gradient(oracle, x, torch.zeros(9, dtype=torch.int64))
    assert (meter.forwards, meter.backwards) == (18, 9)


def test_a_model_by_row_is_told_which_rows_it_gets(x):
    rows = torch.tensor([4, 7, 8])
    shift = torch.arange(9, dtype=torch.float64)[:, None]
    by_row = ByRow(lambda z, r: z[:, :2] + shift[r])
    found = Oracle(by_row, rows, 2)(x[rows])
    torch.testing.assert_close(found, x[rows, :2] + shift[rows])


def test_logits_may_be_overwritten_without_harm(x):
    kept = torch.randn(9, 3)
    logits = oracle_on(lambda _: kept, 9, 64)(x)
    before = kept.clone()
    logits[:] = 0
    assert torch.equal(kept, before)


def test_an_output_without_gradient_has_gradient_zero(x):
    y = torch.zeros(9, dtype=torch.int64)
    for f in (lambda z: z.round()[:, :2].detach(), lambda _: torch.randn(9, 2).requires_grad_()):
        for g in (f, oracle_on(f, 9, 64)):
            assert not logits_and_gradient(g, x, y)[1].any()


def test_the_gradient_is_that_of_each_samples_own_loss(model, x):
    y = torch.tensor([0, 1, 2] * 3)
    logits, gradient = logits_and_gradient(model, x, y)
    for i in range(9):
        leaf = x[i : i + 1].clone().requires_grad_()
        F.cross_entropy(model(leaf), y[i : i + 1]).backward()
        torch.testing.assert_close(gradient[i : i + 1], leaf.grad)
    torch.testing.assert_close(logits, model(x))
    model.zero_grad(set_to_none=True)


def test_logits_are_found_in_what_a_model_returns():
    logits = torch.randn(2, 3)
    for output in (logits, SimpleNamespace(logits=logits), (logits, None)):
        assert logits_of(output) is logits


@pytest.mark.parametrize("output", [torch.randn(2, 3, 4), {"scores": 1}, None])
def test_an_output_that_is_no_logits_is_refused(output):
    with pytest.raises(EvaluationError, match="an attack needs logits"):
        logits_of(output)


def test_a_margin_is_the_same_to_attacks_and_to_radii():
    """One word, one thing: f_y - max over the others, here and in the section `jacobian`."""
    weight, y = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 3, 4, 2])

    def f(z, _rows=None):
        return z @ weight.T

    x = torch.randn(4, 7, dtype=torch.float64)
    assert torch.equal(margins(f(x), y) > 0, f(x).argmax(1) == y)
    torch.testing.assert_close(
        margins(f(x), y), model_norms.compute_margins(linearize(f, x), y, rivals=4).margin
    )
