"""Several processes of one run: each batch is measured once, and the report is that of one."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lipaudit.cli.commands import build
from lipaudit.data.batch import Batch
from lipaudit.engine import ranks
from lipaudit.engine.place import Place, placed
from lipaudit.engine.ranks import Begun, Ranks
from lipaudit.errors import EvaluationError, InputError, LipauditError, UsageError
from lipaudit.measures import Part
from lipaudit.measures.measure import sample_ids
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
        except (LipauditError, KeyboardInterrupt) as error:
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


def test_the_first_leaves_last():
    """The store that the others still ask may be its own."""
    left = []

    def act(each: Ranks):
        if each.rank:
            time.sleep(0.3)
            left.append(each.rank)

    store = torch.distributed.HashStore()
    other = threading.Thread(target=lambda: entered(Ranks(store, 1, 2), act))
    other.start()
    entered(Ranks(store, 0, 2), act)
    assert left == [1]
    other.join(60)


def entered(each: Ranks, act) -> None:
    with each:
        act(each)


def test_all_end_with_the_code_of_the_first():
    def act(each: Ranks):
        return each.conclude(6) if each.rank == 0 else each.conclusion()

    assert together(3, act) == [None, 6, 6]


def test_a_suspended_job_goes_on(monkeypatch):
    """All of them were silent meanwhile; one that stays silent has ended."""
    clock = [0.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    first = Ranks(torch.distributed.HashStore(), 0, 2)

    def look(*at: float) -> None:
        for clock[0] in at:
            first.require_whole()

    look(0.0, 1.0, 1000.0)
    with pytest.raises(EvaluationError, match="rank 1 of 2 has ended"):
        look(*np.arange(1000.0, 1000.0 + ranks.LOST, 0.5))


def test_a_process_that_is_stopped_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(ranks, "LOST", 1e9)

    def act(each: Ranks):
        if each.rank == 0:
            each.begin("m", Begun({}, (), keeps=False))
            own = measured(each.units("m", batches(1)[:0]))
            return list(each.gathered("m", own, batches(1)))
        raise KeyboardInterrupt("terminated")

    failed, _ = together(2, act)
    assert failed.message == "rank 1 of 2 has ended"


def test_a_first_process_that_is_stopped_stops_the_others(monkeypatch):
    monkeypatch.setattr(ranks, "LOST", 1e9)
    taken = threading.Event()

    def act(each: Ranks):
        if each.rank == 0:
            each.begin("m", Begun({}, (), keeps=False))

            def interrupted():
                assert taken.wait(60)
                raise KeyboardInterrupt
                yield

            return list(each.gathered("m", interrupted(), batches(1000)))
        units = each.units("m", batches(1000))
        next(units)
        taken.set()
        while not each._store.check(["0/over"]):
            time.sleep(0.01)
        assert len(list(units)) < 999
        return each.begun("next")

    _, other = together(2, act)
    assert other.message == "rank 0 was stopped"
    assert "--resume" in other.advice


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


class Closed:
    """The store of a command that has ended."""

    def add(self, _key, _number):
        raise RuntimeError("Connection reset by peer")


def test_a_process_that_meets_the_command_before_waits_for_the_next():
    store = torch.distributed.HashStore()
    with Ranks(Closed(), 0, 1, again=lambda: store) as alone:
        own = measured(alone.units("m", batches(3)))
        assert len(list(alone.gathered("m", own, batches(3)))) == 3
    with pytest.raises(EvaluationError, match="has ended"), Ranks(Closed(), 0, 1):
        pass


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


def lazy() -> None:
    """Let rank 0 leave all the work to the others, and miss them soon."""
    ranks.BEAT, ranks.LOST, units = 0.2, 5.0, Ranks.units
    Ranks.units = lambda self, *given: iter(()) if self.rank == 0 else units(self, *given)


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


def test_what_others_measured_is_the_report_of_one_process(alone, tmp_path):
    """Rank 0 measures nothing here: all figures, and the map it asks for, come from rank 1."""
    both = processes.ranks(2, *AUDIT, "--run-dir", "two", cwd=tmp_path, before=lazy)
    assert [each.ended() for each in both] == [(0, ""), (0, "")]
    alone(*AUDIT, "--run-dir", "one")
    two, one = (written(tmp_path / name / "report.json") for name in ("two", "one"))
    assert any(name.startswith("map@") for name in one["sections"][2]["arrays"])
    assert two == one


def test_a_killed_process_loses_what_it_had_begun_alone(alone, tmp_path):
    """Any number of processes goes on with the rest."""
    first, second = processes.ranks(2, *NORMS, "-o", "two.json", cwd=tmp_path, before=lazy)
    while not list(tmp_path.rglob("*.part")):
        assert second.alive
        time.sleep(0.005)
    second.send(signal.SIGKILL)
    code, said = first.ended()
    assert code == 3, said
    assert "rank 1 of 2 has ended" in said
    assert second.ended()[0] == -signal.SIGKILL
    assert not (tmp_path / "two.json").exists()
    assert 0 < len(list(tmp_path.rglob("*.part"))) < 24
    shutil.copytree(tmp_path / "lipaudit", tmp_path / "three" / "lipaudit")
    alone(*NORMS, "-o", "three/one.json", "--resume")
    three = processes.ranks(3, *NORMS, "-o", "three.json", "--resume", cwd=tmp_path / "three")
    assert [each.ended()[0] for each in three] == [0, 0, 0]
    assert not list(tmp_path.rglob("*.part"))
    alone(*NORMS, "-o", "whole.json")
    for name in ("three/one.json", "three/three.json"):
        assert written(tmp_path / name) == written(tmp_path / "whole.json")
