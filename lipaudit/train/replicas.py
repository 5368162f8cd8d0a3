"""Copies of a model in several processes: each takes a part of every batch, all the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lipaudit.errors import UsageError
from lipaudit.models.precision import SEEDED, EagerMode

Objective = Callable[..., Any]


class Part(NamedTuple):
    """What one copy takes of a batch.

    Attributes:
        rows: of the batch; never none, so that all copies do the same.
        samples: how many of them count.
        factor: of its mean loss, so that the mean over copies is that of the batch.
        whole: how many samples the batch has.
    """

    rows: slice
    samples: int
    factor: float
    whole: int


@dataclass(frozen=True)
class Replica:
    """One copy of a model that is trained, of which each process has one.

    Attributes:
        rank: of the process, from 0.
        size: how many there are.
        device: where the model is.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    def part(self, whole: int) -> Part:
        """Return what this copy takes of a batch; without any, the first sample for nothing."""
        start, stop = (i * whole // self.size for i in (self.rank, self.rank + 1))
        samples = stop - start
        rows = slice(start, stop) if samples else slice(0, 1)
        return Part(rows, samples, samples * self.size / whole, whole)

    def synchronised(self, module: nn.Module, objective: Objective) -> Objective:
        """Return an objective whose gradients are, after a backward pass, the mean over copies.

        Raises:
            UsageError: the model is a function of a batch, which a part does not show.
        """
        if self.size == 1:
            return objective
        _require_apart(module)
        # What a forward pass, or a penalty, leaves out of the model has no gradient: it stays.
        return DistributedDataParallel(_Whole(module, objective), find_unused_parameters=True)

    def total(self, values: Any) -> Any:
        """Return the sum of an array over all copies."""
        if self.size == 1:
            return values
        tensor = torch.from_numpy(np.asarray(values, dtype=np.float64)).to(self.device)
        dist.all_reduce(tensor)
        return tensor.cpu().numpy()

    def gathered(self, value: Any) -> list[Any]:
        """Return what every process gives, in their order."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def first(self, value: Any) -> Any:
        """Return what the first process gives."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    @contextmanager
    def drawing(self, part: Part) -> Iterator[None]:
        """Draw dropout for the whole batch where this copy runs its part of it.

        On a GPU, whose random numbers depend on the shape that they are drawn in, each process
        draws its own (`stream`).
        """
        if self.size == 1 or self.device.type in SEEDED:
            yield
            return
        with _DrawnWhole(part):
            yield

    @property
    def stream(self) -> int:
        """Which of the random streams of an epoch the model draws from."""
        return self.rank if self.device.type in SEEDED else 0


ALONE = Replica()


class _Whole(nn.Module):
    """A function of a model as a module: what it reads are its parameters."""

    def __init__(self, module: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.module, self._objective = module, objective

    def forward(self, *args: Any) -> Any:
        return self._objective(*args)


def _require_apart(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            raise UsageError(
                f"{name} ({type(part).__name__}) normalises over the batch, of which each process "
                "has a part",
                "Train this model without a launcher.",
            )


class _DrawnWhole(EagerMode):
    """Draws Bernoulli variables, which dropout is made of on a CPU, for the whole batch.

    Uniform ones, too: transformers makes stochastic depth of them. Each process draws them all
    from the same state, and takes those of its own rows.
    """

    def __init__(self, part: Part) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._part, self._rows = part, part.rows.stop - part.rows.start

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.bernoulli_.float and self._samples(args[0].shape):
            out, *rest = args
            return out.copy_(self._own(func(_like(out, self._all(len(out))), *rest, **kwargs)))
        if func is torch.ops.aten.rand.default and self._samples(args[0]):
            size, *rest = args
            return self._own(func([self._all(size[0]), *size[1:]], *rest, **kwargs))
        return func(*args, **kwargs)

    def _samples(self, shape: Sequence[int]) -> bool:
        """Tell whether the first axis is of samples, or of what each of them has several of."""
        return len(shape) > 0 and shape[0] > 0 and shape[0] % self._rows == 0

    def _all(self, rows: int) -> int:
        return rows // self._rows * self._part.whole

    def _own(self, whole: Tensor) -> Tensor:
        each, own = len(whole) // self._part.whole, self._part.rows
        return whole[each * own.start : each * own.stop]


def _like(out: Tensor, rows: int) -> Tensor:
    """Return a tensor of more rows that lies in memory as a tensor does: draws go by that."""
    strides = out.stride()
    layout = sorted(range(out.ndim), key=lambda axis: -strides[axis])
    return torch.empty_permuted((rows, *out.shape[1:]), layout, dtype=out.dtype, device=out.device)
