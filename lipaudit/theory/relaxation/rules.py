"""Every operation that forms know, by name: what is not here is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lipaudit.theory.relaxation.layers import curves, heads, pieces, placing, scaling, sums
from lipaudit.theory.relaxation.operations import affine, moves, norms, products, smooth, softmax
from lipaudit.theory.relaxation.operations.relu import relu

RULES: dict[str, Callable[..., Any]] = {
    **affine.RULES,
    **moves.RULES,
    **smooth.RULES,
    **products.RULES,
    **softmax.RULES,
    **norms.RULES,
    "relu": relu,
    **pieces.RULES,
    **curves.RULES,
    **sums.RULES,
    **placing.RULES,
    **scaling.RULES,
    **heads.RULES,
}
"""The whitelist."""
