"""Results for other programs: strict JSON, CSV rows of plain values, JUnit, lines of a log."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import to_json

from lipaudit import schema
from lipaudit.errors import escape_controls, visible
from lipaudit.report.blocks import Cells
from lipaudit.tables import Column, Report

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from lipaudit.gate.comparison import Comparison
    from lipaudit.gate.ranking import Ranking
    from lipaudit.gate.verdicts import Judgement, Verdict

JSON = "json"


def write_json(record: BaseModel | dict[str, Any] | list[Any]) -> bytes:
    """Write a report, a comparison, a judgement or plain values as JSON.

    NaN and infinities, which JSON lacks, become strings.
    """
    if isinstance(record, Report):
        return schema.dumps(record).encode()
    text = to_json(record, indent=2, inf_nan_mode="strings").decode()
    return escape_controls(text).encode() + b"\n"


def write_csv(rows: Iterable[Cells]) -> bytes:
    """Write rows as CSV with a line of column names; missing values are empty.

    The columns are all keys of all rows, in the order of their first appearance.
    """
    rows = list(rows)
    names = dict.fromkeys(chain.from_iterable(rows))
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_format_csv, names))
    for row in rows:
        values = map(row.get, names)
        writer.writerow(map(_format_csv, values))
    return file.getvalue().encode()


def _format_csv(value: Any) -> Any:
    """Return a value for a CSV file: numbers with all digits, and zero without a sign.

    A text that a spreadsheet would read as a formula gets an apostrophe in front.
    """
    if isinstance(value, float):
        # Adding zero removes the sign of -0.0.
        return value + 0.0
    if not isinstance(value, str):
        return value
    text = visible(value)
    if text.lstrip().startswith(("=", "+", "-", "@")):
        return f"'{text}"
    return text


# A judgement for continuous integration


# XML 1.0 cannot represent these two, not even as entities.
_NOT_XML = re.compile("[\ufffe\uffff]")


def write_junit(judgement: Judgement) -> bytes:
    """Write a JUnit file with one test case per verdict, for the test pages of CI.

    An inconclusive verdict counts as a skipped test.
    """
    from xml.etree.ElementTree import Element, SubElement, indent, tostring

    # The attributes of the suite count the elements of each kind.
    kinds = Counter(_choose_kind(judgement, verdict) for verdict in judgement.verdicts)
    counts = {
        "tests": str(len(judgement.verdicts)),
        "failures": str(kinds["failure"]),
        "errors": str(kinds["error"]),
        "skipped": str(kinds["skipped"]),
    }
    root = Element("testsuites", counts)
    suite = SubElement(root, "testsuite", {"name": "lipaudit gate", **counts})
    for verdict in judgement.verdicts:
        _add_test(suite, verdict, kind=_choose_kind(judgement, verdict))
    answer = f"{judgement.reason} (exit code {judgement.exit_code})"
    SubElement(suite, "system-out").text = _xml(answer)
    if judgement.warnings:
        SubElement(suite, "system-err").text = _xml("\n".join(judgement.warnings))
    indent(root)
    return tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _add_test(suite: Element, verdict: Verdict, kind: str) -> None:
    """Add the test case of a verdict to a suite of JUnit.

    Args:
        suite: the element of the suite.
        verdict: the verdict.
        kind: name of the element within the test case, as `_choose_kind` returns it.
    """
    from xml.etree.ElementTree import SubElement

    name = f"{verdict.rule} {verdict.row}".rstrip()
    about = {"classname": _xml(verdict.metric), "name": _xml(name)}
    result = SubElement(SubElement(suite, "testcase", about), kind)
    line = _xml(verdict.line)
    if kind == "system-out":
        result.text = line
    else:
        result.attrib |= {"message": line, "type": verdict.status}


def _choose_kind(judgement: Judgement, verdict: Verdict) -> str:
    """Return the name of the JUnit element of a verdict; `system-out` for a test that passes."""
    if not judgement.fails(verdict):
        return "skipped" if verdict.status == "inconclusive" else "system-out"
    if verdict.reason:
        return "error"
    return "failure"


def _xml(text: str) -> str:
    """Return a text with control characters shown, and without characters that XML forbids."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", visible(text, keep="\n\t"))


def write_lines(lines: Sequence[str]) -> bytes:
    """Write lines of plain text; control characters are shown, not obeyed."""
    text = "\n".join(map(visible, lines))
    return f"{text}\n".encode()


# Rows of plain values, for pandas and spreadsheets


def list_rows(record: Report | Comparison | Ranking, reports: Sequence[Report]) -> Iterable[Cells]:
    """Return the cells of a report, the samples of a comparison, or the models of a ranking."""
    if isinstance(record, Report):
        return _list_cells(record)
    from lipaudit.gate.comparison import Comparison
    from lipaudit.report.judgements import list_models

    if isinstance(record, Comparison):
        return _list_samples(record)
    columns, models = list_models(record, reports)
    rows = []
    for model in models:
        rows.append({column.label: model.get(name) for name, column in columns.items()})
    return rows


def _list_cells(report: Report) -> Iterator[Cells]:
    """Yield a report in long form: one line for each cell of each table.

    A section first has lines for the cells of its rows (with an empty `sample`), then lines for
    its per-sample figures (with an empty `row`). Numbers are in `value`, words in `text`. Truth
    values are 1 and 0.
    """
    from lipaudit.gate.readings import index_rows

    places = report.places
    for section in report.sections:
        start: Cells = {"model": report.run.model.spec, "measure": section.measure}
        start |= dict.fromkeys(("row", "layer", "head", "sample", "place"))
        for name, row in index_rows(section).items():
            about = start | {"row": str(name), "layer": row.get("layer"), "head": row.get("head")}
            for key, value in row.items():
                if key not in ("layer", "head"):
                    yield about | _describe_cell(key, value, section.columns[key])
        for key, values in section.samples.items():
            if key == "ids":
                continue
            column = section.sample_column(key)
            for sample, value in zip(section.ids, values, strict=True):
                about = start | {"sample": sample, "place": places.get(sample)}
                yield about | _describe_cell(key, value, column)


def _describe_cell(name: str, value: Any, column: Column) -> Cells:
    """Return the fields of a cell in long form.

    `domain` and `status` say at which inputs and how far a figure is proven. They are empty for
    names and counts.
    """
    cell: Cells = {
        "column": name,
        "value": None,
        "text": None,
        "unit": column.unit,
        "domain": None,
        "status": None,
    }
    if isinstance(value, str):
        cell["text"] = value
    elif isinstance(value, bool):
        cell["value"] = int(value)
    else:
        cell["value"] = value
    if column.domain and column.format != "s":  # "s": a text
        cell |= {"domain": column.domain, "status": column.status}
    return cell


def _list_samples(comparison: Comparison) -> Iterator[Cells]:
    """Yield a row for each sample and pair of models: its figures, as NAME.old and NAME.new.

    `lost` and `gained` count the answers that changed from yes to no, and from no to yes.
    """
    for pair in comparison.pairs:
        for sample in pair.samples:
            cells: Cells = {
                "old": pair.old,
                "new": pair.new,
                "sample": sample.id,
                "place": sample.place or None,
                "lost": len(sample.lost),
                "gained": len(sample.gained),
            }
            for name, (old, new) in sample.figures.items():
                cells |= {f"{name}.old": old, f"{name}.new": new}
            yield cells
