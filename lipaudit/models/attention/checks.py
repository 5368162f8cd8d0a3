"""Checks that come before any number: is the model a function, and is it what we think it is?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, InputError
from lipaudit.models.attention.observe.events import AttentionCall
from lipaudit.models.attention.project.structure import Projected
from lipaudit.models.graph import vjp
from lipaudit.models.net import Net
from lipaudit.theory.exact.head_norms import vjp_x
from lipaudit.theory.heads import Heads

SAME = 1e-5  # of the largest entry: rounding of float32
AGREES = 1e-4
HOPELESS = 0.1
"""A change of J by rounding beyond which comparing its two forms would say nothing."""
_DEAD = 1e-30  # heads with smaller gradients are zero: float32 ends at 1e-38


def agree(a: Tensor, b: Tensor, tolerance: float = SAME, *, each: int | None = None) -> bool:
    """Compare two tensors, relative to the largest entry of the first.

    With `each`, every slice along that axis by itself: a large head must not hide a small one.
    """
    pairs = ((a, b),) if each is None else zip(a.unbind(each), b.unbind(each), strict=True)
    return all(_largest(x - y) <= tolerance * _largest(x) for x, y in pairs)


def fixed_output(net: Net, batch: Batch) -> Tensor:
    """Return the model's output, once two passes have given the same.

    Raises:
        EvaluationError: it is not finite.
        InputError: it is random, or has not one row per sample.
    """
    with torch.no_grad():
        first, second = net.output(batch), net.output(batch)
    if first.shape[:1] != (len(batch),):
        raise InputError(
            f"{len(batch)} samples give an output of shape {tuple(first.shape)}: the model joins "
            "the samples of a batch",
            "a py: factory may return a ModelSpec whose `call` gives one row per sample",
        )
    if not first.isfinite().all():
        raise EvaluationError(
            "the model's output is not finite",
            "check the weights, and try --dtype float64",
        )
    if not agree(first, second, each=0):
        where = _first_difference(net.module, lambda: net.output(batch), lambda: net.output(batch))
        raise InputError(
            f"the model is randomised: two passes over the same samples differ, first in {where}",
            "switch the noise or the dropout off; sensitivity is defined for a fixed function",
        )
    return first


def require_isolation(net: Net, batch: Batch, other: Batch, output: Tensor) -> None:
    """Check that the first sample's output does not depend on the second sample.

    Raises:
        InputError: it does.
    """
    with torch.no_grad():
        alone = net.output(other)
    if not agree(output[0], alone[0]):
        where = _first_difference(net.module, lambda: net.output(batch), lambda: net.output(other))
        raise InputError(
            f"the output of a sample depends on the other samples of its batch, first in {where}",
            "a model that mixes samples (batch statistics, attention across the batch) has no "
            "per-sample sensitivity",
        )


def require_padding_is_ignored(net: Net, batch: Batch) -> None:
    """Check that the sample with the most padding is the same without it, token by token.

    Every module that gives a vector per token is compared: the model's output may hide it.

    Raises:
        InputError: it is not: its figures would depend on what it is batched with.
    """
    if batch.mask is None or bool(batch.mask.all()):
        return
    i = int(batch.mask.sum(1).argmin())
    padded = batch[i : i + 1]
    assert padded.mask is not None
    alone = replace(padded, x=padded.x[:, padded.mask[0]], mask=None)
    pairs = zip(_token_vectors(net, padded), _token_vectors(net, alone), strict=False)
    for (name, one), (other, true) in pairs:
        if name == other and not agree(true, one, AGREES):
            raise InputError(
                f"what {name} makes of a text depends on its padding",
                "The model reads padded tokens: measure one text at a time, with --batch-size 1.",
            )


def _token_vectors(net: Net, sample: Batch) -> list[tuple[str, Tensor]]:
    """Run one sample; return what each innermost module makes of its real tokens."""
    seen: list[tuple[str, Tensor]] = []
    real = slice(None) if sample.mask is None else sample.mask[0]

    def note(name: str, out: object) -> None:
        if not isinstance(out, Tensor) or out.ndim != 3 or not out.is_floating_point():
            return
        if out.shape[:2] == sample.x.shape[:2]:
            seen.append((name, out[:, real]))

    with ExitStack() as hooks, torch.no_grad():
        for name, part in net.module.named_modules():
            if not any(part.children()):
                hook = part.register_forward_hook(lambda _m, _a, out, name=name: note(name, out))
                hooks.callback(hook.remove)
        net.output(sample)
    return seen


def require_same(captured: Tensor, output: Tensor) -> None:
    """Check that observing the model did not change its output.

    Raises:
        InputError: it did.
    """
    if not agree(output, captured, AGREES, each=0):
        gap = (captured - output).abs().amax() / output.abs().amax()
        raise InputError(
            f"the model's output changes by {gap:.1e} (relative) when it is observed",
            "the model depends on the autograd mode or on how it is called",
        )


def jacobian_agrees(
    heads: Heads, made: dict[str, Projected], call: AttentionCall, lost: Tensor
) -> bool:
    """Compare the closed form of J^T u with a backward pass through the model's own attention.

    u is drawn at random, and scaled in each head so that its share of J^T u has largest entry 1:
    heads with small values or small logits count as much as the others.

    Args:
        heads: the layer.
        made: its q, k and v.
        call: the canonical attention call.
        lost: what rounding may have changed of each head, relative, (heads,): allowed beside
            AGREES, of that head alone.
    """
    generator = torch.Generator(call.output.device).manual_seed(0)
    shape, dtype, device = call.output.shape, call.output.dtype, call.output.device
    u = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    one_by_one = [heads.pick(slice(h, h + 1)) for h in range(u.shape[1])]
    shares = [_closed(head, made, u[:, h : h + 1]) for h, head in enumerate(one_by_one)]
    groups = _by_input(made.values())
    sizes = torch.tensor([[_size(share, parts) for share in shares] for parts in groups])
    # With two inputs one gradient may vanish beside the other, down to rounding.
    sizes = (sizes + SAME / AGREES * sizes.amax(0)).clamp_min(_DEAD).to(u)
    sizes *= 1 + lost.to(u) / AGREES
    return all(
        _apart(heads, made, call.output, parts, u / size[:, None, None]) <= AGREES
        for parts, size in zip(groups, sizes, strict=True)
    )


def _closed(heads: Heads, made: dict[str, Projected], u: Tensor) -> list[tuple[Projected, Tensor]]:
    """J^T u by the closed form: what reads each input, and its gradient."""
    dx, dx_kv = vjp_x(heads, u)
    closed = [(made["q"], dx)] if "q" in made else []
    return closed if dx_kv is None else [*closed, (made["k"], dx_kv)]


def _size(closed: list[tuple[Projected, Tensor]], group: list[Projected]) -> float:
    return max((_largest(d) for part, d in closed if _same(part, group[0])), default=0.0)


def _apart(
    heads: Heads, made: dict[str, Projected], output: Tensor, group: list[Projected], u: Tensor
) -> float:
    """Return how far the closed form is from autograd in what a group of linear maps reads."""
    samples = int(heads.sample[-1]) + 1
    true = [_pulled(part, output, u) for part in group]
    closed = _closed(heads, made, u)
    mine = [_scattered(part, d, samples) for part, d in closed if _same(part, group[0])]
    return _largest(torch.stack(true).sum(0) - torch.stack(mine).sum(0))


def _largest(t: Tensor) -> float:
    return float(t.abs().amax())


def _by_input(made: Iterable[Projected]) -> list[list[Projected]]:
    """Group the linear maps, each once, by what they read."""
    groups: list[list[Projected]] = []
    for part in {id(part.leaf): part for part in made}.values():
        group = next((group for group in groups if _same(group[0], part)), None)
        if group is None:
            groups.append([part])
        else:
            group.append(part)
    return groups


def _same(a: Projected, b: Projected) -> bool:
    return a.leaf is b.leaf or a.origin.reads_same(b.origin)


def _pulled(part: Projected, output: Tensor, u: Tensor) -> Tensor:
    """J^T u through the graph, for the input of one linear map, one token per row."""
    pulled = vjp(output, part.leaf, u)
    assert pulled is not None
    return part.linear.outputs(pulled) @ part.linear.weight.T


def _scattered(part: Projected, dx: Tensor, samples: int) -> Tensor:
    """The same of the closed form, whose tokens are those of the attention."""
    index = part.rows.index(samples).flatten()
    return torch.zeros_like(part.linear.inputs).index_add_(0, index, dx.flatten(0, 1))


def _first_difference(
    module: nn.Module, first: Callable[[], object], second: Callable[[], object]
) -> str:
    """Name the first module whose output for the first sample differs between two passes."""
    pairs = zip(_outputs(module, first), _outputs(module, second), strict=False)
    names = (name for (name, x), (_, y) in pairs if x.shape != y.shape or not agree(x, y))
    return next(names, "the model's own code")


def _outputs(module: nn.Module, forward: Callable[[], object]) -> list[tuple[str, Tensor]]:
    """Run a model on two samples; return what each innermost module gives for the first."""
    seen: list[tuple[str, Tensor]] = []

    def note(name: str, out: object) -> None:
        if isinstance(out, Tensor) and out.ndim and out.is_floating_point():
            seen.append((name, out[: len(out) // 2]))

    with ExitStack() as hooks, torch.no_grad():
        for name, part in module.named_modules():
            if not any(part.children()):
                hook = part.register_forward_hook(lambda _m, _a, out, name=name: note(name, out))
                hooks.callback(hook.remove)
        forward()
    return seen
