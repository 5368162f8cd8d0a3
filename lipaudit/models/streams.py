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
_LINEAR_MAPS = {"Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution", "_StoredProduct"}
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
    """Return the residual additions y = x + F(x) of a model, in the order of execution.

    An addition may lie inside the branch F of an outer addition. If an inner addition contains
    attention (blocks of a stage with a skip around the stage), the inner additions are returned.
    Otherwise only the outer addition is returned (a whole MLP).

    Args:
        output: the output of the model, whose autograd graph is searched.
        attention_nodes: nodes of the attention outputs.
    """
    graph = [*nodes(output)]
    # For each node, how many operations read its result. One that reads it twice counts twice.
    readers = Counter(edge.node for node in graph for edge in _list_parents(node))
    sums = sorted(filter(_is_sum, graph), key=get_order)
    by_node: dict[Node, Addition] = {}
    for node in sums:
        addition = _read_addition(node, by_node, readers)
        if addition is not None:
            by_node[node] = addition
    return _drop_nested([*by_node.values()], attention_nodes)


def _drop_nested(additions: list[Addition], attention_nodes: Collection[Node]) -> list[Addition]:
    """Drop residual additions so that none lies inside the branch of another, and return the rest.

    An outer addition is dropped if an addition inside its branch contains attention. Otherwise the
    additions inside its branch are dropped.

    In the order of execution, an inner addition comes before the outer one. So an addition has had
    its turn as the outer one before another addition can drop it.

    Args:
        additions: all additions, in the order of execution.
        attention_nodes: nodes of the attention outputs.
    """
    remaining = additions
    for outer in additions:
        inner = [a for a in remaining if a is not outer and outer.holds(a.sum.node)]
        if not inner:
            continue
        dropped = inner
        if any(addition.holds(node) for addition in inner for node in attention_nodes):
            dropped = [outer]
        remaining = [addition for addition in remaining if addition not in dropped]
    return remaining


def find_blocks(additions: Sequence[Addition], starts: Collection[int]) -> list[tuple[int, int]]:
    """Return the first and last residual addition of every block that keeps its input as a term.

    In a block of attention F and MLP G, the output is y = (x + F(x)) + G(...), so the input x is a
    term of y. This holds if the skip of each addition is the sum of the previous one. Other blocks
    are left out: BERT normalises after each addition.

    Args:
        additions: all residual additions of a model, in order.
        starts: indices of the additions that begin a block.

    Returns:
        A pair of indices of additions for each block.
    """
    blocks = []
    order = sorted(starts)
    ends = [*order[1:], len(additions)]  # a block ends where the next one begins
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
    # An operand that does not depend on the input is no parent in the graph.
    return len(_list_parents(node)) == 2


def _list_parents(node: Node) -> list[GradientEdge]:
    """Return the edges of the tensors that a node reads."""
    return [GradientEdge(parent, number) for parent, number in node.next_functions if parent]


def _read_addition(
    node: Node, by_node: dict[Node, Addition], readers: Counter[Node]
) -> Addition | None:
    """Return a sum of two tensors as a residual addition y = x + F(x); None if it is not one.

    The operand x is called the skip, and F(x) the branch. The sum is a residual addition if the
    branch is computed from the skip, and each path from skip to branch has a linear map. The
    branch may also be computed from an earlier skip: in (x + f(x)) + g(x), the second addition has
    the skip x + f(x) and the branch g(x).

    Args:
        node: the graph node of the sum.
        by_node: the residual additions before this node, by their nodes.
        readers: how many operations read the result of each node.
    """
    # The model computes the skip before the branch.
    skip, branch = sorted(_list_parents(node), key=lambda edge: get_order(edge.node))
    # Find the tensor x that F reads: the skip, else the skip of this skip, and so on. In
    # (x + f(x)) + g(x), the skip x + f(x) is an addition itself (in `by_node`), whose skip x is
    # what g reads. `source` is the node of x. `inside` are the nodes from x to F(x); None if F
    # does not read x.
    source = _strip_views(skip.node)
    inside = _find_between(branch.node, source)
    while inside is None and source in by_node:
        source = _strip_views(by_node[source].skip.node)
        inside = _find_between(branch.node, source)
    if inside is None:  # F(x) is not computed from x: the sum is no residual addition
        return None
    # F may be a sum F_1 + F_2 of parallel branches, such as attention and MLP. If one of these
    # terms is not computed from x through linear maps (None), F stays a single term.
    terms = _split_terms(branch, inside, readers)
    insides = [_find_between(term.node, source) for term in terms]  # the nodes from x to each term
    if len(terms) > 1 and None in insides:
        terms = [branch]
        insides = [inside]
    parts = tuple(frozenset(nodes_inside or ()) for nodes_inside in insides)
    return Addition(GradientEdge(node, output_nr=0), skip, tuple(terms), parts)


def _strip_views(node: Node) -> Node:
    """Walk back from a node through views and copies, and return the node of the original tensor.

    If the original tensor is a leaf, the node of its first view is returned: a leaf has no number
    in the order of execution.
    """
    while op(node) in _VIEWS:
        parents = _list_parents(node)
        # Stop before a leaf: its node has the attribute `variable`.
        if not parents or hasattr(parents[0].node, "variable"):
            break
        node = parents[0].node
    return node


def _find_between(later: Node, earlier: Node) -> set[Node] | None:
    """Return the nodes that `later` is computed from, back to the node `earlier` and without it.

    On the way back from `later`, the search ends at `earlier` and at nodes that the model computed
    before it. The result may have nodes that do not lead to `earlier`: parts of `later` that the
    model computes after `earlier` from other tensors.

    None if no path connects the two nodes, or if some path between them has no linear map.
    """
    # Each node is visited with a flag: whether the way from `later` to the node has a linear map.
    seen = set()
    todo = [(later, False)]
    is_connected = False
    while todo:
        node, has_map = todo.pop()
        if node is earlier:
            if not has_map:
                return None
            is_connected = True
            continue
        # Do not visit a node twice. Nodes that the model computed before `earlier` do not depend
        # on `earlier`, so do not visit them either.
        if (node, has_map) in seen or get_order(node) < get_order(earlier):
            continue
        seen.add((node, has_map))
        has_map = has_map or op(node) in _LINEAR_MAPS
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
        readers: how many operations read the result of each node.

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
