"""Properties in VNN-LIB 1.0, the format of the verification competition VNN-COMP."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

# Seconds for an instance where nobody set a limit: that of the competition's vision transformers.
TIMEOUT = 100.0


def write_property(low: Tensor, high: Tensor, classes: int, label: int, title: str) -> str:
    """Write the property that a classifier keeps its class on a box, as what must not happen.

    Args:
        low: smallest value of every input, in the order in which the network reads them.
        high: largest value of every input.
        classes: number of logits.
        label: the class to keep.
        title: a line that says what it is.
    """

    def write_lines() -> Iterator[str]:
        yield f"; {title}"
        yield from (f"(declare-const X_{i} Real)" for i in range(low.numel()))
        yield from (f"(declare-const Y_{i} Real)" for i in range(classes))
        for i, ends in enumerate(
            zip(low.flatten().tolist(), high.flatten().tolist(), strict=True)
        ):
            # Shortest decimals that are read as the same numbers; not all tools read exponents.
            least, most = (np.format_float_positional(end, trim="0") for end in ends)
            yield from (f"(assert (>= X_{i} {least}))", f"(assert (<= X_{i} {most}))")
        yield "(assert (or"
        yield from (f"    (and (>= Y_{i} Y_{label}))" for i in range(classes) if i != label)
        yield "))"

    return "\n".join(write_lines()) + "\n"
