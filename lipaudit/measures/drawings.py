"""What a page draws of samples: adversarial examples, tokens, shares of gradients, and maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.attacks.evaluate import Chunk, Outcome
from lipaudit.data.arrays import thumbnail
from lipaudit.data.batch import Batch
from lipaudit.errors import UsageError
from lipaudit.measures import texts
from lipaudit.measures.base import Values
from lipaudit.models.attention.capture import Layer
from lipaudit.models.net import Net

# Number of leading tokens of a sample that are stored.
MOST = 512
# Longest text shown for a token: reserved names and runs of signs may be long.
LETTERS = 40


def name_tokens(net: Net, batch: Batch) -> list[tuple[str, ...]]:
    """Return the tokens of each sample as text, without padding.

    Token ids without text become numbers; tokens of other inputs become positions.
    """
    if net.kind != "text":
        return [tuple(map(str, range(batch.x.shape[1])))] * len(batch)
    lexicon = None
    if net.lexicon is not None:
        lexicon = net.lexicon()
    written: dict[int, str] = {}
    for token in set(batch.x.flatten().tolist()):
        written[token] = (str(token) if lexicon is None else lexicon.name(token))[:LETTERS]
    return [tuple(written[token] for token in row.tolist()) for row in _real(batch, batch.x)]


def share_squares(batch: Batch, gradient: Tensor) -> list[tuple[float, ...]]:
    """Return per sample ||g_t||^2 / sum_s ||g_s||^2 of a gradient g over its tokens t.

    Args:
        batch: the samples; padding has no share.
        gradient: (batch, tokens, ...), of any length.

    Returns:
        The shares of each sample; empty if its gradient is 0 or NaN.
    """
    # In units of the largest entry, so that no square underflows.
    rows = gradient.flatten(2)
    largest = rows.abs().amax((1, 2), keepdim=True)
    squares = (rows / largest).to("cpu", torch.float64).square().sum(2)
    each = (row / row.sum() for row in _real(batch, squares))
    return [tuple(row.tolist()) if bool(row.isfinite().all()) else () for row in each]


def describe_gradients(
    net: Net, batch: Batch, gradient: Tensor, of: str
) -> dict[str, dict[str, Any]]:
    """Describe, by sample id, each token's share of a gradient, as plain values.

    For prompts with continuations, only the tokens of the prompt are listed.
    """
    # A waveform is a number for each time: those are no tokens.
    if gradient.ndim < 3 or batch.x.ndim < 2 or gradient.shape[:2] != batch.x.shape[:2]:
        return {}
    batch = replace(batch, mask=net.free(batch))
    both = zip(batch.ids, name_tokens(net, batch), share_squares(batch, gradient), strict=True)
    return {
        name: {
            "of": of,
            "tokens": tokens[:MOST],
            "shares": tuple(float(f"{share:.6g}") for share in parts[:MOST]),
            "left_out": len(tokens[MOST:]),
        }
        for name, tokens, parts in both
        if parts
    }


def _real(batch: Batch, values: Tensor) -> Sequence[Tensor]:
    """Return the values of each sample at tokens that are not padding."""
    values = values.cpu()
    if batch.mask is None:
        return list(values)
    return [row[mask] for row, mask in zip(values, batch.mask.cpu(), strict=True)]


# Largest side of a stored map; longer maps are stored as means of square blocks.
SIDE = 256


def draw_map(net: Net, layer: Layer, head: int) -> tuple[Values, Values, list[str]]:
    """Return the map of a head for the batch's first sample: of its first window, no padding.

    Returns:
        The map; the number of queries and of keys; and the tokens of a text if queries and keys
        are its tokens, one by one.

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
    every = torch.arange(queries)
    real = every
    if heads.valid is not None:
        real = every[heads.valid[0].cpu()]
    if queries == keys:
        columns = real
    else:
        columns = torch.arange(keys)
    block = -(-max(len(real), len(columns)) // SIDE)
    size = block * max(1, SIDE // block)
    pooled = []
    for start in range(0, len(real), size):  # in chunks of rows, as the map may be large
        group = real[start : start + size]
        p = heads.rows(int(group[0]), int(group[-1]) + 1)[0, 0][group - group[0]][:, columns]
        pooled.append(F.avg_pool2d(p[None], block, ceil_mode=True, count_include_pad=False)[0])
    tokens: list[str] = []
    if net.kind == "text" and block == 1 and len(real) == len(columns) <= MOST:
        names = name_tokens(net, layer.batch[:1].trim())[0]
        tokens = []
        if len(names) == len(real):
            tokens = [*names]
    return torch.cat(pooled).cpu().numpy(), np.array([len(real), len(columns)]), tokens


def describe_examples(
    net: Net,
    batch: Batch,
    chunk: Chunk,
    outcomes: Sequence[Outcome],
    size: int,
    *,
    known: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """Describe each broken sample with the example of the first trial that broke it.

    Those that are known of the same trial are left out.
    """
    clean, *ends = outcomes
    fallen = torch.stack([clean.robust & ~end.robust for end in ends], 1).cpu()
    rows = []
    first = []
    for row in fallen.any(1).nonzero().flatten().tolist():
        end = ends[int(fallen[row].int().argmax())]
        trial = str(end.trial.key if end.trial else "")
        if known.get(batch.ids[row], {}).get("trial") != trial:
            rows.append(row)
            first.append(end)
    if not rows:
        return {}
    which = torch.tensor(rows)
    x_adv = torch.stack([end.x_adv[i] for i, end in zip(which, first, strict=True)])
    broken = batch.rows(which.to(batch.x.device))
    with torch.no_grad():
        before = torch.cat([net.output(part).softmax(1) for part in broken.split(size)])
        after = texts.forward_pieces(net, broken, x_adv, size).softmax(1)
        for i, (end, row) in enumerate(zip(first, which.tolist(), strict=True)):
            if end.drafts is not None and chunk.texts is not None:
                reader = chunk.texts.reader
                ids = torch.tensor([reader.read(end.drafts[row])], device=net.device)
                after[i] = reader.output(ids, None).softmax(1)[0]
    pairs = torch.stack([chunk.y[which], after.argmax(1)], 1)
    scores = [each.gather(1, pairs).cpu().double() for each in (before, after)]
    names = dict(enumerate(net.labels or ()))
    examples: dict[str, dict[str, Any]] = {}
    for i, (name, end, row) in enumerate(zip(broken.ids, first, which.tolist(), strict=True)):
        examples[name] = {
            "trial": str(end.trial.key if end.trial else ""),
            "text": "" if end.drafts is None else texts.quote(end.drafts[row]),
            "classes": [names.get(c, str(c)) for c in pairs[i].tolist()],
            "before": scores[0][i].round(decimals=4).tolist(),
            "after": scores[1][i].round(decimals=4).tolist(),
        }
        if net.kind == "image":  # the difference is scaled up around grey
            x = broken.x[i].cpu()
            adversarial = x_adv[i].cpu()
            times = 0.5 / max(float((adversarial - x).abs().max()), torch.finfo(x.dtype).tiny)
            examples[name] |= {
                "image": thumbnail(x, net.box),
                "adversarial": thumbnail(adversarial, net.box),
                "difference": thumbnail(0.5 + times * (adversarial - x)),
                "times": float(f"{times:.2g}"),
            }
    return examples
