"""Texts position by position: hidden states, the logits of the next token, and its loss.

The head of a language model maps every position to its vocabulary. Here it is given only the
positions that are asked for, or some at a time: of a long text all logits would be larger than
everything else together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, of_machine
from lipaudit.models.derivative.linearize import AGREEMENT
from lipaudit.models.net import Net, NextToken
from lipaudit.models.precision import exact_arithmetic

TOGETHER = 2**24
"""Logits that the loss has at a time."""
TRIED = 8
"""Tokens of the text on which the head is tried."""

Forward = Callable[[], Any]
Score = Callable[[Tensor], Tensor]


def places(batch: Batch, where: str) -> Tensor:
    """Return in which columns of a batch of texts a position is, (samples, 1).

    Positions count the tokens that are not padded, wherever the padding is.

    Args:
        batch: the texts.
        where: last, all, or a number, from the end where it is negative; of all positions the
            result is (samples, tokens of the longest).

    Returns:
        The columns; -1 where a text has no such position.
    """
    real = _real(batch)
    # The columns of a text's own tokens, then those of its padding.
    columns = torch.argsort((~real).long(), dim=1, stable=True)
    count = real.sum(1, keepdim=True)
    if where == "all":
        columns = columns[:, : int(count.max())]
        inside = torch.arange(columns.shape[1], device=columns.device) < count
        return columns.masked_fill(~inside, -1)
    number = -1 if where == "last" else int(where)
    slot = torch.full_like(count, number) if number >= 0 else count + number
    inside = (slot >= 0) & (slot < count)
    return columns.gather(1, slot.where(inside, 0)).masked_fill(~inside, -1)


def _real(batch: Batch) -> Tensor:
    """Which columns are no padding, (samples, columns)."""
    return torch.ones_like(batch.x, dtype=torch.bool) if batch.mask is None else batch.mask


def next_token(scorer: NextToken, place: Tensor, forward: Forward) -> Tensor:
    """Return the logits of the token behind a column of every sample, (samples, vocabulary)."""
    with _head_reads(scorer, lambda states: at_columns(states, place)[:, None]):
        return scorer.read(forward())[:, 0]


def hidden_states(scorer: NextToken, forward: Forward) -> Tensor:
    """Return what the head reads, (samples, columns, width); it is given one column of it."""
    seen: list[Tensor] = []

    def first(states: Tensor) -> Tensor:
        seen.append(states)
        return states[:, :1]

    with _head_reads(scorer, first):
        forward()
    return seen[0]


def embedding(net: Net, scorer: NextToken, batch: Batch) -> Tensor:
    """Return the embeddings of texts: the model has to run, its head on one column only."""
    with _head_reads(scorer, lambda states: states[:, :1]):
        return net.embedding(batch)


def at_columns(states: Tensor, place: Tensor) -> Tensor:
    """Return one column of every sample, (samples, width)."""
    return states[torch.arange(len(states), device=states.device), place.to(states.device)]


def text_loss(net: Net, scorer: NextToken, part: Batch, forward: Forward) -> Tensor:
    """Return the mean cross-entropy of each text's own next tokens, in nat, (samples, 1).

    L = -1 / (n - 1) sum_(t = 1)^(n - 1) log p(x_t | x_0, ..., x_(t - 1)); a text of one token
    has none (NaN).
    """
    states = hidden_states(scorer, forward)
    real = _real(part).to(states.device)  # the head may lie on another device than the texts
    leads = real[:, :-1] & real[:, 1:]
    vocabulary = net.vocabulary or 1

    def score(rows: Tensor) -> Tensor:
        return _apply_head(net, scorer, part.x, rows)

    losses = _CrossEntropy.apply(
        states[:, :-1][leads],
        part.x.to(states.device)[:, 1:][leads],
        score,
        max(1, TOGETHER // vocabulary),
    )
    owner = leads.nonzero()[:, 0]
    sums = states.new_zeros(len(states)).index_add(0, owner, losses)
    return (sums / leads.sum(1))[:, None]


def _apply_head(net: Net, scorer: NextToken, ids: Tensor, rows: Tensor) -> Tensor:
    """Return the logits of hidden states, (rows, vocabulary).

    By the model's own head and whatever it does behind it: the model runs on one token, and its
    head is given these in place of what comes of that.
    """
    with _head_reads(scorer, lambda _: rows[None]):
        return scorer.read(net.call(ids[:1, :1], None))[0]


class _CrossEntropy(torch.autograd.Function):
    """-log p of one token at each of some hidden states, few of them at a time.

    The gradient is taken along with the value: no logits are kept.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, tokens: Tensor, score: Score, most: int) -> Tensor:
        losses, slopes = [states.new_zeros(0)], [torch.zeros_like(states[:0])]
        for rows, own in zip(torch.split(states, most), torch.split(tokens, most), strict=True):
            with torch.enable_grad():
                leaf = rows.detach().requires_grad_()
                logits = score(leaf)
                loss = F.cross_entropy(logits, own.to(logits.device), reduction="none")
                if ctx.needs_input_grad[0]:
                    slopes += torch.autograd.grad(loss.sum(), leaf)
            losses.append(loss.detach().to(states.device))
        ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return u[:, None] * slopes, None, None, None


def require_head(net: Net, batch: Batch) -> NextToken:
    """Return how a language model scores the next token.

    Raises:
        InputError: it does not do so position by position.
    """
    if net.next_token is None or not has_head(net, batch):
        raise InputError(
            f"the head of {net.info.architecture} does not score positions one by one",
            "Use --to features, the logits of the token behind the last one, or --to tokens.",
        )
    return net.next_token


def has_head(net: Net, batch: Batch) -> bool:
    """Try on a few tokens whether the head of a language model scores positions one by one."""
    scorer, text = net.next_token, batch.x[:1, :TRIED].to(net.device)
    if scorer is None or not text.numel():
        return False
    end = torch.tensor([text.shape[1] - 1], device=text.device)

    def forward() -> Any:
        return net.call(text, None)

    with exact_arithmetic(net.device), torch.no_grad():
        plain = scorer.read(forward())[0]
        try:
            last = next_token(scorer, end, forward)
            every = _apply_head(net, scorer, text, hidden_states(scorer, forward)[0])
        except (IndexError, RuntimeError, ValueError) as error:
            if of_machine(error):
                raise
            return False
    pairs = ((plain[-1:], last), (plain, every))
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= AGREEMENT * one.abs().max())
        for one, other in pairs
    )


@contextmanager
def _head_reads(scorer: NextToken, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the head read something else in place of its input while the block runs the model."""
    hook = scorer.head.register_forward_pre_hook(lambda _m, args: (change(args[0]), *args[1:]))
    try:
        yield
    finally:
        hook.remove()
