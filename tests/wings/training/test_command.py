"""`lipaudit train`: cut short, resumed, audited."""

import json
import shlex
import shutil
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

from lipaudit.models.sources.loader import load_net
from lipaudit.models.sources.saving import save_net
from lipaudit.wings.training.loop import TrainingRecord
from tests.commands import invoke, refuse

pytestmark = pytest.mark.usefixtures("elsewhere", "blank_charts")

FGSM = ("--eps", "0.01", "--attack", "fgsm")
ARGS = ("demo", "-n", "128", "--epochs", "3", "--batch-size", "32", "--lr", "1e-3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A trained model; beside it, in `cut`, what a kill after the first epoch would have left."""
    folder, add = tmp_path_factory.mktemp("whole"), TrainingRecord.add

    def add_and_copy(self, epoch):
        add(self, epoch)
        if epoch.number == 1:
            shutil.copytree(self.out, folder / "cut")

    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRecord, "add", add_and_copy)
        done = invoke("train", *ARGS, "--out", "whole")
    assert done.stdout == "whole\n"
    assert done.stderr.count("epoch ") == 3
    assert done.stderr.endswith("Measure the result: lipaudit audit whole --data demo\n")
    return folder / "whole"


def test_a_killed_run_goes_on_to_the_same_weights_which_are_a_model_argument(whole):
    cut = Path(shutil.copytree(whole.with_name("cut"), "cut"))
    assert not json.loads((cut / "train.json").read_text())["finished"]
    assert not (cut / "model.safetensors").exists()
    again = ("train", *ARGS, "--out", "cut")
    refuse(2, "--resume", *again)
    refuse(2, "another recipe", *again, "--resume", "--lr", "2e-3")
    refuse(2, "was trained with another model", *again, "--resume", "--dtype", "float64")
    assert "Continuing after epoch" in invoke(*again, "--resume").stderr
    ours, theirs = (json.loads((p / "train.json").read_text()) for p in (cut, whole))
    assert ours["finished"]
    assert ours["epochs"] == theirs["epochs"]
    weights = [(p / "model.safetensors").read_bytes() for p in (cut, whole)]
    assert weights[0] == weights[1]
    invoke("bounds", whole, "--data", "demo", "-n", "2", "--layers", "0", "-q")


def test_a_model_is_not_written_over():
    save_net(load_net("demo"), Path("vit"))
    before = Path("vit/model.safetensors").read_bytes()
    line = ("train", "vit", "--data", "demo:train", "--out", "vit")
    refuse(2, "vit already contains config.json", *line)
    assert Path("vit/model.safetensors").read_bytes() == before


def test_a_new_classifier_is_trained_resumed_and_read_back_with_the_files_of_its_folder():
    """Three classes of flat colours, four pictures of each."""
    for i, name in enumerate(("blue", "green", "red")):
        Path("photos", name).mkdir(parents=True)
        for shade in range(4):
            colour = tuple((150 + 30 * shade) * (channel == 2 - i) for channel in range(3))
            Image.new("RGB", (16, 16), colour).save(f"photos/{name}/{shade}.png")
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=16)
    ViTForImageClassification(config).save_pretrained("vit")
    Path("vit/notes.txt").write_text("cats\n")
    args = ["vit", "--data", "photos", "--held-out", "photos", "--classes", "3", "--epochs", "2"]
    done = invoke("train", *args, "--out", "vit/tuned")
    assert "the classifier for 3 classes is new and random" in done.stderr
    record = json.loads(Path("vit/tuned/train.json").read_text())
    assert any("new and random" in note for note in record["notes"])
    done = invoke("train", *args, "--out", "vit/tuned", "--resume")
    assert "Continuing after epoch 2 of 2" in done.stderr
    assert Path("vit/tuned/notes.txt").read_text() == "cats\n"
    found = invoke("attack", "vit/tuned", "--data", "photos", *FGSM, "-q", "-f", "json").stdout
    clean = json.loads(found)["sections"][0]["rows"][0]["clean"]
    assert clean == record["epochs"][-1]["accuracy"]
    refuse(4, "--classes", "train", *args[:5], "--out", "other")


def test_a_training_that_is_refused_leaves_no_folder():
    args = ("train", "demo", "--data", "demo:train", "--epochs", "1", "--out", "tuned")
    refuse(2, "training would move rounded weights", *args, "--quantize", "int8")
    assert not Path("tuned").exists()


def test_the_command_that_is_printed_measures_on_the_data():
    """Not on noise: it has the data, and how they are read, in words a shell takes."""
    images = np.random.default_rng(0).integers(0, 255, (16, 1, 8, 8), dtype=np.uint8)
    np.savez("my data.npz", x=images, y=np.arange(16) % 10)
    data = ["--data", "my data.npz", "--held-out", "my data.npz"]
    done = invoke("train", "demo", *data, "--epochs", "1")
    printed = done.stderr.strip().splitlines()[-1].partition("Measure the result: lipaudit ")[2]
    words = shlex.split(printed)
    assert words == ["audit", "trained", "--data", "my data.npz"]
    invoke(*words, "--quick", "-n", "2", "--eps", "0", "--run-dir", "r", "-q")
    report = json.loads(Path("r/report.json").read_text())
    assert report["run"]["data"]["spec"] == "my data.npz"
    assert report["sections"][-1]["measure"] == "attack"


@pytest.mark.parametrize(("limit", "is_noted"), [((), False), (("-n", "8"), True)])
def test_fewer_samples_than_requested_are_noted(limit, is_noted):
    """Without --samples all are requested, and none are missing."""
    np.savez("few.npz", x=np.zeros((4, 1, 8, 8), dtype=np.float32), y=np.arange(4))
    done = invoke("train", "demo", "--data", "few.npz", *limit, "--epochs", "1")
    assert ("few.npz has 4 samples, fewer than the 8 requested" in done.stderr) == is_noted
