"""Several models ranked: who is best, in words and as a table, beside their scorecards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lipaudit.gate.contests import Difference
from lipaudit.gate.ranking import Ranked, Ranking
from lipaudit.gate.verdicts import amount
from lipaudit.report.blocks import Block, Brief, Chapter, Notes, Paragraph, Scatter, Series, Table
from lipaudit.report.cells import pretty, significant, text
from lipaudit.report.draw.layout import scored
from lipaudit.report.page.scorecard import scorecard
from lipaudit.report.page.views.common import MODEL
from lipaudit.results import AttentionRow, BoundsRow, Column, JacobianRow, Report
from lipaudit.results.history import KINDS

RANK = Column("rank", "One more than models are shown to be better.", format="d", domain="")
OUTCOME = Column("outcome", "What the paired samples show against the best.", format="s")
DIFFERENCE = Column("difference", "From the best, sample by sample.", domain="")
FIGURE = Column("figure", "A line of the scorecards.", format="s")
SHORT = {
    "not distinguishable from the best": "not distinguishable",
    "behind the best": "behind",
}
"""Outcomes where what they are against is the best by itself."""
BY = {
    "attack.robust": "accuracy under attack",
    "certify.robust": "accuracy under attack",
    "certify.certified": "certified accuracy",
    "jacobian.norm:median": "the median norm of the model's Jacobian",
}
"""What metrics are called in words."""
MOST = 4
"""Balls whose accuracy is drawn."""
Shown = tuple[Column, tuple[Any, ...]]
"""A column, and its cell for each model: a figure, in brackets its limits."""


def chapter(ranking: Ranking) -> Chapter:
    """Say who is best and what is known of the order, with a row for every model."""
    said = " ".join(said_of(ranking))
    blocks: tuple[Block, ...] = (
        *([Paragraph(said)] if said else []),
        table(ranking),
        *([Paragraph(_how(ranking))] if ranking.criterion else []),
        *([Notes(ranking.notes)] if ranking.notes else []),
    )
    return Chapter("ranking", "Ranking", blocks)


def leading(ranking: Ranking) -> list[Chapter]:
    """Return the ranking, then what models trade for what: accuracies, and the norm."""
    models = ranking.models
    balls = list(dict.fromkeys((a.kind, a.ball) for model in models for a in model.accuracy))
    clean = _Axis.accuracy(models, "clean", "")
    axes = [_Axis.accuracy(models, *each) for each in balls if each[0] != "clean"][:MOST]
    pictures = [_scatter(models, clean, axis) for axis in axes]
    pictures += [_scatter(models, _Axis.norm(models), axis) for axis in (axes or [clean])[:1]]
    kept = tuple(picture for picture in pictures if len(picture.series) > 1)
    drawn = [Chapter("tradeoff", "What is traded for what", kept)] if kept else []
    return [chapter(ranking), *drawn]


def said_of(ranking: Ranking) -> list[str]:
    """Say which model is best, and which are told apart from it; nothing where none is ranked."""
    named: dict[tuple[str, str], list[str]] = {}
    for model in ranking.models:
        reason = f" ({model.reason})" if model.reason else ""
        named.setdefault((model.outcome, reason), []).append(model.model)
    return [
        f"{outcome.capitalize()}: {', '.join(models)}{reason}."
        for (outcome, reason), models in named.items()
        if outcome
    ]


def table(ranking: Ranking) -> Table:
    """Tabulate the models, the best first, a row each; limits stand in brackets."""
    columns, cells = zip(*_columns(ranking), strict=True)
    return Table(
        title="",
        columns=columns,
        rows=tuple(zip(*cells, strict=True)),
        keys=2 if ranking.criterion else 1,
    )


def brief(ranking: Ranking, reports: Sequence[Report]) -> Brief:
    """Return the ranking for a pull request."""
    block, data = table(ranking), reports[0].run.data
    return Brief(
        title=f"lipaudit: {len(ranking.models)} models",
        remarks=(f"{data.samples} samples of {data.spec}", *said_of(ranking)),
        heads=tuple(pretty(column.label) for column in block.columns),
        rows=tuple(
            tuple(text(value, column) for value, column in zip(row, block.columns, strict=True))
            for row in block.rows
        ),
        align="".join("l" if column.format == "s" else "r" for column in block.columns),
    )


def scorecards(names: Sequence[str], reports: Sequence[Report]) -> Table:
    """Set the scorecards of several reports beside each other, a line for each figure."""
    cards = [dict(_card(report)) for report in reports]
    labels = dict.fromkeys(label for card in cards for label in card)
    return Table(
        title="",
        columns=(FIGURE, *(Column(name, "", format="s") for name in names)),
        rows=tuple((label, *(card.get(label) for card in cards)) for label in labels),
    )


def _card(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the figures of a scorecard, each with the first that is said of it."""
    card = scorecard(report)
    lines = card.lines if card else ()
    for line, (_, figure, said, _) in zip(lines, scored(card)[0] if card else (), strict=True):
        yield pretty(line.label), f"{figure}; {re.split('[;,]', said)[0]}".removesuffix("; ")


def _columns(ranking: Ranking) -> Iterator[Shown]:
    models = ranking.models
    if ranking.criterion:
        yield RANK, tuple(model.rank for model in models)
    yield MODEL, tuple(model.model for model in models)
    if ranking.criterion:
        yield OUTCOME, tuple(SHORT.get(m.outcome, m.outcome) for m in models)
        yield DIFFERENCE, tuple(_difference(model.difference) for model in models)
    for kind, ball in dict.fromkeys((a.kind, a.ball) for model in models for a in model.accuracy):
        yield _Axis.accuracy(models, kind, ball).shown()
    if any(model.norm for model in models):
        yield _Axis.norm(models).shown()
        norms = (model.norm for model in models)
        column = replace(JacobianRow.columns()["p95"], label="p95 ||J||")
        yield column, tuple(norm and norm.p95 for norm in norms)
    if any(model.head for model in models):
        column = replace(BoundsRow.columns()["exact"], label="steepest head")
        heads = (model.head for model in models)
        yield column, tuple(h and f"{significant(h.exact)} ({h.layer}.{h.head})" for h in heads)
    if any(model.fragile is not None for model in models):
        column = replace(AttentionRow.columns()["intermediate"], label="fragile", format=".0%")
        yield column, tuple(model.fragile for model in models)


def _difference(difference: Difference | None) -> str | None:
    """Write a difference with its limits; the best model has none."""
    if difference is None:
        return None
    unit = difference.unit
    ends = difference.low, difference.high
    value, low, high = (amount(each, unit) for each in (difference.estimate, *ends))
    if not all(map(math.isfinite, ends)):
        return f"{value} (too few samples)"
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
            replace(JacobianRow.columns()["median"], label="median ||J||"),
            tuple(each.median if each else None for each in known),
            tuple(each.low if each else None for each in known),
            tuple(each.high if each else None for each in known),
        )

    def shown(self) -> Shown:
        """Write the limits behind each figure."""
        ends = zip(self.values, self.low, self.high, strict=True)
        return self.column, tuple(self._cell(*each) for each in ends)

    def _cell(self, value: float | None, low: float | None, high: float | None) -> Any:
        if value is None or low is None or high is None:
            return value
        first, last = text(low, self.column), text(high, self.column)
        unit = "%" if first.endswith("%") else ""
        return f"{text(value, self.column)} ({first.removesuffix(unit)} to {last})"


def _scatter(models: Sequence[Ranked], x: _Axis, y: _Axis) -> Scatter:
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
    title = pretty(f"{y.column.label}, against {x.column.label}")
    title = title[0].upper() + title[1:]
    return Scatter(title, x.column, y.column, tuple(points), log=False, diagonal=False)


def _how(ranking: Ranking) -> str:
    """Say what models are ranked by, and what tells them apart."""
    by = BY.get(ranking.criterion.partition("@")[0], ranking.criterion)
    by += f", {ranking.ball}" if ranking.ball and by != ranking.criterion else ""
    wide = f", so wide that with 95 % none of {ranking.pairs} pairs is told apart by chance (Holm)"
    return (
        f"Ranked by {by}. In brackets: 95 % limits, of differences by paired samples"
        f"{wide if ranking.pairs > 1 else ''}. Models are not distinguishable where 0 is "
        "within. A model's rank is 1 and the number of models that are shown to be better."
    )
