"""Run a model once, cut at its linear maps, with the address of each op."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.models.attention import calls
from lipaudit.models.attention.calls import (
    Address,
    AttentionCall,
    Linear,
    Loop,
    Origin,
    Origins,
    Way,
)
from lipaudit.models.attention.contractions import READERS, Contraction
from lipaudit.models.attention.events import AttentionMode
from lipaudit.models.graph import divides_channels, is_affine, root
from lipaudit.models.net import Net, watch_modules
from lipaudit.models.precision import Widening, refer_to_weight

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_DEEPEST = 3  # largest number of linear maps in sequence between an input and q, k or v


@dataclass
class Frame:
    """A module call in progress, with its number among the calls of the module."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int
    attentions: list[Address] = field(default_factory=list)

    @property
    def inputs(self) -> dict[int | str, Tensor]:
        """Return the arguments that depend on the model's input, by place or name."""
        arguments: dict[Any, Any] = dict(enumerate(self.args)) | self.kwargs
        return {k: t for k, t in arguments.items() if isinstance(t, Tensor) and t.requires_grad}

    def name_inputs(self) -> list[str]:
        """Return the names of the inputs; one tensor given twice is `query = key`."""
        names_by_tensor: dict[int, list[str]] = {}
        for key, t in self.inputs.items():
            name = self._name_position(key) if isinstance(key, int) else key
            names_by_tensor.setdefault(id(t), []).append(name)
        return [" = ".join(names) for names in names_by_tensor.values()]

    def _name_position(self, position: int) -> str:
        """Return the name of a positional argument in the signature of `forward`."""
        fallback = f"argument {position + 1}"
        try:
            parameters = inspect.signature(self.module.forward).parameters.values()
        except (TypeError, ValueError):  # compiled code may have no signature
            return fallback
        names = [p.name for p in parameters if p.kind in _POSITIONAL]
        if position < len(names):
            return names[position]
        return fallback

    def holds(self, module: str) -> bool:
        """Say whether a module, by its path, is this one or a part of it."""
        return not self.name or f"{module}.".startswith(f"{self.name}.")


@dataclass
class CallStack:
    """The module calls in progress, and their numbers of ops: how far a forward pass has come.

    Attributes:
        on_enter: takes each module call at its start.
        on_leave: takes each module call and its output.
        frames: the module calls in progress, the innermost one last.
        counts: numbers of ops and calls so far, by module.
    """

    on_enter: Callable[[Frame], None] = lambda _: None
    on_leave: Callable[[Frame, Any], None] = lambda *_: None
    frames: list[Frame] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def address(self, op: str) -> Address:
        """Return the address of the next op of this kind in the innermost module."""
        module = self.module()
        self.counts[module, op] += 1
        return Address(module, op, self.counts[module, op] - 1)

    def module(self) -> str:
        """Return the path of the innermost module."""
        if self.frames:
            return self.frames[-1].name
        return ""

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Keep `frames` up to date while the model runs."""

        def enter(name: str, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            """Push the frame of a module call that begins."""
            frame = Frame(name, part, args, kwargs, self.counts[name, "call"])
            self.frames.append(frame)
            self.counts[name, "call"] += 1
            self.on_enter(frame)

        with ExitStack() as hooks:
            for name, part in module.named_modules():
                entry = part.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
                hooks.enter_context(entry)
                # Also after an error: a pass that has read enough ends by one.
                leave = part.register_forward_hook(
                    lambda _part, _args, output: self.on_leave(self.frames.pop(), output),
                    always_call=True,
                )
                hooks.enter_context(leave)
            yield


class Tracer(AttentionMode):
    """An observed forward pass.

    Attributes:
        place: position of the pass.
        origins: origins of the leaves of the cut graph.
        inner_maps: linear maps at which the graph is not cut.
        products: linear maps so far by ops that products of activations use, too.

    Args:
        on_attention: takes each attention call and its address.
        wanted: addresses at which to cut; None: all tensors that depend on the input.
        inner_maps: see above.
        place: see above.
        loops: attention calls that are reported as one, by the address of the last one.
    """

    def __init__(
        self,
        on_attention: Callable[[AttentionCall, Address], object] | None = None,
        *,
        wanted: frozenset[Address] | None = None,
        inner_maps: frozenset[Address] = frozenset(),
        place: CallStack | None = None,
        loops: Iterable[Loop | None] = (),
    ) -> None:
        super().__init__(on_attention)
        self.wanted = wanted
        self.inner_maps = inner_maps
        self.place = place or CallStack()
        self.origins = Origins()
        self.loops: dict[Address, Loop] = {}
        for loop in loops:
            if loop is not None:
                self.loops |= dict.fromkeys(loop.addresses, loop)
        self.products: set[Address] = set()
        self._waiting: dict[Address, AttentionCall] = {}

    def input(self, t: Tensor) -> Tensor:
        """Return the model's input, or a text's embeddings, cut off as a leaf if it is wanted."""
        address = self.place.address("input")
        if self.wanted is None or address in self.wanted:
            return self._cut(t, Origin(address))
        return t

    def run_linear(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Cut at a linear map of a tensor that depends on the sample, if the op is one."""
        reader = READERS.get(func)
        if reader is None:
            return None
        # Each op of a kind is numbered, cut or not: the numbers are then the same in every pass.
        right_address = self.place.address(calls.RIGHT)
        product = reader(*args, **kwargs)
        if product is None:
            return None
        # The factor on the right, or the one on the left, may be the weight.
        linear = None
        for op, factors in product.orders():
            address = right_address._replace(op=op)
            if self._is_map(factors, address):
                linear = factors.read()
            if linear is not None:
                break
        if linear is None:
            return None
        output = func(*args, **kwargs)
        bias = None
        if linear.bias is not None:
            bias = linear.bias.detach()
        # `keep`: weights converted for the run must not live as long as the graph.
        constant = Linear(linear.x.detach(), refer_to_weight(linear.weight), bias, linear.arrange)
        origin = Origin(address, constant)
        if self.wanted is None:
            way = self._extend_way(linear.x, address)
            origin = Origin(address, constant, way, divides_channels(linear.x))
            if not product.entire:
                self.products.add(address)
        result = self._cut(output, origin)
        self.remember(linear, result)
        return result

    def _extend_way(self, x: Tensor, address: Address) -> Way:
        """Return the tensors behind a linear map, from its input x back: see `Way`.

        If x is made from the output of one earlier linear map, they include those behind it; to
        read these, this map must not be cut.
        """
        # Marks, not tensors: a chain of inputs would keep all activations of the model.
        way: list[tuple[object, tuple[Address, ...]]] = [(root(x), ())]
        earlier = self.origins.leaves(x)
        if len(earlier) == 1:
            for mark, maps in earlier[0].origin.way:
                way.append((mark, (address, *maps)))
        return tuple(way[:_DEEPEST])

    def _is_map(self, factors: Contraction, address: Address) -> bool:
        """Say whether to cut at a product, as a linear map: one factor is a constant.

        Every factor that does not depend on the sample counts as a weight. While the model runs,
        exactly the tensors that depend on the sample require gradients.
        """
        if self.wanted is not None:
            return address in self.wanted
        if address in self.inner_maps:
            return False
        x = factors.x
        weight = factors.weight
        bias = factors.bias
        is_moving = weight.requires_grad or (bias is not None and bias.requires_grad)
        if is_moving or not x.requires_grad:
            return False
        if factors.entire:
            return True
        # A product of a part of a linear map's output (queries or keys of one head) and a constant
        # is a rotation, or a product with position vectors: no further linear map. A head is
        # narrower than that output; a second map in sequence (LoRA, a latent) reads all of it.
        behind = self.origins.leaves(x)
        linear = behind[0].origin.linear if len(behind) == 1 else None
        if linear is None or factors.width >= linear.parameter.shape[1]:
            return True
        return not is_affine(x)

    def complete(self, call: AttentionCall) -> tuple[AttentionCall | None, Address, Tensor]:
        """Number a call and cut the graph after it.

        Returns:
            The call to report: itself, at the end of a loop all calls as one, else None; its
            address; and its output, cut.
        """
        address = self.place.address("attention")
        if self.wanted is None:
            is_wanted = call.output.requires_grad
        else:
            is_wanted = address in self.wanted
        if is_wanted:
            output = self._cut(call.output, Origin(address))
        else:
            output = call.output.detach()
        # In a module that is run again alone, a call is found by its position among these.
        for frame in self.place.frames:
            frame.attentions.append(address)
        call = replace(call, origins=self.origins)
        loop = self.loops.get(address)
        if loop is None:
            return call, address, output
        # The calls of a loop wait for the last one. A model may leave some out for a sample.
        self._waiting[address] = call
        is_complete = all(part in self._waiting for part in loop.addresses)
        if address != loop.addresses[-1] or not is_complete:
            return None, address, output
        parts = [self._waiting.pop(part) for part in loop.addresses]
        return loop.join(parts), address, output

    def _cut(self, t: Tensor, origin: Origin) -> Tensor:
        """Return t as a leaf of known origin: a clone, because the model may write into it."""
        # Behind the leaf the graph starts anew: a pass holds the graph of one layer at a time.
        leaf = t.detach().requires_grad_()
        self.origins.by_leaf[leaf] = origin
        return leaf.clone()


def run(net: Net, batch: Batch, tracer: Tracer) -> Tensor:
    """Return the output of a model that a tracer observes.

    In float64 the model's own casts to lower precision are left out.
    """
    # `Widening` inside of the tracer: what the tracer computes of a layer keeps its own casts.
    wide = Widening() if net.dtype == torch.float64 else nullcontext()
    place = tracer.place.following(net.module)
    # A text model is cut at its token embedding, and at every module that shares its weight.
    with torch.enable_grad(), place, tracer, wide, watch_embeddings(net, tracer.input):
        if net.kind == "text":
            x = batch.x
        else:
            x = tracer.input(batch.x)
        return net.read(net.call(x, batch.mask)).detach()


def fork_random(module: nn.Module) -> AbstractContextManager[None]:
    """Restore the state of the random generators when the block ends."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(devices=list(devices))


def watch_embeddings(
    net: Net, change: Callable[[Tensor], Tensor | None]
) -> AbstractContextManager[None]:
    """Pass the outputs of a text model's token embedding through `change` (None keeps them).

    The outputs of every embedding that shares its weight pass through it, too.
    """
    tied: list[tuple[str, nn.Module]] = []
    if net.kind == "text" and net.entry is not None:
        table = getattr(net.entry, "weight", None)
        for part in net.module.modules():
            if isinstance(part, nn.Embedding) and part.weight is table:
                tied.append(("", part))
        if not tied:
            tied = [("", net.entry)]
    return watch_modules(tied, lambda _name, _args, out: change(out))
