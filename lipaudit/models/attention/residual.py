"""The residual connections around attention layers, and their exact norms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from lipaudit.data.batch import Batch
from lipaudit.models.attention.observe.calls import Address, AttentionCall
from lipaudit.models.attention.observe.trace import (
    CallStack,
    Frame,
    Tracer,
    freeze,
    run_observed,
)
from lipaudit.models.attention.sites import Site
from lipaudit.models.derivative.linearize import linearize
from lipaudit.models.derivative.model_norms import JacobianNorms, compute_jacobian_norms
from lipaudit.models.graph import leaves
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic


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
    found: dict[tuple[str, int], Residual] = {}
    around: dict[Address, list[Frame]] = {}  # the module calls around an attention call

    def leave(frame: Frame, output: Any) -> None:
        start, end = _find_first_moving((frame.args, frame.kwargs)), _find_first_moving(output)
        if start is None or end is None:
            return
        (i, x), (j, y) = start, end
        # The output depends on the input although the graph is cut: a skip path.
        if x.shape == y.shape and x.grad_fn is not None and leaves(y, {x.grad_fn})[1]:
            found[frame.name, frame.number] = Residual(frame.name, frame.number, i, j)

    place = CallStack(on_leave=leave)

    def attention(_call: AttentionCall, address: Address) -> None:
        around[address] = place.frames[::-1]  # innermost first

    with freeze(net.module):
        run_observed(net, batch[:1], Tracer(attention, place=place))
    each = [[found.get((f.name, f.number)) for f in around.get(s.address, ())] for s in sites]
    return tuple(next(filter(None, residuals), None) for residuals in each)


def compute_residual_norms(
    net: Net, batch: Batch, residuals: Sequence[Residual], **how: Any
) -> Iterator[tuple[Residual, JacobianNorms]]:
    """Yield ||d output / d input|| of each residual per sample, at its inputs in the model.

    Padded tokens count neither as input nor as output.

    Args:
        net: the model.
        batch: the samples.
        residuals: from `find_residuals`.
        how: seeds and accuracy, see `compute_jacobian_norms`.

    Raises:
        InputError, EvaluationError: as in `linearize`.
    """
    module, mask = net.module, batch.mask
    wanted = {(residual.module, residual.call): residual for residual in residuals}
    calls: dict[Residual, _Call] = {}

    def keep(frame: Frame) -> None:
        residual = wanted.get((frame.name, frame.number))
        if residual is not None:  # copies, before the call can change its arguments
            given = tree_map(
                lambda v: v.clone() if isinstance(v, Tensor) else v, (frame.args, frame.kwargs)
            )
            calls[residual] = _Call(residual, frame.module, *tree_flatten(given), mask)

    watched = CallStack(on_enter=keep).following(module)
    with freeze(module), exact_arithmetic(net.device), torch.no_grad(), watched:
        net.output(batch)
    for residual in dict.fromkeys(residuals):
        call = calls.pop(residual)
        with freeze(module):
            norms = compute_jacobian_norms(linearize(call.at, call.x), **how)
        yield residual, norms


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
