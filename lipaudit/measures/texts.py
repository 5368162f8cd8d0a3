"""Attacks on texts: the stored changes, the notes on them, and attacks on scores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from lipaudit.attacks.evaluate import Chunk, Outcome, Texts, evaluate_chunk
from lipaudit.attacks.kinds import Trial
from lipaudit.attacks.oracle import ByRow
from lipaudit.attacks.text import (
    BEGINS,
    FIXED,
    Continuations,
    Draft,
    Lexicon,
    Reader,
    Source,
    TextOracle,
)
from lipaudit.data.batch import Batch
from lipaudit.data.continuations import WHOLE, Packer
from lipaudit.errors import InputError, escape_controls, of_machine
from lipaudit.measures.base import Part, Values
from lipaudit.models.net import Net
from lipaudit.models.requirements import agree
from lipaudit.tables import Note
from lipaudit.tables.trials import COSTS, COUNTED, parse_column

# Column names in a file of changed texts (the second for pairs), as --data reads them.
COLUMNS = ("text", "text_b")
# Columns of a prompt, and of what a language model scores behind it.
PROMPTS = ("question", "choices", "prompt", "continuation")
# Separator between the two texts of a pair in messages.
BETWEEN = " | "
# Number of padding tokens used to test whether a model reads padding.
PADDING = 3
# Number of characters of a text shown in a note.
SHOWN = 300


def make_reader(net: Net) -> Reader:
    """Return how a text model reads texts: vocabulary, embedding table and forward pass.

    Raises:
        InputError: the model has no embedding table for token ids.
    """
    table = getattr(net.entry, "weight", None)
    if not isinstance(table, Tensor) or table.ndim != 2 or not net.vocabulary:
        text = (
            f"{net.architecture} has no embedding table, which the search for similar words needs"
        )
        raise InputError(text, "Attack its embeddings: --attack fgsm,pgd --eps 0.1.")
    if net.lexicon is None:  # without a tokenizer, every id is a word, except known special ids
        kinds = torch.full((net.vocabulary,), BEGINS)
        for special in {net.pad_id or 0, net.end_id} - {None}:
            kinds[special] = FIXED
        lexicon = Lexicon(kinds)
    else:
        lexicon = net.lexicon()
    return Reader(
        output=lambda ids, mask: net.output(_batch(ids, mask)),
        point=lambda ids, mask: net.point(_batch(ids, mask)),
        forward=lambda z, ids, mask: net.forward(z, _batch(ids, mask)),
        table=table.detach(),
        lexicon=lexicon,
        # A row of a language model packs all continuations, each of which is scored alone.
        most=WHOLE if net.scored else net.input_shape[0],
        pad_id=net.pad_id or 0,
        tokenize=net.tokenize if net.scored else None,
    )


def _batch(ids: Tensor, mask: Tensor | None) -> Batch:
    return Batch(ids, None, ("",) * len(ids), mask)


def read_texts(how: Reader, batch: Batch, *, characters: bool) -> Texts:
    """Return the samples of a batch as texts, without their padding.

    Args:
        how: how the model reads texts.
        batch: the samples.
        characters: whether an attack changes characters.

    Raises:
        InputError: characters are needed, and tokenizing them does not give the token ids.
    """
    # Each text without its padding.
    masks = [None] * len(batch) if batch.mask is None else batch.mask.cpu()
    rows = [x if mask is None else x[mask] for x, mask in zip(batch.x.cpu(), masks, strict=True)]
    if how.tokenize is not None:
        return Texts(how, _draft_prompts(how, how.tokenize, batch, rows))
    written = batch.texts or ((),) * len(rows)
    # A model reads padding if padding behind the shortest text changes the output.
    short = min(rows, key=len)
    short = short[max(0, len(short) + PADDING - how.most) :]  # keep the end: some models need it
    ids = torch.cat([short, short.new_full((PADDING,), how.pad_id)])[: how.most][None]
    mask = (torch.arange(ids.shape[1]) < len(short))[None]
    device = how.table.device
    try:
        with torch.no_grad():
            alone = how.output(short[None].to(device), None)
            padded = how.output(ids.to(device), mask.to(device))
        reads_padding = not agree(alone, padded)
    except Exception as error:  # the model takes no mask, or texts of one length only
        if of_machine(error):
            raise
        reads_padding = True
    most = min(how.most, batch.limit or how.most)
    how = replace(how, most=most, reads_padding=reads_padding)
    pairs = zip(rows, written, strict=True)
    drafts = [how.lexicon.draft(row.tolist(), text, how.most) for row, text in pairs]
    lost = sum(draft.source is None for draft in drafts)
    if lost and (batch.texts or characters):
        raise _make_mismatch(lost)
    return Texts(how, drafts)


def _make_mismatch(lost: int) -> InputError:
    """Return the error on samples whose characters are unknown."""
    advice = "Give texts (.csv, .jsonl) and a tokenizer.json, or attack embeddings"
    advice += ": --attack fgsm,pgd --eps 0.1."
    wrong = f"the token ids of {lost} samples do not match their text, so words and characters"
    return InputError(f"{wrong} cannot be changed", advice)


def _draft_prompts(
    how: Reader,
    tokenize: Callable[[str, int], list[int]],
    batch: Batch,
    rows: Sequence[Tensor],
) -> list[Draft]:
    """Return the prompts of packed samples as texts, each with its continuations.

    Raises:
        InputError: a prompt is unknown, or reading it does not give the sample.
    """
    lexicon = how.lexicon
    read = lexicon.read
    if read is None or not batch.continuations:
        raise _make_mismatch(len(batch))
    packer = Packer(tokenize, len(lexicon.kinds), batch.limit)
    drafts: list[Draft] = []
    for row, texts, continuations in zip(rows, batch.texts, batch.continuations, strict=True):
        (prompt,) = texts
        before, follow = packer.encode(prompt, continuations)
        tokens, spans = read((prompt.rstrip(),), WHOLE)
        ids = tuple(before)
        room = packer.find_room(follow)
        packed = row.tolist()
        # A tokenizer may end every text with a token, which is not part of a prompt.
        if tokens[: len(ids)] != ids or packed != list(packer.pack(prompt, continuations)):
            continue
        words = lexicon.words(ids, spans[: len(ids)])
        remaining = iter(spans)
        of_words = tuple(tuple(islice(remaining, len(word))) for word in words)
        pack = partial(_pack_prompt, packer, continuations)
        read_prompt = len(ids[-room:])
        tail = tuple(packed[read_prompt:])
        behind = Continuations(continuations, tail, room, pack)
        drafts.append(Draft(words, source=Source(texts, of_words, batch.limit, behind)))
    if len(drafts) < len(rows):
        raise _make_mismatch(len(rows) - len(drafts))
    return drafts


def _pack_prompt(packer: Packer, continuations: Sequence[str], prompt: str) -> tuple[int, ...]:
    return tuple(packer.pack(prompt, continuations))


def describe_changes(
    outcomes: Sequence[Outcome], before: Texts, ids: Sequence[str]
) -> list[dict[str, Any]]:
    """Describe every text that attacks tried, as plain values."""
    return [
        {
            "id": name,
            "trial": str(outcome.trial.key),
            **_name_columns(new),
            "original": BETWEEN.join(_texts(old)),
            "changes": new.changes,
            "tried": new.tried,
            "possible": new.possible,
            "robust": bool(stands),
        }
        for outcome in outcomes
        if outcome.drafts is not None and outcome.trial is not None
        for name, old, new, stands in zip(
            ids, before.drafts, outcome.drafts, outcome.robust.tolist(), strict=True
        )
    ]


def _name_columns(draft: Draft) -> dict[str, Any]:
    """Return a text by the columns in which `--data` reads it, with its continuations."""
    texts = _texts(draft)
    continuations = draft.source and draft.source.continuations
    if not continuations:
        return dict(zip(COLUMNS, texts, strict=False))
    (prompt,) = texts
    if len(continuations.texts) == 1:
        return {"prompt": prompt, "continuation": continuations.texts[0]}
    return {"question": prompt, "choices": list(continuations.texts)}


def _texts(draft: Draft) -> tuple[str, ...]:
    """Return a text, or the two of a pair; token ids if the characters are unknown."""
    return draft.texts or (" ".join(map(str, draft.ids)),)


def quote(draft: Draft) -> str:
    """Return the beginning of a text."""
    text = BETWEEN.join(_texts(draft))
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def table(parts: Sequence[Part]) -> bytes:
    """Write the changed texts as a .jsonl file for `--data`: text and label come first."""
    lines = []
    for part in parts:
        labels = dict(zip(part.ids, part.values["label"].tolist(), strict=True))
        for line in part.facts["texts"]:
            facts = {name: line[name] for name in (*COLUMNS, *PROMPTS) if name in line}
            answer = "answer" if "choices" in line else "label"
            facts[answer] = labels[line["id"]]
            lines.append(escape_controls(json.dumps(facts | line, ensure_ascii=False)) + "\n")
    return "".join(lines).encode()


def list_survivors(parts: Sequence[Part], trial: Trial) -> list[dict[str, Any]]:
    """Return what is stored of each text that a trial did not break, from `describe_changes`."""
    lines = [line for part in parts for line in part.facts.get("texts", ())]
    return [line for line in lines if line["trial"] == str(trial.key) and line["robust"]]


def share_untried(parts: Sequence[Part], trial: Trial) -> float:
    """Return the share of the single changes of surviving texts that a trial did not try.

    NaN if no text survived, or none can change.
    """
    survivors = list_survivors(parts, trial)
    possible = sum(line["possible"] for line in survivors)
    tried = sum(line["tried"] for line in survivors)
    return 1 - tried / possible if possible else math.nan


def note_untried(parts: Sequence[Part], trial: Trial) -> Iterator[Note]:
    """Note whether the search of a trial tried every single change of the surviving texts."""
    share = share_untried(parts, trial)
    if share == 0:
        counts = [line["possible"] for line in list_survivors(parts, trial)]
        text = f"{trial.key.ball}: all single changes of the surviving texts were tried"
        text += f" ({median_low(counts)} of the median text, over all steps)"
        yield Note.info("all-tried", text)
    elif share > 0:
        (attack, *_) = trial.attacks
        most = f"at most {attack.queries} for each change. Raise --queries to try more"
        if trial.norm == "suffix":
            most = f"{attack.steps} steps of {attack.queries}. Raise --steps to try more"
        text = f"{trial.key.ball}: {share:.1%} of the single changes of the surviving texts were "
        text += f"not tried, with {most}"
        yield Note.warn("untried-changes", text)


def note_changes(parts: Sequence[Part], trials: Sequence[Trial]) -> Iterator[Note]:
    """Note what changed texts keep of the original and what they do not."""
    counted = sorted((t for t in trials if t.norm in COUNTED), key=lambda t: t.radius.value)
    if not counted:
        return
    yield Note.info(
        "changed-texts",
        "texts were changed within the allowed number of changes. Whether a changed "
        "text keeps its meaning and label is not checked: read some (--save-adv "
        "adv.jsonl). A search without success proves nothing",
    )
    for trial in counted:
        yield from note_untried(parts, trial)
    # Budgets with which an attack can rewrite most texts from end to end; the smallest come first.
    budgets = {trial.norm: int(trial.radius.value) for trial in counted if trial.norm != "suffix"}
    for norm, budget in budgets.items():
        sizes = [size for part in parts for size in part.facts["sizes"][norm]]
        whole = sum(0 < size <= budget for size in sizes)
        if 2 * whole > len(sizes):
            text = (
                f"{budget} {norm} can replace whole texts: {whole} of {len(sizes)} have no more "
                f"(median {median_low(sizes)}). Allow fewer changes: --attack {norm} --eps 1,2"
            )
            yield Note.warn("whole-texts", text)


# Relative drop of a score above which a loss counts as raised, beyond rounding.
SMALL = 1e-3
# More nats than any text has.
FAR = 1e6


@torch.no_grad()
def forward_pieces(net: Net, batch: Batch, z: Tensor, size: int) -> Tensor:
    """Return the logits or the scores at a point per sample, `size` samples at a time."""
    rows = torch.split(torch.arange(len(z), device=z.device), size)
    return torch.cat([net.forward(z[i], batch.without_ids(i)) for i in rows])


def score_outcome(net: Net, batch: Batch, chunk: Chunk, outcome: Outcome, size: int) -> Tensor:
    """Return the scores of the samples as an attack left them, (batch, classes)."""
    if outcome.drafts is None or chunk.texts is None:
        return forward_pieces(net, batch, outcome.x_adv, size)
    reader = chunk.texts.reader
    return TextOracle(reader, size)([reader.read(draft) for draft in outcome.drafts])


def move_losses(
    net: Net,
    batch: Batch,
    chunk: Chunk,
    outcomes: Sequence[Outcome],
    target: int | None,
    **how: Any,
) -> Iterator[Outcome]:
    """Increase the loss of every continuation, right or wrong, with the attacks of each trial.

    With a target, the loss is decreased. A sample is robust if it is robust there, too. Each trial
    gets one more outcome: at the point or text that broke the sample, else at the one with the
    higher loss (with a target, the lower one).

    Args:
        net: the model, which scores continuations (see `models.sources.classifiers`): the first
            is log p.
        batch: the samples.
        chunk: the samples, to be attacked.
        outcomes: outcomes of the attacks before, the clean samples first.
        target: the class that the attacks aim at: 0, the continuation, or None.
        how: box, seed and batch size of the attacks.
    """
    sign = 1 if target is None else -1
    size = how["batch_size"]
    correct = outcomes[0].robust
    for trial, end in {o.trial: o for o in outcomes if o.trial is not None}.items():
        climb = _climb_texts if trial.norm in COUNTED else _climb_ball
        climbs = climb(net, batch, chunk, trial, sign, how)
        top = climbs[-1]
        own, other = (score_outcome(net, batch, chunk, each, size) for each in (end, top))
        right = other.argmax(1) == chunk.y
        # The climb's point replaces the end point if it broke the sample or went further.
        further = (sign * other[:, 0] < sign * own[:, 0]) & ~(correct & ~end.robust & right)
        further |= end.robust & ~right
        drafts = end.drafts
        if drafts is not None and top.drafts is not None:
            pairs = zip(drafts, top.drafts, further.tolist(), strict=True)
            drafts = [new if replaced else old for old, new, replaced in pairs]
        yield replace(
            end,
            robust=end.robust & right,
            x_adv=torch.where(further[:, None, None], top.x_adv, end.x_adv),
            distance=torch.where(further, top.distance, end.distance),
            drafts=drafts,
            notes=(),
            **{what: sum(getattr(each, what) for each in climbs) for what in COSTS},
        )


def _climb_ball(
    net: Net, batch: Batch, chunk: Chunk, trial: Trial, sign: int, how: dict[str, Any]
) -> list[Outcome]:
    """Run a trial on the loss of every continuation.

    The attacks maximise softplus(c - log p) with c just below log p at the sample; its gradient
    has the direction of the gradient of the loss -log p. The iterate with the highest loss counts.
    """
    floor = sign * forward_pieces(net, batch, chunk.x, how["batch_size"])[:, 0]
    floor = floor - SMALL * (1 + floor.abs())

    def loss(z: Tensor, rows: Tensor) -> Tensor:
        own = sign * net.forward(z, batch.without_ids(rows))[:, 0]
        return torch.stack([own, floor[rows]], 1)

    alone = replace(chunk, y=torch.zeros_like(chunk.y))
    _, *climbs = evaluate_chunk(ByRow(loss), alone, [trial], **how)
    return climbs


def _climb_texts(
    net: Net, batch: Batch, chunk: Chunk, trial: Trial, sign: int, how: dict[str, Any]
) -> list[Outcome]:
    """Run a trial that changes texts on log p of every continuation.

    A search ends at a negative lead: the lead is log p plus a constant that keeps it positive.
    """
    assert chunk.texts is not None
    reader = chunk.texts.reader

    def lift(scores: Tensor) -> Tensor:
        own = sign * scores[:, 0].double()
        return torch.stack([own, torch.full_like(own, -FAR)], 1)

    climbing = replace(
        reader,
        output=lambda ids, mask: lift(reader.output(ids, mask)),
        forward=lambda z, ids, mask: lift(reader.forward(z, ids, mask)),
    )
    texts = replace(chunk.texts, reader=climbing)
    alone = replace(chunk, y=torch.zeros_like(chunk.y), texts=texts)
    loss = ByRow(lambda z, rows: lift(net.forward(z, batch.without_ids(rows))))
    _, *climbs = evaluate_chunk(loss, alone, [trial], **how)
    return climbs


def note_target(net: Net, target: int | None) -> tuple[Note, ...]:
    """Return the note on a target; none without one."""
    if target is None:
        return ()
    name = net.labels[target] if net.labels else str(target)
    text = f"the attacks aim at {name}: a sample is broken if the model answers it. Samples whose "
    text += "answer it is count as they are"
    if net.scored == "continuation":
        text = (
            "the attacks make the continuation likelier: accuracy is the share of prompts behind "
        )
        text += "which greedy decoding does not give it"
    return (Note.info("target", text),)


def note_losses(losses: dict[str, Values], target: str | None) -> Note:
    """Note the mean losses.

    Args:
        target: the class that the attacks aim at: the continuation, or None.
        losses: loss of every sample without change (`loss`) and under each attack
            (`loss@ATTACK,NORM,EPS`).
    """
    parsed = [(parse_column(name)[1], values.mean()) for name, values in losses.items()]
    clean = next(mean for key, mean in parsed if key is None)
    after = [
        f"{mean:#.3g} by {key.attack} ({key.ball})" for key, mean in parsed if key is not None
    ]
    moved = "raised" if target is None else "lowered"
    text = f"the mean loss of a continuation ({clean:#.3g} nats) was {moved} to {', '.join(after)}"
    return Note.info("loss", text)
