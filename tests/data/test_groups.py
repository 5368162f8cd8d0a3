"""The group of each sample: of a column of its table, or its class."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError

ROWS = [
    ("good film", "pos", "north"),
    ("bad film", "neg", "south"),
    ("dull", "neg", " north "),
    ("long film", "pos", ""),
    ("fine", "pos", ""),
]


def groups_of(samples):
    """Return the groups by the beginnings of the texts, or by places."""
    return {origin.text or origin.place: origin.group for origin in samples.origins}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "reviews.csv"
    lines = ["text,label,region,id", *(f"{t},{y},{g},{i}" for i, (t, y, g) in enumerate(ROWS))]
    path.write_text("\n".join(lines))
    return path


def read(path, net, column, **more):
    return load_data(str(path), net, DataOptions(samples=5, group_column=column, **more))


def test_a_column_of_a_table_groups_its_samples(table, text_taker):
    net = text_taker(classes=2, labels=("neg", "pos"))
    samples = read(table, net, "region")
    expected = {text: group.strip() for text, _, group in ROWS}
    assert groups_of(samples) == expected
    (note,) = (each for each in samples.notes if each.code == "no-group")
    assert note.text.startswith("2 of 5 samples belong to no group")
    # Groups change neither samples nor their order.
    assert samples.batch.ids == read(table, net, None).batch.ids
    assert {*groups_of(read(table, net, None)).values()} == {""}
    # Numbers are names, too.
    assert {*groups_of(read(table, net, "id")).values()} == {*"01234"}


def test_classes_are_groups_of_any_labelled_data(
    table, text_taker, image_taker, animals, tmp_path
):
    net = text_taker(classes=2, labels=("neg", "pos"))
    assert groups_of(read(table, net, "classes")) == {text: label for text, label, _ in ROWS}
    digits = load_data(
        "demo", image_taker((1, 8, 8), classes=10), DataOptions(samples=50, group_column="classes")
    )
    assert [o.group for o in digits.origins] == [str(y) for y in digits.batch.y.tolist()]
    pictures = read(animals, image_taker(classes=2, labels=("cat", "dog")), "label")
    assert all(place.startswith(f"{group}/") for place, group in groups_of(pictures).items())
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 3, 8, 8), np.float32), y=np.array([0, 1, 1, -1]))
    # A column of a table comes before the word.
    path = tmp_path / "own.csv"
    path.write_text("text,label,classes\nfine,pos,A\nbad,neg,B\n")
    assert groups_of(read(path, net, "classes")) == {"fine": "A", "bad": "B"}


def test_a_parquet_column_of_classes_has_names(tmp_path, text_taker):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = {
        "info": {"features": {"topic": {"names": ["sport", "science"], "_type": "ClassLabel"}}}
    }
    rows = arrow.table({"text": ["a b", "c d"], "topic": [1, 0]})
    parquet.write_table(
        rows.replace_schema_metadata({"huggingface": json.dumps(names)}), tmp_path / "t.parquet"
    )
    found = groups_of(read(tmp_path / "t.parquet", text_taker(), "topic"))
    assert found == {"a b": "science", "c d": "sport"}


def test_what_names_no_groups_is_refused(table, tmp_path, text_taker, image_taker):
    net = text_taker(classes=2, labels=("neg", "pos"))
    with pytest.raises(InputError, match="no column 'regoin'") as caught:
        read(table, net, "regoin")
    assert "region" in caught.value.advice
    (tmp_path / "list.jsonl").write_text('{"text": "a b", "region": ["north", "south"]}')
    with pytest.raises(
        InputError, match="line 1 has a list in 'region', and a group is one value"
    ):
        read(tmp_path / "list.jsonl", text_taker(), "region")
    (tmp_path / "empty.csv").write_text("text,region\na b,\nc d, \n")
    with pytest.raises(InputError, match="the column 'region' is empty"):
        read(tmp_path / "empty.csv", text_taker(), "region")
    with pytest.raises(InputError, match="the list of labels is empty"):
        read("random", image_taker(), "classes")
    with pytest.raises(InputError, match="has no columns, so --group-column region names none"):
        read("demo", image_taker((1, 8, 8), classes=10), "region")


def test_a_thousand_samples_keep_their_groups(tmp_path, text_taker):
    """Whatever the order in which they are drawn, and with ids in their places."""
    path = tmp_path / "many.jsonl"
    rows = [{"id": f"r{i}, id 7", "text": f"word{i} film", "region": i % 7} for i in range(1000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    samples = load_data(str(path), text_taker(), DataOptions(samples=600, group_column="region"))
    found = groups_of(samples)
    assert found == {f"word{i} film": str(i % 7) for i in range(1000) if f"word{i} film" in found}
    assert sum(Counter(found.values()).values()) == 600
    assert torch.equal(
        samples.batch.x, load_data(str(path), text_taker(), DataOptions(samples=600)).batch.x
    )
