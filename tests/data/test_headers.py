"""Tables whose first line is data, pairs without a separator, and files that are one stream."""

from dataclasses import replace

import pytest

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.data.tables import lacks_header

ROWS = ["a fine film,1", "a very bad one,0", "good,1"]
THREE = DataOptions(samples=3)


def notes(samples):
    return {note.code: note.text for note in samples.notes}


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("text_first", [True, False])
def test_a_table_without_names_gives_every_row_and_says_what_is_read_as_what(
    tmp_path, text_taker, suffix, text_first
):
    order, separator = 1 if text_first else -1, "\t" if suffix == ".tsv" else ","
    path = tmp_path / f"t{suffix}"
    path.write_text("\n".join(separator.join(row.split(",")[::order]) for row in ROWS))
    samples = load_data(str(path), text_taker(classes=2), THREE)
    named = tmp_path / "named.csv"
    named.write_text("\n".join(["text,label", *ROWS]))
    truth = load_data(str(named), text_taker(classes=2), THREE)
    assert samples.batch.ids == truth.batch.ids
    assert samples.batch.y.tolist() == truth.batch.y.tolist()
    text, label = (1, 2) if text_first else (2, 1)
    said = notes(samples)["no-header"]
    assert f"column {text} is read as text, column {label} as its label" in said.replace("C", "c")
    assert "'a fine film'" in said
    assert "no-header" not in notes(truth)


def test_columns_without_names_are_chosen_by_number(tmp_path, text_taker, refused):
    path = tmp_path / "t.csv"
    path.write_text("3,Wall St.,Short sellers are back\n1,Oil,Prices soar to a new record\n")
    said = refused(path, text_taker(classes=4))
    assert "1: '3', 2: 'Wall St.', 3: 'Short sellers are back'" in said
    assert "--text-column" in said
    options = DataOptions(samples=2, text_column="3", label_column="1")
    samples = load_data(str(path), text_taker(classes=4), options)
    assert sorted(samples.batch.y.tolist()) == [1, 3]
    assert len(samples.batch) == 2


def test_a_first_line_of_short_words_is_shown_and_how_to_mend_it(tmp_path, text_taker, refused):
    (tmp_path / "t.csv").write_text("great,positive\nawful,negative\n")
    said = refused(tmp_path / "t.csv", text_taker(classes=2))
    assert "(columns: great, positive)" in said
    assert "begin the file with names: text,label" in said


@pytest.mark.parametrize(
    ("lines", "lacks"),
    [
        (["text,label", "good,1"], False),
        (["Text,2019", "good,1"], False),
        (["tweet,stars", "good,1"], False),
        (["0,1", "good,1"], False),
        ([",body,stars", "0,good,1"], False),
        (["good,1"], True),
        (["great,positive", "bad,negative", "fine,positive"], True),
        (["this is a film like no other", "bad"], True),
        (["a,-0.5", "b,0.5"], True),
    ],
)
def test_a_header_is_told_from_data(lines, lacks):
    assert lacks_header([line.split(",") for line in lines], {"text", "label"}) is lacks


def test_a_long_name_that_was_asked_for_is_a_name(tmp_path, text_taker):
    question = "What did you think of the film?"
    (tmp_path / "t.csv").write_text(f"{question},stars\nfine,1\nbad,0\n")
    options = DataOptions(samples=2, text_column=question, label_column="stars")
    assert len(load_data(str(tmp_path / "t.csv"), text_taker(classes=2), options).batch) == 2


def test_a_language_model_reads_a_table_without_names_alike(tmp_path, text_taker):
    path = tmp_path / "t.csv"
    path.write_text("a fine film,yes\na bad one,no\ngood,yes\nawful,no\n")
    samples = load_data(str(path), text_taker(), replace(THREE, scored=True))
    assert samples.task.classes == ("no", "yes")
    assert "no-header" in notes(samples)


@pytest.mark.parametrize(
    ("between", "after", "warned"),
    [([], [], True), ([], [2], True), ([2], [2], False), ([1], [], False)],
)
def test_pairs_that_nothing_separates_are_warned_of(tmp_path, text_taker, between, after, warned):
    def ids(text):
        return [3 + ord(letter) % 90 for letter in text]

    net = replace(
        text_taker(classes=2, tokenize=lambda text, most: [1, *ids(text), *after][:most]),
        tokenize_pair=lambda a, b, most: [1, *ids(a), *between, *ids(b), *after][:most],
    )
    (tmp_path / "t.csv").write_text("premise,hypothesis,label\nab,cd,1\nef,gh,0\n")
    said = notes(load_data(str(tmp_path / "t.csv"), net, DataOptions(samples=2)))
    assert ("pairs-unseparated" in said) is warned


def test_a_plain_file_is_said_to_be_one_stream(tmp_path, text_taker):
    (tmp_path / "t.txt").write_text("one two\nthree four\n")
    said = notes(load_data(str(tmp_path / "t.txt"), text_taker(), DataOptions(samples=2)))
    assert "one stream of text, cut into 2 windows" in said["one-stream"]
