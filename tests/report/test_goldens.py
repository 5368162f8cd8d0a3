"""Stored texts of a report: LIPAUDIT_WRITE_GOLDENS=1 writes them anew, except for the report."""

import os
from pathlib import Path

import pytest

from lipaudit.report import render, terminal
from tests.report.conftest import show

GOLDENS = Path(__file__).parent / "goldens"
TEXTS = {
    "table.txt": lambda report: terminal.render(show(report), width=80),
    "page.md": lambda report: render(report, "markdown"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_word_of_a_page(report, name):
    text = TEXTS[name](report)
    if os.environ.get("LIPAUDIT_WRITE_GOLDENS"):
        (GOLDENS / name).write_bytes(text)
    assert text.decode() == (GOLDENS / name).read_text(encoding="utf-8")


def test_json_is_the_file_that_was_read(report):
    assert render(report, "json") == (GOLDENS / "report.json").read_bytes()
