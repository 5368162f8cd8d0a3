"""The mathematics: functions from tensors to tensors, without knowledge of models.

Here are the default accuracies, and the chunk sizes of computations; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

TOL = 1e-4
"""Default of --tol: estimated relative accuracy of a norm."""
WITHIN = 0.03
"""Default of --within: proven relative error of a norm."""
LAYER_WITHIN = 0.2
"""Default of --layer-within: as WITHIN, for whole layers, whose products are expensive."""
SHORT_ROW = 8
"""Largest number of keys of an attention row without a regime ([Y25] eq. 10). The regimes exclude
each other for thresholds of g_1 below 1/4, and that of a row of n keys is at least 2/n."""
NODES = 60_000
"""Default number of parts of a ball in branch and bound."""


@dataclass(frozen=True)
class Policy:
    """Sizes at which computations are split or done densely.

    Every bound holds under every policy; the policy affects time, memory and tightness. The
    default is tuned on one CPU thread with heads of 16 to 512 tokens.

    Attributes:
        map_entries: of the attention maps of a layer that are bounded at once: 4 MB in float64.
        map_limit: entries of a sample's attention maps of one layer that are kept; of longer ones
            the rows are computed again wherever they are read: 128 MB in single precision.
        chunk_entries: numbers that a temporary of heads which are not affine may hold: 32 MB.
        dense_entries: of a head's Jacobian up to which it is formed, and its blocks' norms exact.

    >>> Policy(chunk_entries=10).chunks(5, 4)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """

    map_entries: int = 2**19
    map_limit: int = 2**25
    chunk_entries: int = 2**22
    dense_entries: int = 2**18

    def chunks(self, total: int, entries: int, limit: int | None = None) -> list[slice]:
        """Return slices that cut items into chunks which fit into memory.

        Args:
            total: number of items.
            entries: how many numbers the computation holds in memory for each item.
            limit: how many numbers a chunk may hold in memory, `chunk_entries` by default. A
                single item that needs more is a chunk of its own.
        """
        size = max(1, (limit or self.chunk_entries) // max(1, entries))
        return [slice(start, min(start + size, total)) for start in range(0, total, size)]


POLICY = Policy()
"""The default."""
