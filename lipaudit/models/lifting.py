"""Weights in their stored precision and place, converted ("lifted") when a layer reads them.

A held module keeps its parameters as stored (in half precision, on the CPU, in a mapped file).
`parameters()` returns the stored tensors. `module.weight` returns a copy in the precision and on
the device of the run; the copy is freed after use. While the model runs, `parameters()` returns
such copies, too, because some models read their own dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
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
    """A weight, or a view of one, that is converted again whenever it is read.

    Attributes:
        stored: the stored weight.
        dtype: dtype of the copy.
        device: device of the copy.
        view: size, stride and offset of the view in the copy.
    """

    stored: Tensor
    dtype: torch.dtype
    device: torch.device
    view: tuple[torch.Size, tuple[int, ...], int]

    @property
    def shape(self) -> torch.Size:
        """Return the size, without a conversion."""
        return self.view[0]

    def lifted(self) -> Tensor:
        """Return the converted weight or view."""
        return _lift(self.stored, self.dtype, self.device).detach().as_strided(*self.view)


def keep(weight: Tensor) -> Tensor | Kept:
    """Return a reference to a weight for use beyond its layer; it never keeps the copy alive."""
    stored = _stored.get(weight if weight._base is None else weight._base)
    if stored is None:
        return weight.detach()
    offset = int(weight.storage_offset())
    return Kept(stored, weight.dtype, weight.device, (weight.shape, weight.stride(), offset))


def read(kept: Tensor | Kept) -> Tensor:
    """Return the weight behind a reference made by `keep`."""
    return kept if isinstance(kept, Tensor) else kept.lifted()


def hold(
    module: nn.Module,
    dtype: torch.dtype,
    place: Callable[[str], torch.device] | None = None,
) -> tuple[torch.dtype, ...]:
    """Keep the parameters of a module as stored, and convert each when it is read.

    Buffers, and parameters wider than `dtype`, are converted at once; buffers are also moved.

    Args:
        module: the model.
        dtype: dtype of the copies.
        place: returns the device of a module path; None: the device of its tensors.

    Returns:
        the stored dtypes that need conversion, sorted by name.
    """
    for path, part in module.named_modules():
        device = None if place is None else place(path)
        if isinstance(part, nn.RNNBase):  # it passes its weights to torch without reading them
            part.to(device=device, dtype=dtype)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                part._buffers[name] = buffer.to(device, kind)
        parameters = [p for p in part._parameters.values() if p is not None]
        for p in parameters:
            if p.is_floating_point() and not _narrower(p, dtype):
                p.data = p.data.to(dtype)
        if any(_lifts(p, dtype, device) for p in parameters):
            part.__dict__["_parameters"] = _Parameters(part._parameters, dtype, device)
    kinds = {p.dtype for p in module.parameters() if _narrower(p, dtype)}
    return tuple(sorted(kinds, key=str))


def precision(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's parameters as the module reads them."""
    for part in module.modules():
        if isinstance(part._parameters, _Parameters):
            return part._parameters.dtype
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def devices(module: nn.Module) -> Iterator[torch.device]:
    """Yield the devices on which the parts of a module read their parameters, in order."""
    for part in module.modules():
        table = part._parameters
        given = table.device if isinstance(table, _Parameters) else None
        yield from (given or p.device for p in dict.values(table) if p is not None)


def has_lifted_weights(module: nn.Module) -> bool:
    """Say whether weights are converted on reading: stored weights have no gradient."""
    return any(isinstance(part._parameters, _Parameters) for part in module.modules())


def lifting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a held model in which `parameters()` returns converted weights."""

    def run(*args: Any) -> Any:
        _Parameters.running += 1
        try:
            return call(*args)
        finally:
            _Parameters.running -= 1

    return run


class _Parameters(dict[str, Any]):
    """The parameters of one module by name: stored, and converted on reading."""

    running = 0
    """Number of running model calls."""

    def __init__(
        self, parameters: dict[str, Any], dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__(parameters)
        self.dtype, self.device = dtype, device

    def __getitem__(self, name: str) -> Any:
        return self._lifted(super().__getitem__(name))

    def __setitem__(self, name: str, value: Any) -> None:
        """Set the stored weight; setting the copy that was read changes nothing."""
        super().__setitem__(name, value if value is None else _stored.get(value, value))

    def items(self) -> Any:
        parameters = super().items()
        return ((name, self._lifted(p)) for name, p in parameters) if self.running else parameters

    def values(self) -> Any:
        parameters = super().values()
        return (self._lifted(p) for p in parameters) if self.running else parameters

    def _lifted(self, stored: Any) -> Any:
        return None if stored is None else _lift(stored, self.dtype, self.device)


def _lift(stored: Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return the converted copy of a stored weight; an existing copy is reused."""
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
    """Return memory for a copy that the system gets back when the copy is freed.

    The C library does not return blocks of megabytes that lie between longer-lived ones: the heap
    would grow to several times the model.
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
