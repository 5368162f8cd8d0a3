"""`lipaudit train --watch`: reports of an own training, whose weights stay the same."""

from pathlib import Path

import pytest

from lipaudit.models.sources.loading import load_net
from lipaudit.tables import Report
from lipaudit.train.record import TrainingRecord
from tests.commands import invoke
from tests.monitor.conftest import reports

ARGS = ("demo", "-n", "64", "--batch-size", "32", "--lr", "1e-3", "--no-flip")


def train(*args: str, code: int = 0):
    return invoke("train", *ARGS, *args, code=code)


@pytest.fixture
def here(elsewhere, tmp_path) -> Path:
    return tmp_path


def watched(out: str) -> dict[int, Report]:
    return reports(Path(out) / "lipaudit-watch")


def test_the_weights_are_the_same_and_every_epoch_is_measured_as_it_was(here):
    train("--epochs", "3", "--out", "alone")
    done = train("--epochs", "3", "--out", "watched", "--watch", "2")
    assert "Watched: watched/lipaudit-watch/report.html" in done.stderr
    weights = [Path(name, "model.safetensors").read_bytes() for name in ("alone", "watched")]
    assert weights[0] == weights[1]
    known = watched("watched")
    assert sorted(known) == [0, 2, 3]
    seen = [known[step].run.model for step in (0, 2, 3)]
    assert seen[-1].weights_sha256 == load_net("watched").weights_sha256
    assert len({model.weights_sha256 for model in seen}) == 3


def test_a_resumed_training_goes_on_in_its_folder(here, monkeypatch):
    args = ("--out", "cut", "--watch", "1", "--epochs")
    kept = TrainingRecord.keep

    def killed(record, epoch):
        kept(record, epoch)
        if epoch.number == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRecord, "keep", killed)
        train(*args, "3", code=130)
    before = watched("cut")
    assert sorted(before) == [0, 1]
    train(*args, "3", "--resume")
    after = watched("cut")
    assert sorted(after) == [0, 1, 3]
    assert {step: after[step] for step in before} == before
    train(*args, "3", "--resume")
    assert watched("cut") == after
    assert after[3].run.model.weights_sha256 == load_net("cut").weights_sha256


def test_without_held_out_data_there_is_nothing_to_watch(here):
    train("--epochs", "1", "--out", "own")
    asked = ["train", "own", "--data", "demo:train", "--out", "more", "--watch", "1"]
    done = invoke(*asked, code=2)
    assert "--held-out" in done.stderr
    assert "epoch 1" not in done.stderr
