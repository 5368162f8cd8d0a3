"""Per-sample columns of truth values, and repeated samples."""

from __future__ import annotations

import re

FLAGS = frozenset({"certified", "complete", "converged", "correct", "robust"})
"""Per-sample columns of yes and no (true and false, or 1 and 0): their mean is a share."""


def is_repeat(name: str) -> bool:
    """Say whether an id belongs to a repeat of an earlier sample.

    >>> is_repeat("0123456789abcdef-2"), is_repeat("0123456789abcdef")
    (True, False)
    """
    return re.fullmatch(r"[0-9a-f]{16}-\d+", name) is not None
