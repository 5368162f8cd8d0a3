"""Heads: exact norms beside their upper bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median

from lipaudit.report.blocks import Block, Scatter, Series, Table
from lipaudit.report.cells import pretty
from lipaudit.report.page.views.common import (
    HEAD,
    every_row,
    head,
    heatmap,
    points,
    spread,
    stacked,
    top,
)
from lipaudit.results import BallRow, BoundsRow, Column, Section
from lipaudit.results.bounds import ranked
from lipaudit.results.figures import finite, middle, typed

TOP = 10
CERTIFIED = ("ball_sharp", "mean_field", "castin", "hu")
"""Constants on balls, usually the smallest first."""


def view(section: Section) -> Iterator[Block]:
    """Map the exact norms, list the most amplifying heads, and judge each bound."""
    rows = typed(section, BoundsRow)
    if not rows:
        return
    exact = section.columns()["exact"]
    yield heatmap("Exact ‖J‖ of every head", rows, lambda row: row.exact, exact)
    yield _amplifying(section, rows)
    yield _tightness(section, rows)
    yield from _scatter(section, rows)
    yield every_row(section)


def ball_view(section: Section) -> Iterator[Block]:
    """Set what was found on the balls beside what is certified, radius by radius."""
    rows = typed(section, BallRow)
    columns = section.columns()
    lines = []
    for r in sorted({row.r for row in rows}):
        here = [row for row in rows if row.r == r]
        gains = finite(_share(row.ball_norm, row.exact) for row in here)
        # With infinite ones: a median of the others would look better than the bounds are.
        shares = [
            [x for row in here if (x := _share(getattr(row, name), row.ball_norm)) is not None]
            for name in CERTIFIED
        ]
        certified = (median(known) if known else None for known in shares)
        lines.append((r, len(shares[0]), middle(gains), *certified, max(shares[0], default=None)))
    worst = replace(_times(columns["ball_sharp"]), label="ball sharp, largest")
    yield Table(
        "Norm found as a multiple of exact; constants as multiples of the norm found",
        (
            columns["r"],
            Column(label="heads", meaning="Heads with a constant.", format="d"),
            _times(columns["ball_norm"]),
            *(_times(columns[name]) for name in CERTIFIED),
            worst,
        ),
        tuple(lines),
    )
    yield every_row(section)


def _share(value: float | None, norm: float | None) -> float | None:
    return value / norm if value is not None and norm else None


def side_by_side(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Compare how norms, and the bounds of which less is better, are distributed over heads."""
    bounds = (bound.name for bound in ranked() if bound.better)
    yield from spread(sections, ("exact", *bounds, "sharp_ratio_max", "p_norm", "splitting_gain"))


def layers_side_by_side(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Set the layers of several models side by side."""
    yield stacked(sections, ("exact", "exact_out", "sharp_rss", "sharp_sum"), ("layer",))


def balls_side_by_side(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Set what was found on balls, and what is certified, of several models side by side."""
    yield stacked(sections, ("ball_norm", "ball_sharp"), ("layer", "head", "r"))


def _amplifying(section: Section, rows: list[BoundsRow]) -> Table:
    columns = section.columns()
    rows = top(rows, "exact", TOP)
    names = [bound.name for bound in ranked()]
    shown = [name for name in names if any(row.log10_ratio(name) is not None for row in rows)]
    said = any(row.input not in ("", "one input") for row in rows)
    return Table(
        title="Most amplifying heads; each bound as a multiple of exact",
        columns=(
            HEAD,
            *([columns["input"]] if said else []),
            columns["exact"],
            *(_times(columns[name]) for name in shown),
        ),
        rows=tuple(
            (
                head(row),
                *([row.input] if said else []),
                row.exact,
                *(_multiple(row.log10_ratio(name)) for name in shown),
            )
            for row in rows
        ),
    )


def _tightness(section: Section, rows: list[BoundsRow]) -> Table:
    columns = section.columns()
    lines = []
    for bound in ranked():
        ratios = [row.log10_ratio(bound.name) for row in rows]
        column = columns[bound.name]
        domain = pretty(column.domain)
        known = finite(ratios)
        worst = _multiple(max(known)) if known else None
        lines.append(
            (column.label, column.status, domain, len(known), _multiple(middle(ratios)), worst)
        )
    shown = (
        Column(label="bound", meaning="Name of the bound.", format="s"),
        Column(label="status", meaning="How far it is proven.", format="s"),
        Column(label="holds", meaning="Where it holds.", format="s"),
        Column(label="heads", meaning="Heads with this bound.", format="d"),
        Column(label="median", meaning="Of bound / exact; 1 is tight.", unit="×", domain=""),
        Column(label="largest", meaning="Of bound / exact.", unit="×", domain=""),
    )
    return Table(
        "Tightness over all heads: bound / exact, medians over samples",
        shown,
        tuple(lines),
    )


def _scatter(section: Section, rows: list[BoundsRow]) -> Iterator[Block]:
    exact, names = [row.exact for row in rows], [f"head {head(row)}" for row in rows]
    series: list[Series] = []
    for bound in ranked():
        series += points(bound.label, exact, [getattr(row, bound.name) for row in rows], names)
    if series:
        limit = Column(label="bound", meaning="Upper bound.", status="bound")
        title = "Upper bounds over the exact norm, per head"
        yield Scatter(title, section.columns()["exact"], limit, tuple(series))


def _times(column: Column) -> Column:
    return replace(column, unit="×")


def _multiple(logarithm: float | None) -> float | str | None:
    if logarithm is None:
        return None
    return 10**logarithm if logarithm < 300 else f"1e{logarithm:.0f}×"
