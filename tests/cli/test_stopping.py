"""Commands that are stopped, or whose disk, clock or twin gets in the way: nothing is lost."""

import errno
import itertools
import json
import resource
import signal
import tempfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lipaudit.cli import main
from lipaudit.cli.commands import build
from lipaudit.engine.files import write
from lipaudit.schema import dumps, load
from tests import processes

NORMS = ("jacobian", "demo", "-n", "6", "--batch-size", "2", "--tol", "0.01")
MODELS = ("audit", "demo", "demo:robust", "--only", "attention,jacobian", "-n", "2")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def invoke(*args: str, code: int = 0):
    done = CliRunner().invoke(build(), list(args))
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    return done


def written(path: str | Path) -> dict:
    document = json.loads(dumps(load(Path(path))))
    for name in ("created", "command"):
        document["run"].pop(name)
    return document


def test_a_command_that_is_stopped_before_it_begins_says_so(monkeypatch, capsys):
    def imported():
        raise KeyboardInterrupt

    monkeypatch.setattr("lipaudit.cli.commands.build", imported)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_half_a_file_of_a_command_that_is_stopped_is_taken_away(tmp_path, monkeypatch):
    def stopped(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
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
    assert len([line for line in done.stderr.splitlines() if "error: cannot write" in line]) == 1


def small() -> None:
    """Let files have 20 kB at most: parts and what is said do, a report does not."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_what_was_measured_before_the_disk_was_full_is_not_measured_again(tmp_path):
    code, said = processes.begun(*NORMS, "-o", "a.html", cwd=tmp_path, before=small).ended()
    assert (code, "cannot write a.html: File too large" in said) == (3, True)
    assert f"--resume to continue: lipaudit {' '.join(NORMS)} -o a.html --resume" in said
    assert [path.name for path in tmp_path.glob("tmp*")] == []
    assert "note: 6 of 6 samples of jacobian are kept: " in said
    assert len(list(tmp_path.rglob("*.npz"))) == 3
    again = invoke(*NORMS, "-o", "a.json", "--resume")
    assert "finished 6 of 6 samples" in again.stderr
    invoke(*NORMS, "-o", "b.json")
    assert written("a.json") == written("b.json")


def test_a_resumed_run_of_several_measures_names_each_that_it_reuses(tmp_path, monkeypatch):
    audit = ("audit", "demo", "--only", "attention,jacobian", "-n", "2", "--run-dir", "run")
    with monkeypatch.context() as stopping:
        stopping.setattr("lipaudit.engine.execute.make_report", interrupted)
        stopped = CliRunner().invoke(build(), list(audit))
    shares = [f"2 of 2 samples of {name}" for name in ("attention", "jacobian")]
    assert f"{', '.join(shares)} are kept: run the same command" in stopped.stderr
    assert " --resume\n" in stopped.stderr
    again = invoke(*audit, "--resume")
    for share in shares:
        assert f"an interrupted run finished {share}: continuing from there" in again.stderr


def interrupted(*_args):
    raise KeyboardInterrupt


def test_two_equal_runs_at_once_write_equal_reports(tmp_path):
    both = [processes.begun(*NORMS, "-o", f"{i}.json", cwd=tmp_path) for i in range(2)]
    assert [each.ended()[0] for each in both] == [0, 0]
    assert written("0.json") == written("1.json")
    assert not list(tmp_path.rglob("*.npz"))


def test_a_clock_that_goes_back_changes_nothing(monkeypatch):
    invoke(*NORMS, "-o", "a.json")
    back = itertools.count(time.time(), -86400.0)
    monkeypatch.setattr(time, "time", lambda: next(back))
    invoke(*NORMS, "-o", "b.json", "--time-limit", "1h")
    assert written("a.json") == written("b.json")


def hold_before_second() -> None:
    """Let an audit of several models wait for a signal once the first is measured."""
    from lipaudit.engine import execute

    measured, run_job = [], execute.run_job

    def execute_once(*given, **options):
        if measured:
            processes.wait_for_signal()
        measured.append(given)
        return run_job(*given, **options)

    execute.run_job = execute_once


def test_an_audit_of_several_models_that_is_stopped_goes_on(tmp_path):
    """Once the first model is finished: its report is taken as it is."""
    command = processes.begun(*MODELS, "--run-dir", "run", cwd=tmp_path, before=hold_before_second)
    first = tmp_path / "run" / "1-demo" / "report.json"
    while not first.exists():
        assert command.alive
        time.sleep(0.005)
    command.send(signal.SIGTERM)
    code, said = command.ended()
    assert code == 143
    assert "Traceback" not in said
    typed = f"lipaudit {' '.join(MODELS)} --run-dir run --resume"
    assert f"run the same command with --resume to continue: {typed}" in said
    invoke(*MODELS, "--run-dir", "run", "--resume")
    invoke(*MODELS, "--run-dir", "whole")
    for path in sorted(Path("whole").glob("*/report.json")):
        assert written(path) == written(Path("run", *path.parts[1:]))
