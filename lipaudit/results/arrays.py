"""What the arrays of a section look like: checked once, where a report is read."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lipaudit.results.columns import Array

SHAPES: Mapping[str, tuple[int | None, ...]] = {
    "map": (None, None),
    "map_tokens": (2,),
    "row": (None,),
    "row_norms": (2,),
    "first_row": (None,),
    "p1p2_hist": (None, None),
    "positions": (None, None),
}
"""The shape of arrays by kind, the name before @; None is any length."""
BESIDE = {"map": "map_tokens", "row": "row_norms"}
"""Arrays that need another one of the same head."""
BINNED = {"g1_ratio_hist": "g1_ratio_edges", "p1p2_hist": "p1p2_edges"}
"""Histograms, and the edges of their bins: one more than there are bins."""
AXES = frozenset({"map_tokens", *BINNED.values()})
"""Arrays that say where others are drawn: all of them finite numbers."""


def require_drawable(arrays: dict[str, Array]) -> dict[str, Array]:
    """Return the arrays of a section, which can be drawn.

    Raises:
        ValueError: one has another shape, lacks the array it needs, or is not finite.
    """
    for name, array in arrays.items():
        kind, _, head = name.partition("@")
        if array.data and not _has_shape(array.shape, SHAPES.get(kind)):
            raise ValueError(f"{name} has the shape {array.shape}")
        if kind in BESIDE and f"{BESIDE[kind]}@{head}" not in arrays:
            raise ValueError(f"{name} without {BESIDE[kind]}@{head}")
        if kind in AXES and not all(v is not None and math.isfinite(v) for v in array.data):
            raise ValueError(f"{name} has values that are no numbers")
        if kind in BINNED:
            _require_edges(name, array, arrays.get(BINNED[kind]))
    return arrays


def _has_shape(shape: tuple[int, ...], known: tuple[int | None, ...] | None) -> bool:
    if known is None:
        return True
    pairs = zip(shape, known, strict=False)
    return len(shape) == len(known) and all(b in (None, a) for a, b in pairs)


def _require_edges(name: str, counts: Array, edges: Array | None) -> None:
    bins = counts.shape[-1] if counts.shape else 0
    if edges is None or not edges.shape or edges.shape[-1] != bins + 1:
        raise ValueError(f"{name} has {bins} bins, and other edges")
    if not all(v is not None and v >= 0 for v in counts.data):
        raise ValueError(f"{name} has counts below 0")
