"""A batch of hybrid zonotopes: what runs through an unmodified model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.relaxation.names import METADATA, name_of
from lipaudit.theory.relaxation.refusals import NoRuleError, rule_of


class Hybrid(Tensor):
    """x(e) = centre + sum_i generators_i e_i + something within +- radius, all |e_i| <= 1.

    To a model it is a tensor of its shape, dtype and device, without numbers. All parts carry
    gradients.

    Args:
        centre: (batch, *shape).
        generators: (inputs, batch, *shape).
        radius: (batch, *shape), >= 0.
        spread: sum_i |generators_i|, where it is known.
        simplex: entries are >= 0 and sum to one along the last axis, whatever the input.
    """

    rules: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[Hybrid],
        centre: Tensor,
        generators: Tensor,
        radius: Tensor,
        *,
        spread: Tensor | None = None,
        simplex: bool = False,
    ) -> Hybrid:
        shell: Hybrid = Tensor._make_wrapper_subclass(
            cls, centre.shape, dtype=centre.dtype, device=centre.device
        )
        return shell

    def __init__(
        self,
        centre: Tensor,
        generators: Tensor,
        radius: Tensor,
        *,
        spread: Tensor | None = None,
        simplex: bool = False,
    ) -> None:
        self.centre, self.generators, self.radius = centre, generators, radius
        self.simplex, self.layer = simplex, None
        if spread is not None:
            self.spread = spread

    layer: Layer | None
    """The linear layer that it is the result of."""

    @cached_property
    def spread(self) -> Float[Tensor, "batch ..."]:
        """How far the linear part moves."""
        moves: Tensor = _OneNorm.apply(self.generators)
        return moves

    @cached_property
    def reach(self) -> Float[Tensor, "batch ..."]:
        """How far every entry moves."""
        return self.spread + self.radius

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The least and the largest value of every entry."""
        return self.centre - self.reach, self.centre + self.reach

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Hybrid({tuple(self.shape)}, {len(self.generators)} inputs)"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply the rule of a function of torch."""
        name, kwargs = name_of(func), dict(kwargs or {})
        if name in METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return rule_of(cls.rules, name, args, kwargs)(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what did not come by `__torch_function__`: there are no numbers here."""
        raise NoRuleError(str(func))


@dataclass(frozen=True)
class Layer:
    """weight x + bias of a hybrid x: differences of its entries say more than the result."""

    x: Hybrid
    weight: Tensor
    bias: Tensor | None


class _OneNorm(torch.autograd.Function):
    """Sum of sizes over the first axis, a row at a time: a few times faster than the library."""

    @staticmethod
    def forward(ctx: Any, g: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        total = torch.zeros(g.shape[1:], dtype=g.dtype, device=g.device)
        for row in g:
            total += row.abs()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (g,) = ctx.saved_tensors
        return g.sgn().mul_(grad)
