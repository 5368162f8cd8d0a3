"""The ranking of several models in words and as a table, and their scorecards side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lipaudit.gate.standings import Ranking
from lipaudit.gate.verdicts import Verdict, amount
from lipaudit.measures import ATTENTION_TABLE, BOUNDS_TABLE, JACOBIAN_TABLE
from lipaudit.report.blocks import (
    Block,
    Chapter,
    Notes,
    Paragraph,
    Table,
    make_table,
)
from lipaudit.report.cells import format_significant, format_value, format_with_limits
from lipaudit.report.page.scorecard import make_scorecard, name_accuracy
from lipaudit.report.page.views import MODEL
from lipaudit.tables import Column, Report
from lipaudit.tables.summary import KINDS

RANK = Column(
    "rank", "1 for the best and models not distinguishable from it.", format="d", domain=""
)
OUTCOME = Column("outcome", "Result of the paired comparison with the best.", format="s")
DIFFERENCE = Column("difference", "Difference from the best, sample by sample.", domain="")
FIGURE = Column("figure", "A figure of the scorecards.", format="s")
SHORT = {
    "not distinguishable from the best": "not distinguishable",
    "behind the best": "behind",
}
"""Short names of outcomes for a table column."""
BY = {
    "attack.robust": "robust accuracy",
    "certify.robust": "robust accuracy",
    "certify.certified": "certified accuracy",
    "jacobian.norm:median": "the median norm of the model's Jacobian",
}
"""Metrics in words."""


def make_ranking_chapter(ranking: Ranking) -> Chapter:
    """Return the chapter of the ranking: a row for every model, and the criterion."""
    blocks: list[Block] = [tabulate_ranking(ranking)]
    if ranking.criterion:
        by = BY.get(ranking.criterion.partition("@")[0], ranking.criterion)
        by += f", {ranking.ball}" if ranking.ball and by != ranking.criterion else ""
        wide = f", each corrected for {ranking.compared} comparisons with the best"
        text = (
            f"Ranked by {by}. In brackets: 95 % limits, of differences by paired samples"
            f"{wide if ranking.compared > 1 else ''}. Models are not distinguishable if 0 is "
            "within them. Rank 1: the best, and models that are not distinguishable from it."
        )
        blocks.append(Paragraph(text))
    blocks += [Notes(ranking.notes)] if ranking.notes else []
    title = "Which model is the most robust?" if ranking.criterion else "The models, in order"
    return Chapter("ranking", title, tuple(blocks))


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
    models, ranked = ranking.models, bool(ranking.criterion)
    cells: list[tuple[Column, Sequence[Any]]] = [(MODEL, [model.model for model in models])]
    if ranked:
        cells.insert(0, (RANK, [model.rank for model in models]))
        cells.append((OUTCOME, [SHORT.get(m.outcome, m.outcome) for m in models]))
        cells.append((DIFFERENCE, [_format_difference(model.difference) for model in models]))
    summaries = [model.summary for model in models]
    for kind, ball in dict.fromkeys((a.kind, a.ball) for each in summaries for a in each.accuracy):
        column = replace(KINDS[kind][1], label=name_accuracy(kind, ball))
        shares = [
            next((a for a in each.accuracy if (a.kind, a.ball) == (kind, ball)), None)
            for each in summaries
        ]
        limits = [a and format_with_limits(a.share, a.low, a.high, column) for a in shares]
        cells.append((column, limits))
    norms, columns = [each.norms for each in summaries], JACOBIAN_TABLE.columns
    if any(norms):
        median = replace(columns["median"], label="median ||J||")
        limits = [n and format_with_limits(n.median, n.low, n.high, median) for n in norms]
        cells.append((median, limits))
        cells.append((replace(columns["p95"], label="p95 ||J||"), [n and n.p95 for n in norms]))
    heads = [each.heads and each.heads.steepest[0] for each in summaries]
    if any(heads):
        column = replace(BOUNDS_TABLE.columns["exact"], label="steepest head")
        names = [h and f"{format_significant(h.exact)} ({h.layer}.{h.head})" for h in heads]
        cells.append((column, names))
    if any(each.fragile for each in summaries):
        intermediate = ATTENTION_TABLE.columns["intermediate"]
        column = replace(intermediate, label="fragile", format=".0%")
        cells.append((column, [each.fragile and each.fragile.share for each in summaries]))
    return make_table("", cells, keys=1 + ranked)


def tabulate_scorecards(names: Sequence[str], reports: Sequence[Report]) -> Table:
    """Return the scorecards of several reports side by side, a line for each figure."""
    cards = []
    for report in reports:
        card = make_scorecard(report)
        lines = card.lines if card else ()
        cards.append({line.label: format_value(line.value, line.column) for line in lines})
    labels = list(dict.fromkeys(label for card in cards for label in card))
    models = zip(names, cards, strict=True)
    shown = ((Column(k, "", format="s"), [card.get(n) for n in labels]) for k, card in models)
    return make_table("", [(FIGURE, labels), *shown])


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
