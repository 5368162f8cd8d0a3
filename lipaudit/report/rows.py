"""Rows of the sections of one or several reports, named by head, by radius and by model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

from lipaudit.report import blocks, cells
from lipaudit.report.blocks import Table
from lipaudit.tables import Column, Row, Section
from lipaudit.tables.columns import find_bounds, finite, group_values, log10_ratio, naming, order
from lipaudit.tables.trials import WORST

if TYPE_CHECKING:
    from lipaudit.gate.verdicts import Verdict

Sections = Mapping[str, Section]
"""Sections of one measure by report: a single one has the name "", several those of models."""
FIT = 20
"""Tables with at most this many rows are shown completely."""
TOP = 10
"""Number of rows shown of longer tables."""


def find_columns(sections: Sections) -> dict[str, Column]:
    """Return the columns of all sections; `head` reads LAYER.HEAD and comes first."""
    columns: dict[str, Column] = {}
    for section in sections.values():
        columns |= section.columns
    if "head" not in columns:
        return columns
    head = {"head": cells.HEADINGS["head"]}
    return head | columns | head  # first for the order, last because its description counts


def read_rows(sections: Sections) -> list[Row]:
    """Return the rows of all reports; `head` is LAYER.HEAD, `model` the label of the report."""
    rows = []
    for label, section in sections.items():
        for row in section.rows:
            names: dict[str, Any] = {"model": label or row.get("model", "")}
            if "head" in section.columns:
                names["head"] = name_head(row)
            if "eps_text" in section.columns:  # early reports store the number alone
                names["eps_text"] = row.trial.radius.text
            rows.append(row.replace(**names))
    return rows


def name_head(row: Row) -> str:
    """Return LAYER.HEAD; without a head the layer, without a layer the model."""
    if row.layer is None:
        return "model"
    if row.head is None:
        return f"layer {row.layer}"
    return f"{row.layer}.{row.head}"


def add_model(label: str, title: str) -> str:
    """Return a title with the name of its report before it, if there are several."""
    if not label:
        return title
    return f"{label}: {title}"


def map_heads(
    title: str,
    values: Mapping[tuple[int, int], float | None],
    column: Column,
    centre: float | None = None,
) -> blocks.Heatmap:
    """Return a map of values by layer and head, blank where a layer has no such head.

    Args:
        title: printed above the map.
        values: the value of each head, by layer and head.
        column: formats the values.
        centre: the neutral value of a scale with two sides, such as 0 of changes.
    """
    layers = sorted({layer for layer, _ in values})
    heads = sorted({head for _, head in values})
    matrix = []
    for layer in layers:
        matrix.append(tuple(values.get((layer, head)) for head in heads))
    rows = tuple(map(str, layers))
    columns = tuple(map(str, heads))
    return blocks.Heatmap(title, tuple(matrix), rows, columns, column, centre=centre)


# Sections that a page makes


def read_verdict(verdict: Verdict) -> dict[str, Any]:
    """Return the fields of a verdict as cells of a table, with its figures as texts.

    Empty texts become None, so that a column without any is left out.
    """
    texts = {name: text or None for name, text in verdict.texts.items()}
    figure = f"{verdict.metric} {verdict.row}".rstrip()
    return {**dict(verdict), **texts, "metric": figure, "samples": verdict.samples or None}


def tabulate_rows(
    columns: Mapping[str, Column],
    rows: Iterable[Mapping[str, Any]],
    title: str = "",
    keys: int = 1,
    **how: Any,
) -> list[Table]:
    """Return the table of a section that a page makes, such as of a ranking; none without rows.

    Args:
        columns: its columns; those without a value are left out, as in every section.
        rows: its cells; those that a row lacks are missing, those of no column are not shown.
        title: printed above the table.
        keys: number of leading columns that name the row.
        how: other attributes of the table.
    """
    # Not checked, as sections of a file are: medians of counts may be no whole numbers.
    section = Section.model_construct(
        measure="", columns=dict(columns), rows=tuple(map(Row, rows))
    )
    return [replace(table, title=title, keys=keys, **how) for table in tabulate({"": section})]


# Tables of columns


def tabulate(sections: Sections, names: Sequence[str] = (), by: str = "") -> Iterator[Table]:
    """Tabulate rows; rows of several reports with equal keys are adjacent.

    Limits (NAME_low, NAME_high) are shown in brackets. Columns without values are left out.

    Args:
        sections: the sections by report.
        names: columns; the closest bound of each status follows. By default all columns.
        by: a column; of many rows, those with its largest values are shown.
    """
    rows = _select_rows(sections, by)
    shown = _choose_columns(find_columns(sections), rows, names)
    keys = naming(shown) if shown else []
    rows = _gather_rows(rows, keys)
    if "" not in sections:  # the model follows the keys
        pairs = list(shown.items())
        pairs.insert(len(keys), ("model", cells.HEADINGS["model"]))
        shown = dict(pairs)
        keys = [*keys, "model"]
    lines = []
    for row in rows:
        line = []
        for name, column in shown.items():
            low = row.get(f"{name}_low")
            high = row.get(f"{name}_high")
            line.append(cells.format_with_limits(row.get(name), low, high, column))
        lines.append(tuple(line))
    strong = {i for i, row in enumerate(rows) if row.get("attack") == WORST}
    if rows:
        yield Table("", tuple(shown.values()), tuple(lines), len(keys), strong)


def _select_rows(sections: Sections, by: str) -> list[Row]:
    """Return the rows of all reports; of many rows, those with the largest values of a column.

    Args:
        sections: the sections by report.
        by: the column; empty: all rows.
    """
    rows: list[Row] = []
    for label, section in sections.items():
        group = read_rows({label: section})
        if by:
            group.sort(key=lambda row: -order(row[by]))
            if len(group) > FIT:
                group = group[:TOP]
        rows += group
    return rows


def _choose_columns(
    columns: Mapping[str, Column], rows: Sequence[Row], names: Sequence[str]
) -> dict[str, Column]:
    """Return the columns of a table by name, without columns that say nothing of any row.

    Args:
        columns: all columns of the section.
        rows: the rows of the table.
        names: the columns to show, which the closest bounds follow; empty: all.
    """
    hidden = set()
    for name in columns:  # limits are shown beside their value
        hidden |= {f"{name}_low", f"{name}_high"}
    if "head" in columns:  # `head` names the layer, too
        hidden |= {"layer", "module"}
    every = [name for name in columns if name not in hidden]
    wanted = every
    if names:
        bounds = [name for name in every if columns[name].formula]
        if "exact" in columns:
            bounds = list(find_closest_bounds(columns, rows).values())
        wanted = [*names, *(name for name in bounds if name not in names)]
    shown = {}
    for name in wanted:
        if name not in columns:  # in a report of another version
            continue
        column = columns[name]
        # Texts and truth values that equal their default in every row are left out, too.
        empty: set[Any] = {"", None}
        if column.format in ("s", ""):
            empty.add(column.default)
        values = {row.get(name) for row in rows}
        if values - empty:
            shown[name] = column
    return shown


def find_closest_bounds(columns: Mapping[str, Column], rows: Sequence[Row]) -> dict[str, str]:
    """Return the name of the closest bound for each status: certified, or at the samples only.

    It has the smallest ratio to the exact norm at the median head.
    """
    closest: dict[str, str] = {}
    smallest: dict[str, float] = {}
    for name, column in find_bounds(columns).items():
        ratios = finite(log10_ratio(row, name) for row in rows)  # logarithms
        if not ratios:
            continue
        ratio = median(ratios)
        if ratio < smallest.get(column.status, math.inf):
            smallest[column.status] = ratio
            closest[column.status] = name
    return closest


def _gather_rows(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Return the rows with those of equal keys beside each other."""
    groups = group_values((tuple(map(row.get, keys)), row) for row in rows)
    return list(chain.from_iterable(groups.values()))
