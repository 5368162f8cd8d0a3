"""An attention call of a model: its tensors, their axes, and their origins.

The graph of a pass is cut at linear maps. `Origins` stores the origin of each leaf. An
`AttentionCall` holds q, k, v, the form of the logits, and the output. An `AxisLayout` converts the
axes of a model to (windows, heads, tokens, width).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakTensorKeyDictionary

from lipaudit.errors import InputError
from lipaudit.models.graph import count_writes, leaves, summarise_rows
from lipaudit.models.precision import WeightReference, read_weight
from lipaudit.theory.pullback import pull_back

RIGHT = "linear"
LEFT = "linear from the left"
"""The op in the address of a linear map, x W or W x: by the side of the weight."""

TorchFunction = Callable[..., Tensor]
"""A function of torch that a model calls, such as `torch.matmul`."""

Arrange = Callable[..., Tensor]
"""Moves the channels of a tensor to the last axis."""


@dataclass(frozen=True)
class Linear:
    """A product y = x W + b with a weight that does not depend on the sample.

    Attributes:
        x: the input, channels last.
        parameter: W, (channels in, channels out), for any orientation of the parameter, or a
            reference to it (`precision.refer_to_weight`).
        bias: b, or None.
        arrange: converts the output y of the model's op to the axes of x. For several maps joined
            to one, it takes the output of each.
    """

    x: Tensor
    parameter: Tensor | WeightReference
    bias: Tensor | None
    arrange: Arrange = lambda y: y

    @property
    def weight(self) -> Tensor:
        """Return W."""
        return read_weight(self.parameter)

    @property
    def inputs(self) -> Tensor:
        """Return x with one token per row, (tokens of all samples, channels in)."""
        return self.x.reshape(-1, self.parameter.shape[0])

    def reads_same(self, other: Linear) -> bool:
        """Say whether another map reads the same input values, with tokens in the same order."""
        return torch.equal(self.inputs, other.inputs)

    def outputs(self, *y: Tensor) -> Tensor:
        """Return y, or a tensor of its shape such as a gradient, with one token per row."""
        return self.arrange(*y).reshape(-1, self.parameter.shape[1])


def join_linears(linears: Sequence[Linear]) -> Linear:
    """Return linear maps y_i = x W_i of one input x as one map: x [W_1 W_2 ...].

    The method `outputs` of the joined map takes the tensors y_1, y_2, ... and puts their columns
    side by side.
    """
    if len(linears) == 1:
        return linears[0]
    weights = []
    biases = []
    for linear in linears:
        weight = linear.weight
        weights.append(weight)
        if linear.bias is None:
            biases.append(weight.new_zeros(weight.shape[1]))
        else:
            biases.append(linear.bias)

    def arrange(*parts: Tensor) -> Tensor:
        """Return the outputs of all maps side by side, one token per row."""
        pairs = zip(linears, parts, strict=True)
        return torch.cat([linear.outputs(y) for linear, y in pairs], 1)

    return Linear(linears[0].x, torch.cat(weights, 1), torch.cat(biases), arrange)


class Address(NamedTuple):
    """An op of a forward pass: its innermost module, its kind, and its running number there.

    An address is the same for all data. Only in a mixture of experts may the running numbers
    inside of the experts depend on the data.
    """

    module: str
    op: str
    number: int


Ancestors = tuple[tuple[object, tuple[Address, ...]], ...]
"""The tensors behind a linear map, the nearest first: for each tensor an object that identifies it
(a mark), and the maps to leave uncut, so that the nearest map that is still cut reads it."""


@dataclass(frozen=True)
class Origin:
    """The origin of a leaf of the cut graph: a linear map, the model's input, or an attention.

    Attributes:
        address: address of the op.
        linear: the linear map.
        ancestors: in surveys, objects that identify (see `root`) the tensor that the linear map
            reads, the tensor that the previous map reads, and so on.
        reads_token_parts: whether a row of the map's input is only a part of a token's channels,
            as in `Linear(d, d)` on (batch, tokens, heads, d).
        writes: how often the memory of the map's input had been written to when the map ran.
        summary: a number for each row of the map's input when the map ran (`summarise_rows`).
    """

    address: Address
    linear: Linear | None = None
    ancestors: Ancestors = ()
    reads_token_parts: bool = False
    writes: int = 0
    summary: Tensor | None = None

    @property
    def root(self) -> object:
        """Return an object that stands for the tensor that the linear map reads; None if unknown.

        Maps that read views of one tensor have the same object (see `graph.root`).
        """
        if self.ancestors:  # the nearest tensor comes first, as (object, maps to leave uncut)
            return self.ancestors[0][0]
        return None

    @property
    def is_overwritten(self) -> bool:
        """Say whether the values of the linear map's input have changed since the map ran."""
        if self.linear is None or self.summary is None:
            return False
        if count_writes(self.linear.x) == self.writes:  # nothing was written
            return False
        # The count is of the memory that all views of a tensor share. The write may have been to
        # another part of it, or may have changed no value.
        summary = summarise_rows(self.linear.x)
        return not torch.allclose(summary, self.summary, rtol=0, atol=0, equal_nan=True)

    def reads_same(self, other: Origin) -> bool:
        """Say whether two linear maps of one pass read the same tokens of the same tensor.

        The graph shows that both maps read one tensor. Equal values alone would not show this,
        because two layer norms may be equal by chance. The values then show that both maps read
        the tokens in the same order.
        """
        # Without a graph back to the tensors (`root` is None), nothing can be shown.
        if self.linear is None or other.linear is None or self.root is not other.root:
            return False
        return self.root is not None and self.linear.reads_same(other.linear)


class Leaf(NamedTuple):
    """A leaf of a cut graph, and its origin."""

    tensor: Tensor
    origin: Origin


@dataclass(frozen=True, eq=False)
class Origins:
    """The origins of all leaves of the cut graph of one pass; freed with the graph.

    Attributes:
        by_leaf: the origin of each leaf.
    """

    by_leaf: MutableMapping[Tensor, Origin] = field(default_factory=WeakTensorKeyDictionary)

    def find_leaves(self, *tensors: Tensor) -> list[Leaf]:
        """Return the leaves that each tensor depends on, with their origins, tensor by tensor."""
        result = []
        for t in tensors:
            ends, _ = leaves(t)  # the leaves at which the graph of t ends
            for leaf in ends:
                # A leaf without an origin is a constant for which the model switched gradients on.
                if leaf in self.by_leaf:
                    result.append(Leaf(leaf, self.by_leaf[leaf]))
        return result


@dataclass(frozen=True)
class Fused:
    """Logits of torch's fused attention: scale q k^T + mask (True or 0 for visible keys)."""

    scale: float
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True)
class Explicit:
    """Logits of a written-out softmax.

    Attributes:
        products: the edge of q k^T in the autograd graph of the logits. If several calls in a loop
            form one layer, the edge of each call.
        logits: the input of the softmax.
        p: the result of the softmax.
        weights: what multiplies v: p itself, or a function of p such as dropout.
        has_other_inputs: whether the logits depend on more than q k^T and constants.
        axis: axis along which the calls of a loop are joined.
        arrange_product: converts a tensor with the model's axes of q k^T to the axes of `logits`.
        is_transposed: whether the model computes k q^T.
    """

    products: tuple[GradientEdge, ...]
    logits: Tensor
    p: Tensor
    weights: Tensor
    has_other_inputs: bool
    axis: int = 1
    arrange_product: Callable[[Tensor], Tensor] = lambda t: t
    is_transposed: bool = False

    def pull(self, cotangent: Tensor) -> Tensor | None:
        """Return J^T u, with J the Jacobian of the logits with respect to q k^T.

        None if the logits do not depend on q k^T in this graph.

        Args:
            cotangent: u, in the shape of the logits.
        """
        pulled: Sequence[Tensor | None] = pull_back(
            self.logits, self.products, cotangent, retain_graph=True, allow_unused=True
        )
        # `products` has one q k^T, or one for each call if a loop of calls computes the layer.
        by_call = []
        for gradient in pulled:
            if gradient is None:  # the graph is cut between q k^T and the logits of this call
                return None
            # If the model computes k q^T, transpose its gradient to get the gradient of q k^T.
            by_call.append(gradient.mT if self.is_transposed else gradient)
        whole = by_call[0]
        if len(by_call) > 1:  # each call of a loop has some heads (axis 1) or queries (axis 2)
            whole = torch.cat([*map(_show_heads, by_call)], self.axis)
        # So far the axes are those of the model's q k^T: convert them to the axes of the logits.
        return self.arrange_product(whole)

    def arrange(self, arrange_pairs: Callable[[Tensor], Tensor]) -> Explicit:
        """Return the logits and P with other axes. `pull` then takes and returns these axes, too.

        Args:
            arrange_pairs: converts logits or P to these axes.
        """
        # `weights` is what multiplies the values: P, or a function of P. It has a row for each
        # query, as the logits have. If it has not, it is no P, and stays as it is.
        weights = self.weights
        rows = self.logits[..., 0].numel()
        if weights.numel() % rows == 0:
            weights = arrange_pairs(weights)
        return replace(
            self,
            logits=arrange_pairs(self.logits),
            p=arrange_pairs(self.p),
            weights=weights,
            arrange_product=arrange_pairs,  # `pull` applies it to the gradient of q k^T
        )


Role = Literal["sample", "window", "head", "token"]
ROLES: tuple[Role, ...] = get_args(Role)
"""What an axis may hold, in the order of `AxisLayout.arrange`."""


class Factor(NamedTuple):
    """A factor of an axis such as (windows * heads): what the factor holds, and how many of them.

    A size of 0 is open: on each batch, it follows from the size of the axis.
    """

    role: Role
    size: int = 0


TOKENS = (Factor("token"),)


@dataclass(frozen=True)
class AxisLayout:
    """The order of samples, windows, heads and tokens in the axes of an attention call.

    Attributes:
        leading: the factors of each leading axis, outermost first.
        queries: the factors of the axis of queries: tokens, maybe with heads that share keys.
    """

    leading: tuple[tuple[Factor, ...], ...]
    queries: tuple[Factor, ...] = TOKENS

    @property
    def is_plain(self) -> bool:
        """Say whether the axes are (samples, heads, tokens, width) already."""
        roles = [[factor.role for factor in axis] for axis in self.leading]
        return roles == [["sample"], ["head"]] and self.queries == TOKENS

    @property
    def keeps_queries(self) -> bool:
        """Say whether the axis of queries holds all queries of a window and head, and no heads.

        The axes before it, `leading`, are of samples, windows and heads. If one of them also has
        tokens, the queries are split over two axes.
        """
        has_leading_tokens = any(
            factor.role == "token" for axis in self.leading for factor in axis
        )
        return self.queries == TOKENS and not has_leading_tokens

    def arrange(self, t: Tensor, samples: int) -> Tensor:
        """Return q, O or P, (..., queries, width), as (windows, heads, queries, width).

        Args:
            t: the tensor, with the axes of the model.
            samples: number of samples in the batch. Each has the same number of windows.
        """
        t, factors = self._divide(t, self.queries, samples)  # an axis for each factor
        return _sort_axes(t, factors)

    def arrange_keys(self, t: Tensor, samples: int) -> Tensor:
        """Return k or v, (..., keys, width), as (windows, heads, keys, width).

        Example: multi-query attention with 4 heads has q of (samples, tokens * 4, width) and keys
        that all heads share, (samples, keys, width). The result repeats them for each head,
        (samples, 4, keys, width).

        Arguments are those of `arrange`.
        """
        # `factors` says what each axis but the last (the width) holds: leading axes, then keys.
        t, factors = self._divide(t, TOKENS, samples)
        for axis, factor in enumerate(factors[:-1]):
            # A leading axis may hold queries. The keys were repeated along it: keep one copy.
            if factor.role == "token":
                t = t.narrow(axis, 0, 1)
        t = _sort_axes(t, factors)
        # The axis of queries may hold heads (4 in the example). Give each of them a copy.
        sharing_heads = prod(factor.size for factor in self.queries if factor.role == "head")
        if sharing_heads == 1:
            return t
        return t.repeat_interleave(sharing_heads, 1)

    def _divide(
        self, t: Tensor, rows: tuple[Factor, ...], samples: int
    ) -> tuple[Tensor, list[Factor]]:
        """Return t with an axis for each factor, (*factors, width), and the factors.

        A factor holds samples, windows, heads or tokens. Sizes that the layout leaves open follow
        from the shape of t.

        Args:
            t: the tensor, with the axes of the model.
            rows: the factors of its last axis but one.
            samples: number of samples in the batch.

        Raises:
            InputError: an axis does not have the size of its factors.
        """
        factors: list[Factor] = []
        sizes: list[int] = []
        axes = (*self.leading, rows)
        for axis, size in zip(axes, t.shape[:-1], strict=True):
            factors += axis
            sizes += _find_sizes(axis, size, samples)
        return t.reshape(*sizes, t.shape[-1]), factors


def _find_sizes(axis: tuple[Factor, ...], size: int, samples: int) -> list[int]:
    """Return the size of each factor of an axis, such as [3, 4] of (windows, 4 heads) of size 12.

    At most one factor, such as the windows here, has no size yet (0). Its size is the size of the
    axis over the product of all other sizes.

    Args:
        axis: the factors, outermost first.
        size: the size of the axis.
        samples: number of samples in the batch: the size of a factor of samples.

    Raises:
        InputError: the product of the factors is not the size of the axis.
    """
    if len(axis) == 1:
        return [size]
    sizes = [samples if factor.role == "sample" else factor.size for factor in axis]
    known = prod(n for n in sizes if n)
    if size % known or (0 not in sizes and size != known):
        raise InputError(
            f"attention over an axis of {size}, which was a multiple of {known} when the model "
            "was loaded: heads and windows cannot be distinguished",
            "Leave this layer out with --layers.",
        )
    return [n or size // known for n in sizes]  # an open size (0) takes what is left


def _sort_axes(t: Tensor, factors: Sequence[Factor]) -> Tensor:
    """Return t, with an axis for each factor, as (windows, heads, tokens, width).

    All windows of all samples are along the first axis, ordered by sample.

    Args:
        t: the tensor, (*factors, width).
        factors: what each axis but the last holds.
    """
    # Samples first, then windows, heads and tokens (the order of `ROLES`); the sort is stable.
    order = sorted(range(len(factors)), key=lambda axis: ROLES.index(factors[axis].role))
    counts = dict.fromkeys(ROLES, 1)  # number of samples, windows, heads and tokens
    for factor, size in zip(factors, t.shape[:-1], strict=True):
        counts[factor.role] *= size
    windows = counts["sample"] * counts["window"]
    t = t.permute(*order, -1)
    return t.reshape(windows, counts["head"], counts["token"], t.shape[-1])


@dataclass(frozen=True)
class AttentionCall:
    """One attention call, with its autograd graph.

    Attributes:
        q, k, v: (..., tokens, width), leading axes broadcast, grouped heads repeated.
        form: the form of the logits.
        output: the output of the attention, (..., tokens, width).
        origins: origins of the leaves of the autograd graph, if a tracer has cut the graph.
        finish: converts the output to the result of the model's op.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    form: Fused | Explicit
    output: Tensor
    origins: Origins = field(default_factory=Origins)
    finish: Callable[[Tensor], Tensor] = lambda t: t

    def arrange(self, layout: AxisLayout, samples: int) -> AttentionCall:
        """Return the call with canonical axes, by views of its tensors.

        q, k, v and O are then (windows, heads, tokens, width), and logits and P are (windows,
        heads, queries, keys). The axis of windows has the windows of all samples.

        Args:
            layout: what the axes of the model hold.
            samples: number of samples in the batch.
        """
        q = layout.arrange(self.q, samples)
        o = layout.arrange(self.output, samples)
        k = layout.arrange_keys(self.k, samples)
        v = layout.arrange_keys(self.v, samples)
        form = self.form
        rows = self.q.shape[:-1]  # (..., queries), with the axes of the model

        def arrange_pairs(pairs: Tensor) -> Tensor:
            """Return logits or P, (..., queries, keys) in the model, with canonical axes.

            The result is a view or a function of the model's own tensor, so that its graph leads
            to q and k. `rows` are all axes of the model's tensor but that of the keys.
            """
            return layout.arrange(pairs.reshape(*rows, -1), samples)

        if isinstance(form, Explicit):
            form = form.arrange(arrange_pairs)
        else:
            form = self._arrange_mask(form, layout, samples)
        return replace(self, q=q, k=k, v=v, output=o, form=form)

    def _arrange_mask(self, form: Fused, layout: AxisLayout, samples: int) -> Fused:
        """Return the logits of torch's fused attention with the mask in canonical axes.

        Args:
            form: the logits of this call.
            layout: what the axes of the model hold.
            samples: number of samples in the batch.
        """
        mask = form.mask
        rows = self.q.shape[:-1]  # (..., queries), with the axes of the model
        keys = self.k.shape[-2]
        if form.causal and not layout.keeps_queries:
            # `causal` hides keys by the position of a query along the model's axis of queries. The
            # layout divides this axis, so make an explicit mask first.
            mask = hide_later_keys(rows[-1], keys, mask, like=self.q)
            form = replace(form, causal=False)
        if mask is not None and layout.is_plain:
            # No axis moves, so the mask need not be expanded to all heads, which takes memory. Add
            # the axes of samples and heads with size 1.
            mask = mask[(None,) * (4 - mask.ndim)]
        elif mask is not None:
            mask = layout.arrange(mask.expand(*rows, keys), samples)
        return replace(form, mask=mask)


OnAttention = Callable[[AttentionCall, Address], object]
"""Takes each attention call of a model, and its address."""


def hide_later_keys(queries: int, keys: int, mask: Tensor | None, like: Tensor) -> Tensor:
    """Return a causal mask that also hides the keys that another mask hides.

    Args:
        queries: number of queries.
        keys: number of keys.
        mask: the other mask, boolean or additive; None: there is none.
        like: a tensor with the device and dtype of the result.

    Returns:
        (queries, keys), True for visible keys, without another mask. Else an additive mask.
    """
    later = like.new_ones(queries, keys, dtype=torch.bool).triu(1)  # j > i
    if mask is None:
        return ~later
    return make_additive(mask, like.dtype).masked_fill(later, -torch.inf)


def _show_heads(t: Tensor) -> Tensor:
    """Return a tensor as (batch, heads, tokens, width), where heads may be 1."""
    if t.ndim == 3:  # one head, without an axis
        return t[:, None]
    return t


@dataclass(frozen=True)
class Loop:
    """Attention calls that a model makes one after the other, and that form one layer.

    Attributes:
        addresses: addresses of the calls, in order.
        axis: axis along which the calls are joined: 1 if each call computes some of the heads, 2
            if each call computes some of the queries.
    """

    addresses: tuple[Address, ...]
    axis: int

    def join(self, calls: Sequence[AttentionCall]) -> AttentionCall:
        """Return the calls as one attention call, (batch, heads, tokens, width)."""
        first = calls[0]
        if self.axis == 1:  # each call computes some heads, from its own keys and values
            k = self.join_tensors(call.k for call in calls)
            v = self.join_tensors(call.v for call in calls)
        else:  # each call computes some of the queries, with the same keys and values
            k = _show_heads(first.k)
            v = _show_heads(first.v)
        q = self.join_tensors(call.q for call in calls)
        output = self.join_tensors(call.output for call in calls)
        return AttentionCall(q, k, v, self._join_forms(calls), output, origins=first.origins)

    def _join_forms(self, calls: Sequence[AttentionCall]) -> Fused | Explicit:
        """Return the logits of all calls as the logits of one call.

        The calls form one layer, so they are alike (`loops.find_loops` has compared them). Either
        all calls use torch's fused attention, with the same scale and causality, and all or none
        have a mask: their masks are joined. Or all calls write their softmax out: their logits and
        P are joined. Joined means along `axis`: heads, or queries.
        """
        written_out: list[Explicit] = []
        masks = []
        for call in calls:
            form = call.form
            rows = call.q.shape[:-1]  # (batch, heads, queries), or without heads
            if isinstance(form, Explicit):
                logits = form.logits.reshape(*rows, -1)
                p = form.p.reshape(*rows, -1)
                written_out.append(replace(form, logits=logits, p=p))
            elif form.mask is not None:
                # A mask may be broadcast along the heads or queries: expand it before joining.
                masks.append(form.mask.expand(*rows, call.k.shape[-2]))
        first = calls[0].form
        if isinstance(first, Fused):
            return replace(first, mask=self.join_tensors(masks) if masks else None)
        return self._join_explicit(written_out)

    def _join_explicit(self, forms: Sequence[Explicit]) -> Explicit:
        """Return the logits and P of calls that write their softmax out as those of one call."""
        return Explicit(
            products=tuple(edge for form in forms for edge in form.products),
            logits=self.join_tensors(form.logits for form in forms),
            p=self.join_tensors(form.p for form in forms),
            weights=self.join_tensors(form.weights for form in forms),
            has_other_inputs=any(form.has_other_inputs for form in forms),
            axis=self.axis,
            is_transposed=forms[0].is_transposed,
        )

    def join_tensors(self, parts: Iterable[Tensor]) -> Tensor:
        """Concatenate one tensor of each call along `axis`: their heads, or their queries.

        A tensor of (batch, tokens, width) gets an axis of one head first.
        """
        return torch.cat([_show_heads(t) for t in parts], self.axis)


def make_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in additive form: -inf where a boolean mask is False."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
