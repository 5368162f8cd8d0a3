"""Several processes of one run: each batch is measured once, and the report is that of one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lipaudit.cli.commands import build
from lipaudit.data.batch import Batch
from lipaudit.engine import ranks
from lipaudit.engine.ranks import Begun, Place, Ranks, placed
from lipaudit.errors import EvaluationError, InputError, LipauditError, UsageError
from lipaudit.measures import Part
from lipaudit.measures.measure import sample_ids
from lipaudit.schema import dumps, load

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
    assert placed(env) == place


@pytest.mark.parametrize("env", [TORCHRUN, STEP | {"SLURM_STEP_NUM_NODES": "2"}])
def test_processes_that_cannot_meet_are_told_how(env):
    with pytest.raises(UsageError, match="where they meet") as error:
        placed(env)
    assert "MASTER_ADDR" in error.value.advice


def batches(count: int) -> list[Batch]:
    return [Batch(torch.zeros(1, 1), None, (f"{i}",), start=i) for i in range(count)]


def measured(units, pause: float = 0.0):
    for batch in units:
        time.sleep(pause)
        yield Part(batch.ids, {"x": np.array([float(batch.start)])})


def together(size: int, act) -> list:
    """What each of some processes returns or raises, here threads that share a store."""
    store, ends = torch.distributed.HashStore(), [None] * size

    def run(rank: int) -> None:
        try:
            with Ranks(store, rank, size) as each:
                ends[rank] = act(each)
        except LipauditError as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ends


def test_every_batch_is_measured_once_and_the_slow_take_fewer():
    def act(each: Ranks):
        if each.rank == 0:
            each.begin("m", Begun({"map": "1.0"}, ("done",), keeps=True))
            own = measured(each.units("m", batches(40)), pause=0.1)
            return list(each.gathered("m", own, batches(40)))
        assert each.begun("m") == Begun({"map": "1.0"}, ("done",), keeps=True)
        taken = []
        for part in measured(each.units("m", batches(40)), pause=0.001):
            each.hand_in("m", part)
            taken += part.ids
        return taken

    parts, *others = together(3, act)
    assert sorted(sample_ids(parts), key=int) == [f"{i}" for i in range(40)]
    assert {part.values["x"][0] for part in parts} == set(map(float, range(40)))
    of_others = len(others[0]) + len(others[1])
    assert 20 < of_others < 40


def test_once_time_is_up_only_what_is_begun_is_awaited():
    taken = threading.Event()

    def act(each: Ranks):
        units = each.units("m", batches(40))
        if each.rank == 0:
            each.begin("m", Begun({}, (), keeps=False))
            assert taken.wait(60)
            return list(each.gathered("m", measured(islice(units, 2)), batches(40), end=0.0))
        each.begun("m")
        begun = list(islice(units, 1))
        taken.set()
        for part in measured(begun, pause=0.5):
            each.hand_in("m", part)
        return list(units)

    parts, left = together(2, act)
    assert len(parts) == 3
    assert left == []


def test_a_measure_that_fails_in_one_process_ends_in_all():
    def act(each: Ranks):
        if each.rank == 0:
            each.begin("m", Begun({}, (), keeps=False))
            own = measured(each.units("m", batches(1000)), 0.01)
            return list(each.gathered("m", own, batches(1000)))
        each.begun("m")
        if each.rank == 1:
            each.fail("m", InputError("no such thing", "Do so."))
            return None
        list(each.units("m", batches(1000)))
        return each.begun("next")

    failed, _, other = together(3, act)
    for error in (failed, other):
        assert (error.message, error.advice, error.exit_code) == ("no such thing", "Do so.", 4)


def test_a_process_that_gives_no_sign_of_life_has_ended(monkeypatch):
    monkeypatch.setattr(ranks, "LOST", 0.5)

    def act(each: Ranks):
        if each.rank == 0:
            each.begin("m", Begun({}, (), keeps=False))
            own = measured(each.units("m", batches(1)[:0]))
            return list(each.gathered("m", own, batches(1)))
        each._ended.set()
        return None

    failed, _ = together(2, act)
    assert isinstance(failed, EvaluationError)
    assert failed.message == "rank 1 of 2 has ended"
    assert "--resume" in failed.advice


def test_what_failed_in_one_process_is_said_in_all():
    told = threading.Event()

    def act(each: Ranks):
        each.require_whole()
        if each.rank == 1:
            each.end(InputError("no such thing", "Do so."))
            told.set()
        assert told.wait(60)
        each.require_whole()

    for error in together(3, act):
        assert (error.message, error.advice, error.exit_code) == ("no such thing", "Do so.", 4)


def test_processes_that_do_not_come_are_missed(monkeypatch):
    monkeypatch.setattr(ranks, "JOIN", 0.1)
    with pytest.raises(EvaluationError, match="1 of 2 processes") as error:
        Ranks(torch.distributed.HashStore(), 0, 2).__enter__()
    assert "WORLD_SIZE" in error.value.advice


def test_one_run_after_the_other_shares_nothing():
    store = torch.distributed.HashStore()
    for samples in (3, 5):
        with Ranks(store, 0, 1) as alone:
            own = measured(alone.units("m", batches(samples)))
            assert len(list(alone.gathered("m", own, batches(samples)))) == samples


AUDIT = (
    "audit",
    "demo",
    "--only",
    "bounds,attention,jacobian",
    "-n",
    "9",
    "--batch-size",
    "4",
    "-q",
)
NORMS = ("jacobian", "demo", "-n", "24", "--batch-size", "1", "--per-layer", "-q")
LAZY = """
import sys
from lipaudit.engine import ranks
ranks.BEAT, ranks.LOST = 0.2, 5.0
units = ranks.Ranks.units
ranks.Ranks.units = lambda self, *given: iter(()) if self.rank == 0 else units(self, *given)
from lipaudit.__main__ import main
main()
"""
"""The command, with a rank 0 that leaves all the work to the others."""


def started(*args: str, rank: int, port: int, cwd: Path) -> subprocess.Popen[str]:
    env = os.environ | {"XDG_CACHE_HOME": str(cwd), "RANK": f"{rank}", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    command = [sys.executable, "-c", LAZY, *args]
    return subprocess.Popen(command, cwd=cwd, env=env, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Run the command here, with the cache of the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def invoke(*args: str) -> None:
        done = CliRunner().invoke(build(), args)
        assert done.exit_code == 0, done.output

    return invoke


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def written(path: Path) -> dict:
    document = json.loads(dumps(load(path)))
    for name in ("created", "command"):
        document["run"].pop(name)
    return document


def test_what_others_measured_is_the_report_of_one_process(alone, tmp_path):
    """Rank 0 measures nothing here: all figures, and the map it asks for, come from rank 1."""
    port = free_port()
    args = (*AUDIT, "--run-dir", "two")
    processes = [started(*args, rank=rank, port=port, cwd=tmp_path) for rank in (0, 1)]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    alone(*AUDIT, "--run-dir", "one")
    two, one = (written(tmp_path / name / "report.json") for name in ("two", "one"))
    assert any(name.startswith("map@") for name in one["sections"][2]["arrays"])
    assert two == one


def test_a_killed_process_loses_what_it_had_begun_alone(alone, tmp_path):
    port = free_port()
    args = (*NORMS, "-o", "two.json")
    first, second = (started(*args, rank=rank, port=port, cwd=tmp_path) for rank in (0, 1))
    while not list(tmp_path.rglob("*.part")):
        assert second.poll() is None
        time.sleep(0.005)
    second.send_signal(signal.SIGKILL)
    said = first.communicate(timeout=300)[1]
    second.communicate()
    assert first.returncode == 3, said
    assert "rank 1 of 2 has ended" in said
    assert not (tmp_path / "two.json").exists()
    kept = len(list(tmp_path.rglob("*.part")))
    assert 0 < kept < 24
    alone(*NORMS, "-o", "resumed.json", "--resume")
    assert not list(tmp_path.rglob("*.part"))
    alone(*NORMS, "-o", "one.json")
    assert written(tmp_path / "resumed.json") == written(tmp_path / "one.json")


@pytest.mark.slow
def test_torchrun_starts_the_processes(alone, tmp_path):
    launcher = (
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        f"{free_port()}",
    )
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", *launcher, "-m", "lipaudit", *NORMS, "-o", "two.json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone(*NORMS, "-o", "one.json")
    assert written(tmp_path / "two.json") == written(tmp_path / "one.json")
