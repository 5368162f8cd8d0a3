"""Views: functions that turn the columns of a section into tables, maps, histograms and curves.

A view takes the sections of one measure by report: a single report has the name "", several have
their models' names. Formats and labels come from the columns; a view knows no measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from statistics import median
from typing import Any

from lipaudit.report.blocks import Block, Table, make_table
from lipaudit.report.cells import UNMEASURED, format_value, format_with_limits, write_math
from lipaudit.report.pictures import Heatmap, Histogram, Series
from lipaudit.tables import Column, Row, Section
from lipaudit.tables.columns import naming
from lipaudit.tables.figures import finite, order

Sections = Mapping[str, Section]
View = Callable[[Sections], Iterable[Block]]

FIT = 20
"""Tables with at most this many rows are shown completely."""
TOP = 10
"""Number of rows shown of longer tables."""
HEAD = Column(label="head", meaning="LAYER.HEAD, a layer or the model.", format="s")
MODEL = Column(label="model", meaning="The report that the row comes from.", format="s")


# Rows


def find_columns(sections: Sections) -> dict[str, Column]:
    """Return the columns of all sections; `head` reads LAYER.HEAD."""
    columns = {name: c for section in sections.values() for name, c in section.columns.items()}
    return columns | {"head": HEAD} if "head" in columns else columns


def read_rows(section: Section) -> list[Row]:
    """Return the rows of a section; `head` is LAYER.HEAD, `layer N` or `model`."""
    rows = list(section.rows)
    if "head" in section.columns:
        rows = [row.replace(head=name_head(row.layer, row.head)) for row in rows]
    if "eps_text" in section.columns:  # early reports store the number alone
        rows = [row.replace(eps_text=row.trial.radius.text) for row in rows]
    return rows


def read_all(sections: Sections) -> list[Row]:
    """Return the rows of all reports; `model` is the name of the report."""
    return [row.replace(model=k) for k, section in sections.items() for row in read_rows(section)]


def name_head(layer: int | None, head: int | None) -> str:
    """Name a head LAYER.HEAD; without a head the layer, without a layer the model."""
    if layer is None:
        return "model"
    return f"layer {layer}" if head is None else f"{layer}.{head}"


def pick_largest(rows: Sequence[Row], name: str, most: int = TOP) -> list[Row]:
    """Return the rows with the largest values of a column, all of them if they fit a table."""
    ranked = sorted(rows, key=lambda row: -order(row[name]))
    return ranked if len(rows) <= FIT else ranked[:most]


def tabulate(
    title: str = "",
    names: Sequence[str] = (),
    *,
    keys: Sequence[str] = (),
    by: str = "",
    most: int = TOP,
    strong: str = "",
) -> View:
    """Return a view of rows; rows of several reports with equal keys are adjacent.

    Limits (NAME_low, NAME_high) are shown in brackets; columns without values are left out.

    Args:
        title: title of the table.
        names: columns; by default all.
        keys: columns that identify a row; by default those that name it.
        by: a column; rows with its largest values come first, at most `most` of many rows.
        most: see `by`.
        strong: rows with this first cell are emphasised.
    """

    def view(sections: Sections) -> Iterator[Block]:
        columns, several = find_columns(sections), "" not in sections
        rows = {label: read_rows(section) for label, section in sections.items()}
        if by:
            rows = {label: pick_largest(each, by, most) for label, each in rows.items()}
        lines = [(label, row) for label, each in rows.items() for row in each]
        known = {n for n in columns if any(row.get(n) not in ("", None) for _, row in lines)}
        # By default the columns that name a row do, `head` in place of layer and head.
        names_of_rows = [n for n in naming(columns) if n != "module"]
        if "head" in names_of_rows:
            names_of_rows = [n for n in names_of_rows if n != "layer"]
        about = [n for n in keys or names_of_rows if n in known]
        first: dict[tuple[Any, ...], int] = {}
        for _, row in lines:
            first.setdefault(tuple(row.get(n) for n in about), len(first))
        lines.sort(key=lambda line: first[tuple(line[1].get(n) for n in about)])
        limits = {f"{name}{end}" for name in columns for end in ("_low", "_high")}
        others = [n for n in names or columns if n in known and n not in {*about, *limits}]
        if not names:
            others = [n for n in others if n not in ("layer", "module") or "layer" not in columns]
        shown: list[tuple[Column, list[Any]]] = [
            *((columns[n], [row.get(n) for _, row in lines]) for n in about),
            *([(MODEL, [label for label, _ in lines])] if several else []),
        ]
        for name in others:
            low, high = ([row.get(f"{name}_{end}") for _, row in lines] for end in ("low", "high"))
            values = [row.get(name) for _, row in lines]
            cells = map(format_with_limits, values, low, high, repeat(columns[name]))
            shown.append((columns[name], list(cells)))
        marked = frozenset(
            i for i, (_, row) in enumerate(lines) if strong and strong in row.values()
        )
        if lines:
            yield make_table(title, shown, keys=len(about) + several, strong=marked)

    return view


def list_all_rows(sections: Sections) -> Iterator[Table]:
    """Return a folded table of every row and every column that is not empty."""
    for section in sections.values():
        rows, columns = section.rows, section.columns
        names = [n for n in columns if any(row.get(n) != "" for row in rows)]
        keys = 2 if names[:2] == ["layer", "head"] else 1
        cells = ((columns[name], [row.get(name) for row in rows]) for name in names)
        if rows:
            yield make_table(f"All rows ({len(rows)})", cells, keys=keys, folded=True)


# Maps of heads and their distribution


def map_heads(
    title: str,
    values: Mapping[tuple[int, int], float | None],
    column: Column,
    centre: float | None = None,
) -> Heatmap:
    """Arrange values by layer and head."""
    layers, heads = (sorted({key[i] for key in values}) for i in (0, 1))
    matrix = tuple(tuple(values.get((i, j)) for j in heads) for i in layers)
    names = tuple(map(str, layers)), tuple(map(str, heads))
    return Heatmap(title, matrix, *names, column, centre)


def map_column(name: str, title: str = "") -> View:
    """Return a view that maps a column over layers and heads."""

    def view(sections: Sections) -> Iterator[Block]:
        for section in sections.values():
            column = section.columns[name]
            values = {(row.layer, row.head): row.get(name) for row in section.rows}
            if any(value is not None for value in values.values()):
                heading = title or f"{write_math(column.label)} of every head"
                yield map_heads(heading, values, column)

    return view


SPREAD = (
    Column(label="statistic", meaning="A column of heads.", format="s"),
    MODEL,
    *(
        Column(label=end, meaning="Over the heads.", format="")
        for end in ("smallest", "median", "largest")
    ),
)


def spread_columns(*names: str) -> View:
    """Return a view of the distribution of columns over heads."""

    def view(sections: Sections) -> Iterator[Block]:
        columns, lines = find_columns(sections), []
        for column, name in ((columns[name], name) for name in names):
            groups = {k: finite(row[name] for row in read_rows(s)) for k, s in sections.items()}
            for label, values in groups.items():
                ends = (min(values), median(values), max(values)) if values else (None,) * 3
                texts = (format_value(end, column) for end in ends)
                lines.append((write_math(column.label), label, *texts))
        yield Table("Distribution over heads", SPREAD, tuple(lines), keys=2)

    return view


def count_samples(*names: str) -> View:
    """Return a view with histograms of per-sample columns; by default of all numbers.

    Bins are common to all reports, and logarithmic if they span more than a decade.
    """

    def view(sections: Sections) -> Iterator[Block]:
        import numpy as np

        first = next(iter(sections.values()))
        measured = (n for n, c in first.sample_columns.items() if c.format not in UNMEASURED)
        for name in names or measured:
            values = {
                label or "samples": np.array(finite(section.samples[name]))
                for label, section in sections.items()
                if name in section.samples
            }
            pooled = np.concatenate([*values.values(), np.array([])])
            if pooled.size < 2 or pooled.min() == pooled.max():
                continue
            low, high = float(pooled.min()), float(pooled.max())
            # At least 6 bins, so that few samples show a shape; at most 24, to tell them apart.
            bins = min(max(round(2 * pooled.size ** (1 / 3)), 6), 24)  # Rice's rule
            wide = low > 0 and high > 10 * low
            edges = np.geomspace(low, high, bins + 1) if wide else np.linspace(low, high, bins + 1)
            edges[0], edges[-1] = low, high  # geomspace may round its ends inwards
            counts = {k: tuple(map(float, np.histogram(v, edges)[0])) for k, v in values.items()}
            column = first.sample_column(name)
            title = f"{write_math(column.label)} per sample"
            yield Histogram(title, column, tuple(map(float, edges)), counts)

    return view


# Points and lines


def make_series(label: str, rows: Iterable[Row], x: str, y: str) -> Series:
    """Return a line through the rows that have both columns, with the limits of y."""
    known = sorted((r for r in rows if len(finite((r[x], r[y]))) == 2), key=lambda r: r[x])
    across, up = (tuple(float(row[name]) for row in known) for name in (x, y))
    low, high = (tuple(row.get(f"{y}_{end}") for row in known) for end in ("low", "high"))
    return Series(label, across, up, low, high)


def group_rows(rows: Iterable[Row], name: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Return the rows of each name."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


def view_unknown(sections: Sections) -> Iterator[Block]:
    """Show a section by its columns alone: maps of judged columns, rows, histograms."""
    first = next(iter(sections.values()))
    columns = first.columns
    if "" in sections and all(n in columns and columns[n].needed for n in ("layer", "head")):
        for name, column in columns.items():
            if column.better:
                yield from map_column(name)(sections)
    yield from tabulate()(sections)
    yield from count_samples()(sections)
