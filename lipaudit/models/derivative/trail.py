"""Whether NaN marks everything computed from it, so that one run predicts the next."""

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
"""torch marks it as random because of dropout, which the CPU version does not support."""


class Trail(EagerMode):
    """Watches for random numbers, for operations that hide a NaN, and for state.

    Only floating-point numbers can be NaN: not a comparison, a rank, or a Python number. So the
    effect of a mask or a route made from NaN is unknown.

    Attributes:
        lost: whether such an operation occurred.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lost = False
        self._storages: set[int] = set()
        self._states: list[tuple[Tensor, Tensor]] = []

    def restore(self) -> bool:
        """Restore older tensors that the run has written into, if any."""
        with torch.no_grad():
            for state, before in reversed(self._states):
                state.copy_(before)
        return bool(self._states)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation; check its inputs if NaN may not come out."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        given = {_identify_storage(t) for t in tensors}
        if func._schema.is_mutable:
            self._keep(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        parts = tree_leaves(result)
        results = (_identify_storage(t) for t in parts if isinstance(t, Tensor))
        self._storages.update(storage for storage in results if storage not in given)
        if torch.Tag.nondeterministic_seeded in func.tags and func._opname != _ATTENTION:
            self.lost = True
        elif func._opname in _DROPS or not all(
            t.is_floating_point() or t.is_complex() if isinstance(t, Tensor) else t is None
            for t in parts
        ):
            # No result that could show a NaN comes out: none may have gone in.
            self.lost |= any(bool(t.isnan().any()) for t in tensors if t.is_floating_point())
        return result

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy a tensor before an operation writes into it, unless the run created it."""
        for place, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for t in tree_leaves(value) if written else ():
                if isinstance(t, Tensor) and _identify_storage(t) not in self._storages:
                    self._states.append((t, t.clone()))


def _identify_storage(tensor: Tensor) -> int:
    """Return a value that identifies a storage among all live ones."""
    return tensor.untyped_storage()._cdata
