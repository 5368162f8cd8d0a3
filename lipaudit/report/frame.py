"""Results as rows of plain values, for pandas and spreadsheets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lipaudit.gate.comparison import Comparison, SampleChange
from lipaudit.gate.contests import Difference
from lipaudit.gate.ranking import Ranked, Ranking
from lipaudit.gate.values import row_names
from lipaudit.report.blocks import Frame
from lipaudit.results import Column, Report, Section

LONG = (
    "model",
    "measure",
    "row",
    "layer",
    "head",
    "sample",
    "place",
    "column",
    "value",
    "text",
    "unit",
    "domain",
    "status",
)
"""Columns of a report: a line for each cell; a number is a `value`, a word is a `text`."""
AT = ("layer", "head")
"""Those of them that name rows."""


def of_report(report: Report) -> Frame:
    """Lay a report out long: a line for each cell of its rows, then of its samples.

    A line of a row has no sample; a line of a sample has no row. Truth values are 1 and 0.
    """
    lines = (line for section in report.sections for line in _section(section, report))
    return Frame(LONG, tuple((report.run.model.spec, *line) for line in lines))


def of_ranking(ranking: Ranking) -> Frame:
    """Lay models out, a row each; accuracies of a ball are named `attacked@linf,2/255`."""
    rows = [dict(_model(model)) for model in ranking.models]
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    return Frame(names, tuple(tuple(row.get(name) for name in names) for row in rows))


def of_comparison(comparison: Comparison) -> Frame:
    """Lay samples out, a row for each of every pair: figures and states, `.old` and `.new`."""
    rows = [
        {"old": pair.old, "new": pair.new, **dict(_sample(sample))}
        for pair in comparison.pairs
        for sample in pair.samples
    ]
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    return Frame(names, tuple(tuple(row.get(name) for name in names) for row in rows))


def _sample(sample: SampleChange) -> Iterator[tuple[str, Any]]:
    yield from (("sample", sample.id), ("place", sample.place or None))
    yield from (("lost", len(sample.lost)), ("gained", len(sample.gained)))
    for name, both in (sample.states | sample.figures).items():
        yield from zip((f"{name}.old", f"{name}.new"), both, strict=True)


def _section(section: Section, report: Report) -> Iterator[tuple[Any, ...]]:
    columns = section.columns()
    for name, row in zip(row_names(section.rows), section.rows, strict=True):
        cells = row.cells()
        at = (section.measure, name, cells.get("layer"), cells.get("head"), None, None)
        for key in (key for key in cells if key not in AT):
            value = cells[key]
            yield (*at, *_cell(key, value, columns[key]))
    places = report.found("place")
    for key, values in section.samples.items():
        for sample, value in zip(section.ids, values, strict=True) if key != "ids" else ():
            of = (section.measure, None, None, None, sample, places.get(sample))
            yield (*of, *_cell(key, value, section.sample_column(key)))


def _cell(name: str, value: Any, column: Column) -> tuple[Any, ...]:
    word = isinstance(value, str)
    number = int(value) if isinstance(value, bool) else value
    proven = column.domain and column.format != "s"
    how = (column.unit, column.domain, column.status) if proven else (column.unit, None, None)
    return name, None if word else number, value if word else None, *how


def _model(model: Ranked) -> Iterator[tuple[str, Any]]:
    yield from (("rank", model.rank), ("model", model.model), ("outcome", model.outcome))
    yield from _difference(model.difference)
    for each in model.accuracy:
        ball = f"@{each.norm},{each.eps}" if each.norm else ""
        for name, value in (("", each.share), ("_low", each.low), ("_high", each.high)):
            yield f"{each.kind}{name}{ball}", value
        yield f"{each.kind}_samples{ball}", each.samples
    for name in ("median", "low", "high", "p95", "samples"):
        yield f"norm_{name}", model.norm and getattr(model.norm, name)
    head = model.head
    yield "head", head and f"{head.layer}.{head.head}"
    yield "head_norm", head and head.exact
    yield "fragile", model.fragile
    yield "reason", model.reason


def _difference(difference: Difference | None) -> Iterator[tuple[str, Any]]:
    for name in ("estimate", "low", "high", "unit", "p", "p_adjusted", "samples"):
        key = "difference" if name == "estimate" else f"difference_{name}"
        yield key, difference and getattr(difference, name)
