"""The function whose Jacobian is taken: from where in the model to where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.models.derivative.linearize import Function
from lipaudit.models.net import Net
from lipaudit.settings.jacobian import EndPoint, StartPoint


@dataclass(frozen=True)
class SampleFunction:
    """f at the samples of a batch.

    Attributes:
        f: (z, index) -> output, on any samples of the batch.
        x: the points, (batch, *in).
        start: where they lie: pixels, tokens or embeddings.
        target: what f returns.
    """

    f: Function
    x: Tensor
    start: str
    target: str


def sample_function(
    net: Net, batch: Batch, *, start: StartPoint | None, target: EndPoint | None
) -> SampleFunction:
    """Return the function from `start` to `target` at the samples of a batch.

    By default from the attacked space (pixels of images, embeddings of text) to the logits, or to
    the features of a model without a head.

    Raises:
        InputError: the model has no such place.
    """
    embedded = net.kind == "text" or start == "embeddings"
    name = "embeddings" if embedded else {"image": "pixels"}.get(net.kind, net.kind)
    wanted = target or ("features" if net.classes is None else "logits")
    _require(net, start, embedded, wanted)
    read = _READERS[wanted]

    def f(z: Tensor, index: Tensor) -> Tensor:
        part = batch.unnamed(index)
        forward = _from_embedding if embedded else _from_input
        return read(net, part, lambda: forward(net, z, part))

    return SampleFunction(f, net.embedding(batch) if embedded else batch.x.detach(), name, wanted)


def _require(net: Net, start: str | None, embedded: bool, target: str) -> None:
    if start == "pixels" and net.kind == "text":
        raise InputError("text has no pixels", "Use --from embeddings.")
    if embedded and net.entry is None:
        raise InputError(
            f"the embedding module of {net.info.architecture} was not found",
            "Use --from pixels, or name it in a py: factory: ModelSpec(..., entry=MODULE).",
        )
    if target in ("logits", "probabilities") and net.classes is None:
        raise InputError(
            f"{net.info.architecture} has no class scores", "Use --to features or --to tokens."
        )


Forward = Callable[[], Any]


def _from_input(net: Net, z: Tensor, part: Batch) -> Any:
    return net.call(z, part.mask)


def _from_embedding(net: Net, z: Tensor, part: Batch) -> Any:
    with net.embedded(z):
        return net.call(part.x, part.mask)


def _logits(net: Net, part: Batch, forward: Forward) -> Tensor:
    return net.read(forward())


def _probabilities(net: Net, part: Batch, forward: Forward) -> Tensor:
    return torch.softmax(net.read(forward()), -1)


def _features(net: Net, part: Batch, forward: Forward) -> Tensor:
    """Read what enters the last linear layer of a classifier, or a headless model's output."""
    if net.classes is None:
        return net.read(forward())
    with _linear_inputs(net.module) as seen:
        forward()
    return seen[-1]


def _tokens(net: Net, part: Batch, forward: Forward) -> Tensor:
    """Read the output of the last layer norm over tokens; padded tokens are left out as zeros."""
    with _norm_outputs(net.module) as seen:
        forward()
    tokens = [t for t in seen if t.ndim == 3]
    if not tokens:
        raise InputError("no token features were found", "Use --to features.")
    if part.mask is None or part.mask.shape != tokens[-1].shape[:2]:
        return tokens[-1]
    return tokens[-1] * part.mask[..., None]


@contextmanager
def _linear_inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of the linear layers while the block runs."""
    with _hooked(module, lambda m: isinstance(m, nn.Linear), lambda args, _: args[0]) as seen:
        yield seen


@contextmanager
def _norm_outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs of the layer norms while the block runs."""
    with _hooked(module, lambda m: "Norm" in type(m).__name__, lambda _, out: out) as seen:
        yield seen


@contextmanager
def _hooked(
    module: nn.Module,
    wanted: Callable[[nn.Module], bool],
    pick: Callable[[tuple[Any, ...], Any], Any],
) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []

    def watch(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.append(pick(args, output))

    hooks = [m.register_forward_hook(watch) for m in module.modules() if wanted(m)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


_READERS: dict[str, Callable[[Net, Batch, Forward], Tensor]] = {
    "logits": _logits,
    "probabilities": _probabilities,
    "features": _features,
    "tokens": _tokens,
}
