"""`train` and `gate` as a launcher starts them: in several processes, with the result of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from lipaudit.cli.commands import build
from lipaudit.cli.remeasure import Remeasure, measure_for_first
from lipaudit.engine import execute
from lipaudit.engine import ranks as waiting
from lipaudit.engine.prepare import Job
from lipaudit.errors import UsageError
from lipaudit.schema import load
from lipaudit.train.record import require_shared
from tests.processes import free_port, ranks

ARGS = ("train", "demo", "-n", "48", "--batch-size", "20", "--lr", "1e-3", "--dtype", "float64")
PENALTY = ("--penalty", "jasmin", "--k", "3")


def impatient() -> None:
    """Wait less long for others that have ended."""
    waiting.BEAT, waiting.LOST, waiting.FAREWELL = 0.2, 5.0, 1.0


def started(*args: str, cwd: Path) -> list[subprocess.Popen[str]]:
    """Two processes of a run in interpreters of their own: torch reads what it logs at once."""
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "lipaudit", *args]
    return [
        subprocess.Popen(command, cwd=cwd, env=env | {"RANK": f"{rank}"}, **pipes)
        for rank in (0, 1)
    ]


def alone(*args: object) -> None:
    done = CliRunner().invoke(build(), list(map(str, args)))
    assert done.exit_code == 0, done.output


def launched(monkeypatch, *, rank: int, size: int) -> None:
    """Be one of several processes, which have not met."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", **meeting}.items():
        monkeypatch.setenv(name, value)


def require_alike(one: Path, two: Path) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (one, two))
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-12, atol=1e-12)
    records = [json.loads((path / "train.json").read_text()) for path in (one, two)]
    for mine, other in zip(*(record["epochs"] for record in records), strict=True):
        assert [*mine.values()] == [v and pytest.approx(v, rel=1e-12) for v in other.values()]


@pytest.mark.parametrize(
    "watch", [(), pytest.param(("--watch", "2"), marks=pytest.mark.slow(seconds=22))]
)
def test_the_first_of_two_processes_writes_what_one_would(tmp_path, monkeypatch, watch):
    monkeypatch.chdir(tmp_path)
    args = (*ARGS, *PENALTY, *watch, "--epochs", "2", "--out")
    processes = started(*args, "two", cwd=tmp_path)
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[1] == ("", "")
    assert said[0][0] == "two\n"
    begun = [line.split(" ")[0] for line in said[0][1].splitlines()]
    assert begun == ["epoch", "epoch", *(["Curves:"] if watch else []), "Trained."]
    alone(*args, "one", "-q")
    require_alike(tmp_path / "one", tmp_path / "two")
    folders = [tmp_path / name / "lipaudit-watch" for name in ("one", "two")]
    points = [(f / "history.jsonl").read_text().count('"step"') for f in folders if watch]
    assert points == ([2, 2] if watch else [])
    records = [json.loads(Path(f"{name}/train.json").read_text()) for name in ("one", "two")]
    assert [record["processes"] for record in records] == [1, 2]


@pytest.mark.parametrize(
    ("stop", "again"),
    [(signal.SIGKILL, 1), pytest.param(signal.SIGSTOP, 2, marks=pytest.mark.slow(seconds=14))],
)
def test_a_training_goes_on_after_one_of_its_processes_has_ended(
    tmp_path, monkeypatch, stop, again
):
    """One that is stopped keeps its connections: the first would wait for it for ever."""
    monkeypatch.chdir(tmp_path)
    args = (*ARGS, "--epochs", "9", "--out")
    first, second = ranks(2, *args, "cut", cwd=tmp_path, before=impatient)
    while not (tmp_path / "cut/checkpoint.pt").exists():
        assert first.alive
        time.sleep(0.005)
    second.send(stop)
    code, said = first.ended()
    second.process.kill()
    second.ended()
    assert code == 3, said
    assert "error: rank 1 of 2 has ended\n" in said
    assert "--resume goes on, with any number of processes" in said
    kept = len(json.loads((tmp_path / "cut/train.json").read_text())["epochs"])
    assert 0 < kept < 9
    resumed = (*args, "cut", "--resume", "-q")
    if again == 1:
        alone(*resumed)
    else:
        both = ranks(2, *resumed, cwd=tmp_path, before=impatient)
        assert [each.ended()[0] for each in both] == [0, 0]
    alone(*args, "one", "-q")
    require_alike(tmp_path / "one", tmp_path / "cut")


def test_the_first_of_two_processes_judges_and_both_end_with_its_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone("jacobian", "demo", "-n", "4", "-q", "-o", "base.json")
    args = ("gate", "demo:jasmin", "-b", "base.json", "-q", "--batch-size", "1")
    args = (*args, "--fail-on", "jacobian.median <= -90%", "--report")
    both = ranks(2, *args, "two.json", cwd=tmp_path, before=impatient)
    ends = [each.ended() for each in both]
    assert [code for code, _ in ends] == [1, 1], ends
    assert ends[1] == (1, "")
    one = CliRunner().invoke(build(), [*args, "one.json"])
    assert one.exit_code == 1
    assert [each.stdout.read_text() for each in both] == [one.stdout, ""]
    sections = [json.loads(Path(f"{n}.json").read_text())["sections"] for n in ("one", "two")]
    assert sections[0] == sections[1]


def test_the_first_of_two_processes_compares(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone("jacobian", "demo", "-n", "4", "-q", "-o", "base.json")
    args = ("compare", "base.json", "demo:jasmin", "base.json", "-q", "-f", "json")
    both = ranks(2, *args, cwd=tmp_path)
    assert [each.ended() for each in both] == [(0, ""), (0, "")]
    one = CliRunner().invoke(build(), args)
    assert [each.stdout.read_text() for each in both] == [one.stdout, ""]
    launched(monkeypatch, rank=1, size=2)
    several = CliRunner().invoke(build(), ["compare", "base.json", "demo:jasmin", "demo:robust"])
    assert several.exit_code == 2
    assert "one MODEL, not for comparing several" in several.stderr


def test_memory_is_shared_with_the_other_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone("jacobian", "demo", "-n", "4", "-q", "-o", "base.json")
    monkeypatch.setattr(execute, "follow", lambda job, _: jobs.append(job))
    jobs: list[Job] = []
    launched(monkeypatch, rank=1, size=3)
    measure_for_first("demo", load(Path("base.json")), Remeasure(), None)
    assert [job.processes for job in jobs] == [3]


def test_a_refusal_of_the_first_process_is_that_of_all(tmp_path, monkeypatch):
    """The others wait for it in a reduction, and have its reason and its exit code."""
    monkeypatch.chdir(tmp_path)
    alone(*ARGS, "--epochs", "1", "--out", "done", "-q")
    again = (*ARGS, "--epochs", "2", "--out", "done", "--resume", "-q")
    for each in ranks(2, *again, cwd=tmp_path):
        code, said = each.ended()
        assert code == 2
        assert said.startswith("error: done was trained with another recipe: epochs 1, not 2\n")


@pytest.mark.parametrize(("rank", "said"), [(0, "error: terminated\n"), (1, "")])
def test_processes_that_are_terminated_say_so_once(monkeypatch, rank, said):
    def terminated(_):
        raise KeyboardInterrupt("terminated")

    launched(monkeypatch, rank=rank, size=2)
    monkeypatch.setattr("lipaudit.schema.load_any", terminated)
    ended = CliRunner().invoke(build(), ["report", "a.json"])
    assert (ended.exit_code, ended.stderr) == (143, said)


def test_processes_that_would_train_apart_are_refused():
    same = {"model": {"spec": "demo"}, "held_out": None, "recipe": {"lr": 0.1, "k": 0}}
    require_shared([same, dict(same)])
    other = same | {"recipe": {"lr": 0.2, "k": 0}}
    with pytest.raises(UsageError, match=r"rank 2 has another recipe than rank 0: lr 0\.2, not"):
        require_shared([same, same, other])
    with pytest.raises(UsageError, match="rank 1 has another held_out"):
        require_shared([same, same | {"held_out": {"spec": "demo"}}])
