"""Shared by all chapters of measures: tables, maps of heads, histograms, and a default view."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from lipaudit.report.blocks import Block, Table, make_table
from lipaudit.report.cells import UNMEASURED, describe_standing, format_value, write_math
from lipaudit.report.pictures import Heatmap, Histogram, Scatter, Series
from lipaudit.results import Column, Report, Row, Section
from lipaudit.results.columns import naming
from lipaudit.results.figures import finite, largest
from lipaudit.results.report import is_of_heads

View = Callable[[Section], Iterable[Block]]
SideBySide = Callable[[Mapping[str, Section]], Iterable[Block]]

FIT = 20
"""So many rows are shown whole."""
HEAD = Column(label="head", meaning="LAYER.HEAD", format="s")
MODEL = Column(label="model", meaning="The report that the row comes from.", format="s")
SAMPLE = Column(label="sample", meaning="Sample id.", format="s")
"""A column of whole sample ids: `add_places` shortens them and adds the place of each sample."""
PLACE = Column(label="place", meaning="Where the sample is found in the data.", format="s")
CHARACTERS = 12
"""How much of an id is written: enough to tell samples apart."""
LETTERS = 40
"""Letters of a text that are shown behind its place."""
SPREAD = (
    Column(label="statistic", meaning="Per-head column.", format="s"),
    MODEL,
    Column(label="standing", meaning="How far it is proven, and where.", format="s"),
    Column(label="heads", meaning="Heads with a finite value.", format="d"),
    Column(label="smallest", meaning="Over heads.", format=""),
    Column(label="median", meaning="Over heads.", format=""),
    Column(label="largest", meaning="Over heads.", format=""),
)


# Heads and samples


def name_head(row: Row) -> str:
    """Name a head as LAYER.HEAD."""
    return f"{row.layer}.{row.head}"


def find_places(report: Report) -> dict[str, str]:
    """Return where each sample is found: its place, and how it begins where it is a text."""
    texts = report.found("text")
    said = {name: f' "{text[:LETTERS]}"' for name, text in texts.items()}
    return {name: place + said.get(name, "") for name, place in report.found("place").items()}


def add_places(block: Block, known: Mapping[str, str]) -> Block:
    """Shorten the ids of a table, and say where each sample is found: beside it, at its point."""
    if isinstance(block, Scatter):
        names = [
            tuple(f"{n[:CHARACTERS]}, {known[n]}" if n in known else n for n in series.names)
            for series in block.series
        ]
        series = (replace(s, names=n) for s, n in zip(block.series, names, strict=True))
        return replace(block, series=tuple(series))
    return add_place_column(block, known) if isinstance(block, Table) else block


def add_place_column(table: Table, known: Mapping[str, str]) -> Table:
    """Shorten the ids of a table, and write beside each where the sample is found."""
    if SAMPLE not in table.columns:
        return table
    at = table.columns.index(SAMPLE)
    if not any(row[at] in known for row in table.rows):
        rows = tuple((*r[:at], r[at][:CHARACTERS], *r[at + 1 :]) for r in table.rows)
        return replace(table, rows=rows)
    columns = (*table.columns[: at + 1], PLACE, *table.columns[at + 1 :])
    rows = tuple((*r[:at], r[at][:CHARACTERS], known.get(r[at]), *r[at + 1 :]) for r in table.rows)
    return replace(table, columns=columns, rows=rows)


def format_limits(low: float | None, high: float | None) -> str:
    """Write the limits of a share; nothing where one is missing."""
    return "" if low is None or high is None else f"{low:.1%} to {high:.1%}"


# Tables


def pick_top(rows: Sequence[Row], name: str, count: int) -> list[Row]:
    """Return the rows with the largest values of a column, largest first; all where all fit."""
    return largest(rows, name, len(rows) if len(rows) <= FIT else count)


def tabulate(
    title: str, section: Section, rows: Sequence[Row], names: Sequence[str], **how: Any
) -> Table:
    """Tabulate some columns of some rows; `head` stands for LAYER.HEAD."""
    columns, cells = section.columns, [dict(row) for row in rows]
    if "head" in names:
        columns = {**columns, "head": HEAD}
        cells = [row | {"head": f"{row['layer']}.{row['head']}"} for row in cells]
    return make_table(title, ((columns[n], [row[n] for row in cells]) for n in names), **how)


def tabulate_all(section: Section, *, folded: bool = True) -> Table:
    """Tabulate all rows; columns without any value are left out."""
    cells, nothing = [dict(row) for row in section.rows], ("",) if folded else ("", None)
    names = [n for n in section.columns if any(row.get(n) not in nothing for row in cells)]
    title, keys = f"All rows ({len(cells)})", 2 if names[:2] == ["layer", "head"] else 1
    columns = ((section.columns[n], [row.get(n) for row in cells]) for n in names)
    return make_table(title if folded else "", columns, keys=keys, folded=folded)


def stack_rows(
    sections: Mapping[str, Section], names: Sequence[str], keys: Sequence[str]
) -> Table:
    """Tabulate the rows of several reports, rows with equal keys together."""
    columns = next(iter(sections.values())).columns
    rows = [(label, dict(row)) for label, s in sections.items() for row in s.rows]
    keys = [key for key in keys if any(row[key] not in ("", None) for _, row in rows)]
    first: dict[tuple[Any, ...], int] = {}
    for _, row in rows:
        first.setdefault(tuple(row[k] for k in keys), len(first))
    rows.sort(key=lambda item: first[tuple(item[1][k] for k in keys)])
    cells = {n: (columns[n], [row[n] for _, row in rows]) for n in (*keys, *names)}
    models = MODEL, [label for label, _ in rows]
    shown = [*(cells[k] for k in keys), models, *(cells[n] for n in names)]
    return make_table("", shown, keys=len(keys) + 1)


# Charts


def map_heads(
    title: str,
    values: Mapping[tuple[int, int], float | None],
    column: Column,
    centre: float | None = None,
) -> Heatmap:
    """Lay values out by layer and head."""
    layers, heads = (sorted({key[i] for key in values}) for i in (0, 1))
    matrix = tuple(tuple(values.get((i, j)) for j in heads) for i in layers)
    names = tuple(map(str, layers)), tuple(map(str, heads))
    return Heatmap(title, matrix, *names, column, centre)


def find_values(section: Section, name: str) -> dict[tuple[int, int], float | None]:
    """Return a column of the heads of a section, by layer and head."""
    return {(row.layer, row.head): row.get(name) for row in section.rows}


def count_values(title: str, x: Column, groups: Mapping[str, Iterable[Any]]) -> list[Histogram]:
    """Count finite values in common bins, logarithmic where they span more than a decade."""
    import numpy as np

    values = {label: np.array(finite(group)) for label, group in groups.items()}
    pooled = np.concatenate(list(values.values())) if values else np.array([])
    if pooled.size < 2 or pooled.min() == pooled.max():
        return []
    low, high = float(pooled.min()), float(pooled.max())
    bins = min(max(round(2 * pooled.size ** (1 / 3)), 6), 24)  # Rice's rule
    wide = low > 0 and high > 10 * low
    edges = np.geomspace(low, high, bins + 1) if wide else np.linspace(low, high, bins + 1)
    edges[0], edges[-1] = low, high
    counts = {k: tuple(map(float, np.histogram(v, edges)[0])) for k, v in values.items()}
    return [Histogram(title, x, tuple(map(float, edges)), counts)]


def pair_points(
    label: str, x: Iterable[Any], y: Iterable[Any], names: Iterable[str]
) -> list[Series]:
    """Return the pairs that a logarithmic scatter can draw, by name; nothing where none is."""
    pairs = [
        (*known, name)
        for a, b, name in zip(x, y, names, strict=True)
        if len(known := finite((a, b))) == 2 and min(known) > 0
    ]
    if not pairs:
        return []
    across, up, named = zip(*pairs, strict=True)
    return [Series(label, across, up, names=named)]


def compare_spread(sections: Mapping[str, Section], names: Sequence[str]) -> list[Block]:
    """Compare how per-head columns are distributed: a table, and a histogram per column."""
    columns = next(iter(sections.values())).columns
    rows: list[tuple[Any, ...]] = []
    figures: list[Block] = []
    for name in names:
        column, title = columns[name], write_math(columns[name].label)
        groups = {k: finite(r[name] for r in s.rows) for k, s in sections.items()}
        for label, values in groups.items():
            ends = (min(values), median(values), max(values)) if values else (None,) * 3
            texts = (format_value(end, column) for end in ends)
            rows.append((title, label, describe_standing(column), len(values), *texts))
        figures += count_values(f"{title} over heads", column, groups)
    return [Table("Distribution over heads", SPREAD, tuple(rows), keys=2), *figures]


# A section without a view of its own


def view_rows(section: Section) -> Iterator[Block]:
    """Map the judged figures of heads, list the rows, and count the figures of the samples."""
    for name, column in section.columns.items() if is_of_heads(section) else ():
        values = find_values(section, name)
        if column.better and any(value is not None for value in values.values()):
            yield map_heads(f"{write_math(column.label)} of every head", values, column)
    yield tabulate_all(section, folded=False)
    for name, column in _pick_counted(section).items():
        title = f"{write_math(column.label)} per sample"
        yield from count_values(title, column, {"samples": section.samples[name]})


def compare_rows(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Stack the rows of several reports, those of one name together, and their samples."""
    columns = next(iter(sections.values())).columns
    names = naming(columns)
    yield stack_rows(sections, [name for name in columns if name not in names], names)
    counted = [_pick_counted(section) for section in sections.values()]
    for name in counted[0]:
        if all(name in known for known in counted):
            column = counted[0][name]
            groups = {label: section.samples[name] for label, section in sections.items()}
            yield from count_values(f"{write_math(column.label)} per sample", column, groups)


def _pick_counted(section: Section) -> dict[str, Column]:
    """Return the per-sample columns that are measured: no ids, labels and flags."""
    known = section.sample_columns
    return {
        name: column
        for name, column in known.items()
        if name in section.samples and column.format not in UNMEASURED
    }
