"""Floating point operations by precision: a card has a rate of its own for each."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import lipaudit

PACKAGE = Path(lipaudit.__file__).parent


class Flops(TorchDispatchMode):
    """Count those of products, convolutions and attention.

    Attributes:
        counts: by precision, `float32` say.
        double: those of float64, by the file of the package that asks for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.double: Counter[str] = Counter()

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
            self._add(result, count(*args, **(kwargs or {}), out_val=result))
        return result

    def _add(self, result: Any, operations: int) -> None:
        (first, *_) = (t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        self.counts[str(first.dtype).removeprefix("torch.")] += operations
        if first.dtype == torch.float64:
            self.double[_caller()] += operations


def _caller() -> str:
    """The file of the package that asks, as `theory/heads`."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and frame.f_code.co_name != "__torch_function__":
            return str(path.relative_to(PACKAGE).with_suffix(""))
        frame = frame.f_back
    return "elsewhere"
