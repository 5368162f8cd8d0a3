"""The residual connections around attention layers, and their exact norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from lipaudit.data.batch import Batch
from lipaudit.models.attention.observe.calls import Address, AttentionCall
from lipaudit.models.attention.observe.trace import Tracer, freeze, run_observed
from lipaudit.models.attention.sites import Site
from lipaudit.models.derivative.linearize import linearize
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
    stack: list[_Running] = []
    around: dict[Address, list[_Running]] = {}  # the module calls around an attention call

    def enter(name: str, call: int, _module: nn.Module, given: Any) -> None:
        stack.append(_Running(name, call, _find_first_moving(given)))

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        here, end = stack.pop(), _find_first_moving(output)
        if here.input is None or end is None:
            return
        (i, x), (j, y) = here.input, end
        # The output depends on the input although the graph is cut: a skip path.
        if x.shape == y.shape and x.grad_fn is not None and leaves(y, {x.grad_fn})[1]:
            here.residual = Residual(here.module, here.call, i, j)

    def attention(_call: AttentionCall, address: Address) -> None:
        around[address] = stack[::-1]  # innermost first

    module = net.module
    with freeze(module), _watch_entries(module, enter), ExitStack() as hooks:
        for part in module.modules():  # also after an error
            hooks.enter_context(part.register_forward_hook(leave, always_call=True))
        run_observed(net, batch[:1], Tracer(attention))
    found = [[call.residual for call in around.get(site.address, ())] for site in sites]
    return tuple(next(filter(None, residuals), None) for residuals in found)


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
    module, mask = net.module, batch.mask
    wanted = {(residual.module, residual.call): residual for residual in residuals}
    calls: dict[Residual, _Call] = {}

    def keep(name: str, number: int, part: nn.Module, given: Any) -> None:
        residual = wanted.get((name, number))
        if residual is not None:  # copies, before the call can change its arguments
            copies = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, given)
            calls[residual] = _Call(residual, part, *tree_flatten(copies), mask)

    watched = _watch_entries(module, keep)
    with freeze(module), exact_arithmetic(net.device), torch.no_grad(), watched:
        net.output(batch)
    for residual in dict.fromkeys(residuals):
        call = calls.pop(residual)
        with freeze(module):
            norms = compute_jacobian_norms(
                linearize(call.at, call.x),
                seeds=seeds,
                tol=tol,
                max_steps=max_steps,
                within=within,
            )
        yield residual, norms


@dataclass
class _Running:
    """A module call, in progress or finished."""

    module: str
    call: int
    input: tuple[int, Tensor] | None
    residual: Residual | None = None


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
    mask: Tensor | None

    @property
    def x(self) -> Tensor:
        """Return its input."""
        return self.given[self.residual.input]

    def at(self, z: Tensor, index: Tensor) -> Tensor:
        """Run the module on some of the samples, with z as its input.

        Returns zeros at padded tokens, which affect nothing else.
        """
        # Rows of per-sample arguments; masks and positions may be shared.
        given = [
            v[index] if isinstance(v, Tensor) and v.ndim and len(v) == len(self.x) else v
            for v in self.given
        ]
        given[self.residual.input] = z
        args, kwargs = tree_unflatten(given, self.spec)
        output: Tensor = tree_flatten(self.module(*args, **kwargs))[0][self.residual.output]
        if self.mask is None or self.x.shape[:2] != self.mask.shape:
            return output
        return output * self.mask[index, :, None]


@contextmanager
def _watch_entries(
    module: nn.Module, notify: Callable[[str, int, nn.Module, Any], None]
) -> Iterator[None]:
    """Call notify(path, number of the call, module, (args, kwargs)) at the start of each call."""
    calls: Counter[str] = Counter()

    def enter(name: str, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        calls[name] += 1
        notify(name, calls[name] - 1, part, (args, kwargs))

    with ExitStack() as hooks:
        for name, part in module.named_modules():
            hook = part.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
            hooks.enter_context(hook)
        yield
