"""Whether NaN marks all that is computed from it, and one run tells what the next one does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lipaudit.models.precision import EagerMode

_DROPS = frozenset(
    {"nan_to_num", "nan_to_num_", "fmax", "fmin", "nansum", "nanmedian", "sign", "heaviside"}
)

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""torch marks it as random because of dropout, which its CPU version does not support."""


class Trail(EagerMode):
    """Watch for random numbers, for operations whose NaN leaves none behind, and for state.

    What is not a floating-point number cannot be NaN: a comparison, a place in an order, a number
    that Python gets to see. So nothing is known of what a mask or a route does that was made of
    NaN.

    Attributes:
        lost: whether an operation of either kind has been met.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lost = False
        self._storages: set[int] = set()
        self._states: list[tuple[Tensor, Tensor]] = []

    def restore(self) -> bool:
        """Put back what the run has written into tensors that are older than it, if any."""
        with torch.no_grad():
            for state, before in reversed(self._states):
                state.copy_(before)
        return bool(self._states)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the operation, and look at what went in where NaN may not come out."""
        given = {
            _identify_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        if func._schema.is_mutable:
            self._keep(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        results = (_identify_storage(t) for t in tree_leaves(result) if isinstance(t, Tensor))
        self._storages.update(storage for storage in results if storage not in given)
        if torch.Tag.nondeterministic_seeded in func.tags and func._opname != _ATTENTION:
            self.lost = True
        elif func._opname in _DROPS or not all(map(_shows_nan, tree_leaves(result))):
            self.lost |= any(map(_is_nan, tree_leaves((args, kwargs))))
        return result

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy what an operation is about to write into, if the run has not made it."""
        for place, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for t in tree_leaves(value) if written else ():
                if isinstance(t, Tensor) and _identify_storage(t) not in self._storages:
                    self._states.append((t, t.clone()))


def _identify_storage(tensor: Tensor) -> int:
    """What tells a storage from all others that are there at the same time."""
    return tensor.untyped_storage()._cdata


def _shows_nan(value: Any) -> bool:
    """Whether a NaN could be seen in a result."""
    if not isinstance(value, Tensor):
        return value is None
    return value.is_floating_point() or value.is_complex()


def _is_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())
