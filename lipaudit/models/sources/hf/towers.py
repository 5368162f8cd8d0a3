"""Models with a tower per kind of input (CLIP and its kin): which one is read, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lipaudit.errors import UsageError
from lipaudit.models.sources.hf.pooling import mean_pooling

TAKES = {"image": "pixel_values", "text": "input_ids"}
"""What each tower takes."""


def towers(module: Any) -> tuple[str, ...]:
    """Return the towers that a model of transformers can be read by."""
    return tuple(name for name in TAKES if hasattr(module, f"get_{name}_features"))


def chosen_tower(module: Any, asked: str | None) -> str | None:
    """Return the tower to be read; None for a model that is read as a whole.

    Raises:
        UsageError: there are two and none is asked for, or not the one asked for.
    """
    own, name = towers(module), type(module).__name__
    if asked is not None and asked not in own:
        has = f"only {' and '.join(own)}" if own else "none"
        raise UsageError(f"{name} has no tower {asked!r}: it has {has}", "Leave --tower out.")
    if asked is None and len(own) > 1:
        raise UsageError(
            f"{name} has a tower for images and one for text: which one is measured?",
            "Add --tower image or --tower text.",
        )
    return asked


def tower_call(module: Any, tower: str) -> Callable[..., Any]:
    """Return the method that runs a tower alone, up to the features that are compared."""
    method: Callable[..., Any] = getattr(module, f"get_{tower}_features")
    return method


def tower_features(result: Any) -> Tensor:
    """Return the projected features of what a tower gave, not normalised."""
    if isinstance(result, Tensor):
        return result
    pooled: Tensor | None = getattr(result, "pooler_output", None)
    return mean_pooling(result, None) if pooled is None else pooled


def reads_last_position(module: Any) -> bool:
    """Say whether a text tower reads its last position, padding or not, as SigLIP's does."""
    return str(module.config.model_type).startswith("siglip")
