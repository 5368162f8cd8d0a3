"""Commands that are stopped, or whose disk, clock or twin gets in the way: nothing is lost."""

import errno
import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lipaudit.cli import main
from lipaudit.engine.files import write
from lipaudit.report import RENDERERS, Format
from tests import processes
from tests.commands import invoke, read_figures
from tests.processes import ranks
from tests.report.conftest import STORED

pytestmark = pytest.mark.usefixtures("blank_charts")

NORMS = ("jacobian", "demo", "-n", "6", "--batch-size", "2", "--tol", "0.01")


def interrupt(*_args):
    raise KeyboardInterrupt


def test_a_command_that_is_stopped_before_it_begins_says_so(monkeypatch, capsys):
    monkeypatch.setattr("lipaudit.cli.app.app", interrupt)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_half_a_file_of_a_command_that_is_stopped_is_taken_away(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.json", b"{}")
    assert list(tmp_path.iterdir()) == []


def full(*_args, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "args", [(*NORMS, "-o", "a.json"), ("audit", *NORMS[1:-2], "--only", "attention")]
)
def test_figures_are_shown_where_a_full_disk_takes_no_file(args, monkeypatch):
    figures = invoke(*args).stdout.partition("Scorecard")[2]
    with monkeypatch.context() as disk:
        disk.setattr(tempfile, "NamedTemporaryFile", full)
        done = invoke(*args, code=3)
    assert done.stdout.partition("Scorecard")[2] == figures
    assert done.stderr.count("not saved for --resume") == 1
    assert "Free disk space, or choose another place" in done.stderr
    assert len([line for line in done.stderr.splitlines() if "error: cannot write" in line]) == 1


@contextmanager
def small_files() -> Iterator[None]:
    """Let files have 6 kB at most: parts do, a report does not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, before[1]))
    try:
        with pytest.MonkeyPatch.context() as python:  # it would keep the start of what it compiles
            python.setattr(sys, "dont_write_bytecode", True)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_measured_before_the_disk_was_full_is_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lipaudit", *NORMS, "-o", "a.json"])
    with small_files():
        said = invoke(*NORMS, "-o", "a.json", code=3).stderr
    assert "cannot write a.json: File too large" in said
    assert f"--resume to continue: lipaudit {' '.join(NORMS)} -o a.json --resume" in said
    assert [path.name for path in tmp_path.glob("tmp*")] == []
    assert len(list(tmp_path.rglob("*.npz"))) == 3
    again = invoke(*NORMS, "-o", "a.json", "--resume")
    assert "finished 6 of 6 samples" in again.stderr
    invoke(*NORMS, "-o", "b.json")
    assert read_figures("a.json") == read_figures("b.json")


def test_a_resumed_run_of_several_measures_names_each_that_it_reuses():
    audit = ("audit", "demo", "--only", "attention,jacobian", "-n", "2", "-o", "a.json")
    with small_files():
        invoke(*audit, code=3)
    again = invoke(*audit, "--resume")
    for name in ("attention", "jacobian"):
        share = f"2 of 2 samples of {name}"
        assert f"an interrupted run finished {share}: continuing from there" in again.stderr


def test_two_equal_runs_at_once_write_equal_reports(tmp_path):
    both = [processes.begun(*NORMS, "-o", f"{i}.json", cwd=tmp_path) for i in range(2)]
    assert [each.ended()[0] for each in both] == [0, 0]
    assert read_figures("0.json") == read_figures("1.json")
    assert not list(tmp_path.rglob("*.npz"))


def test_a_clock_that_goes_back_changes_nothing(monkeypatch):
    invoke(*NORMS, "-o", "a.json")
    back = itertools.count(time.time(), -86400.0)
    monkeypatch.setattr(time, "time", lambda: next(back))
    invoke(*NORMS, "-o", "b.json", "--time-limit", "1h")
    assert read_figures("a.json") == read_figures("b.json")


def test_the_first_of_two_processes_compares_and_judges(tmp_path, monkeypatch):
    invoke("jacobian", "demo", "-n", "8", "-q", "-o", "base.json")
    compare = ("compare", "base.json", "demo:jasmin", "base.json", "-q", "-f", "json")
    gate = ("gate", "demo:jasmin", "-b", "base.json", "-q", "--batch-size", "1")
    gate = (*gate, "--fail-on", "jacobian.norm:median <= -90%", "--report")
    both = ranks(2, *compare, cwd=tmp_path, then=[[*gate, "two.json"]])
    ends = [each.ended() for each in both]
    assert (ends[0][0], ends[1]) == (1, (0, "")), ends
    one = invoke(*compare).stdout + invoke(*gate, "one.json", code=1).stdout
    assert [each.stdout.read_text() for each in both] == [one, ""]
    sections = [json.loads(Path(f"{n}.json").read_text())["sections"] for n in ("one", "two")]
    assert sections[0] == sections[1]
    processes.pose(monkeypatch, rank=1)
    several = invoke("compare", "base.json", "demo:jasmin", "demo:robust", code=2)
    assert "one MODEL is measured, not for comparing several" in several.stderr


@pytest.mark.parametrize(("rank", "said"), [(0, "error: terminated\n"), (1, "")])
def test_processes_that_are_terminated_say_so_once(monkeypatch, rank, said):
    def terminated(*_):
        raise KeyboardInterrupt("terminated")

    processes.pose(monkeypatch, rank=rank)
    monkeypatch.setitem(RENDERERS, "outline", Format("outline", "page", terminated, (".org",)))
    ended = invoke("report", str(STORED), "-f", "outline", code=None)
    assert (ended.exit_code, ended.stderr) == (143, said)
