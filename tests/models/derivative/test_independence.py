"""Models without a Jacobian per sample are refused, and the others hardly pay for the check."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lipaudit.errors import EvaluationError, InputError
from lipaudit.models.derivative.linearize import linearize


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant):
        super().__init__()
        self.body, self.reentrant = nn.Sequential(nn.Linear(4, 4), nn.GELU()), use_reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def noisy(x):
    return x + torch.randn_like(x)


def of_the_neighbour(x):
    return x + 1e-7 * x.roll(1, 0).tanh()


def constant(x):
    return torch.ones_like(x)


def of_those_before(x):
    """As a model that takes its batch for a sequence, each part of which sees those before it."""
    return x.cumsum(0)


UNSUITABLE = {
    "dropout": (nn.Dropout(0.5).train(), InputError, "dropout is on"),
    "attention dropout": (
        lambda x: nn.MultiheadAttention(4, 2, 0.9, batch_first=True)(x, x, x)[0],
        EvaluationError,
        "one forward pass to the next",
    ),
    "noise": (noisy, EvaluationError, "one forward pass to the next"),
    "batch statistics": (nn.BatchNorm1d(3).train(), InputError, "statistics of the batch"),
    "neighbour": (of_the_neighbour, InputError, "depends on another"),
    "batch as a sequence": (of_those_before, InputError, "depends on another"),
    "mean of the batch": (lambda x: x - x.mean(0), InputError, "depends on another"),
    "checkpoint": (Checkpointed(use_reentrant=False), InputError, "gradient checkpointing"),
    "reentrant checkpoint": (Checkpointed(use_reentrant=True), InputError, "checkpoint"),
    "constant": (constant, InputError, "cannot be linearised"),
    "not finite": (lambda x: x / 0, EvaluationError, "not finite"),
    "no batch": (lambda x: x.sum(), InputError, "output of shape"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs")  # what re-entrant checkpoints say
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(("f", "error", "message"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_unsuitable_models_are_refused(f, error, message, samples):
    with pytest.raises(error, match=message):
        linearize(lambda z, _: f(z), torch.randn(samples, 3, 4)).fit()


def test_the_check_takes_two_forward_passes_of_one_sample():
    sizes = []

    def f(z, index):
        sizes.append((len(index), torch.is_grad_enabled()))
        return z.tanh()

    for samples in (1, 5):
        linearize(f, torch.randn(samples, 4)).outer(torch.randn(samples, 4))
        assert sizes == [(samples, True), (2, False)]
        sizes.clear()


def by_a_weight_of_zero(x):
    return x.sin() + 0 * x.roll(1, 0)


def that_looks_at_its_numbers(x):
    if x.isnan().any():
        raise ValueError("bad input")
    return x.sin()


@pytest.mark.parametrize("f", [by_a_weight_of_zero, that_looks_at_its_numbers])
@pytest.mark.parametrize("samples", [1, 3])
def test_where_numbers_cannot_tell_derivatives_decide(f, samples):
    x = torch.randn(samples, 4)
    linear = linearize(lambda z, _: f(z), x)
    assert torch.equal(linear.vjp(torch.ones_like(x)), x.cos())
    with pytest.raises(InputError, match="depends on another"):
        linearize(lambda z, _: f(z) + 1e-7 * z.roll(1, 0), x)


def test_statistics_of_the_batch_stay_what_they_were():
    norm = nn.BatchNorm1d(3).train()
    with pytest.raises(InputError, match="statistics of the batch"):
        linearize(lambda z, _: norm(z), torch.randn(1, 3, 4))
    assert norm.running_mean.tolist() == [0, 0, 0]


def test_a_wrong_mask_is_noticed():
    """An f that forgets `index` gives samples another mask where it is run on a part."""
    scale = torch.tensor([1.0, 2.0, 3.0])[:, None]
    with pytest.raises(EvaluationError, match="beside it"):
        linearize(lambda z, _: z * scale[: len(z)], torch.randn(3, 4))
