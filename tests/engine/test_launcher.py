"""Several processes of one run: each measures a shard, and the report is that of one."""

import os
import resource
import shutil
import signal
import socket
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from lipaudit.engine import launcher
from lipaudit.engine.launcher import Place, find_place, join_processes
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.measures import load_measures
from lipaudit.schema import load
from tests import processes
from tests.commands import invoke, read_figures

ALONE: dict[str, str] = {}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
STEP = BATCH_SCRIPT | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "2"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (ALONE, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (TORCHRUN | MEETING, Place(1, 4, 0, "node1", 29500)),
        (BATCH_SCRIPT, None),
        (STEP | {"SLURM_STEP_NUM_NODES": "1"}, Place(2, 4, 2, "127.0.0.1", 20007)),
        (STEP | MEETING, Place(2, 4, 2, "node1", 29500)),
    ],
)
def test_a_process_knows_its_place(env, place):
    assert find_place(env) == place


@pytest.mark.parametrize("env", [TORCHRUN, STEP | {"SLURM_STEP_NUM_NODES": "2"}])
def test_processes_that_cannot_meet_are_told_how(env):
    with pytest.raises(UsageError, match="no address") as error:
        find_place(env)
    assert "MASTER_ADDR" in error.value.advice


def test_processes_that_do_not_come_are_missed(monkeypatch):
    monkeypatch.setattr(launcher, "JOIN", timedelta(seconds=0.2))
    monkeypatch.setattr(launcher, "CLOSING", 0.0)
    place = Place(0, 2, 0, "127.0.0.1", int(processes.free_port()))
    with (
        pytest.raises(EvaluationError, match="rank 0 of 2 cannot reach") as error,
        join_processes(place),
    ):
        pytest.fail("met nobody")
    assert "WORLD_SIZE" in error.value.advice


def test_a_port_that_another_program_uses_is_named(monkeypatch):
    monkeypatch.setattr(launcher, "CLOSING", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = Place(0, 2, 0, "127.0.0.1", taken.getsockname()[1])
        with (
            pytest.raises(EvaluationError, match=f"127.0.0.1:{place.port}.*in use"),
            join_processes(place),
        ):
            pytest.fail("met nobody")


AUDIT = ("audit", "demo", "--only", "attention,jacobian", "-n", "9", "--batch-size", "4", "-q")
NORMS = ("jacobian", "demo", "-n", "8", "--batch-size", "1", "-q")


def hold_second() -> None:
    """Let rank 1 wait to be killed once it has kept two parts."""
    processes.hold_after_parts(2, rank="1")


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Run the command here, with the cache of the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the others have

    yield invoke
    torch.set_num_threads(threads)


def test_a_killed_process_loses_what_it_had_begun_alone(alone, tmp_path):
    """Any number of processes goes on with the rest."""
    first, second = processes.ranks(2, *NORMS, "-o", "two.json", cwd=tmp_path, before=hold_second)
    while len(list(tmp_path.rglob("*.npz"))) < 6:  # all of the first, two of the second
        assert second.alive
        time.sleep(0.005)
    second.send(signal.SIGKILL)
    code, text = first.ended()
    assert code == 3, text
    assert "another of the 2 processes has ended" in text
    assert "with --resume to continue" in text
    assert second.ended()[0] == -signal.SIGKILL
    assert not (tmp_path / "two.json").exists()
    assert len(list(tmp_path.rglob("*.npz"))) == 6
    shutil.copytree(tmp_path / "lipaudit", tmp_path / "three" / "lipaudit")
    alone(*NORMS, "-o", "three/one.json", "--resume")
    three = processes.ranks(3, *NORMS, "-o", "three.json", "--resume", cwd=tmp_path / "three")
    assert [each.ended()[0] for each in three] == [0, 0, 0]
    assert not list(tmp_path.rglob("*.npz"))
    alone(*NORMS, "-o", "whole.json")
    for name in ("three/one.json", "three/three.json"):
        assert read_figures(tmp_path / name) == read_figures(tmp_path / "whole.json")


def fail_second() -> None:
    """Let the measure fail in rank 1."""
    if os.environ["RANK"] == "1":
        processes.fail_after_parts(1)


def test_an_error_of_one_process_ends_all(tmp_path):
    first, second = processes.ranks(2, *NORMS, "-o", "two.json", cwd=tmp_path, before=fail_second)
    assert second.ended() == (3, "error: no figures\n  hint: Try again.\n")
    code, text = first.ended()
    assert (code, "another of the 2 processes has ended" in text) == (3, True), text
    assert not (tmp_path / "two.json").exists()


def fail_attention_of_first() -> None:
    """Let a measure fail in rank 0 alone."""
    if os.environ["RANK"] == "0":
        load_measures()["attention"] = replace(load_measures()["attention"], compute=raise_error)


def raise_error(*_args):
    raise EvaluationError("no figures")


def test_every_process_keeps_its_parts_until_the_report_of_all_is_complete(alone, tmp_path):
    before = fail_attention_of_first
    both = processes.ranks(2, *AUDIT, "--run-dir", "two", cwd=tmp_path, before=before)
    assert [each.ended()[0] for each in both] == [3, 0]
    assert load(tmp_path / "two/report.json").failures.keys() == {"attention"}
    assert len(list(tmp_path.rglob("*.npz"))) == 4  # three of jacobian, one of attention
    alone(*AUDIT, "--run-dir", "one", "--resume")
    assert not list(tmp_path.rglob("*.npz"))


def fill_disk_of_first() -> None:
    """Let rank 0 write only small files."""
    if os.environ["RANK"] == "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))


def test_a_report_that_the_first_cannot_write_ends_all(tmp_path):
    args = (*NORMS, "-o", "two.json")
    first, second = processes.ranks(2, *args, cwd=tmp_path, before=fill_disk_of_first)
    code, text = first.ended()
    assert (code, "cannot write two.json" in text) == (3, True), text
    code, text = second.ended()
    assert (code, "another of the 2 processes has ended" in text) == (3, True), text


def test_the_time_limit_of_several_processes_ends_all(alone, tmp_path):
    args = (*NORMS, "--time-limit", "0.001s", "-o", "cut.json")
    both = processes.ranks(2, *args, cwd=tmp_path)
    ends = [each.ended() for each in both]
    assert [code for code, _ in ends] == [7, 0], ends
    cut = load(tmp_path / "cut.json")
    assert (cut.status, cut.unmeasured) == ("partial", {"jacobian": 8})


def test_what_is_made_of_all_samples_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **MEETING}.items():
        monkeypatch.setenv(name, value)
    attack = ["attack", "demo", "-n", "4", "--eps", "0.1", "-q"]
    for more in (["--save-adv", "adv.npz"], ["--shard", "1/2", "-o", "a.json"]):
        invoke(*attack, *more, code=2)
