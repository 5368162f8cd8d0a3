"""Several processes of one run: each measures a shard, and the report is that of one.

A slice of it runs always; all of it, with launchers and kills, with -m slow.
"""

import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lipaudit.engine import launcher
from lipaudit.engine.files import Journal
from lipaudit.engine.launcher import Place, find_place, join_processes
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.measures import load_measures
from lipaudit.schema import load
from tests import processes
from tests.commands import invoke, read_figures, read_without_maps, refuse
from tests.simulated.conftest import MODELS as SPECS
from tests.simulated.conftest import SMALL

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
STEP = BATCH_SCRIPT | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "2"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, None),
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


def test_processes_that_do_not_come_are_missed_and_a_port_in_use_is_named(monkeypatch):
    monkeypatch.setattr(launcher, "JOIN", timedelta(seconds=0.2))
    monkeypatch.setattr(launcher, "CLOSING", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used, free = taken.getsockname()[1], int(processes.free_port())
        for port, says in (
            (free, "rank 0 of 2 cannot reach"),
            (used, f"127.0.0.1:{used}.*in use"),
        ):
            place = Place(0, 2, 0, "127.0.0.1", port)
            with pytest.raises(EvaluationError, match=says) as error, join_processes(place):
                pytest.fail("met nobody")
            assert port == used or "WORLD_SIZE" in error.value.advice


def test_processes_connect_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "JOIN", timedelta(seconds=0.2))
    monkeypatch.setattr(launcher, "CLOSING", 0.0)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": processes.free_port()}).items():
        monkeypatch.setenv(name, value)
    said = refuse(3, "rank 1 of 2 cannot reach the other processes", "bounds", "./no-such-model")
    assert "no-such-model" not in said


AUDIT = ("audit", "demo", "--only", "attention,jacobian", "-n", "9", "--batch-size", "4", "-q")
NORMS = ("jacobian", "demo", "-n", "8", "--batch-size", "1", "-q")


def test_a_killed_process_loses_what_it_had_begun_alone(elsewhere, tmp_path):
    """Any number of processes goes on with the rest."""
    hold = partial(processes.stop_after_parts, 2, processes.wait, rank="1")
    first, second = processes.ranks(2, *NORMS, "-o", "two.json", cwd=tmp_path, before=hold)
    while len(list(tmp_path.rglob("*.npz"))) < 6:  # all of the first, two of the second
        assert second.process.is_alive()
        time.sleep(0.005)
    second.process.kill()
    code, text = first.ended()
    assert code == 3, text
    assert "another of the 2 processes has ended" in text
    assert "with --resume to continue" in text
    assert second.ended()[0] == -signal.SIGKILL
    assert not (tmp_path / "two.json").exists()
    assert len(list(tmp_path.rglob("*.npz"))) == 6
    shutil.copytree(tmp_path / "cache", tmp_path / "three/cache")
    invoke(*NORMS, "-o", "three/one.json", "--resume")
    three = processes.ranks(3, *NORMS, "-o", "three.json", "--resume", cwd=tmp_path / "three")
    assert [each.ended()[0] for each in three] == [0, 0, 0]
    assert not list(tmp_path.rglob("*.npz"))
    invoke(*NORMS, "-o", "whole.json")
    for name in ("three/one.json", "three/three.json"):
        assert read_figures(name) == read_figures("whole.json")


def fail_attention_of_first() -> None:
    """Let a measure fail in rank 0 alone."""
    if os.environ["RANK"] == "0":
        failing = replace(load_measures()["attention"], compute=lambda *_: processes.fail())
        load_measures()["attention"] = failing


def test_every_process_keeps_its_parts_until_the_report_of_all_is_complete(elsewhere, tmp_path):
    before = fail_attention_of_first
    both = processes.ranks(2, *AUDIT, "--run-dir", "two", cwd=tmp_path, before=before)
    assert [each.ended()[0] for each in both] == [3, 0]
    assert load(tmp_path / "two/report.json").failures.keys() == {"attention"}
    assert len(list(tmp_path.rglob("*.npz"))) == 4  # three of jacobian, one of attention
    invoke(*AUDIT, "--run-dir", "one", "--resume")
    assert not list(tmp_path.rglob("*.npz"))


def test_rank_0_writes_the_files_of_a_run_and_parts_are_kept(elsewhere, tmp_path):
    args = ("attack", "demo", "-n", "66", "--attack", "fgsm", "--eps", "0.1", "-q")
    saved = ("--save-adv", "made.safetensors")
    both = processes.ranks(2, *args, *saved, "--parts", "run", "-o", "two.json", cwd=tmp_path)
    assert [each.ended() for each in both] == [(0, "")] * 2
    made = Path("made.safetensors").read_bytes()
    invoke(*args, *saved, "-o", "one.json")
    assert Path("made.safetensors").read_bytes() == made
    invoke("merge", "run", "-o", "merged.json")
    for name in ("two", "merged"):
        assert read_figures(f"{name}.json") == read_figures("one.json")


def fail_in(rank: int) -> None:
    """Let rank 0 write only small files, or the measure fail in rank 1."""
    if os.environ["RANK"] == f"{rank}":
        if rank:
            processes.stop_after_parts(1, processes.fail)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))


@pytest.mark.parametrize(
    ("rank", "says"),
    [(0, "cannot write two.json"), (1, "error: no figures\n  hint: Try again.\n")],
)
def test_an_error_of_one_process_ends_all(rank, says, tmp_path):
    """Of the first, which cannot write the report, or of the measure in the second."""
    before = partial(fail_in, rank)
    both = processes.ranks(2, *NORMS, "-o", "two.json", cwd=tmp_path, before=before)
    other = "another of the 2 processes has ended"
    for each, text in ((both[rank], says), (both[1 - rank], other)):
        code, said = each.ended()
        assert (code, text in said) == (3, True), said
        assert rank == 0 or each is not both[1] or said == says  # nothing beside it
    assert not (tmp_path / "two.json").exists()


def test_the_time_limit_of_several_processes_ends_all(elsewhere, tmp_path):
    args = (*NORMS, "--time-limit", "0.001s", "-o", "cut.json")
    both = processes.ranks(2, *args, cwd=tmp_path)
    ends = [each.ended() for each in both]
    assert [code for code, _ in ends] == [7, 0], ends
    cut = load(tmp_path / "cut.json")
    assert (cut.status, cut.unmeasured) == ("partial", {"jacobian": 8})


ATTACKED = ("--eps", "0.05", "--attack", "pgd", "--steps", "2")
AUDITED = ("-n", "3", "--batch-size", "1", "--eps", "0.05", "--attack", "fgsm")
CASES: dict[str, tuple[str, ...]] = {
    "bounds": ("-n", "3", "--batch-size", "1", "--layers", "0"),
    "attention": ("-n", "4", "--batch-size", "1"),
    "jacobian": ("-n", "4", "--batch-size", "1"),
    "attack": ("-n", "66", *ATTACKED),
    "corrupt": ("-n", "3", "--batch-size", "1", "--corruption", "fog", "--severity", "1"),
    "weights": ("-n", "2", "--batch-size", "1", "--at-samples"),
    "certify": ("-n", "2", "--eps", "0.001", "--order", "1", "--nodes", "1"),
    "smoothing": ("-n", "9", "--smooth", "0.25", "--noise-samples", "5,20"),
    "scaling": ("-n", "9", "--lengths", "4:8:log2", "--mode", "real", "--layers", "0"),
    "audit": (*AUDITED, "--only", "attention,jacobian,attack", "--quick"),
}
"""At least two batches of each."""
ACCELERATE = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--nproc-per-node", "2", "--master-port"),
    "accelerate": ("accelerate.commands.launch", *ACCELERATE.split(), "--main_process_port"),
}
MODELS = {
    # An audit has the other measures.
    "demo": ["attack", "corrupt", "weights", "smoothing", "scaling", "audit"],
    "llama": [name for name in CASES if name != "corrupt"],  # it takes classes
}
"""What each is measured by: certificates of demo take long."""
slow = pytest.mark.slow(seconds=26)


def command(case: str, model: tuple[str, ...], out: str, *more: str) -> tuple[str, ...]:
    folder = ("--run-dir", f"{out}.run") if case == "audit" else ()
    return (case, *model, *CASES[case], "-q", "-o", f"{out}.json", *folder, *more)


def well(commands: list[processes.Command]) -> None:
    ends = [each.ended() for each in commands]
    assert [code for code, _ in ends] == [0] * len(ends), ends


class Model:
    """A model, and the reports of one process on it."""

    def __init__(self, args: tuple[str, ...], folder: Path, cases: Sequence[str]) -> None:
        self.args = args
        first, *others = self.commands = [command(case, args, case) for case in cases]
        well([processes.begun(*first, cwd=folder, then=others)])
        self.truth = {case: read_without_maps(folder / f"{case}.json") for case in cases}


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Model:
    return Model(("demo",), tmp_path_factory.mktemp("demo"), MODELS["demo"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Model:
    folder = tmp_path_factory.mktemp("llama")
    SPECS["llama"]().module.save_pretrained(folder / "model")
    ids = np.random.default_rng(0).integers(3, SMALL["vocab_size"], size=(130, 8))
    np.savez(folder / "ids.npz", x=ids, y=np.arange(130) % 3)
    args = (str(folder / "model"), "--data", str(folder / "ids.npz"))
    return Model(args, folder, MODELS["llama"])


@pytest.fixture
def model(request) -> Model:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("model", ["demo", pytest.param("llama", marks=slow)], indirect=True)
def test_two_processes_write_what_one_writes(model, tmp_path):
    assert load_measures().keys() <= CASES.keys()
    first, *others = model.commands
    well(processes.ranks(2, *first, cwd=tmp_path, then=others))
    assert not list(tmp_path.rglob("*.npz"))
    for case, truth in model.truth.items():
        assert read_without_maps(tmp_path / f"{case}.json") == truth, case


@slow
@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_start_them(launcher, model, tmp_path):
    (tmp_path / "commands.json").write_text(json.dumps(model.commands))
    root = str(Path(processes.__file__).parent.parent)
    how = (*LAUNCHERS[launcher], processes.free_port(), "-m", "tests.processes")
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": root}
    typed = [sys.executable, "-m", *how, str(tmp_path / "commands.json")]
    done = subprocess.run(typed, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for case, truth in model.truth.items():
        assert read_without_maps(tmp_path / f"{case}.json") == truth, case


def dawdle() -> None:
    """Take a moment for every batch, so that a kill strikes among them.

    Whoever is left alone before they met ends after seconds.
    """
    launcher.JOIN = timedelta(seconds=20)
    keep = Journal.keep

    def slowly(self: Journal, part: Any) -> None:
        time.sleep(0.1)
        keep(self, part)

    Journal.keep = slowly


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(
    ("model", "case"), [(m, case) for m, cases in MODELS.items() for case in cases],
    indirect=["model"],
)  # fmt: skip
def test_what_is_killed_goes_on_with_any_number_of_processes(case, model, tmp_path):
    """Whichever of two processes is killed, once some parts, or none, are kept."""
    chance = random.Random(f"{case} {model.args}")
    both = processes.ranks(2, *command(case, model.args, "two"), cwd=tmp_path, before=dawdle)
    parts = chance.randint(0, 2)
    while len(list(tmp_path.rglob("*.npz"))) < parts and all(
        each.process.is_alive() for each in both
    ):
        time.sleep(0.005)
    time.sleep(chance.uniform(0, 0.3))
    killed = chance.randrange(2)
    both[killed].process.kill()
    code, said = both[1 - killed].ended()
    assert both[killed].ended()[0] in (0, -signal.SIGKILL)
    assert code in (0, 3), said
    assert "Traceback" not in said
    (tmp_path / "cache").mkdir(exist_ok=True)  # nothing was kept when it was killed
    shutil.copytree(tmp_path / "cache", tmp_path / "three" / "cache")
    resumed = command(case, model.args, "resumed", "--resume")
    well([processes.begun(*resumed, cwd=tmp_path)])
    well(processes.ranks(3, *resumed, cwd=tmp_path / "three"))
    for path in (tmp_path, tmp_path / "three"):
        assert read_without_maps(path / "resumed.json") == model.truth[case]
