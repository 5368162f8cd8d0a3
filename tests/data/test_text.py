"""Text: tables, plain files, cutting and padding; labels: names first, numbers second."""

import csv
import json
import sys
from dataclasses import replace

import datasets
import pyarrow
import pytest
import torch
from pyarrow import parquet

from lipaudit.data.batch import LabelError
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError, UsageError
from tests.data.conftest import picture

ROWS = [("a b c", "bad"), ("d e", "good"), ("f g h i", "good"), ("j", "bad")]
ALL = DataOptions(samples=4)


def table(path, rows=ROWS, columns=("text", "label")):
    separator = "\t" if path.suffix == ".tsv" else ","
    if path.suffix == ".jsonl":
        lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
    else:
        lines = [separator.join(map(str, row)) for row in (columns, *rows)]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_tables_are_read_alike(tmp_path, text_taker, suffix):
    net = text_taker(classes=2, labels=("BAD", "GOOD"))
    batch = load_data(table(tmp_path / f"t{suffix}"), net, ALL).batch
    lengths = [len(text.split()) + 2 for text, _ in ROWS]
    order = torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist()
    assert batch.mask.sum(1).tolist() == [lengths[i] for i in order]
    assert batch.y.tolist() == [int(ROWS[i][1] == "good") for i in order]


def test_padding_fills_with_the_padding_id_behind_the_mask_and_changes_no_id(tmp_path, text_taker):
    batch = load_data(table(tmp_path / "t.csv"), text_taker(), ALL).batch
    assert batch.x.shape == batch.mask.shape == (4, 6)
    assert batch.x[~batch.mask].unique().tolist() == [0]
    assert (batch.x[batch.mask] > 0).all()
    short = table(tmp_path / "s.csv", ROWS[1:2])
    alone = load_data(short, text_taker(), DataOptions(samples=1)).batch
    assert alone.ids[0] in batch.ids
    assert alone.mask is None  # texts of one length
    (tmp_path / "two.csv").write_text("text\na b\nc d\n")
    two = load_data(str(tmp_path / "two.csv"), text_taker(), DataOptions(samples=2)).batch
    assert (len(two), two.mask) == (2, None)


@pytest.mark.parametrize("body", ["body", "What did you think of the film?"])
def test_columns_can_be_named(read, text_taker, body):
    columns = {"text_column": body, "label_column": "stars"}
    rows = f"{body},x,stars\na b,x,1\nc,y,0\n"
    batch = read("t.csv", rows, text_taker(classes=2), samples=2, **columns).batch
    found = zip(batch.mask.sum(1).tolist(), batch.y.tolist(), strict=True)
    assert sorted(found) == [(3, 0), (4, 1)]


def test_columns_that_may_hold_labels_are_named_where_none_is_found(read, text_taker):
    net, rows = text_taker(classes=2), "id,review,stars\n7,a b,1\n8,c,0\n"
    samples = read("t.csv", rows, net, samples=2)
    assert samples.batch.y is None
    assert [note.code for note in samples.notes] == ["no-label-column"]
    assert samples.notes[0].text.endswith("--label-column names one (id, stars)")
    assert read("t.csv", rows, samples=2).notes == ()
    assert read("t.csv", "review\na b\nc\n", net, samples=2).notes == ()
    assert read("t.csv", "review,sentiment\na b,1\nc,0\n", net, samples=2).batch.y is not None


def test_classes_are_counted_over_the_whole_table(read, text_taker):
    """A draw of one row must not turn its class into class 0 by order."""
    for seed in range(4):
        rows = "text,label\n" + "a,pos\nb,neg\n" * 3
        samples = read("t.csv", rows, text_taker(classes=2), samples=1, seed=seed)
        assert [n.code for n in samples.notes] == ["labels-by-order"]
        text = samples.batch.x[0, 1] - 3
        assert samples.batch.y.tolist() == [1 if text == ord("a") % 97 else 0]


def test_long_texts_are_cut_with_a_note_to_what_is_asked_or_the_model_takes(read, text_taker):
    samples = read("t.csv", "text\na b c d e f\na b c\n", samples=2, max_tokens=5)
    assert samples.batch.x.shape == (2, 5)
    assert samples.batch.x[:, -1].tolist() == [2, 2]
    assert [(n.level, n.code) for n in samples.notes] == [("warning", "text-cut")]
    assert samples.notes[0].text.startswith("1 of 2 texts were cut to 5 tokens")
    samples = read("t.csv", "text\na b c d e f\n", text_taker(4), max_tokens=9)
    assert (samples.batch.x.shape[1], samples.notes[0].code) == (4, "max-tokens")


def test_a_plain_file_is_cut_into_windows_spread_evenly(read, text_taker):
    words = [chr(97 + i % 26) + str(i) for i in range(200)]
    samples = read("t.txt", " ".join(words), samples=4, max_tokens=10)
    batch, (note,) = samples.batch, samples.notes
    assert batch.x.shape == (4, 10)
    assert batch.x[0].tolist() == text_taker().tokenize(" ".join(words[:8]), 10)
    assert batch.mask is None
    assert len(set(batch.ids)) == 4
    assert "one long text and cut into 4 windows" in note.text
    marked = read("t.txt", "\ufeff" + " ".join(words), samples=4, max_tokens=10).batch
    assert torch.equal(marked.x, batch.x)  # a byte order mark is no letter
    whole = read("t.txt", "lighthouse " * 50, samples=7, max_tokens=3).batch
    assert torch.equal(whole.x, whole.x[:1].expand(7, -1))  # they begin with whole words


def test_requests_that_are_refused(tmp_path, text_taker, image_taker, refused):
    path = table(tmp_path / "t.csv")
    assert "no column 'body'" in refused(path, text_taker(), text_column="body")
    assert "leaves nothing" in refused(path, text_taker(), UsageError, max_tokens=0)
    assert "has no tokenizer" in refused(path, text_taker(tokenize=None))
    assert "the model takes image" in refused(path, image_taker())
    (tmp_path / "t.csv").write_text("great,positive\nawful,negative\n")
    said = refused(path, text_taker(classes=2))
    assert "(columns: great, positive)" in said
    assert "add a line with column names above it: text,label" in said
    # Nobody knows how to join pairs.
    path = table(tmp_path / "t.csv", [("a", "b")], ("premise", "hypothesis"))
    assert "--text-column" in refused(path, text_taker())
    assert "no column 'c'" in refused(path, text_taker(), text_column="premise,c")
    three = "premise,hypothesis,premise"
    assert "names 3 columns" in refused(path, text_taker(), text_column=three)


BAD_LINES = ['{"text": "a", "label": 0}', "", "{broken", '{"text": "b"}']
BAD_LINES += ['{"text": "", "label": 1}', '{"text": "c d", "label": 1}', "[1]"]


def test_rows_that_cannot_be_read_are_left_out_if_asked(read, tmp_path, text_taker, refused):
    net = text_taker(classes=2)
    samples = read("t.jsonl", "\n".join(BAD_LINES), net, samples=9, skip_bad=True)
    good = read("good.jsonl", "\n".join([BAD_LINES[0], BAD_LINES[5]]), net, samples=9)
    assert sorted(samples.batch.ids) == sorted(good.batch.ids)
    assert samples.suite_id == good.suite_id
    notes = [note for note in samples.notes if note.code == "skipped-bad"]
    assert {note.level for note in notes} == {"warning"}
    assert [note.text.partition(" (")[0].rpartition(" ")[2] for note in notes] == ["3", "1"]
    (tmp_path / "t.jsonl").write_text("\n".join(["{broken", "[1]"]))
    assert "line 1 is not JSON" in refused(tmp_path / "t.jsonl", net, skip_bad=True)


def test_labels_that_a_model_has_no_use_for_are_not_called_missing(tmp_path, text_taker):
    samples = load_data(table(tmp_path / "t.csv"), text_taker(), ALL)
    assert samples.batch.y is None
    assert [n.code for n in samples.notes] == ["labels-unused"]
    assert "(label)" in samples.notes[0].text


@pytest.fixture
def joiner(text_taker):
    """Take pairs: the words of the first text, a 9, those of the second."""

    def make():
        net = text_taker(classes=2)
        ids = net.tokenize
        join = lambda a, b, most: [*ids(a, most), 9, *ids(b, most)][:most]  # noqa: E731
        return replace(net, tokenize_pair=join)

    return make


@pytest.mark.parametrize(
    ("columns", "asked", "first", "second"),
    [
        (("premise", "hypothesis"), None, 0, 1),
        (("sentence1", "sentence2"), None, 0, 1),
        (("text_b", "text"), None, 1, 0),
        (("body", "title"), "title,body", 1, 0),
        (("premise", "hypothesis"), "hypothesis", 1, None),
        (("question, long", "text"), "question, long", 0, None),
    ],
)
def test_pairs_of_texts_are_read_together(read, joiner, columns, asked, first, second):
    values, net = ("a b", "c"), joiner()
    row = json.dumps(dict(zip(columns, values, strict=True)))
    batch = read("t.jsonl", row, net, text_column=asked).batch
    alone = net.tokenize(values[first], 99)
    expected = alone if second is None else net.tokenize_pair(values[first], values[second], 99)
    assert batch.x.tolist() == [expected]


def test_parquet_is_read_like_any_table(tmp_path, text_taker, refused, monkeypatch):
    rows = [{"text": text, "label": label} for text, label in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    net = text_taker(classes=2, labels=("BAD", "GOOD"))
    read = load_data(str(tmp_path / "t.parquet"), net, ALL)
    assert read.suite_id == load_data(table(tmp_path / "t.csv"), net, ALL).suite_id
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refused(tmp_path / "t.parquet", net)


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
        (("Neg", "neg"), ["neg", "Neg", "neg"], [1, 0, 1]),
        (("a_b", "a b"), ["a b", "a_b"], [1, 0]),
        (None, ["LABEL_1", "LABEL_0"], [1, 0]),
        (None, ["1.0", "0.0"], [1, 0]),
    ],
)
def test_labels_are_names_before_numbers(tmp_path, text_taker, names, labels, truth, suffix):
    net = text_taker(classes=len(names or labels), labels=names)
    assert loaded(tmp_path, net, labels, suffix) == (truth, ())


def test_a_name_of_two_classes_is_the_first_with_a_warning(tmp_path, text_taker):
    net = text_taker(classes=3, labels=("crane", "Heron", "crane"))
    numbers, (note,) = loaded(tmp_path, net, ["crane", "heron"])
    assert numbers == [0, 1]
    assert (note.level, note.code) == ("warning", "labels-shared")
    assert note.text.startswith("several classes of the model are called crane:")


def test_an_order_lists_the_whole_map_and_puts_two_digits_behind_one(tmp_path, text_taker):
    net = text_taker(classes=3, labels=("x", "y", "z"))
    numbers, (note,) = loaded(tmp_path, net, ["gut", "arm", "ohr"])
    assert numbers == [1, 0, 2]
    assert (note.level, note.code) == ("warning", "labels-by-order")
    said = "'arm' is class 0 ('x'), 'gut' is class 1 ('y'), 'ohr' is class 2 ('z')"
    assert note.text.endswith(said)
    truth, net = list(range(12)), text_taker(classes=12)
    assert loaded(tmp_path, net, [f"{i}.0" for i in truth]) == (truth, ())
    assert loaded(tmp_path, net, [f"{i}.5" for i in truth])[0] == truth


@pytest.mark.parametrize(
    ("names", "labels", "message"),
    [
        (("blame", "praise"), ["blame", "bad"], "line 2: the class 'bad' is not one of"),
        (STARS, ["1", "2", "0"], "line 3: the class '0' is not one of"),
        (None, [0, 1, 2], "line 3: the class '2' is not one of the model's 2 classes"),
        (None, [1, 0, -1], "line 3: the class '-1' is not one of the model's 2 classes"),
        (("no", "yes"), ["yes", "", "no"], "line 2 has no 'label'"),
        (("no", "yes"), ["yes", None, "no"], "line 2 has no 'label'"),
        (("no", "yes"), [0, float("nan"), 1], "line 2 has no 'label'"),
        (("no", "yes"), [[0, 1], [1]], "line 1 has a list in 'label', and a sample has only one"),
    ],
)
def test_missing_or_unknown_labels_name_their_line(tmp_path, text_taker, names, labels, message):
    net = text_taker(classes=len(names or (0, 1)), labels=names)
    with pytest.raises(InputError) as error:
        loaded(tmp_path, net, labels)
    assert message in error.value.message
    assert isinstance(error.value, LabelError) == (" has " not in message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "", "has no rows"),
        ("t.csv", "body\nx\n", "has no text column (columns: body)"),
        ("t.csv", 'text\n"open', "not a readable .csv"),
        ("t.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("t.csv", "text,label\nx,0.7\n", "class '0.7'"),
        ("t.jsonl", '{"text": "x", "label": 0.7}', "class '0.7'"),
        ("t.txt", " \n", "is empty"),
        ("t.csv", "text\n \n", "line 2 has no 'text'"),
        ("t.csv", "\n\ntext,label\na b,0\nc, d,1\n", "line 5 has 1 more than the columns' 2 "),
        ("t.csv", "text,label\na b,0\nc, d,1\n", "line 3 has 1 more than the columns' 2 fields"),
        ("t.tsv", "text\tlabel\na\t0\nb\tc\t1\n", "line 3 has 1 more than the columns' 2 fields"),
        ("t.jsonl", '{"text": ["a", "b"], "label": 0}', "line 1 has a list in 'text', not a text"),
        ("t.jsonl", '{"text": {"a": 1}, "label": 0}', "line 1 has a dict in 'text', not a text"),
        ("t.jsonl", '{"label": 0}\n{"text": "a", "label": 0}', "line 1 has no 'text'"),
        ("t.jsonl", '{"text": "a"}\n{"text": "b", "label": 0}', "line 1 has no 'label'"),
        ("t.jsonl", '{"text": "a", "label": 0}\n\n{"text": "b"}\n[1]', "line 4 is not a {...}"),
        ("t.csv", "label,text\n1\n0,a\n", "line 2 has no 'text'"),
        ("t.csv", 'text,label\n"two\nlines",1\n\nx\ny,0\n', "line 5 has no 'label'"),
        (
            "t.jsonl",
            '{"text": "a", "label": 0}\n\n{broken',
            "line 3 is not JSON (Expecting property name",
        ),
    ],
)
def test_files_that_mislead_are_named(tmp_path, text_taker, refused, name, content, message):
    (tmp_path / name).write_text(content)
    assert message in refused(tmp_path / name, text_taker(classes=2))
    # Labels and rows are checked before the draw; texts only of the rows that are drawn.
    for seed in range(1 if "'text'" in message else 4):
        assert message in refused(tmp_path / name, text_taker(classes=2), samples=1, seed=seed)


def test_folders_that_are_numbers_are_numbers(tmp_path, image_taker):
    for i in range(11):
        picture(tmp_path / str(i) / "a.png", (i, i, i))
    samples = load_data(str(tmp_path), image_taker(classes=11), DataOptions(samples=11))
    places = [int(origin.place.split("/")[0]) for origin in samples.origins]
    assert samples.batch.y.tolist() == places
    assert "labels-by-order" not in {note.code for note in samples.notes}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "text,label,text\na,0,b\n", "has the column 'text' twice"),
        ("t.jsonl", '{"text": "a", "text": "b"}', "line 1 is not JSON (a key stands there twice)"),
        ("t.csv", "text,label\na,0\ntext,label\nb,1\n", "line 3 repeats the column names"),
        ("t.csv", 'text,label\n"",0\n', "line 2 has no 'text'"),
        ("t.csv", "text,label\n  ,0\n", "line 2 has no 'text'"),
        ("t.jsonl", '{"text": NaN, "label": 0}', "line 1 has no 'text'"),
        ("t.csv", "premise,hypothesis\na,\n", "line 2 has no 'hypothesis'"),
    ],
)
def test_rows_that_would_be_read_wrongly_are_named(
    tmp_path, text_taker, refused, name, content, message
):
    (tmp_path / name).write_text(content)
    net = text_taker(classes=2)
    assert message in refused(tmp_path / name, net)


def test_blank_texts_are_no_samples(read):
    samples = read("t.csv", "text\nfirst\n \nsecond\n\t\n", samples=9, skip_bad=True)
    assert sorted(origin.text for origin in samples.origins) == ["first", "second"]
    assert next(n for n in samples.notes if n.code == "skipped-bad").text.startswith(
        "unreadable texts were left out: 2 ("
    )


@pytest.mark.parametrize("separator", [";", "\t", ","])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_spreadsheets_separate_by_semicolons_and_begin_with_a_mark(
    tmp_path, text_taker, separator, encoding
):
    rows = [["text", "label"], ["one; two", "0"], ["three, four", "1"], ["five\tsix", "1"]]
    with (tmp_path / "t.csv").open("w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    samples = load_data(str(tmp_path / "t.csv"), text_taker(classes=2), DataOptions(samples=9))
    found = dict(zip((o.text for o in samples.origins), samples.batch.y.tolist(), strict=True))
    assert found == {"one; two": 0, "three, four": 1, "five six": 1}


def test_blank_rows_of_spreadsheets_are_none_and_bytes_are_no_text(tmp_path, text_taker, refused):
    (tmp_path / "t.csv").write_text("text,label,,\na,0,,\n,,,\nb,1,,\n,,,\n")
    samples = load_data(str(tmp_path / "t.csv"), text_taker(classes=2), DataOptions(samples=9))
    assert sorted(origin.text for origin in samples.origins) == ["a", "b"]
    parquet.write_table(pyarrow.table({"text": [b"a"]}), tmp_path / "t.parquet")
    assert "has a bytes in 'text', not a text" in refused(tmp_path / "t.parquet", text_taker())


def test_class_names_that_datasets_writes_into_parquet_are_matched_by_name(tmp_path, text_taker):
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    rows = {"text": ["bad", "good"], "label": [0, 1]}
    data = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    data.to_parquet(tmp_path / "t.parquet")
    net = text_taker(classes=2, labels=("pos", "neg"))
    samples = load_data(str(tmp_path / "t.parquet"), net, DataOptions(samples=2))
    found = dict(zip((o.text for o in samples.origins), samples.batch.y.tolist(), strict=True))
    assert found == {"bad": 1, "good": 0}


def test_a_whole_label_comes_before_one_of_several_names_of_another_class(tmp_path, text_taker):
    """ImageNet has the classes "Cardigan, Cardigan Welsh corgi" and "cardigan"."""
    net = text_taker(
        classes=3, labels=("Cardigan, Cardigan Welsh corgi", "cardigan", "harp, lyre")
    )
    labels = ["cardigan", "Cardigan Welsh corgi", "Cardigan, Cardigan Welsh corgi", "harp"]
    assert loaded(tmp_path, net, labels) == ([1, 0, 0, 2], ())


@pytest.mark.parametrize(("labels", "value"), [([0, 1, 5], "5"), ([0.0, 1.0, 0.5], "0.0")])
def test_numbers_beyond_the_class_names_of_a_file_name_their_row(
    tmp_path, text_taker, refused, labels, value
):
    facts = {"info": {"features": {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}}}
    table = pyarrow.table({"text": ["a", "b", "c"], "label": labels})
    table = table.replace_schema_metadata({"huggingface": json.dumps(facts)})
    parquet.write_table(table, tmp_path / "t.parquet")
    net = text_taker(classes=2, labels=("neg", "pos"))
    message = refused(tmp_path / "t.parquet", net)
    assert f"has the label {value}, and the file names 2 classes" in message


def test_a_text_of_few_words_gives_no_window_twice(read):
    samples = read("t.txt", "one two three four", samples=12)
    shown = [origin.text for origin in samples.origins]
    assert shown == ["one two three four", "two three four", "three four", "four"]
    assert [note.code for note in samples.notes] == ["one-stream", "fewer-samples"]


def test_a_tokenizer_that_reads_nothing_as_an_unknown_word(read, text_taker):
    net = replace(text_taker(tokenize=lambda text, most: [7] * len(text.split(" "))), unknown_id=7)
    notes = read("t.csv", "text\nfoo\nbar\n", net, samples=2).notes
    assert [note.code for note in notes] == ["unknown-tokens"]
    assert notes[0].text.startswith("100% of the tokens are unknown")
