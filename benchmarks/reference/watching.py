"""Watch a model's own ops while it runs: its attention, and what its linear maps read.

Written apart from lipaudit's capture, by other means: the functions of torch are replaced while
the model runs. Nothing here knows of closed forms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

NEAR = 60
"""Nodes between a softmax and the product with v: dropout, casts, masks, talking heads."""


@dataclass
class Frame:
    """A module call under way, and the leaves put in place of its arguments."""

    name: str
    leaves: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Attention:
    """One attention call of the model: O and P, with the autograd graph of O."""

    module: str
    output: Tensor
    p: Tensor
    frames: tuple[Frame, ...]


@dataclass
class Watch:
    """What is cut, and what was seen.

    Attributes:
        cut: whether the input of every linear map becomes a leaf.
        uncut: modules whose linear maps are left whole: maps behind the input that q, k and v of
            a layer have in common.
        scopes: modules whose tensor arguments become leaves.
    """

    cut: bool = True
    uncut: frozenset[str] = frozenset()
    scopes: frozenset[str] = frozenset()
    calls: list[Attention] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    softmaxes: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    inside: int = 0

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """Watch `module` while the block runs it."""
        with ExitStack() as stack, sdpa_kernel(SDPBackend.MATH):
            for name, part in module.named_modules():
                enter = part.register_forward_pre_hook(self._enter(name), with_kwargs=True)
                leave = part.register_forward_hook(self._leave, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            packages = {type(part).__module__.partition(".")[0] for part in module.modules()}
            for owner, name, handler in PATCHES:
                places = [
                    (owner, name),
                    *_find_imports(getattr(owner, name), packages - {"torch"}),
                ]
                replaced = self._replaced(owner, name, handler)
                for place, alias in places:
                    stack.enter_context(patch.object(place, alias, replaced))
            yield

    def _enter(self, name: str) -> Callable[..., Any]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            frame = Frame(name)
            self.frames.append(frame)
            if name not in self.scopes:
                return None
            args = tuple(_leaf(value, frame.leaves) for value in args)
            return args, {key: _leaf(value, frame.leaves) for key, value in kwargs.items()}

        return enter

    def _leave(self, *_: Any) -> None:
        self.frames.pop()

    def _replaced(self, owner: Any, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return original(*args, **kwargs)
            self.inside += 1
            try:
                return handler(self, original, *args, **kwargs)
            finally:
                self.inside -= 1

        return replaced

    def fused(self, op: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any):
        """Record the fused op; P is what it gives for the identity as v."""
        out = op(query, key, value, *args, **kw)
        keys = key.shape[-2]
        eye = torch.eye(keys, dtype=value.dtype).expand(*value.shape[:-2], keys, keys)
        with torch.no_grad():
            p = op(query.detach(), key.detach(), eye, *args, **kw)
        self._record(out, p)
        return out.clone()  # the model may write into it

    def softmax(self, op: Any, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Remember a softmax over the last axis."""
        p = op(t, *args, **kwargs)
        dim = kwargs.get("dim", args[0] if args else None)
        if p.ndim >= 3 and p.requires_grad and dim in (-1, p.ndim - 1):
            self.softmaxes = [*self.softmaxes[-3:], p]
        return p

    def product(self, op: Any, *operands: Any, **kwargs: Any) -> Tensor:
        """Record the product of a softmax and v; cut in front of a product with a parameter."""
        if isinstance(operands[-1], list | tuple):
            operands = (*operands[:-1], *operands[-1])  # einsum takes its operands either way
        factors = [t for t in operands if isinstance(t, Tensor)]
        if len(factors) == 2 and _is_weight(factors[1]) and not _is_of_one_head(factors[0]):
            return op(*[self.leaf(t) if t is factors[0] else t for t in operands], **kwargs)
        out = op(*operands, **kwargs)
        for p in self.softmaxes:
            if any(_made_of(t, p) for t in factors):
                self.softmaxes = [other for other in self.softmaxes if other is not p]
                equation = operands[0] if isinstance(operands[0], str) else ""
                of_p = next(i for i, t in enumerate(factors) if _made_of(t, p))
                self._record(_put_queries_last(out, equation, of_p), p.detach())
                return out.clone()  # the model may write into it
        return out

    def linear(self, op: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Cut in front of a linear map."""
        return op(self.leaf(x) if weight.ndim == 2 else x, weight, *args, **kwargs)

    def affine(self, op: Any, bias: Tensor, x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        """Cut in front of addmm."""
        return op(bias, self.leaf(x) if _is_weight(weight) else x, weight, **kwargs)

    def convolution(self, op: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Cut in front of a convolution that maps every position alone."""
        out = op(x, weight, *args, **kwargs)
        alone = weight[0, 0].numel() == 1 and out.shape[2:] == x.shape[2:]
        return op(self.leaf(x), weight, *args, **kwargs) if alone else out

    def leaf(self, x: Tensor) -> Tensor:
        """Return a leaf in place of x: the same one for the same numbers read again."""
        inner = bool(self.frames) and self.frames[-1].name in self.uncut
        if not self.cut or inner or not x.requires_grad:
            return x
        for known in reversed(self.leaves[-6:]):
            if known.numel() == x.numel() and torch.equal(known.flatten(), x.detach().flatten()):
                return known.view(x.shape)
        self.leaves.append(x.detach().clone().requires_grad_())
        return self.leaves[-1].view(x.shape)

    def _record(self, output: Tensor, p: Tensor) -> None:
        """Keep O and P of a call."""
        name = self.frames[-1].name if self.frames else ""
        self.calls.append(Attention(name, output, p, tuple(self.frames)))


def _find_imports(function: Any, packages: set[str]) -> list[tuple[Any, str]]:
    """Return where the packages of a model have a function under a name of their own."""
    found: list[tuple[Any, str]] = []
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in packages:
            found += [(module, alias) for alias, it in vars(module).items() if it is function]
    return found


def ancestors(t: Tensor, most: int | None = None) -> Iterator[Any]:
    """Yield the nodes of the graph behind t, the nearest first."""
    todo, seen = [t.grad_fn], set()
    for node in todo:
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if most is not None and len(seen) > most:
            return
        todo += [parent for parent, _ in node.next_functions]


def _put_queries_last(output: Tensor, equation: str, of_p: int) -> Tensor:
    """Return O of an einsum with the axes of P, and the width of the values last.

    Example: with "bnij,bjnd->bind", the axes (b, i, n, d) of O become (b, n, i, d). Without an
    equation that names every axis, O is returned as it is.

    Args:
        output: what the einsum returned.
        equation: its equation; empty for a matrix product.
        of_p: which of the operands is P.
    """
    operands, arrow, axes = equation.replace(" ", "").partition("->")
    if not arrow or "." in equation:
        return output
    others = operands.split(",")[of_p][:-1]  # without the axis of the keys
    width = [axis for axis in axes if axis not in others]
    order = [*others, *width]
    if len(width) != 1 or sorted(order) != sorted(axes):
        return output
    return output.permute([axes.index(axis) for axis in order])


def variables(t: Tensor) -> list[Tensor]:
    """Return the leaves that t depends on."""
    return [node.variable for node in ancestors(t) if hasattr(node, "variable")]


def _made_of(t: Tensor, p: Tensor) -> bool:
    return t.grad_fn is not None and any(node is p.grad_fn for node in ancestors(t, NEAR))


def _is_of_one_head(t: Tensor) -> bool:
    """Say whether t holds parts of what one linear map made of its input: queries that meet a
    table of positions.
    """
    behind = variables(t) if t.grad_fn is not None else []
    widths = [leaf.shape[1] if leaf.ndim == 4 else leaf.shape[-1] for leaf in behind]
    return len(widths) == 1 and t.shape[-1] < widths[0]


def _is_weight(t: Tensor) -> bool:
    return isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter)


def _leaf(value: Any, leaves: dict[int, Tensor]) -> Any:
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    if id(value) not in leaves:
        leaves[id(value)] = value.detach().clone().requires_grad_()
    return leaves[id(value)]


PATCHES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (F, "scaled_dot_product_attention", Watch.fused),
    (F, "softmax", Watch.softmax),
    (torch, "softmax", Watch.softmax),
    (Tensor, "softmax", Watch.softmax),
    (torch, "matmul", Watch.product),
    (torch, "bmm", Watch.product),
    (torch, "einsum", Watch.product),
    (Tensor, "matmul", Watch.product),
    (Tensor, "__matmul__", Watch.product),
    (Tensor, "bmm", Watch.product),
    (F, "linear", Watch.linear),
    (torch, "addmm", Watch.affine),
    (F, "conv1d", Watch.convolution),
    (F, "conv2d", Watch.convolution),
)
