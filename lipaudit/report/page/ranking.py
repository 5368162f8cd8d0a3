"""Several models ranked: who is best, in words and as a table, beside their scorecards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lipaudit.gate.contests import Difference
from lipaudit.gate.ranking import Ranked, Ranking
from lipaudit.gate.verdicts import amount
from lipaudit.report.blocks import Block, Brief, Chapter, Notes, Paragraph, Table
from lipaudit.report.cells import significant, text
from lipaudit.report.draw.layout import scored
from lipaudit.report.page.scorecard import scorecard
from lipaudit.report.page.views.common import MODEL, interval
from lipaudit.results import AttentionRow, BoundsRow, Column, JacobianRow, Report
from lipaudit.results.history import KINDS

RANK = Column("rank", "One more than models are shown to be better.", format="d", domain="")
OUTCOME = Column("outcome", "What the paired samples show against the best.", format="s")
DIFFERENCE = Column("difference", "From the best, sample by sample.", format="s")
TOGETHER = Column("95 % together", "Limits of the differences of all pairs at once.", format="s")
WILSON = Column("95 % Wilson", "Limits of a share.", format="s")
MEDIAN = Column("95 % of median", "Order statistics.", format="s")
FIGURE = Column("figure", "A line of the scorecards.", format="s")
SHORT = {
    "not distinguishable from the best": "not distinguishable",
    "behind the best": "behind",
}
"""Outcomes where what they are against is the best by itself."""


@dataclass(frozen=True)
class _Shown:
    """A column, its cell for each model, and the limits of each, which may be a column as well."""

    column: Column
    cells: tuple[Any, ...]
    limits: Column | None = None
    ranges: tuple[str | None, ...] = ()

    def columns(self, *, short: bool) -> Iterator[tuple[Column, tuple[Any, ...]]]:
        """Yield one column, with the limits behind the figures; if not short, a second of them."""
        if self.limits is None or not short:
            yield self.column, self.cells
            if self.limits:
                yield self.limits, self.ranges
            return
        texts = (None if cell is None else text(cell, self.column) for cell in self.cells)
        joined = (
            said and f"{said} ({between})" if between else said
            for said, between in zip(texts, self.ranges, strict=True)
        )
        yield self.column, tuple(joined)


def chapter(ranking: Ranking, *, short: bool = False) -> Chapter:
    """Say who is best and what is known of the order, with a row for every model.

    Args:
        ranking: of the models.
        short: as of `table`.
    """
    said = " ".join(said_of(ranking))
    blocks: tuple[Block, ...] = (
        *([Paragraph(said)] if said else []),
        table(ranking, short=short),
        *([Paragraph(_how(ranking, short=short))] if ranking.criterion else []),
        *([Notes(ranking.notes)] if ranking.notes else []),
    )
    return Chapter("ranking", "Ranking", blocks)


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


def table(ranking: Ranking, *, short: bool = False) -> Table:
    """Tabulate the models, the best first, a row each.

    Args:
        ranking: of the models.
        short: whether limits stand behind their figures, not in columns of their own.
    """
    columns = [each for shown in _columns(ranking) for each in shown.columns(short=short)]
    return Table(
        title="",
        columns=tuple(column for column, _ in columns),
        rows=tuple(zip(*(cells for _, cells in columns), strict=True)),
        keys=2 if ranking.criterion else 1,
    )


def brief(ranking: Ranking, reports: Sequence[Report]) -> Brief:
    """Return the ranking for a pull request."""
    block, data = table(ranking), reports[0].run.data
    return Brief(
        title=f"lipaudit: {len(ranking.models)} models",
        remarks=(f"{data.samples} samples of {data.spec}", *said_of(ranking)),
        heads=tuple(column.label for column in block.columns),
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
    card = scorecard(report)
    lines = card.lines if card else ()
    for line, (_, figure, said, _) in zip(lines, scored(card)[0] if card else (), strict=True):
        yield line.label, f"{figure}; {said}".removesuffix("; ")


def _columns(ranking: Ranking) -> Iterator[_Shown]:
    models = ranking.models
    if ranking.criterion:
        yield _Shown(RANK, tuple(model.rank for model in models))
    yield _Shown(MODEL, tuple(model.model for model in models))
    if ranking.criterion:
        yield _Shown(OUTCOME, tuple(SHORT.get(m.outcome, m.outcome) for m in models))
        yield _differences(models)
    for kind, ball in dict.fromkeys((a.kind, a.ball) for model in models for a in model.accuracy):
        yield _accuracies(models, kind, ball)
    if any(model.norm for model in models):
        yield from _norms(models)
    if any(model.head for model in models):
        column = replace(BoundsRow.columns()["exact"], label="steepest head")
        heads = (model.head for model in models)
        named = (h and f"{significant(h.exact)} ({h.layer}.{h.head})" for h in heads)
        yield _Shown(column, tuple(named))
    if any(model.fragile is not None for model in models):
        column = replace(AttentionRow.columns()["intermediate"], label="fragile", format=".0%")
        yield _Shown(column, tuple(model.fragile for model in models))


def _differences(models: Sequence[Ranked]) -> _Shown:
    """Show how far each model is from the best."""
    given = [model.difference for model in models]
    cells = tuple(d and amount(d.estimate, d.unit) for d in given)
    return _Shown(DIFFERENCE, cells, TOGETHER, tuple(map(_between, given)))


def _between(difference: Difference | None) -> str | None:
    if difference is None:
        return None
    low, high = (amount(end, difference.unit) for end in (difference.low, difference.high))
    return f"{low.removesuffix(difference.unit)} to {high}"


def _accuracies(models: Sequence[Ranked], kind: str, ball: str) -> _Shown:
    """Show an accuracy of every model, with its limits."""
    known = [
        next((a for a in model.accuracy if (a.kind, a.ball) == (kind, ball)), None)
        for model in models
    ]
    label, column = KINDS[kind]
    return _Shown(
        replace(column, label=", ".join(filter(None, (label, ball)))),
        tuple(each and each.share for each in known),
        WILSON,
        tuple(interval(a.low, a.high).replace("%", "", 1) if a else None for a in known),
    )


def _norms(models: Sequence[Ranked]) -> Iterator[_Shown]:
    """Show the median norm with its limits, and the 95th percentile."""
    columns, norms = JacobianRow.columns(), [model.norm for model in models]
    ends = [(norm.low, norm.high) if norm else (None, None) for norm in norms]
    yield _Shown(
        replace(columns["median"], label="median ||J||"),
        tuple(norm and norm.median for norm in norms),
        MEDIAN,
        tuple(
            None if low is None or high is None else f"{significant(low)} to {significant(high)}"
            for low, high in ends
        ),
    )
    yield _Shown(replace(columns["p95"], label="p95 ||J||"), tuple(n and n.p95 for n in norms))


def _how(ranking: Ranking, *, short: bool) -> str:
    """Say what models are ranked by, and what tells them apart."""
    if ranking.criterion.startswith("jacobian."):
        by = "the median norm of the model's Jacobian"
    else:
        kind = "certified" if ranking.criterion.startswith("certify.certified") else "attacked"
        by = f"accuracy {KINDS[kind][0]}, {ranking.ball}"
    together = f" for all {ranking.pairs} pairs together (Holm)" if ranking.pairs > 1 else ""
    brackets = " In brackets: 95 % limits." if short else ""
    return (
        f"Ranked by {by}.{brackets} Differences are of paired samples; their limits hold"
        f"{together}, and where 0 is within, models are not distinguishable. Rank: one more than "
        "models are shown to be better."
    )
