"""Per-sample columns of truth values, and repeated samples."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lipaudit.tables.columns import Column

FLAGS = frozenset({"certified", "complete", "converged", "correct", "robust"})
"""Per-sample columns of yes and no (true and false, or 1 and 0): their mean is a share."""


def require_flags(samples: Mapping[str, Sequence[Any]], columns: Mapping[str, Column]) -> None:
    """Refuse a column of truth values that holds another number.

    Raises:
        ValueError: the message gives the column and the number.
    """
    for name, cells in samples.items():
        if name.partition("@")[0] not in FLAGS & columns.keys():
            continue
        for cell in cells:
            if isinstance(cell, float | int) and math.isfinite(cell) and cell not in (0, 1):
                raise ValueError(f"{name} holds {cell}, which is neither 0 nor 1")


def is_repeat(name: str) -> bool:
    """Say whether an id belongs to a repeat of an earlier sample.

    >>> is_repeat("0123456789abcdef-2"), is_repeat("0123456789abcdef")
    (True, False)
    """
    return re.fullmatch(r"[0-9a-f]{16}-\d+", name) is not None
