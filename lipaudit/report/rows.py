"""Rows of the sections of one or several reports, named by head, by radius and by model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from lipaudit.measures import find_headline
from lipaudit.report.blocks import Heatmap, Table
from lipaudit.report.cells import HEADINGS, format_with_limits
from lipaudit.tables import Column, Row, Section
from lipaudit.tables.columns import group_values, list_keys, list_ratios, order
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
    """Return the columns of all sections, by name.

    If there is a column `head`, it comes first, with the description of names such as 3.11
    (LAYER.HEAD).
    """
    columns: dict[str, Column] = {}
    for section in sections.values():
        columns |= section.columns
    if "head" not in columns:
        return columns
    head = {"head": HEADINGS["head"]}
    # The first `head` sets the place of the column, the last one sets its description.
    return head | columns | head


def read_rows(sections: Sections) -> list[Row]:
    """Return the rows of all reports, with names for pages: of models, heads and radii.

    The cell `model` is the label of the report. Without a label the row's own cell stays. The cell
    `head` is LAYER.HEAD, and `eps_text` the radius as typed.
    """
    rows = []
    for label, section in sections.items():
        for row in section.rows:
            names = {"model": label or row.get("model", "")}
            if "head" in section.columns:
                names["head"] = name_head(row)
            if "eps_text" in section.columns:  # early reports store the number alone
                names["eps_text"] = row.trial.radius.text
            rows.append(row.replace(**names))
    return rows


def name_head(row: Row) -> str:
    """Return the name of a row: 3.11 (LAYER.HEAD), `layer 3` or `model`."""
    if row.layer is None:
        return "model"
    if row.head is None:
        return f"layer {row.layer}"
    return f"{row.layer}.{row.head}"


def add_model(label: str, title: str) -> str:
    """Return a title that begins with the name of its report; an empty name leaves it as it is."""
    if not label:
        return title
    return f"{label}: {title}"


def map_heads(
    title: str,
    values: Mapping[tuple[int, int], float | None],
    column: Column,
    centre: float | None = None,
) -> Heatmap:
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
        matrix.append([values.get((layer, head)) for head in heads])
    rows = list(map(str, layers))
    columns = list(map(str, heads))
    return Heatmap(title, matrix, rows=rows, columns=columns, column=column, centre=centre)


# Verdicts, and sections that a page makes


def write_arrows(text: str) -> str:
    """Write the arrows of verdicts as pages do: `64.8% → 51.6%`."""
    return text.replace("->", "→")


def read_change(verdict: Verdict) -> float | None:
    """Return the paired change, else the change of the two figures."""
    return verdict.change if verdict.paired is None else verdict.paired


def list_distinct(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts on figures that can be compared, each figure once.

    Several measures have the clean accuracy, for example: the verdict on most samples counts.
    """
    distinct: dict[str, Verdict] = {}
    for verdict in verdicts:
        name, _, stat = verdict.metric.partition(":")  # `jacobian.norm` and `p95`
        # The figure on the scorecard, if any: several measures may have the same.
        headline = find_headline(name)
        if headline is not None:
            name = headline.name
        figure = f"{name} {stat} {verdict.row}"
        # A verdict with a reason is on a figure that cannot be compared. The first verdict on a
        # figure is compared with itself, so it is stored.
        if not verdict.reason and verdict.samples >= distinct.get(figure, verdict).samples:
            distinct[figure] = verdict
    return list(distinct.values())


def read_verdict(verdict: Verdict) -> dict[str, Any]:
    """Return the fields of a verdict as cells of a table, with its figures as texts."""
    texts = verdict.texts  # a new dictionary at each call
    # Without a test there is no paired change: show the change of the two values.
    texts["paired"] = texts["paired"] or texts["change"]
    return {
        **dict(verdict),
        **texts,
        "figure": verdict.subject,
        "metric": f"{verdict.metric} {verdict.row}".rstrip(),
        "samples": verdict.samples or None,
    }


def tabulate_rows(
    columns: Mapping[str, Column],
    rows: Iterable[Mapping[str, Any]],
    title: str = "",
    keys: int = 1,
    **how: Any,
) -> list[Table]:
    """Return a list with one table of these rows; an empty list without rows.

    Pages use this function for tables that are no section of a report, such as a ranking.

    Args:
        columns: the columns by name; columns without any value are left out.
        rows: the cells of each row by name of the column. A column without a cell shows a missing
            value; a cell without a column is not shown.
        title: printed above the table.
        keys: number of leading columns that name the row.
        how: other attributes of the table, such as `folded`.
    """
    # `model_construct` skips the checks of cells: here, a column of counts may have a median of
    # 2.5.
    section = Section.model_construct(
        measure="", columns=dict(columns), rows=tuple(map(Row, rows))
    )
    return [replace(table, title=title, keys=keys, **how) for table in tabulate({"": section})]


# Tables of columns


def tabulate(sections: Sections, names: Sequence[str] = (), by: str = "") -> Iterator[Table]:
    """Yield one table of the rows of a measure, in one report or in several; none without rows.

    The keys of a row are the columns that name it, such as `head`. Rows of several reports with
    equal keys are adjacent. Confidence limits (NAME_low, NAME_high) are shown in brackets behind
    the figure NAME. Columns without values are left out.

    Args:
        sections: the section of one report (named ""), or of several by the names of their models.
        names: the columns to show. `_choose_columns` adds the closest bound of each status. Empty:
            all columns.
        by: a column; of many rows, only rows with the largest values in this column are shown.
    """
    rows = _select_rows(sections, by)
    columns = _choose_columns(find_columns(sections), rows, names)
    keys = list_keys(columns)
    rows = _gather_rows(rows, keys)
    if "" not in sections:  # several reports: the name of the model follows the keys
        leading = {name: columns[name] for name in keys}
        columns = leading | {"model": HEADINGS["model"]} | columns
        keys = [*keys, "model"]
    lines = []
    for row in rows:
        line = []
        for name, column in columns.items():
            low = row.get(f"{name}_low")
            high = row.get(f"{name}_high")
            line.append(format_with_limits(row.get(name), low, high, column))
        lines.append(line)
    # Emphasised: the rows of all attacks together.
    strong = {i for i, row in enumerate(rows) if row.get("attack") == WORST}
    if rows:
        yield Table(
            title="", columns=[*columns.values()], rows=lines, keys=len(keys), strong=strong
        )


def _select_rows(sections: Sections, by: str) -> list[Row]:
    """Return the rows of all reports; of a report with many rows, only the largest values.

    Args:
        sections: the sections by report.
        by: the column that sorts the rows of each report; empty: all rows in their order.
    """
    rows = []
    for label, section in sections.items():
        group = read_rows({label: section})
        if by:
            group.sort(key=lambda row: -order(row[by]))
            if len(group) > FIT:  # a page has no room for all rows: only the TOP largest
                group = group[:TOP]
        rows += group
    return rows


def _choose_columns(
    columns: Mapping[str, Column], rows: Sequence[Row], names: Sequence[str]
) -> dict[str, Column]:
    """Return the columns of a table by name, without columns that are empty in every row.

    Args:
        columns: all columns of the section.
        rows: the rows of the table.
        names: the columns to show; the closest bounds are added. Empty: all columns.
    """
    hidden = set()
    for name in columns:  # limits are shown beside their value
        hidden |= {f"{name}_low", f"{name}_high"}
    if "head" in columns:  # a head is named LAYER.HEAD, so the layer needs no column
        hidden |= {"layer", "module"}
    wanted = [name for name in columns if name not in hidden]
    if names:
        # The columns with a formula are bounds. With exact norms, only the closest are shown.
        bounds = [name for name in wanted if columns[name].formula]
        if "exact" in columns:
            bounds = list(find_closest_bounds(columns, rows).values())
        wanted = [*names, *(name for name in bounds if name not in names)]
    shown = {}
    for name in wanted:
        if name not in columns:  # in a report of another version
            continue
        column = columns[name]
        # A text or truth value (format "s" or "") also counts as empty if it is the default.
        empty: set[Any] = {"", None}
        if column.format in ("s", ""):
            empty.add(column.default)
        values = {row.get(name) for row in rows}
        if values - empty:
            shown[name] = column
    return shown


def find_closest_bounds(columns: Mapping[str, Column], rows: Sequence[Row]) -> dict[str, str]:
    """Return the name of the closest bound for each status.

    A bound with the status `certified` holds on the whole domain; other bounds hold at the samples
    only. The closest bound has the smallest median, over heads, of bound / exact norm.
    """
    closest: dict[str, str] = {}
    for name in list_ratios(columns, rows):  # the closest bound comes first
        closest.setdefault(columns[name].status, name)
    return closest


def _gather_rows(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Return the rows in an order in which rows with equal keys are adjacent."""
    groups = group_values((tuple(map(row.get, keys)), row) for row in rows)
    return list(chain.from_iterable(groups.values()))
