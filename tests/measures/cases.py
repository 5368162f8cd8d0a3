"""Measures through their own functions, small classifiers, and Jacobians of plain autograd."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lipaudit.data.batch import Batch, identify_samples
from lipaudit.measures import load_measures
from lipaudit.models.net import Net
from lipaudit.tables import Section
from tests.nets import draw

SHAPE = (1, 3, 4)
"""The samples of the classifiers of images below."""


def run_measure(name: str, net: Net, *batches: Batch, **options: Any) -> list[Section]:
    """Measure batches, and return the sections."""
    known = load_measures()[name]
    given = known.options(**options)
    return known.summarise(list(known.compute(net, batches, given)), given)


def dense(function: Any, x: Tensor) -> Tensor:
    """The Jacobian of a function: (outputs, inputs)."""
    jacobian = torch.autograd.functional.jacobian(function, x, vectorize=True)
    return jacobian.reshape(-1, x.numel())


def dense_norm(function: Any, x: Tensor) -> float:
    return float(torch.linalg.matrix_norm(dense(function, x), 2))


class Small(nn.Module):
    """Attention, a normalisation and a GELU on three tokens of width four."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.qkv = nn.Linear(4, 8), nn.Linear(8, 24)
        self.norm, self.up, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 3)
        nn.init.normal_(self.head.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x.flatten(1, 2))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return self.head(F.gelu(self.up(x)).mean(1))


class Plane(nn.Module):
    """Two classes, a plane apart: the smoothed classifier and every radius are known."""

    def __init__(self, inputs: int = 12) -> None:
        super().__init__()
        self.head, weight = nn.Linear(inputs, 2), draw(3, 2, inputs)
        middle = (weight[1] - weight[0]).sum() / 2 * torch.tensor([0.5, -0.5])
        self.head.load_state_dict({"weight": weight, "bias": middle + torch.tensor([0.3, 0.0])})

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


class Bag(nn.Module):
    """The mean of token embeddings: what noise or k words can do is known in closed form."""

    def __init__(self, count: int = 50) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(count, 6), nn.Linear(6, 2)

    def mix(self, x: Tensor, _mask: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        share = mask.to(x.dtype) / mask.sum(1, keepdim=True)
        return self.head((self.mix(x, mask) * share[..., None]).sum(1))


class Words(Bag):
    """Attention over token embeddings, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def mix(self, x: Tensor, mask: Tensor) -> Tensor:
        logits = self.query(x) @ self.key(x).transpose(1, 2)
        return x + logits.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ x


def samples(model: nn.Module, count: int, *, wrong: int = 0) -> tuple[Tensor, Tensor]:
    """Draw points amid the box with the model's own labels, the first few of them false."""
    x = 0.35 + 0.3 * torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = model(x).argmax(1)
    y[:wrong] = (y[:wrong] + 1) % model.head.out_features
    return x, y


def in_order(told: Any, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the samples in the order in which a section tells of them."""
    x, y = data
    ids = identify_samples([*x], y.tolist())
    rows = [ids.index(name) for name in told["ids"]]
    return x[rows], y[rows]
