"""What graphs and values tell of logits and of the maps that are made of them."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.weak import WeakTensorKeyDictionary

from lipaudit.models.attention.observe.linears import Linear
from lipaudit.models.graph import Past, leaves, vjp


class Exponentials:
    """The exponentials that were taken of logits, either of which may be half a softmax."""

    def __init__(self) -> None:
        self._logits: MutableMapping[Tensor, tuple[Node | None, Tensor]] = (
            WeakTensorKeyDictionary()
        )

    def note(self, e: Tensor, logits: Tensor) -> None:
        """Write down e = exp(logits), as it is now."""
        self._logits[e] = e.grad_fn, logits

    def logits(self, e: object, divisor: object) -> Tensor | None:
        """Return the logits of which e / divisor is the softmax over the last axis, if it is.

        The divisor is the sum of each row to the last bit: with something added it is another
        function. An e that was written to since is no exponential.
        """
        if not isinstance(e, Tensor) or not isinstance(divisor, Tensor):
            return None
        if e not in self._logits:
            return None
        node, logits = self._logits[e]
        if node is not e.grad_fn:
            return None
        return logits if torch.equal(divisor, e.sum(-1, keepdim=True)) else None


def reaches(t: Tensor, target: Tensor, past: Past) -> bool:
    """Say whether t is made from the target, across cuts too."""
    if t.grad_fn is None or target.grad_fn is None:
        return False
    return bool(leaves(t, (target.grad_fn,), past)[1])


def maps_logits(linear: Linear, product: GradientEdge, past: Past) -> bool:
    """Say whether a linear map mixes the heads of logits entry by entry, or the keys of a row.

    Any other map is a layer further on: linear attention and state-space mixers end in a product
    too, which is no logits to the softmax of the next layer. Told by what one row of its input is
    made from; a second map of the logits is judged by what it takes from the first.
    """
    spread = _spread(linear, product)
    if not spread:
        cuts = (leaf for leaf in leaves(linear.x)[0] if product.node in past.get(leaf, ()))
        return any(sum(n > 1 for n in _spread(linear, cut)) <= 1 for cut in cuts)
    *heads, queries, keys = spread
    return queries == 1 and (keys == 1 or max(heads) == 1)


def _spread(linear: Linear, source: Tensor | GradientEdge) -> list[int]:
    """Count along each axis of `source` what one row of the input of a map is made from."""
    row = torch.zeros_like(linear.inputs)
    row[len(row) // 2] = 1.0
    pulled = vjp(linear.inputs, source, row)
    return [] if pulled is None else [axis.unique().numel() for axis in pulled.nonzero().T]
