"""Prompts and continuations: rows of a table that a language model scores."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lipaudit.data.batch import SampleOrigin
from lipaudit.data.samples import DataOptions, Samples, Task, draw, make_samples, warning
from lipaudit.data.tables import (
    TableRow,
    check_row,
    choose_label_column,
    choose_text_columns,
    list_columns,
)
from lipaudit.data.text import join_row, leave_out_faulty, limit_tokens, shorten
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


@dataclass(frozen=True)
class _Columns:
    """The columns of a table, and the kind of question that they ask."""

    kind: Literal["continuation", "choices", "labels"]
    prompt: tuple[str, ...]
    follows: str
    right: str | None = None


def pack(prompt: Sequence[int], continuations: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Pack a prompt and its continuations into one row: id + i * vocabulary in continuation i.

    >>> pack([7, 3], [[5], [5, 6]], 10)
    tensor([ 7,  3, 15, 25, 26])
    """
    follow = [t + i * vocabulary for i, ids in enumerate(continuations, 1) for t in ids]
    return torch.tensor([*prompt, *follow], dtype=torch.int64)


def read_continuations(
    rows: Sequence[TableRow],
    net: Net,
    options: DataOptions,
    *,
    origin: str,
    classes: Sequence[str] | None = None,
) -> Samples:
    """Read prompts, and the continuations that a language model scores behind each.

    The columns decide: a prompt and its continuation; a question, its choices and the answer; or a
    text (or a pair, on two lines) and its label, whose name is the continuation. A blank separates
    prompt and continuation and belongs to the continuation. As in lm-evaluation-harness, prompt
    and continuation are tokenized together, and the ids behind the prompt's ids are the
    continuation's. A prompt that is too long loses its beginning.

    Args:
        rows: rows of the table.
        net: the model.
        options: number of rows, and names of columns.
        origin: the table, for messages.
        classes: class names of the numbers in the label column, if the table has them.

    Raises:
        InputError: columns are missing, rows have no question, or the model has no tokenizer.
    """
    limit, notes = limit_tokens(net, options)
    if net.tokenize is None or not net.vocabulary:
        raise InputError(
            f"{origin} holds text, and the model has no tokenizer",
            "Put tokenizer.json beside config.json.",
        )
    tokenize, vocabulary = net.tokenize, net.vocabulary
    rows, faulty = leave_out_faulty(rows, options, origin)
    columns = _choose_columns(list_columns(rows), options, origin)
    names = () if columns.kind != "labels" else _list_label_words(rows, columns, classes, origin)
    asked, count = _ask(rows, columns, names, classes)
    rows, uneven = leave_out_faulty([row for row, _ in asked], options, origin)
    questions = [question for _, question in asked if question is not None]
    names = {"continuation": ("continuation", "rival"), "labels": names}.get(
        columns.kind, tuple(LETTERS[:count])
    )

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

    drawn, skipped = draw(len(rows), options, read, what="rows")
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
        notes=faulty + uneven + skipped + notes,
        origins=[SampleOrigin(rows[k].name, shorten(questions[k].prompt)) for k, _ in drawn],
        task=Task(columns.kind, names),
    )


def _ask(
    rows: Sequence[TableRow],
    columns: _Columns,
    names: Sequence[str],
    classes: Sequence[str] | None,
) -> tuple[list[tuple[TableRow, Question | None]], int]:
    """Return each row with its question or its fault, and the most frequent number of choices."""
    asked: list[tuple[TableRow, Question | None]] = []
    for row in rows:
        try:
            asked.append((row, _read_question(row, columns, names, classes)))
        except ValueError as error:
            asked.append((replace(row, fault=str(error)), None))
    usual = Counter(len(q.continuations) for _, q in asked if q is not None).most_common(1)
    count = usual[0][0] if usual else 0
    for k, (row, question) in enumerate(asked):
        # The classes of a batch are the choices, so all rows need the same number.
        if question is not None and len(question.continuations) != count:
            fault = f"has {len(question.continuations)} choices, most rows have {count}"
            asked[k] = replace(row, fault=fault), None
    return asked, count


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


def _choose_columns(columns: Sequence[str], options: DataOptions, origin: str) -> _Columns:
    """Derive the kind of question from the columns of a table."""
    choose_prompt = partial(choose_text_columns, columns, options, origin=origin, usual=PROMPTS)
    choices = next((name for name in CHOICES if name in columns), None)
    if choices is not None:
        right = choose_label_column(columns, options, origin=origin, usual=ANSWERS)
        if right is None:
            raise InputError(
                f"{origin} does not say which of the {choices} is right",
                "Name the column of the right choice with --label-column.",
            )
        return _Columns("choices", choose_prompt(), choices, right)
    pair = next((pair for pair in CONTINUED if set(pair) <= set(columns)), None)
    if pair is not None and options.text_column is None and options.label_column is None:
        return _Columns("continuation", pair[:1], pair[1])
    label = choose_label_column(columns, options, origin=origin)
    if label is not None:
        return _Columns("labels", choose_prompt(), label, label)
    texts = () if options.text_column is None else choose_prompt()
    if len(texts) == 2:
        return _Columns("continuation", texts[:1], texts[1])
    raise InputError(
        f"{origin} has no column to score (columns: {', '.join(columns)})",
        "It needs prompt and continuation (or --text-column PROMPT,CONTINUATION); question, "
        "choices and answer; or a text and a label.",
    )


def _list_label_words(
    rows: Sequence[TableRow], columns: _Columns, classes: Sequence[str] | None, origin: str
) -> tuple[str, ...]:
    """Return the class names, which are the continuations to score.

    Raises:
        InputError: labels are numbers without known names.
    """
    if classes is not None:
        return tuple(classes)
    values = {
        str(row.values[columns.follows]) for row in rows if _find_empty(row, columns) is None
    }
    number = next((v for v in values if v.strip().lstrip("-").replace(".", "").isdigit()), None)
    if number is not None:
        raise InputError(
            f"{origin}: {columns.follows!r} holds numbers ({number}), but a language model "
            "needs words",
            "Write the class names into that column, or name another with --label-column.",
        )
    return tuple(sorted(values))


def _find_empty(row: TableRow, columns: _Columns) -> str | None:
    """Return the first needed column that is empty in a row."""
    needed = (*columns.prompt, columns.follows, *([columns.right] if columns.right else []))
    given = {name: row.values.get(name) for name in needed}
    return next((n for n, v in given.items() if v is None or not str(v).strip()), None)


def _read_question(
    row: TableRow, columns: _Columns, names: Sequence[str], classes: Sequence[str] | None
) -> Question:
    """Return the question of a row.

    Raises:
        ValueError: the row has no question; the message gives the fault.
    """
    if empty := _find_empty(row, columns):
        raise ValueError(f"has no {empty!r}")
    strings = (*columns.prompt, *([] if columns.kind == "choices" else [columns.follows]))
    if fault := check_row(row, strings).fault:
        raise ValueError(fault)
    text, value = join_row(row.values, columns.prompt), row.values[columns.follows]
    prompt = text if isinstance(text, str) else "\n".join(text)
    if columns.kind == "continuation":
        return Question(prompt, (str(value),))
    if columns.kind == "labels":
        known: Sequence[Any] = names if classes is None else range(len(classes))
        label = str(value) if classes is None else value
        if label not in known:
            raise ValueError(f"has the label {value!r}, which is not a class")
        return Question(prompt, tuple(names), known.index(label))
    choices, letters = _read_choices(value)
    return Question(
        prompt, choices, _find_answer(row.values[columns.right or ""], choices, letters)
    )


def _read_choices(value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return choices and their labels, from a list, its text, or a record of two lists."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError(f"has choices that are not a list ({value!r:.40})") from None
    record = value if isinstance(value, Mapping) else {"text": value}
    texts, letters = record.get("text"), record.get("label")
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not 2 <= len(texts) <= 26:
        raise ValueError("has no list of 2 to 26 choices")
    if any(text is None or not str(text).strip() for text in texts):
        raise ValueError("has an empty choice")
    if letters is None:
        return tuple(map(str, texts)), ()
    if not isinstance(letters, Sequence) or len(letters) != len(texts):
        raise ValueError("has different numbers of choices and of labels")
    return tuple(map(str, texts)), tuple(map(str, letters))


def _find_answer(value: Any, choices: Sequence[str], letters: Sequence[str]) -> int:
    """Return the index of the right choice: by its label, else by an index, text or letter.

    An answer may be an index from 0; if it is not a number, also the text or letter of a choice.
    """
    text = str(value).strip()
    if text in letters:
        return letters.index(text)
    # 1 is an index; "1" may be an index or the text of a choice.
    known = [[str(i) for i in range(len(choices))]]
    if not isinstance(value, int) or isinstance(value, bool):
        known += [[choice.strip() for choice in choices], [*LETTERS[: len(choices)]]]
    meant = {names.index(text) for names in known if text in names}
    if len(meant) == 1:
        return meant.pop()
    which = "may mean more than one" if meant else "is none"
    raise ValueError(f"has the answer {value!r}, which {which} of its {len(choices)} choices")
