"""Data sets of the `datasets` library, from a directory on this machine."""

import sys

import datasets
import numpy as np
import pytest
from PIL import Image

from lipaudit.data.loading import DataOptions, load_data

ALL = DataOptions(samples=4)


@pytest.fixture
def library():
    return datasets


def texts(library):
    names = library.ClassLabel(names=["pos", "neg"])
    features = library.Features({"sentence": library.Value("string"), "label": names})
    rows = {"sentence": ["a b", "c d", "e f", "g h"], "label": [0, 1, 1, 1]}
    return library.Dataset.from_dict(rows, features=features)


def test_labels_are_matched_by_the_names_of_the_data_set(library, tmp_path, text_taker):
    texts(library).save_to_disk(tmp_path / "d")
    net = text_taker(classes=2, labels=("NEG", "POS"))
    samples = load_data(f"hf:{tmp_path}/d", net, ALL)
    assert sorted(samples.batch.y.tolist()) == [0, 0, 0, 1]
    assert samples.notes == ()


def test_without_names_the_order_of_the_data_set_counts(library, tmp_path, text_taker):
    texts(library).save_to_disk(tmp_path / "d")
    samples = load_data(f"hf:{tmp_path}/d", text_taker(classes=2), ALL)
    assert sorted(samples.batch.y.tolist()) == [0, 1, 1, 1]
    assert "'pos' is class 0" in samples.notes[0].text


def test_language_models_score_the_names_of_the_data_set(library, tmp_path, text_taker):
    texts(library).save_to_disk(tmp_path / "d")
    net = text_taker(tokenize=lambda text, most: [ord(letter) % 50 for letter in text][:most])
    options = DataOptions(samples=4, scored=True)
    samples = load_data(f"hf:{tmp_path}/d", net, options)
    assert samples.task.classes == ("pos", "neg")
    right = {
        origin.text: int(y) for origin, y in zip(samples.origins, samples.batch.y, strict=True)
    }
    assert right == {"a b": 0, "c d": 1, "e f": 1, "g h": 1}
    names = [[ord(letter) % 50 for letter in f" {name}"] for name in ("pos", "neg")]
    expected = {tuple(100 * i + token for token in ids) for i, ids in enumerate(names, 1)}
    assert {
        tuple(row[3 + 4 * i :][:4].tolist()) for row in samples.batch.x for i in (0, 1)
    } == expected


def test_a_split_of_several(library, tmp_path, text_taker):
    parts = {"train": texts(library), "test": texts(library).select(range(2))}
    library.DatasetDict(parts).save_to_disk(tmp_path / "d")
    net = text_taker(classes=2)
    assert len(load_data(f"hf:{tmp_path}/d", net, ALL).batch) == 2
    assert len(load_data(f"hf:{tmp_path}/d[train]", net, ALL).batch) == 4


def test_images(library, tmp_path, image_taker):
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(4)]
    data = library.Dataset.from_dict(
        {"image": pictures, "label": [0, 1, 2, 0]}, features=library.Features(
            {"image": library.Image(), "label": library.Value("int64")}
        ),
    )  # fmt: skip
    data.save_to_disk(tmp_path / "d")
    batch = load_data(f"hf:{tmp_path}/d", image_taker(classes=3), ALL).batch
    assert batch.x.shape == (4, 3, 8, 8)
    first = np.asarray(pictures[2]).transpose(2, 0, 1)
    match = [np.array_equal((x.numpy() * 255).round(), first) for x in batch.x]
    assert batch.y[match.index(True)] == 2


def test_data_sets_that_are_refused(library, tmp_path, text_taker, image_taker, refused):
    texts(library).save_to_disk(tmp_path / "d")
    assert "no column of images" in refused(f"hf:{tmp_path}/d", image_taker())
    assert "class 'pos'" in refused(f"hf:{tmp_path}/d", text_taker(classes=5))
    assert "not in the local cache" in refused(
        "hf:nobody/nothing[test]", text_taker(), offline=True
    )
    assert "names no data set" in refused("hf:[test]", text_taker())


def test_the_missing_library_comes_with_its_command(monkeypatch, text_taker, refused):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'lipaudit[datasets]'" in refused("hf:imdb", text_taker())
