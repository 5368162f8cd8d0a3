"""The truth, from dense float64 Jacobians by autograd through the model's own modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.reference.watching import Attention, Watch, variables
from lipaudit.data.batch import Batch
from lipaudit.models.attention.calls import AxisLayout
from lipaudit.models.net import Net

CHUNK = 128
LARGEST = 6e7
"""Most numbers in a dense Jacobian: half a gigabyte."""


MOST_ROWS = 6000
"""Rows of the Jacobians of a layer's heads that are computed; the other heads are left out."""


MOST_JOINED = 2500
"""Rows of the Jacobian of all heads together, where it is computed."""
SMALL = 300
"""Rows of a matrix whose eigenvalues are all computed."""


class TooLarge(Exception):
    """A dense Jacobian would not fit."""


@dataclass(frozen=True)
class LayerTruth:
    """One layer on one sample.

    Attributes:
        heads: norm of every head's Jacobian; NaN of those that were left out for cost.
        joined: norm with the heads concatenated, or NaN.
        statistics: of P, per head, by the names of the measure `attention`.
    """

    heads: Tensor
    joined: float
    statistics: dict[str, Tensor]


def jacobian(output: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Return the dense Jacobian, (numbers of output, numbers of all inputs)."""
    rows, columns = output.numel(), sum(t.numel() for t in inputs)
    if rows * max(rows, columns) > LARGEST:
        raise TooLarge(f"{rows} x {columns}")
    eye = torch.eye(rows, dtype=output.dtype).view(rows, *output.shape)
    try:
        parts = [_batched(output, inputs, eye[i : i + CHUNK]) for i in range(0, rows, CHUNK)]
        found = torch.cat(parts)
    except RuntimeError:  # an op that vmap does not know
        return _row_by_row(output, inputs, eye)
    # vmap is not always right: one plain backward pass has the last word.
    u = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=output.dtype)
    plain = _row_by_row(output, inputs, u[None])[0]
    known = u.flatten().double() @ found
    right = torch.allclose(known, plain, rtol=1e-6, atol=1e-6 * float(plain.abs().max()))
    return found if right else _row_by_row(output, inputs, eye)


def _batched(output: Tensor, inputs: Sequence[Tensor], rows: Tensor) -> Tensor:
    how: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    return _joined(torch.autograd.grad(output, inputs, rows, is_grads_batched=True, **how), inputs)


def _row_by_row(output: Tensor, inputs: Sequence[Tensor], rows: Tensor) -> Tensor:
    how: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    each = [torch.autograd.grad(output, inputs, row, **how) for row in rows]
    stacked = [None if c[0] is None else torch.stack(c) for c in zip(*each, strict=True)]
    return _joined(stacked, inputs, len(rows))


def _joined(
    found: Sequence[Tensor | None], inputs: Sequence[Tensor], rows: int | None = None
) -> Tensor:
    count = rows or next(len(g) for g in found if g is not None)
    parts = [
        t.new_zeros(count, t.numel()) if g is None else g.flatten(1)
        for g, t in zip(found, inputs, strict=True)
    ]
    return torch.cat(parts, 1).double()


def norm(matrix: Tensor) -> float:
    """Return the spectral norm, from the smaller of the two Gram matrices.

    Of a large one the largest eigenvalue comes by iteration, and a Cholesky factor of
    lambda (1 + 1e-10) I - G proves that there is no larger one.
    """
    gram = matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix
    if len(gram) > SMALL and bool(gram.any()):
        start = torch.randn(len(gram), generator=torch.Generator().manual_seed(0)).double()
        (value,) = eigsh(gram.numpy(), k=1, v0=start.numpy(), return_eigenvectors=False)
        rest = torch.eye(len(gram), dtype=gram.dtype).mul_(float(value) * (1 + 1e-10)).sub_(gram)
        if not torch.linalg.cholesky_ex(rest).info:
            return math.sqrt(value)
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt())


def by_head(t: Tensor, heads: int, layout: AxisLayout) -> Tensor:
    """Bring what the model calls O or P of one sample to (heads, windows * rows, columns)."""
    lead = t.shape[:-2]
    axes = [i for i, size in enumerate(lead) if size == heads and not (i == 0 and len(lead) > 1)]
    if heads == 1 and not axes:
        return t.reshape(1, -1, *t.shape[-2:])
    if not axes:  # several things in one axis
        return layout.arrange(t, 1).transpose(0, 1)
    if len(axes) > 1:
        axes = [i for i in axes if any(factor.role == "head" for factor in layout.leading[i])]
    return t.movedim(axes[0], 0).reshape(heads, -1, *t.shape[-2:])


def run(net: Net, one: Batch, watch: Watch) -> Tensor:
    """Run the model on one sample under observation, from a leaf in the attacked space."""
    with torch.enable_grad(), watch.running(net.module):
        return from_leaf(net, one)[1]


def from_leaf(net: Net, one: Batch) -> tuple[Tensor, Tensor]:
    """Return a leaf in the attacked space, and the output that it leads to."""
    with patch.object(F, "batch_norm", batch_norm):
        return _from_leaf(net, one)


def batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise by plain arithmetic: torch's own backward is wrong for some batches of one."""
    if training or mean is None or var is None:
        return torch.batch_norm(
            x, weight, bias, mean, var, training, momentum, eps, torch.backends.cudnn.enabled
        )
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = (var + eps).rsqrt() if weight is None else weight * (var + eps).rsqrt()
    shift = -mean * scale if bias is None else bias - mean * scale
    return x * scale.view(shape) + shift.view(shape)


def _from_leaf(net: Net, one: Batch) -> tuple[Tensor, Tensor]:
    if net.kind != "text":
        x = one.x.clone().requires_grad_()
        with AllWide() if net.dtype == torch.float64 else nullcontext():
            return x, net.read(net.call(x, one.mask))
    seen: list[Tensor] = []

    def enter(_module: Any, _args: Any, out: Tensor) -> Tensor:
        if not seen:
            seen.append(out.detach().clone().requires_grad_())
            return seen[0].clone()
        return out.detach().clone().requires_grad_()

    assert net.entry is not None
    table = getattr(net.entry, "weight", None)
    tied = [m for m in net.module.modules() if m is net.entry or _shares(m, table)]
    with ExitStack() as hooks:
        for module in tied:
            hooks.callback(module.register_forward_hook(enter).remove)
        if net.dtype == torch.float64:
            hooks.enter_context(AllWide())
        output = net.read(net.call(one.x, one.mask))
    return seen[0], output


def _shares(module: nn.Module, table: Tensor | None) -> bool:
    return isinstance(module, nn.Embedding) and module.weight is table


def whole(net: Net, one: Batch) -> Tensor:
    """Return the dense Jacobian of the whole model at one sample."""
    with torch.enable_grad():
        x, output = from_leaf(net, one)
        return jacobian(output, [x])


def layer_truth(call: Attention, site: Any) -> LayerTruth:
    """Differentiate O of every head in the leaves that it was made from, in any case all."""
    frame = next((f for f in reversed(call.frames) if f.leaves), None)
    own = {id(v): v for v in variables(call.output)}
    inputs = list(own.values()) if frame is None else list(frame.leaves.values())
    o = by_head(call.output.mT if _transposed(call) else call.output, site.heads, site.layout)
    count = min(len(o), max(1, MOST_ROWS // o[0].numel()))
    picked = [i * len(o) // count for i in range(count)]
    rows = [jacobian(o[i], inputs) for i in picked]
    norms = torch.full((len(o),), torch.nan, dtype=torch.float64)
    norms[picked] = torch.tensor([norm(j) for j in rows], dtype=torch.float64)
    joined = norm(torch.cat(rows)) if len(o) == count and o.numel() <= MOST_JOINED else math.nan
    return LayerTruth(norms, joined, statistics(by_head(call.p, site.heads, site.layout)))


def _transposed(call: Attention) -> bool:
    queries = call.p.shape[-2]
    return call.output.shape[-2] != queries and call.output.shape[-1] == queries


def statistics(p: Tensor) -> dict[str, Tensor]:
    """Return what `attention` says of P, (heads, windows, n, m), by its plain definitions."""
    p = p.double()
    seen = p.sum(-1) > 0
    count = seen.flatten(1).sum(1)
    first = p.amax(-1)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
    softmax = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    norms = torch.linalg.eigvalsh(softmax)[..., -1].clamp_min(0) * seen
    return {
        "top1": (first * seen).flatten(1).sum(1) / count,
        "entropy": (entropy * seen).flatten(1).sum(1) / count,
        "softmax_norm": norms.flatten(1).sum(1) / count,
        "softmax_norm_max": norms.flatten(1).amax(1),
        "p_norm": torch.linalg.matrix_norm(p, 2).amax(1),
    }


class AllWide(TorchDispatchMode):
    """Keep a float64 model from computing a part of it in single precision.

    What it asks for in float32, by a cast or a new tensor, it gets in float64.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        made = func(*args, **kwargs)
        constant = func is torch.ops.aten.lift_fresh.default and made.dtype == torch.float32
        return made.double() if constant else made


Truths = dict[int, LayerTruth | str]


def truths(net: Net, one: Batch, sites: Sequence[Any], chosen: Sequence[int]) -> Truths:
    """Return the truth of some layers on one sample, or why there is none."""
    cut = Watch(uncut=frozenset(map_.module for site in sites for map_ in site.inner))
    run(net, one, cut)
    found: Truths = {}
    for index in chosen:
        watch = cut
        if not sites[index].closed_form:
            watch = Watch(cut=False, scopes=frozenset({sites[index].scope}))
            run(net, one, watch)
        try:
            found[index] = layer_truth(_matching(watch, sites, index), sites[index])
        except TooLarge as reason:
            found[index] = str(reason)
    return found


def _matching(watch: Watch, sites: Sequence[Any], index: int) -> Attention:
    module = sites[index].module
    same = [call for call in watch.calls if call.module == module]
    place = sum(site.module == module for site in sites[:index])
    wanted = sum(site.module == module for site in sites)
    if len(same) != wanted:
        raise TooLarge(f"{module} has {len(same)} attention calls, lipaudit says {wanted}")
    return same[place]
