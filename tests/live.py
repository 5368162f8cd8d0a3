"""How much memory tensors take while something runs: what is alive at a time, by storage."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """While active, counts the bytes of every tensor that an operation returns.

    Attributes:
        most: the most that was alive at a time.
        largest: of one tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self.largest = self._total = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._note(t.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        self._total += storage.nbytes() - self._alive.get(reference, 0)
        self._alive[reference] = storage.nbytes()
        self.largest = max(self.largest, storage.nbytes())
        if self._total > self.most:  # with what has gone since: look for that only now
            self._alive = {one: size for one, size in self._alive.items() if not one.expired()}
            self._total = sum(self._alive.values())
            self.most = max(self.most, self._total)
