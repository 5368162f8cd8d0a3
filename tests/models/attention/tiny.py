"""A module of one attention layer, of which tests change one thing."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.models.net import Net
from tests.nets import own_net

WIDTH, HEADS = 8, 2


class Tiny(nn.Module):
    """Attention of two heads, by three linear layers, and an output projection.

    `read` makes what queries, keys and values read of the module and its inputs; `change` is of
    the module, its first input, q, k and v; `attend` makes O of these; `parts` make further parts.
    """

    def __init__(
        self,
        *,
        read: Callable[..., Any] = lambda _m, x: (x, x, x),
        change: Callable[..., Any] = lambda _m, _x, *qkv: qkv,
        attend: Callable[..., Tensor] = F.scaled_dot_product_attention,
        **parts: Callable[[], Any],
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.read, self.change, self.attend = read, change, attend
        for name, make in parts.items():
            setattr(self, name, make())

    def heads(self, *given: Tensor) -> Tensor:
        """Return O of every head, (batch, heads, tokens, width)."""
        return self.attended(given[0], *self.read(self, *given))

    def attended(self, x: Tensor, *tokens: Tensor) -> Tensor:
        """Return O where queries, keys and values read these tokens."""
        maps = zip((self.to_q, self.to_k, self.to_v), tokens, strict=True)
        qkv = (m(t).unflatten(2, (HEADS, -1)).transpose(1, 2) for m, t in maps)
        return self.attend(*self.change(self, x, *qkv))

    def forward(self, *given: Tensor) -> Tensor:
        """Return what W_O makes of the heads."""
        return self.out(self.heads(*given).transpose(1, 2).flatten(2))


def tiny_net(module: nn.Module, tokens: int, dtype: str = "float64") -> Net:
    """Return the net of a module of this width, without classes."""
    return own_net(module, (tokens, WIDTH), dtype, classifier=False)


def norms(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Return ||J|| of every head in all inputs together, at one sample, by plain autograd.

    The function takes batches of one and returns O, (1, heads, tokens, width).
    """

    def whole(*xs: Tensor) -> Tensor:
        return function(*(x[None] for x in xs))[0]

    parts = torch.autograd.functional.jacobian(whole, given)
    rows = [j.flatten(3).flatten(1, 2) for j in parts]
    return torch.linalg.matrix_norm(torch.cat(rows, 2), 2)
