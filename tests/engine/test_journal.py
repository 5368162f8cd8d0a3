"""Interrupted measures: what was finished is kept, and --resume gives what one run gives."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.engine.journal import Journal
from lipaudit.measures import MEASURES
from lipaudit.measures.measure import Part, sample_ids
from lipaudit.models.sources.loading import load_net
from lipaudit.settings import option_types

ATTACK = ("attack", "demo", "--eps", "0.05", "--attack", "pgd", "-n", "130", "--steps", "30")
NORMS = ("jacobian", "demo", "-n", "32", "--batch-size", "1", "--per-layer")
SMALL = {
    "attack": {"eps": ("0.05",), "attack": "fgsm"},
    "scaling": {"lengths": (8, 16), "modes": ("real",)},
}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "lipaudit", *args, "-f", "json"]


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"XDG_CACHE_HOME": str(cwd)}
    return subprocess.run(command(*args), cwd=cwd, env=env, capture_output=True, text=True)


def stopped(*args: str, cwd: Path, by: signal.Signals) -> tuple[int, str]:
    """Start a command and stop it once a part of it is kept."""
    env = os.environ | {"XDG_CACHE_HOME": str(cwd)}
    process = subprocess.Popen(
        command(*args),
        cwd=cwd,
        env=env,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Shells start what runs in the background with SIGINT ignored, and children inherit it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not kept(cwd):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(by)
    said = process.communicate()[1]
    return process.returncode, said


def kept(cwd: Path) -> list[Path]:
    return list((cwd / "lipaudit").rglob("*.part"))


def numbers(text: str) -> list[dict]:
    """The sections of a report without what is measured with a clock."""
    sections = json.loads(text)["sections"]
    for row in sections[0]["rows"]:
        row.pop("seconds", None)
    return sections


@pytest.mark.parametrize("args", [ATTACK, NORMS], ids=["attack", "jacobian"])
def test_a_killed_run_goes_on_to_the_same_report(args, tmp_path):
    status, _ = stopped(*args, cwd=tmp_path, by=signal.SIGKILL)
    assert status == -signal.SIGKILL
    resumed = run(*args, "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "going on from there" in resumed.stderr
    assert not kept(tmp_path)
    assert numbers(resumed.stdout) == numbers(run(*args, cwd=tmp_path).stdout)


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_to_go_on(by, code, tmp_path):
    status, said = stopped(*NORMS, cwd=tmp_path, by=by)
    assert status == code
    assert "--resume goes on" in said
    assert "Traceback" not in said
    other = run(*NORMS, "--seed", "1", "--resume", cwd=tmp_path)
    assert other.returncode == 0
    assert "interrupted" not in other.stderr  # another run is not mixed up with this one
    anew = run(*NORMS, cwd=tmp_path)
    assert "add --resume to go on" in anew.stderr
    assert anew.returncode == 0
    assert not kept(tmp_path)


@pytest.mark.parametrize("name", MEASURES)
def test_the_parts_of_every_measure_come_back_as_they_were(name, tmp_path):
    net = load_net("demo")
    measure = MEASURES[name]
    size = measure.chunk or 2
    batch = load_data("demo", net, DataOptions(samples=size + 2)).batch
    options = option_types()[name].checked(SMALL.get(name, {}))
    if measure.chunk is not None:
        options = options.model_copy(update={"batch_size": 4})
    parts = list(measure.parts(net, batch.split(size), options))
    with Journal({"measure": name}, tmp_path) as journal:
        assert list(journal.recorded(parts)) == parts
    with Journal({"measure": name}, tmp_path) as journal:
        found = journal.parts(batch.ids)
    assert len(parts) == 2
    assert sample_ids(found) == batch.ids
    assert measure.summarise(found, options) == measure.summarise(parts, options)
    with Journal({"measure": name, "seed": 1}, tmp_path) as other:
        assert other.parts(batch.ids) == []


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def numbered(count: int) -> list[Part]:
    return [Part((str(i),), {"x": np.array([float(i)])}) for i in range(count)]


def test_a_damaged_or_foreign_file_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = [b"", pickle.dumps(Harmful()), pickle.dumps([1]), pickle.dumps(numbered(1)[0])]
    with Journal({}, tmp_path) as journal:
        list(journal.recorded(numbered(4)))
        third = journal.paths()[2]
        for content in (third.read_bytes()[:-9], *bad):
            third.write_bytes(content)
            assert sample_ids(journal.parts("0123")) == ("0", "1", "3")
        assert journal.parts("4567") == []
    assert not (tmp_path / "harm").exists()


def test_parts_come_in_the_order_of_the_samples_and_whole(tmp_path):
    pairs = [Part((f"{i}", f"{i + 1}"), {"x": np.zeros(2)}) for i in (4, 0, 2)]
    with Journal({}, tmp_path) as journal:
        list(journal.recorded(pairs))
        assert sample_ids(journal.parts("0123456")) == ("0", "1", "2", "3", "4", "5")
        assert sample_ids(journal.parts("01245")) == ("0", "1", "4", "5")


def test_a_process_beside_that_with_the_lock_keeps_parts_too(tmp_path):
    with Journal({}, tmp_path) as first:
        beside = Journal({}, tmp_path)
        beside.keeps = first.keeps
        list(beside.recorded(numbered(2), after=1))
        list(first.recorded(numbered(3)[2:], after=1))
        assert sample_ids(first.parts("012")) == ("0", "1", "2")


def test_two_equal_runs_at_once_do_not_share_a_journal(tmp_path):
    with Journal({}, tmp_path) as first:
        list(first.recorded(numbered(2)))
        with Journal({}, tmp_path) as second:
            assert second.parts("01") == []
            assert list(second.recorded(numbered(1))) == numbered(1)
            second.clear()
        assert sample_ids(first.parts("01")) == ("0", "1")
    with Journal({}, tmp_path) as third:
        assert sample_ids(third.parts("01")) == ("0", "1")


def test_a_run_without_a_cache_directory_goes_on(tmp_path):
    (tmp_path / "lipaudit").write_text("a file where the cache would be")
    assert run("attention", "demo", "-n", "2", cwd=tmp_path).returncode == 0


def interrupted(root: Path, name: str, *, age_days: float = 0, size: int = 10) -> Path:
    """What an interrupted run leaves behind, so many days old; its folder."""
    with Journal({"name": name}, root) as journal:
        journal.folder.mkdir()
        (journal.folder / "000000.part").write_bytes(bytes(size))
        then = time.time() - age_days * 86400
        os.utime(journal.folder, (then, then))
    return journal.folder


def begun(root: Path) -> Journal:
    """A run that keeps its first part, which is when others are forgotten."""
    journal = Journal({"name": "begun"}, root)
    with journal:
        list(journal.recorded([Part(ids=("a",), values={})]))
        assert journal.paths()
    return journal


def test_interrupted_runs_are_forgotten_by_number_the_oldest_first(tmp_path, monkeypatch):
    monkeypatch.setattr("lipaudit.engine.journal.MOST_RUNS", 3)
    folders = [interrupted(tmp_path, f"{i}", age_days=i + 1) for i in range(5)]
    own = begun(tmp_path).folder
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {own, *folders[:2]}
    assert len(list(tmp_path.glob("*.lock"))) == 3


def test_interrupted_runs_are_forgotten_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr("lipaudit.engine.journal.MOST_BYTES", 3000)
    new, old = interrupted(tmp_path, "new", age_days=1, size=1000), interrupted(
        tmp_path, "old", age_days=2, size=2500
    )  # fmt: skip
    begun(tmp_path)
    assert (new.exists(), old.exists()) == (True, False)


def test_interrupted_runs_are_forgotten_by_age_and_stray_locks_too(tmp_path):
    old, young = interrupted(tmp_path, "a", age_days=31), interrupted(tmp_path, "b", age_days=29)
    (tmp_path / "stray.lock").touch()
    begun(tmp_path)
    assert (old.exists(), young.exists()) == (False, True)
    assert not (tmp_path / "stray.lock").exists()
    assert not old.with_suffix(".lock").exists()


def test_a_run_in_use_is_never_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("lipaudit.engine.journal.MOST_RUNS", 0)
    folder = interrupted(tmp_path, "in use", age_days=99)
    with Journal({"name": "in use"}, tmp_path) as holder:
        own = begun(tmp_path).folder
        assert holder.paths()
        assert folder.exists()
        assert own.exists()
    begun(tmp_path)
    assert not folder.exists()


def test_a_finished_run_leaves_nothing_behind(tmp_path):
    done = run("jacobian", "demo", "-n", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "lipaudit/journal").iterdir()) == []


def test_a_lock_that_was_taken_away_is_no_lock(tmp_path, monkeypatch):
    """Another run ends between opening the file and locking it: two runs would hold two files."""
    import fcntl

    def late(file, how):
        Path(file.name).unlink()

    monkeypatch.setattr(fcntl, "flock", late)
    with Journal({}, tmp_path) as journal:
        list(journal.recorded([Part(ids=("a",), values={})]))
        assert journal.paths() == []
