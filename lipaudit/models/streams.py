"""Find the residual additions y = x + F(x) of a model in the graph of one forward pass.

No name of a module and no kind of block is known here. An addition counts if one operand, the
branch F(x), is computed from the other one, the skip, and if every path between the two passes a
linear map: so `x + 0.04 x^3` inside an activation is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lipaudit.models.graph import SHAPE_OPS, nodes, op

# Operations that mix channels or tokens, by autograd's names.
_MIXING = {"Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution", "_StoredProduct"}
# Operations that keep one tensor, in other axes.
_VIEWS = SHAPE_OPS - {"Cat"}


@dataclass(frozen=True, eq=False)
class Addition:
    """A residual addition y = x + sum_i F_i(x).

    Attributes:
        sum: the edge of y.
        skip: the edge of x, as the addition reads it.
        branches: the edges of the terms F_i.
        inside: the nodes between the skip and each term.
    """

    sum: GradientEdge
    skip: GradientEdge
    branches: tuple[GradientEdge, ...]
    inside: tuple[frozenset[Node], ...]

    def holds(self, node: Node) -> bool:
        """Say whether a branch contains a node."""
        return any(node in part for part in self.inside)


def find_additions(output: Tensor, parts: Collection[Node]) -> list[Addition]:
    """Return the residual additions behind an output, in the order of execution.

    Of additions inside one another, the inner ones count if they hold one of the parts, else the
    outer one: a block inside of a stage, but a whole MLP.

    Args:
        output: the output of the model.
        parts: nodes of the attention outputs.
    """
    graph = [*nodes(output)]
    readers = Counter(edge.node for node in graph for edge in _list_parents(node))
    sums = sorted(filter(_is_sum, graph), key=find_place)
    found: dict[Node, Addition] = {}
    for node in sums:
        addition = _read_addition(node, found, readers)
        if addition is not None:
            found[node] = addition
    kept = list(found.values())
    for outer in found.values():
        inner = [each for each in kept if each is not outer and outer.holds(each.sum.node)]
        held = []
        for part in parts:
            if any(each.holds(part) for each in inner):
                held.append(part)
        if not inner:
            continue
        dropped = inner
        if held:
            dropped = [outer]
        kept = [each for each in kept if each not in dropped]
    return kept


def find_blocks(additions: Sequence[Addition], starts: Collection[int]) -> list[tuple[int, int]]:
    """Return the first and last addition of every block whose additions follow one another.

    Where each addition reads the sum of the one before it, x of the first is a term of the last
    sum. A normalisation between two additions, as in BERT, ends that.

    Args:
        additions: the additions, in order.
        starts: indices of those that begin a block.
    """
    blocks: list[tuple[int, int]] = []
    for first in sorted(starts):
        last = first
        following = last + 1
        while following < len(additions) and following not in starts:
            if additions[following].skip.node is not additions[last].sum.node:
                break
            last = following
            following = last + 1
        whole = following >= len(additions) or following in starts
        if whole:
            blocks.append((first, last))
    return blocks


def find_place(node: Node) -> int:
    """Return the place of a node in the order of execution."""
    return node._sequence_nr()


def _is_sum(node: Node) -> bool:
    """Say whether a node adds two tensors that both depend on the input."""
    if op(node) != "Add":
        return False
    return len(_list_parents(node)) == 2


def _list_parents(node: Node) -> list[GradientEdge]:
    """Return the edges of the tensors that a node reads."""
    return [GradientEdge(parent, number) for parent, number in node.next_functions if parent]


def _read_addition(
    node: Node, found: dict[Node, Addition], readers: Counter[Node]
) -> Addition | None:
    """Return a sum as a residual addition; None if it is none."""
    skip, branch = sorted(_list_parents(node), key=lambda edge: find_place(edge.node))
    # F may read x from further up: x + f(x) + g(x) is two additions with one x.
    stream = _strip_views(skip.node)
    inside = _walk(branch.node, stream)
    while inside is None and stream in found:
        stream = _strip_views(found[stream].skip.node)
        inside = _walk(branch.node, stream)
    if inside is None:
        return None
    terms = _split_terms(branch, inside, readers)
    walks = [_walk(term.node, stream) for term in terms]
    if len(terms) > 1 and None in walks:
        terms = [branch]
        walks = [inside]
    parts = tuple(frozenset(walk or ()) for walk in walks)
    return Addition(GradientEdge(node, 0), skip, tuple(terms), parts)


def _strip_views(node: Node) -> Node:
    """Return the node behind operations that only move entries, but no leaf: it has no place."""
    while op(node) in _VIEWS:
        parents = _list_parents(node)
        if not parents or hasattr(parents[0].node, "variable"):
            break
        node = parents[0].node
    return node


def _walk(start: Node, end: Node) -> set[Node] | None:
    """Return the nodes between two nodes; None without a path, or if one has no linear map."""
    earliest = find_place(end)
    seen: set[tuple[Node, bool]] = set()
    reached = False
    todo = [(start, False)]
    while todo:
        node, mixed = todo.pop()
        if node is end:
            if not mixed:
                return None
            reached = True
            continue
        # Nodes from before the end do not depend on it.
        if (node, mixed) in seen or find_place(node) < earliest:
            continue
        seen.add((node, mixed))
        mixed = mixed or op(node) in _MIXING
        todo += [(edge.node, mixed) for edge in _list_parents(node)]
    if reached:
        return {node for node, _ in seen}
    return None


def _split_terms(
    branch: GradientEdge, inside: Collection[Node], readers: Counter[Node]
) -> list[GradientEdge]:
    """Return the terms of a branch that is a sum itself, as of attention and MLP in parallel."""
    terms: list[GradientEdge] = []
    todo = [branch]
    while todo:
        edge = todo.pop()
        parents = _list_parents(edge.node)
        # A tensor that something else reads, too, is no term of its own.
        alone = all(readers[parent.node] == 1 for parent in parents)
        if _is_sum(edge.node) and alone and all(parent.node in inside for parent in parents):
            todo += parents
        else:
            terms.append(edge)
    return terms
