"""Models without a Jacobian per sample are refused, and the others hardly pay for the check."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lipaudit
from lipaudit.errors import EvaluationError, InputError
from lipaudit.models.linearize import linearize
from lipaudit.models.model_norms import compute_jacobian_norms


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant):
        super().__init__()
        self.body, self.reentrant = nn.Sequential(nn.Linear(4, 4), nn.GELU()), use_reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def noisy(x):
    return x + torch.randn_like(x)


def chosen(x):
    return x.sin() + 1e-2 * torch.where(x > 0, x, 0).sum(0)


UNSUITABLE = {
    "dropout": (nn.Dropout(0.5).train(), InputError, "dropout is on"),
    "attention dropout": (
        lambda x: nn.MultiheadAttention(4, 2, 0.9, batch_first=True)(x, x, x)[0],
        InputError,
        "one forward pass to the next",
    ),
    "noise": (noisy, InputError, "one forward pass to the next"),
    "batch statistics": (nn.BatchNorm1d(3).train(), InputError, "uses batch statistics"),
    "neighbour": (lambda x: x + 1e-2 * x.roll(1, 0).tanh(), InputError, "depends on another"),
    # As a model that takes its batch for a sequence, each part of which sees those before it.
    "batch as a sequence": (lambda x: x.cumsum(0), InputError, "depends on another"),
    "backwards": (lambda x: x.flip(0).cumsum(0).flip(0), InputError, "depends on another"),
    "next": (lambda x: x.sin() + 1e-2 * x.roll(-1, 0), InputError, "depends on another"),
    "chosen neighbour": (chosen, InputError, "depends on another"),
    "largest of the batch": (lambda x: x / x.abs().amax(), InputError, "depends on another"),
    "mean of the batch": (lambda x: x - x.mean(0), InputError, "depends on another"),
    "checkpoint": (Checkpointed(use_reentrant=False), InputError, "gradient checkpointing"),
    "reentrant checkpoint": (Checkpointed(use_reentrant=True), InputError, "checkpoint"),
    "constant": (torch.ones_like, InputError, "cannot be linearised"),
    "not finite": (lambda x: x / 0, EvaluationError, "not finite"),
    "no batch": (lambda x: x.sum(), InputError, "output of shape"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs")  # what re-entrant checkpoints say
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(("f", "error", "message"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_unsuitable_models_are_refused(f, error, message, samples):
    torch.manual_seed(0)
    with pytest.raises(error, match=message):
        compute_jacobian_norms(linearize(lambda z, _: f(z), torch.randn(samples, 3, 4)))


def test_fused_attention_is_no_noise():
    sizes = []

    def f(z, index):
        sizes.append(len(index))
        return F.scaled_dot_product_attention(z, z, z)

    linearize(f, torch.randn(2, 3, 4))
    assert sizes == [3, 2]


def test_the_check_takes_three_forward_passes_of_one_sample():
    sizes = []

    def f(z, index):
        sizes.append((len(index), torch.is_grad_enabled()))
        return z.tanh()

    for samples in (1, 5):
        linearize(f, torch.randn(samples, 4)).outer(torch.randn(samples, 4))
        assert sizes == [(3, False), (samples, True)]
        sizes.clear()


def test_statistics_of_the_batch_stay_what_they_were():
    norm = nn.BatchNorm1d(3).train()
    with pytest.raises(InputError, match="uses batch statistics"):
        linearize(lambda z, _: norm(z), torch.randn(1, 3, 4))
    assert norm.running_mean.tolist() == [0, 0, 0]


def test_a_model_that_checks_its_numbers_is_measured():
    def f(z):
        assert z.abs().max() <= 1
        return z.sin()

    linearize(lambda z, _: f(z), torch.linspace(-1, 1, 12).view(3, 4))


def test_a_wrong_mask_is_noticed():
    """An f that forgets `index` gives samples another mask where it is run on a part."""
    scale = torch.tensor([1.0, 2.0, 3.0])[:, None]
    with pytest.raises(InputError, match="depends on another"):
        linearize(lambda z, _: z * scale[: len(z)], torch.randn(3, 4))


X = {"x": torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)), "y": [0, 1, 2]}


class Round(nn.Module):
    def forward(self, x):
        return x + ((255 * x).round() / 255 - x).detach()


class Hidden(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        with torch.no_grad():
            hidden = self.part(x)
        return hidden + 0.1 * x


HONEST = {
    "relu and maxima": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
    "gelu": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.BatchNorm2d(8)),
    "constant": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Threshold(1e9, 0.5)),
    "huge": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(1e-6), nn.Softplus(1e4)),
}
DISHONEST = {
    "rounded input, straight through": lambda: nn.Sequential(Round(), nn.Conv2d(3, 8, 3)),
    "a part under no_grad": lambda: nn.Sequential(Hidden(nn.Conv2d(3, 3, 3, padding=1))),
}


def codes(build):
    torch.manual_seed(0)
    model = nn.Sequential(build(), nn.Flatten(), nn.LazyLinear(3))
    model(X["x"])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    report = lipaudit.audit(model, measures=["jacobian"], data=(X["x"], X["y"]), samples=3)
    after = model.state_dict()
    assert all(after[name].dtype == t.dtype and after[name].equal(t) for name, t in before.items())
    return {note.code for section in report.sections for note in section.notes}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_model_is_not_warned_of(name):
    assert "no-derivative" not in codes(HONEST[name])


@pytest.mark.parametrize("name", DISHONEST)
def test_a_gradient_that_is_no_derivative_is_warned_of(name):
    assert "no-derivative" in codes(DISHONEST[name])
