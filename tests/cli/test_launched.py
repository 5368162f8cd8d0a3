"""`gate` and `compare` as a launcher starts them: in several processes, with the result of one."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lipaudit.cli.commands import build
from tests.processes import ranks


def alone(*args: object) -> None:
    done = CliRunner().invoke(build(), list(map(str, args)))
    assert done.exit_code == 0, done.output


def launched(monkeypatch, *, rank: int, size: int) -> None:
    """Be one of several processes, which have not met."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", **meeting}.items():
        monkeypatch.setenv(name, value)


def test_the_first_of_two_processes_judges(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone("jacobian", "demo", "-n", "4", "-q", "-o", "base.json")
    args = ("gate", "demo:jasmin", "-b", "base.json", "-q", "--batch-size", "1")
    args = (*args, "--fail-on", "jacobian.median <= -90%", "--report")
    both = ranks(2, *args, "two.json", cwd=tmp_path)
    ends = [each.ended() for each in both]
    assert ends[0][0] == 1, ends
    assert ends[1] == (0, "")
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
    assert "one MODEL is measured, not for comparing several" in several.stderr


@pytest.mark.parametrize(("rank", "said"), [(0, "error: terminated\n"), (1, "")])
def test_processes_that_are_terminated_say_so_once(monkeypatch, rank, said):
    def terminated(_):
        raise KeyboardInterrupt("terminated")

    launched(monkeypatch, rank=rank, size=2)
    monkeypatch.setattr("lipaudit.schema.load", terminated)
    ended = CliRunner().invoke(build(), ["report", "a.json"])
    assert (ended.exit_code, ended.stderr) == (143, said)
