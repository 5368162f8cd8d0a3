"""Attention maps and the audit, through the command line."""

import json
from pathlib import Path

import pytest

from tests.commands import invoke


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> tuple[Path, str]:
    """A folder with the map of a head as JSON and a page, and what was printed."""
    folder = tmp_path_factory.mktemp("drawn")
    line = ("attention", "demo", "-n", "2", "--map", "1.3")
    files = ("-o", folder / "map.json", "-o", folder / "map.html")
    return folder, invoke(*line, *files, columns=80).stdout


def test_a_map_is_named_in_the_terminal_and_drawn_as_a_picture(drawn):
    folder, text = drawn
    said = " ".join(text.split())
    assert "in the html format: Attention map of head 1.3, " in said
    assert ": 17 x 17 entries, largest " in said
    assert 'aria-label="Attention map of head 1.3, ' in (folder / "map.html").read_text()


def test_a_saved_map_is_drawn_again(drawn):
    invoke("report", drawn[0] / "map.json", "-o", "again.html")
    assert Path("again.html").read_bytes() == (drawn[0] / "map.html").read_bytes()


def test_a_map_is_no_setting_so_that_reports_stay_comparable(drawn):
    section = json.loads((drawn[0] / "map.json").read_text())["sections"][0]
    assert not {"map", "query"} & section["settings"].keys()
    assert section["arrays"]["map@1.3"]["shape"] == [17, 17]


def test_the_last_lines_are_the_files_and_what_to_type(audited):
    lines = audited[1].stderr.splitlines()
    assert lines[lines.index("") + 1 :] == [
        "report: run/report.html",
        "data:   run/report.json",
        "next:   lipaudit baseline save run/report.json",
    ]


def test_all_that_a_terminal_shows_fits_a_screen(audited):
    said, shown = audited[1].stderr.splitlines(), audited[1].stdout.splitlines()
    assert shown[0] == "lipaudit: demo"
    assert sum(-(-max(len(line), 1) // 80) for line in [*said, *shown]) <= 40
    assert max(map(len, shown)) <= 80
    assert "Scorecard" in shown


def test_details_print_the_sections_and_so_do_files(audited, monkeypatch):
    folder, shown = audited[0], audited[1].stdout.splitlines()
    monkeypatch.chdir(folder)
    whole = invoke("report", "run/report.json", "--details", columns=80).stdout.splitlines()
    assert invoke("report", "run/report.json", columns=80).stdout.splitlines() == shown
    scored = shown[shown.index("Scorecard") :]
    scored = scored[: scored.index("")]
    assert len(scored) > 9
    assert "\n".join(scored) in "\n".join(whole)
    assert "Attention map of head" not in "\n".join(shown)
    invoke("report", "run/report.json", "-o", "run.txt")
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
        assert f"Attention map of head {name}, first sample" in (folder / page).read_text()
