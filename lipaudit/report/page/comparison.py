"""A comparison as the first chapters of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lipaudit.gate.comparison import Comparison, HeadRatios, Pair
from lipaudit.gate.verdicts import Verdict
from lipaudit.report.blocks import Block, Chapter, Heatmap, Notes, Paragraph, Table
from lipaudit.report.page.remarks import merged
from lipaudit.results import Column, Note, row_types

HOW = (
    "Change: of the two figures. Paired: what is tested, each sample against itself, with the "
    "limits of a 95 % interval for each figure alone; figures without limits are compared as they "
    "are. All are over the samples that both reports have."
)


def chapters(comparison: Comparison) -> tuple[Chapter, ...]:
    """Return a chapter for every model but the first: figures, heads, what else differs."""
    return tuple(
        Chapter(f"change-{i}", f"{pair.new} against {pair.old}", tuple(_blocks(pair)))
        for i, pair in enumerate(comparison.pairs)
    )


def _blocks(pair: Pair) -> list[Block]:
    judged = [verdict for verdict in pair.verdicts if not verdict.reason]
    notes = [_note("differs", text) for text in pair.notes]
    notes += [
        _note("not-compared", f"not compared, {verdict.reason}: {verdict.metric}")
        for verdict in pair.verdicts
        if verdict.reason
    ]
    maps = map(_heatmap, pair.ratios)
    return [Paragraph(HOW), _table(judged), *maps, *([Notes(merged(notes))] if notes else [])]


def _note(code: str, text: str) -> Note:
    return Note(level="info", code=code, text=text)


def _table(verdicts: Sequence[Verdict]) -> Table:
    labels = ("metric", "verdict", "old", "new", "change", "paired", "95 % limits", "samples")
    return Table(
        title="",
        columns=tuple(Column(label=label, meaning="", format="s") for label in labels),
        rows=tuple(map(_row, verdicts)),
        strong=frozenset(
            i for i, v in enumerate(verdicts) if v.status in ("regressed", "improved")
        ),
    )


def _row(verdict: Verdict) -> tuple[str | None, ...]:
    metric = f"{verdict.metric} {verdict.name}".rstrip()
    return (metric, verdict.status, *(text or None for text in verdict.texts.values()))


def _heatmap(ratios: HeadRatios) -> Heatmap:
    measure, _, name = ratios.metric.rpartition(".")
    status = row_types()[measure].columns()[name].status
    return Heatmap(
        title=f"{ratios.metric}: change of every head",
        values=tuple(
            tuple(None if v is None else math.expm1(v) for v in line) for line in ratios.values
        ),
        rows=tuple(map(str, ratios.layers)),
        columns=tuple(map(str, ratios.heads)),
        column=Column("change", "New over old, less one.", format="+.1%", status=status),
    )
