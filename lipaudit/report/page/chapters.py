"""The chapter of a section: tables, maps and histograms from its columns, then its drawings.

Sections of one measure come by report: a single report has the name "", several have the names
of their models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat

from lipaudit.measures import layouts
from lipaudit.report.blocks import Block, Table, make_table
from lipaudit.report.cells import UNMEASURED, format_with_limits, write_math
from lipaudit.report.page.drawings import DRAWINGS
from lipaudit.report.page.rows import Sections, find_columns, pick_largest, read_rows
from lipaudit.report.pictures import Heatmap, Histogram
from lipaudit.report.words import HEADINGS
from lipaudit.tables import Column, Section
from lipaudit.tables.columns import naming
from lipaudit.tables.figures import finite
from lipaudit.tables.report import Display
from lipaudit.tables.trials import WORST


def name_chapter(section: Section) -> str:
    """Return the heading of a section: of its declaration if installed, else of the report."""
    layout = layouts().get(section.measure)
    return (layout.title if layout else section.title) or section.measure


def find_display(section: Section) -> Display:
    """Return what the chapter of a section shows; without a declaration all of its columns."""
    layout = layouts().get(section.measure)
    if layout and layout.display:
        return layout.display
    columns, samples = section.columns, section.sample_columns
    of_heads = all(n in columns and columns[n].needed for n in ("layer", "head"))
    return Display(
        about="",
        maps=tuple(name for name, column in columns.items() if of_heads and column.better),
        histograms=tuple(n for n, column in samples.items() if column.format not in UNMEASURED),
    )


def show_sections(sections: Sections) -> Iterator[Block]:
    """Yield the tables and pictures of the sections of one measure."""
    first = next(iter(sections.values()))
    display = find_display(first)
    for name in display.maps:
        yield from map_column(sections, name)
    yield from tabulate(sections, display.columns, display.by)
    for draw in DRAWINGS.get(first.measure, ()):
        yield from draw(sections)
    for name in display.histograms:
        yield from count_samples(sections, name)
    if display.columns and "" in sections:
        yield from list_all_rows(first)


# Tables


def tabulate(sections: Sections, names: Sequence[str] = (), by: str = "") -> Iterator[Table]:
    """Tabulate rows; rows of several reports with equal keys are adjacent.

    Limits (NAME_low, NAME_high) are shown in brackets. Columns without values are left out.

    Args:
        sections: the sections by report.
        names: columns; bounds follow. By default all columns.
        by: a column; of many rows, those with its largest values are shown.
    """
    columns, several = find_columns(sections), "" not in sections
    groups = (read_rows(section, label) for label, section in sections.items())
    rows = [row for each in groups for row in (pick_largest(each, by) if by else each)]
    limits = {f"{name}{end}" for name in columns for end in ("_low", "_high")}
    # `head` names the layer, too.
    implied = {"layer", "module"} if "head" in columns else set()
    every = [name for name in columns if name not in limits | implied]
    bounds = [name for name in every if columns[name].formula and name not in names]
    shown = []
    # A report of another version may lack a column.
    for name in filter(columns.__contains__, [*names, *bounds] if names else every):
        # A column of texts or truth values that says the usual of every row is left out.
        usual = columns[name].default if columns[name].format in ("s", "") else None
        if {row.get(name) for row in rows} - {"", None, usual}:
            shown.append(name)
    keys = naming({name: columns[name] for name in shown}) if shown else []
    first: dict[tuple[object, ...], int] = {}
    for row in rows:
        first.setdefault(tuple(row.get(name) for name in keys), len(first))
    rows.sort(key=lambda row: first[tuple(row.get(name) for name in keys)])
    cells: list[tuple[Column | str, Iterable[object]]] = []
    for name in shown:
        values, low, high = (
            [row.get(f"{name}{end}") for row in rows] for end in ("", "_low", "_high")
        )
        texts = map(format_with_limits, values, low, high, repeat(columns[name]))
        cells.append((columns[name], list(texts)))
    if several:
        cells.insert(len(keys), ("model", [row["model"] for row in rows]))
    strong = {i for i, row in enumerate(rows) if row.get("attack") == WORST}
    if rows:
        yield make_table("", cells, keys=len(keys) + several, strong=strong)


def list_all_rows(section: Section) -> Iterator[Table]:
    """Yield a folded table of every row and every column that is not empty."""
    rows, columns = section.rows, section.columns
    names = [name for name in columns if any(row.get(name) != "" for row in rows)]
    keys = 2 if names[:2] == ["layer", "head"] else 1
    cells = ((columns[name], [row.get(name) for row in rows]) for name in names)
    if rows:
        yield make_table(f"All rows ({len(rows)})", cells, keys=keys, folded=True)


# Maps of heads, histograms of samples


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
    return Heatmap(title, matrix, *names, column, centre=centre)


def map_column(sections: Sections, name: str) -> Iterator[Heatmap]:
    """Map a column over layers and heads, of each report."""
    for label, section in sections.items():
        column = section.columns.get(name, HEADINGS["value"])
        values = {(row.layer, row.head): row.get(name) for row in section.rows}
        if any(value is not None for value in values.values()):
            about = column.meaning.rstrip(".")
            title = write_math(f"{column.label} of every head: {about}")
            yield map_heads(f"{label}: {title}" if label else title, values, column)


def count_samples(sections: Sections, name: str) -> Iterator[Histogram]:
    """Count the samples by a per-sample column; bins are common to all reports.

    Bins are logarithmic if they span more than a decade.
    """
    import numpy as np

    values = {
        label or "samples": np.array(finite(section.samples[name]))
        for label, section in sections.items()
        if name in section.samples
    }
    pooled = np.concatenate([*values.values(), np.array([])])
    if pooled.size < 2 or pooled.min() == pooled.max():
        return
    low, high = float(pooled.min()), float(pooled.max())
    spread = np.geomspace if low > 0 and high > 10 * low else np.linspace
    edges = spread(low, high, round(2 * pooled.size ** (1 / 3)) + 1)  # Rice's rule
    edges[0], edges[-1] = low, high  # geomspace may round its ends inwards
    counts = {k: tuple(map(float, np.histogram(v, edges)[0])) for k, v in values.items()}
    column = next(iter(sections.values())).sample_column(name)
    yield Histogram(
        f"{write_math(column.label)} per sample", column, tuple(map(float, edges)), counts
    )
