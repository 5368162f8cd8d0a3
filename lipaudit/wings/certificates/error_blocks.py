"""Coefficients of errors that each act within one row of a tensor.

The error of a row-wise operation in row t does not affect other rows until attention mixes them. A
stack (rows, *shape) of its coefficients would be zero except in one row each. An `ErrorBlock`
folds the stack: its r-th layer holds one symbol for every group of entries. Row-wise operations
act on layers as on a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Rearrangement = Callable[[Tensor], Sequence[Tensor]]
"""Moves the entries of a tensor (*shape), and returns one or several tensors, such as chunk."""


@dataclass(frozen=True)
class ErrorBlock:
    """Coefficients of errors of which each acts on one group of entries, such as a row.

    An entry in group g depends on one symbol per layer: on symbol numbers[layer, g], with the
    entry's coefficient in that layer. A dense stack would be zero nearly everywhere.

    Attributes:
        coefficients: (layers, *shape).
        group: (*shape), the group of each entry.
        numbers: (layers, groups), the symbol of a layer at a group, -1 for none (zeros there).
        key: number of the first symbol, the same in all forms that share these errors.
    """

    coefficients: Tensor
    group: Tensor
    numbers: Tensor
    key: int

    @property
    def end(self) -> int:
        """Return one more than the largest number of a symbol of the block."""
        return int(self.numbers.max()) + 1

    def map_coefficients(self, op: Callable[[Tensor], Tensor]) -> ErrorBlock:
        """Return the block with an operation applied to its coefficients (layers, *shape).

        The operation works entry by entry, or within rows of the last axis. An operation within
        rows, such as a product with weights, may change the width of the rows.
        """
        coefficients = op(self.coefficients)
        if coefficients.shape == self.coefficients.shape:
            return replace(self, coefficients=coefficients)
        # After `split_by_row` all entries of a row have the same group: read the first one.
        group = self.group[..., :1].expand(coefficients.shape[1:])
        return replace(self, coefficients=coefficients, group=group)

    def rearrange(self, move: Rearrangement) -> list[ErrorBlock]:
        """Return a block for each result of a rearrangement: one for transpose, several for chunk.

        `move` takes a tensor (*shape) and returns the results. It is applied to each layer of
        coefficients, and to the groups of the entries.
        """
        stacks = move_stack(move, self.coefficients)
        blocks = []
        for coefficients, group in zip(stacks, move(self.group), strict=True):
            blocks.append(replace(self, coefficients=coefficients, group=group))
        return blocks

    def has_layers_of(self, other: ErrorBlock) -> bool:
        """Return whether the coefficients of two blocks can be added layer by layer.

        A block has layers of coefficients. In a layer, entries of one group depend on one symbol:
        `group` has the group of each entry, and `numbers` the symbol of each layer at each group.
        """
        same_groups = torch.equal(self.group, other.group)
        return same_groups and torch.equal(self.numbers, other.numbers)

    def split_by_row(self) -> ErrorBlock | None:
        """Return the block with one group per row of the last axis; None if that is impossible.

        A block has coefficients (layers, *shape) and the group of each entry, (*shape). In layer l
        all entries of group g have the same symbol, whose number is numbers[l, g]. If a row has m
        groups, every layer is replaced by m layers: in each of them only the entries of one group
        keep their coefficients. Example: a row has entries of groups 4, 4, 9 and one layer with
        coefficients a, b, c. The result has the layers (a, b, 0) and (0, 0, c), and the row is one
        group. All rows need the same number m of groups, and no group may have entries in two
        rows; otherwise the result is None. If every row has one group already, the block is
        returned as it is, also if rows share a group.
        """
        if bool((self.group == self.group[..., :1]).all()):
            return self
        shape = self.group.shape
        groups = self.group.reshape(-1, shape[-1])  # (rows, width)
        distinct_groups = [torch.unique(row) for row in groups]
        if len({len(distinct) for distinct in distinct_groups}) > 1:
            return None
        groups_of_row = torch.stack(distinct_groups)  # (rows, m)
        if len(torch.unique(groups_of_row)) < groups_of_row.numel():
            return None
        row_count, m = groups_of_row.shape
        # Every old layer becomes m new layers. An entry keeps its coefficient in only one of them:
        # the one of its group among the m groups of the row.
        is_group = groups[..., None] == groups_of_row[:, None]  # (rows, width, m)
        is_in_layer = is_group.view(*shape, m).movedim(-1, 0).contiguous()  # (m, *shape)
        coefficients = (self.coefficients * is_in_layer[:, None]).flatten(0, 1)
        numbers = self.numbers[:, groups_of_row].permute(2, 0, 1)  # (m, layers, rows)
        group = torch.arange(row_count, device=groups.device)
        group = group.view(*shape[:-1], 1).expand(shape)
        return ErrorBlock(coefficients, group, numbers.flatten(0, 1), self.key)

    def add_to(self, stack: Tensor) -> None:
        """Add the coefficients to the rows of their symbols in a stack (symbols, *shape)."""
        numbers = self.numbers[:, self.group.flatten()]  # (layers, entries)
        entries = numbers.shape[1]
        flat = stack.view(len(stack), entries)
        coefficients = self.coefficients.reshape(len(self.coefficients), entries)
        # Entries without a symbol (number -1) have coefficients 0: added to row 0, they change
        # nothing.
        flat.scatter_add_(0, numbers.clamp_min(0), coefficients)

    def select_entries(self, mask: Tensor) -> ErrorBlock:
        """Return the block of the entries where a mask (*shape) is True, along one axis."""
        return replace(self, coefficients=self.coefficients[:, mask], group=self.group[mask])


def join_blocks(
    x: Sequence[ErrorBlock], y: Sequence[ErrorBlock], combine: Callable[[Tensor, Tensor], Tensor]
) -> list[ErrorBlock]:
    """Return the blocks of the result of two forms, such as a sum.

    Blocks with equal keys have the same symbols: their coefficients are combined. A block that
    only one form has stays as it is.

    Args:
        x: the blocks of the first form.
        y: the blocks of the second form.
        combine: maps the coefficients of two blocks to the coefficients of the result, such as
            torch.add.
    """
    joined = {block.key: block for block in x}
    for block in y:
        shared = joined.get(block.key)
        if shared is None:
            joined[block.key] = block
        else:
            coefficients = combine(shared.coefficients, block.coefficients)
            joined[block.key] = replace(shared, coefficients=coefficients)
    return list(joined.values())


def move_stack(move: Rearrangement, stack: Tensor) -> Sequence[Tensor]:
    """Apply a rearrangement of entries to each row of a stack (symbols, *shape).

    `move` takes a tensor (*shape) and returns one or several tensors.
    """
    if len(stack):
        return torch.vmap(move)(stack)
    # vmap takes no empty stack: move one row to learn the shapes, then return none of it.
    moved = move(stack.new_empty(stack.shape[1:]))
    return [result[None][:0] for result in moved]


def create_errors(radius: Tensor, first: int, dtype: torch.dtype) -> ErrorBlock:
    """Return a block with a separate error symbol for every entry of positive radius.

    A block has layers of coefficients, (layers, *shape). In a layer every row of the last axis has
    at most one symbol: the l-th positive entry of a row is in layer l. So there are as many layers
    as the fullest row has positive entries.

    Args:
        radius: (*shape), the coefficient of each new symbol; at least one is positive.
        first: number of the first new symbol.
        dtype: dtype of the coefficients, which holds `radius` exactly.
    """
    device = radius.device
    shape = radius.shape
    width = 1  # a single number is a row of one entry
    if radius.ndim:
        width = shape[-1]
    radius = radius.reshape(-1, width)
    positive = radius > 0
    # Row, column and layer of each positive entry; the layer is the number of positive entries
    # before it in its row.
    row, column = positive.nonzero(as_tuple=True)
    layer = (positive.cumsum(1) - 1)[row, column]
    layers = int(positive.sum(1).max())
    coefficients = torch.zeros(layers, *radius.shape, dtype=dtype, device=device)
    coefficients[layer, row, column] = radius[row, column].to(dtype)
    # The number of the symbol in each layer and row; -1: none.
    numbers = torch.full((layers, len(radius)), -1, device=device)
    numbers[layer, row] = first + torch.arange(len(row), device=device)
    # The group of an entry is its row.
    group = torch.arange(len(radius), device=device)
    group = group[:, None].expand(radius.shape)
    return ErrorBlock(coefficients.view(layers, *shape), group.reshape(shape), numbers, first)
