"""Attention maps and the audit, through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lipaudit.cli.commands import build
from tests.processes import completed

MAP = ("attention", "demo", "-n", "2", "--map", "1.3")


def invoke(folder: Path, *args: str, columns: int = 80) -> str:
    os.chdir(folder)
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(build(), args)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> tuple[Path, str]:
    """A folder with the map of a head as JSON and a page, and what was printed."""
    folder = tmp_path_factory.mktemp("drawn")
    back = Path.cwd()
    try:
        return folder, invoke(folder, *MAP, "-o", "map.json", "-o", "map.html")
    finally:
        os.chdir(back)


def test_a_map_is_named_in_the_terminal_and_drawn_as_a_picture(drawn):
    folder, text = drawn
    said = " ".join(text.split())
    assert "in the html format: Attention map of head 1.3, " in said
    assert ": 17 x 17 entries, largest " in said
    assert 'aria-label="Attention map of head 1.3, ' in (folder / "map.html").read_text()


def test_a_saved_map_is_drawn_again_without_torch(drawn):
    folder, _ = drawn
    code = (
        "import sys; from lipaudit.cli import main\n"
        "sys.argv = ['lipaudit', 'report', 'map.json', '-o', 'again.html']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    assert (folder / "again.html").read_bytes() == (folder / "map.html").read_bytes()


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
        (["attention", "demo", "--query", "1"], "--query needs --map"),
        (["attention", "demo", "--map", "1.3", "--query", "17", "-n", "1"], "no sample has"),
        (["bounds", "demo", "-o", "map.png"], "cannot tell the format of map.png"),
    ],
)
def test_what_cannot_be_drawn_is_refused(args, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner(env={"COLUMNS": "300"}).invoke(build(), args)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def audited(tmp_path_factory) -> tuple[Path, list[str], list[str]]:
    """A folder with a small audit of the demo in `run/`, what it said and what it showed."""
    folder = tmp_path_factory.mktemp("audited")
    command = ("audit", "demo", "-n", "8", "--run-dir", "run", "-o", "run.md")
    done = completed(*command, cwd=folder, env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lipaudit: demo\n")
    return folder, done.stderr.splitlines(), done.stdout.splitlines()


def test_the_first_line_says_what_will_run(audited):
    names = ("bounds", "attention", "jacobian", "attack")
    parts = ", ".join(f"{name} (8 samples)" for name in names)
    assert audited[1][0] == f"audit of demo: {parts}"


def test_the_last_lines_are_the_files_and_what_to_type(audited):
    _, lines, _ = audited
    assert lines[lines.index("") + 1 :] == [
        "report: run/report.html",
        "data:   run/report.json",
        "next:",
        "  lipaudit baseline save run/report.json",
        "  lipaudit gate demo --baseline lipaudit-baseline.json",
    ]


def test_all_that_a_terminal_shows_fits_a_screen(audited):
    _, said, shown = audited
    assert sum(-(-max(len(line), 1) // 80) for line in [*said, *shown]) <= 40
    assert max(map(len, shown)) <= 80
    assert "Scorecard" in shown


def test_details_print_the_sections_and_so_do_files(audited, monkeypatch):
    folder, _, shown = audited
    monkeypatch.chdir(folder)
    whole = invoke(folder, "report", "run/report.json", "--details").splitlines()
    assert invoke(folder, "report", "run/report.json").splitlines() == shown
    scored = shown[shown.index("Scorecard") :]
    scored = scored[: scored.index("")]
    assert len(scored) > 9
    assert "\n".join(scored) in "\n".join(whole)
    assert "Attention map of head" not in "\n".join(shown)
    invoke(folder, "report", "run/report.json", "-o", "run.txt")
    for text in ("\n".join(whole), (folder / "run.txt").read_text()):
        assert "Attention map of head" in text
        assert "What do the words mean" in text


def test_the_page_shows_the_map_of_the_most_amplifying_head(audited):
    folder = audited[0]
    saved = json.loads((folder / "run/report.json").read_text())
    bounds, attention = saved["sections"][0], saved["sections"][2]
    top = max(bounds["rows"], key=lambda row: row["exact"])
    name = f"{top['layer']}.{top['head']}"
    assert f"map@{name}" in attention["arrays"]
    for page in ("run/report.html", "run.md"):
        assert f"Attention map of head {name}, sample " in (folder / page).read_text()


def test_several_reports_as_json_are_their_ranking(drawn, monkeypatch):
    monkeypatch.chdir(drawn[0])
    done = CliRunner().invoke(build(), ["report", "map.json", "map.json", "-f", "json"])
    assert done.exit_code == 0
    ranking = json.loads(done.stdout)
    assert [row["model"] for row in ranking["models"]] == ["A: demo", "B: demo"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("./bert", "bert"),
        ("../bert", "bert"),
        ("bert/", "bert"),
        ("py:../own.py:make", "py-own.py-make"),
        ("hf:org/name", "hf-org-name"),
        ("demo:robust", "demo-robust"),
    ],
)
def test_run_folders_have_readable_names(model, name, tmp_path, monkeypatch):
    from lipaudit.cli.audit import _name_folder

    (tmp_path / "bert").mkdir()
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "bert").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    assert _name_folder(model) == name
