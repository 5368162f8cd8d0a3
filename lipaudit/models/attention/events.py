"""Find every attention call of an unmodified model while it runs.

A model computes attention in one of two ways: by the fused op `scaled_dot_product_attention`, or
written out. The mode below recognises both in any code, and passes each call to a function.
Written-out attention is recognised by three ops and the autograd graph:

    s = q @ k.mT       a product of two batched tensors that depend on the input: noted
    p = softmax(f(s))  the graph of the logits leads back to a noted product: p is awaited
    o = g(p) @ v       the graph of one operand leads back to an awaited p: an attention call

f and g are any functions of the model: scale, bias, mask, cap, dropout. `logits` examines
them later. The softmax may be written out, too, as e / sum(e) with e = exp(f(s)). `uses` names the
rest.

Kernels that torch does not dispatch (flash-attn, flex attention, compiled or scripted modules)
cannot be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lipaudit.models.attention.calls import Address, AttentionCall, Explicit, Fused, Linear
from lipaudit.models.attention.contractions import read_einsum
from lipaudit.models.graph import Past, leaves, nodes, op, vjp


def maps_logits(linear: Linear, product: GradientEdge, past: Past) -> bool:
    """Say whether a linear map mixes the heads of logits entry by entry, or the keys of a row.

    Any other map belongs to a later layer: linear attention and state-space mixers end in a
    product, too, which is not the logits of the next layer's softmax. The test is which entries
    one row of the input depends on; a second map of the logits is tested against the first.

    Args:
        linear: the linear map.
        product: q k^T, by its edge in the graph.
        past: edges that lie behind the leaves of cut graphs.
    """
    # How many heads, queries and keys of q k^T one row of the map's input depends on.
    counts = _count_dependencies(linear, product)
    if not counts:
        # The graph is cut in between, at a first map: as a second one it mixes one axis at most.
        for leaf in leaves(linear.x)[0]:
            if product.node in past.get(leaf, ()):
                counts_of_leaf = _count_dependencies(linear, leaf)
                if sum(count > 1 for count in counts_of_leaf) <= 1:
                    return True
        return False
    *heads, queries, keys = counts
    return queries == 1 and (keys == 1 or max(heads) == 1)


def _count_dependencies(linear: Linear, source: Tensor | GradientEdge) -> list[int]:
    """Count, along each axis of `source`, the entries that one row of a map's input depends on.

    Empty if it depends on none.
    """
    row = torch.zeros_like(linear.inputs)
    # A row in the middle: the first token may attend to itself alone (causal masks).
    row[len(row) // 2] = 1.0
    pulled = vjp(linear.inputs, source, row)
    if pulled is None:
        return []
    return [axis.unique().numel() for axis in pulled.nonzero().T]


_PRODUCTS = 8  # largest number noted at a time: those of one layer, and some that were no logits
_AWAITED = 4  # largest number of softmaxes at a time without values


_MOVES = {"Permute", "Transpose"}
"""Ops that change the order of axes."""


@dataclass(frozen=True)
class _Product:
    """A batched matrix product that may be q k^T.

    Only its graph edge is stored, because the model may change the logits in place.
    """

    edge: GradientEdge
    a: Tensor
    b: Tensor
    turned: bool = False
    """Whether the logits are its transpose."""

    def rank(self) -> tuple[bool, int]:
        """Return a sort key of how likely this is q k^T, among products in the same logits.

        Two factors that depend on the input come first, then two with an axis of samples.
        """
        are_moving = self.a.requires_grad and self.b.requires_grad
        return are_moving, min(self.a.ndim, self.b.ndim, 3)


@dataclass(frozen=True, eq=False)
class _Softmax:
    """A softmax over logits that contain a product, before its product with values.

    Attributes:
        product: q k^T.
        logits: the input of the softmax.
        p: its result.
        others: whether the logits depend on more than this product and constants.
    """

    product: _Product
    logits: Tensor
    p: Tensor
    others: bool

    def multiply(
        self, weights: Tensor, values: Tensor, output: Tensor, *, transposed: bool
    ) -> AttentionCall | Tensor:
        """Return the attention call; the output if chunks of q, k or P were rearranged.

        Args:
            weights: g(p), with the model's axes.
            values: v, with the model's axes.
            output: the model's product of both.
            transposed: whether the model multiplies v^T g(p)^T, and keeps tokens last.
        """

        def restore(t: Tensor) -> Tensor:
            """Convert between the model's axes and (..., tokens, channels)."""
            return t.mT if transposed else t

        p = restore(weights)
        v = restore(values)
        a = self.product.a  # q
        b = self.product.b  # k^T
        parts = _broadcast(a, b.mT, v)
        leading = v.shape[:-2]
        leading_of_a = a.shape[:-2]
        is_folded = leading_of_a == b.shape[:-2] and math.prod(leading) == math.prod(leading_of_a)
        if parts is None and is_folded:  # v has its heads joined to the samples, or apart
            a = a.reshape(*leading, *a.shape[-2:])
            b = b.reshape(*leading, *b.shape[-2:])
            parts = _broadcast(a, b.mT, v)
        # Keys may have been joined to the logits: zeros of a padding, say.
        if parts is None or p.shape[-2] != a.shape[-2] or v.shape[-2] != p.shape[-1]:
            return output  # Longformer rearranges P in chunks: `uses` names it
        q, k, v = parts
        logits, softmax = _order_axes(self.logits, self.p, p)
        form = Explicit(
            products=(self.product.edge,),
            logits=logits,
            p=softmax,
            weights=p,
            others=self.others,
            turned=self.product.turned,
        )
        return AttentionCall(q, k, v, form, restore(output), finish=restore)


class AttentionMode(TorchFunctionMode):
    """While active, pass every attention call of the running model to a function.

    The tensors need an autograd graph from q or k to the logits; otherwise a written-out softmax
    cannot be distinguished from others.

    Args:
        on_attention: takes each call and its address; None: the method of a subclass does.
    """

    on_attention: Callable[[AttentionCall, Address], object]

    def __init__(
        self, on_attention: Callable[[AttentionCall, Address], object] | None = None
    ) -> None:
        super().__init__()
        if on_attention is not None:
            self.on_attention = on_attention
        self._products: list[_Product] = []
        self._awaited: list[_Softmax] = []
        self._exponentials: MutableMapping[Tensor, tuple[Node | None, Any]] = (
            WeakTensorKeyDictionary()
        )
        self._past: Past = WeakTensorKeyDictionary()  # marks behind cuts of logits and of P

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.run_linear(func, args, kwargs)
        if result is None:
            handler = _HANDLERS.get(func)
            if handler:
                result = handler(self, func, *args, **kwargs)
            else:
                result = func(*args, **kwargs)
        # Only a fused op, or a product of weights and values, gives a call.
        if not isinstance(result, AttentionCall):
            return result
        # One frame of the stack for each attention: what is measured of it runs below this line.
        call, address, output = self.complete(result)
        if call is not None:
            self.on_attention(call, address)
        return result.finish(output)

    def run_linear(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Return the result of a linear map that is to be cut; None for any other op."""
        return None

    def complete(self, call: AttentionCall) -> tuple[AttentionCall | None, Address, Tensor]:
        """Return the call to report, if any, the address of this one, and the model's output."""
        return call, Address("", "attention", 0), call.output

    def notice_scores(self, logits: Tensor, inputs: Sequence[Tensor]) -> None:
        """Take the logits of a softmax that contain no product, and their leaves."""

    def remember(self, linear: Linear, result: Tensor) -> None:
        """If a linear map mixes logits or P (talking heads), note that they lie behind its result.

        The graph is cut at the result: a walk from there does not find q k^T.
        """
        edges = [product.edge for product in self._products]
        for softmax in self._awaited:
            if softmax.p.grad_fn is not None:
                edges.append(get_gradient_edge(softmax.p))
        edge_of = {edge.node: edge for edge in edges}
        # Those that the input of the map depends on.
        _, hits = leaves(linear.x, edge_of, self._past)
        if not hits:
            return
        past = [node for node in hits if maps_logits(linear, edge_of[node], self._past)]
        for leaf in leaves(result)[0]:
            self._past[leaf] = past

    def _handle_composite(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the body of F.multi_head_attention_forward with this mode switched on."""
        with self:
            return _multi_head_attention(*args, **kwargs)

    def _handle_matmul(
        self, func: Callable[..., Tensor], *operands: Any, **kwargs: Any
    ) -> AttentionCall | Tensor:
        """Complete an attention call, or note a product that may become one."""
        out = func(*operands, **kwargs)
        if kwargs or not _are_two_tensors(operands):
            return out
        a, b = operands
        softmax, is_right = self._find_weights(a, b)
        if softmax is not None:
            self._awaited.remove(softmax)
            weights, values = (b, a) if is_right else (a, b)
            return softmax.multiply(weights, values, out, transposed=is_right)
        if out.requires_grad and out.ndim > 2 and self._may_be_logits(a, b):
            # The edge, not the tensor: a model may scale or mask its logits in place.
            self._products.append(_Product(get_gradient_edge(out), a, b))
            del self._products[:-_PRODUCTS]
        return out

    def _may_be_logits(self, a: Tensor, b: Tensor) -> bool:
        """Say whether a product may be of queries and keys: not what mixes heads of logits."""
        if min(a.ndim, b.ndim) > 2:
            return True
        # A factor with two axes is a weight, or learned queries, the same for all samples. A state
        # of a recurrent layer is neither: it depends on the input.
        flat, other = (a, b) if a.ndim < b.ndim else (b, a)
        if flat.ndim < 2 or flat.requires_grad:
            return False
        # The other factor must not be logits.
        products = [product.edge.node for product in self._products]
        _, hits = leaves(other, products, self._past)
        return not hits

    def _find_weights(self, left: Tensor, right: Tensor) -> tuple[_Softmax | None, bool]:
        """Return the awaited softmax behind one of two factors, and whether behind the right."""
        for softmax in self._awaited:
            node = softmax.p.grad_fn
            if node is None:
                continue
            _, left_hits = leaves(left, (node,), self._past)
            _, right_hits = leaves(right, (node,), self._past)
            if left_hits and right_hits:
                break  # P P is still a map: (P P) v is one attention, measured numerically
            if left_hits or right_hits:
                return softmax, bool(right_hits)
        return None, False

    def _handle_baddbmm(
        self,
        func: Callable[..., Tensor],
        bias: Tensor,
        batch1: Tensor,
        batch2: Tensor,
        **scale: float,
    ) -> AttentionCall | Tensor:
        """Handle beta bias + alpha batch1 batch2 as a matrix product with a function behind it."""
        if scale.keys() - {"alpha", "beta"}:
            return func(bias, batch1, batch2, **scale)
        product = self._handle_matmul(torch.bmm, batch1, batch2)
        alpha = scale.get("alpha", 1)
        beta = scale.get("beta", 1)
        # With beta = 0, torch reads nothing of the bias, which may be uninitialised memory.
        added = beta * bias if beta else 0.0
        return _finish(product, lambda product: added + alpha * product)

    def _handle_einsum(
        self, func: Callable[..., Tensor], equation: Any, *operands: Any
    ) -> AttentionCall | Tensor:
        """Handle an einsum as a batched matrix product, (batch, rows, sum) (batch, sum, columns).

        As logits, rows are queries and columns are keys; as O = P v, rows are queries and columns
        are channels. Any other einsum runs as it is.
        """
        contraction = read_einsum(equation, *operands)
        if contraction is None:
            return func(equation, *operands)
        a, first, b, second, out = contraction[:5]
        softmax, is_right = self._find_weights(a, b)
        other = a if is_right else b
        mixes_heads = softmax is not None and other.ndim == 2 and not other.requires_grad
        if mixes_heads or not self._may_be_logits(a, b):
            return func(equation, *operands)
        # Letters of the result that one factor has alone. The last one belongs to b: to the keys
        # of logits.
        single = [c for c in out if (c in first) != (c in second)]
        if single and single[-1] in first:
            a, first, b, second = b, second, a, first
        # The queries come last in the map: the result, if it is logits, or else an operand.
        letters = single if softmax is None else first
        rows = [c for c in letters if c in first and c in single]
        columns = [c for c in single if c in second]
        summed = [c for c in first if c in second and c not in out]
        # Without rows, or with several sums, there is no map from queries to keys.
        if not rows or not columns or len(summed) != 1:
            return func(equation, *operands)
        rows = rows[-1:]
        if softmax is None:  # keys have one axis; channels of values may have several
            columns = columns[-1:]
        batch = [c for c in out if c not in rows + columns]
        a = _align(a, first, batch + rows + summed)
        b = _align(b, second, batch + summed + columns)
        width = b.shape[-len(columns) :]
        product = self._handle_matmul(torch.matmul, a, b.flatten(-len(columns)))
        axes = batch + rows + columns
        if axes == [*out] and len(width) == 1:
            return product
        order = [axes.index(c) for c in out]

        def restore(t: Tensor) -> Tensor:
            """Return the product with the axes of the result."""
            t = t.reshape(*t.shape[:-1], *width)
            # A copy: in a view, autograd would miss what the model writes in place.
            return t.permute(order).clone()

        return _finish(product, restore)

    def _handle_softmax(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        dim: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Note a softmax whose logits contain a noted product, until its values come.

        A row with all keys masked is NaN and constant; torch also returns NaN for its gradient.
        """
        p = func(input, dim, *args, **kwargs)
        if dim is None:  # of logits, torch then takes an axis that is not that of the keys
            return p
        if self._products and input.requires_grad and p.isnan().any():
            # The same values, with gradients of 0 in rows without a key.
            is_empty = input.isneginf().all(dim, keepdim=True)
            other_rows = torch.softmax(input.where(~is_empty, 0.0), dim)
            p = torch.where(is_empty, p.detach(), other_rows.to(p))
        self._await_values(input, p, dim)
        return p

    def _handle_exp(self, func: Callable[..., Tensor], input: Tensor, **kwargs: Any) -> Tensor:
        """Note an exponential while noted products may be its logits."""
        e = func(input, **kwargs)
        if self._products and e.requires_grad:
            self._exponentials[e] = e.grad_fn, input
        return e

    def _handle_divide(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Note a written-out softmax, e / sum(e) with e = exp(logits), until its values come."""
        quotient = func(*args, **kwargs)
        if not kwargs and _are_two_tensors(args):
            e, divisor = args
            node, logits = self._exponentials.get(e, (None, None))
            # If e was written to, it has another node. The divisor is the sum of each row
            # to the last bit: with anything added, this is another function.
            written_out = logits is not None and node is e.grad_fn
            if written_out and torch.equal(divisor, e.sum(-1, keepdim=True)):
                self._await_values(logits, quotient, -1)
        return quotient

    def _await_values(self, logits: Tensor, p: Tensor, dim: int) -> None:
        """Note a softmax, if its logits contain a noted product: its values may come next."""
        if not logits.requires_grad or logits.ndim < 3:
            return
        # A softmax along another axis weights something else than keys: `uses` counts it.
        if dim not in (-1, logits.ndim - 1):
            return
        product_of = {product.edge.node: product for product in self._products}
        inputs, hits = leaves(logits, product_of, self._past)
        if not hits:
            self.notice_scores(logits, inputs)
            return
        candidates = [product for node, product in product_of.items() if node in hits]
        # Beside q k^T there may be linear maps of the tokens, and products with positions.
        product = max(candidates, key=_Product.rank)
        if _is_turned(logits, product.edge):
            product = _Product(product.edge, product.b.mT, product.a.mT, turned=True)
        self._products.clear()  # products before this softmax do not belong to the next one
        others = bool(inputs) or len(hits) > 1
        self._awaited.append(_Softmax(product, logits, p, others))
        del self._awaited[:-_AWAITED]


def _are_two_tensors(operands: Sequence[Any]) -> bool:
    """Say whether an op was called with two tensors and nothing else."""
    return len(operands) == 2 and all(isinstance(t, Tensor) for t in operands)


def _align(t: Tensor, letters: str, wanted: Sequence[str]) -> Tensor:
    """Return t, whose axes have these letters, with the wanted axes: size 1 where it lacks one."""
    order = [letters.index(letter) for letter in wanted if letter in letters]
    t = t.permute(order)
    for axis, letter in enumerate(wanted):
        if letter not in letters:
            t = t.unsqueeze(axis)
    return t


def _finish(
    product: AttentionCall | Tensor, finish: Callable[[Tensor], Tensor]
) -> AttentionCall | Tensor:
    """Apply a function to a product, or to the output of the attention that it completed."""
    if isinstance(product, AttentionCall):
        return replace(product, finish=lambda output: finish(product.finish(output)))
    return finish(product)


def _is_turned(logits: Tensor, product: GradientEdge) -> bool:
    """Say whether a row of the logits is a column of the product: they are its transpose."""
    path = nodes(logits, [product.node])
    if _MOVES.isdisjoint(op(node) for node in path):
        return False
    # J^T u with u = 1 in one row of the logits.
    row = torch.zeros_like(logits)
    row[..., logits.shape[-2] // 2, :] = 1.0
    pulled = vjp(logits, product, row)
    if pulled is None or pulled.ndim != logits.ndim or pulled.shape[-2] != logits.shape[-1]:
        return False
    # The rows and columns of the product that one row of the logits depends on.
    *_, row_of_entry, column_of_entry = pulled.nonzero().T
    rows = len(row_of_entry.unique())
    columns = len(column_of_entry.unique())
    return rows > 1 and columns == 1


def _order_axes(logits: Tensor, p: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and P with the axes in the order of P's product with the values.

    Heads may lie between queries and keys: P of (b, n, h, m) meets values of (b, h, m, d). The
    graph shows the order, not the values: cotangents that number the rows of the weights are
    pulled back to the same rows of P, times a factor. If rows are mixed on the way, both keep
    their axes.
    """
    path = nodes(weights, [] if p.grad_fn is None else [p.grad_fn])
    if p.shape[-1] != weights.shape[-1] or _MOVES.isdisjoint(op(node) for node in path):
        return logits, p
    count = weights[..., 0].numel()
    row_numbers = torch.arange(1, count + 1, device=p.device).to(weights)
    cotangent = row_numbers.view(*weights.shape[:-1], 1).expand_as(weights)
    pulled = vjp(weights, p, cotangent)
    factor = vjp(weights, p, torch.ones_like(weights))
    if pulled is None or factor is None:
        return logits, p
    number = (pulled / factor).round()[..., 0]  # of the row of the weights, for each row of P
    # Numbers along an axis rise by its stride in the weights: the axis of the largest comes first.
    strides = []
    for axis, size in enumerate(number.shape):
        last = number.select(axis, -1).amin()
        strides.append(float(last - number.amin()) / max(1, size - 1))
    order = sorted(range(number.ndim), key=lambda axis: -strides[axis])
    if not torch.equal(number.permute(order).flatten(), row_numbers):
        return logits, p
    shape = (*weights.shape[:-1], -1)
    logits = logits.permute(*order, -1)
    p = p.permute(*order, -1)
    return logits.reshape(shape), p.reshape(shape)


def _make_fused_call(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Return the call of F.scaled_dot_product_attention, from its output and its arguments."""
    # Grouped keys are repeated in the graph, so that each head has gradients of its own.
    if enable_gqa:
        heads = query.shape[-3]
        key = key.repeat_interleave(heads // key.shape[-3], -3)
        value = value.repeat_interleave(heads // value.shape[-3], -3)
    if scale is None:
        s = 1 / math.sqrt(query.shape[-1])
    else:
        s = float(scale)
    parts = _broadcast(query, key, value)
    assert parts is not None  # the fused op has accepted them
    q, k, v = parts
    return AttentionCall(q, k, v, Fused(s, attn_mask, is_causal), output)


def _broadcast(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """Return the tensors with the same leading axes; None if these do not fit."""
    leading = [t.shape[:-2] for t in tensors]
    try:
        batch = np.broadcast_shapes(*leading)  # torch's own imports sympy: 0.5 s of CPU time
    except ValueError:
        return None
    return tuple(t.expand(*batch, *t.shape[-2:]) for t in tensors)


# nn.MultiheadAttention calls this function, and its body chooses between the fused op and a
# written-out softmax; the mode is called for the whole function, and would not see its body. This
# copy runs the body without asking the mode again.
_composite: Any = F.multi_head_attention_forward
_multi_head_attention = FunctionType(
    _composite.__code__,
    {**_composite.__globals__, "has_torch_function": lambda _: False},
    _composite.__name__,
    _composite.__defaults__,
)
_multi_head_attention.__kwdefaults__ = _composite.__kwdefaults__
_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: (
        lambda _, func, *args, **kwargs: _make_fused_call(func(*args, **kwargs), *args, **kwargs)
    ),
    F.multi_head_attention_forward: AttentionMode._handle_composite,
    torch.einsum: AttentionMode._handle_einsum,
    torch.baddbmm: AttentionMode._handle_baddbmm,
    torch.Tensor.baddbmm: AttentionMode._handle_baddbmm,
    **dict.fromkeys(
        (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm),
        AttentionMode._handle_matmul,
    ),
    **dict.fromkeys(
        (torch.softmax, torch.Tensor.softmax, F.softmax), AttentionMode._handle_softmax
    ),
    **dict.fromkeys((torch.exp, torch.Tensor.exp), AttentionMode._handle_exp),
    **dict.fromkeys((torch.div, torch.Tensor.div), AttentionMode._handle_divide),
}
