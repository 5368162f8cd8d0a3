"""Prompts and continuations: rows of a table that a language model scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lipaudit.data.batch import (
    DataOptions,
    SampleOrigin,
    Samples,
    Task,
    draw,
    make_samples,
    warning,
)
from lipaudit.data.tables import (
    LABELS,
    SampleTable,
    choose_column,
    choose_sound,
    choose_text_columns,
    find_fault,
    limit_tokens,
    shorten,
)
from lipaudit.errors import InputError

if TYPE_CHECKING:
    from lipaudit.models.net import Net

CONTINUED = (("prompt", "continuation"), ("prompt", "completion"))
"""Usual names of the columns of a prompt and its continuation."""
CHOICES = ("choices", "endings", "options")
PROMPTS = ("prompt", "ctx")
"""Further names of a prompt column, in addition to those of texts."""
ANSWERS = ("answer", "answerKey", "gold")
"""Further names of the column of the right choice, in addition to those of labels."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WHOLE = 2**20
"""More tokens than any text has: texts are cut later, when the limit is known."""


@dataclass(frozen=True)
class Question:
    """A prompt, its possible continuations, and the index of the right one."""

    prompt: str
    continuations: tuple[str, ...]
    right: int = 0


Ask = Callable[[Mapping[str, Any]], Question]
"""The values of a row -> its question; a ValueError gives the fault of the row."""


@dataclass(frozen=True)
class _Form:
    """How the rows of a table ask.

    Attributes:
        kind: the kind of question.
        needed: columns that may not be empty; those of the prompt come first.
        ask: reads a question.
        names: names of the continuations; empty for letters.
    """

    kind: Literal["continuation", "choices", "labels"]
    needed: tuple[str, ...]
    ask: Ask
    names: tuple[str, ...] = ()


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
    limit, notes = limit_tokens(net, options)
    origin = table.origin
    if net.tokenize is None or not net.vocabulary:
        raise InputError(
            f"{origin} holds text, and the model has no tokenizer",
            "Put tokenizer.json beside config.json.",
        )
    tokenize, vocabulary = net.tokenize, net.vocabulary
    choose_sound(table, table.faults, options)  # before columns: unreadable rows have none
    rows = {i: table.rows[i] for i in range(len(table.places)) if i not in table.faults}
    form = _choose_form(table, rows, options)
    asked, faults = _ask(rows, form)
    sound, left_out = choose_sound(table, {**table.faults, **faults}, options)
    questions = [asked[i] for i in sound]
    names = form.names or tuple(LETTERS[: len(questions[0].continuations)])

    def read(k: int) -> tuple[Tensor, bool]:
        question = questions[k]
        pairs = [_encode_pair(question.prompt, text, tokenize) for text in question.continuations]
        prompt, follow = pairs[0][0], [ids for _, ids in pairs]
        room, shown = limit - max(map(len, follow)), question.prompt[:40]
        if not prompt or not all(follow):
            raise InputError(
                f"{origin}: {shown!r} or its continuation has no tokens",
                "Remove such rows, or leave them out with --skip-bad.",
            )
        if room < 1:
            raise InputError(
                f"{origin}: the continuation of {shown!r} leaves no room for the prompt within "
                f"{limit} tokens",
                "Raise --max-tokens, or leave such rows out with --skip-bad.",
            )
        return pack(prompt[-room:], follow, vocabulary), len(prompt) > room

    drawn, skipped = draw(len(sound), options, read, what="rows")
    if cut := sum(is_cut for _, (_, is_cut) in drawn):
        text = (
            f"{cut} of {len(drawn)} prompts were cut at their beginning, so that prompt and "
            f"continuation fit into {limit} tokens (--max-tokens)"
        )
        notes += (warning("text-cut", text),)
    return make_samples(
        [ids for _, (ids, _) in drawn],
        net,
        [questions[k].right for k, _ in drawn],
        notes=left_out + skipped + notes,
        origins=[
            SampleOrigin(table.name(sound[k]), shorten((questions[k].prompt,))) for k, _ in drawn
        ],
        task=Task(form.kind, names),
    )


def _ask(
    rows: Mapping[int, Mapping[str, Any]], form: _Form
) -> tuple[dict[int, Question], dict[int, str]]:
    """Return the question of each row, and why rows have none."""
    asked: dict[int, Question] = {}
    faults: dict[int, str] = {}
    for i, row in rows.items():
        try:
            if empty := _find_empty(row, form.needed):
                raise ValueError(f"has no {empty!r}")
            asked[i] = form.ask(row)
        except ValueError as error:
            faults[i] = str(error)
    usual = Counter(len(question.continuations) for question in asked.values()).most_common(1)
    for i, question in asked.items():
        # The classes of a batch are the choices, so all rows need the same number.
        if (count := len(question.continuations)) != usual[0][0]:
            faults[i] = f"has {count} choices, most rows have {usual[0][0]}"
    return asked, faults


def _find_empty(row: Mapping[str, Any], needed: Sequence[str]) -> str | None:
    """Return the first needed column that is empty in a row."""
    return next((n for n in needed if row.get(n) is None or not str(row[n]).strip()), None)


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
) -> _Form:
    """Derive the kind of question from the columns of a table.

    Raises:
        InputError: a column is missing, or labels are numbers without known names.
    """
    columns, origin = table.columns, table.origin
    choices = next((name for name in CHOICES if name in columns), None)
    label = choose_column(table, options.label_column, (*(ANSWERS if choices else ()), *LABELS))
    pair = next((pair for pair in CONTINUED if set(pair) <= set(columns)), None)
    plain = options.text_column is None and options.label_column is None
    texts = () if options.text_column is None else choose_text_columns(table, options)
    if pair is None and label is None and len(texts) == 2:
        pair, plain = (texts[0], texts[1]), True
    if choices is None and pair is not None and plain:
        prompt, follows = pair
        return _Form(
            "continuation",
            pair,
            lambda row: Question(_join(row, (prompt,)), (_join(row, (follows,)),)),
            ("continuation", "rival"),
        )
    if label is None:
        raise InputError(
            f"{origin} has no column to score (columns: {', '.join(columns)})",
            "It needs prompt and continuation (or --text-column PROMPT,CONTINUATION); question, "
            "choices and answer (--label-column); or a text and a label.",
        )
    prompts = choose_text_columns(table, options, usual=PROMPTS)
    needed = (*prompts, *([choices] if choices else []), label)
    if choices is not None:

        def choose(row: Mapping[str, Any]) -> Question:
            texts = _read_choices(row[choices])
            return Question(_join(row, prompts), texts, _find_answer(row[label], texts))

        return _Form("choices", needed, choose)
    known = table.classes.get(label)
    values = {str(row[label]) for row in rows.values() if not _find_empty(row, needed)}
    words = tuple(sorted(values) if known is None else known)
    number = next((v for v in words if v.strip().lstrip("-").replace(".", "").isdigit()), None)
    if number is not None and known is None:
        raise InputError(
            f"{origin}: {label!r} holds numbers ({number}), but a language model needs words",
            "Write the class names into that column, or name another with --label-column.",
        )

    def classify(row: Mapping[str, Any]) -> Question:
        value, allowed = row[label], words if known is None else range(len(words))
        value = _join(row, (label,)) if known is None else value
        if value not in allowed:
            raise ValueError(f"has the label {value!r}, which is not a class")
        return Question(_join(row, prompts), words, list(allowed).index(value))

    return _Form("labels", needed, classify, words)


def _join(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Return the text of a row; several columns are on lines of their own."""
    if fault := find_fault(row, columns):
        raise ValueError(fault)
    return "\n".join(str(row[name]) for name in columns)


def _read_choices(value: Any) -> tuple[str, ...]:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    texts = tuple("" if text is None else str(text) for text in (value if listed else ()))
    if not 2 <= len(texts) <= len(LETTERS) or not all(text.strip() for text in texts):
        raise ValueError(f"has no list of 2 to {len(LETTERS)} choices, none of them empty")
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
    if len(meant) == 1:
        return meant.pop()
    which = "may mean more than one" if meant else "is none"
    raise ValueError(f"has the answer {value!r}, which {which} of its {len(choices)} choices")
