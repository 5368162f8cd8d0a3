"""Several models ranked: who is best, in words and as a table, beside their scorecards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lipaudit.gate.ranking import Ranked, Ranking
from lipaudit.gate.verdicts import Verdict, amount
from lipaudit.report.blocks import (
    Block,
    Brief,
    Chapter,
    Notes,
    Paragraph,
    Table,
    list_scores,
    make_table,
)
from lipaudit.report.cells import format_significant, format_value, write_math
from lipaudit.report.page.common import MODEL
from lipaudit.report.page.opening import make_scorecard
from lipaudit.report.pictures import Scatter, Series
from lipaudit.results import ATTENTION_TABLE, BOUNDS_TABLE, JACOBIAN_TABLE, Column, Report
from lipaudit.results.summary import KINDS

RANK = Column("rank", "1, or the place by the figure of what is behind.", format="d", domain="")
OUTCOME = Column("outcome", "What the paired samples show against the best.", format="s")
DIFFERENCE = Column("difference", "From the best, sample by sample.", domain="")
FIGURE = Column("figure", "A line of the scorecards.", format="s")
SHORT = {
    "not distinguishable from the best": "not distinguishable",
    "behind the best": "behind",
}
"""Shorter names of outcomes, for the column of a table."""
BY = {
    "attack.robust": "accuracy under attack",
    "certify.robust": "accuracy under attack",
    "certify.certified": "certified accuracy",
    "jacobian.norm:median": "the median norm of the model's Jacobian",
}
"""Metrics in words."""
MOST = 4
"""Balls whose accuracy is drawn."""
Shown = tuple[Column, tuple[Any, ...]]
"""A column, and its cell for each model: a figure, in brackets its limits."""


def make_ranking_chapter(ranking: Ranking) -> Chapter:
    """Return the chapter of the ranking: the best models in words, and a row for every model."""
    said = " ".join(describe_ranking(ranking))
    blocks: tuple[Block, ...] = (
        *([Paragraph(said)] if said else []),
        tabulate_ranking(ranking),
        *([Paragraph(_explain_ranking(ranking))] if ranking.criterion else []),
        *([Notes(ranking.notes)] if ranking.notes else []),
    )
    title = "Ranking" if ranking.criterion else "In the order given"
    return Chapter("ranking", title, blocks)


def make_leading_chapters(ranking: Ranking) -> list[Chapter]:
    """Return the ranking, then charts of accuracies and norms against clean accuracy."""
    models = ranking.models
    balls = list(dict.fromkeys((a.kind, a.ball) for model in models for a in model.accuracy))
    clean = _Axis.accuracy(models, "clean", "")
    axes = [_Axis.accuracy(models, *each) for each in balls if each[0] != "clean"][:MOST]
    pictures = [_plot_models(models, clean, axis) for axis in axes]
    pictures += [_plot_models(models, _Axis.norm(models), axis) for axis in (axes or [clean])[:1]]
    kept = tuple(picture for picture in pictures if len(picture.series) > 1)
    drawn = [Chapter("tradeoff", "What is traded for what", kept)] if kept else []
    return [make_ranking_chapter(ranking), *drawn]


def describe_ranking(ranking: Ranking) -> list[str]:
    """Describe which models are best, behind or not distinguishable; empty if not ranked."""
    named: dict[tuple[str, str], list[str]] = {}
    for model in ranking.models:
        reason = f" ({model.reason})" if model.reason else ""
        named.setdefault((model.outcome, reason), []).append(model.model)
    return [
        f"{outcome.capitalize()}: {', '.join(models)}{reason}."
        for (outcome, reason), models in named.items()
        if outcome
    ]


def tabulate_ranking(ranking: Ranking) -> Table:
    """Tabulate the models, the best first, with limits in brackets."""
    return make_table("", _list_columns(ranking), keys=2 if ranking.criterion else 1)


def brief_ranking(ranking: Ranking, reports: Sequence[Report]) -> Brief:
    """Return the ranking for a pull request."""
    block, data = tabulate_ranking(ranking), reports[0].run.data
    return Brief(
        title=f"lipaudit: {len(ranking.models)} models",
        remarks=(f"{data.samples} samples of {data.spec}", *describe_ranking(ranking)),
        heads=tuple(write_math(column.label) for column in block.columns),
        rows=tuple(
            tuple(
                format_value(value, column)
                for value, column in zip(row, block.columns, strict=True)
            )
            for row in block.rows
        ),
        align="".join("l" if column.format == "s" else "r" for column in block.columns),
    )


def tabulate_scorecards(names: Sequence[str], reports: Sequence[Report]) -> Table:
    """Set the scorecards of several reports beside each other, a line for each figure."""
    cards = [dict(_list_figures(report)) for report in reports]
    labels = list(dict.fromkeys(label for card in cards for label in card))
    models = zip(names, cards, strict=True)
    shown = ((Column(k, "", format="s"), [card.get(n) for n in labels]) for k, card in models)
    return make_table("", [(FIGURE, labels), *shown])


def _list_figures(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the figures of a scorecard, each with the first remark on it."""
    card = make_scorecard(report)
    lines = card.lines if card else ()
    for line, (_, figure, said, _) in zip(
        lines, list_scores(card)[0] if card else (), strict=True
    ):
        yield write_math(line.label), f"{figure}; {re.split('[;,]', said)[0]}".removesuffix("; ")


def _list_columns(ranking: Ranking) -> Iterator[Shown]:
    models = ranking.models
    if ranking.criterion:
        yield RANK, tuple(model.rank for model in models)
    yield MODEL, tuple(model.model for model in models)
    if ranking.criterion:
        yield OUTCOME, tuple(SHORT.get(m.outcome, m.outcome) for m in models)
        yield DIFFERENCE, tuple(_format_difference(model.difference) for model in models)
    for kind, ball in dict.fromkeys((a.kind, a.ball) for model in models for a in model.accuracy):
        yield _Axis.accuracy(models, kind, ball).make_column()
    if any(model.norm for model in models):
        yield _Axis.norm(models).make_column()
        norms = (model.norm for model in models)
        column = replace(JACOBIAN_TABLE.columns["p95"], label="p95 ||J||")
        yield column, tuple(norm and norm.p95 for norm in norms)
    if any(model.head for model in models):
        column = replace(BOUNDS_TABLE.columns["exact"], label="steepest head")
        heads = (model.head for model in models)
        yield (
            column,
            tuple(h and f"{format_significant(h.exact)} ({h.layer}.{h.head})" for h in heads),
        )
    if any(model.fragile is not None for model in models):
        column = replace(ATTENTION_TABLE.columns["intermediate"], label="fragile", format=".0%")
        yield column, tuple(model.fragile for model in models)


def _format_difference(difference: Verdict | None) -> str | None:
    """Write a difference with its limits; the best model has none."""
    if difference is None:
        return None
    unit, ends = difference.unit, (difference.low, difference.high)
    value = amount(difference.paired if difference.samples else difference.change, unit)
    if not all(end is not None and math.isfinite(end) for end in ends):
        return value if difference.status == "unchanged" else f"{value} (too few samples)"
    low, high = (amount(end, unit) for end in ends)
    return f"{value} ({low.removesuffix(unit)} to {high})"


@dataclass(frozen=True)
class _Axis:
    """A figure of every model with its limits; None where a model has none."""

    column: Column
    values: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]

    @classmethod
    def accuracy(cls, models: Sequence[Ranked], kind: str, ball: str) -> _Axis:
        """Return an accuracy of every model."""
        known = [
            next((a for a in model.accuracy if (a.kind, a.ball) == (kind, ball)), None)
            for model in models
        ]
        label, column = KINDS[kind]
        return cls(
            replace(column, label=", ".join(filter(None, (label, ball)))),
            tuple(each.share if each else None for each in known),
            tuple(each.low if each else None for each in known),
            tuple(each.high if each else None for each in known),
        )

    @classmethod
    def norm(cls, models: Sequence[Ranked]) -> _Axis:
        """Return the median Jacobian norm of every model."""
        known = [model.norm for model in models]
        return cls(
            replace(JACOBIAN_TABLE.columns["median"], label="median ||J||"),
            tuple(each.median if each else None for each in known),
            tuple(each.low if each else None for each in known),
            tuple(each.high if each else None for each in known),
        )

    def make_column(self) -> Shown:
        """Write the limits behind each figure."""
        ends = zip(self.values, self.low, self.high, strict=True)
        return self.column, tuple(self._cell(*each) for each in ends)

    def _cell(self, value: float | None, low: float | None, high: float | None) -> Any:
        if value is None or low is None or high is None:
            return value
        first, last = format_value(low, self.column), format_value(high, self.column)
        unit = "%" if first.endswith("%") else ""
        return f"{format_value(value, self.column)} ({first.removesuffix(unit)} to {last})"


def _plot_models(models: Sequence[Ranked], x: _Axis, y: _Axis) -> Scatter:
    """Draw a point for each model that has both figures, with the limits of both."""
    points = [
        Series(
            model.model,
            (across,),
            (up,),
            low=(y.low[i],),
            high=(y.high[i],),
            left=(x.low[i],),
            right=(x.high[i],),
        )
        for i, model in enumerate(models)
        if (across := x.values[i]) is not None and (up := y.values[i]) is not None
    ]
    title = write_math(f"{y.column.label}, against {x.column.label}")
    title = title[0].upper() + title[1:]
    return Scatter(title, x.column, y.column, tuple(points), log=False, diagonal=False)


def _explain_ranking(ranking: Ranking) -> str:
    """Explain the criterion of the ranking and its test."""
    by = BY.get(ranking.criterion.partition("@")[0], ranking.criterion)
    by += f", {ranking.ball}" if ranking.ball and by != ranking.criterion else ""
    wide = f", each corrected for {ranking.compared} comparisons with the best"
    return (
        f"Ranked by {by}. In brackets: 95 % limits, of differences by paired samples"
        f"{wide if ranking.compared > 1 else ''}. Models are not distinguishable where 0 is "
        "within. Rank 1: the best, and models that are not distinguishable from it."
    )
