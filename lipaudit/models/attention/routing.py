"""Choices of a model by the largest scores: of experts, or of keys.

A top-k is constant except where two scores tie, where it jumps. The Jacobian at a sample holds for
the choices made there; it does not include a change of choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipaudit.models.attention.observe.trace import CallStack
from lipaudit.tables import Note

_TOP_K = (torch.topk, Tensor.topk)
_LARGEST = (torch.argmax, Tensor.argmax)


class Routing(TorchFunctionMode):
    """Watches a model under differentiation for choices by scores that depend on its input.

    Attributes:
        modules: the modules that choose, in order, each with whether scores were equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, bool] = {}
        self._place = CallStack()

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Watch while the block runs and differentiates `module`."""
        with self._place.following(module), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a choice."""
        kwargs = kwargs or {}
        if func in _TOP_K:
            self._note(*args, **kwargs)
        elif func in _LARGEST:
            self._note_largest(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(self, input: Tensor, k: int, dim: int = -1, largest: bool = True, **_: Any) -> None:
        if not input.requires_grad or input.shape[dim] <= k:
            return
        with torch.no_grad():
            # The last score that is chosen beside the first one that is not.
            scores = input.detach().topk(k + 1, dim, largest).values.movedim(dim, -1)
            tie = bool((scores[..., -1] == scores[..., -2]).any())
        module = self._place.module()
        self.modules[module] = tie or self.modules.get(module, False)

    def _note_largest(self, input: Tensor, dim: int | None = None, **_: Any) -> None:
        if dim is not None:
            self._note(input, 1, dim)

    def notes(self) -> tuple[Note, ...]:
        """Note the meaning of the derivative if there are choices."""
        if not self.modules:
            return ()
        first = next(iter(self.modules))
        text = (
            f"experts or keys are chosen by the largest scores (first in {first}). The norm "
            "assumes the choice made at each sample; if two scores are equal, there is no "
            "derivative"
        )
        remarks = [Note(level="info", code="routed", text=text)]
        tied = [module for module, tie in self.modules.items() if tie]
        if tied:
            text = (
                f"scores are equal at these samples (first in {tied[0]}), so the norm is "
                "that of one of the choices"
            )
            remarks.append(Note(level="warning", code="routed-tie", text=text))
        return tuple(remarks)
