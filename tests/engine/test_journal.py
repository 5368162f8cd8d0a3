"""Interrupted measures: what was finished is kept, and --resume gives what one run gives."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.engine.journal import Journal
from lipaudit.errors import EvaluationError
from lipaudit.measures import MEASURES
from lipaudit.measures.measure import Part, sample_ids
from lipaudit.models.sources.loading import load_net
from lipaudit.settings import option_types
from tests import processes

ATTACK = ("attack", "demo", "--eps", "0.05", "--attack", "pgd", "-n", "130", "--steps", "30")
NORMS = ("jacobian", "demo", "-n", "32", "--batch-size", "1", "--per-layer")
SMALL = {
    "attack": {"eps": ("0.05",), "attack": "fgsm"},
    "scaling": {"lengths": (8, 16), "modes": ("real",)},
}


def run(*args: str, cwd: Path) -> tuple[str, str]:
    """What a command prints, and what it says."""
    command = processes.begun(*args, "-f", "json", cwd=cwd)
    code, said = command.ended()
    assert code == 0, said
    return command.stdout.read_text(), said


def stopped(*args: str, cwd: Path, by: signal.Signals) -> tuple[int, str]:
    """Start a command and stop it once a part of it is kept."""
    command = processes.begun(*args, "-f", "json", cwd=cwd)
    while not kept(cwd):
        assert command.alive
        time.sleep(0.005)
    command.send(by)
    return command.ended()


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
    resumed, said = run(*args, "--resume", cwd=tmp_path)
    assert "going on from there" in said
    assert not kept(tmp_path)
    assert numbers(resumed) == numbers(run(*args, cwd=tmp_path)[0])


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_to_go_on(by, code, tmp_path):
    status, said = stopped(*NORMS, cwd=tmp_path, by=by)
    assert status == code
    assert "--resume goes on" in said
    assert "Traceback" not in said
    _, other = run(*NORMS, "--seed", "1", "--resume", cwd=tmp_path)
    assert "interrupted" not in other  # another run is not mixed up with this one
    _, anew = run(*NORMS, cwd=tmp_path)
    assert "add --resume to go on" in anew
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
    foreign = [pickle.dumps(each) for each in (Harmful(), [1], numbered(1)[0])]
    bad = [b"", *foreign, *(hashlib.sha256(text).digest() + text for text in foreign)]
    with Journal({}, tmp_path) as journal:
        list(journal.recorded(numbered(4)))
        third = journal.paths()[2]
        for content in (third.read_bytes()[:-9], *bad):
            third.write_bytes(content)
            assert sample_ids(journal.parts("0123")) == ("0", "1", "3")
        assert journal.parts("4567") == []
    assert not (tmp_path / "harm").exists()


def test_no_byte_of_a_part_is_changed_unseen(tmp_path):
    """Nor is any of its beginnings a part: a machine may stop in the middle of a file."""
    with Journal({}, tmp_path) as journal:
        list(journal.recorded(numbered(1)))
        (path,) = journal.paths()
        whole = path.read_bytes()
        for i in range(len(whole)):
            for content in (whole[:i], whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :]):
                path.write_bytes(content)
                assert journal.parts("0") == []
        path.write_bytes(whole)
        assert journal.parts("0") == numbered(1)


def refuse(path, _content):
    raise EvaluationError(f"cannot write {path}: No space left on device")


def test_what_cannot_be_kept_is_measured_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr("lipaudit.engine.journal.write", refuse)
    with Journal({}, tmp_path) as journal:
        assert journal.refusal == ""
        assert list(journal.recorded(numbered(2))) == numbered(2)
        assert "No space left" in journal.refusal
        with Journal({}, tmp_path) as second:
            assert "another process" in second.refusal
    (tmp_path / "file").touch()
    with Journal({}, tmp_path / "file") as nowhere:
        assert "File exists" in nowhere.refusal
        assert list(nowhere.recorded(numbered(2))) == numbered(2)


def test_others_keep_what_they_measure_before_the_first_has_a_part(tmp_path):
    with Journal({}, tmp_path) as first:
        list(first.recorded(numbered(1)))
        first.begin()
        assert first.parts("0") == []
        beside = Journal({}, tmp_path)
        beside.keeps = first.keeps
        list(beside.recorded(numbered(2), after=1))
        list(first.recorded(numbered(3)[2:], after=1))
        assert sample_ids(first.parts("012")) == ("0", "1", "2")


def test_parts_come_in_the_order_of_the_samples_and_whole(tmp_path):
    pairs = [Part((f"{i}", f"{i + 1}"), {"x": np.zeros(2)}) for i in (4, 0, 2)]
    with Journal({}, tmp_path) as journal:
        list(journal.recorded(pairs))
        assert sample_ids(journal.parts("0123456")) == ("0", "1", "2", "3", "4", "5")
        assert sample_ids(journal.parts("01245")) == ("0", "1", "4", "5")


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
    _, said = run("attention", "demo", "-n", "2", cwd=tmp_path)
    assert said.count("not kept for --resume") == 1


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
    run("jacobian", "demo", "-n", "2", cwd=tmp_path)
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
