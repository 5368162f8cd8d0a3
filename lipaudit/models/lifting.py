"""Weights as and where they are stored, lifted to the precision and device of a run when read.

A module that is held keeps its parameters as they are stored (in half precision, on the CPU, in a
file that is mapped): `parameters()` gives those, and `module.weight` gives a copy as the run needs
it, which lives as long as something reads it. While the model runs, `parameters()` gives such
copies too: some models ask their own type and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

LARGE = 2**16
"""Copies with at least this many entries get separate memory pages."""

_lifted: MutableMapping[Tensor, TensorWeakRef] = WeakTensorKeyDictionary()
"""Converted copy of each stored weight in use; tied weights share one copy."""
_stored: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
"""Stored weight of each converted copy."""


@dataclass(frozen=True)
class Kept:
    """A weight, or a view of one, that is lifted again where it is read.

    Attributes:
        stored: the weight as it is stored.
        dtype: what it is lifted to.
        device: where it is lifted to.
        view: size, stride and offset of the view in the lifted weight.
    """

    stored: Tensor
    dtype: torch.dtype
    device: torch.device
    view: tuple[torch.Size, tuple[int, ...], int]

    @property
    def shape(self) -> torch.Size:
        """Return its size, for which nothing is lifted."""
        return self.view[0]

    def lifted(self) -> Tensor:
        """Return it as the run needs it."""
        return _lift(self.stored, self.dtype, self.device).detach().as_strided(*self.view)


def keep(weight: Tensor) -> Tensor | Kept:
    """Return what to remember of a weight beyond its layer: never the copy that was lifted."""
    stored = _stored.get(weight if weight._base is None else weight._base)
    if stored is None:
        return weight.detach()
    offset = int(weight.storage_offset())
    return Kept(stored, weight.dtype, weight.device, (weight.shape, weight.stride(), offset))


def read(kept: Tensor | Kept) -> Tensor:
    """Return a weight that was kept."""
    return kept if isinstance(kept, Tensor) else kept.lifted()


def hold(
    module: nn.Module,
    dtype: torch.dtype,
    place: Callable[[str], torch.device | None] = lambda _path: None,
) -> tuple[torch.dtype, ...]:
    """Keep the parameters of a module as they are, and lift each where it is read.

    Buffers, and parameters that are wider than `dtype`, are converted; buffers are moved, too.

    Args:
        module: the model.
        dtype: what its parts read.
        place: where the part of a path reads; None: where its tensors are.

    Returns:
        the types that are lifted, sorted by name.
    """
    for path, part in module.named_modules():
        device = place(path)
        if isinstance(part, nn.RNNBase):  # it hands its weights to torch without reading them
            part.to(device=device, dtype=dtype)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                part._buffers[name] = buffer.to(device, kind)
        own = [p for p in part._parameters.values() if p is not None]
        for p in own:
            if p.is_floating_point() and not _narrower(p, dtype):
                p.data = p.data.to(dtype)
        if any(_lifts(p, dtype, device) for p in own):
            part.__dict__["_parameters"] = _Parameters(part._parameters, dtype, device)
    kinds = {p.dtype for p in module.parameters() if _narrower(p, dtype)}
    return tuple(sorted(kinds, key=str))


def precision(module: nn.Module) -> torch.dtype:
    """Return the type of a module's parameters where the module reads them."""
    for part in module.modules():
        if isinstance(part._parameters, _Parameters):
            return part._parameters.dtype
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def devices(module: nn.Module) -> Iterator[torch.device]:
    """Yield where the parts of a module read each of their parameters, the first one first."""
    for part in module.modules():
        table = part._parameters
        given = table.device if isinstance(table, _Parameters) else None
        yield from (given or p.device for p in dict.values(table) if p is not None)


def has_lifted_weights(module: nn.Module) -> bool:
    """Say whether weights are lifted where they are read: what is stored has no gradient."""
    return any(isinstance(part._parameters, _Parameters) for part in module.modules())


def lifting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a model that is held, in which `parameters()` gives lifted weights."""

    def run(*args: Any) -> Any:
        with _running():
            return call(*args)

    return run


class _Parameters(dict[str, Any]):
    """The parameters of one module by name: stored, and lifted where they are read."""

    running = 0
    """Number of running model calls."""

    def __init__(
        self, own: dict[str, Any], dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__(own)
        self.dtype, self.device = dtype, device

    def __getitem__(self, name: str) -> Any:
        return self._lifted(super().__getitem__(name))

    def __setitem__(self, name: str, value: Any) -> None:
        """Set what is stored: who puts back what was read changes nothing."""
        super().__setitem__(name, value if value is None else _stored.get(value, value))

    def items(self) -> Any:
        own = super().items()
        return ((name, self._lifted(p)) for name, p in own) if self.running else own

    def values(self) -> Any:
        own = super().values()
        return (self._lifted(p) for p in own) if self.running else own

    def _lifted(self, stored: Any) -> Any:
        return None if stored is None else _lift(stored, self.dtype, self.device)


@contextmanager
def _running() -> Iterator[None]:
    _Parameters.running += 1
    try:
        yield
    finally:
        _Parameters.running -= 1


def _lift(stored: Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return the copy of a stored weight that a run needs: the one that is alive, if any."""
    if not _lifts(stored, dtype, device):
        return stored
    kind = dtype if _narrower(stored, dtype) else stored.dtype
    place = device or stored.device
    known = _lifted.get(stored)
    copy = None if known is None else known()
    if copy is None or (copy.dtype, copy.device) != (kind, place):
        with torch.inference_mode(False), torch.no_grad():
            copy = nn.Parameter(_room(stored, kind, place).copy_(stored), requires_grad=False)
        _lifted[stored], _stored[copy] = TensorWeakRef(copy), stored
    return copy


def _room(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a copy that goes back to the system with it.

    The C library keeps what it is handed back by the megabyte between things that live longer:
    the heap would grow to several times the model.
    """
    count = like.numel()
    if device.type != "cpu" or count < LARGE or not like.is_contiguous():
        return torch.empty_like(like, dtype=dtype, device=device)
    pages = mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(like.shape)


def _lifts(p: Tensor, dtype: torch.dtype, device: torch.device | None) -> bool:
    return _narrower(p, dtype) or device not in (None, p.device)


def _narrower(p: Tensor, dtype: torch.dtype) -> bool:
    return p.is_floating_point() and torch.finfo(p.dtype).bits < torch.finfo(dtype).bits
