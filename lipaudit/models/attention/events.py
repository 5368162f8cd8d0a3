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
from collections import deque
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

from lipaudit.models.attention.calls import (
    Address,
    AttentionCall,
    Explicit,
    Fused,
    Linear,
    OnAttention,
    TorchFunction,
)
from lipaudit.models.attention.contractions import (
    Contraction,
    Factors,
    arrange_factors,
    maps_logits,
    read_einsum,
)
from lipaudit.models.graph import Past, leaves, mark_row, nodes, op, vjp

_PRODUCTS = 8  # most products noted at a time: one layer has fewer, but some are no logits
_AWAITED = 4  # most softmaxes noted at a time, before their product with values

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
    is_transposed: bool = False
    """Whether the logits are its transpose."""

    def rank(self) -> tuple[bool, int]:
        """Return a sort key: of several products in logits, the one with the largest key is q k^T.

        A product of two factors that depend on the model's input (q and k) comes before a product
        with a constant. Of two such products, one whose factors both have an axis of samples comes
        before one with a factor of two axes.
        """
        both_depend = self.a.requires_grad and self.b.requires_grad
        # 3 if both factors have an axis of samples: further axes make no difference.
        return both_depend, min(self.a.ndim, self.b.ndim, 3)


@dataclass(frozen=True, eq=False)
class _Softmax:
    """A softmax over logits that contain a product, before its product with values.

    Attributes:
        product: q k^T.
        logits: the input of the softmax.
        p: its result.
        has_other_inputs: whether the logits depend on more than this product and constants.
    """

    product: _Product
    logits: Tensor
    p: Tensor
    has_other_inputs: bool

    def multiply(
        self, weights: Tensor, values: Tensor, output: Tensor, *, transposed: bool
    ) -> AttentionCall | Tensor:
        """Return the attention call of this softmax P, when the model multiplies P by the values.

        If the shapes of q, k, v and P do not fit together, only the output is returned.

        Args:
            weights: what the model multiplies the values by: P, or a function of it (dropout).
            values: v, with the model's axes.
            output: the model's product of both.
            transposed: whether the model multiplies v^T P^T, so that tokens are the last axis.
        """

        def turn(t: Tensor) -> Tensor:
            """Convert between the model's axes and (..., tokens, channels), in both directions."""
            return t.mT if transposed else t

        weights = turn(weights)
        # The factors of the product q k^T are q and k^T.
        parts = _share_axes(self.product.a, self.product.b.mT, turn(values))
        if parts is None:
            return output
        q, k, v = parts
        # The weights do not have a row for each query and a column for each value, if the model
        # rearranges P in chunks (Longformer). Such attention is not read, and `uses.Uses`, which
        # counts products with P, leads to a warning.
        if weights.shape[-2:] != (q.shape[-2], v.shape[-2]):
            return output
        # The model may permute P before it multiplies the values: permute logits and P likewise.
        logits, p = _order_axes(self.logits, self.p, weights)
        form = Explicit(
            products=(self.product.edge,),  # the node of q k^T in the autograd graph
            logits=logits,
            p=p,
            weights=weights,
            has_other_inputs=self.has_other_inputs,
            is_transposed=self.product.is_transposed,
        )
        # The call has tokens before channels. `finish` turns its output back for the model.
        return AttentionCall(q, k, v, form, turn(output), finish=turn)


class AttentionMode(TorchFunctionMode):
    """While active, pass every attention call of the running model to a function.

    The tensors need an autograd graph from q or k to the logits. Without a graph, the softmax of a
    written-out attention cannot be distinguished from any other softmax.

    Args:
        on_attention: takes each call and its address; None: a subclass has a method of this name.
    """

    on_attention: OnAttention

    def __init__(self, on_attention: OnAttention | None = None) -> None:
        super().__init__()
        if on_attention is not None:
            self.on_attention = on_attention
        # The latest products that may be q k^T.
        self._products: deque[_Product] = deque(maxlen=_PRODUCTS)
        # The latest softmaxes of such products, until they are multiplied by values.
        self._awaited: deque[_Softmax] = deque(maxlen=_AWAITED)
        # The node and the argument of each exponential, which may be a part of a softmax.
        self._exponentials: MutableMapping[Tensor, tuple[Node | None, Any]] = (
            WeakTensorKeyDictionary()
        )
        # For each leaf at which the graph is cut: the products and softmaxes before the cut.
        self._past: Past = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch that the model calls, and report attention that it completes."""
        kwargs = kwargs or {}
        # A subclass cuts the graph at linear maps. The result is None for any other op, which may
        # be a part of attention.
        result = self.run_linear(func, args, kwargs)
        if result is None:
            handler = _HANDLERS.get(func)
            if handler:
                result = handler(self, func, *args, **kwargs)
            else:
                result = func(*args, **kwargs)
        # Only the fused op, and the product of P and values, return a call in place of a tensor.
        if not isinstance(result, AttentionCall):
            return result
        call, address, output = self.complete(result)
        if call is not None:
            self.on_attention(call, address)
        # `finish` gives the output the axes that the model expects, such as those of an einsum.
        return result.finish(output)

    def run_linear(
        self, func: TorchFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Run an op if it is a linear map whose output starts a new graph; else return None.

        This mode cuts nowhere. `Tracer` overrides the method: it returns the map's output as a new
        leaf, so that q, k and v have short graphs, from the last linear maps on. After None, the
        caller runs the op.
        """
        return None

    def complete(self, call: AttentionCall) -> tuple[AttentionCall | None, Address, Tensor]:
        """Return the call to report (or None), the address of this call, and its output.

        An address is the module of a call, with the number of the call there. Here every call is
        reported as it is, without a module. Subclasses number the calls, and may change the output
        or report several calls as one.
        """
        return call, Address(module="", op="attention", number=0), call.output

    def notice_scores(self, logits: Tensor, inputs: Sequence[Tensor]) -> None:
        """Note logits that are made from no q k^T, and their leaves; subclasses may use them."""

    def remember(self, linear: Linear, result: Tensor) -> None:
        """Store which q k^T or P is behind a linear map of logits or P, as in talking heads.

        The graph is cut at this map, so a later walk back from the softmax or the values ends at
        the map's output, a leaf. `_past` has the q k^T and P before the cut, by this leaf.

        Args:
            linear: the map.
            result: its output.
        """
        # All noted products q k^T and softmaxes P, by their graph nodes.
        edges = [product.edge for product in self._products]
        for softmax in self._awaited:
            if softmax.p.grad_fn is not None:
                edges.append(get_gradient_edge(softmax.p))
        edge_of = {edge.node: edge for edge in edges}
        # The noted products and softmaxes that the input of the map depends on, by their nodes.
        # `leaves` walks the graph back to them, and across earlier cuts by `_past`.
        _, nodes_before = leaves(linear.x, edge_of, self._past)
        if not nodes_before:
            return
        # Most linear maps after an attention belong to a later layer, and do not map its logits.
        past = [node for node in nodes_before if maps_logits(linear, edge_of[node], self._past)]
        ends, _ = leaves(result)  # the one leaf that the cut has made
        for leaf in ends:
            self._past[leaf] = past

    def _handle_composite(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        """Run F.multi_head_attention_forward such that this mode sees the ops in its body."""
        with self:  # torch switches a mode off while it handles a function
            return _multi_head_attention(*args, **kwargs)

    def _handle_matmul(
        self, func: TorchFunction, *operands: Any, **kwargs: Any
    ) -> AttentionCall | Tensor:
        """Run a matrix product, and return its result, or the attention call that it completes.

        A product of P and values completes a call. A product that may be q k^T is noted until a
        softmax of this product follows.
        """
        out = func(*operands, **kwargs)
        if kwargs or not _are_two_tensors(operands):
            return out
        a, b = operands
        # The softmax behind one of the factors, and whether this is the right factor (v^T P^T).
        softmax, is_right = self._find_weights(a, b)
        if softmax is not None:
            self._awaited.remove(softmax)
            weights, values = (b, a) if is_right else (a, b)
            return softmax.multiply(weights, values, out, transposed=is_right)
        # Only a product that depends on the sample (requires a gradient) may be q k^T.
        if out.requires_grad and out.ndim > 2 and self._may_be_logits(a, b):
            # The edge, not the tensor: a model may scale or mask its logits in place.
            self._products.append(_Product(get_gradient_edge(out), a, b))
        return out

    def _may_be_logits(self, a: Tensor, b: Tensor) -> bool:
        """Say whether a product may be q k^T, judged by the axes of its factors."""
        if min(a.ndim, b.ndim) > 2:  # both have an axis of samples
            return True
        # A factor with two axes may be learned queries, a constant for all samples. A factor that
        # depends on the input (requires a gradient) is none, such as the state of a recurrence.
        flat, other = (a, b) if a.ndim < b.ndim else (b, a)
        if flat.ndim < 2 or flat.requires_grad:
            return False
        # In talking heads, this factor is a weight that mixes the heads of logits. Then the other
        # factor is made from logits: from a product that was noted as a possible q k^T.
        noted_products = [product.edge.node for product in self._products]
        _, logits_behind = leaves(other, noted_products, self._past)
        return not logits_behind

    def _find_weights(self, left: Tensor, right: Tensor) -> tuple[_Softmax | None, bool]:
        """Return the noted softmax P that one of two factors is made from, if any.

        The second item says whether P is behind the right factor.
        """
        for softmax in self._awaited:
            node = softmax.p.grad_fn
            if node is None:
                continue
            # Walk back from each factor: the list is [node] if the walk meets P, else empty.
            _, left_hits = leaves(left, (node,), self._past)
            _, right_hits = leaves(right, (node,), self._past)
            if left_hits and right_hits:
                break  # P P is no product with values: wait for (P P) v, which is one attention
            if left_hits or right_hits:
                return softmax, bool(right_hits)
        return None, False

    def _handle_baddbmm(
        self,
        func: TorchFunction,
        input: Tensor,
        batch1: Tensor,
        batch2: Tensor,
        **scale: float,
    ) -> AttentionCall | Tensor:
        """Run beta input + alpha batch1 batch2 as a matrix product, then the scale and the sum.

        The product may be q k^T, or a product of P and values. Arguments have torch's names, as a
        model may give them by name.
        """
        if scale.keys() - {"alpha", "beta"}:  # `out=`: torch writes into another tensor
            return func(input, batch1, batch2, **scale)
        product = self._handle_matmul(torch.bmm, batch1, batch2)
        alpha = scale.get("alpha", 1)
        beta = scale.get("beta", 1)
        # With beta = 0, torch ignores the input, which may be uninitialised memory.
        added = beta * input if beta else 0.0
        return _finish(product, lambda product: added + alpha * product)

    def _handle_einsum(
        self, func: TorchFunction, equation: Any, *operands: Any
    ) -> AttentionCall | Tensor:
        """Run an einsum that may be q k^T or P v as a matrix product, to find attention in it.

        Rows of the product are queries. Columns are keys (q k^T) or channels (P v). Any other
        einsum runs as it is.
        """
        contraction = read_einsum(equation, *operands)
        if contraction is None:  # not of two tensors with a letter for each axis
            return func(equation, *operands)
        factors = self._find_factors(contraction)
        if factors is None:  # neither q k^T nor P v
            return func(equation, *operands)
        # a is (*batch, row, sum), b is (*batch, sum, *columns). `axes` names the axes of a b,
        # (*batch, row, *columns), by letters. In P v "bnm,bmcd->bncd", a is (b, n, m), b is
        # (b, m, c, d), and the axes are b, n, c, d.
        a, b, axes = factors
        # The number of axes of columns, at least one; they become a single axis. In the example, 2
        # of c and d: a has as many axes as `axes` has without its columns, plus one, the sum.
        columns = len(axes) - a.ndim + 1
        width = b.shape[-columns:]
        product = self._handle_matmul(torch.matmul, a, b.flatten(-columns))
        if axes == [*contraction.out] and columns == 1:
            return product
        order = [axes.index(c) for c in contraction.out]

        def restore(t: Tensor) -> Tensor:
            """Convert a product a b, (*batch, row, column), to the axes of the einsum's result.

            The axes of columns (`width` has their sizes) were flattened to one.
            """
            t = t.reshape(*t.shape[:-1], *width)
            # A copy, because the model may write into its result in place.
            return t.permute(order).clone()

        return _finish(product, restore)

    def _find_factors(self, contraction: Contraction) -> Factors | None:
        """Return the factors of an einsum as matrices (`arrange_factors`), if it may be attention.

        None if the einsum is neither q k^T nor P v.
        """
        left = contraction.x
        right = contraction.weight
        # The softmax P behind one of the factors, if any, and whether it is behind the right one.
        softmax, is_right = self._find_weights(left, right)
        other = left if is_right else right
        # P times a constant matrix: talking heads, not P v.
        mixes_heads = softmax is not None and other.ndim == 2 and not other.requires_grad
        # The test of the factors' axes serves P v, too: its factors have the axes that those of
        # q k^T have.
        if mixes_heads or not self._may_be_logits(left, right):
            return None
        return arrange_factors(contraction, is_logits=softmax is None)

    def _handle_softmax(
        self,
        func: TorchFunction,
        input: Tensor,
        dim: int | None = None,
        *args: Any,
        axis: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run a softmax, and note it if its logits are made from a noted product q k^T.

        The product of its result P with values completes the attention call.
        """
        if dim is None:
            dim = axis  # torch takes NumPy's name, too
        p = func(input, dim, *args, **kwargs)
        if dim is None:  # torch then chooses an axis, and for logits not the axis of the keys
            return p
        # If all keys of a row are masked, torch gives NaN for the row and for its gradient. Keep
        # the NaN, but with a gradient of 0, because such a row is constant.
        if self._products and input.requires_grad and p.isnan().any():
            is_masked_row = input.isneginf().all(dim, keepdim=True)
            other_rows = torch.softmax(input.where(~is_masked_row, 0.0), dim)
            p = torch.where(is_masked_row, p.detach(), other_rows.to(p))
        self._await_values(input, p, dim)
        return p

    def _handle_exp(self, func: TorchFunction, input: Tensor, **kwargs: Any) -> Tensor:
        """Run exp, and note it: it may be a part of a written-out softmax, e / sum(e)."""
        e = func(input, **kwargs)
        # Before any product q k^T, an exponential belongs to no attention.
        if self._products and e.requires_grad:
            self._exponentials[e] = e.grad_fn, input
        return e

    def _handle_divide(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Tensor:
        """Run a division, and note it if it is a written-out softmax, exp(s) / sum(exp(s)).

        `_handle_exp` has noted the node and the argument of each exponential.
        """
        quotient = func(*args, **kwargs)
        if not kwargs and _are_two_tensors(args):
            e, divisor = args
            node, logits = self._exponentials.get(e, (None, None))
            # If e has another node now, the model has written into e: no exponential any more.
            is_exponential = logits is not None and node is e.grad_fn
            # The divisor must equal the sum exactly: with anything added, this is no softmax.
            if is_exponential and torch.equal(divisor, e.sum(-1, keepdim=True)):
                self._await_values(logits, quotient, dim=-1)
        return quotient

    def _await_values(self, logits: Tensor, p: Tensor, dim: int) -> None:
        """Remember a softmax P of attention, to recognise the later product of P and the values.

        P belongs to attention if its logits are computed from one of the latest products that may
        be q k^T (`_products`). A softmax of other logits is only passed on to `notice_scores`: its
        logits may be keys times learned queries, which look like a linear map.

        Args:
            logits: the argument of the softmax.
            p: its result.
            dim: its axis.
        """
        if not logits.requires_grad or logits.ndim < 3:  # no attention of this sample
            return
        # A softmax along another axis weights something else than keys. It is not read here;
        # another mode (`uses.Uses`) counts it, and the survey warns of it.
        if dim not in (-1, logits.ndim - 1):
            return
        product_of = {product.edge.node: product for product in self._products}
        # Walk back from the logits, across cuts of the graph (`_past`), to these products and to
        # other inputs (leaves) beside them.
        other_inputs, hits = leaves(logits, product_of, self._past)
        if not hits:  # no product of two activations, but maybe of keys and learned queries
            self.notice_scores(logits, other_inputs)
            return
        candidates = [product for node, product in product_of.items() if node in hits]
        product = _choose_product(logits, candidates)
        # The next softmax belongs to a later attention, which makes a q k^T of its own.
        self._products.clear()
        # With other inputs, such as relative positions, S is not s q k^T + B with a constant B.
        has_other_inputs = bool(other_inputs) or len(hits) > 1
        self._awaited.append(_Softmax(product, logits, p, has_other_inputs))


def _choose_product(logits: Tensor, products: Sequence[_Product]) -> _Product:
    """Return q k^T among the products that logits are made from, with q as its left factor.

    The other products are linear maps of tokens, or products with positions.
    """
    product = max(products, key=_Product.rank)
    if _is_transposed(logits, product.edge):  # the model computes k q^T: transpose it
        return _Product(product.edge, product.b.mT, product.a.mT, is_transposed=True)
    return product


def _are_two_tensors(operands: Sequence[Any]) -> bool:
    """Say whether an op was called with two tensors and nothing else."""
    return len(operands) == 2 and all(isinstance(t, Tensor) for t in operands)


def _finish(
    product: AttentionCall | Tensor, finish: Callable[[Tensor], Tensor]
) -> AttentionCall | Tensor:
    """Return finish(product).

    If the product completes an attention call, return the call instead: it applies `finish` to its
    output later, after its own `finish`.
    """
    if isinstance(product, AttentionCall):
        return replace(product, finish=lambda output: finish(product.finish(output)))
    return finish(product)


def _is_transposed(logits: Tensor, product: GradientEdge) -> bool:
    """Say whether logits are made from k q^T, whose columns are the rows (queries) of the logits.

    Args:
        logits: (..., queries, keys).
        product: the product, by its edge in the autograd graph.
    """
    path = nodes(logits, [product.node])
    if _MOVES.isdisjoint(op(node) for node in path):  # no op on the way changes the order of axes
        return False
    # J^T u of the logits by the product, with u = 1 in one row of the logits: nonzero at the
    # entries of the product that this row depends on.
    pulled = vjp(logits, product, mark_row(logits))
    # The rows of k q^T are the keys: as many as the logits have columns.
    if pulled is None or pulled.ndim != logits.ndim or pulled.shape[-2] != logits.shape[-1]:
        return False
    # The rows and columns of the product that one row of the logits depends on.
    *_, row_of_entry, column_of_entry = pulled.nonzero().T
    rows = len(row_of_entry.unique())
    columns = len(column_of_entry.unique())
    return rows > 1 and columns == 1


def _order_axes(logits: Tensor, p: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and P with their axes in the order in which P multiplies the values.

    The softmax may have other axes: P of (b, n, h, m) is permuted to (b, h, n, m) before it
    multiplies values of (b, h, m, d).

    Args:
        logits: the argument of the softmax, with its axes.
        p: its result.
        weights: what multiplies the values: P permuted, maybe after dropout or the like.

    Returns:
        Logits and P in the shape of `weights`. If P is no permutation of the weights, both keep
        their own axes.
    """
    # Nothing to do if no op between P and the weights changes the order of axes.
    path = nodes(weights, [] if p.grad_fn is None else [p.grad_fn])
    if p.shape[-1] != weights.shape[-1] or _MOVES.isdisjoint(op(node) for node in path):
        return logits, p
    # For each row of P: the number of this row in the weights. If P has rows of (2, 3) and the
    # weights have them transposed, (3, 2), the numbers are [[0, 2, 4], [1, 3, 5]].
    number = _number_rows(p, weights)
    if number is None:
        return logits, p
    # The stride of an axis of P in the weights: by how much the number rises from one index of the
    # axis to the next, (last - first) / (size - 1). In the example: 1 and 2. The axis with the
    # largest stride comes first in the weights.
    strides = []
    for axis, size in enumerate(number.shape):
        last = number.select(axis, -1).amin()
        strides.append(float(last - number.amin()) / max(1, size - 1))
    order = sorted(range(number.ndim), key=lambda axis: -strides[axis])
    # With the axes in this order, the rows must be 0, 1, 2, ... If not, rows are mixed on the way.
    in_order = torch.arange(number.numel(), device=p.device).to(number)
    if not torch.equal(number.permute(order).flatten(), in_order):
        return logits, p
    shape = (*weights.shape[:-1], -1)
    logits = logits.permute(*order, -1)
    p = p.permute(*order, -1)
    return logits.reshape(shape), p.reshape(shape)


def _number_rows(p: Tensor, weights: Tensor) -> Tensor | None:
    """Return for each row of P, (..., keys), the number of its row in the weights, from 0.

    None if the weights are not made from P.

    Args:
        p: the result of a softmax.
        weights: P permuted, maybe times a factor (dropout).
    """
    # Each row of the weights is a row of P times a factor. Pull back the cotangent n + 1 of row n
    # (from 1, as 0 would be lost): n + 1 times the factor. A cotangent of ones gives the factor.
    count = weights[..., 0].numel()
    numbers = torch.arange(1, count + 1, device=p.device).to(weights)
    cotangent = numbers.view(*weights.shape[:-1], 1).expand_as(weights)
    pulled = vjp(weights, p, cotangent)
    factor = vjp(weights, p, torch.ones_like(weights))
    if pulled is None or factor is None:
        return None
    # All keys of a row give one number: take it at key 0. It is wrong if the factor is 0 there, or
    # if half precision cannot hold it. The rows are then in no order for the caller.
    return (pulled / factor).round()[..., 0] - 1


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
    # Grouped-query attention: several heads share keys and values. Repeat keys and values, so that
    # every head has its own, as in a model that repeats them itself.
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
    return AttentionCall(q, k, v, Fused(s, mask=attn_mask, causal=is_causal), output)


def _share_axes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...] | None:
    """Return q, k and v with the same leading axes, (..., tokens, width); None if they do not fit.

    Samples and heads may be one axis in q and k, and two axes in v; or the reverse. q and k then
    get the axes of v.
    """
    parts = _broadcast(q, k, v)
    leading = v.shape[:-2]
    leading_of_q = q.shape[:-2]
    has_same_size = math.prod(leading) == math.prod(leading_of_q)
    if parts is None and leading_of_q == k.shape[:-2] and has_same_size:
        q = q.reshape(*leading, *q.shape[-2:])
        k = k.reshape(*leading, *k.shape[-2:])
        return _broadcast(q, k, v)
    return parts


def _broadcast(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """Return tensors (..., rows, columns) expanded to the same leading axes.

    None if their leading axes cannot be broadcast to one shape.
    """
    leading = [t.shape[:-2] for t in tensors]
    try:
        batch = np.broadcast_shapes(*leading)  # torch's own imports sympy: 0.5 s of CPU time
    except ValueError:
        return None
    return tuple(t.expand(*batch, *t.shape[-2:]) for t in tensors)


# nn.MultiheadAttention calls this function, which runs fused attention or a written-out softmax.
# torch gives the mode the whole function, so that the mode would not see the ops in the body. This
# copy of the function runs the body at once, and the mode sees each op.
_composite: Any = F.multi_head_attention_forward
_multi_head_attention = FunctionType(
    _composite.__code__,
    {**_composite.__globals__, "has_torch_function": lambda _: False},
    _composite.__name__,
    _composite.__defaults__,
)
_multi_head_attention.__kwdefaults__ = _composite.__kwdefaults__
_HANDLERS: dict[object, Callable[..., Any]] = {
    F.scaled_dot_product_attention: (
        lambda _, func, *args, **kwargs: _make_fused_call(func(*args, **kwargs), *args, **kwargs)
    ),
    F.multi_head_attention_forward: AttentionMode._handle_composite,
    torch.einsum: AttentionMode._handle_einsum,
    torch.baddbmm: AttentionMode._handle_baddbmm,
    Tensor.baddbmm: AttentionMode._handle_baddbmm,
    **dict.fromkeys(
        (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm),
        AttentionMode._handle_matmul,
    ),
    **dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax), AttentionMode._handle_softmax),
    **dict.fromkeys((torch.exp, Tensor.exp), AttentionMode._handle_exp),
    **dict.fromkeys((torch.div, Tensor.div), AttentionMode._handle_divide),
}
