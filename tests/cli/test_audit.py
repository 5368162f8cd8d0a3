"""Attention maps and the audit, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lipaudit.cli.app import build

MAP = ("attention", "demo", "-n", "2", "--map", "1.3")


def invoke(folder: Path, *args: str, columns: int = 80) -> str:
    os.chdir(folder)
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(build(), args)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> tuple[Path, str]:
    """A folder with the map of a head as JSON and PNG, and what was printed."""
    folder = tmp_path_factory.mktemp("drawn")
    back = Path.cwd()
    try:
        return folder, invoke(folder, *MAP, "-o", "map.json", "-o", "map.png")
    finally:
        os.chdir(back)


def test_a_map_is_drawn_in_the_terminal_and_as_a_picture(drawn):
    folder, text = drawn
    lines = text[text.index("Attention map of head 1.3") :].splitlines()[1:18]
    assert all(set(line) <= set(" ░▒▓█") and len(line) <= 34 for line in lines)
    assert any("█" in line for line in lines)
    assert (folder / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_saved_map_is_drawn_again_without_torch(drawn):
    folder, _ = drawn
    code = (
        "import sys; from lipaudit.cli import main\n"
        "sys.argv = ['lipaudit', 'report', 'map.json', '-o', 'again.png']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    assert (folder / "again.png").read_bytes() == (folder / "map.png").read_bytes()


def test_a_map_is_no_setting_so_that_reports_stay_comparable(drawn):
    section = json.loads((drawn[0] / "map.json").read_text())["sections"][0]
    assert not {"map", "query"} & section["settings"].keys()
    assert section["arrays"]["map@1.3"]["shape"] == [17, 17]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["attention", "demo", "--map", "1"], "LAYER.HEAD"),
        (["attention", "demo", "--map", "3.0"], "layer 3"),
        (["attention", "demo", "--map", "2.4"], "no head 2.4"),
        (["attention", "demo", "--query", "1"], "needs --map"),
        (["attention", "demo", "--map", "1.3", "--query", "17", "-n", "1"], "no sample has"),
        (["bounds", "demo", "-o", "map.png"], "one attention map"),
        (["audit", "demo", "-f", "png"], "one attention map"),
    ],
)
def test_what_cannot_be_drawn_is_refused(args, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner(env={"COLUMNS": "300"}).invoke(build(), args)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())
