"""What is said while a command runs, and what stands for what a terminal must not obey."""

import gc
import io
import json
from contextlib import redirect_stdout

import pytest

from lipaudit.cli.app import Terminal, app
from lipaudit.cli.output import GuardedStream
from lipaudit.cli.progress import OnStderr
from lipaudit.engine.execute import Observer, execute
from lipaudit.engine.prepare import Request, prepare
from lipaudit.errors import InputError, escape_controls
from lipaudit.measures.attack import AttackOptions
from lipaudit.settings import RunOptions
from lipaudit.tables import Note

HOSTILE = "a\x1b]0;t\x07\x9b2J\x7f\u202e\u2028[red]"
SHOWN = r"a\x1b]0;t\x07\x9b2J\x7f\u202e\u2028[red]"


def test_streams_errors_and_json_show_control_characters_and_a_terminal_gets_colours(monkeypatch):
    written = io.StringIO()
    GuardedStream(written).write(f"{HOSTILE}\n\tb")
    assert written.getvalue() == f"{SHOWN}\n\tb"
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    GuardedStream(terminal).write(f"\x1b[31mred\x1b[0m {HOSTILE}")
    assert terminal.getvalue() == f"\x1b[31mred\x1b[0m {SHOWN}"
    error = InputError(f"{HOSTILE}\n", HOSTILE)
    assert (error.message, error.advice) == (rf"{SHOWN}\x0a", SHOWN)
    escaped = escape_controls(json.dumps({"a": HOSTILE}, ensure_ascii=False))
    assert json.loads(escaped) == {"a": HOSTILE}
    assert escaped.isprintable()


def test_a_command_writes_to_a_stream_of_text():
    written = io.StringIO()
    with redirect_stdout(written), pytest.raises(SystemExit) as end:
        app(["env", "-f", "json"])
    assert end.value.code == 0
    assert "lipaudit" in json.loads(written.getvalue())


def test_attacks_move_after_every_attack_on_a_chunk():
    options = AttackOptions.parse({"eps": "0.02,0.05", "attack": "fgsm,pgd", "steps": 3})
    observer, told = Observer(), []
    observer.moves = lambda _, samples: told.append(("moves", samples))
    observer.advances = lambda _, samples: told.append(("advances", samples))
    execute(prepare(Request("demo", {"attack": options}, RunOptions(samples=70))), observer)
    assert [samples for kind, samples in told if kind == "advances"] == [64, 6]
    # What is complete, and the share of what is not.
    complete, steps = 0, []
    for kind, samples in told:
        if kind == "advances":
            complete += samples
        else:
            steps.append(complete + samples)
    assert len(steps) == 9  # clean, then two attacks in two balls on two chunks
    assert steps == sorted(set(steps))
    assert 0 < steps[0] < steps[-2] < 70
    assert steps[-1] == pytest.approx(70)


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_is_quiet(terminal, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    gc.disable()  # as in a command, before it measures
    with OnStderr(Terminal(quiet=True)) as observer:
        assert gc.isenabled()
        observer.begins("attack", 8)
        observer.moves("attack", 3.0)
        observer.note(Note(level="warning", code="a", text="b"))
    assert capsys.readouterr().err == ""


def test_of_remarks_that_differ_by_a_measure_or_a_number_one_is_said(capsys):
    observer = OnStderr(Terminal())
    for number, measure in enumerate(("bounds", "attention", "jacobian", "attack", "scaling")):
        text = f"an interrupted run finished {number} of 16 samples of {measure}: add --resume"
        observer.note(Note(level="info", code="kept", text=text))
    observer.note(Note(level="info", code="kept", text="what is finished is kept"))
    assert capsys.readouterr().err.splitlines() == [
        "note: an interrupted run finished 0 of 16 samples of bounds: add --resume",
        "note: what is finished is kept",
    ]


def test_off_a_terminal_a_line_says_now_and_then_how_long_is_left(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with OnStderr(Terminal()) as observer:
        observer.begins("attack", 128)
        now[0] = 40.0
        observer.moves("attack", 0.0)
        assert capsys.readouterr().err == ""  # nothing to judge by
        observer.moves("attack", 32.0)
        assert capsys.readouterr().err == "attack: 32/128 samples, about 120 s left\n"
        now[0] = 80.0
        observer.advances("attack", 64)
        assert capsys.readouterr().err == "attack: 64/128 samples, about 80 s left\n"
        observer.moves("attack", 60.0)
        assert capsys.readouterr().err == ""  # not so soon again
