"""What no token behind it reads of an operation costs nothing, and changes nothing."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lipaudit.models.derivative.linearize import linearize


class LastToken(nn.Module):
    """Scores behind one token of each sample: the last one, or one of the last three."""

    def __init__(self, places):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 40, batch_first=True, activation="gelu")
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 20)
        self.places = torch.tensor(places)

    def forward(self, x, index):
        return self.head(self.body(x)[torch.arange(len(x)), self.places[index]])


class ClassToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=16,
            patch_size=4,
            embed_dim=24,
            depth=2,
            num_classes=20,
        )

    def forward(self, x, index):
        return self.model(x)


READERS = {
    "class token": (ClassToken, (3, 16, 16)),
    "last token": (lambda: LastToken([11, 11, 11]), (12, 16)),
    "one of the last": (lambda: LastToken([9, 11, 10]), (12, 16)),
}


@pytest.mark.parametrize(("make", "shape"), READERS.values(), ids=READERS)
def test_tokens_that_nothing_reads_cost_nothing(make, shape, monkeypatch):
    monkeypatch.setattr("lipaudit.models.derivative.adjoints.LARGE", 0)
    torch.manual_seed(0)
    model, x = make().eval().requires_grad_(False).double(), torch.randn(3, *shape).double()
    flops, images = [], []
    u = torch.randn(2, 3, 20).double()
    for generic in (False, True):
        linear = linearize(model, x)
        linear.generic = generic
        linear.outer(u[0])
        with FlopCounterMode(display=False) as count:
            images.append(linear.outer(u[1]))
        flops.append(count.get_total_flops())
    torch.testing.assert_close(images[1], images[0], rtol=1e-12, atol=1e-14)
    # What is behind attention in the second of two blocks is left out.
    assert flops[1] < 0.9 * flops[0]


def test_a_vector_that_is_not_random_leaves_no_token_out(monkeypatch):
    monkeypatch.setattr("lipaudit.models.derivative.adjoints.LARGE", 0)
    weight = torch.randn(4, 4, dtype=torch.float64)
    linear = linearize(lambda z, _: F.linear(z, weight), torch.randn(2, 6, 4).double())
    first = torch.zeros(2, 6, 4).double()
    first[:, 0] = 1
    linear.outer(first)
    torch.testing.assert_close(linear.outer(first + 1), (first + 1) @ weight @ weight.T)
