"""Run a model once, cut at its linear maps, and know where in the model each op is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipaudit.models.attention.observe.events import AttentionCall, AttentionMode
from lipaudit.models.attention.observe.linears import Linear
from lipaudit.models.graph import leaves, root

_QUIET = (nn.Identity, nn.Dropout, nn.LayerNorm, nn.GELU)
"""Modules by the dozen in which nothing happens that is looked for."""


class Address(NamedTuple):
    """Which op of a forward pass: the innermost module, the kind of op, its running number there.

    It does not depend on the data: a mixture of experts changes the numbers inside its own
    modules only.
    """

    module: str
    op: str
    number: int


@dataclass(frozen=True)
class Origin:
    """What made a leaf of the cut graph: a linear map, the model's input, or an attention.

    Attributes:
        address: which op it was.
        linear: the linear map.
        root: the tensor whose tokens the linear map reads, see `root`; None in a pass that is not
            the survey's.
    """

    address: Address
    linear: Linear | None = None
    root: object = None

    def reads_same(self, other: Origin) -> bool:
        """Say whether two linear maps of one pass read the same tokens of one tensor.

        That it is one tensor is a matter of the graph, not of values: two layer norms may agree
        today. The values, at a generic point, then tell that the tokens come in the same order.
        """
        if self.linear is None or other.linear is None or self.root is not other.root:
            return False
        x, y = self.linear.inputs, other.linear.inputs
        return self.root is not None and x.shape == y.shape and torch.equal(x, y)


@dataclass
class Frame:
    """A module call that is under way."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attentions: int = 0


@dataclass
class Place:
    """Where the forward pass is: the module calls under way, and how many ops each has seen."""

    frames: list[Frame] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def address(self, op: str) -> Address:
        """Number an op of the innermost module."""
        module = self.module()
        self.counts[module, op] += 1
        return Address(module, op, self.counts[module, op] - 1)

    def module(self) -> str:
        """Return the path of the innermost module."""
        return self.frames[-1].name if self.frames else ""

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Keep `frames` up to date while the model runs."""
        with ExitStack() as hooks:
            for name, part in module.named_modules():
                if isinstance(part, _QUIET):
                    continue
                enter = part.register_forward_pre_hook(self._enter(name), with_kwargs=True)
                leave = part.register_forward_hook(self._leave, always_call=True)
                hooks.callback(enter.remove)
                hooks.callback(leave.remove)
            yield

    def _enter(self, name: str) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
        return lambda module, args, kwargs: self.frames.append(Frame(name, module, args, kwargs))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.frames.pop()


@dataclass(frozen=True)
class Tracer:
    """A forward pass under observation.

    Attributes:
        on_attention: takes each attention call and its address.
        on_linear: takes each linear map of something that depends on the input, and its address.
        wanted: where to cut; None cuts whatever depends on the input.
        inner: linear maps at which the graph is not cut.
        place: where the pass is.
        passed_over: what looked like attention and is not, with the module where it was first.
        chunked: the modules whose P is laid out anew before it meets v.
    """

    on_attention: Callable[[AttentionCall, Address], None]
    on_linear: Callable[[Linear, Address], None] = lambda *_: None
    wanted: frozenset[Address] | None = None
    inner: frozenset[Address] = frozenset()
    place: Place = field(default_factory=Place)
    passed_over: dict[str, str] = field(default_factory=dict)
    chunked: list[str] = field(default_factory=list)

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Observe `module` while the block runs it."""
        mode = AttentionMode(self.attention, self.linear, self.place.module)
        with torch.enable_grad(), self.place.following(module), mode:
            yield
        self.passed_over.update(mode.passed_over)
        self.chunked.extend(mode.chunked)

    def input(self, t: Tensor) -> Tensor:
        """Cut at the model's input."""
        address = self.place.address("input")
        wanted = self.wanted is None or address in self.wanted
        return self._cut(t, Origin(address)) if wanted else t

    def linear(self, linear: Linear, output: Tensor) -> Tensor:
        """Cut at a linear map of something that depends on the input."""
        address = self.place.address("linear")
        kept = linear.weight.requires_grad or address in self.inner
        if kept or not self._wants(address, linear.x):
            return output
        self.on_linear(linear, address)
        bias = None if linear.bias is None else linear.bias.detach()
        constant = Linear(linear.x.detach(), linear.weight.detach(), bias, linear.axis)
        source = root(linear.x) if self.wanted is None else None
        return self._cut(output, Origin(address, constant, source))

    def attention(self, call: AttentionCall) -> Tensor:
        """Report an attention call, and cut after it."""
        address = self.place.address("attention")
        self.on_attention(call, address)
        for frame in self.place.frames:
            frame.attentions += 1
        if self._wants(address, call.output):
            return self._cut(call.output, Origin(address))
        return call.output.detach()

    def _wants(self, address: Address, source: Tensor) -> bool:
        return source.requires_grad if self.wanted is None else address in self.wanted

    def _cut(self, t: Tensor, origin: Origin) -> Tensor:
        """Return t as a leaf that knows its origin: a clone, since the model may write into it."""
        leaf = t.detach().requires_grad_()
        leaf._origin = origin  # type: ignore[attr-defined]
        return leaf.clone()


def origins(t: Tensor) -> list[tuple[Tensor, Origin]]:
    """Return the leaves that t was made from, with what made them.

    A constant for which the model itself asks gradients is none: it depends on nothing.
    """
    made = ((leaf, getattr(leaf, "_origin", None)) for leaf in leaves(t)[0])
    return [(leaf, origin) for leaf, origin in made if origin is not None]


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Run in eval mode with frozen parameters; put flags and random state back afterwards."""
    training = {part: part.training for part in module.modules()}
    parameters = list(module.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            if any(training.values()):
                module.eval()
            for p in trainable:
                p.requires_grad_(False)
            yield
        finally:
            for part, flag in training.items():
                if part.training != flag:
                    part.training = flag
            for p in trainable:
                p.requires_grad_(True)
