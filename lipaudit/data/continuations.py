"""Prompts and continuations: rows of a table that a language model scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lipaudit.data import tables
from lipaudit.data.batch import (
    Batch,
    DataOptions,
    SampleOrigin,
    Samples,
    Task,
    TaskKind,
    Tokenize,
    make_batch,
)
from lipaudit.data.tables import SampleTable
from lipaudit.data.texts import is_empty, limit_tokens, note_cut, shorten
from lipaudit.errors import InputError

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


# The readable rows of a table: the values by column, by the index of the row.
_Rows = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Question:
    """A prompt, its possible continuations, and the index `right` of the right one."""

    prompt: str
    continuations: tuple[str, ...]
    right: int = 0


@dataclass(frozen=True)
class QuestionForm:
    """The columns of a table that make up a question, and the kind of question.

    Attributes:
        kind: the kind of question.
        prompts: columns of the prompt, each a line of its own.
        follows: column of the continuation or of the choices; empty for labels.
        label: column of the right choice or of the label; empty for a continuation.
        words: names of the classes, such as the labels; empty for choices, which have none.
        values: what the table has for each label in `words`: its class number, or the word.
    """

    kind: TaskKind
    prompts: tuple[str, ...]
    follows: str = ""
    label: str = ""
    words: tuple[str, ...] = ()
    values: Sequence[object] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the columns that may not be empty."""
        return (*self.prompts, *filter(None, (self.follows, self.label)))

    def read_question(self, row: Mapping[str, Any]) -> Question:
        """Return the question in a row of a table: prompt, continuations, and which is right.

        This form names the columns, and the kind of question: a prompt with one continuation, with
        choices, or with a label, where the names of all labels are the continuations.

        Args:
            row: values by column.

        Raises:
            InputError: the row has no question; the message describes its fault.
        """
        for name in self.needed:
            if is_empty(row.get(name)):
                raise InputError(f"has no {name!r}")
        # In columns of texts, a list is a fault.
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
        # `values` has the label of each word as the table writes it: a class number, or the word.
        label = row[self.label]
        for value in (label, str(label)):
            if value in self.values:
                return Question(prompt, self.words, self.values.index(value))
        raise InputError(f"has the label {label!r}, which is not a class")


@dataclass(frozen=True)
class Packer:
    """Turns prompts and their continuations into token ids, as for a language model.

    Attributes:
        tokenize: text -> token ids, cut to a number of tokens.
        vocabulary: number of token ids.
        limit: largest number of tokens of a prompt with one continuation.
    """

    tokenize: Tokenize
    vocabulary: int
    limit: int

    def encode(
        self, prompt: str, continuations: Sequence[str]
    ) -> tuple[list[int], list[list[int]]]:
        """Return the token ids of a prompt, and the ids of each continuation after this prompt.

        Prompt and continuation are tokenized as one text, because tokens depend on neighbouring
        characters. White space between prompt and continuation is part of the continuation. If
        there is none, a blank is added. A token that has characters of both, such as a question
        mark with the line break behind it, belongs to the continuation.
        """
        stripped = prompt.rstrip()
        space = prompt[len(stripped) :]
        texts = [stripped]  # the prompt alone, and with each continuation
        for text in continuations:
            separator = space
            if not space and not text[:1].isspace():
                separator = " "
            texts.append(stripped + separator + text)
        rows = [self.tokenize(text, WHOLE) for text in texts]  # a huge limit: nothing is cut here
        # Some tokenizers end every text with a special token, also an empty one.
        end = self.tokenize("", WHOLE)[-1:]
        if end and all(row[-1:] == end for row in rows):
            rows = [row[:-1] for row in rows]
        # The ids that all rows begin with are the prompt.
        length = _count_shared(rows)
        return rows[0][:length], [row[length:] for row in rows[1:]]

    def find_room(self, continuation_ids: Sequence[Sequence[int]]) -> int:
        """Return how many tokens of a prompt fit before the longest of these continuations."""
        return self.limit - max(map(len, continuation_ids))

    def pack(self, prompt: str, continuations: Sequence[str]) -> Sequence[int]:
        """Return a prompt and its continuations as one row of ids (see the function `pack`).

        The beginning of a long prompt is cut. The row is empty if the prompt or a continuation has
        no tokens, or if no token of the prompt fits before the longest continuation.
        """
        prompt_ids, continuation_ids = self.encode(prompt, continuations)
        room = self.find_room(continuation_ids)
        if not prompt_ids or not all(continuation_ids) or room < 1:
            return ()
        return pack(prompt_ids[-room:], continuation_ids, self.vocabulary).tolist()


def pack(prompt: Sequence[int], continuations: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Pack the ids of a prompt and of its continuations into one row.

    A token of continuation i = 1, 2, ... is stored as the number id + i * vocabulary. Remainder
    and quotient of this number by the vocabulary are id and i.

    >>> pack([7, 3], [[5], [5, 6]], 10)
    tensor([ 7,  3, 15, 25, 26])
    """
    row = list(prompt)
    for i, tokens in enumerate(continuations, 1):
        row += (token + i * vocabulary for token in tokens)
    return torch.tensor(row, dtype=torch.int64)


def read_continuations(table: SampleTable, net: Net, options: DataOptions) -> Samples:
    """Draw prompts from a table, with the continuations that a language model scores.

    The columns of the table decide between three kinds: a prompt with one continuation; a question
    with choices and the answer; a text (or a pair, on two lines) with a label, where the
    continuations are the names of all labels. A blank separates prompt and continuation and is
    part of the continuation. As in lm-evaluation-harness, prompt and continuation are tokenized
    together: the ids after the ids of the prompt belong to the continuation. (If the prompt alone
    ends in other ids, the harness drops characters. Here none are lost.) A long prompt is cut at
    its beginning.

    Args:
        table: the rows.
        net: the language model.
        options: number of samples, seed, columns.

    Raises:
        InputError: columns are missing, rows have no question, or the model has no tokenizer.
    """
    limit, notes = limit_tokens(net, options)
    if net.tokenize is None or not net.vocabulary:
        advice = "Put tokenizer.json beside config.json."
        raise InputError(f"{table.origin} holds text, and the model has no tokenizer", advice)
    packer = Packer(net.tokenize, net.vocabulary, limit)
    table.require_rows(options)  # first, as a table of unreadable rows has no columns
    rows = {i: table.rows[i] for i in table.sound}  # only readable rows
    form = _choose_form(table, rows, options)
    questions, choice_count, faults = _read_questions(form, rows)
    table = replace(table, faults={**table.faults, **faults})  # rows with a fault are not drawn
    rows_drawn, packed, skipped = tables.draw_rows(
        table, options, lambda i: _pack_question(questions[i], packer, table.origin), what="rows"
    )
    notes += note_cut(
        [question.is_cut for question in packed],
        "prompts were cut at their beginning, so that prompt and continuation fit into "
        f"{limit} tokens",
    )
    batch = _make_batch([questions[i] for i in rows_drawn], packed, net, limit)
    places = map(table.name_row, rows_drawn)
    return Samples(
        batch,
        skipped + notes,
        origins=tuple(map(SampleOrigin, places, map(shorten, batch.texts))),
        # Choices of a question have no names of their own: they are called A, B, C, ...
        task=Task(form.kind, form.words or tuple(LETTERS[:choice_count])),
    )


class _PackedQuestion(NamedTuple):
    """The token ids of a question (see `pack`), and whether its prompt was cut."""

    ids: Tensor
    is_cut: bool


def _make_batch(
    questions: Sequence[Question], packed: Sequence[_PackedQuestion], net: Net, limit: int
) -> Batch:
    """Return questions as a batch, with the index of the right continuation as label.

    Args:
        questions: the questions.
        packed: their token ids.
        net: the language model.
        limit: largest number of tokens of a prompt with one continuation.
    """
    right = [question.right for question in questions]
    return replace(
        make_batch([question.ids for question in packed], net, right),
        # A tuple for each prompt, as other samples have two texts.
        texts=tuple((question.prompt,) for question in questions),
        limit=limit,
        continuations=tuple(question.continuations for question in questions),
    )


def _pack_question(question: Question, packer: Packer, origin: str) -> _PackedQuestion:
    """Return the token ids of a question; a long prompt loses its beginning.

    Args:
        question: the prompt and its continuations.
        packer: the tokenizer, and the largest number of tokens.
        origin: name of the data in messages.

    Raises:
        InputError: a text has no tokens, or a continuation alone reaches the limit of tokens.
    """
    prompt, continuations = packer.encode(question.prompt, question.continuations)
    shown = question.prompt[:40]
    if not prompt or not all(continuations):
        raise InputError(
            f"{origin}: {shown!r} or its continuation has no tokens",
            "Remove such rows, or leave them out with --skip-bad.",
        )
    room = packer.find_room(continuations)  # number of tokens that a prompt may have
    if room < 1:
        raise InputError(
            f"{origin}: the continuation of {shown!r} leaves no room for the prompt within "
            f"{packer.limit} tokens",
            "Raise --max-tokens, or leave such rows out with --skip-bad.",
        )
    ids = pack(prompt[-room:], continuations, packer.vocabulary)
    return _PackedQuestion(ids, len(prompt) > room)


def _read_questions(
    form: QuestionForm, rows: _Rows
) -> tuple[dict[int, Question], int, dict[int, str]]:
    """Return the question of each row, the usual number of continuations, and faults of rows.

    Args:
        form: the columns of a question.
        rows: the readable rows, by index.

    Returns:
        The question of each row, by index; the most frequent number of continuations; the reason
        for each refused row, by index.
    """
    questions = {}
    faults = {}
    for i, row in rows.items():
        try:
            questions[i] = form.read_question(row)
        except InputError as error:
            faults[i] = error.message
    counts = Counter(len(question.continuations) for question in questions.values())
    usual = max(counts, key=counts.__getitem__, default=0)
    for i, question in questions.items():
        count = len(question.continuations)
        # Choices are the classes of the task, so all rows need the same number of choices.
        if count != usual:
            faults[i] = f"has {count} choices, most rows have {usual}"
    return questions, usual, faults


def _count_shared(rows: Sequence[Sequence[int]]) -> int:
    """Return how many ids all rows share at their beginning."""
    count = 0
    for column in zip(*rows, strict=False):  # up to the end of the shortest row
        if len(set(column)) > 1:
            break
        count += 1
    return count


def _choose_form(table: SampleTable, rows: _Rows, options: DataOptions) -> QuestionForm:
    """Return which kind of question a table has, and in which columns, from the columns' names.

    There are three kinds: a prompt and its continuation; a question with choices and the right
    one; a text with a label, where the names of all labels are the choices. A table with a column
    of choices is of the second kind, also if it has the columns of the first.

    Raises:
        InputError: a column is missing, or labels are numbers without known names.
    """
    choices = tables.choose_column(table, requested=None, usual=CHOICES)
    # The column of the label or, beside choices, of the right choice: then it may also be called
    # `answer`, which names a label in no other table.
    label_names: Sequence[str] = tables.LABELS
    if choices:
        label_names = (*ANSWERS, *label_names)
    label = tables.choose_column(table, options.label_column, label_names)
    # First kind: a prompt and its continuation.
    pair = _find_pair(table, label, options)
    if pair is not None and not choices:
        prompt, continuation = pair
        return QuestionForm(
            "continuation", (prompt,), follows=continuation, words=("continuation", "rival")
        )
    if label is None:
        raise InputError(
            f"{table.origin} has no column to score ({table.column_list})",
            "It needs prompt and continuation (or --text-column PROMPT,CONTINUATION); question, "
            "choices and answer (--label-column); or a text and a label.",
        )
    prompts = tables.choose_text_columns(table, options, usual=PROMPTS)
    # Second kind: a question, its choices, and which of them is right.
    if choices:
        return QuestionForm("choices", prompts, follows=choices, label=label)
    # Third kind: a text and its label. The column of labels has numbers, if the table knows the
    # name of each class; else it has the names themselves.
    values: Sequence[object]
    if label in table.classes:
        words = tuple(table.classes[label])
        values = range(len(words))
    else:
        words = values = _list_words(table.origin, rows.values(), prompts, label)
    return QuestionForm("labels", prompts, label=label, words=words, values=values)


def _find_pair(
    table: SampleTable, label: str | None, options: DataOptions
) -> Sequence[str] | None:
    """Return the columns of a prompt and its continuation; None for another kind of question.

    They have usual names (`CONTINUED`), or are the two columns that --text-column names. In a
    table with labels, these two are a pair of texts with a label instead.

    Args:
        table: the table.
        label: the column of labels that was found: the one of --label-column, or a column with a
            usual name for labels; None if the table has none.
        options: the names of columns that the user gave.
    """
    if options.text_column is None:
        if options.label_column is None:
            return next((pair for pair in CONTINUED if set(pair) <= set(table.columns)), None)
        return None
    if label is not None:
        return None
    texts = tables.choose_text_columns(table, options)
    if len(texts) != 2:
        return None
    return texts


def _list_words(
    origin: str, rows: Iterable[Mapping[str, Any]], prompts: Sequence[str], label: str
) -> tuple[str, ...]:
    """Return the different labels of the rows that have a prompt and a label, in order.

    Args:
        origin: name of the table in messages.
        rows: the rows; other rows are refused later.
        prompts: the columns of the prompt.
        label: the column of the label.

    Raises:
        InputError: a label is a number, which a language model cannot score as an answer.
    """
    words = set()
    for row in rows:
        fields = [row.get(name) for name in (*prompts, label)]
        if not any(map(is_empty, fields)):
            words.add(str(row[label]))
    for word in sorted(words):
        digits = word.strip().lstrip("-").replace(".", "")
        if digits.isdigit():
            raise InputError(
                f"{origin}: {label!r} holds numbers ({word}), but a language model needs words",
                "Write the class names into that column, or name another with --label-column.",
            )
    return tuple(sorted(words))


def _read_choices(value: Any) -> tuple[str, ...]:
    """Return the choices of a question as texts.

    Raises:
        InputError: there is no list of choices; the message describes the fault of the row.
    """
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    most = len(LETTERS)
    if not is_list or not 2 <= len(value) <= most or any(map(is_empty, value)):
        raise InputError(f"has no list of 2 to {most} choices, none of them empty")
    return tuple(map(str, value))


def _find_answer(value: Any, choices: Sequence[str]) -> int:
    """Return the index of the right choice.

    A number, such as 1, is an index from 0. A text, such as "1", may be an index, the text of a
    choice, or its letter.

    Raises:
        InputError: the answer is none of the choices, or may mean several.
    """
    text = str(value).strip()
    count = len(choices)
    # Lists of names of all choices. The answer must be in one list, or in several at one index.
    names_of_choices = [list(map(str, range(count)))]
    is_index = isinstance(value, int) and not isinstance(value, bool)
    if not is_index:
        names_of_choices.append([choice.strip() for choice in choices])
        names_of_choices.append(list(LETTERS[:count]))
    matches = {names.index(text) for names in names_of_choices if text in names}
    if len(matches) != 1:
        which = "may mean more than one" if matches else "is none"
        raise InputError(f"has the answer {value!r}, which {which} of its {count} choices")
    return matches.pop()
