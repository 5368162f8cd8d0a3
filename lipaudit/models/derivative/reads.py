"""Which tokens of an operation are read behind it: products leave out the others.

A classifier that reads its class token, or a decoder that is asked for the token behind the last
one, needs one row of what its last block makes. Nothing comes back to the others in J^T u,
whatever u is, and what J v has there goes nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_learning = ContextVar("_learning", default=False)


@contextmanager
def learning() -> Iterator[None]:
    """Let a backward pass in the block find out which tokens its operations are read at.

    Its u must be generic, such as random: where nothing of that reaches a token, no J^T u does,
    and J v is not read there. Products after it leave those tokens out: those of the last block,
    where only one token is read behind it. On a CPU, where nobody waits for the answer.
    """
    before = _learning.set(True)
    try:
        yield
    finally:
        _learning.reset(before)


class Read:
    """The range of tokens, an operation's last axis but one, where it is read; None: all."""

    def __init__(self, *, learns: bool = True) -> None:
        self.rows: slice | None = None
        self.learns = learns

    def of(self, u: Tensor) -> slice | None:
        """Return the range; find it out from a generic u while `learning`."""
        if self.learns and _learning.get() and u.device.type == "cpu" and u.ndim > 2:
            used = u.ne(0).any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist() or [0]
            few = 2 * (used[-1] + 1 - used[0]) <= u.shape[-2]
            self.rows = slice(used[0], used[-1] + 1) if few else None
        return self.rows


def only(rows: slice | None, x: Tensor) -> Tensor:
    """Return the rows of a range."""
    return x if rows is None else x[..., rows, :]


def among(rows: slice | None, x: Tensor, like: Tensor) -> Tensor:
    """Put rows back in their place among zeros, as many as `like` has."""
    if rows is None:
        return x
    whole = x.new_zeros(*x.shape[:-2], like.shape[-2], x.shape[-1])
    whole[..., rows, :] = x
    return whole
