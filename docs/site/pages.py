"""What the site makes from the code: pages of reference, and formulas as MathML."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import lipaudit
from lipaudit import schema
from lipaudit.report.topics import topics
from lipaudit.results import Column, measures
from lipaudit.results.bounds import SYMBOLS, catalogue

HERE = Path(__file__).parent
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code."""
    pages = {
        "bounds": _bounds,
        "columns": _columns,
        "json": _json,
        "python": _python,
        "words": _words,
    }
    for name, lines in pages.items():
        text = "\n".join(lines())
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    page = lipaudit.render(lipaudit.load(HERE / "demo.json"), "html")
    files.append(File.generated(config, "demo.html", content=page))
    return files


def on_page_content(content: str, **_: object) -> str:
    """Write formulas as MathML: a page needs no script and no network to show them."""
    return FORMULA.sub(_mathml, content)


def _mathml(formula: re.Match[str]) -> str:
    block = formula[1] == "div"
    math = convert(html.unescape(formula[2]).strip(), display="block" if block else "inline")
    # The theme lets such a block scroll by itself where it is wider than the page.
    return f'<div class="arithmatex">{math}</div>' if block else math


def _columns() -> Iterator[str]:
    yield "# Columns\n\nEvery figure of a report by section: what it is, where it holds, how far"
    yield "it is proven. The names are those of the JSON, of `lipaudit explain` and of the gate.\n"
    for record in measures().values():
        for row in record.rows:
            yield f"\n## {row.section}\n"
            yield from _table(row.columns())
        if record.samples:
            yield f"\n### {record.name}, for every sample\n"
            yield from _table(record.samples)


def _table(columns: Mapping[str, Column]) -> Iterator[str]:
    yield "| name | heading | what it is | holds | status |"
    yield "| --- | --- | --- | --- | --- |"
    for name, column in columns.items():
        proven = (column.domain, column.status) if column.domain else ("", "")
        cells = (f"`{name}`", column.label, column.meaning, *proven)
        yield f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    for mark in "|[":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("<", "&lt;")


def _bounds() -> Iterator[str]:
    yield f"# Bounds of a head\n\n{_cell(SYMBOLS)}\n"
    for bound in catalogue().values():
        yield f"\n## {bound.label}\n\n{_cell(bound.explanation)}\n"
        yield f"- in reports: `bounds.{bound.name}`"
        yield f"- formula: `{bound.formula}`"
        yield f"- holds: {_cell(bound.domain)}; status: {bound.status}"
        yield f"- source: {_cell(bound.source)}"
        if bound.null:
            yield f"- not given where it {_cell(bound.null)}"


def _words() -> Iterator[str]:
    yield "# Words\n\nWhat `lipaudit explain NAME` says of everything that pages, tables and"
    yield "notes say. Columns have [their own page](columns.md), and so have"
    yield "[bounds](bounds.md).\n"
    listed = (t for t in topics() if t.group and not t.group.startswith(("Columns", "Bounds")))
    for group, entries in groupby(listed, lambda topic: topic.group):
        yield f"\n## {group}\n"
        for topic in entries:
            more = " ".join((topic.meaning, *topic.details))
            yield f"- **{_cell(topic.name)}**: {_cell(more)}"


def _json() -> Iterator[str]:
    yield "# JSON\n\nA report is one object; `lipaudit schema` prints its JSON Schema, and"
    yield "`lipaudit schema history` that of a watched training's history. Fields are only added"
    yield "within a major `schema_version`. NaN and infinities are strings.\n"
    yield f"```json\n{json.dumps(schema.json_schema(), indent=1)}\n```"


def _python() -> Iterator[str]:
    yield "# Python API\n\nWhat `import lipaudit` gives; nothing is loaded before it is used."
    yield "[The guide](../guide/python.md) shows it at work.\n"
    for name, place in sorted(lipaudit.PUBLIC.items(), key=lambda item: item[0].lower()):
        module, _, member = place.partition(":")
        yield f"## lipaudit.{name}\n\n::: {module}{'.' * bool(member)}{member}"
        yield "    options:\n      show_root_heading: false\n      show_root_toc_entry: false"
        yield "      heading_level: 3\n"
