"""What a page draws of samples: adversarial examples, tokens, shares of gradients, and maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.attacks.evaluate import Chunk, Outcome
from lipaudit.data.arrays import thumbnail
from lipaudit.data.batch import Batch
from lipaudit.errors import UsageError
from lipaudit.measures import texts
from lipaudit.measures.base import Facts, Values
from lipaudit.models.attention.capture import Layer
from lipaudit.models.net import Net
from lipaudit.theory.heads import Heads

# Number of leading tokens of a sample that are stored.
MOST = 512
# Longest text shown for a token: reserved names and runs of signs may be long.
LETTERS = 40

# The row of each broken sample in its batch, and the outcome of the trial that broke it.
_Broken = list[tuple[int, Outcome]]


def name_tokens(net: Net, batch: Batch) -> list[tuple[str, ...]]:
    """Return the names of the tokens of each sample, without padding.

    The name of a token of a text is its characters, or its id without a tokenizer. In any other
    input, the name of a token is its position.
    """
    if net.kind != "text":
        return [tuple(map(str, range(batch.x.shape[1])))] * len(batch)
    name_token = str if net.lexicon is None else net.lexicon().name
    names = {token: name_token(token)[:LETTERS] for token in set(batch.x.flatten().tolist())}
    rows = texts.remove_padding(batch, batch.x)
    return [tuple(names[token] for token in row.tolist()) for row in rows]


def share_squares(batch: Batch, gradient: Tensor) -> list[tuple[float, ...]]:
    """Return for each sample the share of every token in its gradient g.

    The share of token t is ||g_t||^2 / sum_s ||g_s||^2, where g_t is the gradient at token t.

    Args:
        batch: the samples; padding has no share.
        gradient: (batch, tokens, ...), of any length, as shares do not depend on the length.

    Returns:
        The shares of each sample; empty if its gradient is 0 or NaN.
    """
    # Divided by the largest entry, so that no square underflows; the shares stay the same.
    rows = gradient.flatten(2)
    largest = rows.abs().amax((1, 2), keepdim=True)
    squares = (rows / largest).to("cpu", torch.float64).square().sum(2)
    shares = []
    for of_tokens in texts.remove_padding(batch, squares):
        of_tokens = of_tokens / of_tokens.sum()
        shares.append(tuple(of_tokens.tolist()) if bool(of_tokens.isfinite().all()) else ())
    return shares


def describe_gradients(net: Net, batch: Batch, gradient: Tensor, of: str) -> dict[str, Facts]:
    """Describe, by sample id, each token's share of a gradient, as plain values.

    For prompts with continuations, only the tokens of the prompt are listed.

    Args:
        net: the model.
        batch: the samples.
        gradient: (batch, tokens, ...).
        of: what the gradient is: `margin`, the gradient of the margin, or `direction`, the input
            direction in which the output changes most.
    """
    # Only an input with a vector per token has shares of tokens. A waveform has none.
    if gradient.ndim < 3 or gradient.shape[:2] != batch.x.shape[:2]:
        return {}
    # True at the tokens that may change: not at padding, nor at the continuations of a prompt.
    batch = replace(batch, mask=net.find_free_tokens(batch))
    tokens_of_samples = name_tokens(net, batch)
    shares_of_samples = share_squares(batch, gradient)
    described = {}
    for sample, tokens, shares in zip(
        batch.ids, tokens_of_samples, shares_of_samples, strict=True
    ):
        if shares:
            described[sample] = {
                "of": of,
                "tokens": tokens[:MOST],
                "shares": tuple(float(f"{share:.6g}") for share in shares[:MOST]),
                "left_out": len(tokens[MOST:]),
            }
    return described


# Largest side of a stored map; longer maps are stored as means of square blocks.
SIDE = 256


class DrawnMap(NamedTuple):
    """The attention map of a head on one sample.

    Attributes:
        values: the map, (queries, keys), or means of its blocks.
        counts: the number of queries and of keys.
        tokens: the tokens of a text, if queries and keys are its tokens, one by one.
    """

    values: Values
    counts: Values
    tokens: list[str]


def draw_map(net: Net, layer: Layer, head: int) -> DrawnMap:
    """Return the attention map of a head on the first sample of a layer's batch.

    Padding is cut off. If the layer attends within windows of a sample, the map is that of the
    first window. A large map is reduced to means of square blocks.

    Raises:
        UsageError: the layer has no such head.
    """
    count = layer.attention.q.shape[1]
    index = layer.site.index
    if head >= count:
        raise UsageError(
            f"there is no head {index}.{head}: the layer has {count}",
            f"Give a head from {index}.0 to {index}.{count - 1}.",
        )
    heads = layer.attention.pick(slice(head, head + 1)).to(torch.float64).row(0)
    queries = heads.q.shape[2]
    keys = heads.k.shape[2]
    # The rows (queries) and columns (keys) of the map to draw.
    rows = torch.arange(queries)
    if heads.valid is not None:
        rows = rows[heads.valid[0].cpu()]  # without padding
    columns = rows
    if queries != keys:  # cross-attention: padding of the queries says nothing about the keys
        columns = torch.arange(keys)
    # Side of the blocks, so that the drawing has at most SIDE rows and columns; rounded up.
    block = -(-max(len(rows), len(columns)) // SIDE)
    pooled = _pool_map(heads, rows, columns, block)
    tokens: list[str] = []
    # Tokens are named only if each row and column of the map is one token of the text.
    if net.kind == "text" and block == 1 and len(rows) == len(columns) <= MOST:
        names = name_tokens(net, layer.batch[:1].trim())[0]
        if len(names) == len(rows):
            tokens = list(names)
    return DrawnMap(pooled.cpu().numpy(), np.array([len(rows), len(columns)]), tokens)


def _pool_map(heads: Heads, rows: Tensor, columns: Tensor, block: int) -> Tensor:
    """Return the means of an attention map over square blocks, (rows / block, columns / block).

    Args:
        heads: one head on one sample.
        rows: the queries to draw, in ascending order.
        columns: the keys to draw.
        block: side of a block.
    """
    # The map may be large: it is computed in chunks of rows, each a whole number of blocks.
    size = block * max(1, SIDE // block)
    pooled = []
    for chunk in torch.split(rows, size):
        first = int(chunk[0])
        last = int(chunk[-1])
        p = heads.rows(first, last + 1)[0, 0]  # row i is query first + i: (queries, keys)
        drawn = p[chunk - first][:, columns]
        # Blocks at the edges may be smaller: their mean is over the entries that they have.
        means = F.avg_pool2d(drawn[None], block, ceil_mode=True, count_include_pad=False)
        pooled.append(means[0])
    return torch.cat(pooled)


def describe_examples(
    net: Net,
    batch: Batch,
    chunk: Chunk,
    outcomes: Sequence[Outcome],
    size: int,
    *,
    known: Mapping[str, Facts],
) -> dict[str, Facts]:
    """Describe, by sample id, the adversarial example of each broken sample, as plain values.

    If several trials broke a sample, the example is that of the first such trial.

    Args:
        net: the model.
        batch: the samples.
        chunk: the samples, as they were attacked.
        outcomes: the outcome of the clean samples, then the last outcome of each trial.
        size: number of samples on the device at a time.
        known: examples that were described after earlier attacks. A sample that has an example of
            the same trial here is not described again.
    """
    # The row of each broken sample in the batch, and the outcome of the trial that broke it.
    broken = _find_examples(batch.ids, outcomes, known)
    if not broken:
        return {}
    rows = torch.tensor([row for row, _ in broken])
    x_adv = torch.stack([end.x_adv[row] for row, end in broken])
    samples = batch.rows(rows.to(batch.x.device))
    # Probabilities before and after the attack, (broken samples, classes).
    with torch.no_grad():
        before = torch.cat([net.output(part).softmax(1) for part in samples.split(size)])
    after = _predict_attacked(net, chunk, x_adv, samples, broken, size)
    # Only two probabilities are shown: of the true class, and of the class predicted under attack.
    classes = torch.stack([chunk.y[rows], after.argmax(1)], 1)
    before = before.gather(1, classes).cpu().double().round(decimals=4)
    after = after.gather(1, classes).cpu().double().round(decimals=4)
    names = dict(enumerate(net.labels or ()))
    examples = {}
    for i, (row, end) in enumerate(broken):
        example: Facts = {
            "trial": _name_trial(end),
            "text": "" if end.drafts is None else texts.quote(end.drafts[row]),
            "classes": [names.get(number, str(number)) for number in classes[i].tolist()],
            "before": before[i].tolist(),
            "after": after[i].tolist(),
        }
        if net.kind == "image":
            example |= _draw_example(samples.x[i].cpu(), x_adv[i].cpu(), net.box)
        examples[samples.ids[i]] = example
    return examples


@torch.no_grad()
def _predict_attacked(
    net: Net, chunk: Chunk, x_adv: Tensor, samples: Batch, broken: _Broken, size: int
) -> Tensor:
    """Return the model's probabilities of the classes under attack, (broken samples, classes).

    Args:
        net: the model.
        chunk: the samples, as they were attacked.
        x_adv: the adversarial examples of the broken samples.
        samples: the broken samples.
        broken: their rows in the chunk, and the outcomes of the trials that broke them.
        size: number of samples on the device at a time.
    """
    probabilities = texts.forward_pieces(net, samples, x_adv, size).softmax(1)
    for i, (row, end) in enumerate(broken):
        # Attacks that change texts give a draft in place of x_adv: run the model on its text.
        if end.drafts is not None and chunk.texts is not None:
            reader = chunk.texts.reader
            ids = torch.tensor([reader.read(end.drafts[row])], device=net.device)
            probabilities[i] = reader.output(ids, None).softmax(1)[0]
    return probabilities


def _find_examples(
    ids: Sequence[str], outcomes: Sequence[Outcome], known: Mapping[str, Facts]
) -> _Broken:
    """Return the row of each broken sample and the outcome of the first trial that broke it.

    Args:
        ids: ids of the samples.
        outcomes: the outcome of the clean samples, then the last outcome of each trial.
        known: examples by sample id. A sample that has an example of the same trial is left out.
    """
    clean, *ends = outcomes
    # Whether each trial broke each sample, (samples, trials).
    broken = torch.stack([clean.robust & ~end.robust for end in ends], 1).cpu()
    examples = []
    for row, flags in enumerate(broken.tolist()):
        if not any(flags):
            continue
        end = ends[flags.index(True)]  # of the first trial that broke the sample
        if known.get(ids[row], {}).get("trial") != _name_trial(end):
            examples.append((row, end))
    return examples


def _name_trial(outcome: Outcome) -> str:
    """Return the trial of an outcome as text."""
    return str(outcome.trial.key) if outcome.trial else ""


def _draw_example(x: Tensor, x_adv: Tensor, box: tuple[float, float] | None) -> Facts:
    """Return an image, its adversarial example, and the difference, scaled up around grey."""
    difference = x_adv - x
    # The factor that makes the largest difference 1/2: drawn around grey, it is black or white.
    times = 0.5 / max(float(difference.abs().max()), torch.finfo(x.dtype).tiny)
    return {
        "image": thumbnail(x, box),
        "adversarial": thumbnail(x_adv, box),
        "difference": thumbnail(0.5 + times * difference),
        "times": float(f"{times:.2g}"),
    }
