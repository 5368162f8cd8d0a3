"""`lipaudit watch DIR`: which checkpoints there are, and that each is measured once."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lipaudit
from lipaudit import schema
from lipaudit.cli.commands import build
from lipaudit.models.sources.loading import load_net
from lipaudit.models.sources.saving import save_net
from lipaudit.monitor.checkpoints import checkpoints, when

ARGS = ("--data", "demo", "-n", "2", "--only", "jacobian", "-f", "table")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("checkpoint-100", (100, None)),
        ("step_200.pt", (200, None)),
        ("epoch=3-step=600.ckpt", (600, 3.0)),
        ("epoch=3-step=600-v1.ckpt", (600, 3.0)),
        ("val_loss=0.25-epoch=7.ckpt", (7, 7.0)),
        ("vit_base_patch16_224_iter_50.pth", (50, None)),
        ("model_0200.safetensors", (200, None)),
        ("epoch_3.pt", (3, 3.0)),
        ("global_step1200", (1200, None)),
        ("best.ckpt", None),
        ("last.ckpt", None),
        ("acc=0.91.pt", None),
        ("optimizer_5.pt", None),
        ("rng_state_0.pth", None),
        ("model-00001-of-00002.safetensors", None),
    ],
)
def test_the_name_of_a_checkpoint_says_its_step(name, says):
    assert when(name) == says


def filled(folder: Path, names: dict[str, int]) -> None:
    """Write empty files, the later the larger their number."""
    for name, age in names.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        os.utime(path, (age, age))


def test_checkpoints_come_in_the_order_of_their_steps(tmp_path):
    filled(
        tmp_path,
        {
            "checkpoint-1000/config.json": 1,
            "checkpoint-1000/model.safetensors": 2,
            "checkpoint-1000/optimizer.pt": 9,
            "checkpoint-900/model.safetensors": 1,  # weights alone: a file for --arch
            "checkpoint-950/config.json": 1,  # no weights yet
            "step_20.pt": 3,
            "epoch=0-step=20-v1.ckpt": 2,  # an earlier one of the same step
            "step_3.txt": 1,
            ".step_4.pt": 1,
            "best.ckpt": 1,
        },
    )
    (tmp_path / "checkpoint-1000/trainer_state.json").write_text('{"epoch": 2.5}')
    seen = checkpoints(tmp_path)
    assert [(c.name, c.step, c.epoch) for c in seen] == [
        ("step_20.pt", 20, None),
        ("checkpoint-900", 900, None),
        ("checkpoint-1000", 1000, 2.5),
    ]
    assert seen[1].model == tmp_path / "checkpoint-900/model.safetensors"
    assert seen[2].model == tmp_path / "checkpoint-1000"
    filled(tmp_path, {"checkpoint-1000/optimizer.pt": 30})
    assert checkpoints(tmp_path)[2].state == seen[2].state
    filled(tmp_path, {"checkpoint-1000/model.safetensors": 30})
    assert checkpoints(tmp_path)[2].state != seen[2].state


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Three checkpoints of one architecture, their weights ever larger."""
    folder = tmp_path_factory.mktemp("made")
    for step in (5, 10, 100):
        net = load_net("demo")
        with torch.no_grad():
            net.module.head.weight.mul_(1 + step / 100)
        save_net(net, folder / f"checkpoint-{step}")
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(made, tmp_path / "out"))


def watch(folder: Path, *args: str):
    return CliRunner().invoke(build(), ["watch", str(folder), *ARGS, *args])


def points(folder: Path):
    return schema.load_history(folder / "lipaudit-checkpoints/history.jsonl").points


def test_every_checkpoint_is_measured_once_and_as_it_is_alone(folder):
    moved = shutil.move(folder / "checkpoint-100", folder.parent / "later")
    done = watch(folder, "-o", "curves.html")
    assert done.exit_code == 0, done.output
    assert "step 5: checkpoint-5 (1 of 2 new)" in done.stderr
    assert "Jacobian norm, median" in done.stdout
    assert "over its training" in Path("curves.html").read_text()
    shutil.move(moved, folder / "checkpoint-100")
    done = watch(folder)
    assert "step 100: checkpoint-100 (1 of 1 new)" in done.stderr
    assert "checkpoint-5 " not in done.stderr
    assert [(p.step, p.checkpoint) for p in points(folder)] == [
        (step, f"checkpoint-{step}") for step in (5, 10, 100)
    ]
    alone = lipaudit.measure(str(folder / "checkpoint-10"), "jacobian", data="demo", samples=2)
    kept = schema.load(folder / "lipaudit-checkpoints" / points(folder)[1].report)
    assert kept.section("jacobian").samples == alone.section("jacobian").samples
    assert points(folder)[1].summary.norms.median == alone.section("jacobian").rows[0].median
    assert "new)" not in watch(folder).stderr


def test_one_that_was_written_anew_is_measured_anew(folder):
    watch(folder)
    before = points(folder)
    shutil.copytree(folder / "checkpoint-100", folder / "checkpoint-5", dirs_exist_ok=True)
    weights = folder / "checkpoint-5/model.safetensors"
    os.utime(weights, (time.time() + 5,) * 2)
    assert "checkpoint-5 (1 of 1 new)" in watch(folder).stderr
    after = points(folder)
    assert [p.step for p in after] == [5, 10, 100]
    assert after[0].summary.norms == after[2].summary.norms
    assert after[1:] == before[1:]


def test_one_that_is_damaged_leaves_its_reason_and_is_tried_the_next_time(folder):
    weights = folder / "checkpoint-10/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    done = watch(folder)
    assert done.exit_code == 4
    assert "not every checkpoint was measured: checkpoint-10: " in done.stderr
    assert "not a complete safetensors file" in points(folder)[1].failures["jacobian"]
    assert "step 10: jacobian failed" in done.stdout
    assert points(folder)[2].summary.norms is not None
    again = watch(folder)
    assert again.exit_code == 4
    assert "checkpoint-10 (1 of 1 new)" in again.stderr
    weights.write_bytes(whole)
    done = watch(folder)
    assert done.exit_code == 0, done.output
    assert not any(p.failures for p in points(folder))


def test_other_options_or_samples_are_refused(folder):
    watch(folder)
    done = watch(folder, "--seed", "4")
    assert done.exit_code == 2
    assert "holds a history of other options: seed 0, not 4" in done.stderr
    done = watch(folder, "--only", "jacobian,bounds")
    assert "of other measures: bounds unset, not measured" in done.stderr
    done = watch(folder, "--seed", "4", "--run-dir", "elsewhere", "-q")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert Path("elsewhere/history.html").exists()


def test_a_history_is_of_all_samples(folder, monkeypatch):
    done = watch(folder, "--shard", "1/2")
    assert (done.exit_code, "one MODEL, not for the course" in done.stderr) == (2, True)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    done = watch(folder)
    assert (done.exit_code, "one MODEL, not for the course" in done.stderr) == (2, True)
    assert not (folder / "lipaudit-checkpoints").exists()


@pytest.mark.parametrize(
    ("make", "args", "code", "says"),
    [
        (lambda f: None, [], 4, "there is no directory"),
        (lambda f: f.mkdir(), [], 4, "holds no checkpoint whose name has a step"),
        (lambda f: f.mkdir(), ["--poll", "1"], 2, "--poll goes with --follow"),
        (lambda f: f.mkdir(), ["--logger", "excel"], 2, "no logger 'excel'"),
        (lambda f: filled(f, {"step_1.pt": 1}), [], 2, "--arch"),
    ],
)
def test_what_cannot_be_watched_is_one_clear_error(tmp_path, make, args, code, says):
    make(tmp_path / "out")
    done = watch(tmp_path / "out", *args)
    assert done.exit_code == code
    assert says in done.stderr
    assert not (tmp_path / "out/lipaudit-checkpoints").exists()


class Clock:
    """Stands for the time between two looks: then something happens, at last Ctrl-C."""

    def __init__(self, *events):
        self.events = list(events)

    def sleep(self, _seconds):
        if not self.events:
            raise KeyboardInterrupt
        self.events.pop(0)()

    def monotonic(self):
        return time.monotonic()


def test_followed_it_waits_for_more_and_ends_with_ctrl_c(folder, monkeypatch):
    shutil.move(folder / "checkpoint-100", folder.parent / "later")
    weights = folder / "checkpoint-100/model.safetensors"
    seen = []

    def begun():
        seen.append([p.step for p in points(folder)])
        weights.parent.mkdir()
        for path in (folder.parent / "later").iterdir():
            (weights.parent / path.name).write_bytes(path.read_bytes()[:500])

    def finished():
        seen.append([p.step for p in points(folder)])
        shutil.copytree(folder.parent / "later", weights.parent, dirs_exist_ok=True)

    monkeypatch.setattr("lipaudit.cli.watch.time", Clock(begun, finished, lambda: None))
    done = watch(folder, "--follow", "--logger", "tensorboard")
    assert done.exit_code == 0, done.output
    assert seen == [[5, 10], [5, 10]]
    assert [(p.step, p.failures) for p in points(folder)] == [(5, {}), (10, {}), (100, {})]
    assert "Scorecard" in done.stdout
    assert list((folder / "lipaudit-checkpoints/tensorboard").iterdir())


def test_followed_a_checkpoint_that_stays_damaged_is_given_up(folder, monkeypatch):
    weights = folder / "checkpoint-10/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    monkeypatch.setattr("lipaudit.cli.watch.time", Clock(*[lambda: None] * 4))
    done = watch(folder, "--follow")
    assert done.exit_code == 4
    assert (
        done.stderr.count("checkpoint-10 (1 of ") + done.stderr.count("checkpoint-10 (2 of ") == 3
    )
    assert [bool(p.failures) for p in points(folder)] == [False, True, False]


def test_ctrl_c_while_it_measures_keeps_what_there_is(folder, monkeypatch):
    measure = "lipaudit.monitor.checkpoints.execute"
    from lipaudit.engine.execute import execute

    def cut_short(job, observer):
        if job.request.model.endswith("10"):
            raise KeyboardInterrupt
        return execute(job, observer)

    monkeypatch.setattr(measure, cut_short)
    done = watch(folder)
    assert done.exit_code == 130
    assert [p.step for p in points(folder)] == [5]
    assert "Scorecard" in done.stdout
