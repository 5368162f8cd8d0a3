import io
import os
import re

import pytest
from rich.cells import cell_len

from lipaudit.gate import compare
from lipaudit.report import of_comparison, render, terminal
from lipaudit.report.blocks import Curve, Heatmap, Histogram, Picture, Table
from tests.report.conftest import find_chapter, keep, rename, show


@pytest.mark.parametrize("width", [60, 100])
def test_no_line_is_wider_than_the_terminal(report, other, width):
    for reports in ((report,), (report, other)):
        lines = terminal.render(show(*reports), width=width).decode().splitlines()
        assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("width", [60, 80])
def test_every_number_and_heading_survives_a_narrow_terminal(report, width):
    """The words of the narrow text are those of the full text, only laid out anew."""
    pattern = re.compile(r"[\w.%×‖/+-]*\d[\w.%×‖/+-]*")

    def words(text: bytes) -> set[str]:
        return set(pattern.findall(text.decode()))

    whole = terminal.render(show(report))
    assert words(whole) <= words(terminal.render(show(report), width=width))
    # Off a terminal no table is split.
    assert whole.decode().count("head  exact") == 1
    assert "…" not in whole.decode()


def test_colour_changes_no_word(report):
    coloured = terminal.render(show(report), width=80, colour="truecolor").decode()
    plain = terminal.render(show(report), width=80).decode()
    assert "\x1b[" in coloured
    stripped = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    outside_maps = [line for line in plain.splitlines() if not re.search("[▁▂▃▄▅▆▇█]", line)]
    assert set(outside_maps) <= {line.rstrip() for line in stripped.splitlines()}


def test_charts_are_said_in_words_and_only_the_map_of_heads_is_drawn(report):
    """A chart's place has its title and what it shows, in a terminal and in Markdown."""
    page = show(report)
    charts = [b for c in page.chapters for b in c.blocks if isinstance(b, Picture)]
    assert {type(chart) for chart in charts} == {Curve, Heatmap, Histogram}
    for name in ("table", "markdown"):
        said = " ".join(render(report, name).decode().replace("\\", "").split())
        for chart in charts:
            drawn = isinstance(chart, Heatmap) and not chart.square
            assert (f"Chart, in the html format: {chart.title}" in said) != drawn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch):
    """A terminal of 70 columns in 256 colours."""
    for name, value in {"COLUMNS": "70", "TERM": "xterm-256color", "COLORTERM": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_a_terminal_gets_its_width_and_its_colours(report, screen):
    terminal.write(show(report), screen)
    assert screen.getvalue().encode() == terminal.render(show(report), width=70, colour="256")


def test_no_color_is_honoured(report, screen, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.write(show(report), screen)
    assert screen.getvalue().encode() == terminal.render(show(report), width=70)


def no_terminal(_descriptor: int = 0) -> os.terminal_size:
    raise OSError


@pytest.mark.parametrize(("columns", "width"), [("66", 66), ("", 80)])
def test_a_pipe_gets_plain_text_as_wide_as_columns_says(report, columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("os.get_terminal_size", no_terminal)
    pipe = io.StringIO()
    terminal.write(show(report), pipe)
    assert pipe.getvalue().encode() == terminal.render(show(report), width=width)


def test_names_that_rows_go_by_are_not_broken(report, other):
    """A comparison is wider than 80 columns: its metrics stand whole in every piece of it."""
    comparison = compare([report, other])
    page = of_comparison(comparison, [report, other]).page()
    lines = terminal.render(page, width=80).decode().splitlines()
    names = {v.metric for pair in comparison.pairs for v in pair.verdicts if not v.reason}
    assert max(map(len, names)) > 80 // 3
    for name in names:
        assert sum(name in line for line in lines) >= 2, name


def test_heads_say_in_what_their_norm_is_taken(report):
    """A column that says the same of every head of most models is shown where it does not."""
    section = report.section("bounds")
    other = section.rows[0].replace(input="queries apart")
    mixed = section.model_copy(update={"rows": (other, *section.rows[1:])})
    for part, shown in ((section, False), (mixed, True)):
        blocks = find_chapter(show(keep(report, part)), "bounds").blocks
        table = next(block for block in blocks if isinstance(block, Table))
        labels = [column.label for column in table.columns]
        assert ("input" in labels) == shown
        assert all(len(row) == len(labels) for row in table.rows)


def test_names_of_wide_characters_are_wrapped_by_their_width(report, other):
    wide = rename(report, spec="模型权重/" * 12)
    lines = terminal.render(show(wide, other), width=80).decode().splitlines()
    assert max(cell_len(line) for line in lines if " " in line) <= 80
    assert sum(line.count("模型权重") for line in lines) > 12


def test_long_names_leave_room_for_the_widest_column(report, other):
    def renamed(one, spec):
        section = one.section("jacobian")
        rows = (row.replace(module="encoder.layers.11.attention.output") for row in section.rows)
        named = section.model_copy(update={"rows": tuple(rows)})
        return rename(keep(one, named), spec=spec)

    pair = renamed(report, "models/first/a/long/one"), renamed(other, "models/another/long/one")
    lines = terminal.render(show(*pair), width=80).decode().splitlines()
    rows = [line for line in lines if line.startswith("pixels")]
    assert rows
    assert max(map(cell_len, rows)) <= 80
