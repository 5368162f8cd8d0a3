"""Labels: names first, numbers second, and order never without the whole map."""

import json

import pytest

from lipaudit.data.batch import LabelError
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError

STARS = ("1", "2", "3", "4", "5")


def loaded(path, net, labels, suffix=".jsonl"):
    """Load a table with these labels; return the class of each, by row, and the notes."""
    rows = [{"text": f"w{i}", "label": label} for i, label in enumerate(labels)]
    path = path / f"t{suffix}"
    lines = [json.dumps(row) for row in rows]
    if suffix == ".csv":
        lines = ["text,label", *(f"{row['text']},{row['label']}" for row in rows)]
    path.write_text("\n".join(lines))
    samples = load_data(str(path), net, DataOptions(samples=len(labels)))
    order = [int(origin.place.split()[1]) for origin in samples.origins]
    by_line = dict(zip(order, samples.batch.y.tolist(), strict=True))
    return [by_line[line] for line in sorted(by_line)], samples.notes


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize(
    ("names", "labels", "truth"),
    [
        (("1", "0"), [1, 0, 1], [0, 1, 0]),
        (("1", "0"), ["1", "0", "0"], [0, 1, 1]),
        (STARS, ["1", "4", "2"], [0, 3, 1]),
        (STARS, [5, 1.0, "3.0"], [4, 0, 2]),
        (("blame", "praise"), ["Praise", "blame", "praise"], [1, 0, 1]),
        (("blame", "praise"), [1, 0, 1.0], [1, 0, 1]),
        (("False", "True"), [True, False], [1, 0]),
        (None, ["LABEL_1", "LABEL_0"], [1, 0]),
        (None, ["1.0", "0.0"], [1, 0]),
    ],
)
def test_labels_are_names_first_and_numbers_second(
    tmp_path, text_taker, names, labels, truth, suffix
):
    net = text_taker(classes=len(names or labels), labels=names)
    assert loaded(tmp_path, net, labels, suffix) == (truth, ())


def test_numbers_of_two_digits_come_behind_those_of_one(tmp_path, text_taker):
    truth = list(range(12))
    labels = [f"{i}.0" for i in truth]
    assert loaded(tmp_path, text_taker(classes=12), labels) == (truth, ())
    halves = [f"{i}.5" for i in truth]
    assert loaded(tmp_path, text_taker(classes=12), halves)[0] == truth


def test_an_order_lists_the_whole_map(tmp_path, text_taker):
    net = text_taker(classes=3, labels=("x", "y", "z"))
    numbers, (note,) = loaded(tmp_path, net, ["gut", "arm", "ohr"])
    assert numbers == [1, 0, 2]
    assert (note.level, note.code) == ("warning", "labels-by-order")
    said = "'arm' is class 0 ('x'), 'gut' is class 1 ('y'), 'ohr' is class 2 ('z')"
    assert note.text.endswith(said)


@pytest.mark.parametrize(
    ("names", "labels", "message"),
    [
        (("blame", "praise"), ["blame", "bad"], "line 2: the class 'bad' is not one of"),
        (STARS, ["1", "2", "0"], "line 3: the class '0' is not one of"),
        (("no", "yes"), ["yes", "no", "perhaps"], "line 3: the class 'perhaps' is not"),
        (None, [0, 1, 2], "line 3: the class '2' is not one of the model's 2 classes"),
        (None, [1, 0, -1], "line 3: the class '-1' is not one of the model's 2 classes"),
        (("no", "yes"), ["yes", "", "no"], "line 2 has no 'label'"),
        (("no", "yes"), ["yes", None, "no"], "line 2 has no 'label'"),
        (("no", "yes"), [0, float("nan"), 1], "line 2 has no 'label'"),
        (
            ("no", "yes"),
            [[0, 1], [1]],
            ("line 1 has a list in 'label', and a sample has only one"),
        ),
    ],
)
def test_labels_that_are_missing_or_unknown_are_errors_with_their_line(
    tmp_path, text_taker, names, labels, message
):
    net = text_taker(classes=len(names or (0, 1)), labels=names)
    with pytest.raises(InputError) as error:
        loaded(tmp_path, net, labels)
    assert message in error.value.message
    assert isinstance(error.value, LabelError) == (" has " not in message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t.csv",
            "\n\ntext,label\na b,0\nc, d,1\n",
            "line 5 has 1 more than the columns' 2 fields",
        ),
        ("t.csv", "text,label\na b,0\nc, d,1\n", "line 3 has 1 more than the columns' 2 fields"),
        ("t.tsv", "text\tlabel\na\t0\nb\tc\t1\n", "line 3 has 1 more than the columns' 2 fields"),
        ("t.jsonl", '{"text": ["a", "b"], "label": 0}', "line 1 has a list in 'text', not a text"),
        ("t.jsonl", '{"text": {"a": 1}, "label": 0}', "line 1 has a dict in 'text', not a text"),
        ("t.jsonl", '{"label": 0}\n{"text": "a", "label": 0}', "line 1 has no 'text'"),
        ("t.jsonl", '{"text": "a"}\n{"text": "b", "label": 0}', "line 1 has no 'label'"),
        ("t.jsonl", '{"text": "a", "label": 0}\n\n{"text": "b"}\n[1]', "line 4 is not a {...}"),
        ("t.csv", "label,text\n1\n0,a\n", "line 2 has no 'text'"),
        ("t.csv", 'text,label\n"two\nlines",1\n\nx\ny,0\n', "line 5 has no 'label'"),
        ("t.jsonl", '{"text": "a", "label": 0}\n\n{broken', "line 3 is not JSON"),
    ],
)
def test_rows_that_are_not_what_they_seem_are_errors_with_their_line(
    tmp_path, text_taker, refused, name, content, message
):
    (tmp_path / name).write_text(content)
    assert message in refused(tmp_path / name, text_taker(classes=2))
    # Labels and rows are checked before the draw; texts only of the rows that are drawn.
    for seed in range(1 if "'text'" in message else 4):
        assert message in refused(tmp_path / name, text_taker(classes=2), samples=1, seed=seed)


def test_folders_that_are_numbers_are_numbers(tmp_path, image_taker):
    from PIL import Image

    for i in range(11):
        (tmp_path / str(i)).mkdir()
        Image.new("RGB", (4, 4), (i, i, i)).save(tmp_path / str(i) / "a.png")
    samples = load_data(str(tmp_path), image_taker(classes=11), DataOptions(samples=11))
    places = [int(origin.place.split("/")[0]) for origin in samples.origins]
    assert samples.batch.y.tolist() == places
    assert "labels-by-order" not in {note.code for note in samples.notes}
