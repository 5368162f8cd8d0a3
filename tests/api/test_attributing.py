"""Which layer explains a change, from Python: of modules of one's own, and left as they were."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

import lipaudit
from lipaudit.errors import InputError, UsageError


class Attention(nn.Module):
    """Two heads over four tokens, and a classifier of what they give."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        tokens = self.embed(x.flatten(2).mT.reshape(len(x), 4, 12))
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))


@pytest.fixture
def module():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Attention()


def test_layers_are_swapped_between_modules_of_ones_own(module):
    """All of the change is the one layer's, and both modules are as they were."""
    other = deepcopy(module)
    with torch.no_grad():
        other.attention.in_proj_weight *= 1.5
    weights = [*module.parameters(), *other.parameters()]
    kept = [(t, t.data_ptr(), t.clone(), t.requires_grad) for t in weights]
    x = torch.rand(3, 3, 4, 4)
    shown = lipaudit.attribute(module, other, data=x, input_shape=(3, 4, 4), samples=3)
    (layer,) = shown.layers
    assert layer.layer == "attention"
    assert layer.effect == shown.change
    norms = [
        lipaudit.measure(m, "jacobian", data=x, input_shape=(3, 4, 4), samples=3)
        .section("jacobian")
        .samples["norm"]
        for m in (module, other)
    ]
    assert shown.change.mean == pytest.approx(float(np.log(np.divide(*norms[::-1])).mean()), 1e-4)
    for t, at, value, trained in kept:
        assert (t.data_ptr(), t.requires_grad) == (at, trained)
        assert torch.equal(t, value)
        assert t.grad is None
    assert b"attention" in lipaudit.render(shown, "markdown")


def test_options_that_an_attribution_has_not_are_refused(module):
    other = {"data": torch.rand(2, 3, 4, 4), "input_shape": (3, 4, 4)}
    for wrong in ({"groups": "heads"}, {"norm": "inf"}, {"eps": "1"}):
        with pytest.raises(UsageError):
            lipaudit.attribute(module, module, **other, **wrong)
    with pytest.raises(InputError, match="same weights"):
        lipaudit.attribute(module, module, **other)
