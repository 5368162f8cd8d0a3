"""Models whose gradient is their derivative, and models whose gradient is not."""

import pytest
import torch
from torch import nn

import lipaudit

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
