"""What a model has to be before any number: a function of each sample, watched or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, InputError
from lipaudit.models.attention.agreement import AGREES, agree
from lipaudit.models.net import Net


def output_rows(net: Net, batch: Batch) -> Tensor:
    """Return the model's output, one row per sample.

    Raises:
        EvaluationError: it is not finite.
        InputError: it has not one row per sample.
    """
    with torch.no_grad():
        output = net.output(batch)
    if output.shape[:1] != (len(batch),):
        raise InputError(
            f"{len(batch)} samples give an output of shape {tuple(output.shape)}: the model joins "
            "the samples of a batch",
            "a py: factory may return a ModelSpec whose `call` gives one row per sample",
        )
    if not output.isfinite().all():
        raise EvaluationError(
            "the model's output is not finite",
            "check the weights, and try --dtype float64",
        )
    return output


def require_fixed(net: Net, batch: Batch, output: Tensor) -> None:
    """Check that another pass gives the same output.

    Raises:
        InputError: it does not: the model is random.
    """
    with torch.no_grad():
        again = net.output(batch)
    if not agree(output, again, each=0):
        where = _first_difference(net.module, lambda: net.output(batch), lambda: net.output(batch))
        raise InputError(
            f"the model is randomised: two passes over the same samples differ, first in {where}",
            "switch the noise or the dropout off; sensitivity is defined for a fixed function",
        )


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
            # A copy: some models scale their embeddings in place, and would do so to what is kept.
            seen.append((name, out[:, real].clone()))

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
