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
from lipaudit.models.derivative.positions import (
    at_columns,
    embedding,
    has_head,
    hidden_states,
    next_token,
    places,
    require_head,
    text_loss,
)
from lipaudit.models.net import Net, NextToken
from lipaudit.settings.measure import PLACED, StartPoint, Target


@dataclass(frozen=True)
class SampleFunction:
    """f at the samples of a batch.

    Attributes:
        f: (z, index) -> output, on any samples of the batch.
        x: the points, (batch, *in).
        start: where they lie: pixels, tokens or embeddings.
        target: what f returns, as it is typed: `logits`, `logits:last`; or `scores`.
    """

    f: Function
    x: Tensor
    start: str
    target: str


Forward = Callable[[], Any]


@dataclass(frozen=True)
class _Ends:
    """Where f ends.

    Attributes:
        net: the model.
        labels: of the samples, if any.
        place: the column of every sample that is asked for, if one is.
        scorer: how it scores the next token, if that is what its logits are.
    """

    net: Net
    labels: Tensor | None
    place: Tensor | None
    scorer: NextToken | None


def end_of(net: Net, batch: Batch, target: str | None) -> Target:
    """Return what the Jacobian of a model is of, with the position where there is one.

    By default the logits, of a causal language model those of the token behind the last one; of a
    model without either, the features.

    Raises:
        InputError: the model has no such end.
    """
    speaks = net.classes is None and net.next_token is not None
    if speaks and target is None:
        speaks = has_head(net, batch)
    scores = net.classes is not None or speaks
    what, where = Target.parse(target or ("logits" if scores else "features"))
    name = net.info.architecture
    if what in ("logits", "probabilities", "loss") and not scores:
        raise InputError(
            f"{name} has no class scores and no next token",
            f"Use --to features or --to tokens{', or --to hidden' * (net.kind == 'text')}.",
        )
    if where and what != "hidden" and not speaks:
        reads = net.kind == "text" and not net.scored
        raise InputError(
            f"the {what} of {name} are of classes: they have no position",
            f"Use --to {what}{f', or --to hidden:{where}' if reads else ''}.",
        )
    if net.scored and what in ("hidden", "features", "tokens"):
        raise InputError(
            f"a prompt of {name} has other {what} with each of its continuations",
            "Leave --score out, or use --to logits, which are the scores.",
        )
    if what == "hidden" and net.kind != "text":
        raise InputError(f"{name} takes no text: its tokens have no position", "Use --to tokens.")
    placed = what == "hidden" or (speaks and what in PLACED)
    return Target(what, (where or "last") if placed else "")


def sample_function(
    net: Net,
    batch: Batch,
    *,
    start: StartPoint | None,
    target: str | None,
    place: Tensor | None = None,
) -> SampleFunction:
    """Return the function from `start` to `target` at the samples of a batch.

    By default from the attacked space (pixels of images, embeddings of text) to what `end_of`
    says. The loss of a classifier is the cross-entropy with the label, with the predicted class
    where there is none; that of a language model is `text_loss`.

    Args:
        net: the model.
        batch: the samples.
        start: pixels or embeddings.
        target: one of `ENDS`, of texts perhaps at a position.
        place: the column of each sample that is meant, in place of the position of `target`.

    Raises:
        InputError: the model has no such place, or a text no such position.
    """
    embedded = net.kind == "text" or start == "embeddings"
    name = "embeddings" if embedded else {"image": "pixels"}.get(net.kind, net.kind)
    end = end_of(net, batch, target)
    _require_start(net, start, embedded)
    if place is None and end.where:
        place = _only_place(batch, end)
    scorer = require_head(net, batch) if net.classes is None and _needs_head(net, end) else None
    ends, read = _Ends(net, batch.y, place, scorer), _READERS[end.what]

    def f(z: Tensor, index: Tensor) -> Tensor:
        part = batch.unnamed(index)
        forward = _from_embedding if embedded else _from_input
        # What is read inside of a model that is spread over devices lies on any of them.
        return read(ends, part, index, lambda: forward(net, z, part)).to(z.device)

    if not embedded:
        x = batch.x.detach()
    elif scorer is None:
        x = net.embedding(batch)
    else:
        x = embedding(net, scorer, batch)
    scores = bool(net.scored) and end.what == "logits"
    return SampleFunction(f, x, name, "scores" if scores else end.text)


def _needs_head(net: Net, end: Target) -> bool:
    return net.next_token is not None and end.what not in ("features", "tokens")


def _only_place(batch: Batch, end: Target) -> Tensor:
    column = places(batch, end.where)
    if column.shape[1] != 1 or bool((column < 0).any()):
        raise InputError(
            f"--to {end.text} is not one position of every text",
            f"Measure at a position that all have: --to {end.what}:last.",
        )
    return column[:, 0]


def _require_start(net: Net, start: str | None, embedded: bool) -> None:
    if start == "pixels" and net.kind == "text":
        raise InputError("text has no pixels", "Use --from embeddings.")
    if embedded and net.entry is None:
        raise InputError(
            f"the embedding module of {net.info.architecture} was not found",
            "Use --from pixels, or name it in a py: factory: ModelSpec(..., entry=MODULE).",
        )


def _from_input(net: Net, z: Tensor, part: Batch) -> Any:
    return net.call(z, part.mask)


def _from_embedding(net: Net, z: Tensor, part: Batch) -> Any:
    with net.embedded(z):
        return net.call(part.x, part.mask)


def _logits(ends: _Ends, part: Batch, index: Tensor, forward: Forward) -> Tensor:
    if ends.scorer is None or ends.place is None:
        return ends.net.read(forward())
    return next_token(ends.scorer, ends.place[index], forward)


def _probabilities(ends: _Ends, part: Batch, index: Tensor, forward: Forward) -> Tensor:
    return torch.softmax(_logits(ends, part, index, forward), -1)


def _loss(ends: _Ends, part: Batch, index: Tensor, forward: Forward) -> Tensor:
    if ends.scorer is not None:
        return text_loss(ends.net, ends.scorer, part, forward)
    logits = ends.net.read(forward())
    predicted = logits.detach().argmax(1)  # no choice that the model makes
    own = predicted if ends.labels is None else ends.labels[index]
    own = own.where(own >= 0, predicted)
    return torch.nn.functional.cross_entropy(logits, own, reduction="none")[:, None]


def _hidden(ends: _Ends, part: Batch, index: Tensor, forward: Forward) -> Tensor:
    """Read what enters the head of a language model, else the last layer norm over tokens."""
    if ends.scorer is None:
        states = _tokens(ends, part, index, forward)
    else:
        states = hidden_states(ends.scorer, forward)
    if states.shape[:2] != part.x.shape:
        raise InputError(
            f"the last hidden states of {ends.net.info.architecture} are not one for each token",
            "Use --to tokens or --to features.",
        )
    return states if ends.place is None else at_columns(states, ends.place[index])


def _features(ends: _Ends, part: Batch, index: Tensor, forward: Forward) -> Tensor:
    """Read what enters the last linear layer of a classifier, or a headless model's output."""
    if ends.net.classes is None:
        return ends.net.read(forward())
    with _linear_inputs(ends.net.module) as seen:
        forward()
    return seen[-1]


def _tokens(ends: _Ends, part: Batch, index: Tensor, forward: Forward) -> Tensor:
    """Read the output of the last layer norm over tokens; padded tokens are left out as zeros."""
    with _norm_outputs(ends.net.module) as seen:
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
    with _hook_modules(
        module, lambda m: isinstance(m, nn.Linear), lambda args, _: args[0]
    ) as seen:
        yield seen


@contextmanager
def _norm_outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs of the layer norms while the block runs."""
    with _hook_modules(module, lambda m: "Norm" in type(m).__name__, lambda _, out: out) as seen:
        yield seen


@contextmanager
def _hook_modules(
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


_READERS: dict[str, Callable[[_Ends, Batch, Tensor, Forward], Tensor]] = {
    "logits": _logits,
    "probabilities": _probabilities,
    "loss": _loss,
    "hidden": _hidden,
    "features": _features,
    "tokens": _tokens,
}
