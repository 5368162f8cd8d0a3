"""Reports as JSON: strict JSON is written, a damaged file gives one clear error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from lipaudit.errors import InputError, escape_controls, neighbours, suggestion
from lipaudit.measures import layouts, summarise
from lipaudit.tables import Report, Row, Section
from lipaudit.tables.columns import NON_FINITE
from lipaudit.tables.report import SCHEMA_VERSION
from lipaudit.tables.summary import SUMMARY, describe_figure, find_section

REPORT = "lipaudit.report"


def dumps(report: Report) -> str:
    """Write a report as strict JSON (NaN and infinities are strings), one row per line.

    The summary comes before the sections that it is computed from. `loads` keeps the figures of
    measures that are not installed; all others are computed again.
    """
    document = json.loads(report.model_dump_json(by_alias=True))
    sections = document.pop("sections")
    if not report.run.model.quantised:  # the field is written for quantised weights only
        del document["run"]["model"]["quantised"]
    # The summary is no field of a report: it is computed here.
    summary = json.loads(summarise(report).model_dump_json())
    return escape_controls(_layout(document | {"summary": summary, "sections": sections})) + "\n"


def loads(text: str, *, name: str = "report") -> Report:
    """Read a report.

    Args:
        text: JSON, as `dumps` writes it.
        name: what error messages call the report, such as its path.

    Raises:
        InputError: the text is not a report of this or the previous major version.
    """
    document = _parse(text, name)
    if not isinstance(document, dict) or document.get("schema") != REPORT:
        raise InputError(f"{name} is not a lipaudit report", "Name a file written with -f json.")
    version = document.get("schema_version")
    if str(version or "").split(".")[0] not in ("1", "2"):
        text = f"{name} has schema version {version}, not {SCHEMA_VERSION}"
        raise InputError(text, "Read it with the version of lipaudit that wrote it.")
    if document.pop("shard", None) is not None:
        raise InputError(
            f"{name} is a shard that an earlier version wrote, with some of the samples",
            "Merge it with that version, or measure again with --shard i/n --parts FOLDER.",
        )
    # The summary is computed again from the sections. Figures of measures that are not installed
    # cannot be computed: these are taken from the stored summary.
    document["figures"] = _list_figures(document.pop("summary", None))
    _add_missing_columns(document)
    document["schema_version"] = SCHEMA_VERSION  # reports are written in this version
    try:
        return Report.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = f"{name} is damaged: {where}: {first['msg']}"
        raise InputError(text, "Write the report again.") from None


def _parse(text: str, name: str) -> Any:
    """Return the values of a JSON text.

    Raises:
        InputError: the text is not strict JSON; the message calls it by `name`.
    """
    try:
        # `from_json` refuses NaN, lone surrogates and deep nesting. `json.loads` is called for
        # `_read_integer`, which refuses integers that are too large for a float.
        document = from_json(text, allow_inf_nan=False)
        json.loads(text, parse_int=_read_integer)
    except ValueError as error:
        advice = "Check that the file is complete."
        raise InputError(f"{name} is not JSON: {error}", advice) from None
    return document


def to_json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values after a round trip through JSON: a fresh report then equals a stored one."""
    return json.loads(json.dumps(dict(values), default=str))


def load(path: Path | str) -> Report:
    """Read a report from a file.

    Raises:
        InputError: the file is missing, unreadable or not a report.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        if file.exists():
            known = []
        else:  # the name may be misspelled: suggest the files beside it
            known = neighbours(file)
        advice = suggestion(str(path), known, "Check the path.")
        raise InputError(f"cannot read {path}: {reason}", advice) from None
    return loads(text, name=str(path))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report file: a report with a summary in place of `figures`."""
    schema = Report.model_json_schema(by_alias=True)
    schema["properties"]["summary"] = {"$ref": "#/$defs/Section"}
    del schema["properties"]["figures"]
    return schema


def _list_figures(summary: Any) -> list[Row]:
    """Return the rows of a stored summary that this installation cannot compute again.

    They are of measures that are not installed here.
    """
    if not isinstance(summary, dict):
        return []
    known = layouts()
    try:
        rows = SUMMARY.section(rows=summary.get("rows")).rows
        figures = [row for row in rows if find_section(row) not in known]
        # Rows that no column can describe raise an error here: nothing else is done with this
        # section.
        columns = {row.metric: asdict(describe_figure(row)) for row in figures}
        Section.model_validate({"measure": SUMMARY.name, "columns": columns})
    except ValidationError:  # an earlier version wrote the summary in another form: leave it out
        return []
    return figures


# Additions to old reports: columns of later versions, and in version 1 all columns


def _add_missing_columns(document: dict[str, Any]) -> None:
    """Add the columns of this version to the sections of a document, in place.

    Reports of schema version 1 have no columns. Columns of plug-ins, and those that have been
    removed since, are derived from the cells.
    """
    sections = document.get("sections")
    if not isinstance(sections, list):
        return
    known = layouts()
    is_version_1 = str(document["schema_version"]).startswith("1.")
    for section in sections:
        if not isinstance(section, dict):  # damaged: the check of the report says so later
            continue
        layout = known.get(str(section.get("measure")))
        if layout is not None:
            section.setdefault("title", layout.title)
            _add_columns(section, "columns", layout.columns)
            _add_columns(section, "sample_columns", layout.sample_columns)
        # Columns that were removed since, and those of a plug-in that is not installed.
        if is_version_1:
            _add_columns(section, "columns", _derive_columns(section))


def _add_columns(section: dict[str, Any], name: str, columns: Mapping[str, Any]) -> None:
    """Add to the field `name` of a section the columns that it lacks; those it has stay."""
    given = section.setdefault(name, {})
    if isinstance(given, dict):
        for key, column in columns.items():
            given.setdefault(key, column)


def _derive_columns(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return descriptions of the columns of a section that has none, from its cells.

    The first cell that is not null decides the format: a truth value, a text or a number.
    """
    cells: dict[str, Any] = {}
    rows = section.get("rows")
    if not isinstance(rows, list):
        return {}
    for row in rows:
        if isinstance(row, dict):
            for name, cell in row.items():
                if cells.get(name) is None:
                    cells[name] = cell
    columns = {}
    for name, cell in cells.items():
        format = ".3g"
        if isinstance(cell, bool):
            format = ""
        elif isinstance(cell, str) and cell not in NON_FINITE:  # NaN is written as a text
            format = "s"
        columns[name] = {"label": name, "meaning": "", "format": format, "domain": ""}
    return columns


def _read_integer(digits: str) -> int:
    """Read an integer of a JSON text; refuse one of more than 64 bits.

    A float cannot hold every integer, and no figure of a report is that large.

    Raises:
        ValueError: the integer is larger.
    """
    number = int(digits)
    if abs(number) >= 1 << 64:
        raise ValueError(f"{digits[:9]}... is too long for a number in a report")
    return number


def _layout(value: Any, depth: int = 0) -> str:
    """Return a value as indented JSON, with every row, column and array on one line.

    Short values, and those that are deep inside the document, are on one line, too.

    Args:
        value: plain values.
        depth: how deep the value is inside the document, 0 for the document.
    """
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Depth 4 is that of a column or row: document, sections, section, rows, row.
    if depth > 4 or len(flat) < 80 or _fits_one_line(value, depth):
        return flat
    if isinstance(value, dict):
        left = "{"
        right = "}"
        items = [f"{json.dumps(key)}: {_layout(inner, depth + 1)}" for key, inner in value.items()]
    else:
        left = "["
        right = "]"
        items = [_layout(inner, depth + 1) for inner in value]
    end = "\n" + "  " * depth
    pad = f"{end}  "
    lines = f",{pad}".join(items)
    return f"{left}{pad}{lines}{end}{right}"


def _fits_one_line(value: Any, depth: int) -> bool:
    """Say whether a value of the report file is written on one line.

    A line holds the description of a column, a number, a text, or a list or an object that
    contains only numbers and texts. A row of a table is such an object.
    """
    if isinstance(value, dict):
        # The description of a column is at depth 4: document, sections, section, columns, column.
        # A column stays on one line even if it contains lists.
        if depth == 4 and "label" in value:
            return True
        value = list(value.values())
    if not isinstance(value, list):
        return True
    return not any(isinstance(inner, dict | list) for inner in value)
