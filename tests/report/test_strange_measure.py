"""A measure that nobody here has heard of: its columns are all that the page needs."""

import re

import pytest

from lipaudit import schema
from lipaudit.report import of_comparison, of_reports, render
from lipaudit.report.blocks import Heatmap, Histogram, Table
from lipaudit.report.sections import show_section, show_sections
from lipaudit.tables import Note
from tests.report.conftest import keep
from tests.strangers import HEAT, SPREAD, register
from tests.strangers import registry as registry

pytestmark = pytest.mark.usefixtures("blank_charts")

PAGES = ("table", "markdown", "html")


@pytest.fixture
def strange(monkeypatch, registry):
    """Two sections of measures that are registered as a plug-in would."""
    register(monkeypatch, SPREAD)
    register(monkeypatch, HEAT)
    rows = [
        SPREAD.row(stage="stem", depth=0, spread=1.234, share=0.5),
        SPREAD.row(stage="trunk", depth=3, spread=None, share=0.25),
    ]
    samples = {"ids": tuple("abc"), "tension": (1.0, 2.0, 4.0), "ok": (1, 0, 1)}
    note = Note(level="warning", code="odd", text="One stage was left out.")
    spread = SPREAD.section(settings={"k": 3}, rows=rows, samples=samples, notes=(note,))
    heads = [HEAT.row(layer=i, head=j, heat=i + j / 10) for i in range(2) for j in range(3)]
    return spread, HEAT.section(rows=heads)


@pytest.fixture
def strangers(report, strange):
    return keep(report, *strange)


def test_it_is_written_and_read_back(strangers):
    assert schema.loads(render(strangers, "json").decode()) == strangers


@pytest.mark.parametrize("name", PAGES)
def test_its_columns_say_how_they_are_written(strangers, name):
    text = render(strangers, name).decode().replace("\\", "")
    shown = ["spread", "Settings: k 3.", "‖S‖", "1.23 nat", "–", "50.0%", "trunk", "One stage"]
    assert [words for words in shown if words not in text] == []
    assert re.search(r"[ᵃᵇᶜ] estimate in the ball", text)
    assert re.search(r"[ᵃᵇᶜ] exact at X", text)
    assert "How hot heads are" in text
    assert re.search(r"^(## |<h2>)?spread( <a .*</h2>)?$", text, re.MULTILINE)


def test_figures_of_heads_are_mapped_and_those_of_samples_counted(strange):
    spread, heat = map(show_section, strange)
    (bars,) = (block for block in spread if isinstance(block, Histogram))
    assert (bars.title, len(bars.values["samples"])) == ("tension per sample", 3)
    (mapped,) = (block for block in heat if isinstance(block, Heatmap))
    assert mapped.column.label == "T"
    assert mapped.values == ((0.0, 0.1, 0.2), (1.0, 1.1, 1.2))


@pytest.mark.parametrize("name", PAGES)
def test_reports_with_it_stand_side_by_side(strangers, strange, name):
    text = render(of_reports(strangers, strangers), name).decode()
    assert text.count("trunk") == 2
    assert "tension per sample" in text


def test_rows_of_one_name_stand_together(strange):
    tables = [b for b in show_sections(dict.fromkeys("AB", strange[1])) if isinstance(b, Table)]
    first = [(f"0.{head}", model, head / 10) for head in (0, 1) for model in "AB"]
    assert [row[:3] for row in tables[0].rows[:4]] == first


@pytest.mark.parametrize("name", PAGES)
def test_a_comparison_shows_what_changed_of_it(strangers, strange, name):
    from lipaudit.gate import compare

    spread, heat = strange
    hotter = [row.replace(heat=2 * row.heat + 0.1) for row in heat.rows]
    changed = keep(strangers, spread, heat.model_copy(update={"rows": tuple(hotter)}))
    reports = [strangers, changed]
    text = render(of_comparison(compare(reports), reports), name).decode()
    assert "heat.heat: change of every head" in text
    assert "heat.heat:median" in text
    assert "spread.tension:median" in text
