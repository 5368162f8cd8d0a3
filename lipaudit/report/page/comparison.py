"""The page of a comparison: its opening, and its chapters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lipaudit.gate.changes import Comparison, HeadChange, Pair
from lipaudit.gate.verdicts import VerdictStatus, amount
from lipaudit.measures.registry import find_column
from lipaudit.report.blocks import (
    Block,
    Chapter,
    Document,
    Paragraph,
    list_notes,
    make_table,
)
from lipaudit.report.page.chapters import map_heads
from lipaudit.report.page.document import MORE, list_warnings, make_pages
from lipaudit.report.page.facts import find_places, open_page
from lipaudit.report.page.ranking import format_change_limits
from lipaudit.report.page.rows import FIT, TOP
from lipaudit.report.page.samples import list_names
from lipaudit.tables import Column, Note, Report
from lipaudit.tables.trials import FLAGS

FIRST: tuple[VerdictStatus, ...] = ("regressed", "improved", "inconclusive", "unchanged")
"""Verdicts, the most severe first."""
FEW = 3
"""Number of samples and heads on one screen; it has twice as many figures."""
NORM = "jacobian.norm"
Cells = list[tuple[Column | str, Iterable[Any]]]


def make_comparison_page(
    comparison: Comparison, reports: Sequence[Report], *, short: bool
) -> Document:
    """Return the page of a comparison: what changed, then the reports side by side.

    Args:
        comparison: the comparison.
        reports: the compared reports.
        short: for one screen: without samples, heads and sections.
    """
    pairs, several = comparison.pairs, len(comparison.pairs) > 1
    places = {name: place for report in reports for name, place in find_places(report).items()}
    counts, chapters, warnings = [], list[Chapter](), list_warnings(reports)
    for i, pair in enumerate(pairs):
        lead, of = (f"{pair.new}: ", f" ({pair.new})") if several else ("", "")
        counts.append(lead + _count_verdicts(pair))
        refused: dict[str, list[str]] = {}
        for verdict in pair.verdicts:
            if verdict.reason:
                refused.setdefault(verdict.reason, []).append(verdict.metric)
        # Conditions that differ, and the metrics that they exclude.
        excluded = (f"not compared, {why}: {', '.join(names)}" for why, names in refused.items())
        texts = (*pair.warnings, *excluded)
        warnings += [Note(level="warning", code="differs", text=lead + text) for text in texts]
        chapters += (
            Chapter(f"{name}-{i + 1}" if several else name, title, blocks)
            for name, title, blocks in (
                (
                    "change",
                    f"What changed from {pair.old} to {pair.new}?",
                    _show_figures(pair, short=short),
                ),
                (
                    "samples",
                    f"Which samples changed?{of}",
                    _show_samples(pair, places, FEW if short else FIT),
                ),
                (
                    "heads",
                    f"Which heads changed?{of}",
                    _show_heads(pair, FEW if short else TOP),
                ),
            )
            if blocks
        )
    data = dict.fromkeys(f"{r.run.data.spec}, {r.run.data.samples} samples" for r in reports)
    old, *new = comparison.models
    facts = [("old", old), *(("new", name) for name in new), ("data", "; ".join(data))]
    worse = any(verdict.status == "regressed" for pair in pairs for verdict in pair.verdicts)
    answer = Paragraph(" ".join(counts), "broken" if worse else "answer")
    whole = (open_page(answer, "", facts, warnings), *chapters)
    end = Chapter("", "", (Paragraph(MORE),))
    page = Document("", (*whole, end)) if short else make_pages(reports, whole)
    which = f"{len(pairs)} models" if several else pairs[0].new
    return replace(page, title=f"lipaudit: {which} against {pairs[0].old}")


def _count_verdicts(pair: Pair) -> str:
    """Count the verdicts, and name what regressed."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    counts = Counter(verdict.status for verdict in judged)
    listed = [f"{counts[status]} {status}" for status in FIRST if counts[status]]
    refused = sum(bool(verdict.reason) for verdict in pair.verdicts)
    listed += [f"{refused} not compared"] if refused else []
    worse = [f"{v.metric} {v.name}".rstrip() for v in judged if v.status == "regressed"]
    more = f" and {len(worse) - FEW} more" if len(worse) > FEW else ""
    regressed = f" Regressed: {'; '.join(worse[:FEW])}{more}." if worse else ""
    return f"Of {len(judged) + refused} figures: {', '.join(listed)}.{regressed}"


# Chapters


def _show_figures(pair: Pair, *, short: bool) -> list[Block]:
    """Show the verdicts, the most severe first, and note what permits the comparison."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    judged.sort(key=lambda verdict: FIRST.index(verdict.status))
    rows = judged[: 2 * FEW if short else None]
    texts = [verdict.texts for verdict in rows]
    cells: Cells = [
        ("metric", [f"{verdict.metric} {verdict.name}".rstrip() for verdict in rows]),
        ("verdict", [verdict.status for verdict in rows]),
        ("old", [each["baseline"] or None for each in texts]),
        ("new", [each["current"] or None for each in texts]),
        ("change", [each["change"] or None for each in texts]),
    ]
    cells += (
        ()
        if short
        else [
            ("paired", [each["paired"] or None for each in texts]),
            ("95 % limits", [format_change_limits(verdict) or None for verdict in rows]),
            ("samples", [verdict.samples or None for verdict in rows]),
        ]
    )
    if not short and any(verdict.mcnemar is not None for verdict in rows):
        cells.append(("lost", [verdict.lost for verdict in rows]))
        cells.append(("gained", [verdict.gained for verdict in rows]))
        cells.append(("McNemar", [verdict.mcnemar for verdict in rows]))
    moved = frozenset(i for i, v in enumerate(rows) if v.status in ("regressed", "improved"))
    title = f"The first {len(rows)} of {len(judged)}" if len(rows) < len(judged) else ""
    blocks: list[Block] = [make_table(title, cells, strong=moved)] if rows else []
    remarks = () if short else pair.notes
    notes = (Note(level="info", code="differs", text=text) for text in remarks)
    return [*blocks, *list_notes(notes)]


def _read_change(head: HeadChange) -> float | None:
    """Return the paired change of a head, else the change of its two figures."""
    return head.change if head.paired is None else head.paired


def rank_heads(changes: Sequence[HeadChange]) -> list[HeadChange]:
    """Return the heads that moved, the largest change first; ratios up and down count equally."""

    def size(head: HeadChange) -> float:
        value = _read_change(head)
        if value is None or math.isnan(value):
            return -1.0
        # Halved and doubled heads moved equally far.
        return abs(math.log1p(value)) if head.unit == "%" and value > -1 else abs(value)

    return [head for head in sorted(changes, key=size, reverse=True) if size(head) >= 0]


def _show_heads(pair: Pair, most: int) -> list[Block]:
    """Show the heads that moved most; unless they are few, also the changes of all as maps."""
    groups: dict[str, list[HeadChange]] = {}
    for head in pair.heads:
        groups.setdefault(head.metric.rpartition(":")[0], []).append(head)
    if not groups:
        return []
    first, changes = next(iter(groups.items()))
    ranked = rank_heads(changes)
    shown = ranked if most > FEW and len(ranked) <= FIT else ranked[:most]
    cells: Cells = [
        ("head", [f"{head.layer}.{head.head}" for head in shown]),
        ("change", [amount(_read_change(head), head.unit) for head in shown]),
        ("95 % limits", [format_change_limits(head) or None for head in shown]),
        ("p (Holm)", [head.p_adjusted for head in shown]),
        ("stands", [None if head.p_adjusted is None else head.stands for head in shown]),
    ]
    maps = []
    for metric, group in groups.items() if most > FEW else ():
        column, unit = find_column(metric), group[0].unit
        heads = {(head.layer, head.head): head for head in group}
        both = [heads.get((head.layer, head.head)) for head in shown]
        for when in ("old", "new"):
            label = f"{column.label}, {when}"
            cells.append((replace(column, label=label), [h and getattr(h, when) for h in both]))
        times, how = {"%": (1.0, "+.1%"), "pp": (100.0, "+.1f"), "": (1.0, "+.3g")}[unit]
        known = {place: _read_change(head) for place, head in heads.items()}
        values = {k: None if value is None else value * times for k, value in known.items()}
        meaning = "New value over old value, sample by sample."
        change = Column("change", meaning, unit.strip("%"), how, status=column.status)
        maps.append(map_heads(f"{metric}: change of every head", values, change, centre=0.0))
    part = f" ({len(shown)} of {len(ranked)})" if len(shown) < len(ranked) else ""
    strong = frozenset(i for i, head in enumerate(shown) if head.stands)
    table = make_table(f"Heads that moved most{part}, by {first}", cells, strong=strong)
    proven = sum(head.stands for head in changes)
    count = f"{proven} of {len(changes)} changes are proven (column stands)."
    return [Paragraph(count), table, *maps]


def _show_samples(pair: Pair, places: Mapping[str, str], most: int) -> list[Block]:
    """Show the samples whose result changed, with their figures before and after."""
    flipped = [sample for sample in pair.samples if sample.lost or sample.gained]
    shown = flipped[:most]
    became = [
        "; ".join([f"{name}: yes → no" for name in s.lost] + [f"{n}: no → yes" for n in s.gained])
        for s in shown
    ]
    cells: Cells = [*list_names([sample.id for sample in shown], places), ("became", became)]
    counts = Counter(metric for sample in pair.samples for metric in sample.figures)
    # Columns with most samples come first; norms come before others.
    for metric in sorted(counts, key=lambda metric: (-counts[metric], metric != NORM)):
        name, _, trial = metric.partition("@")
        both = [sample.figures.get(metric, (None, None)) for sample in shown]
        # A figure is shown if half of the samples have it; yes and no are in the column before.
        known = most > FEW and 2 * sum(metric in sample.figures for sample in shown) >= len(shown)
        for end, when in (
            enumerate(("old", "new")) if known and name.split(".")[-1] not in FLAGS else ()
        ):
            column = find_column(metric)
            label = ", ".join(filter(None, (column.label, trial, when)))
            cells.append((replace(column, label=label), [values[end] for values in both]))
    part = f" ({len(shown)} of {len(flipped)})" if len(shown) < len(flipped) else ""
    return [make_table(f"Samples that changed{part}", cells)] if shown else []
