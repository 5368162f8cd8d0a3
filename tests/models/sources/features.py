"""A model without classes: `py:tests.models.sources.features:embed`."""

import torch
from torch import nn

from lipaudit import ModelSpec


def embed() -> ModelSpec:
    """Return a map to features."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    return ModelSpec(module, (3, 8, 8), classifier=False)
