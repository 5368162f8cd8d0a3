"""The Hub from the command line: what the report keeps of it, what is said, and how it ends."""

import json
import os
import pty
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import invoke
from tests.data.test_splits import FILES
from tests.data.test_splits import sets as sets
from tests.hub import files_of
from tests.hub import hub as hub
from tests.models.sources.cases import bert, save

DATA = ("--data", "hf:org/two/plain[test]@main", "-n", "2")


@pytest.fixture
def tiny(hub, tmp_path) -> str:
    """A text classifier on the Hub; its commit."""
    module = bert(id2label={0: "neg", 1: "pos", 2: "other"})
    save(module, tmp_path / "model")
    return hub.add("org/tiny", files_of(tmp_path / "model"))


def test_the_report_says_which_commits_it_is_of(tiny, sets):
    data = sets.add("datasets/org/two", FILES)
    done = invoke("jacobian", "hf:org/tiny", *DATA, "-f", "json", "-o", "r.md")
    facts = json.loads(done.stdout)["run"]
    assert (facts["model"]["revision"], facts["model"]["commit"]) == ("main", tiny)
    assert (facts["data"]["revision"], facts["data"]["commit"]) == ("main", data)
    notes = json.loads(done.stdout)["sections"][0]["notes"]
    assert [n["code"] for n in notes if n["code"].startswith("hub")] == ["hub-commit"] * 2
    page = Path("r.md").read_text()
    assert tiny[:12] in page
    assert data[:12] in page


def test_a_report_of_nothing_on_the_hub_names_no_commit():
    facts = json.loads(invoke("jacobian", "demo", "-n", "1", "-f", "json", "-q").stdout)["run"]
    assert facts["model"]["commit"] == facts["data"]["commit"] == ""


@pytest.mark.parametrize("command", ["bounds", "train"])
def test_what_cannot_be_had_ends_every_command_alike(hub, command):
    hub.add("org/shut", {"config.json": b"{}", "model.safetensors": b""}, gated=True)
    extra = ("--data", "demo:train") if command == "train" else ()
    done = invoke(command, "hf:org/shut", *extra, code=4)
    assert "error: the model org/shut is gated" in done.stderr
    assert "hint: Request access on" in done.stderr.replace("  hint", "hint")
    assert done.stdout == ""


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_silences_the_clients_of_the_hub(tiny, sets, capfd, quiet):
    """Bars and complaints go past what a runner catches: to the file descriptor."""
    sets.add("datasets/org/two", FILES)
    sets.repositories["org/tiny"].cut = 1
    done = invoke("jacobian", "hf:org/tiny", *DATA, *(["-q"] if quiet else []))
    said = done.stderr + capfd.readouterr().err
    assert (said == "") == quiet
    assert ("Fetching" in said) != quiet
    assert ("Generating test split" in said) != quiet
    assert ("org/tiny is read at commit" in said) != quiet


@pytest.mark.slow(seconds=10)
def test_a_terminal_shows_what_is_downloaded(tiny, hub, tmp_path):
    """A process of its own, as a user has it: nothing of it is patched but the address."""
    home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    terminal, other_end = pty.openpty()
    termios.tcsetwinsize(other_end, (40, 120))
    pieces = []

    def listen():
        with suppress(OSError):  # the other end is closed
            while piece := os.read(terminal, 1 << 16):
                pieces.append(piece)

    listener = threading.Thread(target=listen)
    listener.start()
    command = [sys.executable, "-m", "lipaudit", "bounds", "hf:org/tiny", "-n", "1", "-f", "json"]
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "120"}
    env = os.environ | home | variables
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=other_end, check=False)
    os.close(other_end)
    listener.join()
    said = b"".join(pieces).decode()
    assert done.returncode == 0, said
    assert json.loads(done.stdout)["run"]["model"]["commit"] == tiny
    assert "Fetching 4 files: 100%" in said
