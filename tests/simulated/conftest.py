"""Fixtures: the simulated accelerator, and three small models that make themselves anew."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lipaudit.models.net import LoadOptions, ModelSpec
from lipaudit.models.sources.huggingface import describe_transformers
from tests.nets import TEXT
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


def _bert() -> ModelSpec:
    from transformers import BertConfig, BertForSequenceClassification

    return _seeded(lambda: BertForSequenceClassification(BertConfig(**SMALL)))


def _llama() -> ModelSpec:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(**SMALL, num_key_value_heads=2)
    return _seeded(lambda: LlamaForSequenceClassification(config))


def _seeded(make: Callable[[], torch.nn.Module]) -> ModelSpec:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return describe_transformers(make(), LoadOptions())


MODELS: dict[str, Callable[[], Any]] = {"demo": lambda: "demo", "bert": _bert, "llama": _llama}


def samples(model: str, count: int = 4) -> dict[str, Any]:
    """What to call a measure with for its samples: texts of unlike lengths, labelled."""
    if model == "demo":
        return {"samples": count}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SMALL["vocab_size"], (count, 12), generator=generator)
    ids[0, 9:] = 0
    return {"data": (ids, torch.arange(count) % 3)}
