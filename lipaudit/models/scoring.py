"""Language models that score continuations: each score acts as the logit of a class."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch, Task
from lipaudit.errors import InputError, refuse
from lipaudit.models.net import Net
from lipaudit.models.precision import eager, exact_arithmetic, lifting
from lipaudit.models.requirements import agree
from lipaudit.tables import Note

Score = Literal["sum", "mean"]
PER = {"sum": "summed over their tokens", "mean": "the mean of their tokens"}
# Largest accepted relative difference between two ways to run a model; far above rounding.
AGREES = 1e-3
# Number of tokens used for that comparison.
TRIED = 6


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
    entry = net.entry
    if entry is None:
        raise InputError(
            f"the embedding layer of {net.architecture} was not found",
            "Write a py: factory that returns a ModelSpec with its `entry`.",
        )
    _require_causal(net, entry)
    count = 0 if task.kind == "continuation" else len(task.classes)
    what = f"{task.kind} ({', '.join(task.classes)})"
    note = Note.info("scores", f"scores are log-likelihoods, {PER[how]}, of the {what}")
    return replace(
        net,
        labels=task.classes,
        notes=(*net.notes, note),
        call=lifting(lambda x, mask: _score_rows(net, entry, x, mask, how, count)),
        read=lambda scores: scores,
        classes=len(task.classes),
        scored=task.kind,
    )


def _score_rows(
    net: Net, entry: nn.Module, x: Tensor, mask: Tensor | None, how: Score, count: int
) -> Tensor:
    """Return the scores of each sample, (batch, classes).

    Args:
        net: the language model.
        entry: its embedding layer.
        x: packed samples (batch, tokens).
        mask: True at their tokens.
        how: sum or mean over tokens.
        count: number of continuations of a prompt; 0: a single one and its rival.
    """
    assert net.next_logits is not None
    vocabulary = net.vocabulary or 0
    ids, part = x % vocabulary, x // vocabulary
    part = part if mask is None else part.masked_fill(~mask, -1)
    # The model gets a row for each continuation: the prompt, the continuation, and tokens behind
    # it, which the continuation does not see. (batch, rows, length)
    each = torch.arange(1, max(count, 1) + 1, device=x.device)[:, None]
    wanted = (part[:, None] == 0) | (part[:, None] == each)
    length = int(wanted.sum(2).max())
    order = wanted.int().argsort(dim=2, descending=True, stable=True)[..., :length]
    follows = (part[:, None] == each).gather(2, order).flatten(0, 1)
    # Prompts and continuations are embedded separately, so that replacing the first output of
    # `entry` changes prompts only.
    moving, still = entry(ids), entry(ids)
    z = torch.where((part == 0)[..., None], moving, still)
    samples = torch.arange(len(z), device=z.device)[:, None, None]
    z = z[samples, order].flatten(0, 1)
    first = int(follows.int().argmax(1).min()) - 1
    where = follows[:, first + 1 :]
    every = ids[:, None].expand(order.shape[:2] + ids.shape[1:]).gather(2, order).flatten(0, 1)
    tokens = every[:, first + 1 :][where][:, None]
    logs = net.next_logits(z, first)[:, :-1][where].log_softmax(1)
    chosen = logs.gather(1, tokens)[:, 0]
    divisor = 1 if how == "sum" else where.sum(1)
    scores = chosen.new_zeros(where.shape).index_put((where,), chosen).sum(1) / divisor
    if count:
        return scores.view(-1, count)
    # The likeliest other token at each place: greedy decoding takes it where it is ahead.
    other = logs.scatter(1, tokens, -math.inf).amax(1)
    ahead = chosen.new_full(where.shape, math.inf).index_put((where,), chosen - other).amin(1)
    return torch.stack([scores, scores - ahead / divisor], 1)


def _require_causal(net: Net, entry: nn.Module) -> None:
    """Check that a token's logits depend on the embeddings up to that token, and on no others."""
    size = min(TRIED, *net.input_shape)
    ids = torch.arange(1, size + 1, device=net.device)[None] % (net.vocabulary or size)

    next_logits = net.next_logits
    assert next_logits is not None
    score = lifting(lambda z: next_logits(z, 0))
    with eager(), exact_arithmetic(net.device), torch.no_grad():
        z = lifting(entry)(ids)
        whole, start = score(z), score(z[:, :-1])
        usual = net.output(Batch(ids, None, ("",)))
        with torch.enable_grad():
            moved = z.detach().requires_grad_()
            (ahead,) = torch.autograd.grad(score(moved)[:, 0].square().sum(), moved)
    advice = "Use a causal language model, or leave --score out."
    refuse(
        not agree(usual, whole[:, -1], AGREES),
        f"{net.architecture} gives different logits for embeddings and for their token ids: it "
        "cannot score continuations",
        advice,
    )
    refuse(
        bool((ahead[:, 1:] != 0).any()) or not agree(start, whole[:, :-1], AGREES),
        f"{net.architecture} looks at later tokens: it cannot score continuations",
        advice,
    )
