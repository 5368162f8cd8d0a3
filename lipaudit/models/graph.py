"""Walk and differentiate small autograd graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.weak import WeakTensorKeyDictionary

Past = MutableMapping[Tensor, Collection[Node]]
"""For each leaf at which a graph was cut: the nodes that it depended on before the cut."""

_roots: MutableMapping[Tensor, object] = WeakTensorKeyDictionary()
"""Marks of leaves."""

SHAPE_OPS = {"Alias", "AsStrided", "Cat", "Clone", "Expand", "Permute", "Reshape", "Select"}
SHAPE_OPS |= {"ReshapeAlias", "Slice", "Squeeze", "T", "ToCopy", "Transpose", "Unsqueeze"}
SHAPE_OPS |= {"UnsafeView", "View"}
"""Operations that only move numbers, by autograd's names."""

_PARTS = {"Stack", "Split", "SplitWithSizes"}
_RESIZING = {"View", "ReshapeAlias", "UnsafeView"} | _PARTS

_SUMS = {"Add", "Cat", "Rsub", "Stack", "Sub"}
"""Operations that are affine in all operands together."""

_AFFINE_OPS = SHAPE_OPS | _SUMS
_AFFINE_OPS |= {"Addmm", "Baddbmm", "Bmm", "Complex", "ConstantPadNd", "Convolution", "Copy"}
_AFFINE_OPS |= {"CudnnBatchNorm", "Div", "Flip", "Gather", "Index", "IndexSelect", "Mm", "Mul"}
_AFFINE_OPS |= {"MiopenBatchNorm", "Mv", "NativeBatchNorm", "Neg", "Repeat", "Roll", "Split"}
_AFFINE_OPS |= {"SplitWithSizes", "Unbind", "Unfold", "UnsafeSplit", "UnsafeSplitWithSizes"}
_AFFINE_OPS |= {"ViewAsComplex", "ViewAsReal"}
"""Operations that are affine in one operand. Not Where, Clamp or MaskedFill: they may depend on
values."""


def vjp(out: Tensor, inp: Tensor | GradientEdge, cotangent: Tensor) -> Tensor | None:
    """Return J^T u of `out` with respect to `inp`; None if `out` does not depend on `inp`."""
    return torch.autograd.grad(out, inp, cotangent, retain_graph=True, allow_unused=True)[0]


def pull_back(out: Tensor, inputs: Sequence[Tensor], cotangent: Tensor) -> list[Tensor]:
    """Return J^T u of `out` with respect to several tensors, 0 where nothing leads there."""
    pulled = torch.autograd.grad(out, inputs, cotangent, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(t) if each is None else each
        for t, each in zip(inputs, pulled, strict=True)
    ]


def leaves(
    t: Tensor, stop: Collection[Node] = (), past: Past | None = None
) -> tuple[list[Tensor], list[Node]]:
    """Return the leaf tensors that t depends on, and the nodes of `stop` that t depends on.

    The walk ends at the nodes of `stop`. At a cut it continues with the nodes that `past` lists
    for the leaf.
    """
    if t.grad_fn is None:
        return ([t] if t.requires_grad else []), []
    ends: list[Tensor] = []
    hits: list[Node] = []
    for node in nodes(t, stop):
        if node in stop:
            hits.append(node)
        elif hasattr(node, "variable"):
            ends.append(node.variable)
            before = () if past is None else past.get(node.variable, ())
            hits += [earlier for earlier in before if earlier in stop]
    return ends, hits


def op(node: Node) -> str:
    """Return the name of an operation: `Mul` for `MulBackward0`."""
    return node.name().partition("Backward")[0]


def is_affine(t: Tensor) -> bool:
    """Say whether t is an affine function of its leaves, judged by its operations.

    Values cannot show this: on equal tokens every function looks affine.
    """
    for node in nodes(t):
        operands = sum(parent is not None for parent, _ in node.next_functions)
        affine = op(node) in (_AFFINE_OPS if operands == 1 else _SUMS)
        if not affine and not hasattr(node, "variable"):
            return False
    return True


def root(t: Tensor) -> object:
    """Return a mark of the tensor behind t's views: equal marks mean parts of one tensor.

    Two results of the same computation have different roots. The mark is not the graph node
    itself, because a stored node keeps its whole graph in memory.
    """
    node = t.grad_fn
    while node is not None and op(node) in SHAPE_OPS - {"Cat"}:
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    if node is None or hasattr(node, "variable"):
        return _roots.setdefault(getattr(node, "variable", t), object())
    marks = cast("dict[str, object]", node.metadata)  # torch declares a method, but it is a dict
    return marks.setdefault("root", object())


def divides_channels(t: Tensor) -> bool:
    """Say whether the rows of t are parts of one vector of the tensor behind t's views.

    Windows of tokens contain whole vectors; heads that share one small map are parts of a vector.
    """
    node, joined = t.grad_fn, False
    while node is not None and op(node) in SHAPE_OPS | _PARTS:
        name = op(node)
        joined |= name in {"Stack", "Cat"}
        sizes = getattr(node, "_saved_self_sym_sizes", None) if name in _RESIZING else None
        if sizes and (joined or name not in _PARTS) and sizes[-1] > t.shape[-1]:
            return sizes[-1] % t.shape[-1] == 0
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return False


def nodes(t: Tensor, stop: Collection[Node] = ()) -> Iterator[Node]:
    """Yield every node behind t once, without going beyond the nodes of `stop`."""
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
