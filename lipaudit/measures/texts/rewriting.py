"""Texts for attacks that change them, and what is kept and said of the changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lipaudit.attacks.outcome import Outcome, Texts
from lipaudit.attacks.plan import Trial
from lipaudit.attacks.text.rewrite import BEGINS, FIXED, Draft, Lexicon, Reader
from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.measures.measure import Part
from lipaudit.models.net import Net
from lipaudit.results import Note
from lipaudit.results.trials import COUNTED

COLUMNS = ("text", "text_b")
"""Of a file of changed texts, the second for pairs: those that --data reads."""
BETWEEN = " | "
"""Stands between the two texts of a pair where they are shown as one."""
SHOWN = 300
"""Letters of a text that a note shows."""


def reader(net: Net) -> Reader:
    """Return how a text model reads texts.

    Raises:
        InputError: its token ids are looked up in no table.
    """
    table = getattr(net.entry, "weight", None)
    if not isinstance(table, Tensor) or table.ndim != 2 or not net.vocabulary:
        raise InputError(
            f"{net.info.architecture} has no table of embeddings, which near words are read from",
            "Attack it in its embeddings: --attack fgsm,pgd --eps 0.1.",
        )
    return Reader(
        output=lambda ids, mask: net.output(_batch(ids, mask)),
        point=lambda ids, mask: net.point(_batch(ids, mask)),
        forward=lambda z, ids, mask: net.forward(z, _batch(ids, mask)),
        table=table.detach(),
        lexicon=_plain(net) if net.lexicon is None else net.lexicon(),
        most=net.sample_shape[0],
        pad_id=net.pad_id,
    )


def _batch(ids: Tensor, mask: Tensor | None) -> Batch:
    return Batch(ids, None, ("",) * len(ids), mask)


def _plain(net: Net) -> Lexicon:
    """Without a tokenizer every id is a word, but for those that are known to be none."""
    assert net.vocabulary is not None
    kinds = torch.full((net.vocabulary,), BEGINS)
    for special in {net.pad_id, net.end_id} - {None}:
        kinds[special] = FIXED
    return Lexicon(kinds)


def texts(how: Reader, batch: Batch, *, characters: bool) -> Texts:
    """Return the samples of a batch as texts, without their padding.

    Args:
        how: how the model reads them.
        batch: the samples.
        characters: whether characters are to be changed.

    Raises:
        InputError: the characters of a text are needed, and the token ids do not follow from them.
    """
    masks = [None] * len(batch) if batch.mask is None else batch.mask.cpu()
    rows = [x if mask is None else x[mask] for x, mask in zip(batch.x.cpu(), masks, strict=True)]
    written = batch.texts or ((),) * len(rows)
    drafts = [
        how.lexicon.draft(row.tolist(), text, how.most)
        for row, text in zip(rows, written, strict=True)
    ]
    lost = sum(draft.source is None for draft in drafts)
    if lost and (batch.texts or characters):
        raise InputError(
            f"the token ids of {lost} samples do not follow from their characters, which words "
            "and characters are changed in",
            "Give texts (.csv, .jsonl) and a tokenizer.json, or attack embeddings: --attack "
            "fgsm,pgd --eps 0.1.",
        )
    return Texts(how, drafts)


def changes(outcome: Outcome, before: Texts, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Describe every text that an attack tried, in plain values."""
    assert outcome.drafts is not None
    assert outcome.trial is not None
    standing = outcome.robust.tolist()
    return [
        {
            "id": name,
            "trial": str(outcome.trial.key),
            **dict(zip(COLUMNS, _texts(new), strict=False)),
            "original": BETWEEN.join(_texts(old)),
            "changes": len(new.changed),
            "robust": bool(stands),
        }
        for name, old, new, stands in zip(
            ids, before.drafts, outcome.drafts, standing, strict=True
        )
    ]


def _texts(draft: Draft) -> tuple[str, ...]:
    """Return a text, or the two of a pair; its ids where its characters are not known."""
    return draft.texts or (" ".join(map(str, draft.ids)),)


def scores(net: Net, how: Reader, draft: Draft) -> Tensor:
    """Return the class scores of a text, of 1 in all."""
    ids = torch.tensor([how.read(draft)], device=net.device)
    return net.output(_batch(ids, None)).softmax(1)[0]


def written(outcome: Outcome, before: Texts | None, row: int) -> str:
    """Return how a text begins that an attack changed; nothing of one that moved embeddings."""
    if outcome.drafts is None or before is None:
        return ""
    return _cut(BETWEEN.join(_texts(outcome.drafts[row])))


def table(parts: Sequence[Part]) -> bytes:
    """Write the changed texts as a .jsonl file that --data reads: text and label come first."""
    lines = []
    for part in parts:
        labels = dict(zip(part.ids, part.values["label"].tolist(), strict=True))
        for line in part.facts["texts"]:
            facts = {name: line[name] for name in COLUMNS if name in line}
            facts["label"] = labels[line["id"]]
            lines.append(json.dumps(facts | line, ensure_ascii=False) + "\n")
    return "".join(lines).encode()


def remarks(parts: Sequence[Part], trials: Sequence[Trial]) -> Iterator[Note]:
    """Say what changed texts keep of the original, what they do not, and show one of each."""
    counted = sorted((t for t in trials if t.norm in COUNTED), key=lambda t: t.radius.value)
    if not counted:
        return
    yield Note(
        level="info",
        code="changed-texts",
        text="texts were changed: special tokens, signs, padding and the number of changes are "
        "kept to; that a text still means the same, has the same label or is good language is "
        "not checked, so read some (--save-adv adv.jsonl). A search that finds nothing proves "
        "nothing",
    )
    lines = [line for part in parts for line in part.facts["texts"]]
    for label in dict.fromkeys(trial.label for trial in counted):
        keys = [str(trial.key) for trial in counted if trial.label == label]
        yield from _example([line for key in keys for line in lines if line["trial"] == key])
    untouchable = sum(part.facts["wordless"] for part in parts)
    if untouchable:
        text = f"texts without a word that could be changed: {untouchable}"
        yield Note(level="info", code="no-words", text=text)


def _example(lines: Sequence[dict[str, Any]]) -> Iterator[Note]:
    """Show a text that an attack broke, at the smallest of its budgets that broke any."""
    broken = next((line for line in lines if line["changes"] and not line["robust"]), None)
    if broken is not None:
        after = _cut(BETWEEN.join(broken[name] for name in COLUMNS if name in broken))
        before = _cut(broken["original"])
        text = f"an example of {broken['trial']}: {before!r} became {after!r}"
        yield Note(level="info", code="example", text=text)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def wordless(before: Texts) -> int:
    """Count the texts in which nothing can be changed."""
    fixed = before.reader.lexicon.fixed
    return sum(all(fixed(word) for word in draft.words) for draft in before.drafts)
