"""`lipaudit train` through a real process: killed, resumed, audited."""

import json
import shlex
import signal
import time
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

from lipaudit.models.sources.loader import LoadOptions, load_net, save_net
from lipaudit.train.loop import save_model
from tests.commands import invoke, refuse
from tests.processes import begun, wait_for_signal

pytestmark = pytest.mark.usefixtures("blank_charts")

FGSM = ("--eps", "0.01", "--attack", "fgsm")
ARGS = ("demo", "-n", "128", "--epochs", "3", "--batch-size", "32", "--lr", "1e-3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with chdir(folder):
        done = invoke("train", *ARGS, "--out", "whole")
    assert done.stdout == "whole\n"
    assert done.stderr.count("epoch ") == 3
    assert done.stderr.endswith("Measure the result: lipaudit audit whole --data demo\n")
    return folder / "whole"


def hold_after_an_epoch() -> None:
    from lipaudit.train.loop import TrainingRecord

    keep = TrainingRecord.keep

    def keep_and_wait(self, epoch):
        keep(self, epoch)
        wait_for_signal()

    TrainingRecord.keep = keep_and_wait


def test_a_killed_run_goes_on_to_the_same_weights(whole, tmp_path, monkeypatch):
    how = {"cwd": tmp_path, "before": hold_after_an_epoch}
    process = begun("train", *ARGS, "--out", "cut", "-q", **how)
    record = tmp_path / "cut/train.json"
    while not record.exists():
        assert process.alive
        time.sleep(0.01)
    process.send(signal.SIGKILL)
    assert process.ended()[0] == -signal.SIGKILL
    assert not json.loads(record.read_text())["finished"]
    assert not (tmp_path / "cut/model.safetensors").exists()
    monkeypatch.chdir(tmp_path)
    again = ("train", *ARGS, "--out", "cut")
    refuse(2, "--resume", *again)
    refuse(2, "another recipe", *again, "--resume", "--lr", "2e-3")
    refuse(2, "was trained with another model", *again, "--resume", "--dtype", "float64")
    done = invoke(*again, "--resume")
    assert "Continuing after epoch" in done.stderr
    ours, theirs = (json.loads((p / "train.json").read_text()) for p in (record.parent, whole))
    assert ours["finished"]
    assert ours["epochs"] == theirs["epochs"]
    weights = [(p / "model.safetensors").read_bytes() for p in (record.parent, whole)]
    assert weights[0] == weights[1]


def test_the_result_is_a_model_argument(whole):
    invoke("bounds", whole, "--data", "demo", "-n", "2", "-q")


def test_a_model_is_not_written_over():
    Path("vit").mkdir()
    save_net(load_net("demo"), Path("vit"))
    before = Path("vit/model.safetensors").read_bytes()
    line = ("train", "vit", "--data", "demo:train", "--out", "vit")
    refuse(2, "vit already contains config.json", *line)
    assert Path("vit/model.safetensors").read_bytes() == before


def test_a_model_of_transformers_brings_its_files_along(tmp_path):
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=16)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    (tmp_path / "vit/notes.txt").write_text("cats\n")
    out = tmp_path / "vit/tuned"
    out.mkdir()
    net = load_net(str(tmp_path / "vit"))
    assert save_model(net, out, LoadOptions())
    assert (out / "notes.txt").read_text() == "cats\n"
    assert {p.name for p in out.iterdir()} == {"config.json", "model.safetensors", "notes.txt"}
    again = load_net(str(out))
    x = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(again.read(again.call(x, None)), net.read(net.call(x, None)))


@pytest.fixture
def photos(tmp_path) -> Path:
    """Three classes of flat colours, four pictures of each."""
    for i, name in enumerate(("blue", "green", "red")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for shade in range(4):
            pixel = [0, 0, 0]
            pixel[2 - i] = 150 + 30 * shade
            image = Image.new("RGB", (16, 16), tuple(pixel))
            image.save(tmp_path / "photos" / name / f"{shade}.png")
    return tmp_path / "photos"


def test_a_new_classifier_is_trained_resumed_and_read_back(photos, monkeypatch):
    monkeypatch.chdir(photos.parent)
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=16)
    ViTForImageClassification(config).save_pretrained("vit")
    args = ["vit", "--data", "photos", "--held-out", "photos", "--classes", "3", "--epochs", "2"]
    done = invoke("train", *args)
    assert "the classifier for 3 classes is new and random" in done.stderr
    record = json.loads(Path("trained/train.json").read_text())
    assert any("new and random" in note for note in record["notes"])
    done = invoke("train", *args, "--resume", code=None)
    assert "Continuing after epoch 2 of 2" in done.stderr
    done = invoke("attack", "trained", "--data", "photos", *FGSM)
    refuse(4, "--classes", "train", *args[:5], "--out", "other")


def test_the_command_that_is_printed_measures_on_the_data(tmp_path, monkeypatch):
    """Not on noise: it has the data, and how they are read, in words a shell takes."""
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 255, (16, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "my data.npz", x=images, y=np.arange(16) % 10)
    data = ["--data", "my data.npz", "--held-out", "my data.npz"]
    done = invoke("train", "demo", *data, "--epochs", "1")
    printed = done.stderr.strip().splitlines()[-1].partition("Measure the result: lipaudit ")[2]
    words = shlex.split(printed)
    assert words == ["audit", "trained", "--data", "my data.npz"]
    quick = ["--quick", "-n", "2", "--eps", "0", "--run-dir", "r", "-q"]
    invoke(*words, *quick)
    report = json.loads((tmp_path / "r/report.json").read_text())
    assert report["run"]["data"]["spec"] == "my data.npz"
    assert report["sections"][-1]["measure"] == "attack"
