"""Language models that score continuations: each score acts as the logit of a class."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.data.samples import Task, remark
from lipaudit.errors import InputError
from lipaudit.models.lifting import lifting
from lipaudit.models.net import Net
from lipaudit.models.precision import eager, exact_arithmetic
from lipaudit.models.requirements import agree

Score = Literal["sum", "mean"]
PER = {"sum": "summed over their tokens", "mean": "the mean of their tokens"}
AGREES = 1e-3
"""Largest accepted relative difference between two ways to run a model; far above rounding."""
TRIED = 6
"""Number of tokens used for that comparison."""


def score_continuations(net: Net, task: Task, how: Score) -> Net:
    """Return a language model as a classifier of the possible continuations of a prompt.

    A score is log p(continuation | prompt): the sum, or the mean, over its tokens t of log p(t |
    tokens before t). A single continuation gets a rival: the same continuation with its weakest
    token (the one least ahead of the likeliest other token) replaced by that other token. The
    continuation is ahead of its rival exactly if greedy decoding gives all of its tokens.

    Samples are packed (see `data.continuations.pack`). The attacked space is the embeddings of the
    prompt; the embeddings of the continuation do not change.

    Raises:
        InputError: the logits of a token depend on more than the embeddings up to that token.
    """
    _require_causal(net)
    alone = task.kind == "continuation"
    count = 1 if alone else len(task.classes)

    def call(x: Tensor, mask: Tensor | None) -> Tensor:
        given = _run_rows(net, _unpack_rows(x, mask, net.vocabulary or 0, count))
        scores = given.scores(how)
        if alone:
            return torch.stack([scores, scores - given.ahead(how)], 1)
        return scores.view(-1, count)

    of = {
        "continuation": "each continuation and of a rival (the continuation with its least "
        "likely token replaced)",
        "choices": "the choices behind each prompt",
        "labels": f"the names of the classes behind each prompt ({', '.join(task.classes)})",
    }
    note = remark("scores", f"scores are log-likelihoods, {PER[how]}, of {of[task.kind]}")
    return replace(
        net,
        info=replace(net.info, labels=task.classes, notes=(*net.info.notes, note)),
        call=lifting(call),
        read=lambda scores: scores,
        classes=len(task.classes),
        scored=task.kind,
    )


@dataclass(frozen=True)
class _Rows:
    """Unpacked samples: one row of the model for each continuation.

    Attributes:
        ids: token ids of the samples, (batch, tokens).
        prompt: mask of the prompt's tokens, (batch, tokens).
        order: index in the sample of each row's tokens, (batch, rows, length).
        follows: mask of the continuation's tokens, (batch, rows, length); tokens after them are
            not seen by the continuation.
    """

    ids: Tensor
    prompt: Tensor
    order: Tensor
    follows: Tensor


def _unpack_rows(x: Tensor, mask: Tensor | None, vocabulary: int, count: int) -> _Rows:
    """Unpack samples: each row has the prompt and one of its continuations."""
    part = x // vocabulary if mask is None else (x // vocabulary).masked_fill(~mask, -1)
    each = torch.arange(1, count + 1, device=x.device)[:, None]
    wanted = (part[:, None] == 0) | (part[:, None] == each)
    length = int(wanted.sum(2).max())
    order = wanted.int().argsort(dim=2, descending=True, stable=True)[..., :length]
    follows = (part[:, None] == each).gather(2, order)
    return _Rows(x % vocabulary, part == 0, order, follows)


@dataclass(frozen=True)
class _Given:
    """The model's probabilities at the tokens of continuations.

    Attributes:
        logs: log p of every token of the vocabulary, (tokens, vocabulary).
        tokens: ids of the continuations' tokens, (tokens, 1).
        where: mask of their places, a row for each continuation, (rows, length).
    """

    logs: Tensor
    tokens: Tensor
    where: Tensor

    def scores(self, how: Score) -> Tensor:
        """Return log p of each continuation, or its mean per token, (rows,)."""
        own = self._spread_values(self.logs.gather(1, self.tokens)[:, 0], 0.0)
        return own.sum(1) / self._find_divisor(how)

    def ahead(self, how: Score) -> Tensor:
        """Return how far each continuation is ahead of its rival, on the same scale, (rows,)."""
        own = self.logs.gather(1, self.tokens)[:, 0]
        other = self.logs.scatter(1, self.tokens, -math.inf).amax(1)
        return self._spread_values(own - other, math.inf).amin(1) / self._find_divisor(how)

    def _find_divisor(self, how: Score) -> Tensor | int:
        return 1 if how == "sum" else self.where.sum(1)

    def _spread_values(self, values: Tensor, elsewhere: float) -> Tensor:
        full = values.new_full(self.where.shape, elsewhere)
        return full.index_put((self.where,), values)


def _run_rows(net: Net, rows: _Rows) -> _Given:
    """Run a model on prompts with continuations; return the latter's token probabilities."""
    assert net.next_logits is not None
    z = _embed_rows(net, rows)
    follows = rows.follows.flatten(0, 1)
    first = int(follows.int().argmax(1).min()) - 1
    wanted = follows[:, first + 1 :]
    ids = rows.ids[:, None].expand(rows.order.shape[:2] + rows.ids.shape[1:])
    tokens = ids.gather(2, rows.order).flatten(0, 1)[:, first + 1 :][wanted][:, None]
    given = net.next_logits(z, first)[:, :-1][wanted].log_softmax(1)
    return _Given(given, tokens, wanted)


def _embed_rows(net: Net, rows: _Rows) -> Tensor:
    """Return the embeddings of every row: (batch rows, length, width).

    Prompts and continuations are embedded separately, so that replacing the first output of
    `entry` changes prompts only.
    """
    entry = _require_entry(net)
    moving, still = entry(rows.ids), entry(rows.ids)
    z = torch.where(rows.prompt[..., None], moving, still)
    samples = torch.arange(len(z), device=z.device)[:, None, None]
    return z[samples, rows.order].flatten(0, 1)


def _require_entry(net: Net) -> nn.Module:
    if net.entry is None:
        raise InputError(
            f"the embedding layer of {net.info.architecture} was not found",
            "Write a py: factory that returns a ModelSpec with its `entry`.",
        )
    return net.entry


def _require_causal(net: Net) -> None:
    """Check that a token's logits depend on the embeddings up to that token, and on no others."""
    size = min(TRIED, *net.sample_shape)
    ids = torch.arange(1, size + 1, device=net.device)[None] % (net.vocabulary or size)

    def behind(z: Tensor) -> Tensor:
        assert net.next_logits is not None
        return net.next_logits(z, 0)

    with eager(), exact_arithmetic(net.device), torch.no_grad():
        z = lifting(_require_entry(net))(ids)
        whole, start = lifting(behind)(z), lifting(behind)(z[:, :-1])
        usual = net.output(Batch(ids, None, ("",)))
        with torch.enable_grad():
            moved = z.detach().requires_grad_()
            (ahead,) = torch.autograd.grad(lifting(behind)(moved)[:, 0].square().sum(), moved)
    if not agree(usual, whole[:, -1], AGREES):
        more = "gives different logits for embeddings and for their token ids"
    elif bool((ahead[:, 1:] != 0).any()) or not agree(start, whole[:, :-1], AGREES):
        more = "looks at later tokens"
    else:
        return
    raise InputError(
        f"{net.info.architecture} {more}: it cannot score continuations",
        "Use a causal language model, or leave --score out.",
    )
