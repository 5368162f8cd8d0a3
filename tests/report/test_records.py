"""JSON and CSV: every value of a report, and a row for each of several models."""

import csv
import io
import math

from lipaudit.gate import rank
from lipaudit.report import of_reports, render
from lipaudit.tables import Section
from lipaudit.tables.summary import KINDS
from tests.report.conftest import rename


def read(shown) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render(shown, "csv").decode(), newline="")))


def cells(section: Section) -> list[tuple[str, str, str, object]]:
    """The layer, sample, column and value of every cell, in order."""
    rows = [
        (str(at) if (at := row.get("layer")) is not None else "", "", name, value)
        for row in section.rows
        for name, value in row.items()
        if name not in ("layer", "head")
    ]
    ids = section.samples.get("ids", ())
    return rows + [
        ("", sample, name, value)
        for name, values in section.samples.items()
        for sample, value in zip(ids, values, strict=True)
        if name != "ids"
    ]


def same(line: dict[str, str], value: object) -> bool:
    if value is None or isinstance(value, str):
        return (line["value"], line["text"]) == ("", value or "")
    number = float(line["value"])
    return not line["text"] and (number == value or (math.isnan(number) and value != value))


def test_every_cell_of_rows_and_samples_is_a_line_that_reads_back(report):
    expected = [(s.measure, *cell) for s in report.sections for cell in cells(s)]
    ids = report.section("jacobian").samples["ids"]
    places = {name: f"cat, {i}.png" for i, name in enumerate(ids)}
    stored = {"ids": tuple(places), "place": tuple(places.values())}
    lines = read(report.model_copy(update={"samples": stored}))
    assert len(lines) == len(expected) > 1000
    for line, (measure, layer, sample, name, value) in zip(lines, expected, strict=True):
        known = (line["measure"], line["layer"], line["sample"], line["column"])
        assert known == (measure, layer, sample, name)
        assert same(line, value), line
        assert line["place"] == places.get(sample, "")
    assert {line["model"] for line in lines} == {report.run.model.spec}


def test_lines_say_what_is_proven_and_nothing_of_names(report):
    lines = {(li["measure"], li["row"], li["column"]): li for li in read(report) if li["row"]}
    exact = lines["bounds", "layer 0 head 1", "exact"]
    assert (exact["status"], exact["domain"]) == ("exact", "at X")
    assert lines["bounds", "layer 0 head 1", "theorem3"]["status"] == "bound"
    assert lines["bounds", "layer 0 head 1", "module"]["status"] == ""
    robust = next(li for li in read(report) if li["column"].startswith("robust@"))
    assert robust["status"] == "empirical"


def test_control_characters_are_shown_not_obeyed(report):
    named = rename(report, spec='a,\x1b[31m"b"\nc')
    assert {line["model"] for line in read(named)} == {r'a,\x1b[31m"b"\x0ac'}
    named = rename(report, spec='=HYPERLINK("x")')
    assert {line["model"] for line in read(named)} == {'\'=HYPERLINK("x")'}
    assert all(not line["value"].startswith("'") for line in read(named))


def test_several_reports_are_a_row_a_model(report, other):
    ranking = rank([report, other])
    lines = read(of_reports(report, other))
    assert [line["model"] for line in lines] == [model.model for model in ranking.models]
    for line, model in zip(lines, ranking.models, strict=True):
        assert line["outcome"] == model.outcome
        assert float(line["model sensitivity, median ‖J‖"]) == model.summary.norms.median
        assert float(line["steepest attention head, ‖J‖"]) == model.summary.heads.steepest[0].exact
        assert float(line["fragile attention rows"]) == model.summary.fragile.share
        for each in model.summary.accuracy:
            label = ", ".join(filter(None, (KINDS[each.kind][0], each.ball)))
            assert float(line[label]) == each.share
