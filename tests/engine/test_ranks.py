"""Several processes of one run: each measures a shard, and the report is that of one."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lipaudit.cli.commands import build
from lipaudit.engine import ranks
from lipaudit.engine.place import Place, placed
from lipaudit.engine.ranks import Ranks
from lipaudit.errors import EvaluationError, InputError, LipauditError, UsageError
from lipaudit.schema import dumps, load
from tests import processes

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


def together(size: int, act) -> list:
    """What each of some processes returns or raises, here threads that share a store."""
    store, ends = torch.distributed.HashStore(), [None] * size

    def run(rank: int) -> None:
        try:
            with Ranks(lambda: store, rank, size) as each:
                ends[rank] = act(each)
        except (LipauditError, KeyboardInterrupt) as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ends


def said(error: LipauditError) -> tuple[str, str, int]:
    return error.message, error.advice, error.exit_code


def test_the_first_has_what_all_give_in_their_order_and_all_end_with_its_code():
    def act(each: Ranks):
        if each.rank == 0:
            texts = each.gather()
            each.exit_code = 6
            return texts
        time.sleep(0.1 / each.rank)
        each.give(f"of {each.rank}")
        return each.exit_code

    assert together(3, act) == [["of 1", "of 2"], 6, 6]


def test_what_fails_in_one_process_is_said_in_all():
    def act(each: Ranks):
        if each.rank == 0:
            return each.gather()
        if each.rank == 1:
            raise InputError("no such thing", "Do so.")
        return each.give("fine")

    assert {said(error) for error in together(3, act)} == {("no such thing", "Do so.", 4)}


def test_what_fails_in_the_first_is_said_in_all():
    """In those that wait for it, and in those that still measure."""
    ended = threading.Event()

    def act(each: Ranks):
        if each.rank == 0:
            ended.set()
            raise InputError("no such thing", "Do so.")
        if each.rank == 1:
            return each.give("fine")
        each.require_first()
        assert ended.wait(60)
        while True:
            each.require_first()

    assert {said(error) for error in together(3, act)} == {("no such thing", "Do so.", 4)}


def test_a_process_that_gives_no_sign_of_life_has_ended(monkeypatch):
    monkeypatch.setattr(ranks, "LOST", 0.5)
    looked = threading.Event()

    def act(each: Ranks):
        if each.rank == 0:
            try:
                return each.gather()
            finally:
                looked.set()
        each._ended.set()
        assert looked.wait(60)
        return None

    failed, _ = together(2, act)
    assert isinstance(failed, EvaluationError)
    assert failed.message == "rank 1 of 2 has ended"
    assert "--resume" in failed.advice


def test_the_first_leaves_last():
    """The store that the others still ask may be its own."""
    left = []

    def act(each: Ranks):
        if each.rank:
            time.sleep(0.3)
            left.append(each.rank)

    store = torch.distributed.HashStore()
    other = threading.Thread(target=lambda: entered(Ranks(lambda: store, 1, 2), act))
    other.start()
    entered(Ranks(lambda: store, 0, 2), act)
    assert left == [1]
    other.join(60)


def entered(each: Ranks, act) -> None:
    with each:
        act(each)


def test_a_suspended_job_goes_on(monkeypatch):
    """All of them were silent meanwhile; one that stays silent has ended."""
    clock = [0.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    store = torch.distributed.HashStore()
    second = Ranks(lambda: store, 1, 2)

    def look(*at: float) -> None:
        for clock[0] in at:
            second.require_first()

    look(0.0, 1.0, 1000.0)
    with pytest.raises(EvaluationError, match="rank 0 of 2 has ended"):
        look(*np.arange(1000.0, 1000.0 + ranks.LOST, 0.5))


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_is_stopped_stops_the_others(monkeypatch, stopped):
    monkeypatch.setattr(ranks, "LOST", 1e9)

    def act(each: Ranks):
        if each.rank == stopped:
            raise KeyboardInterrupt("terminated")
        return each.give("fine") if each.rank else each.gather()

    other = together(2, act)[1 - stopped]
    assert other.message == f"rank {stopped} was stopped"
    assert "--resume" in other.advice


def test_processes_that_do_not_come_are_missed(monkeypatch):
    monkeypatch.setattr(ranks, "JOIN", 0.1)
    with pytest.raises(EvaluationError, match="1 of 2 processes") as error:
        Ranks(torch.distributed.HashStore, 0, 2).__enter__()
    assert "WORLD_SIZE" in error.value.advice


def test_one_run_after_the_other_shares_nothing():
    store = torch.distributed.HashStore()

    def act(each: Ranks, text: str):
        return each.give(text) if each.rank else each.gather()

    def second() -> None:
        for text in ("a", "b"):
            with Ranks(lambda: store, 1, 2) as each:
                act(each, text)

    other = threading.Thread(target=second)
    other.start()
    for text in ("a", "b"):
        with Ranks(lambda: store, 0, 2) as each:
            assert act(each, "") == [text]
    other.join(60)


class Closed:
    """The store of a command that has ended."""

    def add(self, _key, _number):
        raise RuntimeError("Connection reset by peer")


def test_a_process_that_meets_the_command_before_waits_for_the_next():
    stores = [Closed(), torch.distributed.HashStore()]
    with Ranks(lambda: stores.pop(0), 0, 1) as alone:
        assert alone.gather() == []
    with pytest.raises(EvaluationError, match="has ended"), Ranks(Closed, 0, 1):
        pass


def test_a_port_that_is_still_taken_is_tried_again(monkeypatch):
    """By the store of the command before, which may take a moment to close."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = Place(0, 1, 0, "127.0.0.1", taken.getsockname()[1])
        tried = threading.Event()
        monkeypatch.setattr(ranks, "CLOSING", -1.0)
        with pytest.raises(EvaluationError, match=f"rank 0 of 1.*{place.port}.*in use"):
            ranks.join(place)
        monkeypatch.setattr(ranks, "CLOSING", 60.0)
        monkeypatch.setattr(ranks.time, "sleep", lambda _seconds: (taken.close(), tried.set()))
        with ranks.join(place) as alone:
            assert alone.gather() == []
    assert tried.is_set()


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


def hold_second() -> None:
    """Let rank 1 wait to be killed once it has kept two parts, and miss the dead soon."""
    ranks.BEAT, ranks.LOST = 0.2, 5.0
    processes.hold_after_parts(2, rank="1")


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Run the command here, with the cache of the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def invoke(*args: str) -> None:
        done = CliRunner().invoke(build(), args)
        assert done.exit_code == 0, done.output

    return invoke


def written(path: Path) -> dict:
    document = json.loads(dumps(load(path)))
    for name in ("created", "command"):
        document["run"].pop(name)
    return document


def test_two_processes_write_the_report_of_one(alone, tmp_path):
    """With the map of the most amplifying head, which none of them knows alone."""
    both = processes.ranks(2, *AUDIT, "--run-dir", "two", cwd=tmp_path)
    assert [each.ended() for each in both] == [(0, ""), (0, "")]
    alone(*AUDIT, "--run-dir", "one")
    two, one = (written(tmp_path / name / "report.json") for name in ("two", "one"))
    assert any(name.startswith("map@") for name in one["sections"][2]["arrays"])
    assert two == one
    assert not list(tmp_path.rglob("*.npz"))


def test_a_killed_process_loses_what_it_had_begun_alone(alone, tmp_path):
    """Any number of processes goes on with the rest."""
    first, second = processes.ranks(2, *NORMS, "-o", "two.json", cwd=tmp_path, before=hold_second)
    while len(list(tmp_path.rglob("*.npz"))) < 14:  # all of the first, two of the second
        assert second.alive
        time.sleep(0.005)
    second.send(signal.SIGKILL)
    code, text = first.ended()
    assert code == 3, text
    assert "rank 1 of 2 has ended" in text
    assert second.ended()[0] == -signal.SIGKILL
    assert not (tmp_path / "two.json").exists()
    assert len(list(tmp_path.rglob("*.npz"))) == 14
    shutil.copytree(tmp_path / "lipaudit", tmp_path / "three" / "lipaudit")
    alone(*NORMS, "-o", "three/one.json", "--resume")
    three = processes.ranks(3, *NORMS, "-o", "three.json", "--resume", cwd=tmp_path / "three")
    assert [each.ended()[0] for each in three] == [0, 0, 0]
    assert not list(tmp_path.rglob("*.npz"))
    alone(*NORMS, "-o", "whole.json")
    for name in ("three/one.json", "three/three.json"):
        assert written(tmp_path / name) == written(tmp_path / "whole.json")


def test_the_time_limit_of_several_processes_ends_all(alone, tmp_path):
    args = (*NORMS, "--time-limit", "0.001s", "-o", "cut.json")
    both = processes.ranks(2, *args, cwd=tmp_path)
    ends = [each.ended() for each in both]
    assert [code for code, _ in ends] == [7, 7], ends
    cut = load(tmp_path / "cut.json")
    assert (cut.status, cut.unmeasured) == ("partial", {"jacobian": 24})


def test_what_is_made_of_all_samples_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **MEETING}.items():
        monkeypatch.setenv(name, value)
    attack = ["attack", "demo", "-n", "4", "--eps", "0.1", "-q"]
    for more in (["--save-adv", "adv.npz"], ["--shard", "1/2", "-o", "a.json"]):
        assert CliRunner().invoke(build(), [*attack, *more]).exit_code == 2
