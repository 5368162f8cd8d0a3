"""Reports of schema version 1: their sections have no columns, which are those of the measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lipaudit.results.columns import NON_FINITE
from lipaudit.results.measures import layouts


def convert(document: dict[str, Any]) -> None:
    """Turn a document of version 1 into one of version 2, in place.

    A section of a measure that is not installed, and a column of a bound that is not, get
    columns that are told from their cells.
    """
    sections = document.get("sections")
    for section in sections if isinstance(sections, list) else ():
        if isinstance(section, dict):
            section["columns"] = _find_columns(section)


def _find_columns(section: Mapping[str, Any]) -> dict[str, Any]:
    layout, rows = layouts().get(str(section.get("measure"))), section.get("rows")
    columns: dict[str, Any] = {} if layout is None else dict(layout.columns)
    if layout is not None and layout.declared is None:
        return columns  # a cell of no column is damage
    for row in rows if isinstance(rows, list) else ():
        for name, cell in row.items() if isinstance(row, dict) else ():
            if name not in columns or (
                cell is not None and columns[name] == _describe(name, None)
            ):
                columns[name] = _describe(name, cell)
    return columns


def _describe(name: str, cell: Any) -> dict[str, Any]:
    """Describe a column by its name and one of its cells."""
    text = isinstance(cell, str) and cell not in NON_FINITE
    format = "" if isinstance(cell, bool) else "s" if text else ".3g"
    return {"label": name, "meaning": "", "format": format, "domain": ""}
