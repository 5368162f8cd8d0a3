"""The ranking of several models in words, and as a table with their scorecards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lipaudit.gate.standings import Ranking
from lipaudit.gate.verdicts import Verdict, amount
from lipaudit.report.blocks import Block, Chapter, Paragraph, list_notes, make_table
from lipaudit.report.page.scorecard import list_lines
from lipaudit.tables import Column, Report, model_labels

FEW = 4
"""Number of figures of each scorecard on one screen."""


def make_ranking_chapter(
    ranking: Ranking, reports: Sequence[Report], *, short: bool = False
) -> Chapter:
    """Return the chapter of the ranking: a row for every model, and the criterion."""
    models = ranking.models
    cells: list[tuple[Column | str, Iterable[Any]]] = [("model", [each.model for each in models])]
    if ranking.criterion:
        cells.insert(0, ("rank", [model.rank for model in models]))
        cells.append(("outcome", [model.outcome for model in models]))
        cells.append(("difference", [_format_difference(model.difference) for model in models]))
    # The figures of the scorecards, a column each.
    names = zip(model_labels(reports), reports, strict=True)
    cards = {name: {line.label: line for line in list_lines(report)} for name, report in names}
    labels = list(dict.fromkeys(label for card in cards.values() for label in card))
    for label in labels[: FEW if short else None]:
        lines = [cards[model.model].get(label) for model in models]
        column = replace(next(line.column for line in lines if line), label=label)
        cells.append((column, [line and line.value for line in lines]))
    keys = 2 if ranking.criterion else 1
    blocks: list[Block] = [make_table("", cells, keys=keys)]
    if ranking.criterion:
        wide = (
            f", each corrected for {ranking.compared} comparisons" if ranking.compared > 1 else ""
        )
        text = f"Ranked by {ranking.criterion}. Limits of differences: 95 %, paired{wide}."
        blocks.append(Paragraph(text))
    title = "Which model is the most robust?" if ranking.criterion else "The models, in order"
    return Chapter("ranking", title, (*blocks, *list_notes(ranking.notes)))


def describe_ranking(ranking: Ranking) -> str:
    """Describe which models are best, behind or not distinguishable; empty if not ranked."""
    named: dict[tuple[str, str], list[str]] = {}
    for model in ranking.models:
        reason = f" ({model.reason})" if model.reason else ""
        named.setdefault((model.outcome, reason), []).append(model.model)
    return " ".join(
        f"{outcome.capitalize()}: {', '.join(models)}{reason}."
        for (outcome, reason), models in named.items()
        if outcome
    )


def _format_difference(difference: Verdict | None) -> str | None:
    """Write a difference with its limits; the best model has none."""
    if difference is None:
        return None
    value = difference.paired if difference.samples else difference.change
    limits = format_change_limits(difference)
    return amount(value, difference.unit) + (f" ({limits})" if limits else "")


def format_change_limits(change: Verdict) -> str:
    """Format the limits of a paired change, or the reason why there are none."""
    if change.high == math.inf and change.low in (-1.0, -math.inf):
        return "too few samples"
    return change.texts["limits"]
