from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lipaudit.tables.trials import parse_radius


@dataclass(frozen=True)
class Linear:
    """Logits W x + b of the flattened sample, whose robustness has a closed form."""

    w: Tensor
    b: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.w.T + self.b

    def reach(self, x: Tensor, y: Tensor, norm: str) -> Tensor:
        """Distance to the nearest boundary: min_j (f_y - f_j) / ||w_y - w_j||_dual.

        In l1 the box binds: entries move one after the other to its edge, the steepest first.
        """
        gaps = self(x).gather(1, y[:, None]) - self(x)
        if norm == "l1":
            slopes = self.w - self.w[y][:, None]
            room = torch.where(slopes > 0, 1 - x.flatten(1)[:, None], x.flatten(1)[:, None])
            steep, order = slopes.abs().sort(dim=-1, descending=True)
            room = room.gather(-1, order)
            gained, spent = (steep * room).cumsum(-1), room.cumsum(-1)
            last = (gained < gaps[..., None]).sum(-1, keepdim=True).clamp_max(len(self.w[0]) - 1)
            over = gained.gather(-1, last)[..., 0] - gaps
            far = spent.gather(-1, last)[..., 0] - over / steep.gather(-1, last)[..., 0]
            far = torch.where(over < 0, torch.inf, far)
            return far.scatter(1, y[:, None], torch.inf).amin(1)
        slopes = torch.linalg.vector_norm(
            self.w[y][:, None] - self.w, ord=1 if norm == "linf" else 2, dim=-1
        )
        return (gaps / slopes).scatter(1, y[:, None], torch.inf).amin(1)


@pytest.fixture
def linear() -> Callable[..., tuple[Linear, Tensor, Tensor]]:
    """Build a linear classifier with samples in the middle of [0, 1], mostly labelled right."""

    def build(
        classes: int, shape: tuple[int, ...] = (1, 4, 4), *, samples: int = 24, dtype=torch.float32
    ) -> tuple[Linear, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(classes)
        dim = torch.Size(shape).numel()
        w = torch.randn(classes, dim, generator=draw, dtype=torch.float64)
        x = 0.4 + 0.2 * torch.rand(samples, *shape, generator=draw, dtype=torch.float64)
        model = Linear(w.to(dtype), -(0.5 * w.sum(1)).to(dtype))
        y = model(x.to(dtype)).argmax(1)
        y[::6] = (y[::6] + 1) % classes
        return model, x.to(dtype), y

    return build


class _Attention(nn.Module):
    """A transformer of one block on the eight rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(0.1 * torch.randn(8, 32))
        self.attend = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x[:, 0]) + self.place
        z = z + self.attend(z, z, z, need_weights=False)[0]
        return self.head(self.norm(z).mean(1))


def _train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    optimiser = torch.optim.Adam(model.double().parameters(), 5e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return model.eval()


@pytest.fixture(scope="session")
def digits() -> SimpleNamespace:
    """The last 64 handwritten digits, and two small models trained on the first 1400."""
    data = load_digits()
    x = torch.tensor(data.images / 16.0)[:, None]
    y = torch.tensor(data.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(512, 10)
        )
        conv = _train(conv, x[:1400], y[:1400], 6)
        attention = _train(_Attention(), x[:1400], y[:1400], 6)
    models = {"conv": conv.float(), "attention": attention.float()}
    return SimpleNamespace(x=x[-64:].float(), y=y[-64:], **models)


@pytest.fixture
def radius():
    """Read a radius, as the command line does."""
    return parse_radius
