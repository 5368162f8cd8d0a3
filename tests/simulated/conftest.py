"""Fixtures: the simulated accelerator, and three small models that make themselves anew."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from lipaudit.models.net import LoadOptions, ModelSpec
from lipaudit.models.sources.transformer_inputs import describe_transformers
from tests.nets import TEXT, seeded
from tests.simulated import device

SMALL = TEXT | {"pad_token_id": 0, "num_labels": 3}


@pytest.fixture(scope="session")
def simulated() -> str:
    """The name of the device, once it is there."""
    try:
        device.start()
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the device cannot be compiled here: {error}")
    return device.NAME


def _make(kind: str, **more: Any) -> ModelSpec:
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    make = getattr(transformers, f"{kind}ForSequenceClassification")
    return describe_transformers(seeded(lambda: make(config)), LoadOptions())


MODELS: dict[str, Callable[[], Any]] = {
    "demo": lambda: "demo",
    "bert": lambda: _make("Bert"),
    "llama": lambda: _make("Llama", num_key_value_heads=2),
}


def samples(model: str, count: int = 4) -> dict[str, Any]:
    """What to call a measure with for its samples: texts of unlike lengths, labelled."""
    if model == "demo":
        return {"samples": count}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SMALL["vocab_size"], (count, 12), generator=generator)
    ids[0, 9:] = 0
    return {"data": (ids, torch.arange(count) % 3)}
