"""The residual blocks around attention layers, and the exact norm of each from input to output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from lipaudit.data.batch import Batch
from lipaudit.models.attention.capture import run
from lipaudit.models.attention.observe.events import AttentionCall
from lipaudit.models.attention.observe.trace import Address, Tracer, undisturbed
from lipaudit.models.attention.sites import Site
from lipaudit.models.derivative.linearize import Map, linearize
from lipaudit.models.derivative.model_norms import JacobianNorms, jacobian_norms
from lipaudit.models.graph import leaves
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.theory.accuracy import WITHIN


class Block(NamedTuple):
    """A call of a module that adds what its attention gives to its own input.

    Attributes:
        module: its path.
        call: which of its calls in a forward pass (layers may share a module).
        input: the position of the input among all that it is called with, containers flattened.
        output: likewise among all that it returns.
    """

    module: str
    call: int
    input: int
    output: int


def attention_blocks(net: Net, batch: Batch, sites: Sequence[Site]) -> tuple[Block | None, ...]:
    """Find the block of every attention layer: the smallest module around it with a skip path.

    In a pass that is cut at every linear map and every attention, the output of a module still
    leads back to its input only where something bypasses both. The block of a pre-norm model holds
    attention and MLP, that of BERT the attention with its LayerNorm.

    Returns:
        One block per site; None where no module around it has a skip path.
    """
    seen = _SkipPaths()
    module = net.module
    with undisturbed(module), _entered(module, seen.enter), _left(module, seen.leave):
        run(net, batch[:1], Tracer(seen.attention))
    return tuple(seen.block(site.address) for site in sites)


def block_norms(
    net: Net,
    batch: Batch,
    blocks: Sequence[Block],
    *,
    seeds: Sequence[int] | None = None,
    tol: float = 1e-4,
    max_steps: int = 300,
    within: float = WITHIN,
) -> Iterator[tuple[Block, JacobianNorms]]:
    """Yield ||d output / d input|| of each block per sample, at the inputs it has in the model.

    Padded tokens are neither input nor output.

    Args:
        net: the model.
        batch: the samples.
        blocks: from `attention_blocks`.
        seeds: of the start vectors, one per sample.
        tol: relative accuracy of the norms, estimated.
        max_steps: most products per sample.
        within: how far `upper` may lie above a norm, relatively: what is proven.

    Raises:
        InputError, EvaluationError: as `linearize`, on a block.
    """
    module = net.module
    with (
        undisturbed(module),
        exact_arithmetic(net.device),
        torch.no_grad(),
        _recording(module, blocks) as calls,
    ):
        net.output(batch)
    for block in dict.fromkeys(blocks):
        call = calls.pop(block)
        with undisturbed(module):
            linear = linearize(call.without_padding(batch.mask), call.x)
            how: dict[str, Any] = {"tol": tol, "max_steps": max_steps, "within": within}
            norms = jacobian_norms(linear, seeds=seeds, **how)
        yield block, norms


@dataclass
class _Open:
    """A module call that is under way, or was."""

    module: str
    call: int
    input: tuple[int, Tensor] | None
    block: Block | None = None


@dataclass
class _SkipPaths:
    """Which module calls let something past every linear map inside them."""

    stack: list[_Open] = field(default_factory=list)
    around: dict[Address, list[_Open]] = field(default_factory=dict)

    def attention(self, _call: AttentionCall, address: Address) -> None:
        """Remember which module calls hold an attention call, the innermost first."""
        self.around[address] = self.stack[::-1]

    def block(self, address: Address) -> Block | None:
        """Return the smallest of them with a skip path."""
        found = (o.block for o in self.around.get(address, ()))
        return next((block for block in found if block is not None), None)

    def enter(self, module: str, call: int, _module: nn.Module, given: Any) -> None:
        """Note where a module call starts."""
        self.stack.append(_Open(module, call, _first_moving(given)))

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """See whether the output of a module call leads back to its input."""
        here, end = self.stack.pop(), _first_moving(output)
        if here.input is None or end is None:
            return
        (i, x), (j, y) = here.input, end
        if x.shape == y.shape and x.grad_fn is not None and leaves(y, {x.grad_fn})[1]:
            here.block = Block(here.module, here.call, i, j)


def _first_moving(values: Any) -> tuple[int, Tensor] | None:
    """Return the first tensor that depends on the model's input, and its position."""
    for i, value in enumerate(tree_flatten(values)[0]):
        if isinstance(value, Tensor) and value.requires_grad:
            return i, value
    return None


@dataclass
class _Call:
    """A recorded call of a block on a batch."""

    block: Block
    module: nn.Module
    given: list[Any]
    spec: TreeSpec

    @property
    def x(self) -> Tensor:
        """The block's input."""
        return self.given[self.block.input]

    def at(self, z: Tensor, index: Tensor) -> Tensor:
        """Run the module on some of the samples, with z as its input."""
        given = [self._part(value, index) for value in self.given]
        given[self.block.input] = z
        args, kwargs = tree_unflatten(given, self.spec)
        return tree_flatten(self.module(*args, **kwargs))[0][self.block.output]

    def without_padding(self, mask: Tensor | None) -> Map:
        """`at` with 0 in place of what padded tokens give; nothing else depends on them."""
        if mask is None or self.x.shape[:2] != mask.shape:
            return self.at
        return lambda z, index: self.at(z, index) * mask[index, :, None]

    def _part(self, value: Any, index: Tensor) -> Any:
        """The rows of what is given per sample: masks and positions may be shared by all."""
        shared = not isinstance(value, Tensor) or value.ndim == 0 or len(value) != len(self.x)
        return value if shared else value[index]


@contextmanager
def _recording(module: nn.Module, blocks: Sequence[Block]) -> Iterator[dict[Block, _Call]]:
    """Keep what the wanted module calls are given, as it is before they can change it."""
    wanted, found = {(block.module, block.call): block for block in blocks}, dict[Block, _Call]()

    def keep(name: str, call: int, part: nn.Module, given: Any) -> None:
        block = wanted.get((name, call))
        if block is not None:
            copies = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, given)
            found[block] = _Call(block, part, *tree_flatten(copies))

    with _entered(module, keep):
        yield found


@contextmanager
def _entered(
    module: nn.Module, notify: Callable[[str, int, nn.Module, Any], None]
) -> Iterator[None]:
    """Call notify(path, number of the call, module, (args, kwargs)) whenever one starts."""
    calls: Counter[str] = Counter()

    def watch(name: str) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
        def enter(part: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            calls[name] += 1
            notify(name, calls[name] - 1, part, (args, kwargs))

        return enter

    with ExitStack() as hooks:
        for name, part in module.named_modules():
            hook = part.register_forward_pre_hook(watch(name), with_kwargs=True)
            hooks.callback(hook.remove)
        yield


@contextmanager
def _left(module: nn.Module, notify: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
    """Call notify(module, args, output) whenever a module call ends, by an error too."""
    with ExitStack() as hooks:
        for part in module.modules():
            hook = part.register_forward_hook(notify, always_call=True)
            hooks.callback(hook.remove)
        yield
