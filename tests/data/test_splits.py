"""Data sets of the Hub, through its real clients: one split of one configuration at one commit."""

import io
import sys

import datasets
import numpy as np
import pytest
from PIL import Image

from lipaudit.data.hub import Repository, parse_reference
from lipaudit.data.loading import DataOptions, load_data
from tests.hub import hub as hub

CARD = b"""---
configs:
- config_name: plain
  data_files:
  - split: train
    path: plain/train.csv
  - split: test
    path: plain/test-*.csv
- config_name: pairs
  data_files:
  - split: validation
    path: pairs/validation.csv
dataset_info:
- config_name: plain
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': neg
          '1': pos
- config_name: pairs
  features:
  - name: text
    dtype: string
---
"""
ROWS = b"text,label\na b,0\nc d,1\ne f,1\ng h,1\n"
FILES = {
    "README.md": CARD, "plain/train.csv": ROWS, "plain/test-0.csv": ROWS,
    "plain/test-1.csv": ROWS.replace(b"a b", b"x y"), "pairs/validation.csv": b"text\na b\n",
    "picture.png": b"never read",
}  # fmt: skip


@pytest.fixture
def sets(hub, monkeypatch, tmp_path):
    """A Hub whose data sets the library `datasets` reads, with a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "tables")
    return hub


@pytest.fixture
def read(text_taker):
    """Read a data set for a classifier that names its classes the other way round."""

    def load(spec, samples=8, **options):
        net = text_taker(classes=2, labels=("POS", "NEG"))
        return load_data(spec, net, DataOptions(samples=samples, **options))

    return load


@pytest.fixture
def says(text_taker, refused):
    """Return what the error on a data set says."""
    return lambda spec, **options: refused(spec, text_taker(classes=2), **options)


@pytest.mark.parametrize(
    ("text", "name", "config", "split", "revision"),
    [
        ("imdb", "imdb", "", "test", "main"),
        ("org/name[train]", "org/name", "", "train", "main"),
        ("org/name/sst2[train[:10%]]", "org/name", "sst2", "train[:10%]", "main"),
        ("org/name/a/b", "org/name", "a/b", "test", "main"),
        ("org/name@v1", "org/name", "", "test", "v1"),
        ("org/name/c[a]@v1", "org/name", "c", "a", "v1"),
        ("org/name/c@refs/pr/1[a]", "org/name", "c", "a", "refs/pr/1"),
    ],
)
def test_references(text, name, config, split, revision):
    assert parse_reference(text) == (Repository(name, "dataset", revision), config, split)


def test_only_the_split_asked_for_is_downloaded(sets, read):
    sha = sets.add("datasets/org/two", FILES)
    samples = read("hf:org/two/plain[test]")
    assert sets.downloads() == ["README.md", "plain/test-0.csv", "plain/test-1.csv"]
    # features of the card: 0 is neg, which the model calls 1
    assert sorted(samples.batch.y.tolist()) == [0] * 6 + [1] * 2
    assert (samples.commit.sha, samples.commit.repository.revision) == (sha, "main")
    assert [n.code for n in samples.notes] == ["hub-commit"]


def test_a_split_is_fetched_once_and_there_offline(sets, read, says):
    sha = sets.add("datasets/org/two", FILES)
    first = read("hf:org/two/plain")
    sets.log.clear()
    assert read("hf:org/two/plain").suite_id == first.suite_id
    assert len(sets.log) == 1
    offline = read("hf:org/two/plain", offline=True)
    assert len(sets.log) == 1
    assert (offline.suite_id, offline.commit.sha) == (first.suite_id, sha)
    assert [(n.level, n.code) for n in offline.notes] == [("warning", "hub-cache")]
    sets.repositories["datasets/org/two"].status = 503
    ill = read("hf:org/two/plain")
    assert ill.suite_id == first.suite_id
    assert "503" in ill.notes[-1].text
    for offline in (False, True):
        text = says("hf:org/two/plain[train]", offline=offline)
        assert "the split 'train' of org/two is not in the local cache" in text
    assert "org/other at main is not in the local cache" in says("hf:org/other", offline=True)
    (Repository("org/two", "dataset").cache / "refs" / "main").write_bytes(b"\xff")
    text = says("hf:org/two/plain", offline=True)
    assert "datasets--org--two cannot be read (UnicodeDecodeError" in text


def test_revisions(sets, read):
    sets.add("datasets/org/two", FILES, {"v1": FILES | {"plain/train.csv": ROWS[:23]}})
    assert len(read("hf:org/two/plain[train]").batch) == 4
    for spec in ("hf:org/two/plain[train]@v1", "hf:org/two/plain@v1[train]"):
        old = read(spec)
        assert (len(old.batch), old.commit.repository.revision) == (2, "v1")


def test_parts_of_splits(sets, read, says):
    sets.add("datasets/org/two", FILES)
    assert len(read("hf:org/two/plain[test[:3]]").batch) == 3
    assert len(read("hf:org/two/plain[test[50%:]]").batch) == 4
    assert "the split 'test[:' cannot be read" in says("hf:org/two/plain[test[:]")


def test_without_a_card_the_names_of_files_tell_the_splits(sets, read):
    sets.add("datasets/org/one", {"train.csv": b"text,label\na,pos\n", "test.csv": ROWS})
    assert len(read("hf:org/one").batch) == 4
    assert sets.downloads() == ["test.csv"]


def test_unknown_splits_and_configurations(sets, says):
    sets.add("datasets/org/two", FILES)
    text = says("hf:org/two/plain[tset]")
    assert "org/two has no split 'tset' (it has: train, test)" in text
    assert "Did you mean 'test'?" in text
    assert "Did you mean 'validation'?" in says("hf:org/two/pairs")
    text = says("hf:org/two/plane@main[train]")
    assert "no configuration 'plane' (it has: plain, pairs)" in text
    assert "Did you mean 'plain'?" in text
    assert "org/two has several configurations: plain, pairs" in says("hf:org/two")
    assert sets.downloads() == ["README.md"]
    sets.add("datasets/org/one", {"train.csv": ROWS})  # without a card, files name the splits
    assert "no split 'test' (it has: train)" in says("hf:org/one")


def test_without_names_in_the_model_the_order_of_the_data_set_counts(sets, text_taker):
    sets.add("datasets/org/two", FILES)
    samples = load_data("hf:org/two/plain[train]", text_taker(classes=2), DataOptions(samples=4))
    assert sorted(samples.batch.y.tolist()) == [0, 1, 1, 1]
    assert "'neg' is class 0" in samples.notes[0].text
    texts = [["a b", "c d", "e f", "g h"][int(o.place.split()[1])] for o in samples.origins]
    assert texts == [origin.text for origin in samples.origins]


def test_language_models_score_the_names_of_the_data_set(sets, text_taker):
    sets.add("datasets/org/two", FILES)
    net = text_taker(tokenize=lambda text, most: [ord(letter) % 50 for letter in text][:most])
    options = DataOptions(samples=4, scored=True)
    samples = load_data("hf:org/two/plain[train]", net, options)
    assert samples.task.classes == ("neg", "pos")
    right = {
        origin.text: int(y) for origin, y in zip(samples.origins, samples.batch.y, strict=True)
    }
    assert right == {"a b": 0, "c d": 1, "e f": 1, "g h": 1}
    names = [[ord(letter) % 50 for letter in f" {name}"] for name in ("neg", "pos")]
    expected = {tuple(100 * i + token for token in ids) for i, ids in enumerate(names, 1)}
    rows = [row[3 + 4 * i :][:4] for row in samples.batch.x for i in (0, 1)]
    assert {tuple(row.tolist()) for row in rows} == expected


def test_images(sets, image_taker):
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(4)]
    kinds = {"image": datasets.Image(), "label": datasets.Value("int64")}
    columns = {"image": pictures, "label": [0, 1, 2, 0]}
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    table.to_parquet(file := io.BytesIO())
    sets.add("datasets/org/seen", {"test.parquet": file.getvalue()})
    batch = load_data("hf:org/seen", image_taker(classes=3), DataOptions(samples=4)).batch
    assert batch.x.shape == (4, 3, 8, 8)
    third = np.asarray(pictures[2]).transpose(2, 0, 1)
    match = [np.array_equal((x.numpy() * 255).round(), third) for x in batch.x]
    assert batch.y[match.index(True)] == 2


def test_data_sets_that_do_not_fit_the_model(sets, text_taker, image_taker, refused, monkeypatch):
    sets.add("datasets/org/two", FILES)
    assert "no column of images" in refused("hf:org/two/plain", image_taker())
    assert "class 'neg'" in refused("hf:org/two/plain", text_taker(classes=5))
    assert "names no data set" in refused("hf:[test]", text_taker())
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'lipaudit[datasets]'" in refused("hf:imdb", text_taker())


def test_what_the_hub_refuses(sets, says):
    assert "the data set org/nothing does not exist" in says("hf:org/nothing")
    sets.add("datasets/org/gated", FILES, gated=True)
    text = says("hf:org/gated/plain")
    assert "gated" in text.replace("org/gated", "")
    assert f"{sets.url}/datasets/org/gated" in text
    sets.add("datasets/org/private", FILES, private=True)
    assert "or it is private" in says("hf:org/private")
    sets.add("datasets/org/two", FILES)
    assert "org/two has no revision 'v9'" in says("hf:org/two@v9")
    sets.add("datasets/org/ill", FILES, files_status=503)
    assert "cannot be downloaded" in says("hf:org/ill/plain")


def test_data_that_cannot_be_read_say_why(sets, says):
    sets.add("datasets/org/bad", {"test.parquet": b"not parquet"})
    text = says("hf:org/bad")
    assert "org/bad cannot be downloaded" in text
    assert "Parquet" in text


def test_bars_follow_those_of_the_hub(sets, read, capfd):
    from lipaudit.data.hub import silence_clients

    sets.add("datasets/org/two", FILES)
    with silence_clients():
        read("hf:org/two/plain")
    assert capfd.readouterr().err == ""
    read("hf:org/two/plain[train]")
    assert "Generating train split" in capfd.readouterr().err
