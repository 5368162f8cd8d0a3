"""Meet every attention call of an unmodified model while it runs.

A model computes attention in one of two ways: by the fused op `scaled_dot_product_attention`, or
by a softmax over something that contains a product q k^T, whose result multiplies v. The mode
below recognises both and hands each call to a function, whatever the model's code looks like.
Kernels that torch does not dispatch (flash-attn, flex attention, compiled or scripted modules)
cannot be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lipaudit.models.attention.observe.linears import Linear, contraction, recognise
from lipaudit.models.graph import leaves, past_of, remember, vjp


@dataclass(frozen=True)
class Fused:
    """Logits of the fused op: scale q k^T + mask (True or 0 where a key is seen)."""

    scale: float
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True)
class Explicit:
    """Logits of a written-out softmax.

    Attributes:
        product: where q k^T enters the autograd graph of the logits.
        logits: what the softmax is taken of.
        p: its result.
        weights: what multiplies v: p itself, or what the model made of it.
        others: whether the logits depend on more than this product and constants.
    """

    product: GradientEdge
    logits: Tensor
    p: Tensor
    weights: Tensor
    others: bool


@dataclass(frozen=True)
class AttentionCall:
    """One attention call, with its autograd graph.

    Attributes:
        q, k, v: (..., tokens, width), leading axes broadcast, grouped heads repeated.
        form: how the logits come about.
        output: what the model's own ops make of it, (..., tokens, width), in the model's shape.
        transposed: whether the model keeps tokens last, (..., width, tokens).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    form: Fused | Explicit
    output: Tensor
    transposed: bool = False


def probabilities(call: AttentionCall) -> Tensor:
    """Return P, all of it, differentiable to any order."""
    if isinstance(call.form, Explicit):
        return call.form.p
    logits = call.form.scale * (call.q @ call.k.mT)
    if call.form.mask is not None:
        logits = logits + additive(call.form.mask, logits.dtype)
    if call.form.causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, -torch.inf)
    p = torch.softmax(logits, -1)
    # A row without any key: softmax gives NaN, the fused op zero.
    return p if call.form.mask is None else p.masked_fill(logits.isneginf().all(-1, True), 0.0)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as what is added to the logits: -inf where a boolean one is False."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


@dataclass(frozen=True)
class _Product:
    """A batched matrix product that may turn out to be q k^T."""

    edge: GradientEdge
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class _Softmax:
    """A softmax over logits that contain a product; v has not been met yet."""

    product: _Product
    logits: Tensor
    p: Tensor
    others: bool


class AttentionMode(TorchFunctionMode):
    """While active, hand every attention call of the running model to a function.

    The tensors must carry an autograd graph from q or k to the logits, else a written-out softmax
    cannot be told from any other.

    Args:
        on_attention: takes the call, returns the output the model goes on with.
        on_linear: takes a recognised linear map and its result, returns the result the model goes
            on with; None leaves linear maps alone.
        where: names the module that is running.

    Attributes:
        passed_over: what looked like attention and is not, with the module where it was first.
        chunked: the modules where P is laid out anew before it meets v, in chunks of the tokens.
    """

    def __init__(
        self,
        on_attention: Callable[[AttentionCall], Tensor],
        on_linear: Callable[[Linear, Tensor], Tensor] | None = None,
        where: Callable[[], str] = str,
    ) -> None:
        super().__init__()
        self.passed_over: dict[str, str] = {}
        self.chunked: list[str] = []
        self._where = where
        self._on_attention = on_attention
        self._on_linear = on_linear
        self._products: list[_Product] = []
        self._pending: list[_Softmax] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._on_linear is not None:
            linear = recognise(func, args, kwargs)
            if linear is not None:
                return self._linear(linear, func(*args, **kwargs), self._on_linear)
        handler = _HANDLERS.get(func)
        return handler(self, func, *args, **kwargs) if handler else func(*args, **kwargs)

    def _linear(
        self, linear: Linear, out: Tensor, on_linear: Callable[[Linear, Tensor], Tensor]
    ) -> Tensor:
        cut = on_linear(linear, out)
        edges = [product.edge for product in self._products]
        edges += [get_gradient_edge(s.p) for s in self._pending if s.p.grad_fn is not None]
        known = {edge.node: edge for edge in edges}
        # Talking heads: a map of logits or of P, behind which q k^T would be out of sight.
        if cut is not out and (past := leaves(linear.x, known)[1]):
            remember(cut, [node for node in past if _maps_logits(linear, known[node])])
        return cut

    def _fused(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return self._on_attention(_fused_call(func(*args, **kwargs), *args, **kwargs))

    def _composite(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return _multi_head_attention(*args, **kwargs)

    def _matmul(self, func: Callable[..., Tensor], *operands: Any, **kwargs: Any) -> Tensor:
        if kwargs or len(operands) != 2 or not all(isinstance(t, Tensor) for t in operands):
            return func(*operands, **kwargs)
        a, b = operands
        for i, softmax in enumerate(self._pending):
            for weights, values, transposed in ((a, b, False), (b, a, True)):
                if _reaches(weights, softmax.p):
                    del self._pending[i]
                    if not _fits(softmax.product, weights, values, transposed):
                        self.chunked.append(self._where())
                        return func(a, b)
                    return self._on_attention(
                        _call(softmax, func(a, b), weights, values, transposed)
                    )
        out = func(a, b)
        if out.requires_grad and a.ndim > 2 and b.ndim > 2:
            # The edge, not the tensor: the model may change its logits in place.
            self._products = [*self._products[-7:], _Product(get_gradient_edge(out), a, b)]
        return out

    def _baddbmm(
        self,
        func: Callable[..., Tensor],
        bias: Tensor,
        batch1: Tensor,
        batch2: Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> Tensor:
        return beta * bias + alpha * self._matmul(torch.bmm, batch1, batch2)

    def _einsum(self, func: Callable[..., Tensor], equation: Any, *operands: Any) -> Tensor:
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = tuple(operands[0])
        c = contraction(equation) if isinstance(equation, str) and len(operands) == 2 else None
        if c is None or not len(c.rows) == len(c.columns) == len(c.summed) == 1:
            return func(equation, *operands)
        a = operands[0].permute([c.first.index(x) for x in c.batch + c.rows + c.summed])
        b = operands[1].permute([c.second.index(x) for x in c.batch + c.summed + c.columns])
        out, axes = self._matmul(torch.matmul, a, b), c.batch + c.rows + c.columns
        if axes == c.out:
            return out
        # A copy: in a view, autograd would not tell what the model writes in place.
        return out.permute([axes.index(x) for x in c.out]).clone()

    def _softmax(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        p = func(*args, **kwargs)
        logits = args[0] if args else kwargs["input"]
        if not logits.requires_grad or logits.ndim < 3:
            return p
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        known = {product.edge.node: product for product in self._products}
        inputs, hits = leaves(logits, known)
        if not hits or dim not in (-1, logits.ndim - 1):
            what = f"a softmax over axis {dim}" if hits else "a softmax without q k^T"
            self.passed_over.setdefault(what, self._where())
            return p
        first = next(product for node, product in known.items() if node in hits)
        self._products.clear()
        found = _Softmax(first, logits, p, others=bool(inputs) or len(hits) > 1)
        self._pending = [*self._pending[-3:], found]
        return p


def _fused_call(
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
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    s = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    q, k, v = _broadcast(query, key, value)
    return AttentionCall(q, k, v, Fused(s, attn_mask, is_causal), output)


def _call(
    softmax: _Softmax, output: Tensor, weights: Tensor, values: Tensor, transposed: bool
) -> AttentionCall:
    weights, values = (weights.mT, values.mT) if transposed else (weights, values)
    q, k, v = _broadcast(softmax.product.a, softmax.product.b.mT, values)
    form = Explicit(softmax.product.edge, softmax.logits, softmax.p, weights, softmax.others)
    return AttentionCall(q, k, v, form, output, transposed)


def _fits(product: _Product, weights: Tensor, values: Tensor, transposed: bool) -> bool:
    """Say whether P meets v in the axes in which q met k: not if chunks were laid out anew."""
    p, v = (weights.mT, values.mT) if transposed else (weights, values)
    try:
        torch.broadcast_shapes(product.a.shape[:-2], product.b.shape[:-2], v.shape[:-2])  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return p.shape[-2] == product.a.shape[-2] and v.shape[-2] == product.b.shape[-1]


def _broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))  # type: ignore[no-untyped-call]
    return tuple(t.expand(*batch, *t.shape[-2:]) for t in tensors)


def _maps_logits(linear: Linear, product: GradientEdge) -> bool:
    """Say whether a linear map mixes the heads of logits entry by entry, or the keys of a row.

    Any other map is a layer further on: linear attention and state-space mixers end in a product
    too, which is no logits to the softmax of the next layer. Told by what one row of its input is
    made from; a second map of the logits is judged by what it takes from the first.
    """
    spread = _spread(linear, product)
    if not spread:
        cuts = (leaf for leaf in leaves(linear.x)[0] if product.node in past_of(leaf))
        return any(sum(n > 1 for n in _spread(linear, cut)) <= 1 for cut in cuts)
    *heads, queries, keys = spread
    return queries == 1 and (keys == 1 or max(heads) == 1)


def _spread(linear: Linear, source: Tensor | GradientEdge) -> list[int]:
    """Count along each axis of `source` what one row of the input of a map is made from."""
    x, row = linear.x, torch.zeros_like(linear.inputs)
    row[len(row) // 2] = 1.0
    channels_last = x.movedim(linear.axis, -1).shape
    pulled = vjp(x, source, row.view(channels_last).movedim(-1, linear.axis))
    return [] if pulled is None else [axis.unique().numel() for axis in pulled.nonzero().T]


def _reaches(t: Tensor, target: Tensor) -> bool:
    if t.grad_fn is None or target.grad_fn is None:
        return False
    return bool(leaves(t, (target.grad_fn,))[1])


def _without_dispatch(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a torch composite that runs its body instead of asking the mode again."""
    assert isinstance(func, FunctionType)
    scope = {**func.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_multi_head_attention = _without_dispatch(F.multi_head_attention_forward)
_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: AttentionMode._fused,
    F.multi_head_attention_forward: AttentionMode._composite,
    torch.einsum: AttentionMode._einsum,
    torch.baddbmm: AttentionMode._baddbmm,
    torch.Tensor.baddbmm: AttentionMode._baddbmm,
    **dict.fromkeys(
        (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm),
        AttentionMode._matmul,
    ),
    **dict.fromkeys((torch.softmax, torch.Tensor.softmax, F.softmax), AttentionMode._softmax),
}
