"""Generate the reference pages of the site from the code, and write formulas as MathML."""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import lipaudit
from lipaudit import schema
from lipaudit.cli.app import Output, Terminal, app
from lipaudit.measures import AuditOptions, load_measures, option_types
from lipaudit.report.topics import list_topics
from lipaudit.settings import RunOptions
from lipaudit.settings.option import Option, Settings
from lipaudit.tables import Column
from lipaudit.theory.bounds.record import SYMBOLS, load_bounds
from lipaudit.wings.training.recipe import Recipe

HERE = Path(__file__).parent
KINDS: dict[str, type[Settings]] = {**option_types(), "audit": AuditOptions, "train": Recipe}
MEASURING = {name: (name, kind) for name, kind in KINDS.items()} | {
    "check": ("audit", RunOptions),
    "watch": ("audit", AuditOptions),
}
"""The commands that measure: the section of the page of options, and the class of the options."""
SHARED = Output.options() | Terminal.options()
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code."""
    pages = {
        "bounds": _bounds,
        "columns": _columns,
        "commands": _commands,
        "json": _json,
        "python": _python,
        "words": _words,
    }
    for name, lines in pages.items():
        text = "\n".join(lines())
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    style = (HERE / "style.css").read_text(encoding="utf-8")
    files.append(File.generated(config, "style.css", content=style))
    return files


def on_page_content(content: str, **_: object) -> str:
    """Write formulas as MathML: a page needs no script and no network to show them."""
    return FORMULA.sub(_mathml, content)


def _mathml(formula: re.Match[str]) -> str:
    block = formula[1] == "div"
    math = convert(html.unescape(formula[2]).strip(), display="block" if block else "inline")
    # The theme lets such a block scroll by itself where it is wider than the page.
    return f'<div class="arithmatex">{math}</div>' if block else math


def _commands() -> Iterator[str]:
    yield "# Commands\n\nThe help of every command, except for shared options. Those of measures"
    yield "and trainings are on [the page of options](../options.md), those of most commands"
    yield "[at the end](#most-commands).\n"
    for name, each in _leaves(typer.main.get_command(app)):
        yield f"\n## lipaudit {name}\n"
        yield from _help(each.help)
        page, kind = MEASURING.get(name, ("", None))
        elsewhere = kind.options() | RunOptions.options() if kind else {}
        yield from _parameters(each, SHARED | elsewhere)
        if page:
            yield f"\n[More options](../options.md#lipaudit-{page}), and"
            yield "[those of every measure](../options.md#every-measure-and-train)."
    yield "\n## Most commands\n\n| option | meaning |\n| --- | --- |"
    for option in SHARED.values():
        yield f"| {_flags(option.flags)} | {_cell(option.help)} |"


def _help(text: str) -> Iterator[str]:
    """Yield the paragraphs of a command's help; lists and examples stand as they are."""
    for paragraph in text.split("\n\n"):
        head, colon, rest = paragraph.partition(":")
        listed = colon and (head in ("Example", "Examples") or "\n  " in rest)
        if listed:
            yield f"{head}:\n\n```\n{textwrap.dedent(rest.strip(chr(10))).strip()}\n```\n"
        else:
            yield f"{_cell(paragraph)}\n"


def _leaves(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command by its full name."""
    for name, each in group.commands.items():
        full = f"{path} {name}".strip()
        if hasattr(each, "commands"):
            yield from _leaves(each, full)
        else:
            yield full, each


def _parameters(each: Any, elsewhere: Mapping[str, Option]) -> Iterator[str]:
    """Yield the table of a command's arguments and options that no other table has."""
    rows = [(p, p.help or "") for p in each.params if not p.hidden]
    own = [
        (parameter, said)
        for parameter, said in rows
        if parameter.name not in elsewhere or not said.startswith(elsewhere[parameter.name].help)
    ]
    if own:
        yield "| argument or option | meaning |\n| --- | --- |"
    for parameter, said in own:
        option = parameter.param_type_name == "option"
        name = parameter.opts if option else [parameter.metavar or parameter.name.upper()]
        yield f"| {_flags(name)} | {_cell(said)} |"


def _flags(flags: Iterable[str]) -> str:
    return ", ".join(f"`{flag}`" for flag in flags)


def _columns() -> Iterator[str]:
    yield "# Columns\n\nEvery figure of a report by section: its meaning, where it holds, its"
    yield "status. The names are those of the JSON, of `lipaudit explain` and of the gate.\n"
    for table in (table for record in load_measures().values() for table in record.tables):
        yield f"\n## {table.name}\n"
        yield from _table(table.columns)
        if table.sample_columns:
            yield f"\n### {table.name}, for every sample\n"
            yield from _table(table.sample_columns)


def _table(columns: Mapping[str, Column]) -> Iterator[str]:
    yield "| name | heading | meaning | holds | status |"
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
    for bound in load_bounds().values():
        yield f"\n## {bound.label}\n\n{_cell(bound.explanation)}\n"
        yield f"- in reports: `bounds.{bound.name}`"
        yield f"- formula: `{bound.formula}`"
        yield f"- holds: {_cell(bound.domain)}; status: {bound.status}"
        yield f"- source: {_cell(bound.source)}"
        if bound.null:
            yield f"- not given where it {_cell(bound.null)}"


def _words() -> Iterator[str]:
    yield "# Words\n\nThe entries of `lipaudit explain` for the words of pages, tables and notes."
    yield "[Columns](columns.md) and [bounds](bounds.md) have pages of their own.\n"
    listed = (
        t for t in list_topics() if t.group and not t.group.startswith(("Columns", "Bounds"))
    )
    for group, entries in groupby(listed, lambda topic: topic.group):
        yield f"\n## {group}\n"
        for topic in entries:
            more = " ".join((topic.meaning, *topic.details))
            yield f"- **{_cell(topic.name)}**: {_cell(more)}"


def _json() -> Iterator[str]:
    yield "# JSON\n\nThe JSON Schema of a report, as `lipaudit schema` prints it. Within a major"
    yield "`schema_version`, fields are only added. NaN and infinities are strings.\n"
    yield f"```json\n{json.dumps(schema.json_schema(), indent=1)}\n```"


def _python() -> Iterator[str]:
    yield "# Python API\n\nThe public names of `import lipaudit`; each is loaded when first used."
    yield "[Use it from Python](../guide/python.md) has examples.\n"
    for name, place in sorted(lipaudit.list_public().items(), key=lambda item: item[0].lower()):
        module, _, member = place.partition(":")
        yield f"## lipaudit.{name}\n\n::: {module}{'.' * bool(member)}{member}"
        yield "    options:\n      show_root_heading: false\n      show_root_toc_entry: false"
        yield "      heading_level: 3\n"
