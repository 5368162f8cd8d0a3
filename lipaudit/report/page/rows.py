"""Rows of sections as a page reads them: named by head, by radius and by model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from lipaudit.report.words import HEADINGS
from lipaudit.tables import Column, Row, Section
from lipaudit.tables.figures import order

Sections = Mapping[str, Section]
FIT = 20
"""Tables with at most this many rows are shown completely."""
TOP = 10
"""Number of rows shown of longer tables."""


def find_columns(sections: Sections) -> dict[str, Column]:
    """Return the columns of all sections; `head` reads LAYER.HEAD and comes first."""
    columns = {name: c for section in sections.values() for name, c in section.columns.items()}
    head = {"head": HEADINGS["head"]} if "head" in columns else {}
    return head | columns | head


def read_rows(section: Section, label: str) -> list[Row]:
    """Return the rows of a section; `head` is LAYER.HEAD, `model` the label of the report."""
    rows = [row.replace(model=label) for row in section.rows]
    if "head" in section.columns:
        rows = [row.replace(head=name_head(row.layer, row.head)) for row in rows]
    if "eps_text" in section.columns:  # early reports store the number alone
        rows = [row.replace(eps_text=row.trial.radius.text) for row in rows]
    return rows


def read_all(sections: Sections) -> list[Row]:
    """Return the rows of all reports."""
    return [row for label, section in sections.items() for row in read_rows(section, label)]


def name_head(layer: int | None, head: int | None) -> str:
    """Name a head LAYER.HEAD; without a head the layer, without a layer the model."""
    if layer is None:
        return "model"
    return f"layer {layer}" if head is None else f"{layer}.{head}"


def pick_largest(rows: Sequence[Row], name: str) -> list[Row]:
    """Return the rows with the largest values of a column, all of them if they fit a table."""
    ranked = sorted(rows, key=lambda row: -order(row[name]))
    return ranked if len(rows) <= FIT else ranked[:TOP]


def group_rows(rows: Iterable[Row], name: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Return the rows of each name."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups
