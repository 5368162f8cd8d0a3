"""Prompts with continuations, choices and labels: which columns are meant, how they are cut."""

import json

import pytest

from lipaudit.data.continuations import pack
from lipaudit.data.loading import DataOptions, load_data

V = 100
OPTIONS = {"samples": 8, "scored": True}
MAZE = {"question": "a b", "choices": ["c", "d e"], "answer": 1}


def begun(text, most):
    """One token a word behind a 1, as causal models have it: no token ends a text."""
    return [1, *(3 + sum(map(ord, word)) % 97 for word in text.split())][:most]


def byte(text, most):
    """A token per letter, blanks too."""
    return [ord(letter) % V for letter in text][:most]


@pytest.fixture
def loaded(tmp_path, text_taker):
    """Read some rows as they stand in a .jsonl file, ordered as they are there."""

    def load(*rows, tokenize=begun, **options):
        path = tmp_path / "t.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        net = text_taker(tokenize=tokenize)
        found = load_data(str(path), net, DataOptions(**OPTIONS | options))
        order = sorted(range(len(found.batch)), key=lambda i: found.origins[i].place)
        masks = [None] * len(found.batch) if found.batch.mask is None else found.batch.mask
        x = [found.batch.x[i] if masks[i] is None else found.batch.x[i][masks[i]] for i in order]
        return found, [ids.tolist() for ids in x], [int(found.batch.y[i]) for i in order]

    return load


def ids(prompt, *texts, tokenize=begun):
    """Prompt and continuations: what the ids of both have behind those of the prompt."""
    start = tokenize(prompt, 99)
    return pack(start, [tokenize(f"{prompt} {t}", 99)[len(start) :] for t in texts], V).tolist()


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([{"prompt": "a b", "continuation": "c d"}], {}),
        ([{"prompt": "a b", "completion": "c d", "id": 7}], {}),
        ([{"one": "a b", "two": "c d"}], {"text_column": "one,two"}),
    ],
)
def test_a_prompt_and_its_continuation(loaded, rows, options):
    found, x, y = loaded(*rows, **options)
    assert (x, y) == ([ids("a b", "c d")], [0])
    assert (found.task.kind, found.task.classes) == ("continuation", ("continuation", "rival"))
    assert found.origins[0].text == "a b"


@pytest.mark.parametrize(
    "row",
    [
        MAZE,
        MAZE | {"answer": "B"},
        MAZE | {"answer": "d e"},
        MAZE | {"answer": "1"},
        {"ctx": "a b", "endings": ["c", "d e"], "label": 1, "text": "not this"},
        {"text": "a b", "options": ["c", "d e"], "answerKey": "B"},
    ],
)
def test_choices_and_the_answer(loaded, row):
    found, x, y = loaded(row)
    assert (x, y) == ([ids("a b", "c", "d e")], [1])
    assert (found.task.kind, found.task.classes) == ("choices", ("A", "B"))
    # Choices that look like answers are not taken for them.
    for choices, answer in ((["1", "0"], 1), (["False", "True"], True)):
        assert loaded(MAZE | {"choices": choices, "answer": answer})[2] == [1]


def test_labels_are_words_of_the_whole_table_but_for_rows_that_are_left_out(loaded):
    rows = [{"text": "a b", "label": "very good"}, {"text": "c", "label": "bad"}]
    for count in (1, 2):
        found, x, y = loaded(*rows, samples=count)
        assert found.task.classes == ("bad", "very good")
    assert x == [ids("a b", "bad", "very good"), ids("c", "bad", "very good")]
    assert y == [1, 0]
    rows = [{"text": "a b", "label": "bad"}, {"text": "c", "label": ""}, {"text": "", "label": 7}]
    found, x, _ = loaded(*rows, skip_bad=True)
    assert (found.task.classes, x) == (("bad",), [ids("a b", "bad")])


def test_a_pair_of_texts_is_a_prompt_of_two_lines_and_a_token_that_ends_texts_left_out(loaded):
    row = {"premise": "a", "hypothesis": "b c", "label": "yes"}
    _, x, _ = loaded(row, row | {"label": "no"}, tokenize=byte)
    assert x[0] == ids("a\nb c", "no", "yes", tokenize=byte)
    ended = loaded(MAZE, tokenize=lambda text, most: [*begun(text, most - 1), 2])
    assert ended[1] == loaded(MAZE)[1]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("ab", "cd"), ("ab ", "cd"), ("ab", " cd"), ("ab  \n", "cd"), ("a ", " b")],
)
def test_blanks_belong_to_what_follows(loaded, prompt, text):
    """What `_encode_pair` of lm-evaluation-harness gives, with a blank where there is none."""
    _, x, _ = loaded({"prompt": prompt, "continuation": text}, tokenize=byte)
    whole = prompt + text if (prompt + text) != "abcd" else "ab cd"
    start = byte(prompt.rstrip(), 99)
    assert x == [pack(start, [byte(whole, 99)[len(start) :]], V).tolist()]


def test_prompts_lose_their_beginning(loaded):
    row = {"prompt": "a b c d e", "continuation": "f g"}
    found, x, _ = loaded(row, max_tokens=5)
    assert x == [pack(begun("a b c d e", 9)[-3:], [begun("f g", 9)[1:]], V).tolist()]
    assert [note.code for note in found.notes] == ["text-cut", "fewer-samples"]
    found, x, _ = loaded(row, max_tokens=8)
    assert x == [ids("a b c d e", "f g")]
    assert [note.code for note in found.notes] == ["fewer-samples"]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a"}], {}, "has no column to score"),
        ([{"text": "a", "label": 1}], {}, "'label' holds numbers"),
        ([{"question": "a", "choices": ["b", "c"]}], {}, "no column to score"),
        ([MAZE | {"answer": "f"}], {}, "line 1 has the answer 'f', which is none of its 2"),
        ([MAZE | {"answer": 2}], {}, "has the answer 2"),
        ([MAZE | {"answer": "²"}], {}, "has the answer '²', which is none of its 2"),
        ([MAZE | {"choices": ["1", "0"], "answer": "1"}], {}, "'1', which may mean more than one"),
        ([MAZE | {"choices": "c, d"}], {}, "no list of 2 to 26"),
        ([MAZE | {"choices": ["c"]}], {}, "no list of 2 to 26"),
        ([MAZE | {"choices": ["c", " "]}], {}, "none of them empty"),
        ([MAZE | {"question": None}], {}, "has no 'question'"),
        ([MAZE, MAZE, MAZE | {"choices": ["x", "y", "d e"]}], {}, "line 3 has 3 choices, most"),
        ([{"prompt": "a", "continuation": ""}], {}, "has no 'continuation'"),
        ([{"prompt": "a", "continuation": "b c"}], {"max_tokens": 2}, "leaves no room for the"),
    ],
)
def test_what_cannot_be_scored_is_refused(tmp_path, text_taker, refused, rows, options, message):
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for tokenize, says in ((begun, message), (None, "has no tokenizer")):
        net = text_taker(tokenize=tokenize)
        assert says in refused(tmp_path / "t.jsonl", net, **OPTIONS | options)


def test_rows_of_another_number_of_choices_can_be_left_out(loaded):
    odd = MAZE | {"choices": ["x", "y", "d e"], "answer": 2}
    found, x, y = loaded(odd, MAZE, MAZE | {"answer": 0}, MAZE | {"answer": "?"}, skip_bad=True)
    assert x == [ids("a b", "c", "d e")] * 2
    assert y == [1, 0]
    left_out = [note.text for note in found.notes if note.code == "skipped-bad"]
    assert [text.partition(":")[2][:2] for text in left_out] == [" 2"]


def merge(text, most):
    """A token per letter; a question mark and the line break behind it are one token, 5."""
    ids = []
    for letter in text:
        if letter == "\n" and ids[-1:] == [ord("?") % V]:
            ids[-1] = 5
        else:
            ids.append(ord(letter) % V)
    return ids[:most]


@pytest.mark.parametrize("end", [[], [2], [ord("!") % V]])
@pytest.mark.parametrize("texts", [("no", "yes"), ("?", "why?"), ("no", "\nyes")])
def test_a_token_of_both_prompt_and_continuation_is_not_lost(loaded, end, texts):
    """The prompt and each of its continuations have the ids of the whole text."""
    row = {"question": "Is it? So?\n", "choices": texts, "answer": 0}
    _, (x,), _ = loaded(row, tokenize=lambda text, most: [*merge(text, most - 1), *end])
    parts = [[i % V for i in x if i // V == number] for number in range(3)]
    assert parts[0] == merge("Is it? So", 99)
    for part, text in zip(parts[1:], texts, strict=True):
        assert parts[0] + part == merge(f"Is it? So?\n{text}", 99)
