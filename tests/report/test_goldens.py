"""Stored texts of every format, cut at the sections: a new column of one changes one file.

LIPAUDIT_WRITE_GOLDENS=1 writes the files anew.
"""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from lipaudit.measures import layouts
from lipaudit.report import render, terminal
from tests.report.conftest import show

GOLDENS = Path(__file__).parent / "goldens"
FORMATS = {
    "table, 80 columns": lambda report: terminal.render(show(report), width=80),
    "markdown": lambda report: render(report, "markdown"),
    "json": lambda report: render(report, "json"),
}
HEADS = (
    "{title}",  # a terminal: underlined
    "## {title}",
    '      "measure": "{measure}",',
)
LAST = "Which samples are the least robust?"
END = (LAST, f"## {LAST}", "  ]")
"""What comes behind the sections."""


def cut(text: str) -> dict[str, str]:
    """Cut a text at the heads of its sections; `page` is what stands before and after them."""
    lines = text.splitlines(keepends=True)
    starts = {}
    for measure, layout in layouts().items():
        heads = {head.format(title=layout.title, measure=measure) for head in HEADS}
        (starts[measure],) = (i for i, line in enumerate(lines) if line.rstrip("\n") in heads)
    last = max(starts.values())
    end = next(i for i, line in enumerate(lines) if i > last and line.rstrip("\n") in END)
    places = [*starts.values(), end]
    assert places == sorted(places)
    pieces = zip(starts, pairwise(places), strict=True)
    outside = lines[: places[0]] + lines[end:]
    return {"page": "".join(outside)} | {m: "".join(lines[a:b]) for m, (a, b) in pieces}


@pytest.fixture(scope="module")
def sections(report) -> dict[str, str]:
    """What every format writes of each section, one below the other."""
    cuts = {name: cut(render(report).decode()) for name, render in FORMATS.items()}
    return {
        measure: "".join(f"{'=' * 8} {name}\n{text[measure]}" for name, text in cuts.items())
        for measure in ("page", *layouts())
    }


@pytest.mark.parametrize("measure", ["page", *layouts()])
def test_every_word_of_a_section(sections, measure):
    path = GOLDENS / f"{measure}.txt"
    if os.environ.get("LIPAUDIT_WRITE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(sections[measure], encoding="utf-8")
    assert sections[measure] == path.read_text(encoding="utf-8")


def test_no_word_stands_outside_the_pieces(report):
    """What is cut is everything: as many lines as the whole text has, and each of them once."""
    for write in FORMATS.values():
        text = write(report).decode()
        assert sorted("".join(cut(text).values()).splitlines()) == sorted(text.splitlines())
