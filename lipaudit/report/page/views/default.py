"""A section of which only its row type is known: a plug-in's, or one without a view of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from lipaudit.report.blocks import Block
from lipaudit.report.cells import UNMEASURED, pretty
from lipaudit.report.page.views.common import every_row, heatmap, histogram, stacked
from lipaudit.results import Column, Section, sample_columns
from lipaudit.results.columns import naming
from lipaudit.results.figures import typed
from lipaudit.results.heads import HeadRow


def view(section: Section) -> Iterator[Block]:
    """Map the judged figures of heads, list the rows, and count the figures of the samples."""
    for name, column in _mapped(section).items():
        title = f"{pretty(column.label)} of every head"
        yield heatmap(title, typed(section, HeadRow), _value(name), column)
    yield every_row(section, folded=False)
    for name, column in _counted(section).items():
        title = f"{pretty(column.label)} per sample"
        yield from histogram(title, column, {"samples": section.samples[name]})


def side_by_side(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Stack the rows of several reports, those of one name together, and their samples."""
    columns = next(iter(sections.values())).columns()
    names = naming(columns)
    yield stacked(sections, [name for name in columns if name not in names], names)
    counted = [_counted(section) for section in sections.values()]
    for name in counted[0]:
        if all(name in known for known in counted):
            column = counted[0][name]
            groups = {label: section.samples[name] for label, section in sections.items()}
            yield from histogram(f"{pretty(column.label)} per sample", column, groups)


def _mapped(section: Section) -> dict[str, Column]:
    """Return the columns of heads that have a better direction."""
    heads = typed(section, HeadRow)
    columns = section.columns() if heads else {}
    return {
        name: column
        for name, column in columns.items()
        if column.better and any(_value(name)(row) is not None for row in heads)
    }


def _counted(section: Section) -> dict[str, Column]:
    """Return the per-sample columns that are measured: no ids, labels and flags."""
    known = sample_columns(section.measure)
    return {
        name: column
        for name, column in known.items()
        if name in section.samples and column.format not in UNMEASURED
    }


def _value(name: str) -> Callable[[HeadRow], float | None]:
    return lambda row: row.cells().get(name)
