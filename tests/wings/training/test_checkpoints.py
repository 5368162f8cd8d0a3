"""`lipaudit watch FOLDER`: which checkpoints there are, and that each is measured once."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import lipaudit
from lipaudit import schema
from lipaudit.errors import EvaluationError
from lipaudit.models.sources.loader import load_net
from lipaudit.models.sources.saving import save_net
from lipaudit.tables import Report
from lipaudit.wings.training.watching import list_checkpoints, read_step
from tests.commands import break_measure, invoke
from tests.wings.training.conftest import median
from tests.wings.training.conftest import reports as watched

pytestmark = pytest.mark.usefixtures("blank_charts")

ARGS = ("--data", "demo", "-n", "2", "--only", "jacobian", "-f", "table")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("checkpoint-100", 100),
        ("step_200.pt", 200),
        ("epoch=3-step=600.ckpt", 600),
        ("epoch=3-step=600-v1.ckpt", 600),
        ("val_loss=0.25-epoch=7.ckpt", 7),
        ("vit_base_patch16_224_iter_50.pth", 50),
        ("model_0200.safetensors", 200),
        ("epoch_3.pt", 3),
        ("global_step1200", 1200),
        ("best.ckpt", None),
        ("acc=0.91.pt", None),
        ("optimizer_5.pt", None),
        ("rng_state_0.pth", None),
        ("model-00001-of-00002.safetensors", None),
    ],
)
def test_the_name_of_a_checkpoint_says_its_step(name, says):
    assert read_step(name) == says


def filled(folder: Path, names: dict[str, int]) -> None:
    """Write empty files, the later the larger their number."""
    for name, age in names.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        os.utime(path, (age, age))


def test_a_link_to_a_removed_checkpoint_is_none(tmp_path):
    filled(tmp_path, {"step_1.pt": 1})
    (tmp_path / "step_2.pt").symlink_to(tmp_path / "removed.pt")
    assert [each.step for each in list_checkpoints(tmp_path)] == [1]


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
    seen = list_checkpoints(tmp_path)
    assert [(c.name, c.step) for c in seen] == [
        ("step_20.pt", 20),
        ("checkpoint-900", 900),
        ("checkpoint-1000", 1000),
    ]
    assert seen[1].model == tmp_path / "checkpoint-900/model.safetensors"
    assert seen[2].model == tmp_path / "checkpoint-1000"
    filled(tmp_path, {"checkpoint-1000/optimizer.pt": 30})
    assert list_checkpoints(tmp_path)[2] == seen[2]
    filled(tmp_path, {"checkpoint-1000/model.safetensors": 30})
    assert list_checkpoints(tmp_path)[2] != seen[2]


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


def watch(folder: Path, *args: str, code: int = 0):
    return invoke("watch", os.path.relpath(folder), *ARGS, *args, code=code)


def reports(folder: Path) -> dict[int, Report]:
    """Return the reports of a folder of checkpoints, by their step."""
    return watched(folder / "lipaudit-checkpoints")


def test_every_checkpoint_is_measured_once_and_as_it_is_alone(folder):
    moved = shutil.move(folder / "checkpoint-100", folder.parent / "later")
    done = watch(folder, "-o", "training.html")
    assert "step 5: checkpoint-5 (1 of 2 new)" in done.stderr
    assert "2 models side by side" in Path("training.html").read_text()
    page = folder / "lipaudit-checkpoints/report.html"
    assert page.read_bytes() == Path("training.html").read_bytes()
    shutil.move(moved, folder / "checkpoint-100")
    done = watch(folder)
    assert "step 100: checkpoint-100 (1 of 1 new)" in done.stderr
    assert "checkpoint-5 " not in done.stderr
    known = reports(folder)
    assert sorted(known) == [5, 10, 100]
    order = [done.stdout.index(f"out/checkpoint-{step} ") for step in (5, 10, 100)]
    assert order == sorted(order)
    alone = lipaudit.measure(str(folder / "checkpoint-10"), "jacobian", data="demo", samples=2)
    assert known[10].section("jacobian").samples == alone.section("jacobian").samples
    assert "new)" not in watch(folder).stderr
    # one that is written anew is measured anew
    shutil.copytree(folder / "checkpoint-100", folder / "checkpoint-5", dirs_exist_ok=True)
    (folder / "checkpoint-5/model.safetensors").touch()
    assert "checkpoint-5 (1 of 1 new)" in watch(folder).stderr
    after = reports(folder)
    assert median(known[5]) != median(after[5]) == median(after[100])
    assert [after[step] for step in (10, 100)] == [known[step] for step in (10, 100)]
    # with other options all are
    done = watch(folder, "--samples", "3", "--batch-size", "1")
    assert "(3 of 3 new)" in done.stderr
    assert "3 samples" in done.stdout
    assert len(list((folder / "lipaudit-checkpoints").glob("step-*.json"))) == 6
    assert "new)" not in watch(folder, "--batch-size", "2").stderr  # no figure depends on it
    done = watch(folder, "--run-dir", "elsewhere", "-q")
    assert done.stderr == ""
    assert Path("elsewhere/report.html").exists()
    kept = [schema.load(path) for path in Path("elsewhere").glob("step-*.json")]
    assert sorted(map(median, kept)) == sorted(map(median, after.values()))


def test_one_that_is_damaged_is_an_error_and_is_tried_the_next_time(folder):
    weights = folder / "checkpoint-10/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    done = watch(folder, code=4)
    assert "not every checkpoint was measured: checkpoint-10: " in done.stderr
    assert "not a complete safetensors file" in done.stderr
    assert sorted(reports(folder)) == [5, 100]
    assert "checkpoint-100" in done.stdout
    again = watch(folder, code=4)
    assert "checkpoint-10 (1 of 1 new)" in again.stderr
    weights.write_bytes(whole)
    done = watch(folder)
    assert sorted(reports(folder)) == [5, 10, 100]


def test_a_measure_that_fails_is_an_error_and_the_others_are_reported(folder, monkeypatch):
    break_measure(monkeypatch, "attention", EvaluationError("no attention today"))
    done = watch(folder, "--only", "jacobian,attention", code=3)
    assert "no attention today" in done.stderr
    assert [len(each.failures) for each in reports(folder).values()] == [1, 1, 1]
    assert "Jacobian" in done.stdout or "median" in done.stdout


@pytest.mark.parametrize(
    ("make", "code", "says"),
    [
        (lambda f: None, 4, "there is no directory"),
        (lambda f: f.mkdir(), 4, "holds no checkpoint with a step in its name"),
        (lambda f: (f.mkdir(), torch.save({"a": torch.ones(1)}, f / "step_1.pt")), 2, "--arch"),
    ],
)
def test_what_cannot_be_watched_is_one_clear_error(tmp_path, make, code, says):
    make(tmp_path / "out")
    done = watch(tmp_path / "out", code=code)
    assert says in done.stderr
    assert not (tmp_path / "out/lipaudit-checkpoints").exists()


def test_ctrl_c_while_it_measures_keeps_what_there_is(folder, monkeypatch):
    model = os.path.relpath(folder / "checkpoint-10")
    break_measure(monkeypatch, "jacobian", KeyboardInterrupt(), model)
    done = watch(folder, code=130)
    assert sorted(reports(folder)) == [5]
    assert "How sensitive is the whole model?" in done.stdout
