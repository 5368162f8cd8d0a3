"""Text: tables, plain files, cutting and padding."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import UsageError

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


def test_padding_fills_with_the_padding_id_behind_the_mask(tmp_path, text_taker):
    batch = load_data(table(tmp_path / "t.csv"), text_taker(), ALL).batch
    assert batch.x.shape == batch.mask.shape == (4, 6)
    assert batch.x[~batch.mask].unique().tolist() == [0]
    assert (batch.x[batch.mask] > 0).all()


def test_ids_do_not_depend_on_the_padding(tmp_path, text_taker):
    short = table(tmp_path / "s.csv", ROWS[1:2])
    longer = table(tmp_path / "l.csv")
    alone = load_data(short, text_taker(), DataOptions(samples=1)).batch
    among = load_data(longer, text_taker(), ALL).batch
    assert alone.ids[0] in among.ids


def test_texts_of_one_length_need_no_mask(read):
    assert read("t.csv", "text\na b\nc d\n", samples=2).batch.mask is None


def test_columns_can_be_named(read, text_taker):
    columns = {"text_column": "body", "label_column": "stars"}
    batch = read(
        "t.csv", "body,text,stars\na b,x,1\nc,y,0\n", text_taker(classes=2), samples=2, **columns
    ).batch
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


def test_long_texts_are_cut_with_a_note(read):
    samples = read("t.csv", "text\na b c d e f\na b c\n", samples=2, max_tokens=5)
    assert samples.batch.x.shape == (2, 5)
    assert samples.batch.x[:, -1].tolist() == [2, 2]
    assert [(n.level, n.code) for n in samples.notes] == [("warning", "text-cut")]
    assert samples.notes[0].text.startswith("1 of 2 texts were cut to 5 tokens")


def test_more_tokens_than_the_model_takes_are_noted(read, text_taker):
    samples = read("t.csv", "text\na b c d e f\n", text_taker(4), max_tokens=9)
    assert samples.batch.x.shape[1] == 4
    assert samples.notes[0].code == "max-tokens"


def test_a_plain_file_is_cut_into_windows_spread_evenly(read, text_taker):
    words = [chr(97 + i % 26) + str(i) for i in range(200)]
    samples = read("t.txt", " ".join(words), samples=4, max_tokens=10)
    batch, (note,) = samples.batch, samples.notes
    assert batch.x.shape == (4, 10)
    assert batch.x[0].tolist() == text_taker().tokenize(" ".join(words[:8]), 10)
    assert batch.mask is None
    assert len(set(batch.ids)) == 4
    assert "one long text and cut into 4 windows" in note.text


def test_windows_begin_with_whole_words(read):
    batch = read("t.txt", "lighthouse " * 50, samples=7, max_tokens=3).batch
    assert torch.equal(batch.x, batch.x[:1].expand(7, -1))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "", "has no rows"),
        ("t.csv", "body\nx\n", "has no text column (columns: body)"),
        ("t.csv", 'text\n"open', "not a readable .csv"),
        ("t.jsonl", "{", "line 1 is not JSON (Expecting property name"),
        ("t.jsonl", "[1]", "line 1 is not a {...} object"),
        ("t.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("t.csv", "text,label\nx,0.7\n", "class '0.7'"),
        ("t.jsonl", '{"text": "x", "label": 0.7}', "class '0.7'"),
        ("t.txt", " \n", "is empty"),
        ("t.csv", "text\n \n", "has no tokens"),
    ],
)
def test_files_that_are_refused(tmp_path, text_taker, refused, name, content, message):
    (tmp_path / name).write_text(content)
    assert message in refused(tmp_path / name, text_taker(classes=2))


def test_requests_that_are_refused(tmp_path, text_taker, image_taker, refused):
    path = table(tmp_path / "t.csv")
    assert "no column 'body'" in refused(path, text_taker(), text_column="body")
    assert "leaves nothing" in refused(path, text_taker(), UsageError, max_tokens=0)
    assert "has no tokenizer" in refused(path, text_taker(tokenize=None))
    assert "the model takes image" in refused(path, image_taker())


BAD_LINES = [
    '{"text": "a", "label": 0}',
    "",
    "{broken",
    '{"text": "b"}',
    '{"text": "", "label": 1}',
]
BAD_LINES += ['{"text": "c d", "label": 1}', "[1]"]


def test_rows_that_cannot_be_read_are_left_out_where_that_is_asked(
    read, tmp_path, text_taker, refused
):
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


def test_pairs_are_refused_where_nobody_knows_how_to_join_them(tmp_path, text_taker, refused):
    path = table(tmp_path / "t.csv", [("a", "b")], ("premise", "hypothesis"))
    assert "--text-column" in refused(path, text_taker())
    assert "no column 'c'" in refused(path, text_taker(), text_column="premise,c")
    assert "names 3 columns" in refused(
        path, text_taker(), text_column="premise,hypothesis,premise"
    )


def test_parquet_is_read_like_any_table(tmp_path, text_taker):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is optional")
    library = pytest.importorskip("pyarrow.parquet", reason="pyarrow is optional")
    rows = [{"text": text, "label": label} for text, label in ROWS]
    library.write_table(arrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    net = text_taker(classes=2, labels=("BAD", "GOOD"))
    parquet = load_data(str(tmp_path / "t.parquet"), net, ALL)
    assert parquet.suite_id == load_data(table(tmp_path / "t.csv"), net, ALL).suite_id


def test_parquet_without_its_library_says_what_to_do(tmp_path, text_taker, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    assert "pip install pyarrow" in refused(tmp_path / "t.parquet", text_taker())


def test_a_table_without_names_is_refused_and_how_to_mend_it(tmp_path, text_taker, refused):
    (tmp_path / "t.csv").write_text("great,positive\nawful,negative\n")
    said = refused(tmp_path / "t.csv", text_taker(classes=2))
    assert "(columns: great, positive)" in said
    assert "add a line with column names above it: text,label" in said


def test_a_long_name_that_was_asked_for_is_a_name(read, text_taker):
    question = "What did you think of the film?"
    columns = {"text_column": question, "label_column": "stars"}
    rows = f"{question},stars\nfine,1\nbad,0\n"
    assert len(read("t.csv", rows, text_taker(classes=2), samples=2, **columns).batch) == 2
