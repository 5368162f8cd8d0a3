"""What the views share: naming heads, picking columns, ordering rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

from lipaudit.report.blocks import (
    Block,
    Heatmap,
    Histogram,
    Matrix,
    Scatter,
    Series,
    Table,
)
from lipaudit.report.cells import pretty, standing, text
from lipaudit.results import Column, Report, Row, Section
from lipaudit.results.figures import finite, largest
from lipaudit.results.heads import HeadRow

R = TypeVar("R", bound=Row)
H = TypeVar("H", bound=HeadRow)
View = Callable[[Section], Iterable[Block]]
SideBySide = Callable[[Mapping[str, Section]], Iterable[Block]]

FIT = 20
"""So many rows are shown whole."""
HEAD = Column(label="head", meaning="LAYER.HEAD", format="s")
MODEL = Column(label="model", meaning="The report that the row comes from.", format="s")
SAMPLE = Column(label="sample", meaning="Sample id.", format="s")
"""Of a table whose cells are whole ids: `located` shortens them and says where they are found."""
PLACE = Column(label="place", meaning="Where the sample is found in the data.", format="s")
CHARACTERS = 12
"""How much of an id is written: enough to tell samples apart."""
LETTERS = 40
"""How much of a text stands behind its place."""
SPREAD = (
    Column(label="statistic", meaning="Per-head column.", format="s"),
    MODEL,
    Column(label="standing", meaning="How far it is proven, and where.", format="s"),
    Column(label="heads", meaning="Heads with a finite value.", format="d"),
    Column(label="smallest", meaning="Over heads.", format=""),
    Column(label="median", meaning="Over heads.", format=""),
    Column(label="largest", meaning="Over heads.", format=""),
)


def head(row: HeadRow) -> str:
    """Name a head as LAYER.HEAD."""
    return f"{row.layer}.{row.head}"


def places(report: Report) -> dict[str, str]:
    """Return where each sample is found: its place, and how it begins where it is a text."""
    texts = report.found("text")
    said = {name: f' "{text[:LETTERS]}"' for name, text in texts.items()}
    return {name: place + said.get(name, "") for name, place in report.found("place").items()}


def located(block: Block, known: Mapping[str, str]) -> Block:
    """Shorten the ids of a table, and say where each sample is found: beside it, at its point."""
    if isinstance(block, Scatter):
        return replace(block, series=tuple(_placed(s, known) for s in block.series))
    return with_places(block, known) if isinstance(block, Table) else block


def with_places(table: Table, known: Mapping[str, str]) -> Table:
    """Shorten the ids of a table, and say beside each where the sample is found."""
    if SAMPLE not in table.columns:
        return table
    at = table.columns.index(SAMPLE)
    named = any(row[at] in known for row in table.rows)

    def cells(row: tuple[Any, ...]) -> tuple[Any, ...]:
        place = [known.get(row[at])] if named else []
        return (*row[:at], str(row[at])[:CHARACTERS], *place, *row[at + 1 :])

    columns = (*table.columns[: at + 1], *([PLACE] if named else []), *table.columns[at + 1 :])
    return replace(table, columns=columns, rows=tuple(map(cells, table.rows)))


def _placed(series: Series, known: Mapping[str, str]) -> Series:
    named = (f"{n[:CHARACTERS]}, {known[n]}" if n in known else n for n in series.names)
    return replace(series, names=tuple(named))


def interval(low: float | None, high: float | None) -> str:
    """Write the limits of a share; nothing where one is missing."""
    return "" if low is None or high is None else f"{low:.1%} to {high:.1%}"


def top(rows: Sequence[R], name: str, count: int) -> list[R]:
    """Return the rows with the largest values of a column, largest first; all where all fit."""
    return largest(rows, name, len(rows) if len(rows) <= FIT else count)


def table(title: str, section: Section, rows: Sequence[Row], names: Sequence[str]) -> Table:
    """Tabulate some columns of some rows; `head` stands for LAYER.HEAD."""
    columns = section.columns()
    return Table(
        title=title,
        columns=tuple(HEAD if n == "head" else columns[n] for n in names),
        rows=tuple(tuple(_cell(row, name) for name in names) for row in rows),
    )


def every_row(section: Section, *, folded: bool = True) -> Table:
    """Tabulate all rows and columns, less texts, and in a table that is seen figures, of none."""
    cells, nothing = [row.cells() for row in section.rows], ("",) if folded else ("", None)
    names = [n for n in section.columns() if any(row.get(n) not in nothing for row in cells)]
    return Table(
        title=f"All rows ({len(cells)})" if folded else "",
        columns=tuple(section.columns()[n] for n in names),
        rows=tuple(tuple(row.get(n) for n in names) for row in cells),
        keys=2 if names[:2] == ["layer", "head"] else 1,
        folded=folded,
    )


def stacked(sections: Mapping[str, Section], names: Sequence[str], keys: Sequence[str]) -> Table:
    """Tabulate the rows of several reports, rows with equal keys together."""
    columns = next(iter(sections.values())).columns()
    rows = [(label, row.cells()) for label, s in sections.items() for row in s.rows]
    keys = [key for key in keys if any(row[key] not in ("", None) for _, row in rows)]
    first: dict[tuple[Any, ...], int] = {}
    for _, row in rows:
        first.setdefault(tuple(row[k] for k in keys), len(first))
    rows.sort(key=lambda item: first[tuple(item[1][k] for k in keys)])
    return Table(
        title="",
        columns=(*(columns[k] for k in keys), MODEL, *(columns[n] for n in names)),
        rows=tuple((*(r[k] for k in keys), label, *(r[n] for n in names)) for label, r in rows),
        keys=len(keys) + 1,
    )


def heatmap(
    title: str, rows: Sequence[H], value: Callable[[H], float | None], column: Column
) -> Heatmap:
    """Lay one value per head out by layer and head."""
    layers = sorted({row.layer for row in rows})
    heads = sorted({row.head for row in rows})
    at = {(row.layer, row.head): value(row) for row in rows}
    matrix: Matrix = tuple(tuple(at.get((i, j)) for j in heads) for i in layers)
    return Heatmap(title, matrix, tuple(map(str, layers)), tuple(map(str, heads)), column)


def histogram(title: str, x: Column, groups: Mapping[str, Iterable[Any]]) -> list[Histogram]:
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


def points(label: str, x: Iterable[Any], y: Iterable[Any], names: Iterable[str]) -> list[Series]:
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


def spread(sections: Mapping[str, Section], names: Sequence[str]) -> list[Block]:
    """Compare how per-head columns are distributed: a table, and a histogram per column."""
    columns = next(iter(sections.values())).columns()
    groups = {n: {k: finite(_column(s, n)) for k, s in sections.items()} for n in names}
    figures = [
        block
        for name in names
        for block in histogram(
            f"{pretty(columns[name].label)} over heads", columns[name], groups[name]
        )
    ]
    rows = tuple(
        (pretty(columns[name].label), label, standing(columns[name]), len(values), *ends)
        for name in names
        for label, values in groups[name].items()
        for ends in [_ends(values, columns[name])]
    )
    return [Table("Distribution over heads", SPREAD, rows, keys=2), *figures]


def _ends(values: list[float], column: Column) -> tuple[str, ...]:
    ends = (min(values), median(values), max(values)) if values else (None, None, None)
    return tuple(text(value, column) for value in ends)


def _column(section: Section, name: str) -> list[Any]:
    return [getattr(row, name) for row in section.rows]


def _cell(row: Row, name: str) -> Any:
    return head(row) if name == "head" and isinstance(row, HeadRow) else row.cells()[name]
