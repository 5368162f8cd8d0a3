"""Prompts and continuations: rows of a table that a language model scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lipaudit.data import tables
from lipaudit.data.batch import DataOptions, SampleOrigin, Samples, Task, make_batch
from lipaudit.data.tables import SampleTable
from lipaudit.errors import InputError
from lipaudit.tables import Note

if TYPE_CHECKING:
    from lipaudit.models.net import Net

# Usual names of the columns of a prompt and its continuation.
CONTINUED = (("prompt", "continuation"), ("prompt", "completion"))
CHOICES = ("choices", "endings", "options")
# Further names of a prompt column, in addition to those of texts.
PROMPTS = ("prompt", "ctx")
# Further names of the column of the right choice, in addition to those of labels.
ANSWERS = ("answer", "answerKey", "gold")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# More tokens than any text has: texts are cut later, when the limit is known.
WHOLE = 2**20


@dataclass(frozen=True)
class Question:
    """A prompt, its possible continuations, and the index of the right one."""

    prompt: str
    continuations: tuple[str, ...]
    right: int = 0


@dataclass(frozen=True)
class QuestionForm:
    """How the rows of a table ask.

    Attributes:
        kind: the kind of question.
        prompts: columns of the prompt, each a line of its own.
        follows: column of the continuation or of the choices; empty for labels.
        label: column of the right choice or of the label; empty for a continuation.
        words: the labels as words.
        values: each label in the table: its number where the table names its classes, or its text.
    """

    kind: Literal["continuation", "choices", "labels"]
    prompts: tuple[str, ...]
    follows: str = ""
    label: str = ""
    words: tuple[str, ...] = ()
    values: Sequence[object] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the columns that may not be empty."""
        return (*self.prompts, *filter(None, (self.follows, self.label)))

    def ask(self, row: Mapping[str, Any]) -> Question:
        """Return the question of a row.

        Raises:
            InputError: the row has none; the message is its fault.
        """
        empty = next((name for name in self.needed if tables.is_empty(row.get(name))), None)
        if empty:
            raise InputError(f"has no {empty!r}")
        texts = self.needed if self.kind == "continuation" else self.prompts
        if fault := tables.find_fault(row, texts):
            raise InputError(fault)
        prompt = "\n".join(str(row[name]) for name in self.prompts)
        if self.kind == "continuation":
            return Question(prompt, (str(row[self.follows]),))
        if self.kind == "choices":
            choices = _read_choices(row[self.follows])
            return Question(prompt, choices, _find_answer(row[self.label], choices))
        if fault := tables.find_fault(row, (self.label,)):
            raise InputError(fault)
        label = row[self.label]
        value = label if label in self.values else str(label)
        if value not in self.values:
            raise InputError(f"has the label {label!r}, which is not a class")
        return Question(prompt, self.words, self.values.index(value))


def pack(prompt: Sequence[int], continuations: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Pack a prompt and its continuations into one row: id + i * vocabulary in continuation i.

    >>> pack([7, 3], [[5], [5, 6]], 10)
    tensor([ 7,  3, 15, 25, 26])
    """
    follow = [t + i * vocabulary for i, ids in enumerate(continuations, 1) for t in ids]
    return torch.tensor([*prompt, *follow], dtype=torch.int64)


def read_continuations(table: SampleTable, net: Net, options: DataOptions) -> Samples:
    """Read prompts, and the continuations that a language model scores behind each.

    The columns decide: a prompt and its continuation; a question, its choices and the answer; or a
    text (or a pair, on two lines) and its label, whose name is the continuation. A blank separates
    prompt and continuation and belongs to the continuation. As in lm-evaluation-harness, prompt
    and continuation are tokenized together, and the ids behind the prompt's ids are the
    continuation's. A prompt that is too long loses its beginning.

    Raises:
        InputError: columns are missing, rows have no question, or the model has no tokenizer.
    """
    limit, notes = tables.limit_tokens(net, options)
    origin, tokenize, vocabulary = table.origin, net.tokenize, net.vocabulary
    if tokenize is None or not vocabulary:
        advice = "Put tokenizer.json beside config.json."
        raise InputError(f"{origin} holds text, and the model has no tokenizer", advice)
    table.require_rows(options)  # before columns: unreadable rows have none
    rows = {i: table.rows[i] for i in table.sound}
    form, faults = _choose_form(table, rows, options), dict(table.faults)
    asked: dict[int, Question] = {}
    for i, row in rows.items():
        try:
            asked[i] = form.ask(row)
        except InputError as error:
            faults[i] = error.message
    usual = Counter(len(question.continuations) for question in asked.values()).most_common(1)
    for i, question in asked.items():
        # The classes of a batch are the choices, so all rows need the same number.
        if (count := len(question.continuations)) != usual[0][0]:
            faults[i] = f"has {count} choices, most rows have {usual[0][0]}"

    def read(i: int) -> tuple[Tensor, bool]:
        question = asked[i]
        pairs = [_encode_pair(question.prompt, text, tokenize) for text in question.continuations]
        prompt, follow = pairs[0][0], [ids for _, ids in pairs]
        room, shown = limit - max(map(len, follow)), question.prompt[:40]
        if not prompt or not all(follow):
            raise InputError(
                f"{origin}: {shown!r} or its continuation has no tokens",
                "Remove such rows, or leave them out with --skip-bad.",
            )
        if room < 1:
            text = f"{origin}: the continuation of {shown!r} leaves no room for the prompt"
            raise InputError(
                f"{text} within {limit} tokens",
                "Raise --max-tokens, or leave such rows out with --skip-bad.",
            )
        return pack(prompt[-room:], follow, vocabulary), len(prompt) > room

    table = replace(table, faults=faults)
    drawn, skipped = tables.draw_rows(table, options, read, what="rows")
    if cut := sum(is_cut for _, (_, is_cut) in drawn):
        text = (
            f"{cut} of {len(drawn)} prompts were cut at their beginning, so that prompt and "
            f"continuation fit into {limit} tokens (--max-tokens)"
        )
        notes += (Note.warn("text-cut", text),)
    names = {"continuation": ("continuation", "rival"), "labels": form.words}
    batch = make_batch([ids for _, (ids, _) in drawn], net, [asked[i].right for i, _ in drawn])
    origins = (SampleOrigin(table.name(i), tables.shorten((asked[i].prompt,))) for i, _ in drawn)
    task = Task(form.kind, names.get(form.kind, tuple(LETTERS[: usual[0][0]])))
    return Samples(batch, skipped + notes, origins=tuple(origins), task=task)


def _encode_pair(
    prompt: str, text: str, tokenize: Callable[[str, int], list[int]]
) -> tuple[list[int], list[int]]:
    start = prompt.rstrip()
    blank = prompt[len(start) :] or ("" if text[:1].isspace() else " ")
    before, both = tokenize(start, WHOLE), tokenize(start + blank + text, WHOLE)
    # Some tokenizers end every text with a token, which does not belong to a prompt.
    closed = before and both[-1:] == before[-1:] and both[: len(before)] != before
    if closed and both[: len(before) - 1] == before[:-1]:
        before, both = before[:-1], both[:-1]
    return before, both[len(before) :]


def _choose_form(
    table: SampleTable, rows: Mapping[int, Mapping[str, Any]], options: DataOptions
) -> QuestionForm:
    """Derive the kind of question from the columns of a table.

    Raises:
        InputError: a column is missing, or labels are numbers without known names.
    """
    columns, origin = table.columns, table.origin
    choices = next((name for name in CHOICES if name in columns), "")
    usual = (*(ANSWERS if choices else ()), *tables.LABELS)
    label = tables.choose_column(table, options.label_column, usual)
    pair = next((pair for pair in CONTINUED if set(pair) <= set(columns)), None)
    plain = options.text_column is None and options.label_column is None
    texts = () if options.text_column is None else tables.choose_text_columns(table, options)
    if pair is None and label is None and len(texts) == 2:
        pair, plain = (texts[0], texts[1]), True
    if not choices and pair is not None and plain:
        return QuestionForm("continuation", pair[:1], pair[1])
    if label is None:
        raise InputError(
            f"{origin} has no column to score (columns: {', '.join(columns)})",
            "It needs prompt and continuation (or --text-column PROMPT,CONTINUATION); question, "
            "choices and answer (--label-column); or a text and a label.",
        )
    prompts = tables.choose_text_columns(table, options, usual=PROMPTS)
    if choices:
        return QuestionForm("choices", prompts, choices, label)
    known, needed = table.classes.get(label), (*prompts, label)
    if known is not None:
        return QuestionForm("labels", prompts, "", label, tuple(known), range(len(known)))
    whole = [row for row in rows.values() if not any(tables.is_empty(row.get(n)) for n in needed)]
    words = tuple(sorted({str(row[label]) for row in whole}))
    number = next((v for v in words if v.strip().lstrip("-").replace(".", "").isdigit()), None)
    if number is not None:
        raise InputError(
            f"{origin}: {label!r} holds numbers ({number}), but a language model needs words",
            "Write the class names into that column, or name another with --label-column.",
        )
    return QuestionForm("labels", prompts, "", label, words, words)


def _read_choices(value: Any) -> tuple[str, ...]:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    texts = tuple("" if text is None else str(text) for text in (value if listed else ()))
    fits = 2 <= len(texts) <= len(LETTERS) and all(text.strip() for text in texts)
    if not fits:
        raise InputError(f"has no list of 2 to {len(LETTERS)} choices, none of them empty")
    return texts


def _find_answer(value: Any, choices: Sequence[str]) -> int:
    """Return the index of the right choice.

    An answer may be an index from 0; if it is not a number, also the text or letter of a choice.
    """
    text = str(value).strip()
    # 1 is an index; "1" may be an index or the text of a choice.
    known = [[str(i) for i in range(len(choices))]]
    if not isinstance(value, int) or isinstance(value, bool):
        known += [[choice.strip() for choice in choices], [*LETTERS[: len(choices)]]]
    meant = {names.index(text) for names in known if text in names}
    if len(meant) != 1:
        which = "may mean more than one" if meant else "is none"
        raise InputError(f"has the answer {value!r}, which {which} of its {len(choices)} choices")
    return meant.pop()
