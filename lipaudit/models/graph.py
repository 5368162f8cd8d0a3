"""Walk and query small autograd graphs: which entries depend on which, and how.

Between a linear map and the q of an attention call there are only cheap ops (reshapes, rotary
positions, norms per head), so a vector-Jacobian product costs almost nothing. Dependence is read
from exact zeros: without a threshold, unaffected by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice
from math import comb, prod
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.weak import WeakTensorKeyDictionary

from lipaudit.theory.pullback import pull_back

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
    return pull_back(out, inp, cotangent, retain_graph=True, allow_unused=True)[0]


def leaves(
    t: Tensor, stop: Collection[Node] = (), past: Past | None = None
) -> tuple[list[Tensor], list[Node]]:
    """Walk the autograd graph back from t, to its leaves and to given nodes.

    Args:
        t: a tensor.
        stop: nodes at which the walk ends.
        past: for each leaf at which the graph was cut, the nodes before the cut. If the walk
            reaches the leaf, it also reaches the nodes of `stop` among these.

    Returns:
        The leaf tensors that the walk reaches, and the nodes of `stop` that it reaches.
    """
    ends = []
    stops: list[Node] = []
    if t.grad_fn is None:  # t is a leaf itself, or a constant
        if t.requires_grad:
            ends.append(t)
        return ends, stops
    for node in nodes(t, stop):
        if node in stop:
            stops.append(node)
        elif hasattr(node, "variable"):  # autograd's node of a leaf
            ends.append(node.variable)
            if past is not None:
                before_cut = past.get(node.variable, ())
                stops += [earlier for earlier in before_cut if earlier in stop]
    return ends, stops


def op(node: Node) -> str:
    """Return the name of an operation: `Mul` for `MulBackward0`."""
    return node.name().partition("Backward")[0]


def is_affine(t: Tensor) -> bool:
    """Say whether t is an affine function of its leaves, judged by its operations.

    Values cannot show this: where all tokens are equal, every function looks affine.
    """
    for node in nodes(t):
        if hasattr(node, "variable"):  # a leaf
            continue
        # The number of operands that depend on leaves. With one, a product is affine; with two it
        # is quadratic, and only sums are affine.
        operands = sum(parent is not None for parent, _ in node.next_functions)
        affine = _AFFINE_OPS if operands == 1 else _SUMS
        if op(node) not in affine:
            return False
    return True


def root(t: Tensor) -> object:
    """Return an object that identifies the tensor of which t is a view or a part.

    Two tensors with the same object are views of one tensor, not only equal by value. A graph node
    cannot serve as this object, because a stored node keeps its whole graph in memory. So a new
    `object()` is stored with the tensor, at the first call.
    """
    node = t.grad_fn
    # Back through ops that only move numbers. A concatenation makes a new tensor.
    while node is not None and op(node) in SHAPE_OPS - {"Cat"}:
        node = _find_operand(node)
    # A view of a leaf (the `variable` of its node), or a tensor without a graph.
    if node is None or hasattr(node, "variable"):
        leaf = getattr(node, "variable", t)
        return _roots.setdefault(leaf, object())
    # A view of the result of an op: store the object in the metadata of the op's node, which is a
    # dictionary, although torch declares a method.
    marks = cast("dict[str, object]", node.metadata)
    return marks.setdefault("root", object())


def _find_operand(node: Node) -> Node | None:
    """Return the node of the first operand with a gradient."""
    for parent, _ in node.next_functions:
        if parent is not None:
            return parent
    return None


def divides_channels(t: Tensor) -> bool:
    """Say whether each row of t is a part of a longer row of the tensor of which t is a view.

    This is true for heads: a row of (batch, tokens, heads, d) is a part of the channels of a token
    in (batch, tokens, heads * d). It is false for windows of tokens, which contain whole rows.
    """
    width = t.shape[-1]
    node = t.grad_fn
    are_parts_joined = False
    # Walk back through the views, to the first op whose operand has longer rows. `_RESIZING` are
    # the ops that may change the length of rows: views, and split and stack (`_PARTS`).
    while node is not None and op(node) in SHAPE_OPS | _PARTS:
        name = op(node)
        if name in {"Stack", "Cat"}:
            are_parts_joined = True
        # A view counts. A split alone does not, because q, k and v are often split from one
        # tensor. It counts if the parts are joined again, as in stack(x.split(d, -1), 1): then
        # they are heads. On the way back from t, the stack comes before the split.
        if name in _RESIZING and (are_parts_joined or name not in _PARTS):
            operand_shape = getattr(node, "_saved_self_sym_sizes", None)
            if operand_shape and operand_shape[-1] > width:
                return operand_shape[-1] % width == 0
        node = _find_operand(node)
    return False


def nodes(t: Tensor, stop: Collection[Node] = ()) -> Iterator[Node]:
    """Yield every node of the graph of t once, from t back, but not beyond the nodes of `stop`."""
    seen = set()
    todo = [t.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node not in stop:
            todo += [parent for parent, _ in node.next_functions]


AFFINE_TOLERANCE = 2e-5  # relative to the head's largest |q|: float32 rounding, and nothing else
LINEAR_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Probed:
    """A tensor t of an attention call as a function of y, which its gradients examine.

    Attributes:
        t: q, k or v, (windows, heads, tokens, width), with its graph back to `leaves`.
        leaves: the tensors y that it depends on: usually one, the output of a linear map.
        as_rows: converts tensors of their shapes to (rows, columns), one token per row.
    """

    t: Tensor
    leaves: tuple[Tensor, ...]
    as_rows: Callable[..., Tensor]

    def pull(self, cotangent: Tensor) -> Tensor:
        """Return J^T u for a cotangent u of t, where J = dt/dy, with one row per token.

        The result, (rows, columns), has the shape of y. It is 0 at entries that t does not depend
        on.
        """
        pulled = pull_back(
            self.t, self.leaves, cotangent, retain_graph=True, materialize_grads=True
        )
        return self.as_rows(*pulled)

    def push(self, move: Tensor) -> Tensor:
        """Return J m, the change of t for a change m of y, where J = dt/dy."""
        # J^T u is linear in u: the gradient of <J^T u, m> with respect to u is J m, for any u.
        u = torch.zeros_like(self.t, requires_grad=True)
        pulled = pull_back(self.t, self.leaves, u, create_graph=True, materialize_grads=True)
        (moved,) = pull_back(self.as_rows(*pulled), u, move, materialize_grads=True)
        return moved

    def values(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the entries of y behind each head and token of t, (windows, heads, tokens, e).

        Here t is q, k or v, and y is the output of a linear map.

        Args:
            rows: the row of y of each token, (windows, tokens).
            columns: the columns of y of each head, (heads, e).
        """
        y = self.as_rows(*(leaf.detach() for leaf in self.leaves))
        return take_entries(y, rows, columns)

    def join_heads(self) -> Probed:
        """Return the same with all heads as one, (windows, 1, tokens, heads * width)."""
        tokens = self.t.transpose(1, 2)
        return replace(self, t=tokens.flatten(2).unsqueeze(1))

    @cached_property
    def read(self) -> Tensor:
        """Return J^T u for a random u, (rows, columns): nonzero exactly where t depends on y."""
        return self.pull(self.random)

    @cached_property
    def random(self) -> Tensor:
        """Return a random cotangent u of t = t(y), with entries from 0.5 to 1.5.

        With J = dt/dy, J^T u is nonzero (with probability 1) at every entry of y that t depends
        on. The entries are positive: if t repeats an entry of y, the sum of them is far from 0.
        """
        return draw_positive(self.t)


def draw_positive(like: Tensor) -> Tensor:
    """Return random numbers from 0.5 to 1.5 in the shape of a tensor, the same in every run."""
    generator = torch.Generator(like.device).manual_seed(0)
    uniform = torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    return uniform + 0.5


def make_identity(size: int, like: Tensor) -> Tensor:
    """Return the identity matrix, (size, size), with the dtype and device of a tensor."""
    return torch.eye(size).to(like)


def count_writes(t: Tensor) -> int:
    """Return how often the memory of a tensor was written to; 0 if torch does not count.

    Views share their memory, and its count: a write to another part of the memory counts, too.
    """
    return 0 if t.is_inference() else t._version


def summarise_rows(t: Tensor) -> Tensor:
    """Return a number for each row of t, (..., columns), that changes if the row changes.

    It is a sum of the row with a generic weight for each column. Equal rows have equal numbers.
    Changes as small as the rounding error of this sum may not show.
    """
    # In float32 at least: in half precision, the sum would hide larger changes.
    dtype = torch.promote_types(t.dtype, torch.float32)
    columns = torch.arange(t.shape[-1], dtype=torch.float32, device=t.device)
    return t.to(dtype) @ columns.cos().to(dtype)


def mark_row(t: Tensor) -> Tensor:
    """Return a cotangent of t, (..., rows, columns), that is 1 in the middle row and 0 elsewhere.

    The middle row, because the first token may attend to itself alone (causal masks).
    """
    cotangent = torch.zeros_like(t)
    cotangent[..., t.shape[-2] // 2, :] = 1.0
    return cotangent


def take(t: Tensor, index: Tensor, dim: int) -> Tensor:
    """Index axis `dim` of t by a tensor of any shape, whose axes replace the axis `dim`."""
    taken = t.index_select(dim, index.flatten())
    return torch.unflatten(taken, dim, index.shape)


def take_entries(y: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return y[rows, columns] for every window and head, (windows, heads, tokens, e).

    Args:
        y: one token per row.
        rows: the row of each token, (windows, tokens).
        columns: the columns of each head, (heads, e).
    """
    by_token = take(y, rows, dim=0)  # (windows, tokens, columns of y)
    by_head = take(by_token, columns, dim=-1)  # (windows, tokens, heads, e)
    return by_head.transpose(1, 2)


def label_affected(source: Probed, label: Tensor, *, rows: bool) -> Tensor | None:
    """Return which labelled part of t, such as a token or a head, each row of y affects.

    Here t is q, k or v, and y is the output of a linear map, (tokens, channels).

    Instead of one backward pass per label, a few passes (here called probes) are enough. A probe
    starts from all entries of t whose labels take part in it. Each label takes part in half of the
    probes, and no two labels in the same half: of four probes, label 0 takes part in 1 and 2,
    label 1 in 1 and 3. If a row of y affects a single label, exactly the probes of this label have
    a gradient in the row (they "hit" the row). If it affects both, it is hit by the probes 1, 2
    and 3: by more than half of all probes.

    Args:
        source: t, (windows, heads, tokens, width), as a function of y, (rows, columns).
        label: the label of each entry of t, from 0, in a shape that broadcasts to t.
        rows: whether to examine the rows of y (tokens), or else its columns (channels).

    Returns:
        The label for each row or column of y, -1 if the row has no effect. None if some row
        affects parts of t with different labels.
    """
    axis = 1 if rows else 0  # the axis of y that is reduced
    takes_part = _assign_probes(int(label.max()) + 1).to(label.device)  # (labels, probes)
    # For each probe, 1 at the entries of t whose label takes part: (*shape of label, probes).
    masks = takes_part[label].to(source.random.dtype)
    # A generator: only one gradient at a time is in memory.
    pulled = (source.pull(source.random * mask) for mask in masks.unbind(-1))
    hits = [find_touched(gradient, axis) for gradient in pulled]
    is_hit = torch.stack(hits, -1)  # (rows or columns of y, probes)
    count = is_hit.sum(-1)
    half = takes_part.shape[1] // 2
    if ((count > 0) & (count != half)).any():  # some row affects several labels
        return None
    # The label of a row is the label whose probes are the hits of the row. No other label has as
    # many probes in common with the hits.
    common = is_hit.float() @ takes_part.mT.float()  # (rows or columns of y, labels)
    return common.argmax(-1).masked_fill(count == 0, -1)


def _assign_probes(labels: int) -> Tensor:
    """Return in which probes each label takes part, (labels, probes): half of them.

    No two labels have the same half. There are as few probes as possible: 12 labels take 6 probes,
    as C(6, 3) = 20 is the first number of halves that is at least 12.
    """
    probes = 2
    while comb(probes, probes // 2) < labels:
        probes += 1
    halves = islice(combinations(range(probes), probes // 2), labels)
    takes_part = torch.zeros(labels, probes, dtype=torch.bool)
    return takes_part.scatter_(1, torch.tensor(list(halves)), True)


def reads_only(source: Probed, rows: Tensor) -> bool:
    """Say whether every token of t depends on its own row of y only, by one backward pass.

    Here t is q, k or v, and y is the output of a linear map. The pass starts from a random half of
    the tokens of t. Only the rows of these tokens may get a gradient.

    Args:
        source: t, (windows, heads, tokens, width), as a function of y.
        rows: the row of y of each token, (windows, tokens).
    """
    # One random number for each token, the same in all heads and channels.
    number = source.random[:, :1, :, :1]
    half = number > number.median()  # a random half of the tokens, (windows, 1, tokens, 1)
    pulled = source.pull(source.random * half)
    touched = find_touched(pulled, axis=1)  # rows of y with a gradient
    in_half = half[:, 0, :, 0].flatten()
    # The tokens of this half may touch their own rows: clear these, and keep all other rows.
    touched[rows.flatten()] &= ~in_half
    return not touched.any()  # no token has touched another token's row


def find_affine_map(source: Probed, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return M (heads, d, e) and c (heads, d) with t = M y + c in each head, or None.

    Here t is q, k or v, and y is the output of a linear map. None if no M and c are the same at
    every token.

    Args:
        source: t, (windows, heads, tokens, d), as a function of y.
        rows: the row of y of each token, (windows, tokens).
        columns: the columns of y of each head, (heads, e).
    """
    t = source.t.detach()
    # The Jacobian M, as if it were the same in all windows and at all tokens. The values of t at
    # all tokens then show whether it is. (heads, d, e).
    matrix = compute_map(source, rows, columns, shared=(0, 2))[0, :, 0]
    image = torch.einsum("hce,bhne->bhnc", matrix, source.values(rows, columns))  # M y
    remainder = t - image
    # t - M y must be one constant per channel: its mean over windows and tokens is then c.
    offset = remainder.mean((0, 2))
    if not is_rounding(remainder - offset[:, None], AFFINE_TOLERANCE, t, image):
        return None
    # An offset that is only rounding error counts as 0.
    limit = AFFINE_TOLERANCE * find_largest(t)
    is_zero = find_largest(offset[None, :, None]) <= limit
    return matrix, offset.masked_fill(is_zero[:, None], 0.0)


def find_position_map(source: Probed, rows: Tensor, columns: Tensor) -> Tensor | None:
    """Return G (1, 1, tokens, d, e) with t_i = G_i y_i at each token i, or None.

    Here t is q, k or v, and y is the output of a linear map. G_i depends on the position i only,
    and is the same in all windows and heads, such as a rotary position embedding. None if there is
    no such G.

    Args:
        source: t, (windows, heads, tokens, d), as a function of y.
        rows: the row of y of each token, (windows, tokens).
        columns: the columns of y of each head, (heads, e).
    """
    local = compute_map(source, rows, columns, shared=(0, 1))
    if not is_linear(source, local, rows, columns):
        return None
    return local


def compute_map(
    source: Probed, rows: Tensor, columns: Tensor, *, shared: Sequence[int] = ()
) -> Tensor:
    """Return the Jacobian of each vector of t by the entries of y that it depends on.

    Here t is q, k or v, and y is the output of a linear map.

    A backward pass differentiates one channel of every vector: one row of each Jacobian. Vectors
    along the `shared` axes have the same Jacobian. In one pass, each of them differentiates
    another channel, so that few passes are enough. Example: 3 tokens share a Jacobian of 6
    channels. In the first pass they differentiate the channels 0, 1 and 2, and in the second pass
    3, 4 and 5. If their Jacobians differ after all, the result mixes rows of several.

    Args:
        source: t, (windows, heads, tokens, d), as a function of y.
        rows: the row of y of each token, (windows, tokens).
        columns: the columns of y of each head, (heads, e).
        shared: axes of t along which all Jacobians are the same.

    Returns:
        (windows, heads, tokens, d, e), with size 1 along the `shared` axes.
    """
    *vectors, width = source.t.shape  # vectors: (windows, heads, tokens)
    # By axis: how many vectors share a Jacobian, and how many different Jacobians there are.
    sharing = [1, 1, 1]
    different = list(vectors)
    for axis in shared:
        sharing[axis] = vectors[axis]
        different[axis] = 1
    count = prod(sharing)
    # Number the vectors that share a Jacobian: n = 0, ..., count - 1. `sharing` is the shape,
    # which broadcasts to (windows, heads, tokens).
    number = torch.arange(count, device=rows.device).view(sharing)
    jacobian = source.t.new_zeros(*different, width, columns.shape[1])
    # The indices (window, head, token) of each Jacobian. Each of the three tensors has the shape
    # `different`, with size 1 along shared axes, so that it broadcasts to all vectors.
    ranges = [torch.arange(size, device=rows.device) for size in different]
    indices = torch.meshgrid(*ranges, indexing="ij")
    # One backward pass for every `count` channels: vector n differentiates channel n + shift.
    for shift in range(0, width, count):
        channel = ((number + shift) % width).expand(vectors)
        one_channel = torch.zeros_like(source.t)  # a cotangent: 1 at this channel of each vector
        one_channel.scatter_(-1, channel[..., None], 1.0)
        pulled = source.pull(one_channel)
        gradient = take_entries(pulled, rows, columns)  # (windows, heads, tokens, e)
        # The gradient of a vector's channel is one row (e entries) of the Jacobian that the vector
        # shares. Indices and `channel` broadcast to (windows, heads, tokens).
        jacobian[*indices, channel] = gradient
    return jacobian


def is_linear(source: Probed, local: Tensor, rows: Tensor, columns: Tensor) -> bool:
    """Say whether t = G y (without a constant) at every token, apart from rounding.

    Here t is q, k or v, and y is the output of a linear map.

    Args:
        source: t, (windows, heads, tokens, d), as a function of y.
        local: the Jacobian G of each vector of t, from `compute_map`.
        rows: the row of y of each token, (windows, tokens).
        columns: the columns of y of each head, (heads, e).
    """
    t = source.t.detach()
    y = source.values(rows, columns)  # (windows, heads, tokens, e)
    if local.shape[:2] == (1, 1):  # one G for all windows and heads, which `@` would copy
        image = torch.einsum("nce,bhne->bhnc", local[0, 0], y)
    else:
        image = (local @ y[..., None])[..., 0]
    return is_rounding(t - image, LINEAR_TOLERANCE, t)


def is_rounding(difference: Tensor, tolerance: float, *sizes: Tensor) -> bool:
    """Say whether a difference of tensors is only rounding error, in each head.

    Each head has its own limit: a true difference in a head with small entries may be as small as
    the rounding errors of another head.

    Args:
        difference: (windows, heads, tokens, width).
        tolerance: the limit, relative to the largest entry of the head in any of `sizes`.
        sizes: the tensors that were subtracted.
    """
    size = torch.stack([find_largest(t) for t in sizes]).amax(0)
    # Differences below the smallest normal number are rounding in any head, also in one of zeros.
    limit = tolerance * size + torch.finfo(difference.dtype).tiny
    return bool((find_largest(difference) <= limit).all())


def is_orthogonal(local: Tensor) -> bool:
    """Say whether maps G, (..., d, e), are orthogonal up to one factor: G G^T = c I for all."""
    gram = local @ local.mT
    c = gram.diagonal(dim1=-2, dim2=-1).mean()
    difference = gram - c * make_identity(gram.shape[-1], gram)
    return bool(difference.abs().amax() <= LINEAR_TOLERANCE * c)


def find_touched(pulled: Tensor, axis: int) -> Tensor:
    """Return a mask of the columns (axis 0) or rows (axis 1) of a gradient that are not zero."""
    # The same as (pulled != 0).any(axis), several times faster; NaN counts as not zero.
    return (pulled.amax(axis) != 0) | (pulled.amin(axis) != 0)


def find_largest(t: Tensor) -> Tensor:
    """Return the largest absolute entry of each head (second axis)."""
    return t.abs().amax((0, 2, 3))
