"""Data sets of the Hub, through its real clients, and what commands say and keep of the Hub."""

import io
import json
import os
import pty
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from lipaudit.data.hub import Repository, parse_reference
from lipaudit.data.loading import DataOptions, load_data
from tests.commands import invoke, refuse
from tests.hub import files_of
from tests.hub import hub as hub
from tests.models.sources.cases import bert, save

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


def test_only_the_split_asked_for_is_downloaded_whole_or_in_part_at_a_revision(sets, read, says):
    sha = sets.add("datasets/org/two", FILES, {"v1": FILES | {"plain/train.csv": ROWS[:23]}})
    samples = read("hf:org/two/plain[test]")
    assert sets.downloads() == ["README.md", "plain/test-0.csv", "plain/test-1.csv"]
    # features of the card: 0 is neg, which the model calls 1
    assert sorted(samples.batch.y.tolist()) == [0] * 6 + [1] * 2
    assert (samples.commit.sha, samples.commit.repository.revision) == (sha, "main")
    assert [n.code for n in samples.notes] == ["hub-commit"]
    assert len(read("hf:org/two/plain[test[:3]]").batch) == 3
    assert len(read("hf:org/two/plain[test[50%:]]").batch) == 4
    assert "the split 'test[:' cannot be read" in says("hf:org/two/plain[test[:]")
    assert len(read("hf:org/two/plain[train]").batch) == 4
    for spec in ("hf:org/two/plain[train]@v1", "hf:org/two/plain@v1[train]"):
        old = read(spec)
        assert (len(old.batch), old.commit.repository.revision) == (2, "v1")


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


def test_unknown_splits_and_configurations(sets, read, says):
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
    sets.add("datasets/org/both", {"train.csv": b"text,label\na,pos\n", "test.csv": ROWS})
    assert len(read("hf:org/both").batch) == 4
    assert sets.downloads() == ["README.md", "test.csv"]


def test_a_model_without_names_takes_the_order_of_the_set_or_scores_its_names(sets, text_taker):
    sets.add("datasets/org/two", FILES)
    spec, few = "hf:org/two/plain[train]", DataOptions(samples=4)
    samples = load_data(spec, text_taker(classes=2), few)
    assert sorted(samples.batch.y.tolist()) == [0, 1, 1, 1]
    assert "'neg' is class 0" in samples.notes[0].text
    texts = [["a b", "c d", "e f", "g h"][int(o.place.split()[1])] for o in samples.origins]
    assert texts == [origin.text for origin in samples.origins]
    net = text_taker(tokenize=lambda text, most: [ord(letter) % 50 for letter in text][:most])
    samples = load_data(spec, net, replace(few, scored=True))
    assert samples.task.classes == ("neg", "pos")
    right = dict(zip((o.text for o in samples.origins), samples.batch.y.tolist(), strict=True))
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
    sets.add("datasets/org/bad", {"test.parquet": b"not parquet"})
    text = says("hf:org/bad")
    assert "org/bad cannot be downloaded" in text
    assert "Parquet" in text


DATA = ("--data", "hf:org/two/plain[test]@main", "-n", "2")


@pytest.fixture
def tiny(hub, tmp_path) -> str:
    """A text classifier on the Hub; its commit."""
    module = bert(id2label={0: "neg", 1: "pos", 2: "other"})
    save(module, tmp_path / "model")
    return hub.add("org/tiny", files_of(tmp_path / "model"))


@pytest.mark.parametrize("quiet", [True, False])
def test_reports_name_their_commits_and_quiet_hushes_clients(tiny, sets, capfd, elsewhere, quiet):
    """Bars and complaints go past what a runner catches: to the file descriptor."""
    data = sets.add("datasets/org/two", FILES)
    sets.repositories["org/tiny"].cut = 1
    silent = ["-q"] * quiet
    done = invoke("jacobian", "hf:org/tiny", *DATA, "-f", "json", "-o", "r.md", *silent)
    facts, page = json.loads(done.stdout)["run"], Path("r.md").read_text()
    for kind, commit in (("model", tiny), ("data", data)):
        assert (facts[kind]["revision"], facts[kind]["commit"]) == ("main", commit)
        assert commit[:12] in page
    notes = json.loads(done.stdout)["sections"][0]["notes"]
    assert [n["code"] for n in notes if n["code"].startswith("hub")] == ["hub-commit"] * 2
    said = done.stderr + capfd.readouterr().err
    assert (said == "") == quiet
    for text in ("Fetching", "Generating test split", "org/tiny is read at commit"):
        assert (text in said) != quiet


def test_what_cannot_be_had_ends_every_command_alike(hub, elsewhere):
    hub.add("org/shut", {"config.json": b"{}", "model.safetensors": b""}, gated=True)
    for command in (["bounds", "hf:org/shut"], ["train", "hf:org/shut", "--data", "demo:train"]):
        said = refuse(4, "error: the model org/shut is gated", *command)
        assert "hint: Request access on" in said


@pytest.mark.slow(seconds=10)
def test_a_terminal_shows_what_is_downloaded(tiny, hub, elsewhere, tmp_path):
    """A process of its own, as a user has it: nothing of it is patched but the address."""
    home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    terminal, other_end = pty.openpty()
    termios.tcsetwinsize(other_end, (40, 120))
    pieces = []

    def listen():
        with suppress(OSError):  # the other end is closed
            while piece := os.read(terminal, 1 << 16):
                pieces.append(piece)

    listener = threading.Thread(target=listen)
    listener.start()
    command = [sys.executable, "-m", "lipaudit", "bounds", "hf:org/tiny", "-n", "1", "-f", "json"]
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "120"}
    env = os.environ | home | variables
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=other_end, check=False)
    os.close(other_end)
    listener.join()
    said = b"".join(pieces).decode()
    assert done.returncode == 0, said
    assert json.loads(done.stdout)["run"]["model"]["commit"] == tiny
    assert "Fetching 4 files: 100%" in said
