"""Attacks on texts: how texts are read, the stored changes, and the notes on them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median_low
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipaudit.attacks.evaluate import Outcome, Texts
from lipaudit.attacks.kinds import Trial
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
from lipaudit.data.batch import Batch, Tokenize
from lipaudit.data.continuations import WHOLE, Packer
from lipaudit.errors import InputError, escape_controls, is_machine_error
from lipaudit.measures.base import Facts, Part
from lipaudit.models.net import Net
from lipaudit.models.requirements import agree
from lipaudit.tables import Note
from lipaudit.tables.trials import COUNTED

if TYPE_CHECKING:
    from lipaudit.measures.rounds import ChunkRun

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
    """Return how a text model reads texts: its vocabulary, embedding table and forward pass.

    Attacks that change texts run the model on every changed text with this `Reader`.

    Raises:
        InputError: the model has no embedding table for token ids.
    """
    table = getattr(net.entry, "weight", None)
    if not isinstance(table, Tensor) or table.ndim != 2 or not net.vocabulary:
        raise InputError(
            f"{net.architecture} has no embedding table, which the search for similar words needs",
            "Attack its embeddings: --attack fgsm,pgd --eps 0.1.",
        )
    if net.lexicon is not None:
        lexicon = net.lexicon()
    else:
        lexicon = _make_lexicon(net, net.vocabulary)
    return Reader(
        output=lambda ids, mask: net.output(_make_batch(ids, mask)),
        point=lambda ids, mask: net.point(_make_batch(ids, mask)),
        forward=lambda z, ids, mask: net.forward(z, _make_batch(ids, mask)),
        table=table.detach(),
        lexicon=lexicon,
        # The largest number of tokens. WHOLE is no limit: a model that scores continuations gets a
        # prompt and all its continuations in one row, which may be longer than the model's limit.
        # Each continuation is scored alone behind the prompt.
        most=WHOLE if net.scored else net.input_shape[0],
        pad_id=net.pad_id or 0,
        tokenize=net.tokenize if net.scored else None,
    )


def _make_lexicon(net: Net, vocabulary: int) -> Lexicon:
    """Return the words of a model without a tokenizer: every token id is a word of its own."""
    kinds = torch.full((vocabulary,), BEGINS)  # each token begins a word
    # Only the special ids that are known are fixed, so that no attack changes them.
    for special in (net.pad_id or 0, net.end_id):
        if special is not None:
            kinds[special] = FIXED
    return Lexicon(kinds)


def _make_batch(ids: Tensor, mask: Tensor | None) -> Batch:
    """Return token ids as a batch of nameless samples."""
    return Batch(ids, y=None, ids=("",) * len(ids), mask=mask)


def read_texts(reader: Reader, batch: Batch, *, characters: bool) -> Texts:
    """Return the samples of a batch as texts that attacks can change, without their padding.

    Args:
        reader: how the model reads texts.
        batch: the samples.
        characters: whether an attack changes characters.

    Raises:
        InputError: the characters are known or needed, and do not give the token ids.
    """
    rows = remove_padding(batch, batch.x)  # the token ids of each sample
    if reader.tokenize is not None:  # the samples are prompts with their continuations
        return Texts(reader, _draft_prompts(reader, reader.tokenize, batch, rows))
    # Does padding change the model's output? It is tried on the shortest text, which costs least
    # and has most room for padding.
    shortest = min(rows, key=len)
    reads_padding = _reads_padding(reader, shortest)
    most = min(reader.most, batch.limit or reader.most)  # largest number of tokens
    reader = replace(reader, most=most, reads_padding=reads_padding)
    texts = batch.texts or ((),) * len(rows)  # (): only token ids are known
    drafts = []
    for row, text in zip(rows, texts, strict=True):
        drafts.append(reader.lexicon.make_draft(row.tolist(), text, most))
    # A draft has no source if its characters are unknown, or do not give its token ids. Known
    # characters that do not give the ids are always an error: the tokenizer is not the model's.
    # Samples without characters are fine, unless characters are to be changed.
    unknown = sum(draft.source is None for draft in drafts)
    if unknown and (batch.texts or characters):
        raise _make_mismatch(unknown)
    return Texts(reader, drafts)


def remove_padding(batch: Batch, values: Tensor) -> Sequence[Tensor]:
    """Return the values of each sample at tokens that are not padding, on the CPU.

    Args:
        batch: the samples.
        values: (samples, tokens, ...).
    """
    values = values.cpu()
    if batch.mask is None:
        return list(values)
    return [row[mask] for row, mask in zip(values, batch.mask.cpu(), strict=True)]


def _reads_padding(reader: Reader, ids: Tensor) -> bool:
    """Say whether padding behind a text changes the output of the model.

    If so, texts of different lengths cannot be padded to one batch.

    Args:
        reader: the model, and the largest number of tokens (`most`).
        ids: the token ids of a text, on which this is tried.
    """
    # Make room for padding. The beginning is dropped, as some models need the last token.
    surplus = max(0, len(ids) + PADDING - reader.most)
    ids = ids[surplus:]
    padding = ids.new_full((PADDING,), reader.pad_id)
    longer = torch.cat([ids, padding])[None]  # (1, tokens)
    mask = (torch.arange(longer.shape[1]) < len(ids))[None]  # False at padding
    device = reader.table.device
    try:
        with torch.no_grad():
            alone = reader.output(ids[None].to(device), None)
            padded = reader.output(longer.to(device), mask.to(device))
        return not agree(alone, padded)
    except Exception as error:  # the model takes no mask, or texts of one length only
        if is_machine_error(error):
            raise
        return True


def _make_mismatch(count: int) -> InputError:
    """Return the error on samples whose characters are unknown."""
    return InputError(
        f"the token ids of {count} samples do not match their text, so words and characters "
        "cannot be changed",
        "Give texts (.csv, .jsonl) and a tokenizer.json, or attack embeddings: "
        "--attack fgsm,pgd --eps 0.1.",
    )


def _draft_prompts(
    reader: Reader,
    tokenize: Tokenize,
    batch: Batch,
    rows: Sequence[Tensor],
) -> list[Draft]:
    """Return the prompts of samples as drafts: words that attacks can change.

    A sample is packed: the token ids of a prompt, then the ids of all its continuations. An attack
    changes words of the prompt, and packs the new prompt with the same continuations. So packing
    the unchanged prompt must give the ids of the sample.

    Args:
        reader: how the model reads texts.
        tokenize: (prompt, largest number of tokens) -> token ids.
        batch: the samples, with the characters of prompts and continuations.
        rows: the packed ids of each sample, without padding.

    Raises:
        InputError: the characters of a prompt are unknown, or packing them again gives other ids.
    """
    lexicon = reader.lexicon
    if lexicon.read is None or not batch.continuations:
        raise _make_mismatch(len(batch))
    # `kinds` has an entry for every token id, so its length is the size of the vocabulary.
    packer = Packer(tokenize, len(lexicon.kinds), batch.limit)
    drafts = []
    for row, (prompt,), continuations in zip(rows, batch.texts, batch.continuations, strict=True):
        draft = _draft_prompt(lexicon, packer, prompt, continuations, row.tolist())
        if draft is not None:
            drafts.append(draft)
    if len(drafts) < len(rows):
        raise _make_mismatch(len(rows) - len(drafts))
    return drafts


def _draft_prompt(
    lexicon: Lexicon,
    packer: Packer,
    prompt: str,
    continuations: tuple[str, ...],
    packed: Sequence[int],
) -> Draft | None:
    """Return a prompt as a draft: its words, and where each token is in its characters.

    None if packing the prompt again does not give the ids of the sample.

    Args:
        lexicon: the vocabulary, with a tokenizer.
        packer: tokenizes and packs the prompt.
        prompt: the characters of the prompt.
        continuations: what a language model scores behind the prompt.
        packed: the ids of the sample: of the prompt, then of its continuations.
    """
    assert lexicon.read is not None
    prompt_ids, continuation_ids = packer.encode(prompt, continuations)
    ids = tuple(prompt_ids)
    # 1. Require that this tokenizer gives the ids of the sample, in two ways. `encode` gives ids
    # only. `read` tokenizes the prompt again, and also gives the span of each token in the
    # characters. For `encode`, white space at the end of the prompt is part of the continuations:
    # so `read` gets the prompt without it. WHOLE is more than any number of tokens: none is cut.
    tokens, spans = lexicon.read((prompt.rstrip(),), WHOLE)
    # `tokens` may be longer than `ids`: some tokenizers add a special token at the end.
    if tokens[: len(ids)] != ids or list(packed) != list(packer.pack(prompt, continuations)):
        return None
    # 2. The words of the prompt, and the spans of the tokens of each word.
    words = lexicon.split_words(ids, spans[: len(ids)])  # each word is a tuple of its tokens
    # Each word takes as many of the next spans as it has tokens.
    unused_spans = iter(spans)
    spans_of_words = tuple(tuple(islice(unused_spans, len(word))) for word in words)
    # 3. What stays when an attack changes the prompt. `tail`: the ids behind the prompt. `pack`:
    # returns the ids of a new prompt with the same continuations.
    room = packer.find_room(continuation_ids)  # largest number of tokens of the prompt
    prompt_length = min(len(ids), room)  # packing cuts off the beginning of a long prompt
    fixed = Continuations(
        continuations,
        tail=tuple(packed[prompt_length:]),
        room=room,
        pack=lambda text: tuple(packer.pack(text, continuations)),
    )
    source = Source((prompt,), spans_of_words, most=packer.limit, continuations=fixed)
    return Draft(words, source=source)


def count_units(texts: Texts) -> dict[str, list[int]]:
    """Return the length of each text in words and in characters, as lists by these two names.

    Words are those that an attack may change: pieces such as punctuation are not counted.
    Characters are all of the text, punctuation included; 0 if only its token ids are known.
    """
    is_fixed = texts.reader.lexicon.is_fixed  # True for a piece that must not change
    words = []
    characters = []
    for draft in texts.drafts:
        words.append(sum(not is_fixed(word) for word in draft.words))
        # `draft.texts` has the text, or the two of a pair.
        characters.append(sum(map(len, draft.texts)))
    return {"words": words, "characters": characters}


def describe_changes(
    outcomes: Sequence[Outcome], before: Texts, ids: Sequence[str]
) -> list[Facts]:
    """Describe the changed text of each sample in each trial, as plain values for a part.

    A description has the number of changes, how many single changes the search tried, and how many
    were possible.

    Args:
        outcomes: the last outcome of each trial.
        before: the unchanged texts.
        ids: ids of the samples.
    """
    lines = []
    for outcome in outcomes:
        # No drafts: the attack changed no text. No trial: no attack of the trial ran.
        if outcome.drafts is None or outcome.trial is None:
            continue
        trial = str(outcome.trial.key)
        pairs = zip(before.drafts, outcome.drafts, strict=True)
        for i, (old, new) in enumerate(pairs):
            lines.append(
                {
                    "id": ids[i],
                    "trial": trial,
                    **_name_columns(new),
                    "original": BETWEEN.join(_write(old)),
                    "changes": new.changes,
                    "tried": new.tried,
                    "possible": new.possible,
                    "robust": bool(outcome.robust[i]),
                }
            )
    return lines


def _name_columns(draft: Draft) -> dict[str, Any]:
    """Return a text by the names of the columns from which `--data` reads such a text.

    These are `text` (and `text_b` of a pair); `prompt` and `continuation`; or `question` and
    `choices`, if a prompt has several continuations.
    """
    texts = _write(draft)
    continuations = draft.source and draft.source.continuations
    if not continuations:
        return dict(zip(COLUMNS, texts, strict=False))  # a single text has no second column
    (prompt,) = texts
    if len(continuations.texts) == 1:
        return {"prompt": prompt, "continuation": continuations.texts[0]}
    return {"question": prompt, "choices": list(continuations.texts)}


def _write(draft: Draft) -> tuple[str, ...]:
    """Return a text, or the two of a pair; token ids if the characters are unknown."""
    return draft.texts or (" ".join(map(str, draft.ids)),)


def quote(draft: Draft) -> str:
    """Return a text for a note: its first characters, if it is long."""
    text = BETWEEN.join(_write(draft))
    if len(text) <= SHOWN:
        return text
    return text[:SHOWN] + "..."


def encode_table(parts: Sequence[Part]) -> bytes:
    """Return the changed texts as a .jsonl file that `--data` reads, one object per line.

    The columns that `--data` reads come first, then all else that `describe_changes` stored.
    """
    lines = []
    for part in parts:
        labels = dict(zip(part.ids, part.values["label"].tolist(), strict=True))
        for text in part.facts["texts"]:
            columns = {name: text[name] for name in (*COLUMNS, *PROMPTS) if name in text}
            # `--data` reads the right choice of a question from `answer`, any class from `label`.
            label_column = "answer" if "choices" in text else "label"
            columns[label_column] = labels[text["id"]]
            # A dict keeps the order of first insertion: `columns` stay in front.
            line = json.dumps(columns | text, ensure_ascii=False)
            lines.append(escape_controls(line) + "\n")
    return "".join(lines).encode()


def list_survivors(parts: Sequence[Part], trial: Trial) -> list[Facts]:
    """Return what is stored of each text that a trial did not break, from `describe_changes`."""
    lines = [line for part in parts for line in part.facts.get("texts", ())]
    return [line for line in lines if line["trial"] == str(trial.key) and line["robust"]]


def compute_untried_share(parts: Sequence[Part], trial: Trial) -> float:
    """Return the share of all single changes that a trial did not try, on the texts that survived.

    NaN if no text survived, or if no surviving text can change.
    """
    survivors = list_survivors(parts, trial)
    possible = sum(line["possible"] for line in survivors)
    if possible == 0:
        return math.nan
    tried = sum(line["tried"] for line in survivors)
    return 1 - tried / possible


def note_untried(parts: Sequence[Part], trial: Trial) -> Iterator[Note]:
    """Note whether the search of a trial tried every single change of the texts that survived it.

    Nothing is noted if no text survived (the share is NaN).
    """
    share = compute_untried_share(parts, trial)
    if share == 0:
        counts = [line["possible"] for line in list_survivors(parts, trial)]
        text = f"{trial.key.ball}: all single changes of the surviving texts were tried"
        text += f" ({median_low(counts)} of the median text, over all steps)"
        yield Note.info("all-tried", text)
    elif share > 0:
        attack = trial.attacks[0]
        limit = f"at most {attack.queries} for each change. Raise --queries to try more"
        if trial.norm == "suffix":
            limit = f"{attack.steps} steps of {attack.queries}. Raise --steps to try more"
        text = f"{trial.key.ball}: {share:.1%} of the single changes of the surviving texts were "
        text += f"not tried, with {limit}"
        yield Note.warn("untried-changes", text)


def note_changes(parts: Sequence[Part], trials: Sequence[Trial]) -> Iterator[Note]:
    """Note the limits of attacks that change texts.

    Three limits: nobody checks that a changed text keeps its meaning and label. Some changes may
    not have been tried. A large number of changes can replace a short text as a whole.
    """
    of_texts = [trial for trial in trials if trial.norm in COUNTED]
    of_texts.sort(key=lambda trial: trial.radius.value)
    if not of_texts:
        return
    yield Note.info(
        "changed-texts",
        "texts were changed within the allowed number of changes. Whether a changed "
        "text keeps its meaning and label is not checked: read some (--save-adv "
        "adv.jsonl). A search without success proves nothing",
    )
    for trial in of_texts:
        yield from note_untried(parts, trial)
    yield from _note_whole_texts(parts, of_texts)


def _note_whole_texts(parts: Sequence[Part], trials: Sequence[Trial]) -> Iterator[Note]:
    """Warn if an attack may change as many words or characters as most texts have.

    Args:
        parts: the parts, with the number of words and characters of each text.
        trials: the trials that change texts, in ascending order of the allowed changes.
    """
    # By unit (words, characters): the largest allowed number of changes. Trials are sorted by this
    # number, so the last one that enters the dict is the largest. A suffix replaces nothing.
    budgets = {trial.norm: int(trial.radius.value) for trial in trials if trial.norm != "suffix"}
    for norm, budget in budgets.items():
        sizes = [size for part in parts for size in part.facts["sizes"][norm]]
        whole = sum(0 < size <= budget for size in sizes)  # texts that can be replaced as a whole
        if 2 * whole > len(sizes):
            yield Note.warn(
                "whole-texts",
                f"{budget} {norm} can replace whole texts: {whole} of {len(sizes)} have no more "
                f"(median {median_low(sizes)}). Allow fewer changes: --attack {norm} --eps 1,2",
            )


@torch.no_grad()
def forward_pieces(net: Net, batch: Batch, z: Tensor, size: int) -> Tensor:
    """Return the model's output at a point per sample, (samples, classes or scores).

    Args:
        net: the model.
        batch: the samples, for what the model needs besides the points (token ids and padding).
        z: the points in the attacked space, (samples, ...).
        size: number of samples at a time, which limits memory.
    """
    pieces = torch.split(torch.arange(len(z), device=z.device), size)
    return torch.cat([net.forward(z[rows], batch.rows_without_ids(rows)) for rows in pieces])


def score_outcome(net: Net, run: ChunkRun, outcome: Outcome, size: int) -> Tensor:
    """Return the scores at the last point or text of an attack, (samples, scores).

    Args:
        net: the model.
        run: the chunk of samples that was attacked.
        outcome: the outcome of the attack.
        size: number of samples at a time.
    """
    texts = run.chunk.texts
    if outcome.drafts is None or texts is None:  # the attack moved embeddings
        return forward_pieces(net, run.batch, outcome.x_adv, size)
    reader = texts.reader
    return TextOracle(reader, size)([reader.read(draft) for draft in outcome.drafts])


def note_target(net: Net, target: int | None) -> Iterator[Note]:
    """Note what attacks with a target do; nothing without one."""
    if target is None:
        return
    if net.scored == "continuation":
        text = (
            "the attacks make the continuation likelier: accuracy is the share of prompts behind "
            "which greedy decoding does not give it"
        )
    else:
        name = net.labels[target] if net.labels else str(target)
        text = (
            f"the attacks aim at {name}: a sample is broken if the model answers it. Samples "
            "of this class are not attacked"
        )
    yield Note.info("target", text)
