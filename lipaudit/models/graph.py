"""Walk and differentiate small autograd graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


def vjp(out: Tensor, inp: Tensor | GradientEdge, cotangent: Tensor) -> Tensor | None:
    """Return J^T u of `out` with respect to `inp`; None where nothing leads there."""
    return torch.autograd.grad(out, inp, cotangent, retain_graph=True, allow_unused=True)[0]


def leaves(t: Tensor, stop: Collection[Node] = ()) -> tuple[list[Tensor], list[Node]]:
    """Return the leaf tensors behind t, and the nodes of `stop` that t depends on.

    The walk ends at those nodes; across a cut it goes on by what `remember` wrote down.
    """
    if t.grad_fn is None:
        return ([t] if t.requires_grad else []), []
    found, hit = [], []
    for node in nodes(t, stop):
        if node in stop:
            hit.append(node)
        elif hasattr(node, "variable"):
            found.append(node.variable)
            hit += [past for past in getattr(node.variable, "_past", ()) if past in stop]
    return found, hit


def remember(t: Tensor, past: Collection[Node]) -> None:
    """Write down what t depended on before the graph was cut."""
    for leaf in leaves(t)[0]:
        leaf._past = past  # type: ignore[attr-defined]


def nodes(t: Tensor, stop: Collection[Node] = ()) -> Iterator[Node]:
    """Yield every node behind t once, without going past those of `stop`."""
    seen: set[Node] = set()
    todo = [t.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node not in stop:
            todo += [parent for parent, _ in node.next_functions]
