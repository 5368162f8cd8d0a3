"""Check a layer: compare its closed form with autograd through the model's operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lipaudit.models.attention.observe.calls import AttentionCall
from lipaudit.models.attention.project.projections import Projected
from lipaudit.models.graph import pull_back
from lipaudit.models.requirements import AGREES
from lipaudit.theory.condition import forward_error
from lipaudit.theory.exact.head_norms import sketched_vjp_x
from lipaudit.theory.heads import Heads

HOPELESS = 0.1
"""If rounding changes J by more than this, the closed form cannot be checked against autograd."""
SKETCH = 16  # number of directions in an input's channels in which gradients are compared


def matches_autograd(heads: Heads, parts: Mapping[str, Projected], call: AttentionCall) -> bool:
    """Compare the closed form of J^T u with autograd on every measured sample.

    u is random, scaled in each head and row of the batch such that ||J^T u|| = 1. Gradients of
    different rows and heads cancel only by chance, so the norm of the whole difference is at least
    about the relative error of any head on any sample. Rounding errors of all heads add up, so the
    u of a head is reduced by what `forward_error` allows it. Gradients are compared in some random
    directions of the channels. The cost is one backward pass through the attention and about as
    much for the closed form: together 1.3 forward passes of a ViT.

    Args:
        heads: the heads of the layer.
        parts: its q, k and v.
        call: the attention call with canonical axes.
    """
    generator = torch.Generator(call.output.device).manual_seed(0)
    # The same u in every run: whether a layer has a closed form must not be a matter of chance.
    u = torch.randn(
        call.output.shape, generator=generator, dtype=heads.q.dtype, device=call.output.device
    )
    if heads.valid is not None:
        u = u * heads.valid[:, None, :, None]
    queries, memory = [parts["q"]] if "q" in parts else [], [parts["k"], parts["v"]]
    sketches = {"x": _draw_sketch(heads.x), "x_kv": _draw_sketch(memory[0].x)}
    most = 1 / (1 + forward_error(heads).to(u) / AGREES)
    u, pulled = sketched_vjp_x(heads, u, most, sketches)
    u = u.to(call.output)
    # Gradients are compared at the inputs of the linear maps, where both are exact.
    readers = {"x": queries, "x_kv": memory}
    closed = [(readers[name][0], z) for name, z in pulled.items()]
    made = [{id(y) for part in side for y in part.outputs} for side in (queries, memory)]
    one = heads.x_kv is None or bool(made[0] & made[1])
    apart = []
    for group in [queries + memory] if one or not queries else [queries, memory]:
        # R^T J^T u through the graph, for what the linear maps read, a token per row.
        leaves = {id(leaf.tensor): leaf for part in group for leaf in part.leaves}.values()
        linears = [leaf.origin.linear for leaf in leaves if leaf.origin.linear is not None]
        gradients = pull_back(call.output, [leaf.tensor for leaf in leaves], u)
        sketch, each = _draw_sketch(group[0].x), zip(linears, gradients, strict=True)
        true = torch.stack([li.outputs(g) @ (li.weight.T @ sketch) for li, g in each]).sum(0)
        read = [_scatter(p, z) for p, z in closed if any(p is part for part in group)]
        apart.append(torch.linalg.vector_norm(true - torch.stack(read).sum(0)))
    return bool(torch.stack(apart).norm() <= AGREES)


def _draw_sketch(x: Tensor) -> Tensor:
    """Return random directions R of the channels of an input, with E ||R^T g||^2 = ||g||^2.

    Summed over tokens that is the norm of the whole gradient to some per cent.
    """
    width = x.shape[-1]
    if width <= SKETCH:
        return torch.eye(width, dtype=x.dtype, device=x.device)
    generator = torch.Generator(x.device).manual_seed(width)
    noise = torch.randn(width, SKETCH, generator=generator, dtype=x.dtype, device=x.device)
    return noise / SKETCH**0.5


def _scatter(part: Projected, dx: Tensor) -> Tensor:
    """Return the same for the closed form, whose tokens are those of the attention."""
    inputs, index = part.linear.inputs, part.index
    rows = index.rows(len(inputs) // index.length).flatten()
    whole = dx.new_zeros(len(inputs), dx.shape[-1])
    return whole.index_add_(0, rows, dx.flatten(0, 1))
