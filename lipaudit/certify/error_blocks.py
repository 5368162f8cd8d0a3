"""Coefficients of errors that each act within one row of a tensor.

The error of a row-wise operation in row t does not affect other rows until attention mixes them. A
stack (rows, *shape) of its coefficients would be zero except in one row each. An `ErrorBlock`
folds the stack: its r-th layer holds one symbol for every group of entries. Row-wise operations
act on layers as on a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ErrorBlock:
    """Coefficients of errors, several symbols per layer.

    Attributes:
        rows: (layers, *shape).
        group: (*shape), the group of each entry.
        numbers: (layers, groups), the symbol of a layer at a group, -1 for none (zeros there).
        key: number of the first symbol, the same in all forms that share these errors.
    """

    rows: Tensor
    group: Tensor
    numbers: Tensor
    key: int

    @property
    def end(self) -> int:
        """One more than the largest number."""
        return int(self.numbers.max()) + 1 if self.numbers.numel() else 0

    def map_rows(self, op: Callable[[Tensor], Tensor]) -> ErrorBlock:
        """Apply an operation to the rows of the last axis, or to entries."""
        rows = op(self.rows)
        same = rows.shape == self.rows.shape
        group = self.group if same else self.group[..., :1].expand(rows.shape[1:])
        return replace(self, rows=rows, group=group)

    def move(self, move: Callable[[Tensor], Any]) -> list[ErrorBlock]:
        """Rearrange entries; the operation may have several results."""
        rows, group = move_stack(move, self.rows), move(self.group)
        if isinstance(group, Tensor):
            return [replace(self, rows=rows, group=group)]
        return [replace(self, rows=r, group=g) for r, g in zip(rows, group, strict=True)]

    def like(self, other: ErrorBlock) -> bool:
        """Say whether layers of both can be added."""
        return torch.equal(self.group, other.group) and torch.equal(self.numbers, other.numbers)

    def by_row(self) -> ErrorBlock | None:
        """Return the block with one group per row of the last axis; None if symbols span rows."""
        if bool((self.group == self.group[..., :1]).all()):
            return self
        # Several groups share a row: give each a layer of its own. That works if all rows have
        # equally many groups, and no group reaches over two rows.
        ids = self.group.reshape(-1, self.group.shape[-1])
        per_row = [torch.unique(row) for row in ids]
        if len({len(each) for each in per_row}) > 1:
            return None
        kept = torch.stack(per_row)  # (rows, m)
        if len(torch.unique(kept)) < kept.numel():
            return None
        place = (ids[..., None] == kept[:, None]).long().argmax(-1).view(self.group.shape)
        at = torch.arange(kept.shape[1], device=ids.device)
        at = (place == at.view(-1, *[1] * place.ndim))[:, None]
        group = torch.arange(len(kept), device=ids.device)
        return replace(
            self,
            rows=(self.rows * at).flatten(0, 1),
            group=group.view(*place.shape[:-1], 1).expand(place.shape),
            numbers=self.numbers[:, kept].permute(2, 0, 1).flatten(0, 1),
        )

    def add_to(self, stack: Tensor) -> None:
        """Add the block to a stack (rows, *shape) with a row for every symbol."""
        # Entries without a symbol (-1) are zero: adding them to row 0 changes nothing.
        at = self.numbers[:, self.group.flatten()]
        flat = self.rows.flatten(1) if self.rows.ndim > 1 else self.rows[:, None]
        stack.view(len(stack), at.shape[1]).scatter_add_(0, at.clamp_min(0), flat)

    def columns(self, mask: Tensor) -> ErrorBlock:
        """Return the entries of a mask, along one axis."""
        return replace(self, rows=self.rows[:, mask], group=self.group[mask])


def join_blocks(
    x: Sequence[ErrorBlock], y: Sequence[ErrorBlock], both: Callable[[Tensor, Tensor], Tensor]
) -> list[ErrorBlock]:
    """Return the blocks of two aligned forms; `both` combines the blocks that they share."""
    joined = {block.key: block for block in x}
    for block in y:
        shared = joined.get(block.key)
        joined[block.key] = (
            block if shared is None else replace(shared, rows=both(shared.rows, block.rows))
        )
    return list(joined.values())


def move_stack(move: Callable[[Tensor], Any], rows: Tensor) -> Any:
    """Apply a rearrangement of entries to all rows of a stack."""
    if len(rows):
        return torch.vmap(move)(rows)
    # vmap takes no empty stack: the shapes of the results come from one row.
    one = move(rows.new_empty(rows.shape[1:]))
    if isinstance(one, Tensor):
        return one[None][:0]
    return tuple(each[None][:0] for each in one)


def create_errors(radius: Tensor, first: int, dtype: torch.dtype) -> ErrorBlock:
    """Return a separate error symbol for every entry of positive radius, numbered in order.

    Its group is the entry's row along the last axis.
    """
    last = radius.shape[-1] if radius.ndim else 1
    flat = radius.reshape(-1, last)
    positive = flat > 0
    row, column = positive.nonzero(as_tuple=True)
    # The r-th positive entry of a row goes to layer r: as many layers as the fullest row needs.
    layer = (positive.cumsum(1) - 1)[row, column]
    layers = int(positive.sum(1).max()) if len(row) else 0
    rows = torch.zeros(layers, *flat.shape, dtype=dtype, device=radius.device)
    rows[layer, row, column] = flat[row, column].to(dtype)
    numbers = torch.full((layers, len(flat)), -1, device=radius.device)
    numbers[layer, row] = first + torch.arange(len(row), device=radius.device)
    group = torch.arange(len(flat), device=radius.device)[:, None].expand(flat.shape)
    return ErrorBlock(
        rows.view(layers, *radius.shape), group.reshape(radius.shape), numbers, first
    )
