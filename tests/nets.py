"""Nets and batches of modules that tests write themselves."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.models.net import LoadOptions, ModelSpec, Net
from lipaudit.models.sources.loader import assemble
from lipaudit.models.sources.transformer_inputs import describe_transformers

TEXT = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
"""The configuration of a small text model of transformers."""


def own_net(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: str = "float32",
    kind: str = "tokens",
    **how: object,
) -> Net:
    """Return the net of a module, on the CPU; `how` goes to its ModelSpec."""
    spec = ModelSpec(module, shape, kind=kind, **how)
    return assemble(spec, LoadOptions(dtype=dtype, device="cpu"), name="m", source="test")


def hf_net(module: nn.Module, dtype: str = "float32", **how: object) -> Net:
    """Return the net of a model of transformers, on the CPU; `how` goes to its LoadOptions."""
    options = LoadOptions(dtype=dtype, device="cpu", **how)
    return assemble(describe_transformers(module, options), options, name="m", source="test")


def own_batch(x: Tensor, mask: Tensor | None = None, y: Tensor | None = None) -> Batch:
    """Return samples that are numbered."""
    return Batch(x, y, tuple(f"{i:016x}" for i in range(len(x))), mask)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Calls(nn.Module):
    """A function of parts and inputs, as a module."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return what the function makes of the parts and the inputs."""
        return self.function(*self.parts, *inputs)


class Classifier(nn.Module):
    """Two heads over tokens, with dropout and running statistics."""

    def __init__(self, tokens: int = 4, width: int = 12, classes: int = 3) -> None:
        super().__init__()
        self.embed, self.shape = nn.Linear(width, 8), (tokens, width)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.reshape(len(x), *self.shape))
        tokens = self.norm(tokens.transpose(1, 2)).transpose(1, 2)
        return self.head(self.drop(self.attention(tokens, tokens, tokens)[0]).mean(1))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that a function makes, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()
