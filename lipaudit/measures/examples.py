"""Adversarial examples: those that a report shows, and the file of `--save-adv`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipaudit.attacks.kinds import Trial
from lipaudit.measures import base
from lipaudit.measures.base import Part, Values

if TYPE_CHECKING:
    from lipaudit.attacks.evaluate import Chunk, Outcome
    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net

# File ending for changed texts; any other example is a tensor.
TABLE = ".jsonl"
# Number of broken samples stored as examples, the worst first.
DRAWN = 512


def find_first(broken: Values) -> Values:
    """Return the first trial that broke each sample, else the last; broken: (samples, trials)."""
    import numpy as np

    return np.where(broken.any(1), broken.argmax(1), broken.shape[1] - 1)


def describe_examples(
    net: Net, batch: Batch, chunk: Chunk, outcomes: Sequence[Outcome], size: int
) -> dict[str, dict[str, Any]]:
    """Describe each broken sample with the first adversarial example that broke it."""
    import torch

    from lipaudit.data.images import thumbnail
    from lipaudit.measures import texts

    clean, *ends = outcomes
    fallen = torch.stack([clean.robust & ~end.robust for end in ends], 1).cpu()
    which = fallen.any(1).nonzero().flatten()
    if not len(which):
        return {}
    first = [ends[t] for t in fallen[which].int().argmax(1).tolist()]
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
            x, adversarial = broken.x[i].cpu(), x_adv[i].cpu()
            times = 0.5 / max(float((adversarial - x).abs().max()), torch.finfo(x.dtype).tiny)
            examples[name] |= {
                "image": thumbnail(x, net.box),
                "adversarial": thumbnail(adversarial, net.box),
                "difference": thumbnail(0.5 + times * (adversarial - x)),
                "times": float(f"{times:.2g}"),
            }
    return examples


def encode_examples(
    parts: Sequence[Part], path: Path | None, trials: Sequence[Trial]
) -> dict[Path, bytes]:
    """Return the file of `--save-adv`: changed texts, or tensors (not read by `--data`).

    `x` holds, for each sample, the first example that broke it, in the order of the trials, else
    the last one tried. `y` holds the labels, and a tensor per trial holds its examples. The
    metadata hold the sample ids. Embeddings of shorter texts are padded with zeros.
    """
    import numpy as np
    from safetensors.numpy import save

    from lipaudit.attacks.transfer import FIRST, LABELS, MADE_OF
    from lipaudit.measures import texts

    if path is None:
        return {}
    if path.suffix == TABLE:
        return {path: texts.table(parts)}
    each = [part.values["x_adv"] for part in parts]
    longest = max(x.shape[2] for x in each)
    room = [[(0, longest - n if axis == 2 else 0) for axis, n in enumerate(x.shape)] for x in each]
    x_adv = np.concatenate([np.pad(x, pads) for x, pads in zip(each, room, strict=True)])
    broken = ~base.join_parts(parts, "robust").astype(bool)
    first = find_first(broken)
    keys = [str(trial.key) for trial in trials]
    tensors = {key: np.ascontiguousarray(x_adv[:, i]) for i, key in enumerate(keys)}
    tensors[FIRST] = np.ascontiguousarray(x_adv[np.arange(len(first)), first])
    tensors[LABELS] = base.join_parts(parts, "label").astype(np.int64)
    return {path: save(tensors, {MADE_OF: json.dumps(base.sample_ids(parts))})}
