"""The zoo of small models, a module that takes what training offers, and a training of it."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lipaudit import schema
from lipaudit.tables import Report
from tests.models.conftest import zoo as zoo
from tests.nets import Classifier, seeded


class Restless(Classifier):
    """Draws at random whether it is trained or not, and has a count of its passes in its graph.

    Neither changes what it returns.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x):
        self.passes += 1
        drawn = 0 * (random.random() + float(np.random.rand()) + torch.rand(()).item())
        out = super().forward(x)
        return out + drawn + 0 * (out * self.passes)


@pytest.fixture
def module() -> Restless:
    return seeded(Restless)


@pytest.fixture(scope="session")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(12, 3, 4, 4, generator=generator), torch.arange(12) % 3


def reports(folder: Path) -> dict[int, Report]:
    """Return the reports of a watched training, by their step."""
    paths = folder.glob("step-*.json")
    return {int(path.stem.split("-")[1]): schema.load(path) for path in paths}


def median(report: Report) -> float:
    """Return the median Jacobian norm."""
    return report.section("jacobian").rows[0].median


Watcher = Callable[[int], Any]


def trained(
    module: nn.Module, data: Any, watcher: Watcher, *, autocast: bool = False, twice: bool = False
) -> dict[str, Any]:
    """Train six steps, telling the watcher of each; return all that the training leaves behind.

    Args:
        module: it is trained in place.
        data: samples and labels, shuffled by the global random state.
        watcher: is called with the step, between the forward and the backward pass.
        autocast: run the model in bfloat16, and the watcher with it.
        twice: gradients are accumulated over two steps.
    """
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    loader = DataLoader(TensorDataset(*data), batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    module.train()
    for _ in range(2):
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = nn.functional.cross_entropy(module(x), y)
                watcher(len(losses))
            loss.backward()
            losses.append(loss.item() + float(np.random.rand()) + random.random())
            if not twice or len(losses) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizer": optimizer.state_dict()["state"],
        "grads": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "modes": [each.training for each in module.modules()],
        "rng": torch.get_rng_state(),
    }
