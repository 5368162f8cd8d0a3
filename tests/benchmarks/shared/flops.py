"""Floating point operations by precision: a card has a rate of its own for each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Flops(TorchDispatchMode):
    """Count those of products, convolutions and attention.

    Attributes:
        counts: by precision, `float32` say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        count = flop_registry.get(func._overloadpacket)
        if count is None:  # in inference mode an operation is not yet cut into its parts
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        result = func(*args, **(kwargs or {}))
        if count is not None:
            (first, *_) = (t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
            name = str(first.dtype).removeprefix("torch.")
            self.counts[name] += count(*args, **(kwargs or {}), out_val=result)
        return result
