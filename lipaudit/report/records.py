"""Results for other programs: strict JSON, rows of plain values as CSV, JUnit, lines of a log."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from lipaudit import schema
from lipaudit.errors import visible
from lipaudit.report.blocks import Spreadsheet
from lipaudit.report.cells import show_controls
from lipaudit.results import Column, Report, Section

if TYPE_CHECKING:
    from xml.etree import ElementTree

    from lipaudit.gate import Judgement
    from lipaudit.gate.changes import SampleChange
    from lipaudit.gate.comparison import Comparison
    from lipaudit.gate.ranking import Ranked, Ranking
    from lipaudit.gate.verdicts import Verdict


def write_json(record: BaseModel | dict[str, Any] | list[Any]) -> bytes:
    """Write a report, a comparison, a judgement or plain values."""
    if isinstance(record, Report):
        return schema.dumps(record).encode()
    if isinstance(record, BaseModel):
        return schema.escaped(record.model_dump_json(indent=2)).encode() + b"\n"
    text = json.dumps(_make_strict(record), indent=2, ensure_ascii=False, allow_nan=False)
    return schema.escaped(text).encode() + b"\n"


def _make_strict(value: Any) -> Any:
    """Return plain values with NaN and infinities as strings, as reports have them."""
    if isinstance(value, dict):
        return {key: _make_strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_make_strict(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def write_csv(frame: Spreadsheet) -> bytes:
    """Write the names, then the rows; missing values are empty, control characters are shown."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_format_csv, frame.names))
    writer.writerows([_format_csv(value) for value in row] for row in frame.rows)
    return file.getvalue().encode()


def _format_csv(value: Any) -> Any:
    """Write numbers to their last digit, zero without a sign, and inf and nan as pandas does.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    if isinstance(value, float):
        return value + 0.0
    if not isinstance(value, str):
        return value
    text = show_controls(value)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


# A judgement for continuous integration


_NOT_XML = re.compile("[\ufffe\uffff]")


def write_junit(judgement: Judgement) -> bytes:
    """Write a test case per verdict."""
    from xml.etree import ElementTree

    failed = [v for v in judgement.verdicts if judgement.fails(v)]
    errors = [v for v in failed if v.reason]
    counts = {
        "tests": str(len(judgement.verdicts)),
        "failures": str(len(failed) - len(errors)),
        "errors": str(len(errors)),
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "lipaudit gate", **counts})
    for verdict in judgement.verdicts:
        _add(suite, verdict, failed=judgement.fails(verdict))
    if judgement.warnings:
        ElementTree.SubElement(suite, "system-err").text = _xml("\n".join(judgement.warnings))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _add(suite: ElementTree.Element, verdict: Verdict, *, failed: bool) -> None:
    from xml.etree import ElementTree

    name = {
        "classname": _xml(verdict.metric),
        "name": _xml(f"{verdict.rule} {verdict.name}".rstrip()),
    }
    test = ElementTree.SubElement(suite, "testcase", name)
    if failed:
        kind = "error" if verdict.reason else "failure"
        note = {"message": _xml(verdict.line), "type": verdict.status}
        ElementTree.SubElement(test, kind, note)
    else:
        ElementTree.SubElement(test, "system-out").text = _xml(verdict.line)


def _xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", visible(text, keep="\n\t"))


def write_lines(lines: Sequence[str]) -> bytes:
    """Write lines of plain text; control characters are shown, not obeyed."""
    return ("\n".join(map(show_controls, lines)) + "\n").encode()


# Rows of plain values, for pandas and spreadsheets


LONG = (
    "model",
    "measure",
    "row",
    "layer",
    "head",
    "sample",
    "place",
    "column",
    "value",
    "text",
    "unit",
    "domain",
    "status",
)
"""Columns of a report: a line for each cell; a number is a `value`, a word is a `text`."""
AT = ("layer", "head")
"""Those of them that name rows."""


def list_cells(report: Report) -> Spreadsheet:
    """Lay a report out long: a line for each cell of its rows, then of its samples.

    A line of a row has no sample; a line of a sample has no row. Truth values are 1 and 0.
    """
    lines = (line for section in report.sections for line in _section(section, report))
    return Spreadsheet(LONG, tuple((report.run.model.spec, *line) for line in lines))


def list_models(ranking: Ranking) -> Spreadsheet:
    """Lay models out, a row each; accuracies of a ball are named `attacked@linf,2/255`."""
    rows = [dict(_model(model)) for model in ranking.models]
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    return Spreadsheet(names, tuple(tuple(row.get(name) for name in names) for row in rows))


def list_samples(comparison: Comparison) -> Spreadsheet:
    """Lay samples out, a row for each of every pair: figures and states, `.old` and `.new`."""
    rows = [
        {"old": pair.old, "new": pair.new, **dict(_sample(sample))}
        for pair in comparison.pairs
        for sample in pair.samples
    ]
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    return Spreadsheet(names, tuple(tuple(row.get(name) for name in names) for row in rows))


def _sample(sample: SampleChange) -> Iterator[tuple[str, Any]]:
    yield from (("sample", sample.id), ("place", sample.place or None))
    yield from (("lost", len(sample.lost)), ("gained", len(sample.gained)))
    for name, both in (sample.states | sample.figures).items():
        yield from zip((f"{name}.old", f"{name}.new"), both, strict=True)


def _section(section: Section, report: Report) -> Iterator[tuple[Any, ...]]:
    from lipaudit.gate.pairing import name_rows

    columns = section.columns
    for name, row in zip(name_rows(section), section.rows, strict=True):
        at = (section.measure, name, row.get("layer"), row.get("head"), None, None)
        for key in (key for key in row if key not in AT):
            value = row[key]
            yield (*at, *_cell(key, value, columns[key]))
    places = report.found("place")
    for key, values in section.samples.items():
        for sample, value in zip(section.ids, values, strict=True) if key != "ids" else ():
            of = (section.measure, None, None, None, sample, places.get(sample))
            yield (*of, *_cell(key, value, section.sample_column(key)))


def _cell(name: str, value: Any, column: Column) -> tuple[Any, ...]:
    word = isinstance(value, str)
    number = int(value) if isinstance(value, bool) else value
    proven = column.domain and column.format != "s"
    how = (column.unit, column.domain, column.status) if proven else (column.unit, None, None)
    return name, None if word else number, value if word else None, *how


def _model(model: Ranked) -> Iterator[tuple[str, Any]]:
    yield from (("rank", model.rank), ("model", model.model), ("outcome", model.outcome))
    yield from _difference(model.difference)
    for each in model.accuracy:
        ball = f"@{each.norm},{each.eps}" if each.norm else ""
        for name, value in (("", each.share), ("_low", each.low), ("_high", each.high)):
            yield f"{each.kind}{name}{ball}", value
        yield f"{each.kind}_samples{ball}", each.samples
    for name in ("median", "low", "high", "p95", "samples"):
        yield f"norm_{name}", model.norm and getattr(model.norm, name)
    head = model.head
    yield "head", head and f"{head.layer}.{head.head}"
    yield "head_norm", head and head.exact
    yield "fragile", model.fragile
    yield "reason", model.reason


def _difference(difference: Verdict | None) -> Iterator[tuple[str, Any]]:
    for name in ("paired", "low", "high", "unit", "p", "samples"):
        key = "difference" if name == "paired" else f"difference_{name}"
        yield key, difference and getattr(difference, name)
