"""Every figure, sample and head of a comparison: three chapters for every other model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lipaudit.gate.comparison import Comparison, Pair
from lipaudit.gate.comparison.verdicts import ABSENT
from lipaudit.gate.verdicts import Verdict
from lipaudit.report.blocks import Block, Chapter, Notes, Paragraph, Table
from lipaudit.report.page.comparison import attribution, heads, samples
from lipaudit.report.page.remarks import merged
from lipaudit.results import Column, Note

HOW = (
    "Change: of the two figures. Paired: what is tested, each sample against itself, with the "
    "limits of a 95 % interval for each figure alone; figures without limits are compared as they "
    "are. All are over the samples that both reports have."
)

COLUMNS = {
    "metric": "s",
    "verdict": "s",
    "old": "",
    "new": "",
    "change": "",
    "paired": "",
    "95 % limits": "",
    "samples": "",
}
"""Columns of the figures: `s` is text, what is empty is a number as it is written."""


def chapters(comparison: Comparison, places: Mapping[str, str]) -> tuple[Chapter, ...]:
    """Return three chapters for every model but the first: figures, samples, heads; then layers.

    Args:
        comparison: of reports.
        places: where their samples are found, by id.
    """
    of = ": {}" if len(comparison.pairs) > 1 else ""
    changes = (
        Chapter(f"{name}-{i}", title, tuple(shown))
        for i, pair in enumerate(comparison.pairs)
        for name, title, shown in (
            ("change", f"{pair.new} against {pair.old}", _figures(pair)),
            (
                "samples",
                f"Samples, old and new{of.format(pair.new)}",
                samples.blocks(pair, places),
            ),
            ("heads", f"Heads, old and new{of.format(pair.new)}", heads.blocks(pair)),
        )
        if shown
    )
    return (*changes, *attribution.chapters(comparison.attributions))


def _figures(pair: Pair) -> list[Block]:
    judged = [verdict for verdict in pair.verdicts if not verdict.reason]
    texts = [("differs", text) for text in pair.notes]
    texts += [
        ("not-compared", f"not compared, {v.reason}: {v.metric}")
        for v in pair.verdicts
        if v.reason.endswith(ABSENT)
    ]
    notes = merged(Note(level="info", code=code, text=text) for code, text in texts)
    return [Paragraph(HOW), _table(judged), *([Notes(notes)] if notes else [])]


def _table(verdicts: Sequence[Verdict]) -> Table:
    return Table(
        title="",
        columns=tuple(Column(label=k, meaning="", format=how) for k, how in COLUMNS.items()),
        rows=tuple(map(_row, verdicts)),
        strong=frozenset(
            i for i, v in enumerate(verdicts) if v.status in ("regressed", "improved")
        ),
    )


def _row(verdict: Verdict) -> tuple[str | None, ...]:
    metric = f"{verdict.metric} {verdict.name}".rstrip()
    texts = verdict.texts | {"limits": heads.limits(verdict, verdict.unit)}
    return (metric, verdict.status, *(text or None for text in texts.values()))
