"""What stands for the characters that a terminal does not have, or must not obey."""

import io
import json
from contextlib import redirect_stdout

import pytest

from lipaudit import schema
from lipaudit.cli.commands import build
from lipaudit.cli.streams import Unheeded, make_printable
from lipaudit.errors import InputError

HOSTILE = "a\x1b]0;t\x07\x9b2J\x7f\u202e\u2028[red]"
SHOWN = r"a\x1b]0;t\x07\x9b2J\x7f\u202e\u2028[red]"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("exactᵃ", b"exact^a"),
        ("10⁻⁵", b"10^-5"),
        ("‖X‖_F² ≤ 3", b"||X||_F^2 <= 3"),
        ("ᵃ exact at X", b"^a exact at X"),
    ],
)
def test_superscripts_do_not_run_into_what_they_stand_behind(text, plain):
    make_printable()
    assert text.encode("ascii", errors="lipaudit.plain") == plain


def test_streams_show_control_characters():
    written = io.StringIO()
    Unheeded(written).write(f"{HOSTILE}\n\tb")
    assert written.getvalue() == f"{SHOWN}\n\tb"


def test_a_terminal_gets_colours_and_nothing_else(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    Unheeded(written).write(f"\x1b[31mred\x1b[0m {HOSTILE}")
    assert written.getvalue() == f"\x1b[31mred\x1b[0m {SHOWN}"


def test_errors_show_control_characters():
    error = InputError(f"{HOSTILE}\n", HOSTILE)
    assert (error.message, error.advice) == (rf"{SHOWN}\x0a", SHOWN)


def test_json_escapes_what_a_terminal_would_obey():
    text = json.dumps({"a": HOSTILE}, ensure_ascii=False)
    escaped = schema.escape_controls(text)
    assert json.loads(escaped) == {"a": HOSTILE}
    assert escaped.isprintable()


def test_a_command_writes_to_a_stream_of_text():
    written = io.StringIO()
    with redirect_stdout(written), pytest.raises(SystemExit) as end:
        build()(["env", "-f", "json"])
    assert end.value.code == 0
    assert "lipaudit" in json.loads(written.getvalue())
