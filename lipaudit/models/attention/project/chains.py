"""Linear maps in a row: how far back q, k and v of a layer have to go to read one input.

A compressed key (x -> latent -> norm -> key) or a shared bottleneck makes q, k and v read three
different tensors, each a function, token by token, of one that came before them. Where the graph
is not cut at the linear maps in between, it says so itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lipaudit.models.attention.observe.linears import Linear
from lipaudit.models.attention.observe.origins import Address, Origin

_LATEST = 16  # linear maps that are remembered: those of one attention layer, and some before
_DEEPEST = 3  # linear maps in a row


@dataclass
class Chains:
    """The latest linear maps of a pass: what they read, and which others that was made from."""

    latest: OrderedDict[Address, tuple[Tensor, tuple[Address, ...]]] = field(
        default_factory=OrderedDict
    )

    def note(self, address: Address, linear: Linear, origins: Sequence[Origin]) -> None:
        """Remember a linear map of something that was made from these origins."""
        self.latest[address] = linear.x.detach(), tuple(origin.address for origin in origins)
        while len(self.latest) > _LATEST:
            self.latest.popitem(last=False)

    def inner(self, origins: Sequence[Origin]) -> frozenset[Address]:
        """Return the linear maps to leave in the graph so that all of `origins` read one tensor.

        The nearest such tensor counts. Empty where there is none, or where they do already.
        """
        ways = [
            list(self._back(address))
            for address in {o.address for o in origins if o.linear or o.forgotten}
        ]
        for x, _ in ways[0] if ways else ():
            passed = [_until(x, way) for way in ways]
            if all(maps is not None for maps in passed):
                return frozenset(a for maps in passed if maps is not None for a in maps)
        return frozenset()

    def _back(self, address: Address) -> Iterator[tuple[Tensor, tuple[Address, ...]]]:
        """Yield what a linear map reads, what the one before it reads, and so on.

        With each comes what lies between.
        """
        between: tuple[Address, ...] = ()
        while address in self.latest and len(between) < _DEEPEST:
            x, before = self.latest[address]
            yield x, between
            if len(before) != 1:
                return
            between, address = (*between, address), before[0]


def _until(
    x: Tensor, way: Sequence[tuple[Tensor, tuple[Address, ...]]]
) -> Sequence[Address] | None:
    return next((between for other, between in way if _same(x, other)), None)


def _same(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors are the same memory, read alike; both are alive."""
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    )
