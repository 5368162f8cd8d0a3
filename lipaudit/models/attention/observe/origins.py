"""What made each leaf of a graph that is cut at the linear maps of a model."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lipaudit.models.attention.observe.linears import LEFT, RIGHT, Linear
from lipaudit.models.graph import leaves


class Address(NamedTuple):
    """Which op of a forward pass: the innermost module, the kind of op, its running number there.

    It does not depend on the data: a mixture of experts changes the numbers inside its own
    modules only.
    """

    module: str
    op: str
    number: int


@dataclass(frozen=True)
class Origin:
    """What made a leaf of the cut graph: a linear map, the model's input, or an attention.

    Attributes:
        address: which op it was.
        linear: the linear map.
        root: marks the tensor whose tokens the linear map reads, see `root`; None in a pass that
            is not the survey's.
        divided: whether the linear map reads parts of the channels of a token, row by row.
    """

    address: Address
    linear: Linear | None = None
    root: object = None
    divided: bool = False

    @property
    def is_map(self) -> bool:
        """Whether it is a linear map, forgotten or not."""
        return self.address.op in (LEFT, RIGHT)

    @property
    def forgotten(self) -> bool:
        """Whether it was a linear map, which `Origins.release` has forgotten."""
        return self.linear is None and self.is_map

    def reads_same(self, other: Origin) -> bool:
        """Say whether two linear maps of one pass read the same tokens of one tensor.

        That it is one tensor is a matter of the graph, not of values: two layer norms may agree
        today. The values, at a generic point, then tell that the tokens come in the same order.
        """
        if self.linear is None or other.linear is None or self.root is not other.root:
            return False
        x, y = self.linear.inputs, other.linear.inputs
        return self.root is not None and x.shape == y.shape and torch.equal(x, y)


class Leaf(NamedTuple):
    """A leaf of a cut graph, and what made it."""

    tensor: Tensor
    origin: Origin


class Origins:
    """What made each leaf of the cut graph of one pass; forgotten when the graph is."""

    def __init__(self) -> None:
        self._origins: MutableMapping[Tensor, Origin] = WeakTensorKeyDictionary()
        self._mixed: MutableMapping[Tensor, Origin] = WeakTensorKeyDictionary()
        self._behind: MutableMapping[Tensor, tuple[object, list[Tensor]]] = (
            WeakTensorKeyDictionary()
        )

    def note(self, leaf: Tensor, origin: Origin) -> None:
        """Write down what made a leaf."""
        self._origins[leaf] = origin

    def leaves(self, *tensors: Tensor) -> list[Leaf]:
        """Return the leaves that each tensor was made from, one tensor after the other.

        A constant for which the model itself asks gradients is none: it depends on nothing.
        """
        behind: Iterable[Tensor] = (leaf for t in tensors for leaf in self._leaves(t))
        pairs = ((leaf, self._origins.get(leaf)) for leaf in behind)
        return [Leaf(leaf, origin) for leaf, origin in pairs if origin is not None]

    def beside(self, made: Iterable[Tensor], given: Iterable[Tensor]) -> list[Origin]:
        """Return the origins of what some tensors are made of beside others that are given."""
        given = list(given)
        stop = [t.grad_fn for t in given if t.grad_fn is not None]
        known = {id(t) for t in given}
        behind = (leaf for t in made for leaf in leaves(t, stop)[0] if id(leaf) not in known)
        origins = (self._origins.get(leaf) for leaf in behind)
        return [origin for origin in origins if origin is not None]

    def met(self, *made: Tensor, given: Iterable[Tensor]) -> int:
        """Count which of the tensors that are given lead to others."""
        stop = [t.grad_fn for t in given if t.grad_fn is not None]
        return len({node for t in made for node in leaves(t, stop)[1]})

    def _leaves(self, t: Tensor) -> list[Tensor]:
        """Walk the graph behind a tensor once, or again where it has been written to."""
        node, known = self._behind.get(t, (None, []))
        if node is None or node is not t.grad_fn:
            known = leaves(t)[0]
            self._behind[t] = t.grad_fn, known
        return known

    def mix(self, t: Tensor) -> None:
        """Write down that the linear maps behind a tensor have met in it, if they are several."""
        behind = self.leaves(t)
        if len(behind) > 1:
            self._mixed.update(leaf for leaf in behind if leaf.origin.linear is not None)

    def release(self, *read: Tensor) -> None:
        """After an attention call that reads some tensors, forget what will not be read again.

        A q, k or v has a closed form as a function of one linear map. Maps that met others before
        this call, and are not behind it, are the residual stream: the graph keeps their outputs
        to the end of the pass, and what they read would stay with them. Where a later call reads
        one of them after all, its origin says so: see `forgotten`.
        """
        kept = {id(leaf.tensor) for leaf in self.leaves(*read)}
        for leaf, origin in list(self._mixed.items()):
            if id(leaf) not in kept:
                self._origins[leaf] = Origin(origin.address)
                del self._mixed[leaf]
