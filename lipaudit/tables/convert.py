"""What a report that was read lacks: columns of later versions, and in version 1 all columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lipaudit.tables.columns import NON_FINITE
from lipaudit.tables.report import Layout


def complete(document: dict[str, Any], layouts: Mapping[str, Layout]) -> None:
    """Add the columns of this version to the sections of a document, in place.

    Reports of schema version 1 have no columns: those of a section of a plug-in's measure, and of
    a plug-in's bound, are told from their cells.
    """
    sections, first = document.get("sections"), str(document["schema_version"]).startswith("1.")
    for section in sections if isinstance(sections, list) else ():
        layout = layouts.get(str(section.get("measure"))) if isinstance(section, dict) else None
        if layout is not None:
            section.setdefault("title", layout.title)
            _add_columns(section, "columns", layout.columns)
            _add_columns(section, "sample_columns", layout.sample_columns)
        # Bounds of a plug-in that is not installed have columns in no layout.
        if first and isinstance(section, dict) and (layout is None or layout.declared):
            _add_columns(section, "columns", _tell_columns(section))


def _add_columns(section: dict[str, Any], name: str, columns: Mapping[str, Any]) -> None:
    given = section.setdefault(name, {})
    if isinstance(given, dict):
        section[name] = given | {n: column for n, column in columns.items() if n not in given}


def _tell_columns(section: Mapping[str, Any]) -> dict[str, Any]:
    """Describe columns by their names and the first cell that is not null."""
    cells: dict[str, Any] = {}
    rows = section.get("rows")
    for row in rows if isinstance(rows, list) else ():
        for name, cell in row.items() if isinstance(row, dict) else ():
            cells[name] = cell if cells.get(name) is None else cells[name]
    return {name: _describe(name, cell) for name, cell in cells.items()}


def _describe(name: str, cell: Any) -> dict[str, Any]:
    text = isinstance(cell, str) and cell not in NON_FINITE
    format = "" if isinstance(cell, bool) else "s" if text else ".3g"
    return {"label": name, "meaning": "", "format": format, "domain": ""}
