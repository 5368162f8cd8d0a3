"""The residual connections around attention layers, and their exact norms."""

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
from lipaudit.models.attention.observe.calls import Address, AttentionCall
from lipaudit.models.attention.observe.trace import Tracer, freeze, run_observed
from lipaudit.models.attention.sites import Site
from lipaudit.models.derivative.linearize import Function, linearize
from lipaudit.models.derivative.model_norms import JacobianNorms, compute_jacobian_norms
from lipaudit.models.graph import leaves
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.theory.policy import TOL, WITHIN


class Residual(NamedTuple):
    """A call of a module that adds the result of its attention to its own input.

    Attributes:
        module: path of the module.
        call: number of the call in a forward pass (layers may share a module).
        input: position of the input among all arguments, with containers flattened.
        output: position of the output among all results, with containers flattened.
    """

    module: str
    call: int
    input: int
    output: int


def find_residuals(net: Net, batch: Batch, sites: Sequence[Site]) -> tuple[Residual | None, ...]:
    """Return the residual of each attention layer: the smallest module with a skip path.

    In a pass that is cut at every linear map and every attention, the output of a module depends
    on its input only if a path bypasses both. In a pre-norm model the residual holds attention and
    MLP, in BERT the attention with its LayerNorm.

    Returns:
        One residual per site; None if no module around it has a skip path.
    """
    seen = _SkipPaths()
    module = net.module
    with freeze(module), _watch_entries(module, seen.enter), _watch_exits(module, seen.leave):
        run_observed(net, batch[:1], Tracer(seen.attention))
    return tuple(seen.residual(site.address) for site in sites)


def compute_residual_norms(
    net: Net,
    batch: Batch,
    residuals: Sequence[Residual],
    *,
    seeds: Sequence[int] | None = None,
    tol: float = TOL,
    max_steps: int = 300,
    within: float = WITHIN,
) -> Iterator[tuple[Residual, JacobianNorms]]:
    """Yield ||d output / d input|| of each residual per sample, at its inputs in the model.

    Padded tokens count neither as input nor as output.

    Args:
        net: the model.
        batch: the samples.
        residuals: from `find_residuals`.
        seeds: seeds of the start vectors, one per sample.
        tol: relative accuracy of the norms, estimated.
        max_steps: largest number of products per sample.
        within: proven relative error: how far `upper` may be above a norm.

    Raises:
        InputError, EvaluationError: as in `linearize`.
    """
    module = net.module
    with (
        freeze(module),
        exact_arithmetic(net.device),
        torch.no_grad(),
        _record_calls(module, residuals) as calls,
    ):
        net.output(batch)
    for residual in dict.fromkeys(residuals):
        call = calls.pop(residual)
        with freeze(module):
            linear = linearize(call.without_padding(batch.mask), call.x)
            how: dict[str, Any] = {"tol": tol, "max_steps": max_steps, "within": within}
            norms = compute_jacobian_norms(linear, seeds=seeds, **how)
        yield residual, norms


@dataclass
class _Running:
    """A module call, in progress or finished."""

    module: str
    call: int
    input: tuple[int, Tensor] | None
    residual: Residual | None = None


@dataclass
class _SkipPaths:
    """The module calls in which a path bypasses every linear map."""

    stack: list[_Running] = field(default_factory=list)
    around: dict[Address, list[_Running]] = field(default_factory=dict)

    def attention(self, _call: AttentionCall, address: Address) -> None:
        """Record which module calls contain an attention call, innermost first."""
        self.around[address] = self.stack[::-1]

    def residual(self, address: Address) -> Residual | None:
        """Return the smallest of these module calls with a skip path."""
        around = (call.residual for call in self.around.get(address, ()))
        return next((residual for residual in around if residual is not None), None)

    def enter(self, module: str, call: int, _module: nn.Module, given: Any) -> None:
        """Record the start of a module call."""
        self.stack.append(_Running(module, call, _find_first_moving(given)))

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Check whether the output of a module call depends on its input."""
        here, end = self.stack.pop(), _find_first_moving(output)
        if here.input is None or end is None:
            return
        (i, x), (j, y) = here.input, end
        if x.shape == y.shape and x.grad_fn is not None and leaves(y, {x.grad_fn})[1]:
            here.residual = Residual(here.module, here.call, i, j)


def _find_first_moving(values: Any) -> tuple[int, Tensor] | None:
    """Return the first tensor that depends on the model's input, and its position."""
    for i, value in enumerate(tree_flatten(values)[0]):
        if isinstance(value, Tensor) and value.requires_grad:
            return i, value
    return None


@dataclass
class _Call:
    """A recorded call of a residual on a batch."""

    residual: Residual
    module: nn.Module
    given: list[Any]
    spec: TreeSpec

    @property
    def x(self) -> Tensor:
        """Return its input."""
        return self.given[self.residual.input]

    def at(self, z: Tensor, index: Tensor) -> Tensor:
        """Run the module on some of the samples, with z as its input."""
        given = [self._take_part(value, index) for value in self.given]
        given[self.residual.input] = z
        args, kwargs = tree_unflatten(given, self.spec)
        return tree_flatten(self.module(*args, **kwargs))[0][self.residual.output]

    def without_padding(self, mask: Tensor | None) -> Function:
        """Return `at` with zeros at padded tokens, which affect nothing else."""
        if mask is None or self.x.shape[:2] != mask.shape:
            return self.at
        return lambda z, index: self.at(z, index) * mask[index, :, None]

    def _take_part(self, value: Any, index: Tensor) -> Any:
        """Return the rows of per-sample arguments; masks and positions may be shared."""
        shared = not isinstance(value, Tensor) or value.ndim == 0 or len(value) != len(self.x)
        return value if shared else value[index]


@contextmanager
def _record_calls(
    module: nn.Module, residuals: Sequence[Residual]
) -> Iterator[dict[Residual, _Call]]:
    """Store the arguments of the requested module calls, before the calls can change them."""
    wanted = {(residual.module, residual.call): residual for residual in residuals}
    calls: dict[Residual, _Call] = {}

    def keep(name: str, call: int, part: nn.Module, given: Any) -> None:
        residual = wanted.get((name, call))
        if residual is not None:
            copies = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, given)
            calls[residual] = _Call(residual, part, *tree_flatten(copies))

    with _watch_entries(module, keep):
        yield calls


@contextmanager
def _watch_entries(
    module: nn.Module, notify: Callable[[str, int, nn.Module, Any], None]
) -> Iterator[None]:
    """Call notify(path, number of the call, module, (args, kwargs)) at the start of each call."""
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
def _watch_exits(
    module: nn.Module, notify: Callable[[nn.Module, Any, Any], None]
) -> Iterator[None]:
    """Call notify(module, args, output) at the end of each call, also after an error."""
    with ExitStack() as hooks:
        for part in module.modules():
            hook = part.register_forward_hook(notify, always_call=True)
            hooks.callback(hook.remove)
        yield
