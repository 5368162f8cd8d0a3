"""Find the residual additions y = x + F(x) of a model in the graph of one forward pass.

The search needs no names of modules and no kinds of blocks. An addition counts if one operand, the
branch F(x), is computed from the other operand, the skip x. Every path from x to F(x) must pass a
linear map, so `x + 0.04 x^3` inside an activation does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

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


def find_additions(output: Tensor, attention_nodes: Collection[Node]) -> list[Addition]:
    """Return the residual additions y = x + F(x) behind an output, in the order of execution.

    An addition may lie inside the branch F of an outer addition. If an inner addition holds
    attention (blocks of a stage with a skip around the stage), the inner additions count.
    Otherwise only the outer addition counts (a whole MLP).

    Args:
        output: the output of the model.
        attention_nodes: nodes of the attention outputs.
    """
    graph = [*nodes(output)]
    # For each node, the number of operands of later nodes that the node has computed.
    readers = Counter(edge.node for node in graph for edge in _list_parents(node))
    sums = sorted(filter(_is_sum, graph), key=get_order)
    found: dict[Node, Addition] = {}
    for node in sums:
        addition = _read_addition(node, found, readers)
        if addition is not None:
            found[node] = addition
    return _drop_nested([*found.values()], attention_nodes)


def _drop_nested(additions: list[Addition], attention_nodes: Collection[Node]) -> list[Addition]:
    """Return the residual additions without those in others, or without those around others.

    Of an addition and those inside its branch, the inner ones stay if one of them holds attention,
    else the outer one.

    Args:
        additions: all additions, in the order of execution.
        attention_nodes: nodes of the attention outputs.
    """
    kept = additions
    for outer in additions:
        inner = [a for a in kept if a is not outer and outer.holds(a.sum.node)]
        if not inner:
            continue
        dropped = inner
        if any(addition.holds(node) for addition in inner for node in attention_nodes):
            dropped = [outer]
        kept = [addition for addition in kept if addition not in dropped]
    return kept


def find_blocks(additions: Sequence[Addition], starts: Collection[int]) -> list[tuple[int, int]]:
    """Return the indices of the first and last residual addition of every block.

    A block, such as attention and MLP, counts if each addition of the block adds to the sum of the
    previous addition: y = (x + F(x)) + G(...). Then x is a term of the block's output. BERT
    normalises after each addition, and so has no such block.

    Args:
        additions: all residual additions of a model, in order.
        starts: indices of the additions that begin a block.
    """
    blocks: list[tuple[int, int]] = []
    order = sorted(starts)
    ends = [*order[1:], len(additions)]
    for first, end in zip(order, ends, strict=False):
        pairs = pairwise(additions[first:end])
        if all(later.skip.node is earlier.sum.node for earlier, later in pairs):
            blocks.append((first, end - 1))
    return blocks


def get_order(node: Node) -> int:
    """Return the number of a graph node in the order in which the forward pass made the nodes."""
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
    """Return a sum of two tensors as a residual addition y = x + F(x); None if it is none.

    The operand x is called the skip, and F(x) the branch. The sum is a residual addition if the
    branch is computed from the skip, and each path between the two has a linear map. The branch
    may also be computed from an earlier skip: in (x + f(x)) + g(x), the second addition has the
    skip x + f(x) and the branch g(x).

    Args:
        node: the graph node of the sum.
        found: the residual additions before this node, by their nodes.
        readers: how many tensors are computed from each node.
    """
    # The model computes the skip before the branch.
    skip, branch = sorted(_list_parents(node), key=lambda edge: get_order(edge.node))
    # `source` is the node of the tensor x that F reads: the skip, or the skip of an earlier
    # addition. `inside` are the nodes between `source` and the branch F(x), or None.
    source = _strip_views(skip.node)
    inside = _find_between(branch.node, source)
    while inside is None and source in found:
        source = _strip_views(found[source].skip.node)
        inside = _find_between(branch.node, source)
    if inside is None:  # F(x) is not computed from x: the sum is no residual addition
        return None
    # F may be a sum F_1 + F_2 of parallel branches, such as attention and MLP.
    terms = _split_terms(branch, inside, readers)
    insides = [_find_between(term.node, source) for term in terms]  # the nodes of each term
    # None: a term is not computed from `source` through linear maps. Then the terms are no
    # parallel branches, and F stays a single term.
    if len(terms) > 1 and None in insides:
        terms = [branch]
        insides = [inside]
    parts = tuple(frozenset(nodes_inside or ()) for nodes_inside in insides)
    return Addition(GradientEdge(node, 0), skip, tuple(terms), parts)


def _strip_views(node: Node) -> Node:
    """Walk back from a node through views and copies, and return the node of the original tensor.

    The walk stops before a leaf, because a leaf has no number in the order of execution.
    """
    while op(node) in _VIEWS:
        parents = _list_parents(node)
        if not parents or hasattr(parents[0].node, "variable"):
            break
        node = parents[0].node
    return node


def _find_between(later: Node, earlier: Node) -> set[Node] | None:
    """Return the nodes on all paths back from the node `later` to `earlier`, without `earlier`.

    None if no path connects the two nodes, or if some path between them has no linear map.
    """
    seen: set[tuple[Node, bool]] = set()  # nodes, and whether a linear map came before them
    is_connected = False
    # Nodes to visit, and whether a linear map is on the way from `later` to them.
    todo = [(later, False)]
    while todo:
        node, has_map = todo.pop()
        if node is earlier:
            if not has_map:
                return None
            is_connected = True
            continue
        # A node that was computed before `earlier` does not depend on `earlier`.
        if (node, has_map) in seen or get_order(node) < get_order(earlier):
            continue
        seen.add((node, has_map))
        has_map = has_map or op(node) in _MIXING
        todo += [(edge.node, has_map) for edge in _list_parents(node)]
    if is_connected:
        return {node for node, _ in seen}
    return None


def _split_terms(
    branch: GradientEdge, inside: Collection[Node], readers: Counter[Node]
) -> list[GradientEdge]:
    """Return the terms F_i of a branch F = F_1 + F_2 + ... of a residual addition y = x + F(x).

    Blocks with attention and MLP in parallel have several terms. Any other branch is one term.

    Args:
        branch: the edge of the tensor F(x) in the graph.
        inside: the nodes between x and F(x).
        readers: how many tensors are computed from each node.

    Returns:
        The edges of the terms.
    """
    terms = []
    todo = [branch]
    while todo:
        edge = todo.pop()
        operands = _list_parents(edge.node)
        # Split a sum of two tensors inside F, unless another node also reads one of the two. In
        # h + g(h), g also reads h: this is a residual addition itself, and stays one term.
        is_split = _is_sum(edge.node) and all(
            readers[operand.node] == 1 and operand.node in inside for operand in operands
        )
        if is_split:
            todo += operands
        else:
            terms.append(edge)
    return terms
